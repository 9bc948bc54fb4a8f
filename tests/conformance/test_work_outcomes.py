"""Working a queue: what a handler is given, and what its end means for the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from alkstore import Discard, JobHandle, Snooze, StopToken, Store
from tests.conformance.helpers import after, calm, job, now, running, seen

Handler = Callable[[JobHandle], Awaitable[object]]


async def worked(store: Store, handler: Handler, **options: object) -> int:
    """Let a worker meet one job, at this moment only, and return the job's id."""
    queue = store.queue("q")
    id = await queue.enqueue({"n": 1}, key="k", headers={"a": "b"}, **options)  # type: ignore[arg-type]
    async with running(queue.work, handler):
        await calm()
    return id


async def test_a_handler_is_given_the_job(store: Store) -> None:
    given: list[JobHandle] = []

    async def handler(handle: JobHandle) -> None:
        given.append(handle)
        assert handle.lease_remaining == 300
        assert not handle.cancelled

    id = await worked(store, handler, max_attempts=7)
    (handle,) = given
    assert (handle.id, handle.queue, handle.payload, handle.headers, handle.key) == (id, "q", {"n": 1}, {"a": "b"}, "k")
    assert (handle.attempt, handle.max_attempts, handle.fence) == (1, 7, 1)
    assert (handle.schedule, handle.boundary) == (None, None)


async def test_a_handler_that_returns_has_acknowledged_its_job(store: Store) -> None:
    async def handler(_: object) -> str:
        return "whatever"

    id = await worked(store, handler)
    assert await store.get_job(id) is None


async def test_a_handler_that_raises_has_its_job_retried_with_the_backoff(store: Store) -> None:
    async def handler(_: object) -> None:
        raise ValueError("no")

    id = await worked(store, handler)
    found = await job(store.queue("q"), id)
    assert (found.state, found.run_at, found.attempt, found.error) == ("delayed", after(store, 5), 1, "ValueError: no")


async def test_a_handler_that_always_raises_has_its_job_dead_in_the_end(store: Store) -> None:
    queue = store.queue("q", backoff=1)
    id = await queue.enqueue(1)
    began = trio.current_time()
    tries: list[float] = []

    async def handler(_: object) -> None:
        tries.append(trio.current_time() - began)
        raise ValueError("no")

    async with running(queue.work, handler):
        await trio.sleep(100)
    dead = await job(queue, id)
    assert tries == [0, 1, 3]
    assert (dead.state, dead.reason, dead.error) == ("dead", "attempts exhausted", "ValueError: no")


@pytest.mark.parametrize(
    "error",
    [
        Discard("bad"),
        ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [Discard("bad")])]),
        ExceptionGroup("g", [Snooze(5), Discard("bad")]),
    ],
    ids=["alone", "deep in a group", "beside a snooze"],
)
async def test_discard_anywhere_discards(store: Store, error: Exception) -> None:
    async def handler(_: object) -> None:
        raise error

    dead = await job(store.queue("q"), await worked(store, handler))
    assert (dead.state, dead.reason) == ("dead", "discarded")
    assert "bad" in (dead.error or "")


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (Snooze(60), 60),
        (ExceptionGroup("g", [Snooze(60)]), 60),
        (ExceptionGroup("g", [Snooze(5), ExceptionGroup("h", [Snooze(60)])]), 60),
    ],
    ids=["alone", "in a group", "several"],
)
async def test_snooze_alone_snoozes_and_the_attempt_does_not_count(store: Store, error: Exception, delay: int) -> None:
    async def handler(_: object) -> None:
        raise error

    found = await job(store.queue("q"), await worked(store, handler))
    assert (found.state, found.run_at, found.attempt, found.fence) == ("delayed", after(store, delay), 0, 1)


async def test_snooze_beside_a_failure_is_a_failure(store: Store) -> None:
    async def handler(_: object) -> None:
        raise ExceptionGroup("g", [Snooze(60), ValueError("no")])

    found = await job(store.queue("q"), await worked(store, handler))
    assert (found.run_at, found.attempt) == (after(store, 5), 1)


async def test_every_leaf_of_a_group_is_named_in_the_error(store: Store) -> None:
    """T03."""

    async def fail(error: Exception) -> None:
        raise error

    async def handler(_: object) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ValueError("one"))
            nursery.start_soon(fail, KeyError("two"))

    error = (await job(store.queue("q"), await worked(store, handler))).error or ""
    assert "ValueError: one" in error
    assert "KeyError: 'two'" in error


async def test_a_handler_that_fails_while_it_is_being_cancelled_has_its_error_recorded(store: Store) -> None:
    """T03: and the worker does not swallow its own cancellation."""
    queue = store.queue("q")
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("clean-up")

    with trio.move_on_after(5) as scope:
        await queue.work(handler, stop=StopToken())
    assert scope.cancelled_caught
    assert (await job(queue, id)).error == "ValueError: clean-up"


async def test_a_handler_whose_own_time_limit_struck_has_returned(store: Store) -> None:
    """T03."""

    async def handler(_: object) -> None:
        with trio.move_on_after(0):
            await trio.sleep_forever()

    assert await store.get_job(await worked(store, handler)) is None


@pytest.mark.parametrize(
    ("settle", "state"), [("ack", None), ("retry", "delayed"), ("fail", "dead"), ("snooze", "delayed")]
)
@pytest.mark.parametrize("raises", [False, True])
async def test_a_handler_that_settles_its_job_has_settled_it(
    store: Store, settle: str, state: str | None, raises: bool
) -> None:
    async def handler(handle: JobHandle) -> None:
        call: dict[str, Callable[[], Awaitable[bool]]] = {
            "ack": handle.ack,
            "retry": lambda: handle.retry("mine", delay=77),
            "fail": lambda: handle.fail("mine"),
            "snooze": lambda: handle.snooze(77),
        }
        assert await call[settle]()
        if raises:
            raise ValueError("not any more")

    with store.events() as events:
        found = await store.get_job(await worked(store, handler))
        assert len(seen(events, "settled")) == 1
        assert seen(events, "lost") == []
    assert (None if found is None else found.state) == state
    if found is not None and state == "delayed":
        assert found.run_at == after(store, 77)


async def test_a_handler_that_has_settled_its_job_may_go_on_for_as_long_as_it_likes(store: Store) -> None:
    queue = store.queue("q", visibility=10)
    await queue.enqueue(1)
    ended = False

    async def handler(handle: JobHandle) -> None:
        nonlocal ended
        assert await handle.ack()
        assert not await handle.ack()  # in vain, and of no consequence
        assert not await handle.heartbeat()
        await trio.sleep(1_000)
        assert not handle.cancelled
        ended = True

    with store.events() as events:
        async with running(queue.work, handler):
            await trio.sleep(1_001)
        assert seen(events, "lost") == []
    assert ended


async def test_as_many_handlers_run_at_once_as_were_asked_for(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(10))
    inside = most = 0

    async def handler(_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await trio.sleep(1)
        inside -= 1

    began = trio.current_time()
    async with running(queue.work, handler, concurrency=4):
        await trio.sleep(2.5)
        assert (await queue.counts()).leased == 2
    assert most == 4
    assert trio.current_time() - began == 3


async def test_one_handler_runs_at_once_by_itself(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(3))

    async def handler(_: object) -> None:
        assert (await queue.counts()).leased == 1

    async with running(queue.work, handler):
        await calm()
    assert (await queue.counts()).ready == 0


async def test_jobs_are_worked_in_claim_order(store: Store) -> None:
    queue = store.queue("q")
    for priority in (0, 5, -5, 5):
        await queue.enqueue(priority, priority=priority)
    order: list[object] = []

    async def handler(handle: JobHandle) -> None:
        order.append(handle.payload)

    async with running(queue.work, handler):
        await calm()
    assert order == [5, 5, 0, -5]


async def test_a_worker_sleeps_until_there_is_work(store: Store) -> None:
    queue = store.queue("q")
    done: list[object] = []

    async def handler(_: object) -> None:
        done.append(now(store))

    async with running(queue.work, handler):
        await trio.sleep(1_000)
        await queue.enqueue(1)
        at = now(store)
        await calm()
        await queue.enqueue(2, delay=500)
        await trio.sleep(1_000)
    assert done == [at, at + (done[1] - at)]  # type: ignore[operator]
    assert (done[1] - at).total_seconds() == 500  # type: ignore[operator]


async def test_every_call_to_work_has_a_worker_of_its_own(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(2))
    workers: set[str | None] = set()

    async def handler(handle: JobHandle) -> None:
        workers.add(handle.job.worker)
        await trio.sleep(1)

    async with running(queue.work, handler), running(queue.work, handler):
        await calm()
    assert len(workers) == 2


# -------------------------------------------------------------------------------------------------------- time limit


async def test_a_handler_that_runs_too_long_is_cancelled_and_retried(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1)
    ended: list[float] = []

    async def handler(_: object) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    began = trio.current_time()
    async with running(queue.work, handler, timeout=7):
        await trio.sleep(8)
    found = await job(queue, id)
    assert ended == [began + 7]
    assert (found.state, found.attempt) == ("delayed", 1)
    assert "timeout of 7 s" in (found.error or "")


async def test_a_handler_has_all_the_time_it_wants_by_itself(store: Store) -> None:
    queue = store.queue("q", visibility=10)
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        await trio.sleep(500)

    async with running(queue.work, handler):
        await trio.sleep(501)
    assert await queue.get_job(id) is None


async def test_a_time_limit_is_per_attempt(store: Store) -> None:
    queue = store.queue("q", backoff=1, max_attempts=2)
    id = await queue.enqueue(1)

    async def handler(handle: JobHandle) -> None:
        await trio.sleep(10 if handle.attempt == 1 else 4)

    async with running(queue.work, handler, timeout=5):
        await trio.sleep(20)
    assert await queue.get_job(id) is None


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_what_ends_programs_leaves_the_worker_as_itself(store: Store, error: BaseException) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await queue.work(handler, stop=StopToken())
    assert caught.value is error
    assert (await job(queue, id)).state != "leased"


async def test_a_partial_and_a_method_are_handlers(store: Store) -> None:
    class Mailer:
        def __init__(self) -> None:
            self.sent = 0

        async def send(self, by: int, _: object) -> None:
            self.sent += by

    mailer = Mailer()
    await worked(store, partial(mailer.send, 2))
    assert mailer.sent == 2
