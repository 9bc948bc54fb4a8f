"""The Coordinator: bounded cycles, one at a time, asleep while nothing is due, stopped within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from actors.coordinator import Coordinator
from actors.stop import StopToken

PERIOD, STOP_WITHIN = 5.0, 10.0


class FakeCycles:
    """Cycles that take as long as they are told, and find something to do after `waits` seconds."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []
        self.takes = 0.0
        self.waits: list[float | None] = []
        """What each cycle returns in turn; then None."""
        self.recovery_takes = 0.0
        self.error: Exception | None = None
        self.on_cycle: Callable[[], object] = lambda: None
        self.change = trio.Event()
        self.running = 0

    def times(self, what: str = "cycle") -> list[float]:
        return [moment for found, moment in self.log if found == what]

    async def recover(self) -> None:
        self.note("recover")
        await trio.sleep(self.recovery_takes)
        if self.error is not None:
            raise self.error

    async def cycle(self) -> float | None:
        self.note("cycle")
        self.running += 1
        assert self.running == 1, "cycles overlap"
        try:
            self.on_cycle()
            await trio.sleep(self.takes)
        finally:
            self.running -= 1
        return self.waits.pop(0) if self.waits else None

    async def changed(self, within: float | None) -> None:
        with trio.move_on_after(math.inf if within is None else max(within, 0)):
            await self.change.wait()
        self.change = trio.Event()

    def note(self, what: str) -> None:
        self.log.append((what, trio.current_time()))


def coordinator(cycles: FakeCycles) -> Coordinator:
    return Coordinator(cycles, period=PERIOD, stop_within=STOP_WITHIN)


async def run_for(cycles: FakeCycles, seconds: float) -> bool:
    """Run for so long, then stop; return what it has returned."""
    stop = StopToken()
    result: list[bool] = []

    async def run() -> None:
        result.append(await coordinator(cycles).run(stop))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.sleep(seconds)
        stop.stop()
    return result[0]


async def test_it_recovers_before_the_first_cycle(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    await run_for(cycles, 1)
    assert [what for what, _ in cycles.log] == ["recover", "cycle"]


async def test_it_is_ready_when_the_first_cycle_has_ended(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.recovery_takes, cycles.takes = 2, 3
    await nursery.start(coordinator(cycles).run, StopToken())
    assert trio.current_time() == 5
    nursery.cancel_scope.cancel()


async def test_an_error_of_the_recovery_comes_before_it_is_ready(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.error = LookupError("no")
    with pytest.RaisesGroup(LookupError):
        async with trio.open_nursery() as nursery:
            await nursery.start(coordinator(cycles).run, StopToken())
            raise AssertionError("it was ready")
    assert cycles.times() == []


async def test_an_error_of_the_first_cycle_comes_before_it_is_ready(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.on_cycle = lambda: 1 // 0
    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            await nursery.start(coordinator(cycles).run, StopToken())
            raise AssertionError("it was ready")


async def test_an_error_of_a_later_cycle_leaves_as_it_is(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits = [0]
    cycles.on_cycle = lambda: 1 // (2 - len(cycles.times()))
    with pytest.raises(ZeroDivisionError):
        await coordinator(cycles).run(StopToken())
    assert cycles.times() == [0, PERIOD]


async def test_with_more_to_do_it_cycles_once_a_period(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits = [0, -1, 0.5]
    await run_for(cycles, 100)
    assert cycles.times() == [0, 5, 10, 15.5]


async def test_the_period_counts_from_the_beginning_of_a_cycle(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits, cycles.takes = [0, 0], 2
    await run_for(cycles, 100)
    assert cycles.times() == [0, 5, 10]


async def test_cycles_that_take_longer_than_the_period_follow_each_other(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits, cycles.takes = [0] * 3, 12
    await run_for(cycles, 100)
    assert cycles.times() == [0, 12, 24, 36]


async def test_it_sleeps_until_the_soonest_moment(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits = [3_600]
    await run_for(cycles, 10_000)
    (_, second) = cycles.times()
    assert second - PERIOD == 3_600


async def test_with_nothing_due_it_cycles_once_and_sleeps(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    await run_for(cycles, 365 * 86_400)
    assert cycles.times() == [0]


async def test_a_change_wakes_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    nursery.start_soon(coordinator(cycles).run, StopToken())
    await trio.sleep(100)
    cycles.change.set()
    await trio.testing.wait_all_tasks_blocked()
    assert cycles.times() == [0, 100]
    nursery.cancel_scope.cancel()


async def test_many_changes_cost_one_cycle_a_period(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    nursery.start_soon(coordinator(cycles).run, StopToken())
    for _ in range(100):
        await trio.sleep(0.5)
        cycles.change.set()
    assert all(after - before >= PERIOD for before, after in pairwise(cycles.times()))
    assert len(cycles.times()) <= 12
    nursery.cancel_scope.cancel()


# ----------------------------------------------------------------------------------------------------------- stop


async def test_stopped_while_it_sleeps_it_ends_at_once(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    assert await run_for(cycles, 100)
    assert trio.current_time() == 100


async def test_stopped_before_it_begins_it_runs_no_cycle(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    stop = StopToken()
    stop.stop()
    async with trio.open_nursery() as nursery:
        await nursery.start(coordinator(cycles).run, stop)
    assert cycles.times() == []
    assert trio.current_time() == 0


async def test_a_cycle_in_flight_ends_before_it_does(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.takes = 9
    assert await run_for(cycles, 1)
    assert trio.current_time() == 9


async def test_after_a_stop_no_cycle_begins(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits, cycles.takes = [0] * 9, 9
    await run_for(cycles, 1)
    assert cycles.times() == [0]


async def test_a_cycle_that_does_not_end_in_time_is_cancelled_and_that_is_told(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.waits = [0]
    cycles.on_cycle = lambda: setattr(cycles, "takes", math.inf if len(cycles.times()) == 2 else 0)
    assert not await run_for(cycles, PERIOD + 1)
    assert trio.current_time() == PERIOD + 1 + STOP_WITHIN


@pytest.mark.parametrize("recovering", [True, False])
async def test_a_stop_during_the_start_is_bounded_too(autojump_clock: MockClock, recovering: bool) -> None:
    """Whoever waits for the start is let go."""
    cycles = FakeCycles()
    cycles.recovery_takes, cycles.takes = (math.inf, 0) if recovering else (0, math.inf)
    stop = StopToken()
    async with trio.open_nursery() as nursery:

        async def stop_soon() -> None:
            await trio.sleep(1)
            stop.stop()

        nursery.start_soon(stop_soon)
        await nursery.start(coordinator(cycles).run, stop)
    assert trio.current_time() == 1 + STOP_WITHIN


async def test_a_stop_during_the_recovery_leaves_the_first_cycle_out(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.recovery_takes = 3
    assert await run_for(cycles, 1)
    assert cycles.times() == []


async def test_cancelled_it_passes_that_on(autojump_clock: MockClock) -> None:
    cycles = FakeCycles()
    cycles.takes = math.inf
    with trio.move_on_after(3) as scope:
        await coordinator(cycles).run(StopToken())
    assert scope.cancelled_caught
    assert (trio.current_time(), cycles.running) == (3, 0)
