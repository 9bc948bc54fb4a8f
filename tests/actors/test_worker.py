"""Worker: slots, outcomes, errors, options."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors.handlers import HandlerTimeout
from actors.ports import Interrupted, Outcome, Raised, Returned
from actors.stop import StopToken
from actors.unwinding import LAST_WRITE_WITHIN
from actors.worker import Worker
from tests.actors.fakes import FakeSource, FakeWork


async def run_until(
    source: FakeSource, handler: Callable[[FakeWork], object], condition: Callable[[], Any], **options: Any
) -> None:
    """Run a worker until the condition holds, then stop it."""
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        await nursery.start(Worker(source, handler, **options).run, stop)
        await source.until(condition)
        stop.stop()


async def outcome_of(handler: Callable[[FakeWork], object], **options: Any) -> Outcome:
    source = FakeSource(FakeWork())
    await run_until(source, handler, lambda: source.settled, **options)
    return source.outcome()


async def nothing(work: FakeWork) -> None:
    await trio.lowlevel.checkpoint()


def raising(error: BaseException) -> Callable[[FakeWork], object]:
    async def handler(work: FakeWork) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    return handler


# --- taking ---


async def test_hands_each_work_to_the_handler_and_settles_it(autojump_clock: MockClock) -> None:
    works = [FakeWork(f"{n}") for n in range(5)]
    source = FakeSource(*works)
    seen: list[FakeWork] = []

    async def handler(work: FakeWork) -> None:
        seen.append(work)

    await run_until(source, handler, lambda: len(source.settled) == 5)
    assert seen == works
    assert source.settled == [(work, Returned()) for work in works]


async def test_never_has_more_in_hand_than_slots(autojump_clock: MockClock) -> None:
    source = FakeSource(*(FakeWork(lease=1_000) for _ in range(7)))
    in_hand = most = 0

    async def handler(work: FakeWork) -> None:
        nonlocal in_hand, most
        in_hand += 1
        most = max(most, in_hand)
        await trio.sleep(10)
        in_hand -= 1

    await run_until(source, handler, lambda: len(source.settled) == 7, concurrency=3)
    assert most == 3
    assert source.limits[0] == 3
    assert all(1 <= limit <= 3 for limit in source.limits)


async def test_a_slot_is_taken_until_its_work_is_settled(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("first"), FakeWork("second"))
    source.settle_takes = 5
    stop = StopToken()
    await nursery.start(Worker(source, nothing).run, stop)
    await source.until_logged("started second")
    assert trio.current_time() == 5
    stop.stop()


async def test_takes_as_many_as_are_free(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    release = trio.Event()

    async def handler(work: FakeWork) -> None:
        await release.wait()

    await nursery.start(Worker(source, handler, concurrency=4).run, stop)
    await source.until_logged("started work")
    await trio.testing.wait_all_tasks_blocked()
    assert source.limits == [4, 3]
    release.set()
    stop.stop()


async def test_an_empty_take_is_looked_at_again_at_once(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    source.empty_takes = 3
    await run_until(source, nothing, lambda: source.settled)
    assert trio.current_time() == 0


async def test_ready_before_there_is_work(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stop = StopToken()
    await nursery.start(Worker(FakeSource(), nothing).run, stop)
    stop.stop()


async def test_one_worker_may_run_twice_at_once_and_again(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(), FakeWork())
    worker = Worker(source, nothing)
    for expected in (2, 4):
        stop = StopToken()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, stop)
            nursery.start_soon(worker.run, stop)
            await source.until(lambda: len(source.settled) == expected)  # noqa: B023  awaited here
            stop.stop()
        source.add(FakeWork(), FakeWork())


async def test_no_work_is_kept_after_it_was_settled(autojump_clock: MockClock) -> None:
    class Forgetful(FakeSource):
        count = 0

        def started(self, work: FakeWork, cancel: Callable[[str], None], look: Callable[[], None]) -> None:
            hands.append(weakref.ref(cancel.__self__))  # type: ignore[attr-defined]  # what the worker keeps of it

        async def settle(self, work: FakeWork, outcome: Outcome) -> None:
            self.count += 1
            self.moved()

    source = Forgetful(*(FakeWork() for _ in range(200)))
    hands: list[weakref.ref[object]] = []
    left: list[int] = []

    async def handler(work: FakeWork) -> None:
        if source.count == 199:
            left.append(sum(hand() is not None for hand in hands))
        if source.count % 2:
            raise ValueError

    gc.disable()  # nothing is even left to the collector
    try:
        await run_until(source, handler, lambda: source.count == 200)
    finally:
        gc.enable()
    assert left in ([1], [2])  # itself, and perhaps one whose task trio has not let go of


async def test_a_work_costs_few_task_switches(autojump_clock: MockClock) -> None:
    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    class Quiet(FakeSource):
        def note(self, what: str) -> None:  # wakes nobody
            if len(self.settled) == 1_000:
                stop.stop()

    source = Quiet(*(FakeWork() for _ in range(1_000)))
    stop = StopToken()
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    await Worker(source, nothing).run(stop)
    trio.lowlevel.remove_instrument(steps)
    # Two of the intake (a free slot, a take) and three of the work (start, the handler's own checkpoint, settle).
    assert steps.count < 5 * 1_000 + 20


# --- outcomes ---


async def test_a_handler_whose_own_time_limit_expired_has_returned(autojump_clock: MockClock) -> None:
    async def handler(work: FakeWork) -> None:
        with trio.move_on_after(1):
            await trio.sleep_forever()

    assert await outcome_of(handler) == Returned()


async def test_an_error_is_recorded_as_it_is(autojump_clock: MockClock) -> None:
    error = ValueError("bad")
    outcome = await outcome_of(raising(error))
    assert isinstance(outcome, Raised)
    assert outcome.error is error


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("both", [ValueError(), KeyError()]),
        ExceptionGroup("single", [ValueError()]),
        ExceptionGroup("nested", [ExceptionGroup("inner", [ValueError()]), KeyError()]),
    ],
)
async def test_a_group_keeps_its_shape(error: ExceptionGroup[Exception], autojump_clock: MockClock) -> None:
    outcome = await outcome_of(raising(error))
    assert isinstance(outcome, Raised)
    assert outcome.error is error


async def test_a_failing_handler_does_not_disturb_the_others(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("bad"), FakeWork("good"))

    async def handler(work: FakeWork) -> None:
        if work.name == "bad":
            raise ValueError
        await trio.sleep(1)

    await run_until(source, handler, lambda: len(source.settled) == 2, concurrency=2)
    assert [(work.name, type(outcome)) for work, outcome in source.settled] == [
        ("bad", Raised),
        ("good", Returned),
    ]


async def test_a_timeout_is_an_error_that_names_the_limit(autojump_clock: MockClock) -> None:
    async def handler(work: FakeWork) -> None:
        await trio.sleep_forever()

    outcome = await outcome_of(handler, timeout=2.5)
    assert isinstance(outcome, Raised)
    assert type(outcome.error) is HandlerTimeout
    assert isinstance(outcome.error, TimeoutError)
    assert str(outcome.error) == "the handler ran longer than its timeout of 2.5 s"
    assert trio.current_time() == 2.5


async def test_a_handler_that_returns_in_spite_of_its_timeout_has_returned(autojump_clock: MockClock) -> None:
    async def handler(work: FakeWork) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)

    assert await outcome_of(handler, timeout=2) == Returned()


async def test_an_error_raised_because_of_the_timeout_names_both(autojump_clock: MockClock) -> None:
    async def handler(work: FakeWork) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while cleaning up")

    outcome = await outcome_of(handler, timeout=2)
    assert isinstance(outcome, Raised)
    assert type(outcome.error) is ValueError
    assert outcome.error.__notes__ == ["raised after the handler ran longer than its timeout of 2 s"]


async def test_a_work_cancelled_by_a_user_stops_at_once_and_is_not_settled(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    first = FakeWork("first")
    source = FakeSource(first, FakeWork("second"))
    stop = StopToken()
    ended: list[float] = []

    async def handler(work: FakeWork) -> None:
        if work is first:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())

    await nursery.start(Worker(source, handler).run, stop)
    await trio.sleep(3)
    first.cancel("not wanted any more")
    await source.until(lambda: source.settled)
    stop.stop()
    assert ended == [3]
    assert [work.name for work, _ in source.settled] == ["second"]


async def test_a_work_cancelled_before_its_handler_began_never_begins(autojump_clock: MockClock) -> None:
    class Impatient(FakeSource):
        def started(self, work: FakeWork, cancel: Callable[[str], None], look: Callable[[], None]) -> None:
            if work.name == "cancelled":
                cancel("at once")

    source = Impatient(FakeWork("cancelled"), FakeWork("good"))
    begun: list[str] = []

    async def handler(work: FakeWork) -> None:
        begun.append(work.name)

    await run_until(source, handler, lambda: source.settled)
    assert begun == ["good"]


async def test_cancelling_a_work_that_has_ended_does_nothing(autojump_clock: MockClock) -> None:
    work = FakeWork()
    source = FakeSource(work)
    source.on_settle = lambda _: work.cancel("too late")
    await run_until(source, nothing, lambda: source.settled)
    work.cancel("much too late")
    assert source.outcome() == Returned()


async def test_an_error_of_a_cancelled_work_is_not_settled_either(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    work = FakeWork()
    source = FakeSource(work)
    stop = StopToken()

    async def handler(work: FakeWork) -> None:
        work.cancel("not wanted any more")
        raise ValueError

    await nursery.start(Worker(source, handler).run, stop)
    await trio.testing.wait_all_tasks_blocked()
    stop.stop()
    assert source.settled == []


# --- what leaves the worker ---


async def crash(source: FakeSource, handler: Callable[[FakeWork], object], **options: Any) -> None:
    """Run a worker that is expected to end by itself."""
    await Worker(source, handler, **options).run(StopToken())


async def test_system_exit_counts_as_an_attempt_and_leaves_as_itself(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("poison"), FakeWork("other"))
    error = SystemExit(3)

    async def handler(work: FakeWork) -> None:
        if work.name == "poison":
            raise error
        await trio.sleep_forever()

    with pytest.raises(SystemExit) as caught:
        await crash(source, handler, concurrency=2)
    assert caught.value is error
    outcomes = {work.name: outcome for work, outcome in source.settled}
    assert isinstance(poison := outcomes["poison"], Raised)
    assert poison.error is error
    assert outcomes["other"] == Interrupted("cancellation")


async def test_system_exit_in_a_group_is_recorded_with_the_group(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    with pytest.raises(SystemExit):
        await crash(source, raising(BaseExceptionGroup("", [SystemExit(3), ValueError("too")])))
    assert isinstance(outcome := source.outcome(), Raised)
    assert isinstance(outcome.error, BaseExceptionGroup)
    assert [type(error) for error in outcome.error.exceptions] == [SystemExit, ValueError]


async def test_keyboard_interrupt_gives_the_work_back_and_leaves_as_itself(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    source.settle_takes = 1
    with pytest.raises(KeyboardInterrupt):
        await crash(source, raising(KeyboardInterrupt()))
    assert source.outcome() == Interrupted("KeyboardInterrupt")


async def test_a_second_control_c_leaves_as_one_keyboard_interrupt(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("a"), FakeWork("b"))
    with pytest.raises(KeyboardInterrupt):
        await crash(source, raising(KeyboardInterrupt()), concurrency=2)
    assert [outcome for _, outcome in source.settled] == [Interrupted("KeyboardInterrupt")] * 2


async def test_keyboard_interrupt_beside_an_error_records_the_error(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    with pytest.raises(KeyboardInterrupt):
        await crash(source, raising(BaseExceptionGroup("", [KeyboardInterrupt(), ValueError("real")])))
    assert isinstance(outcome := source.outcome(), Raised)
    assert isinstance(outcome.error, ExceptionGroup)
    assert [str(error) for error in outcome.error.exceptions] == ["real"]


async def test_an_outer_cancellation_gives_the_works_back(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("1"), FakeWork("2"))
    source.settle_takes = 1

    async def handler(work: FakeWork) -> None:
        await trio.sleep_forever()

    with trio.move_on_after(2) as scope:
        await crash(source, handler, concurrency=2)
    assert scope.cancelled_caught
    assert [outcome for _, outcome in source.settled] == [Interrupted("cancellation")] * 2
    assert trio.current_time() == 3


async def test_an_error_raised_while_the_outer_scope_is_cancelled_is_recorded(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())

    async def handler(work: FakeWork) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("real")

    with trio.move_on_after(2) as scope:
        await crash(source, handler)
    assert scope.cancelled_caught
    assert isinstance(outcome := source.outcome(), Raised)
    assert type(outcome.error) is ValueError


async def test_cancelled_and_errors_in_one_group_part_ways(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())

    async def fail() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("real")

    async def handler(work: FakeWork) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)

    with trio.move_on_after(2) as scope:
        await crash(source, handler)
        raise AssertionError("the cancellation was swallowed")
    assert scope.cancelled_caught
    assert isinstance(outcome := source.outcome(), Raised)
    assert isinstance(outcome.error, ExceptionGroup)
    assert [str(error) for error in outcome.error.exceptions] == ["real"]


async def test_a_result_in_spite_of_an_outer_cancellation_is_settled(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    source.settle_takes = 1
    scope = trio.CancelScope()

    async def handler(work: FakeWork) -> None:
        scope.cancel()

    with scope:
        await crash(source, handler)
    assert scope.cancelled_caught
    assert source.outcome() == Returned()


async def test_a_settle_that_fails_is_the_workers_failure_and_the_others_go_back(
    autojump_clock: MockClock,
) -> None:
    source = FakeSource(FakeWork("bad"), FakeWork("other"))
    error = OSError("disk")

    def fail(work: FakeWork) -> None:
        if work.name == "bad":
            raise error

    async def handler(work: FakeWork) -> None:
        await trio.sleep(1 if work.name == "bad" else math.inf)

    source.on_settle = fail
    with pytest.raises(OSError, match="disk") as caught:
        await crash(source, handler, concurrency=2)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert [(work.name, outcome) for work, outcome in source.settled] == [("other", Interrupted("cancellation"))]


@pytest.mark.parametrize(("lease", "within"), [(1, 1 + LAST_WRITE_WITHIN), (1_000, 1_000 + LAST_WRITE_WITHIN)])
async def test_a_settle_that_never_ends_fails_the_worker(
    autojump_clock: MockClock, lease: float, within: float
) -> None:
    source = FakeSource(FakeWork(lease=lease))
    source.settle_takes = math.inf
    with pytest.raises(trio.TooSlowError, match=f"settling a work took more than {within:g} s"):
        await crash(source, nothing)
    assert trio.current_time() == within


async def test_a_settle_that_is_cancelled_is_made_again_under_a_shield(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=1_000))
    source.settle_takes = LAST_WRITE_WITHIN - 1
    with trio.move_on_after(5):
        await Worker(source, nothing).run(StopToken())
    assert trio.current_time() == 5 + source.settle_takes
    assert source.outcome() == Returned()


async def test_a_settle_that_is_cancelled_and_never_ends_fails_the_worker(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=1_000))
    source.settle_takes = math.inf
    with trio.CancelScope(deadline=5), pytest.raises(trio.TooSlowError, match="settling a work took more than 15 s"):
        await Worker(source, nothing).run(StopToken())
    assert trio.current_time() == 5 + LAST_WRITE_WITHIN


async def test_neither_a_keyboard_interrupt_nor_the_failing_settle_is_hidden(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())

    def fail(work: FakeWork) -> None:
        raise OSError("disk")

    source.on_settle = fail
    with pytest.raises(BaseExceptionGroup) as caught:
        await crash(source, raising(KeyboardInterrupt()))
    assert [type(error) for error in caught.value.exceptions] == [KeyboardInterrupt, OSError]


async def test_a_take_that_fails_is_the_workers_failure_and_what_is_in_hand_goes_back(
    autojump_clock: MockClock,
) -> None:
    source = FakeSource(FakeWork())

    def fail() -> None:
        if len(source.limits) == 2:
            raise OSError("disk")

    async def handler(work: FakeWork) -> None:
        await trio.sleep_forever()

    source.on_take = fail
    with pytest.raises(OSError, match="disk"):
        await crash(source, handler, concurrency=2)
    assert source.outcome() == Interrupted("cancellation")


async def test_several_failures_leave_as_a_group(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("1"), FakeWork("2"))

    def fail(work: FakeWork) -> None:
        raise OSError(work.name)

    source.on_settle = fail
    with pytest.raises(ExceptionGroup) as caught:
        await crash(source, nothing, concurrency=2)
    assert {str(error) for error in caught.value.exceptions} == {"1", "2"}


async def test_a_keyboard_interrupt_can_fall_into_the_handler_only(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    protected: dict[str, bool] = {}

    def note(where: str) -> None:
        protected[where] = trio.lowlevel.currently_ki_protected()

    async def handler(work: FakeWork) -> None:
        note("handler")

    source.on_take = lambda: note("take")
    source.on_settle = lambda _: note("settle")
    await run_until(source, handler, lambda: source.settled)
    assert protected == {"take": True, "handler": False, "settle": True}


# --- handlers and options ---


class Sender:
    async def __call__(self, work: FakeWork, extra: int = 0) -> None:
        work.told.append(f"called {extra}")

    async def method(self, work: FakeWork) -> None:
        work.told.append("called 0")


async def with_extra(extra: int, work: FakeWork) -> None:
    work.told.append(f"called {extra}")


@pytest.mark.parametrize(
    ("handler", "called"),
    [
        (Sender(), "called 0"),
        (Sender().method, "called 0"),
        (partial(with_extra, 1), "called 1"),
        (partial(Sender(), extra=2), "called 2"),
        (partial(partial(Sender(), extra=2), extra=3), "called 3"),
    ],
)
async def test_every_kind_of_async_callable_is_awaited(
    handler: Callable[[FakeWork], object], called: str, autojump_clock: MockClock
) -> None:
    work = FakeWork()
    source = FakeSource(work)
    await run_until(source, handler, lambda: source.settled)
    assert source.outcome() == Returned()
    assert work.told == [called]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be from 1 to 1,000, not 0"),
        ({"concurrency": 1_001}, ValueError, "concurrency must be from 1 to 1,000, not 1001"),
        ({"concurrency": 1.5}, TypeError, "concurrency must be a whole number from 1 to 1,000, not 1.5"),
        ({"concurrency": True}, TypeError, "concurrency must be a whole number from 1 to 1,000, not True"),
        ({"timeout": 0}, ValueError, r"timeout must be more than 0 seconds \(None: no limit\), not 0"),
        ({"timeout": -1}, ValueError, "timeout must be from 0 to 604,800 seconds, not -1"),
        ({"timeout": math.inf}, ValueError, "timeout must be from 0 to 604,800 seconds, not inf"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds from 0 to 604,800, not '5'"),
        ({"grace": -0.1}, ValueError, "grace must be from 0 to 604,800 seconds, not -0.1"),
        ({"grace": math.nan}, ValueError, "grace must be from 0 to 604,800 seconds, not nan"),
        ({"grace": None}, TypeError, "grace must be a number of seconds from 0 to 604,800, not None"),
    ],
)
def test_options_are_validated_where_the_worker_is_built(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Worker(FakeSource(), nothing, **options)


async def takes_two(work: object, other: object) -> None: ...


async def generates(work: FakeWork) -> Any:
    yield work


def generates_plainly(work: FakeWork) -> Any:
    yield work


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (generates, "handler must not be a generator: .* has a yield in it"),
        (partial(generates), "handler must not be a generator"),
        (generates_plainly, "handler must not be a generator"),
        (partial(generates_plainly), "handler must not be a generator"),
        (takes_two, "handler is called with one argument, which .* does not take"),
        (partial(takes_two, 1, 2), "handler is called with one argument"),
        ("send", "handler must be a function or another callable, not 'send'"),
        (None, "handler must be a function or another callable, not None"),
    ],
)
def test_what_cannot_be_a_handler_is_refused(handler: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Worker(FakeSource(), handler)


@pytest.mark.parametrize("returned", [nothing, generates, generates_plainly])
async def test_a_handler_that_has_forgotten_to_await_is_not_done(
    autojump_clock: MockClock, returned: Callable[[FakeWork], Any]
) -> None:
    source = FakeSource(FakeWork())

    async def handler(work: FakeWork) -> object:
        return returned(work)

    await run_until(source, handler, lambda: source.settled)
    assert isinstance(outcome := source.outcome(), Raised)
    assert "of which nothing has run: await it" in str(outcome.error)
