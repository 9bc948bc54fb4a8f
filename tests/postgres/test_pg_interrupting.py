"""A user's long statement is stopped at the time limit and by a cancellation, and nobody else's with it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio

from alkstore import Store, StoreError, TransactionTimeout
from alkstore.transaction import SyncTransaction
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place, eventually

LONG = "SELECT pg_sleep(60)"


async def _in_transaction(store: Store) -> None:
    async with store.transaction() as tx:
        await tx.enqueue("q", 1)
        await tx.execute(LONG)


async def _in_transact(store: Store) -> None:
    def plainly(tx: SyncTransaction) -> None:
        tx.enqueue("q", 1)
        tx.execute(LONG)

    await store.transact(plainly)


FACES: dict[str, Callable[[Store], Awaitable[Any]]] = {"transaction": _in_transaction, "transact": _in_transact}
faces = pytest.mark.parametrize("face", FACES.values(), ids=FACES)


@faces
async def test_at_the_time_limit_a_statement_is_stopped(
    place: Place, admin: Admin, face: Callable[[Store], Awaitable[Any]]
) -> None:
    async with place.open(transaction_timeout=0.5) as store:
        began = time.monotonic()
        await fails(TransactionTimeout, face, store)
        assert time.monotonic() - began < 3
        await eventually(
            lambda: not admin.rows("SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query = %s", LONG)
        )
        assert (await store.queue("q").counts()).ready == 0
        assert not admin.rows(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle'", place.schema
        )


async def test_cancelled_a_statement_is_stopped(place: Place, admin: Admin) -> None:
    async with place.open(transaction_timeout=60) as store:
        began = time.monotonic()
        with trio.move_on_after(0.3) as scope:
            await _in_transaction(store)
        assert scope.cancelled_caught
        assert time.monotonic() - began < 3
        assert (await store.queue("q").counts()).ready == 0


async def test_a_scope_within_the_body_stops_a_statement_too(place: Place) -> None:
    async def body() -> None:
        async with store.transaction() as tx:
            await tx.enqueue("q", 1)
            with trio.move_on_after(0.1) as scope:
                await tx.execute(LONG)
            assert scope.cancelled_caught

    async with place.open(transaction_timeout=60) as store:
        with trio.fail_after(10):
            error = await fails(StoreError, body)
        assert str(error).startswith("nothing was committed, since a statement failed")
        assert (await store.queue("q").counts()).ready == 0


async def test_what_comes_after_is_not_stopped(place: Place) -> None:
    """A request to stop that comes late must not meet the next statement on the connection."""
    async with place.open(connections=1, transaction_timeout=60) as store:
        for n in range(15):
            with trio.move_on_after(0.02 + n * 0.001):
                async with store.transaction() as tx:
                    await tx.execute("SELECT pg_sleep(0.02)")
                    await tx.execute("SELECT pg_sleep(0.02)")
            assert await store.transact(lambda tx: tx.execute("SELECT pg_sleep(0.01)")) == [("",)]
            await store.queue("q").enqueue(n)


async def test_a_statement_of_the_users_own_may_take_longer_than_the_stores(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alkstore.engines.postgres.engine.STATEMENT_S", 0.1)
    monkeypatch.setattr("alkstore.engines.postgres.engine.SILENT_AFTER_S", 0.1)
    async with place.open(busy_timeout=0.1, transaction_timeout=60) as store:
        async with store.transaction() as tx:
            await tx.execute("SELECT pg_sleep(2)")
        await store.transact(lambda tx: tx.execute("SELECT pg_sleep(2)"))


async def test_a_failed_statement_can_only_be_rolled_back(place: Place) -> None:
    async with place.open() as store:

        async def fail() -> None:
            async with store.transaction() as tx:
                await tx.enqueue("q", 1)
                with pytest.raises(StoreError):
                    await tx.execute("SELECT 1 / 0")

        await fails(StoreError, fail)
        async with store.transaction() as tx:
            await tx.enqueue("q", 2)
            with suppress(StoreError):
                async with tx.savepoint():
                    await tx.enqueue("q", 3)
                    await tx.execute("SELECT 1 / 0")
            await tx.enqueue("q", 4)
        handles = await store.queue("q").claim("w", 10)
        assert [handle.payload for handle in handles] == [2, 4]


async def test_a_users_statement_takes_psycopgs_placeholders(place: Place) -> None:
    async with place.open() as store, store.transaction() as tx:
        assert await tx.execute("SELECT %s::text", ("a%b",)) == [("a%b",)]
        assert await tx.execute("SELECT %(name)s::int + 1", {"name": 1}) == [(2,)]
        assert await tx.execute("SELECT '100%'") == [("100%",)]
        assert await tx.execute("CREATE TEMP TABLE of_mine (n int) ON COMMIT DROP") == []
        assert await tx.execute("INSERT INTO of_mine VALUES (1), (2) RETURNING n") == [(1,), (2,)]
        assert await tx.execute("UPDATE of_mine SET n = 3") == []
        with pytest.raises(StoreError, match="PostgreSQL's placeholders are %s"):
            async with tx.savepoint():
                await tx.execute("SELECT ?", (1,))


async def test_with_one_connection_nobody_waits_for_itself(place: Place) -> None:
    async with place.open(connections=1, transaction_timeout=60) as store:
        began = time.monotonic()
        async with store.transaction() as tx:
            await tx.enqueue("q", 1)
            for call in (store.queue("q").counts, lambda: store.get_job(1), lambda: store.queue("q").enqueue(2)):
                await fails(RuntimeError, call)
            await fails(RuntimeError, store.health)
        assert (await store.queue("q").counts()).ready == 1
        assert time.monotonic() - began < 10
