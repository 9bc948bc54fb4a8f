"""Savepoints: a part of a transaction that may be undone, in both faces alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from operator import methodcaller
from typing import Any

import pytest
import trio

from alkstore import Store, StoreError, SyncTransaction
from tests.conformance.helpers import fails
from tests.conformance.transacting import ORDER, WRONG, faces, make_orders, stored, totals


class Undo(Exception):
    """What the tests raise to undo a savepoint."""


class Plain:
    """A `SyncTransaction` with the methods of a `Transaction`, so that one body serves for both."""

    def __init__(self, tx: SyncTransaction) -> None:
        self._tx = tx

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tx, name)

        async def call(*args: Any, **options: Any) -> Any:
            return method(*args, **options)

        return call

    @asynccontextmanager
    async def savepoint(self) -> Any:
        with self._tx.savepoint():
            yield


async def run(store: Store, face: str, body: Callable[[Any], Awaitable[None]]) -> None:
    """Run `body` in a transaction. With ``transact`` it must not wait for anything else, and does not."""
    if face == "transaction":
        async with store.transaction() as tx:
            await body(tx)
        return

    def function(tx: SyncTransaction) -> None:
        coroutine: Any = body(Plain(tx))
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("the body has waited")

    await store.transact(function)


def insert(total: int) -> Callable[[Any], Any]:
    return methodcaller("execute", f"INSERT INTO orders (total) VALUES ({total})")


async def undone(tx: Any, *calls: Callable[[Any], Any]) -> None:
    """Make the calls in a savepoint and undo them."""
    try:
        async with tx.savepoint():
            for call in calls:
                await call(tx)
            raise Undo
    except Undo:
        pass


def kept(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make the calls in a savepoint."""

    async def keep(tx: Any) -> None:
        async with tx.savepoint():
            for call in calls:
                await call(tx)

    return keep


@faces
async def test_a_savepoint_that_ends_well_is_part_of_the_transaction(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await insert(1)(tx)
        async with tx.savepoint():
            await insert(2)(tx)
        await insert(3)(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 2, 3]


@faces
async def test_a_savepoint_that_raises_is_undone_and_the_rest_is_committed(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await insert(1)(tx)
        await undone(
            tx, insert(2), methodcaller("enqueue", "q", 1), methodcaller("outbox_enqueue", "o", 1),
            methodcaller("schedule", "s", "@every 1h", "q"),
        )  # fmt: skip
        await insert(3)(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 3]
    assert await stored(store) == {"orders": 2, "jobs": 0, "messages": 0, "schedules": 0}


@faces
async def test_what_is_raised_goes_on_as_itself(store: Store, face: str) -> None:
    error = Undo("mine")

    async def body(tx: Any) -> None:
        async with tx.savepoint():
            raise error

    assert await fails(Undo, run, store, face, body) is error


@faces
async def test_savepoints_nest(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await insert(1)(tx)
        async with tx.savepoint():
            await insert(2)(tx)
            await undone(tx, insert(3), lambda tx: undone(tx, insert(4)), insert(5))
            async with tx.savepoint():
                await insert(6)(tx)
        await undone(tx, insert(7), kept(insert(8)))

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 2, 6]


@faces
async def test_many_savepoints_one_after_the_other(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        for n in range(50):
            if n % 2:
                await undone(tx, insert(n))
            else:
                await kept(insert(n))(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == list(range(0, 50, 2))


@faces
async def test_an_undone_savepoint_commits_nothing_if_the_transaction_raises(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await undone(tx, insert(1))
        await insert(2)(tx)
        raise Undo

    await make_orders(store)
    await fails(Undo, run, store, face, body)
    assert await totals(store) == []


@faces
async def test_a_failed_statement_is_mended_by_leaving_its_savepoint(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await insert(1)(tx)
        with pytest.raises(StoreError, match="nowhere"):
            await kept(insert(2), WRONG)(tx)
        await insert(3)(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 3]


@faces
async def test_a_failed_statement_is_mended_by_the_innermost_savepoint_that_raises(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        async with tx.savepoint():
            await insert(1)(tx)
            with pytest.raises(StoreError, match="nowhere"):
                async with tx.savepoint():
                    await WRONG(tx)
            await insert(2)(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 2]


@faces
async def test_a_savepoint_that_swallows_a_failed_statement_is_undone_and_says_so(store: Store, face: str) -> None:
    async def swallow(tx: Any) -> None:
        with pytest.raises(StoreError, match="nowhere"):
            await WRONG(tx)

    async def body(tx: Any) -> None:
        await insert(1)(tx)
        with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
            await kept(insert(2), swallow)(tx)
        await insert(3)(tx)

    await make_orders(store)
    await run(store, face, body)
    assert await totals(store) == [1, 3]


@faces
async def test_a_statement_that_failed_before_the_savepoint_is_not_mended_by_it(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        with pytest.raises(StoreError, match="nowhere"):
            await WRONG(tx)
        with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
            async with tx.savepoint():
                raise AssertionError("it has begun")

    await make_orders(store)
    await fails(StoreError, run, store, face, body)


@faces
async def test_a_key_that_was_undone_is_free_again(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        await undone(tx, methodcaller("enqueue", "q", "undone", key="k"))
        await tx.enqueue("q", "kept", key="k")

    await run(store, face, body)
    assert [job.payload for job in await store.queue("q").list()] == ["kept"]


@pytest.mark.parametrize("face", ["transaction"])  # a plain function cannot be cancelled
async def test_a_cancelled_savepoint_is_undone(store: Store, face: str) -> None:
    await make_orders(store)
    async with store.transaction() as tx:
        await insert(1)(tx)
        with trio.move_on_after(1):
            async with tx.savepoint():
                await insert(2)(tx)
                await trio.sleep_forever()
        await insert(3)(tx)
    assert await totals(store) == [1, 3]


@faces
async def test_orders_of_a_savepoint_are_seen_inside(store: Store, face: str) -> None:
    async def body(tx: Any) -> None:
        async with tx.savepoint():
            await ORDER(tx)
            assert await tx.execute("SELECT total FROM orders") == [(42,)]
        await undone(tx, insert(1))
        assert await tx.execute("SELECT total FROM orders") == [(42,)]

    await make_orders(store)
    await run(store, face, body)
