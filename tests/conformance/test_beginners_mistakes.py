"""Slips that everybody makes once: each is answered at once, by an error that says what to do instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio

from alkstore import Discard, JobHandle, Snooze, StopToken, Store, StoreCorrupt, StoreError, open_store
from alkstore.cron import STANDALONE, RetryPolicy, RunHandle
from tests.conformance import cronning
from tests.conformance.helpers import OpenStore, job, refused, running


async def test_a_call_from_another_trio_run_is_refused_and_the_store_goes_on(store: Store, real_time: None) -> None:
    queue = store.queue("q")
    for call in (partial(queue.enqueue, 1), partial(store.get_job, 1), partial(store.lock("l").acquire, 1)):
        with pytest.raises(
            RuntimeError, match=r"another trio run: .* trio\.from_thread\.run\(queue\.enqueue, payload\)"
        ):
            await trio.to_thread.run_sync(trio.run, call)
    assert await queue.enqueue(2) > 0


async def test_a_transaction_from_another_trio_run_is_refused(store: Store, real_time: None) -> None:
    async def open_one() -> None:
        async with store.transaction():
            pass

    with pytest.raises(RuntimeError, match="another trio run"):
        await trio.to_thread.run_sync(trio.run, open_one)


async def test_a_thread_of_the_same_run_calls_the_store_by_from_thread(store: Store, real_time: None) -> None:
    queue = store.queue("q")
    assert await trio.to_thread.run_sync(lambda: trio.from_thread.run(queue.enqueue, 1)) > 0


@pytest.mark.parametrize("slip", [Snooze(60), Discard("no"), ValueError("no")], ids=lambda slip: type(slip).__name__)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_an_error_that_is_returned_does_not_acknowledge_the_job(
    store: Store, slip: Exception, plain: bool, real_time: None
) -> None:
    queue = store.queue("q", max_attempts=1)
    id = await queue.enqueue(1)
    handled = trio.Event()

    async def returns(job: JobHandle) -> object:
        handled.set()
        return slip

    def returns_too(job: JobHandle) -> object:
        trio.from_thread.run_sync(handled.set)
        return slip

    async with running(queue.work, returns_too if plain else returns):
        await handled.wait()
    dead = await job(queue, id)
    assert dead.state == "dead"
    assert "raise it" in str(dead.error)


@pytest.mark.parametrize("slip", [Snooze(60), Discard("no"), ValueError("no")], ids=lambda slip: type(slip).__name__)
async def test_an_error_that_is_returned_is_no_success_of_a_run_or_a_delivery(store: Store, slip: Exception) -> None:
    async def returns(_: object) -> object:
        return slip

    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with cronning.runs_here(store, returns):
        over = await cronning.until_over(store, made.id)
    assert over.state == "failed"
    assert "raise it" in str(over.error)
    message = await store.outbox("o").enqueue(1)
    assert await store.outbox("o").run_once("w", returns)
    left = await store.outbox("o").get_message(message)
    assert left is not None
    assert "raise it" in str(left.error)


async def no_argument() -> None: ...


async def two_arguments(job: object, database: object) -> None: ...


async def by_name(*, job: object) -> None: ...


@pytest.mark.parametrize("handler", [no_argument, two_arguments, by_name, partial(no_argument)])
async def test_a_handler_that_cannot_take_its_work_is_refused_at_once(one_store: Store, handler: Any) -> None:
    """It would use up every attempt of every job."""
    stop = StopToken()
    for start in (
        lambda: one_store.queue("q").work(handler, stop=stop),
        lambda: one_store.outbox("o").deliver(handler, stop=stop),
        lambda: one_store.outbox("o").run_once("w", handler),
        lambda: one_store.cron.run({"h": handler}, STANDALONE, stop=stop),
    ):
        assert "is called with one argument" in str(await refused(TypeError, start))


async def test_the_traceback_of_a_failed_handler_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    queue = store.queue("q", max_attempts=1)
    await queue.enqueue(1)
    failed = trio.Event()

    async def fails(job: JobHandle) -> None:
        failed.set()
        raise ZeroDivisionError("in my handler")

    async with running(queue.work, fails):
        await failed.wait()
    (record,) = [one for one in caplog.records if one.name == "alkstore.worker"]
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None
    assert "job 1 of q" in record.getMessage()


async def test_a_failure_after_the_handler_has_settled_its_job_is_told(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1)

    async def acks(job: JobHandle) -> None:
        await job.ack()
        raise ZeroDivisionError("afterwards")

    with store.events() as events:
        async with running(queue.work, acks):
            async for event in events:
                if event.kind == "raised":
                    told = [event]
                    break
    assert [(event.subject, event.details["id"]) for event in told] == [("q", id)]
    assert "afterwards" in str(told[0].details["error"])
    (record,) = [one for one in caplog.records if one.name == "alkstore.worker"]
    assert "settled or lost before" in record.getMessage()
    assert await queue.get_job(id) is None


async def test_discard_and_snooze_are_no_failures_to_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(["discard", "snooze"])
    both = trio.Event()

    async def handler(job: JobHandle) -> None:
        if job.payload == "discard":
            raise Discard
        both.set()
        raise Snooze(60)

    async with running(queue.work, handler):
        await both.wait()
    assert not [one for one in caplog.records if one.name == "alkstore.worker"]


async def test_discard_ends_a_run_whatever_its_policy_says(store: Store) -> None:
    async def handler(run: object) -> None:
        raise Discard("no use")

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(3, 0))
    run = await store.cron.run_now("t")
    async with cronning.runs_here(store, handler):
        over = await cronning.until_over(store, run.id)
    assert (over.state, over.attempt) == ("failed", 1)
    assert over.error == "Discard: no use"


async def test_snooze_puts_a_run_off_without_an_attempt(store: Store) -> None:
    started: list[float] = []
    seen: list[tuple[int, int]] = []

    async def handler(run: RunHandle) -> None:
        started.append(trio.current_time())
        seen.append((run.attempt, run.fence))
        if len(started) < 3:
            raise Snooze(7)

    await store.cron.publish_task("t", call="h")
    run = await store.cron.run_now("t")
    async with cronning.runs_here(store, handler):
        over = await cronning.until_over(store, run.id)
    assert (over.state, over.attempt) == ("succeeded", 1)
    assert started[1] - started[0] >= 7
    assert seen == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("target", ["sqlite:///x.db", "mysql://localhost/x", "file:x.db?mode=ro"])
async def test_a_url_is_no_path(target: str) -> None:
    with pytest.raises(ValueError, match="must be a path"):
        async with open_store(target):
            pass


@pytest.mark.parametrize("params", ["abc", b"abc", 42], ids=["str", "bytes", "int"])
async def test_a_text_is_no_sequence_of_parameters(store: Store, params: Any) -> None:
    with pytest.raises(TypeError, match=r"params must be a sequence such as \(42,\)"):
        async with store.transaction() as tx:
            await tx.execute("SELECT 1", params)


@pytest.mark.parametrize("payloads", [5, {"a": 1}, "text"], ids=["int", "dict", "str"])
async def test_enqueue_many_takes_a_list(one_store: Store, payloads: Any) -> None:
    with pytest.raises(TypeError, match="payloads must be an iterable of payloads, such as a list"):
        await one_store.queue("q").enqueue_many(payloads)


async def test_enqueue_many_says_which_payload_is_wrong(one_store: Store) -> None:
    with pytest.raises(ValueError, match=r"^payloads\[2\]: payload must be a JSON value, not tuple"):
        await one_store.queue("q").enqueue_many([1, 2, (3,)])


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.schedule("s", "@every 1h", store.queue("q")),
        lambda store: store.transact(lambda tx: tx.enqueue(store.queue("q"), 1)),
    ],
    ids=["schedule", "tx.enqueue"],
)
async def test_a_queue_is_not_its_name(one_store: Store, call: Callable[[Store], Any]) -> None:
    with pytest.raises(ValueError, match="a queue name must be a str, not Queue: give its name"):
        await call(one_store)


FORGOTTEN: dict[str, tuple[Callable[[Store], Any], str]] = {
    "open_store": (lambda _: open_store(":memory:"), "async with open_store(…) as store:"),
    "transaction": (lambda store: store.transaction(), "async with store.transaction() as tx:"),
    "hold": (lambda store: store.lock("l").hold(), "async with lock.hold() as held:"),
}


async def _used(manager: Any) -> None:
    manager.queue("q")


async def _awaited(manager: Any) -> None:
    await manager


async def _entered_without_async(manager: Any) -> None:
    with manager:
        raise AssertionError


@pytest.mark.parametrize(("call", "right_way"), FORGOTTEN.values(), ids=FORGOTTEN)
async def test_what_was_not_entered_says_what_to_write(
    one_store: Store, call: Callable[[Store], Any], right_way: str
) -> None:
    for use in (_used, _awaited, _entered_without_async):
        with pytest.raises((AttributeError, TypeError)) as error:
            await use(call(one_store))
        assert f"write `{right_way}`" in str(error.value)
    async with call(one_store):
        pass


async def _unused(_: JobHandle) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda store: store.transact("SELECT 1"), "function must be"),
        (lambda store: store.outbox("o").run_once(_unused, "w"), "delivery must be"),
        (lambda store: store.queue("q").work("h", stop=StopToken()), "handler must be"),
    ],
    ids=["transact", "run_once", "work"],
)
async def test_a_wrong_function_is_named_as_the_caller_knows_it(
    one_store: Store, call: Callable[[Store], Any], named: str
) -> None:
    with pytest.raises(TypeError, match=f"^{named} a function"):
        await call(one_store)


async def test_an_unknown_option_is_refused_by_the_method_that_was_called(one_store: Store) -> None:
    wrong: Any = {"prio": 3}
    async with one_store.transaction() as tx:
        with pytest.raises(TypeError, match=r"^Transaction\.enqueue\(\) got an unexpected keyword argument 'prio'"):
            await tx.enqueue("q", 1, **wrong)


async def test_what_is_shown_of_handles_is_short(one_store: Store) -> None:
    async with one_store.lock("nightly").hold() as held:
        assert repr(held) == f"LockHandle(name='nightly', fencing_token={held.fencing_token}, owner='{held.owner}')"
    async with one_store.transaction() as tx:
        assert repr(tx) == "Transaction(open)"
        with suppress(ZeroDivisionError):
            async with tx.savepoint():
                with pytest.raises(StoreError):
                    await tx.execute("SELEKT 1")
                assert repr(tx) == "Transaction(failed)"
                raise ZeroDivisionError
    assert repr(tx) == "Transaction(over)"
    assert await one_store.transact(repr) == "SyncTransaction(open)"


async def test_an_error_of_opening_names_the_file(open_embedded_file_store: OpenStore, tmp_path: Any) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("these are notes, and no database, however long this text may be. " * 20)
    with pytest.raises(StoreCorrupt, match=r"notes\.txt"):
        async with open_store(text):
            pass
