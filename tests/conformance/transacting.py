"""What the tests of transactions share: the same calls through both faces, and a table of the embedder's own."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest

from alkstore import Store
from tests.conformance.helpers import sql

FACES = ("transaction", "transact")
"""`Store.transaction` and `Store.transact`."""

faces = pytest.mark.parametrize("face", FACES)

ORDER = methodcaller("execute", "INSERT INTO orders (total) VALUES (42)")
WRONG = methodcaller("execute", "INSERT INTO nowhere VALUES (1)")

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


async def together(
    store: Store, face: str, *calls: Callable[[Any], Any], then: Callable[[], object] = lambda: None
) -> list[Any]:
    """Make the calls in one transaction, and call `then` before it ends; return what they have returned."""
    if face == "transaction":
        async with store.transaction() as tx:
            results = [await call(tx) for call in calls]
            then()
        return results

    def plainly(tx: object) -> list[Any]:
        results = [call(tx) for call in calls]
        then()
        return results

    return await store.transact(plainly)


async def make_orders(store: Store) -> None:
    """Make the embedder's own table."""
    statements = ("DROP TABLE IF EXISTS orders", "CREATE TABLE orders (total INTEGER UNIQUE)")
    await together(store, "transact", *(methodcaller("execute", statement) for statement in statements))


async def totals(store: Store) -> list[int]:
    """Return what is in the embedder's table."""
    (rows,) = await together(store, "transact", methodcaller("execute", "SELECT total FROM orders ORDER BY total"))
    return [total for (total,) in rows]


async def stored(store: Store) -> dict[str, int]:
    """Return how many rows there are of each kind: orders, jobs of the queue q, messages of the outbox o, schedules."""
    counts = await store.queue("q").counts()
    messages = await store.outbox("o").counts()
    return {
        "orders": len(await totals(store)),
        "jobs": counts.ready + counts.delayed + counts.leased + counts.dead,
        "messages": messages.ready + messages.delayed + messages.leased + messages.dead,
        "schedules": (await store.health()).schedules.total,
    }


async def clear(store: Store) -> None:
    """Delete all that `stored` counts."""
    await together(store, "transact", methodcaller("execute", "DELETE FROM orders"))
    for table in ("__alkstore_jobs", "__alkstore_scheduler_tasks"):
        await sql(store, f"DELETE FROM {table}")


NOTHING = {"orders": 0, "jobs": 0, "messages": 0, "schedules": 0}
ONE_OF_EACH = dict.fromkeys(NOTHING, 1)

EVERYTHING = (
    ORDER,
    methodcaller("enqueue", "q", {"n": 1}),
    methodcaller("outbox_enqueue", "o", {"n": 2}),
    methodcaller("schedule", "s", "@every 1h", "q"),
)
"""One row of each kind."""
