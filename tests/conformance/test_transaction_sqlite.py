"""What only SQLite does in a transaction: statements that roll back everything or are interrupted, failed commits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from alkstore import OutcomeUnknown, Store, StoreError, StoreFull, SyncTransaction, TransactionTimeout, open_store
from alkstore.engines.driver import Connection, DiskError
from alkstore.engines.feed import Feed
from alkstore.sql.tx import Params, Row, queue_topic
from tests.conformance.helpers import calm, fails
from tests.conformance.transacting import (
    ENDLESS,
    EVERYTHING,
    NOTHING,
    ORDER,
    faces,
    make_orders,
    stored,
    together,
    totals,
)


@pytest.fixture(params=["memory", "inline", "threads"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    target = ":memory:" if request.param == "memory" else tmp_path / "app.db"
    async with open_store(target, inline=request.param != "threads") as store:
        yield store


@pytest.fixture
async def orders(store: Store) -> Store:
    """A store with the embedder's table beside its own."""
    await make_orders(store)
    return store


@pytest.fixture(params=["sqlite3", "apsw"])
async def threaded(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A store whose statements run in a thread, so that one can be interrupted; its time limit is 0.1 s."""
    async with open_store(tmp_path / "app.db", transaction_timeout=0.1, driver=request.param) as store:
        yield store


async def usable(store: Store) -> bool:
    """Whether others can write."""
    with trio.fail_after(1):
        await store.queue("afterwards").enqueue(1)
    return True


class Faulty:
    """A connection on which something goes wrong."""

    def __init__(self, inner: Connection, *, fail: dict[str, BaseException], deaf: int = 0) -> None:
        self._inner, self._fail, self._deaf = inner, fail, deaf

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        if (error := self._fail.pop(sql, None)) is not None:
            raise error
        return self._inner.all(sql, params)

    def script(self, sql: str) -> None:
        self._inner.script(sql)

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def interrupt(self) -> None:
        if self._deaf > 0:
            self._deaf -= 1
        else:
            self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


def _writer(store: Store) -> Any:
    return cast(Any, store._context.engine).writer


def make_faulty(store: Store, *, fail: dict[str, BaseException] | None = None, deaf: int = 0) -> None:
    """Let these statements fail once on the writer's connection, and its first `deaf` interruptions go unheard."""
    writer = _writer(store)
    writer.connection = Faulty(writer.connection, fail=fail or {}, deaf=deaf)


@faces
async def test_at_the_time_limit_a_statement_is_interrupted(threaded: Store, face: str, real_time: None) -> None:
    with trio.fail_after(5), pytest.raises(TransactionTimeout, match=r"longer than 0.1 s"):
        await together(threaded, face, methodcaller("enqueue", "q", 1), methodcaller("execute", ENDLESS))
    assert (await threaded.queue("q").counts()).ready == 0
    assert await usable(threaded)


async def test_cancelled_a_statement_is_interrupted(threaded: Store, real_time: None) -> None:
    with trio.fail_after(5), trio.move_on_after(0.05) as scope:
        await together(threaded, "transaction", methodcaller("enqueue", "q", 1), methodcaller("execute", ENDLESS))
    assert scope.cancelled_caught
    assert (await threaded.queue("q").counts()).ready == 0


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_a_scope_within_the_body_interrupts_a_statement_too(tmp_path: Path, driver: str, real_time: None) -> None:
    """One that has not ended half a second later; the transaction is over then, and says so."""

    async def body(store: Store) -> None:
        async with store.transaction() as tx:
            await tx.enqueue("q", 1)
            with trio.move_on_after(0.01) as scope:
                await tx.execute(ENDLESS)
            assert scope.cancelled_caught

    async with open_store(tmp_path / "app.db", driver=driver) as opened:
        with trio.fail_after(10):
            error = await fails(StoreError, body, opened)
        assert str(error) == "nothing was committed, since a statement failed: interrupted"
        assert (await opened.queue("q").counts()).ready == 0


async def test_a_short_statement_that_a_scope_within_the_body_cancels_is_let_be(store: Store, real_time: None) -> None:
    async with store.transaction() as tx:
        await tx.enqueue("q", 1)
        for _ in range(20):
            with trio.move_on_after(0.000_1):
                await tx.enqueue("q", 1)
    assert (await store.queue("q").counts()).ready >= 1


@faces
async def test_an_interruption_that_comes_too_early_is_repeated(threaded: Store, face: str, real_time: None) -> None:
    make_faulty(threaded, deaf=3)
    with trio.fail_after(5), pytest.raises(TransactionTimeout):
        await together(threaded, face, methodcaller("execute", ENDLESS))


async def test_an_interruption_that_the_body_swallows_rolls_back(threaded: Store, real_time: None) -> None:
    async def body() -> None:
        async with threaded.transaction() as tx:
            await tx.enqueue("q", 1)
            with suppress(trio.Cancelled):
                await tx.execute(ENDLESS)

    with trio.fail_after(5):
        await fails(TransactionTimeout, body)
    assert (await threaded.queue("q").counts()).ready == 0


async def test_an_interruption_that_the_function_swallows_rolls_back(threaded: Store, real_time: None) -> None:
    def swallow(tx: SyncTransaction) -> None:
        tx.enqueue("q", 1)
        with suppress(TransactionTimeout):
            tx.execute(ENDLESS)

    with trio.fail_after(5):
        await fails(TransactionTimeout, threaded.transact, swallow)
    assert (await threaded.queue("q").counts()).ready == 0


@faces
async def test_a_commit_that_fails_leaves_nothing(orders: Store, face: str) -> None:
    make_faulty(orders, fail={"COMMIT": StoreFull("no room")})
    with pytest.raises(StoreFull, match="no room"):
        await together(orders, face, *EVERYTHING)
    assert await stored(orders) == NOTHING
    assert await usable(orders)


@faces
async def test_a_disk_that_fails_at_the_commit_leaves_the_outcome_unknown(orders: Store, face: str) -> None:
    make_faulty(orders, fail={"COMMIT": DiskError("gone")})
    with pytest.raises(OutcomeUnknown, match="look whether it is there"):
        await together(orders, face, ORDER)


@faces
async def test_a_constraint_that_is_checked_at_the_commit_rolls_back(store: Store, face: str) -> None:
    _writer(store).connection.all("PRAGMA foreign_keys = ON")  # as an embedder may have compiled it
    parent = "CREATE TABLE parent (id INTEGER PRIMARY KEY)"
    child = "CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
    await together(store, face, methodcaller("execute", parent), methodcaller("execute", child))
    orphan = methodcaller("execute", "INSERT INTO child VALUES (1)")
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        await together(store, face, methodcaller("enqueue", "q", 1), orphan)
    assert (await store.queue("q").counts()).ready == 0
    assert await usable(store)


@faces
async def test_a_failed_commit_wakes_nobody(store: Store, face: str) -> None:
    async with trio.open_nursery() as nursery:
        got: list[object] = []

        async def wait() -> None:
            got.extend(await store.queue("q").claim("w", wait=20))

        nursery.start_soon(wait)
        await calm()
        make_faulty(store, fail={"COMMIT": StoreFull("no room")})
        await fails(StoreFull, together, store, face, methodcaller("enqueue", "q", 1))
    assert got == []


async def test_an_enqueue_that_a_savepoint_has_undone_wakes_nobody() -> None:
    woken = []

    async def wait(feed: Feed) -> None:
        await feed.moved_past(queue_topic("q"), feed.position(), None)
        woken.append(True)

    def enqueue_and_undo(tx: SyncTransaction) -> None:
        with tx.savepoint():
            tx.enqueue("q", 1)
            raise KeyError

    def undo(tx: SyncTransaction) -> None:
        with suppress(KeyError):
            enqueue_and_undo(tx)

    async with open_store(":memory:", inline=True) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(wait, opened._context.engine.feed)
        await calm()
        await opened.transact(undo)
        await calm()
        assert woken == []
        await opened.transact(lambda tx: tx.enqueue("q", 1))
        await calm()
        assert woken == [True]


async def test_when_everything_was_rolled_back_no_savepoint_can_mend_it(orders: Store) -> None:
    def function(tx: SyncTransaction) -> None:
        ORDER(tx)
        with pytest.raises(StoreError), tx.savepoint():
            tx.execute("INSERT OR ROLLBACK INTO orders VALUES (42)")
        with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
            tx.enqueue("q", "it would be committed alone")

    await fails(StoreError, orders.transact, function)
    assert await stored(orders) == NOTHING


async def test_when_the_disk_is_full_no_savepoint_can_mend_it(orders: Store) -> None:
    def fill(tx: SyncTransaction) -> None:
        with tx.savepoint():
            _writer(orders).connection.all("ROLLBACK")  # as SQLite does by itself then
            tx.execute("SELECT 'full'")

    def function(tx: SyncTransaction) -> None:
        ORDER(tx)
        with pytest.raises(StoreFull):
            fill(tx)
        with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
            tx.enqueue("q", "it would be committed alone")

    make_faulty(orders, fail={"SELECT 'full'": StoreFull("no room")})
    await fails(StoreError, orders.transact, function)
    assert await stored(orders) == NOTHING


@faces
@pytest.mark.parametrize("params", [(7,), [7], {"n": 7}], ids=repr)
async def test_parameters_are_given_as_sqlite_takes_them(store: Store, face: str, params: Any) -> None:
    sql = "SELECT :n" if isinstance(params, dict) else "SELECT ?"
    assert await together(store, face, methodcaller("execute", sql, params)) == [[(7,)]]


PARAMETERS = {
    "too few parameters": (),
    "too many parameters": (1, 2),
    "a type that SQLite does not have": (object(),),
    "an integer that is too large": (2**63,),
    "a lone surrogate": ("\ud800",),
}


@faces
@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
async def test_after_parameters_that_cannot_be_bound_it_can_only_be_rolled_back(
    orders: Store, face: str, params: Any
) -> None:
    def plainly(tx: SyncTransaction) -> None:
        ORDER(tx)
        with pytest.raises((StoreError, OverflowError, UnicodeError)):
            tx.execute("SELECT ?", params)
        with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
            tx.enqueue("q", 1)

    async def interactively() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            with pytest.raises((StoreError, OverflowError, UnicodeError)):
                await tx.execute("SELECT ?", params)
            with pytest.raises(RuntimeError, match="a statement of this transaction has failed"):
                await tx.enqueue("q", 1)

    error = await fails(StoreError, partial(orders.transact, plainly) if face == "transact" else interactively)
    assert "nothing was committed" in str(error)
    assert await stored(orders) == NOTHING


# ----------------------------------------------------------------------------------------------------- one writer


@faces
async def test_transactions_run_one_after_the_other(store: Store, face: str) -> None:
    await make_orders(store)
    next_total = "INSERT INTO orders SELECT coalesce(max(total), 0) + 1 FROM orders"

    async def one() -> None:
        for _ in range(5):
            await together(store, face, methodcaller("execute", next_total), methodcaller("get_job", 1))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert await totals(store) == list(range(1, 21))


async def test_cancelled_while_it_waits_for_its_turn_it_has_not_run(orders: Store) -> None:
    called: list[object] = []

    async def give_up(face: str) -> None:
        with trio.move_on_after(1):
            await together(orders, face, called.append)

    async with trio.open_nursery() as nursery, orders.transaction() as tx:
        nursery.start_soon(give_up, "transact")
        nursery.start_soon(give_up, "transaction")
        await trio.sleep(2)
        await ORDER(tx)
    assert called == []
    assert await stored(orders) == {**NOTHING, "orders": 1}


async def test_a_task_that_the_body_starts_elsewhere_may_wait_for_the_end(store: Store) -> None:
    async with trio.open_nursery() as nursery, store.transaction() as tx:
        nursery.start_soon(store.queue("q").enqueue, "after it")
        await trio.sleep(1)
        await tx.enqueue("q", "in it")
    assert [job.payload for job in await store.queue("q").list()] == ["in it", "after it"]


async def test_a_task_may_open_a_transaction_while_another_has_one(store: Store) -> None:
    async def other() -> None:
        async with store.transaction() as tx:
            await tx.enqueue("q", "second")

    async with trio.open_nursery() as nursery, store.transaction() as tx:
        nursery.start_soon(other)
        await trio.sleep(1)
        await tx.enqueue("q", "first")
    assert [job.payload for job in await store.queue("q").list()] == ["first", "second"]


@faces
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 'COMMIT'",
        "SELECT 1; -- COMMIT",
        "SELECT 1 /* ; COMMIT */",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "CREATE TABLE commit_log (id)",
        "CREATE TRIGGER t AFTER INSERT ON orders BEGIN SELECT 1; END",
        "EXPLAIN SELECT 1",
        "ANALYZE",
    ],
)
async def test_any_other_statement_is_allowed(store: Store, face: str, statement: str) -> None:
    await make_orders(store)
    await together(store, face, methodcaller("execute", statement))
