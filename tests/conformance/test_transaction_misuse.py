"""What cannot be done in a transaction, and that the error says what to do instead: mistakes that everybody makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import trio
import trio.lowlevel

from alkstore import (
    InvalidName,
    InvalidPayload,
    InvalidSpec,
    ReservedName,
    StopToken,
    Store,
    StoreError,
    SyncTransaction,
    Transaction,
    open_store,
)
from tests.conformance.helpers import OpenStore, claim, fails, no_group
from tests.conformance.transacting import ORDER, WRONG, faces, make_orders, together, totals

# ------------------------------------------------------------------------------- store calls that need the writer


async def _nothing(_: object) -> None:
    pass


async def _never_used(store: Store) -> None:
    async with store.transaction():
        raise AssertionError("it has begun")


async def _never_held(store: Store) -> None:
    async with store.lock("l").hold():
        raise AssertionError("it is held")


WRITES: dict[str, tuple[Callable[[Store], Awaitable[object]], str]] = {
    "enqueue": (lambda store: store.queue("q").enqueue(1), "use tx.enqueue(queue, …) instead"),
    "enqueue_many": (lambda store: store.queue("q").enqueue_many([1, 2]), "use tx.enqueue(queue, …) for each instead"),
    "outbox_enqueue": (lambda store: store.outbox("o").enqueue(1), "use tx.outbox_enqueue(name, …) instead"),
    "schedule": (lambda store: store.schedule("s", "@every 1s", "q"), "use tx.schedule(…) instead"),
    "unschedule": (lambda store: store.unschedule("s"), "use tx.unschedule(name) instead"),
    "transaction": (_never_used, "use tx.savepoint() instead"),
    "transact": (lambda store: store.transact(lambda tx: None), "use tx itself instead"),
    "claim": (lambda store: store.queue("q").claim("w"), "do it before or after the transaction"),
    "claim_patiently": (lambda store: store.queue("q").claim("w", wait=9), "do it before or after the transaction"),
    "run_once": (lambda store: store.outbox("o").run_once("w", _nothing), "do it before or after the transaction"),
    "acquire": (lambda store: store.lock("l").acquire(9), "do it before or after the transaction"),
    "hold": (_never_held, "do it before or after the transaction"),
    "cancel_job": (lambda store: store.queue("q").cancel_job(1), "do it before or after the transaction"),
    "cancel_job of any queue": (lambda store: store.cancel_job(1), "do it before or after the transaction"),
    "redrive": (lambda store: store.queue("q").redrive(1), "do it before or after the transaction"),
    "redrive_all": (lambda store: store.outbox("o").redrive_all(), "do it before or after the transaction"),
    "prune": (lambda store: store.outbox("o").prune(0), "do it before or after the transaction"),
    "sweep_expired": (lambda store: store.queue("q").sweep_expired(), "do it before or after the transaction"),
    "pause": (lambda store: store.queue("q").pause(), "do it before or after the transaction"),
    "resume": (lambda store: store.queue("q").resume(), "do it before or after the transaction"),
    "work": (lambda store: store.queue("q").work(_nothing, stop=StopToken()), "do it before or after the transaction"),
    "deliver": (
        lambda store: store.outbox("o").deliver(_nothing, stop=StopToken()),
        "do it before or after the transaction",
    ),
    "run_schedules": (lambda store: store.run_schedules(StopToken()), "do it before or after the transaction"),
}

writes = pytest.mark.parametrize(("call", "advice"), WRITES.values(), ids=WRITES)


@writes
async def test_a_store_call_in_it_raises_at_once_and_says_what_to_do(
    store: Store, call: Callable[[Store], Awaitable[object]], advice: str
) -> None:
    began = trio.current_time()
    async with store.transaction() as tx:
        error = await fails(RuntimeError, call, store)
        assert str(error) == f"this call of the store is not part of the open transaction around it: {advice}"
        await tx.enqueue("q", "still usable")
    assert trio.current_time() == began
    assert (await claim(store.queue("q"))).payload == "still usable"


@pytest.mark.parametrize("finish", ["ack", "retry", "fail", "snooze", "heartbeat", "release", "renew"])
async def test_a_handle_that_is_used_in_it_raises_at_once(store: Store, finish: str) -> None:
    await store.queue("q").enqueue(1)
    job = await claim(store.queue("q"))
    lock = await store.lock("l").acquire(9)
    handle: Any = lock if finish in ("release", "renew") else job
    call = methodcaller(finish, 1) if finish == "snooze" else methodcaller(finish)
    async with store.transaction():
        error = await fails(RuntimeError, call, handle)
        assert "do it before or after the transaction" in str(error)
    assert await call(handle)


async def test_a_task_that_the_body_waits_for_is_refused_too(store: Store) -> None:
    async with store.transaction(), trio.open_nursery() as nursery:
        nursery.start_soon(fails, RuntimeError, store.queue("q").enqueue, 1)


async def test_a_grandchild_of_the_body_is_refused_too(store: Store) -> None:
    async def child() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, RuntimeError, store.queue("q").enqueue, 1)

    async with store.transaction(), trio.open_nursery() as nursery:
        nursery.start_soon(child)


async def test_a_thread_that_the_body_waits_for_is_refused_too(store: Store, real_time: None) -> None:
    def enqueue() -> None:
        trio.from_thread.run(store.queue("q").enqueue, 1)

    async with store.transaction():
        error = await fails(RuntimeError, trio.to_thread.run_sync, enqueue)
        assert "use tx.enqueue(queue, …) instead" in str(error)


async def test_a_thread_that_the_body_may_leave_behind_is_refused_too(store: Store, real_time: None) -> None:
    """Its calls arrive in tasks of their own, without an ancestor in the body."""
    token = trio.lowlevel.current_trio_token()

    def in_thread() -> None:
        trio.from_thread.run(store.queue("q").enqueue, 1, trio_token=token)

    async with store.transaction():
        with trio.fail_after(2), pytest.raises(RuntimeError, match=r"use tx\.enqueue"):
            await trio.to_thread.run_sync(in_thread, abandon_on_cancel=True)
    assert (await store.queue("q").counts()).ready == 0


async def test_the_function_of_transact_is_refused_too(open_shared_store: OpenStore, real_time: None) -> None:
    def enqueue(tx: SyncTransaction) -> None:
        trio.from_thread.run(store.queue("q").enqueue, 1)

    async with open_shared_store(inline=False) as store:
        with trio.fail_after(3):
            error = await fails(RuntimeError, store.transact, enqueue)
        assert "use tx.enqueue(queue, …) instead" in str(error)


async def test_after_the_transaction_the_calls_work_again(store: Store) -> None:
    async with store.transaction():
        pass
    await store.queue("q").enqueue(1)
    async with store.transaction() as tx:
        await tx.enqueue("q", 2)
    assert (await store.queue("q").counts()).ready == 2


async def test_another_database_can_be_written_meanwhile(store: Store, tmp_path: Any) -> None:
    async with open_store(tmp_path / "other.db", inline=True) as other, store.transaction() as tx:
        await other.queue("q").enqueue(1)
        async with other.transaction() as second:
            await second.enqueue("q", 2)
            await fails(RuntimeError, store.queue("q").enqueue, 1)
            await fails(RuntimeError, other.queue("q").enqueue, 1)
        await tx.enqueue("q", 3)
        assert (await other.queue("q").counts()).ready == 2


async def test_a_second_store_on_the_same_file_is_refused_at_once(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as store, open_shared_store() as same, store.transaction():
        await fails(RuntimeError, same.queue("q").enqueue, 1)


READS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "get_job": lambda store: store.get_job(1),
    "get_job of a queue": lambda store: store.queue("q").get_job(1),
    "list": lambda store: store.queue("q").list(),
    "counts": lambda store: store.queue("q").counts(),
    "counts of an outbox": lambda store: store.outbox("o").counts(),
    "health": lambda store: store.health(),
    "tasks": lambda store: store.cron.tasks(),
    "runs": lambda store: store.cron.runs(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_read_in_it_raises_at_once_and_names_the_methods_of_tx(
    store: Store, read: Callable[[Store], Awaitable[object]]
) -> None:
    """It would not see what the transaction has done, and might wait for its end."""
    async with store.transaction() as tx:
        id = await tx.enqueue("q", 1)
        error = await fails(RuntimeError, read, store)
        assert str(error).endswith("around it: use tx.get_job(id) or tx.execute(sql) instead")
        assert await tx.get_job(id) is not None
    await read(store)


# ---------------------------------------------------------------------------------- tx where or when it does not work

CALLS: dict[str, Callable[[Any], Any]] = {
    "execute": methodcaller("execute", "SELECT 1"),
    "enqueue": methodcaller("enqueue", "q", 1),
    "outbox_enqueue": methodcaller("outbox_enqueue", "o", 1),
    "schedule": methodcaller("schedule", "s", "@every 1s", "q"),
    "unschedule": methodcaller("unschedule", "s"),
    "get_job": methodcaller("get_job", 1),
}

calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
async def test_after_its_end_tx_says_so(store: Store, call: Callable[[Any], Any]) -> None:
    async with store.transaction() as tx:
        pass
    error = await fails(RuntimeError, call, tx)
    assert str(error) == "this transaction is over: it works only inside its own block or function"


@calls
async def test_after_its_function_tx_says_so(store: Store, call: Callable[[Any], Any]) -> None:
    kept: list[SyncTransaction] = []
    await store.transact(kept.append)
    with pytest.raises(RuntimeError, match="this transaction is over"):
        call(kept[0])


@calls
async def test_tx_does_not_work_in_another_task(store: Store, call: Callable[[Any], Any]) -> None:
    async with store.transaction() as tx, trio.open_nursery() as nursery:
        nursery.start_soon(_refused_elsewhere, tx, call)
        nursery.start_soon(_refused_elsewhere, tx, call)
    assert (await store.queue("q").counts()).ready == 0


async def _refused_elsewhere(tx: Transaction, call: Callable[[Any], Any]) -> None:
    error = await fails(RuntimeError, call, tx)
    assert str(error) == (
        "a transaction works only in the task that opened it, one call after the other: make this call there"
    )


async def test_a_savepoint_does_not_work_in_another_task(store: Store) -> None:
    async def other(tx: Transaction) -> None:
        async with tx.savepoint():
            raise AssertionError("it has begun")

    async with store.transaction() as tx, trio.open_nursery() as nursery:
        nursery.start_soon(fails, RuntimeError, other, tx)


async def test_a_savepoint_after_the_end_says_so(store: Store) -> None:
    async with store.transaction() as tx:
        pass

    async def late() -> None:
        async with tx.savepoint():
            raise AssertionError("it has begun")

    assert "this transaction is over" in str(await fails(RuntimeError, late))


# ----------------------------------------------------------------------------------------------- refused statements

REFUSED = [
    "BEGIN",
    "begin immediate",
    "COMMIT",
    "END",
    "End Transaction",
    "ROLLBACK",
    "ROLLBACK TO alkstore_0",
    "SAVEPOINT s",
    "RELEASE s",
    "ATTACH 'x.db' AS x",
    "DETACH x",
    "VACUUM",
    "VACUUM INTO 'copy.db'",
    "PRAGMA journal_mode = DELETE",
    "  \t\r\n\f COMMIT",
    ";COMMIT",
    " ; ; commit ;",
    "-- a comment\nCOMMIT",
    "--\n--\n\n  COMMIT",
    "/* a comment */COMMIT",
    "/* one *//* two\nlines */ -- three\n; /**/ COMMIT",
    "/* ; */ COMMIT",
    "/*-- */ COMMIT",
    "-- /*\nCOMMIT -- */",
    "\ufeffCOMMIT",
    "\ufeff /* */ \ufeffCOMMIT",
    "COMMIT;",
    "COMMIT--",
    "COMMIT/**/",
    "EXPLAIN PRAGMA foreign_keys = ON",
    "EXPLAIN QUERY PLAN PRAGMA foreign_keys = ON",
    "explain /* */ commit",
    "ABORT",
    "ABORT AND CHAIN",
    "COMMIT AND CHAIN",
    "START TRANSACTION",
    "PREPARE TRANSACTION 'x'",
    "prepare /* */ transaction 'x'",
    "COMMIT PREPARED 'x'",
    "ROLLBACK PREPARED 'x'",
    "/* a /* b */ c */ COMMIT",
    "/* a /* b */ COMMIT",
    "/*/**/*/COMMIT",
    "/*/* /* */ */ ; */ -- /*\n PREPARE TRANSACTION 'x'",
    "-- a comment\rCOMMIT",
]


@faces
@pytest.mark.parametrize("statement", REFUSED)
async def test_a_statement_that_would_end_or_leave_the_transaction_is_refused(
    store: Store, face: str, statement: str
) -> None:
    await make_orders(store)
    error = await fails(ValueError, together, store, face, ORDER, methodcaller("execute", statement))
    assert "is not allowed inside a transaction of the store" in str(error)
    assert "use tx.savepoint()" in str(error)
    assert await totals(store) == []


@faces
async def test_a_refused_statement_was_not_run_and_the_transaction_goes_on(store: Store, face: str) -> None:
    await make_orders(store)

    def refused(tx: Any) -> Any:
        with pytest.raises(ValueError, match="COMMIT is not allowed"):
            SyncTransaction.execute(getattr(tx, "_sync", tx), "COMMIT")
        return ORDER(tx)

    await together(store, face, refused)
    assert await totals(store) == [42]


@faces
@pytest.mark.parametrize("statement", ["SELECT 1; COMMIT", "INSERT INTO orders VALUES (1); COMMIT", "SELECT 1;;COMMIT"])
async def test_more_than_one_statement_is_refused(store: Store, face: str, statement: str) -> None:
    await make_orders(store)
    error = await fails(StoreError, together, store, face, ORDER, methodcaller("execute", statement))
    assert "one statement" in str(error)
    assert await totals(store) == []


@faces
async def test_a_statement_that_has_ended_the_transaction_all_the_same_is_noticed(
    store: Store, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_orders(store)
    monkeypatch.setattr("alkstore.transaction._REFUSED", frozenset())
    error = await fails(StoreError, together, store, face, methodcaller("execute", "ROLLBACK"), ORDER)
    assert "this statement has ended the transaction" in str(error)
    assert await totals(store) == []
    await store.queue("q").enqueue(1)


@faces
@pytest.mark.parametrize("statement", ["SELECT 1 /* COMMIT */", "-- BEGIN\nSELECT 1"])
async def test_a_word_inside_a_comment_is_no_statement(one_store: Store, face: str, statement: str) -> None:
    await make_orders(one_store)
    await together(one_store, face, ORDER, methodcaller("execute", statement))
    assert await totals(one_store) == [42]


@pytest.mark.parametrize("sql", [b"SELECT 1", None, 1], ids=["bytes", "None", "int"])
async def test_a_statement_is_text(one_store: Store, sql: Any) -> None:
    async with one_store.transaction() as tx:
        await fails(TypeError, tx.execute, sql)
        assert await tx.execute("SELECT 1") == [(1,)]


# --------------------------------------------------------------------------------------------- failed statements

FAILING = {
    "no such table": "INSERT INTO nowhere VALUES (1)",
    "a constraint": "INSERT INTO orders VALUES (42)",
    "syntax": "SELEKT 1",
}


@faces
@pytest.mark.parametrize("statement", FAILING.values(), ids=FAILING)
async def test_after_a_failed_statement_the_transaction_can_only_be_rolled_back(
    store: Store, face: str, statement: str
) -> None:
    await make_orders(store)
    failing = methodcaller("execute", statement)

    def plainly(tx: SyncTransaction) -> None:
        ORDER(tx)
        with pytest.raises(StoreError) as failure:
            failing(tx)
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match="a statement of this transaction has failed") as later:
                call(tx)
            assert later.value.__cause__ is failure.value

    async def interactively() -> None:
        async with store.transaction() as tx:
            await ORDER(tx)
            with pytest.raises(StoreError) as failure:
                await failing(tx)
            for call in CALLS.values():
                with pytest.raises(RuntimeError, match="a statement of this transaction has failed") as later:
                    await call(tx)
                assert later.value.__cause__ is failure.value

    run = interactively if face == "transaction" else partial(store.transact, plainly)
    error = await fails(StoreError, run)
    assert "nothing was committed, since a statement failed" in str(error)
    assert await totals(store) == []
    await store.queue("q").enqueue(1)


@faces
async def test_a_failed_statement_leaves_with_the_drivers_exception_as_its_cause(store: Store, face: str) -> None:
    error = await fails(StoreError, together, store, face, WRONG)
    assert "nowhere" in str(error)
    assert type(error.__cause__).__module__.partition(".")[0] in ("sqlite3", "psycopg")


# --------------------------------------------------------------------------------------------- wrong arguments

ARGUMENTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "the outbox's queue": (methodcaller("enqueue", "__alkstore_outbox:o", 1), ReservedName, "__alkstore_"),
    "the outbox's queue in capitals": (methodcaller("enqueue", "__ALKSTORE_x", 1), ReservedName, "__alkstore_"),
    "the runs' queue": (methodcaller("enqueue", "__alkstore_runs", 1), ReservedName, "__alkstore_"),
    "a full-width look-alike": (methodcaller("enqueue", "＿＿ａｌｋｓｔｏｒｅ＿x", 1), ReservedName, "__alkstore_"),
    "an outbox of the store": (methodcaller("outbox_enqueue", "__alkstore_x", 1), ReservedName, "__alkstore_"),
    "a schedule of the store": (methodcaller("schedule", "__alkstore_s", "@every 1s", "q"), ReservedName, "schedule"),
    "a schedule into the outbox": (
        methodcaller("schedule", "s", "@every 1s", "__alkstore_outbox:o"),
        ReservedName,
        "queue",
    ),
    "unschedule": (methodcaller("unschedule", "__alkstore_s"), ReservedName, "schedule"),
    "a blank queue": (methodcaller("enqueue", " ", 1), InvalidName, "queue"),
    "a blank outbox": (methodcaller("outbox_enqueue", "", 1), InvalidName, "outbox"),
    "a name with NUL": (methodcaller("enqueue", "a\0b", 1), InvalidName, "queue"),
    "a name that is too long": (methodcaller("outbox_enqueue", "x" * 10_000, 1), InvalidName, "outbox"),
    "a handle for a name": (methodcaller("enqueue", object(), 1), InvalidName, "queue"),
    "a blank key": (methodcaller("outbox_enqueue", "o", 1, key=""), InvalidName, "key"),
    "a payload": (methodcaller("enqueue", "q", {"x": {1}}), InvalidPayload, "x"),
    "a message": (methodcaller("outbox_enqueue", "o", float("nan")), InvalidPayload, "payload"),
    "headers": (methodcaller("enqueue", "q", 1, headers={"a": 1}), InvalidPayload, "headers"),
    "a spec": (methodcaller("schedule", "s", "@hourly", "q"), InvalidSpec, "@hourly"),
    "a spec past the year 9999": (methodcaller("schedule", "s", "@every 3000000d", "q"), InvalidSpec, "9999"),
    "priority": (methodcaller("enqueue", "q", 1, priority=101), ValueError, "priority"),
    "delay": (methodcaller("outbox_enqueue", "o", 1, delay=-1), ValueError, "delay"),
    "visibility": (methodcaller("enqueue", "q", 1, visibility=0), ValueError, "visibility"),
    "max_attempts": (methodcaller("enqueue", "q", 1, max_attempts="3"), TypeError, "max_attempts"),
    "an unknown option": (methodcaller("enqueue", "q", 1, retries=3), TypeError, "retries"),
}


@faces
@pytest.mark.parametrize(("call", "kind", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
async def test_a_wrong_argument_is_named_and_the_transaction_goes_on(
    store: Store, face: str, call: Callable[[Any], Any], kind: type[Exception], text: str
) -> None:
    await make_orders(store)

    def plainly(tx: SyncTransaction) -> None:
        with pytest.raises(kind, match=text):
            call(tx)
        ORDER(tx)

    if face == "transact":
        await store.transact(plainly)
    else:
        async with store.transaction() as tx:
            with pytest.raises(kind, match=text):
                await call(tx)
            await ORDER(tx)
    assert await totals(store) == [42]


async def test_transact_takes_no_async_function(store: Store) -> None:
    async def function(tx: Transaction) -> None:
        raise AssertionError("it has begun")

    error = await fails(TypeError, store.transact, function)
    assert "use store.transaction() for it" in str(error)


async def test_a_function_that_returns_an_awaitable_is_rolled_back(store: Store) -> None:
    def function(tx: SyncTransaction) -> object:
        tx.enqueue("q", 1)
        return _nothing(tx)

    error = await fails(TypeError, store.transact, function)
    assert "returned an awaitable" in str(error)
    assert (await store.queue("q").counts()).ready == 0


async def test_a_generator_is_no_function_for_transact(store: Store) -> None:
    def function(tx: SyncTransaction) -> Iterator[None]:
        tx.enqueue("q", 1)
        yield

    error = await fails(TypeError, store.transact, function)
    assert "must not be a generator" in str(error)


async def test_a_handler_may_write_in_a_transaction_and_let_the_worker_ack(store: Store) -> None:
    await make_orders(store)
    await store.queue("q").enqueue(1)
    stop = StopToken()

    async def handler(job: object) -> None:
        async with store.transaction() as tx:
            await ORDER(tx)
        stop.stop()

    with no_group():
        await store.queue("q").work(handler, stop=stop)
    assert await totals(store) == [42]
    assert await store.queue("q").list("dead") == []
