"""Catch-up: of the boundaries that were missed the oldest 64 fire, and the gap can be inspected."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alkstore import ManualClock, Store
from tests.conformance.helpers import (
    START,
    OpenStore,
    at,
    boundaries,
    calm,
    fresh,
    now,
    retrying,
    running,
    seen,
    virtually,
)


@pytest.mark.parametrize(
    ("late", "fired", "skipped"),
    [(-0.001, 0, 0), (0, 1, 0), (62 * 60, 63, 0), (63 * 60, 64, 0), (64 * 60, 64, 1), (63 * 60 + 59, 64, 0)],
)
async def test_missed_boundaries_fire_oldest_first_and_at_most_64(
    store: Store, late: float, fired: int, skipped: int
) -> None:
    """S02: a boundary that equals now is due; with 64 or fewer due all fire, with 65 one is skipped."""
    began = now(store)
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(60 + late)
    async with running(store.run_schedules):
        await calm()
        found = await store.schedule("s", "@every 60s", "q")
    assert await boundaries(store) == [began + timedelta(minutes=n) for n in range(1, fired + 1)]
    assert (found.fired_total, found.skipped_total) == (fired, skipped)


async def test_after_a_gap_the_cursor_is_the_first_boundary_of_the_same_grid_after_now(store: Store) -> None:
    began = now(store)
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(100 * 60 + 17)
    async with running(store.run_schedules):
        await calm()
    assert (await store.schedule("s", "@every 60s", "q")).next_fire_at == began + timedelta(minutes=101)


async def test_a_gap_stands_in_the_row(store: Store) -> None:
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(100 * 60)
    missed_at = now(store)
    async with running(store.run_schedules):
        await trio.sleep(60.5)
    found = await store.schedule("s", "@every 60s", "q")
    assert (found.fired_total, found.skipped_total, found.last_skipped_at) == (65, 36, missed_at)


async def test_without_a_gap_none_stands_in_the_row(store: Store) -> None:
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(64 * 60)
    async with running(store.run_schedules):
        await calm()
    found = await store.schedule("s", "@every 60s", "q")
    assert (found.skipped_total, found.last_skipped_at) == (0, None)


async def test_a_gap_is_reported(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    await trio.sleep(100)
    with store.events() as events:
        async with running(store.run_schedules):
            await calm()
        (fired,) = seen(events, "fired")
        (skipped,) = seen(events, "skipped")
    assert (fired.subject, fired.details["count"], len(fired.details["ids"])) == ("s", 64, 64)
    assert (skipped.subject, skipped.details["count"]) == ("s", 36)


async def test_each_schedule_has_64_of_its_own(store: Store) -> None:
    for name in ("a", "b"):
        await store.schedule(name, "@every 1s", "q")
    await trio.sleep(1000)
    async with running(store.run_schedules):
        await calm()
    assert (await store.queue("q").counts()).ready == 128


async def test_after_a_catch_up_nothing_is_left_to_be_caught_up(store: Store) -> None:
    await store.schedule("s", "@every 10s", "q")
    await trio.sleep(2000)
    async with running(store.run_schedules):
        await trio.sleep(10.5)
    assert len(await boundaries(store)) == 65


@pytest.mark.parametrize("seconds", [1200, 640, 25], ids=["skips", "just fits", "within the lease"])
async def test_it_makes_no_difference_whether_the_process_was_down_or_its_clock_stepped(
    stepped: Store, clock: ManualClock, seconds: int
) -> None:
    await stepped.schedule("s", "@every 10s", "q")
    async with running(partial(retrying, stepped)):
        await calm()
        clock.advance(seconds)
        await calm()
        found = await stepped.schedule("s", "@every 10s", "q")
    due = seconds // 10
    assert (found.fired_total, found.skipped_total) == (min(due, 64), max(due - 64, 0))
    assert found.next_fire_at == at(START + (due + 1) * 10_000)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=8))
def test_every_boundary_that_passed_was_fired_once_or_skipped(
    open_engine_store: OpenStore, steps: list[tuple[int, bool]]
) -> None:
    """Whenever time passes, and whether somebody runs the schedules meanwhile or not."""

    async def main() -> None:
        clock = ManualClock(START)
        async with open_engine_store(clock=clock) as store:
            await store.unschedule("s")
            queue = store.queue(fresh("q"))
            start = await store.schedule("s", "@every 1s", queue.name)
            for ms, attended in steps:
                clock.advance(ms / 1000)
                if attended:
                    async with running(store.run_schedules):
                        await calm()
            async with running(store.run_schedules):
                await calm()
            found = await store.schedule("s", "@every 1s", queue.name)
            passed = sum(ms for ms, _ in steps) // 1000
            assert found.fired_total + found.skipped_total == passed
            assert found.next_fire_at == start.next_fire_at + timedelta(seconds=passed)
            fired = [handle.boundary for handle in await queue.claim("w", 1000) if handle.boundary]
            assert len(set(fired)) == len(fired) == found.fired_total
            assert fired == sorted(fired)

    virtually(main)
