"""Schedules under a clock that is stepped, and rows that cannot fire."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from alkstore import LeadershipLost, ManualClock, StopToken, Store
from tests.conformance.helpers import (
    START,
    YEAR_S,
    OpenStore,
    TaskSteps,
    WallLikeClock,
    at,
    boundaries,
    calm,
    claim,
    fails,
    move_cursor,
    retrying,
    running,
    seen,
    spoil_schedule,
)

# ------------------------------------------------------------------------------------------------------- forward


async def test_a_forward_step_past_the_lease_is_a_lost_lease(stepped: Store, clock: ManualClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, LeadershipLost, stepped.run_schedules, StopToken())
        await calm()
        clock.advance(31)


async def test_nothing_fires_on_a_lease_that_a_forward_step_has_ended(stepped: Store, clock: ManualClock) -> None:
    await stepped.schedule("s", "@every 20s", "q")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, LeadershipLost, stepped.run_schedules, StopToken())
        await calm()
        clock.advance(31)
    assert await boundaries(stepped) == []


async def test_a_forward_step_within_the_lease_is_noticed_at_once(stepped: Store, clock: ManualClock) -> None:
    await stepped.schedule("s", "@every 20s", "q")
    async with running(stepped.run_schedules):
        await calm()
        clock.advance(20)
        await calm()
        assert (await stepped.queue("q").counts()).ready == 1


async def test_a_step_that_nobody_tells_of_is_noticed_within_five_seconds(open_engine_store: OpenStore) -> None:
    """S13: a sleep that was measured once, on a monotonic clock, would last the hour."""
    clock = WallLikeClock()
    async with open_engine_store(clock=clock, leadership_ttl=86_400) as store:
        await store.schedule("s", "@every 1h", "q")
        async with running(store.run_schedules):
            await trio.sleep(60)
            clock.step(7_200)
            began = trio.current_time()
            await claim(store.queue("q"), wait=3_600)
            assert trio.current_time() - began <= 5


async def test_a_claim_that_waits_notices_a_step_that_nobody_tells_of(open_engine_store: OpenStore) -> None:
    """S13, for a delayed job."""
    clock = WallLikeClock()
    async with open_engine_store(clock=clock) as store:
        await store.queue("q").enqueue(1, delay=3_600)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(claim, store.queue("q"), wait=86_400))
            await trio.sleep(60)
            clock.step(7_200)
            began = trio.current_time()
        assert trio.current_time() - began <= 5


# ---------------------------------------------------------------------------------------------------------- back


async def test_a_clock_set_back_fires_nothing_twice(stepped: Store, clock: ManualClock) -> None:
    """S12 (a)."""
    await stepped.schedule("s", "@every 60s", "q")
    async with running(stepped.run_schedules):
        await calm()
        for _ in range(6):
            clock.advance(10)
            await calm()
        clock.advance(-1800)
        await calm()
        for _ in range(180):
            clock.advance(10)
            await calm()
    assert await boundaries(stepped) == [at(START + 60_000)]


async def test_after_a_clock_was_set_back_the_runner_waits_until_the_cursor_is_reached(
    stepped: Store, clock: ManualClock
) -> None:
    """S12 (a)."""
    await stepped.schedule("s", "@every 60s", "q")
    async with running(partial(retrying, stepped)):
        await calm()
        clock.advance(20)
        await calm()
        clock.advance(-1800)
        await calm()
        clock.advance(1800 + 39.999)
        await calm()
        assert await boundaries(stepped) == []
        clock.advance(0.001)
        await calm()
        assert await boundaries(stepped) == [at(START + 60_000)]


async def test_after_a_clock_was_set_back_the_runner_does_not_spin(stepped: Store, clock: ManualClock) -> None:
    """S12 (a)."""
    await stepped.schedule("s", "@every 60s", "q")
    async with running(stepped.run_schedules):
        await calm()
        clock.advance(-1800)
        await calm()
        with TaskSteps() as steps:
            await calm()
    assert steps.count < 20


async def test_a_leader_goes_on_leading_when_the_clock_is_set_back(stepped: Store, clock: ManualClock) -> None:
    with stepped.events() as events:
        async with running(stepped.run_schedules):
            await calm()
            clock.advance(-3600)
            await calm()
            health = await stepped.health()
            assert len(seen(events, "leader")) == 1
    assert health.schedules.leader is not None


async def test_a_clock_set_back_is_an_event_and_counted_in_health(embedded_stepped: Store, clock: ManualClock) -> None:
    await embedded_stepped.queue("q").enqueue(1)
    with embedded_stepped.events() as events:
        clock.advance(-60)
        await embedded_stepped.queue("q").enqueue(2)
        (step,) = seen(events, "clock_set_back")
    assert (step.subject, step.details["seconds"]) == ("store", 60)
    assert (await embedded_stepped.health()).clock_steps == 1


async def test_a_cursor_from_a_far_future_is_put_back_on_its_grid_and_reported(
    stepped: Store, clock: ManualClock
) -> None:
    """S12 (b): a machine that once booted in 2098."""
    await stepped.schedule("s", "@every 60s", "q")
    clock.advance(72 * YEAR_S)
    async with running(partial(retrying, stepped)):
        await calm()
    clock.advance(-72 * YEAR_S)
    with stepped.events() as events:
        async with running(partial(retrying, stepped)):
            await calm()
            (realigned,) = seen(events, "schedule_realigned")
        found = await stepped.schedule("s", "@every 60s", "q")
    assert realigned.subject == "s"
    assert found.next_fire_at == at(START + 60_000)


async def test_registering_again_mends_a_cursor_from_a_far_future(stepped: Store, clock: ManualClock) -> None:
    """S12 (b)."""
    await stepped.schedule("s", "@every 60s", "q")
    await move_cursor(stepped, "s", 60 * 1_000_000)
    with stepped.events() as events:
        assert (await stepped.schedule("s", "@every 60s", "q")).next_fire_at == at(START + 60_000)
        assert len(seen(events, "schedule_realigned")) == 1


@pytest.mark.parametrize(("ahead", "kept"), [(3_600, True), (3_600.001, False)])
async def test_a_cursor_may_be_ahead_by_its_interval_and_an_hour(stepped: Store, ahead: float, kept: bool) -> None:
    first = await stepped.schedule("s", "@every 60s", "q")
    await move_cursor(stepped, "s", ahead)
    again = await stepped.schedule("s", "@every 60s", "q")
    assert (again.next_fire_at > first.next_fire_at) == kept


# ------------------------------------------------------------------------------------------------------ bad rows


async def test_a_bad_row_never_stops_the_others(store: Store) -> None:
    """S14: twenty good schedules beside it."""
    await store.schedule("bad", "@every 1s", "q")
    for n in range(20):
        await store.schedule(f"good{n}", "@every 1s", "q")
    await spoil_schedule(store, "bad")
    async with running(store.run_schedules):
        await trio.sleep(2.5)
    assert (await store.queue("q").counts()).ready == 40


async def test_a_bad_row_is_reported_once(store: Store) -> None:
    """S14: not once per tick."""
    await store.schedule("bad", "@every 1s", "q")
    await spoil_schedule(store, "bad")
    with store.events() as events:
        async with running(store.run_schedules):
            await trio.sleep(10.5)
        errors = seen(events, "row_error")
    assert [event.subject for event in errors] == ["bad"]
    assert "nonsense" in errors[0].details["error"]


async def test_a_bad_row_shows_in_health(store: Store) -> None:
    """S14."""
    await store.schedule("bad", "@every 1s", "q")
    await spoil_schedule(store, "bad")
    async with running(store.run_schedules):
        await trio.sleep(2)
    assert (await store.health()).schedules.broken == ("bad",)


async def test_a_bad_row_is_not_overdue(store: Store) -> None:
    """S14: it leaves the due index."""
    await store.schedule("bad", "@every 1s", "q")
    await spoil_schedule(store, "bad")
    async with running(store.run_schedules):
        await trio.sleep(100)
        assert (await store.health()).schedules.overdue == 0


async def test_registering_a_bad_row_again_mends_it(store: Store) -> None:
    """S14."""
    await store.schedule("s", "@every 1s", "q")
    await spoil_schedule(store, "s")
    async with running(store.run_schedules):
        await trio.sleep(2)
        mended = await store.schedule("s", "@every 1s", "q")
        await calm()
        assert mended.error is None
        assert (await store.queue("q").counts()).ready == 2
