"""Registering schedules: upsert by name, what is kept, and what is refused before any round trip."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest
import trio

from alkstore import InvalidSpec, ManualClock, ScheduleOpts, Store
from tests.conformance.helpers import (
    START,
    OpenStore,
    after,
    boundaries,
    calm,
    claim,
    now,
    refused,
    running,
)


async def test_a_schedule_is_the_row_as_stored(store: Store) -> None:
    opts = ScheduleOpts(priority=5, max_attempts=2, expires=60)
    schedule = await store.schedule("s", "@every 15m", "q", {"n": 1}, opts)
    assert (schedule.name, schedule.spec, schedule.queue, schedule.payload) == ("s", "@every 15m", "q", {"n": 1})
    assert schedule.opts == opts
    assert (schedule.fired_total, schedule.skipped_total, schedule.error) == (0, 0, None)


async def test_a_schedule_is_a_value(store: Store) -> None:
    first = await store.schedule("s", "@every 15m", "q")
    assert first == await store.schedule("s", "@every 15m", "q")
    with pytest.raises(AttributeError):
        first.spec = "@every 1s"  # type: ignore[misc]


async def test_options_and_payload_may_be_left_out(store: Store) -> None:
    schedule = await store.schedule("s", "@every 15m", "q")
    assert (schedule.payload, schedule.opts) == (None, ScheduleOpts())


async def test_the_first_boundary_is_one_interval_after_registration(store: Store) -> None:
    assert (await store.schedule("s", "@every 15m", "q")).next_fire_at == after(store, 900)


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [("@every 1s", 1), ("@every 2m", 120), ("@every 3h", 10_800), ("@every 4d", 345_600), ("@every 000000000090s", 90)],
)
async def test_every_unit_is_understood(store: Store, spec: str, seconds: int) -> None:
    schedule = await store.schedule("s", spec, "q")
    assert (schedule.spec, schedule.next_fire_at) == (spec, after(store, seconds))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "@every",
        "@every ",
        "@every 0s",
        "@every 000s",
        "@every -1s",
        "@every +1s",
        "@every 1.5s",
        "@every 1",
        "@every s",
        "@every 1w",
        "@every 1S",
        "@every 1ms",
        "@every 1h30m",
        "@every  1s",
        "@every\t1s",
        "@every 1 s",
        " @every 1s",
        "@every 1s ",
        "@every 1s\n",
        "@Every 1s",
        "every 1s",
        "@every 1234567890123s",
        "@every ١s",
        "@every 1_0s",
        "* * * * *",
        "@daily",
        None,
        15,
        b"@every 1s",
    ],
)
async def test_anything_else_is_an_invalid_spec_without_a_round_trip(store: Store, spec: str) -> None:
    error = await refused(InvalidSpec, lambda: store.schedule("s", spec, "q"))
    assert error.spec == spec
    assert (await store.health()).schedules.total == 0


@pytest.mark.parametrize("spec", ["@every 999999999999d", "@every 2920000d"])
async def test_an_interval_past_the_year_9999_is_an_invalid_spec_without_a_round_trip(store: Store, spec: str) -> None:
    error = await refused(InvalidSpec, lambda: store.schedule("s", spec, "q"))
    assert error.spec == spec
    assert "9999" in str(error)


async def test_registering_again_replaces_queue_payload_and_options(store: Store) -> None:
    await store.schedule("s", "@every 1m", "q", 1, ScheduleOpts(priority=1, expires=5))
    again = await store.schedule("s", "@every 1m", "other", 2, ScheduleOpts(max_attempts=9))
    assert (again.queue, again.payload, again.opts) == ("other", 2, ScheduleOpts(max_attempts=9))
    assert (await store.health()).schedules.total == 1


@pytest.mark.parametrize("spec", ["@every 60s", "@every 1m", "@every 01m"])
async def test_the_same_duration_keeps_the_cursor(store: Store, spec: str) -> None:
    """S10: an interval that starts anew at each deploy would never end."""
    first = await store.schedule("s", "@every 60s", "q")
    await trio.sleep(59)
    assert (await store.schedule("s", spec, "q")).next_fire_at == first.next_fire_at


async def test_the_spec_is_shown_as_it_was_registered_last(store: Store) -> None:
    await store.schedule("s", "@every 60s", "q")
    assert (await store.schedule("s", "@every 1m", "q")).spec == "@every 1m"


async def test_another_duration_starts_the_cursor_anew(store: Store) -> None:
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(59)
    assert (await store.schedule("s", "@every 61s", "q")).next_fire_at == after(store, 61)


async def test_registering_again_does_not_wipe_a_backlog(store: Store) -> None:
    began = now(store)
    await store.schedule("s", "@every 1m", "q")
    await trio.sleep(180)
    assert (await store.schedule("s", "@every 1m", "q")).next_fire_at == began + timedelta(minutes=1)
    async with running(store.run_schedules):
        await calm()
    assert len(await boundaries(store)) == 3


async def test_a_daily_schedule_fires_in_a_program_that_is_deployed_every_six_hours(
    open_engine_store: OpenStore,
) -> None:
    """S10."""
    clock = ManualClock(START)
    async with open_engine_store(clock=clock) as store:
        for _ in range(40):
            await store.schedule("daily", "@every 1d", "q")
            async with running(store.run_schedules):
                await calm()
            clock.advance(6 * 3600)
        fired = await boundaries(store)
    assert len(fired) == 9
    assert {later - earlier for earlier, later in pairwise(fired)} == {timedelta(days=1)}


async def test_names_are_separate_schedules(store: Store) -> None:
    await store.schedule("a", "@every 1m", "q")
    await store.schedule("b", "@every 1m", "q")
    await store.schedule("A", "@every 1m", "q")
    assert (await store.health()).schedules.total == 3


async def test_unscheduling_tells_whether_there_was_one(store: Store) -> None:
    await store.schedule("s", "@every 1m", "q")
    assert await store.unschedule("s")
    assert not await store.unschedule("s")


async def test_jobs_that_were_fired_outlive_their_schedule(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    async with running(store.run_schedules):
        handle = await claim(store.queue("q"), wait=10)
        await store.unschedule("s")
    assert await handle.ack()


async def test_a_pause_is_to_unregister_and_register(store: Store) -> None:
    await store.schedule("s", "@every 10s", "q")
    await store.unschedule("s")
    await trio.sleep(1000)
    assert (await store.schedule("s", "@every 10s", "q")).next_fire_at == after(store, 10)


async def test_that_nothing_fires_by_itself_is_said_where_it_is_registered() -> None:
    assert Store.schedule.__doc__ is not None
    assert "Nothing fires until somebody calls `run_schedules`" in Store.schedule.__doc__


async def test_options_must_be_schedule_options(store: Store) -> None:
    with pytest.raises(TypeError, match="ScheduleOpts"):
        await store.schedule("s", "@every 1m", "q", None, {"priority": 1})  # type: ignore[arg-type]
