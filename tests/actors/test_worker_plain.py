"""Worker: plain functions run in threads, are told to stop, and are abandoned when they do not.

Time stands still in these tests (a thread does not count as work to an autojump clock) and is moved by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.handlers import HandlerTimeout, PlainCall, is_async
from actors.keeper import LOOK_AFTER
from actors.ports import Interrupted, Raised, Returned
from actors.stop import StopToken
from actors.worker import Worker
from tests.actors.fakes import FakeSource, FakeWork


class Blocking:
    """A plain handler that runs until it is let go, and says that it has begun."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.gone_on = threading.Event()
        self.may_end = threading.Event()
        self.calls = 0

    def __call__(self, work: FakeWork) -> None:
        self.calls += 1
        trio.from_thread.run_sync(self.begun.set)
        assert self.may_end.wait(10)
        self.gone_on.set()


@pytest.fixture
def blocking() -> Any:
    handler = Blocking()
    yield handler
    handler.may_end.set()


async def run_until(
    source: FakeSource, handler: Callable[[FakeWork], object], condition: Callable[[], Any], **options: Any
) -> None:
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        await nursery.start(Worker(source, handler, **options).run, stop)
        await source.until(condition)
        stop.stop()


# --- calls ---


async def test_a_plain_handler_runs_in_a_thread(mock_clock: MockClock) -> None:
    threads: list[threading.Thread] = []
    source = FakeSource(FakeWork())
    await run_until(source, lambda _: threads.append(threading.current_thread()), lambda: source.settled)
    assert source.outcome() == Returned()
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("bad"), ExceptionGroup("both", [ValueError(), KeyError()])])
async def test_its_error_is_recorded_as_it_is(error: Exception, mock_clock: MockClock) -> None:
    def handler(work: FakeWork) -> None:
        raise error

    source = FakeSource(FakeWork())
    await run_until(source, handler, lambda: source.settled)
    assert isinstance(outcome := source.outcome(), Raised)
    assert outcome.error is error


async def test_its_system_exit_counts_as_an_attempt_and_leaves(mock_clock: MockClock) -> None:
    def handler(work: FakeWork) -> None:
        raise SystemExit(3)

    source = FakeSource(FakeWork())
    with pytest.raises(SystemExit):
        await Worker(source, handler).run(StopToken())
    assert isinstance(source.outcome(), Raised)


async def nothing() -> None: ...


def returns_an_awaitable(work: FakeWork) -> Awaitable[None]:
    return nothing()


@pytest.mark.parametrize("handler", [returns_an_awaitable, partial(returns_an_awaitable)])
async def test_a_plain_function_that_returns_an_awaitable_says_what_to_do(
    handler: Callable[[FakeWork], object], mock_clock: MockClock
) -> None:
    source = FakeSource(FakeWork())
    await run_until(source, handler, lambda: source.settled)
    assert isinstance(outcome := source.outcome(), Raised)
    assert type(outcome.error) is TypeError
    assert str(outcome.error) == (
        "the plain function returns_an_awaitable returned an awaitable or a generator, of which nothing runs in its "
        "thread: declare the handler with `async def` (and await the result in it), or return something else"
    )


async def test_plain_handlers_never_wait_for_trios_own_threads(mock_clock: MockClock) -> None:
    trio.to_thread.current_default_thread_limiter().total_tokens = 1

    async def in_trios_own_thread() -> None:
        await trio.to_thread.run_sync(int)

    def handler(work: FakeWork) -> None:
        trio.from_thread.run(in_trios_own_thread)

    source = FakeSource(*(FakeWork() for _ in range(100)))
    with trio.fail_after(10):
        await run_until(source, handler, lambda: len(source.settled) == 100, concurrency=20)
    assert all(outcome == Returned() for _, outcome in source.settled)


# --- stopping ---


async def test_is_told_when_the_grace_begins_and_may_end_in_it(
    nursery: trio.Nursery, mock_clock: MockClock, blocking: Blocking
) -> None:
    work = FakeWork()
    source = FakeSource(work)
    stop = StopToken()
    nursery.start_soon(Worker(source, blocking, grace=5).run, stop)
    await blocking.begun.wait()
    stop.stop()
    await source.until_logged("told work")
    assert work.told == ["shutdown"]
    mock_clock.jump(4)
    blocking.may_end.set()
    await source.until(lambda: source.settled)
    assert source.outcome() == Returned()
    assert source.left_running == []


async def test_after_the_grace_it_is_abandoned_reported_and_left_to_its_lease(
    mock_clock: MockClock, blocking: Blocking
) -> None:
    work = FakeWork()
    source = FakeSource(work)
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(source, blocking, grace=5).run, stop)
        await blocking.begun.wait()
        stop.stop()
        await source.until_logged("told work")
        assert source.left_running == []
        mock_clock.jump(5)
    assert source.left_running == [(work, "shutdown")]
    assert source.settled == source.refused == []
    assert not blocking.gone_on.is_set()


async def test_what_an_abandoned_one_raises_at_last_is_reported(mock_clock: MockClock, blocking: Blocking) -> None:
    def fails(work: FakeWork) -> None:
        blocking(work)
        raise ValueError("at last")

    work = FakeWork()
    source = FakeSource(work)
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(source, fails, grace=5).run, stop)
        await blocking.begun.wait()
        stop.stop()
        await source.until_logged("told work")
        mock_clock.jump(5)
    assert source.late_errors == []
    blocking.may_end.set()
    await source.until_logged("raised work")
    ((of, error),) = source.late_errors
    assert (of, str(error)) == (work, "at last")


async def test_an_outer_cancellation_abandons_it_too(mock_clock: MockClock, blocking: Blocking) -> None:
    work = FakeWork()
    source = FakeSource(work)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(source, blocking).run, StopToken())
        await blocking.begun.wait()
        nursery.cancel_scope.cancel()
    assert work.told == ["cancellation"]
    assert source.left_running == [(work, "cancellation")]
    assert source.settled == []


def by_timeout(work: FakeWork, source: FakeSource, clock: MockClock) -> None:
    clock.jump(7)


def by_user(work: FakeWork, source: FakeSource, clock: MockClock) -> None:
    work.cancel("not wanted any more")


def by_lost_lease(work: FakeWork, source: FakeSource, clock: MockClock) -> None:
    work.gone = True
    source.step(11)
    clock.jump(LOOK_AFTER)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (by_timeout, "the handler ran longer than its timeout of 7 s"),
        (by_user, "not wanted any more"),
        (by_lost_lease, "the lease was lost"),
    ],
)
async def test_is_abandoned_at_once_by_a_timeout_a_cancellation_or_a_lost_lease(
    how: Callable[[FakeWork, FakeSource, MockClock], None],
    reason: str,
    nursery: trio.Nursery,
    mock_clock: MockClock,
    blocking: Blocking,
) -> None:
    work = FakeWork(lease=30)
    source = FakeSource(work)
    stop = StopToken()
    nursery.start_soon(Worker(source, blocking, timeout=7).run, stop)
    await blocking.begun.wait()
    how(work, source, mock_clock)
    await source.until_logged("abandoned work")
    stop.stop()
    assert work.told == [reason]
    assert source.left_running == [(work, reason)]
    assert source.settled == source.refused == []


async def test_an_abandoned_function_holds_its_slot_until_it_ends(
    nursery: trio.Nursery, mock_clock: MockClock, blocking: Blocking
) -> None:
    source = FakeSource(FakeWork("stuck"), FakeWork("next"))
    stop = StopToken()

    def handler(work: FakeWork) -> None:
        if work.name == "stuck":
            blocking(work)

    nursery.start_soon(Worker(source, handler, timeout=7).run, stop)
    await blocking.begun.wait()
    mock_clock.jump(7)
    await source.until_logged("abandoned stuck")
    await wait_all_tasks_blocked(0.01)
    assert source.limits == [1]
    blocking.may_end.set()
    await source.until(lambda: source.settled)
    stop.stop()
    assert [(work.name, outcome) for work, outcome in source.settled] == [("next", Returned())]


async def test_a_function_may_end_after_trio_has_ended() -> None:
    blocking = Blocking()
    errors: list[Any] = []

    async def abandon() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Worker(FakeSource(FakeWork()), blocking).run, StopToken())
            await blocking.begun.wait()
            nursery.cancel_scope.cancel()

    threading.excepthook, before = errors.append, threading.excepthook
    try:
        await trio.to_thread.run_sync(trio.run, abandon)
        blocking.may_end.set()
        assert await trio.to_thread.run_sync(blocking.gone_on.wait, 10)
    finally:
        threading.excepthook = before
    assert errors == []


# --- one call ---


async def test_cancelled_before_it_began_a_function_never_begins() -> None:
    calls: list[int] = []
    limiter = trio.CapacityLimiter(1)
    call = PlainCall(partial(calls.append, 1), ended_late=lambda _error: None)
    async with limiter:
        with trio.move_on_after(0):
            await call.run(limiter)
    assert not call.abandoned
    call._in_thread()  # the thread that comes too late
    assert calls == []


async def test_a_work_whose_function_never_began_goes_back(mock_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    blocking = Blocking()
    source.note = lambda what: nursery.cancel_scope.cancel()  # type: ignore[method-assign]  # when it is started
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(source, blocking).run, StopToken())
    assert source.outcome() == Interrupted("cancellation")
    assert blocking.calls == 0


@pytest.mark.parametrize("error", [None, ValueError("bad")])
async def test_a_function_that_ended_in_the_moment_of_the_cancellation_has_ended(error: Exception | None) -> None:
    begun = trio.Event()
    may_end = threading.Event()

    def function() -> None:
        trio.from_thread.run_sync(begun.set)
        may_end.wait(10)
        if error is not None:
            raise error

    raised: list[Exception] = []
    call = PlainCall(function, ended_late=lambda _error: None)

    async def run() -> None:
        try:
            await call.run(trio.CapacityLimiter(1))
        except ValueError as caught:
            raised.append(caught)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await begun.wait()
        may_end.set()
        while not call._ended:  # without a checkpoint: trio has not heard of the end yet
            pass
        nursery.cancel_scope.cancel()
    assert raised == ([] if error is None else [error])
    assert not call.abandoned


# --- kinds of handlers ---


class AsyncCall:
    async def __call__(self, work: object) -> None: ...

    def plain(self, work: object) -> None: ...

    @staticmethod
    async def static(work: object) -> None: ...

    @classmethod
    async def of_class(cls, work: object) -> None: ...


class PlainCallable:
    def __call__(self, work: object) -> None: ...


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (AsyncCall(), True),
        (AsyncCall.static, True),
        (AsyncCall.of_class, True),
        (AsyncCall().__call__, True),
        (partial(partial(AsyncCall())), True),
        (AsyncCall().plain, False),
        (AsyncCall, False),  # calling the class makes an object, not a coroutine
        (PlainCallable(), False),
        (partial(PlainCallable()), False),
        (print, False),
        (lambda _: None, False),
    ],
)
def test_is_async(handler: Callable[..., object], expected: bool) -> None:
    assert is_async(handler) is expected


def test_a_handler_timeout_is_a_timeout() -> None:
    assert issubclass(HandlerTimeout, TimeoutError)
