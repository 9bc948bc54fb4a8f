"""D10: a RETURNING statement that is not read to its end keeps the write lock; the store always reads it to the end."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from alkstore import ScheduleOpts, Store, StoreError
from tests.alkstore.engines.enginekit import engine_of, marked_store, marks

UPDATE = "UPDATE marks SET part = part + 1 RETURNING name"


def test_an_unread_row_keeps_the_lock_while_no_transaction_seems_open(tmp_path: Path) -> None:
    """The fact that this is about."""
    path = tmp_path / "a.db"
    with (
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as one,
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other,
    ):
        one.execute("PRAGMA journal_mode = WAL")
        one.execute("CREATE TABLE t (x)")
        one.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])
        cursor = one.execute("UPDATE t SET x = x + 10 RETURNING x")
        assert cursor.fetchone() == (11,)
        assert not one.in_transaction
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO t VALUES (3)")
        cursor.fetchall()
        other.execute("INSERT INTO t VALUES (3)")


@pytest.fixture(params=["threads", "inline", "apsw"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    options: dict[str, Any] = {"inline": request.param == "inline"}
    if request.param == "apsw":
        options["driver"] = "apsw"
    async with marked_store(tmp_path / "a.db", **options) as store:
        yield store


def write_at_once(store: Store) -> None:
    """Another connection, of the same copy of SQLite, writes without waiting even a moment."""
    connection = engine_of(store).driver.connect(store.target)
    try:
        connection.all("INSERT INTO marks (name) VALUES ('other')")
    finally:
        connection.close()


async def test_another_connection_may_write_at_once_after_a_claim_of_one_job_of_two(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many([1, 2])
    assert len(await queue.claim("w", 1)) == 1
    write_at_once(store)


async def test_a_unit_that_looks_at_the_first_row_only_leaves_no_row_unread(store: Store) -> None:
    for name in "abc":
        await engine_of(store).run(marks(name))
    assert await engine_of(store).run(lambda tx: tx.one(UPDATE)) == ("a",)
    write_at_once(store)


async def test_after_every_call_another_connection_may_write_at_once(store: Store) -> None:
    queue, lock = store.queue("q"), store.lock("l")
    await queue.enqueue_many([{"n": n} for n in range(8)])
    jobs = await queue.claim("w", 5)
    held = await lock.acquire(30)
    assert held is not None
    async with store.transaction() as tx:
        await tx.execute("INSERT INTO marks (name) VALUES ('a'), ('b')")
        await tx.execute(UPDATE)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: queue.enqueue(1, key="k"),
        lambda: queue.enqueue(1, key="k"),
        jobs[0].heartbeat,
        jobs[0].ack,
        lambda: jobs[1].retry("again"),
        lambda: jobs[2].fail("never"),
        lambda: queue.cancel_job(jobs[3].id),
        queue.counts,
        queue.sweep_expired,
        queue.pause,
        queue.resume,
        held.renew,
        held.release,
        lambda: store.schedule("s", "@every 1s", "q", None, ScheduleOpts(priority=1)),
        lambda: store.unschedule("s"),
        lambda: store.transact(lambda tx: tx.execute(UPDATE)),
        store.health,
    ]
    for call in calls:
        await call()
        write_at_once(store)


async def test_a_unit_that_fails_after_returning_rows_leaves_the_lock_free(store: Store) -> None:
    def work(tx: Any) -> None:
        tx.all(UPDATE)
        raise LookupError

    await engine_of(store).run(marks("a"))
    with pytest.raises(LookupError):
        await engine_of(store).run(work)
    with pytest.raises(StoreError):
        await store.transact(lambda tx: tx.execute("INSERT INTO marks (name) VALUES (NULL) RETURNING name"))
    write_at_once(store)
