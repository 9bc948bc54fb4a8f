"""The Ticker alone, and with Leadership as one group."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from actors.stop import StopToken
from actors.ticker import Ticker, lead_and_tick
from tests.actors.fakes import FakeLease, FakeTicks, Grant, Lost

HOUR = 3600.0


async def granted() -> Grant:
    await trio.lowlevel.checkpoint()
    return Grant("leader", 1)


# --- the ticker alone ---


async def test_fires_what_is_due_and_sleeps_until_the_next_boundary(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    ticks = FakeTicks()
    ticks.due = [0, 10, 25]
    nursery.start_soon(Ticker(ticks, granted).run, StopToken())
    await ticks.until_logged("tick ended", 3)
    assert ticks.fired == [0, 10, 25]
    assert ticks.ticks == [0, 10, 25]


async def test_a_year_of_hourly_boundaries_takes_one_tick_each(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    ticks = FakeTicks()
    ticks.due = [HOUR * n for n in range(1, 8761)]
    stop = StopToken()
    ticks.on_tick = lambda: None if ticks.due else stop.stop()
    await Ticker(ticks, granted).run(stop)
    assert len(ticks.fired) == 8760
    assert len(ticks.ticks) == 8761  # the first found nothing due


async def test_with_nothing_scheduled_it_looks_once_and_sleeps(autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    with trio.move_on_after(365 * 24 * HOUR):
        await Ticker(ticks, granted).run(StopToken())
    assert ticks.ticks == [0]


async def test_a_change_during_the_sleep_wakes_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    ticks.due = [24 * HOUR]
    nursery.start_soon(Ticker(ticks, granted).run, StopToken())
    await trio.sleep(HOUR)
    ticks.change(HOUR + 2)
    await ticks.until(lambda: ticks.fired)
    assert ticks.fired == [HOUR + 2]
    assert trio.current_time() == HOUR + 2


async def test_a_change_between_the_look_and_the_sleep_is_not_missed(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    ticks = FakeTicks()
    ticks.on_tick = lambda: ticks.change(5) if len(ticks.ticks) == 1 else None  # after the tick has looked
    ticks.tick_takes = 1
    nursery.start_soon(Ticker(ticks, granted).run, StopToken())
    await ticks.until(lambda: ticks.fired)
    assert trio.current_time() == 5


async def test_a_stepped_clock_wakes_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    ticks.due = [HOUR]
    nursery.start_soon(Ticker(ticks, granted).run, StopToken())
    await trio.sleep(1)
    ticks.step(2 * HOUR)
    await ticks.until(lambda: ticks.fired)
    assert trio.current_time() == 1


async def test_more_due_than_one_tick_fires_is_fired_at_once(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    ticks.due = [0.0] * 130
    nursery.start_soon(Ticker(ticks, granted).run, StopToken())
    await ticks.until_logged("tick ended", 3)
    assert len(ticks.fired) == 130
    assert ticks.ticks == [0, 0, 0]


async def test_ready_before_it_has_the_lease(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def never() -> Grant:
        await trio.sleep_forever()
        raise AssertionError

    ticks = FakeTicks()
    stop = StopToken()
    await nursery.start(Ticker(ticks, never).run, stop)
    assert ticks.ticks == []
    stop.stop()


async def test_stop_ends_the_sleep(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    stop = StopToken()
    ticks.on_tick = lambda: nursery.start_soon(stop_after, stop, 7)
    await Ticker(ticks, granted).run(stop)
    assert trio.current_time() == 7
    assert ticks.ticks == [0]


async def stop_after(stop: StopToken, seconds: float) -> None:
    await trio.sleep(seconds)
    stop.stop()


async def test_stop_lets_the_tick_in_flight_end_and_begins_no_other(autojump_clock: MockClock) -> None:
    ticks = FakeTicks()
    ticks.due = [0.0] * 130
    stop = StopToken()
    ticks.on_tick = stop.stop
    ticks.tick_takes = 3
    await Ticker(ticks, granted).run(stop)
    assert ticks.log == ["tick begun", "tick ended"]
    assert trio.current_time() == 3


async def test_a_grant_that_comes_with_the_stop_is_not_used(autojump_clock: MockClock) -> None:
    stop = StopToken()

    async def with_the_stop() -> Grant:
        await trio.lowlevel.checkpoint()
        stop.stop()
        return Grant("leader", 1)

    ticks = FakeTicks()
    await Ticker(ticks, with_the_stop).run(stop)
    assert ticks.ticks == []


async def test_stopped_before_it_begins_it_does_nothing(autojump_clock: MockClock) -> None:
    stop = StopToken()
    stop.stop()
    ticks = FakeTicks()
    await Ticker(ticks, granted).run(stop)
    assert ticks.ticks == []


# --- leadership and ticker as one group ---


async def test_a_standby_is_ready_and_stops_without_having_led(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease()
    other = lease.take("another")
    ticks = FakeTicks(lease)
    stop = StopToken()
    await nursery.start(lead_and_tick, lease, ticks, stop)
    await trio.sleep(3)
    stop.stop()
    await trio.testing.wait_all_tasks_blocked()
    assert ticks.ticks == []
    assert lease.holder == other
    assert trio.current_time() == 3


async def test_a_group_that_is_stopped_before_it_begins_never_leads(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease()
    stop = StopToken()
    stop.stop()
    await nursery.start(lead_and_tick, lease, FakeTicks(lease), stop)
    await trio.testing.wait_all_tasks_blocked()
    assert lease.log == []


async def test_stop_releases_the_lease_after_the_tick_in_flight(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease(ttl=30)
    ticks = FakeTicks(lease)
    stop = StopToken()
    ticks.tick_takes = 95  # longer than the lease: it has to be renewed meanwhile
    ticks.on_tick = stop.stop
    ticks.log = lease.log
    assert await lead_and_tick(lease, ticks, stop) is None  # type: ignore[func-returns-value]
    assert lease.log == ["acquired 1", "tick begun", *["renewed"] * 9, "tick ended", "released 1"]


async def test_a_standby_takes_over_at_once_after_a_stop(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    first, second = FakeTicks(lease), FakeTicks(lease)
    stop_first, stop_second = StopToken(), StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lead_and_tick, lease, first, stop_first)
        await first.until_logged("tick ended")
        nursery.start_soon(lead_and_tick, lease, second, stop_second)
        await trio.sleep(100)
        assert second.ticks == []
        stop_first.stop()
        await second.until_logged("tick ended")
        stop_second.stop()
    assert second.ticks == [100]


async def test_a_refused_renewal_is_lost_before_any_further_tick(autojump_clock: MockClock) -> None:
    """The old leader wakes up after its lease was taken (a suspended process)."""
    lease = FakeLease(ttl=30)
    ticks = FakeTicks()  # without a look of its own at the lease: only Leadership is between it and a tick
    ticks.due = [0, 5]

    def suspended() -> None:
        lease.step(100)
        lease.take("another")
        lease.renewed_at = -1_000
        ticks.step(100)

    ticks.on_tick = suspended
    with pytest.raises(Lost) as caught:
        await lead_and_tick(lease, ticks, StopToken())
    assert type(caught.value) is Lost
    assert caught.value.__context__ is None
    assert ticks.fired == [0]
    assert lease.holder == Grant("another", 2)


async def test_lost_seen_by_the_tick_is_raised_alone(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    ticks = FakeTicks(lease)
    ticks.due = [5]
    ticks.on_tick = lambda: lease.take("another")
    with pytest.raises(Lost, match="own look") as caught:
        await lead_and_tick(lease, ticks, StopToken())
    assert type(caught.value) is Lost
    assert lease.holder == Grant("another", 2)


async def test_lost_twice_in_the_same_moment_is_raised_once(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    ticks = FakeTicks()
    ticks.due = [15]  # its tick is in flight when the renewal at 20 is refused
    ticks.tick_takes = 5

    def fail() -> None:
        if trio.current_time() == 20:
            lease.take("another")

    lease.on_renew = fail

    async def late_tick(grant: Grant) -> float | None:
        try:
            return await FakeTicks.tick(ticks, grant)
        finally:
            if trio.current_time() >= 20:
                raise Lost("the tick's")

    ticks.tick = late_tick  # type: ignore[method-assign]
    with pytest.raises(Lost):
        await lead_and_tick(lease, ticks, StopToken())


async def test_lost_during_an_outer_cancellation_is_raised_alone(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    ticks = FakeTicks(lease)
    scope = trio.CancelScope()

    def cancelled_and_lost() -> None:
        scope.cancel()
        raise Lost

    ticks.on_tick = cancelled_and_lost
    with pytest.raises(Lost), scope:
        await lead_and_tick(lease, ticks, StopToken())
    assert lease.holder is None


async def test_another_error_leaves_as_itself_and_the_lease_is_released(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    ticks = FakeTicks(lease)
    error = OSError("disk")

    def fail() -> None:
        raise error

    ticks.on_tick = fail
    with pytest.raises(OSError, match="disk") as caught:
        await lead_and_tick(lease, ticks, StopToken())
    assert caught.value is error
    assert lease.log[-1] == "released 1"


async def test_two_errors_leave_as_a_group(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    ticks = FakeTicks(lease)

    def fail(what: str) -> None:
        raise OSError(what)

    ticks.on_tick = lambda: fail("tick")
    lease.on_release = lambda: fail("release")
    with pytest.raises(ExceptionGroup) as caught:
        await lead_and_tick(lease, ticks, StopToken())
    assert caught.group_contains(OSError, match="tick", depth=1)
    assert caught.group_contains(OSError, match="release")


@pytest.mark.parametrize("standing_by", [True, False])
async def test_an_outer_cancellation_leaves_nothing_held(autojump_clock: MockClock, standing_by: bool) -> None:
    lease = FakeLease()
    if standing_by:
        lease.take("another")
    ticks = FakeTicks(lease)
    with trio.move_on_after(1) as scope:
        await lead_and_tick(lease, ticks, StopToken())
    assert scope.cancelled_caught
    assert lease.holder == (Grant("another", 1) if standing_by else None)


async def test_a_keyboard_interrupt_leaves_as_itself_and_the_lease_is_released(
    autojump_clock: MockClock,
) -> None:
    lease = FakeLease()
    ticks = FakeTicks(lease)

    def interrupt() -> None:
        raise KeyboardInterrupt

    ticks.on_tick = interrupt
    with pytest.raises(KeyboardInterrupt):
        await lead_and_tick(lease, ticks, StopToken())
    assert lease.holder is None
