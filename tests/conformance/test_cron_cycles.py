"""One cycle: which triggers it looks at, what it decides about each, and what it says of that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import trio

from alkstore import ManualClock, Store
from alkstore.cron import EDGE, STANDALONE, Profile
from alkstore.cron.decide import NEVER
from alkstore.sql.cron import admission, runs
from tests.conformance.cronning import (
    cursor,
    kinds,
    later,
    once,
    only_run,
    publish,
    run,
    spoil_trigger,
    states,
    trigger,
    two_stores,
)
from tests.conformance.helpers import START, OpenStore, at, fails, refused, seen, sql

MINUTE_MS, HOUR_MS, DAY_MS, WEEK_MS = 60_000, 3_600_000, 86_400_000, 7 * 86_400_000
HALF_PAST = "30 * * * *"

# ---------------------------------------------------------------------------------------------------- one trigger


async def test_a_cycle_without_triggers_does_nothing(stepped: Store) -> None:
    summary = await stepped.cron.schedule_once(STANDALONE)
    assert (summary.observed_at, summary.scanned, summary.truncated) == (at(START), 0, False)


async def test_a_new_trigger_is_initialized_to_its_first_occurrence(stepped: Store) -> None:
    await publish(stepped, expression=HALF_PAST)
    assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + HOUR_MS // 2)
    assert await stepped.cron.runs() == []


async def test_an_initialized_trigger_is_left_alone_until_it_is_due(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    before = await trigger(stepped)
    clock.advance(1_799.999)
    assert (await stepped.cron.schedule_once(STANDALONE)).scanned == 0
    assert await trigger(stepped) == before


async def test_an_occurrence_gets_its_run_at_its_very_moment(stepped: Store, clock: ManualClock) -> None:
    published = await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    clock.advance(1_800)
    assert await once(stepped) == {"admitted": 1}
    due = START + HOUR_MS // 2
    made = await only_run(stepped)
    assert (made.task, made.task_revision, made.task_digest) == ("t", 1, published.task_digest)
    assert (made.trigger, made.trigger_revision, made.trigger_digest) == ("g", 1, published.digest)
    assert (made.scheduled_for, made.timezone, made.created_at) == (at(due), "UTC", at(due))
    assert made.key == f"ql3:cron:v1:g:1:{due}"
    assert (made.state, made.attempt, made.started_at, made.ended_at) == ("queued", 1, None, None)
    stands = await trigger(stepped)
    assert (stands.next_fire_at, stands.last_scheduled_at) == (at(due + HOUR_MS), at(due))


async def test_a_run_is_made_with_one_attempt_two_events_and_one_job(stepped: Store) -> None:
    await publish(stepped)
    await once(stepped)
    made = await only_run(stepped)
    assert await kinds(stepped, made) == ["created", "queued"]
    attempts = await sql(stepped, "SELECT run, number, state, executor FROM __alkstore_cron_attempts")
    assert attempts == [(made.id, 1, "claimed", "local_process")]
    assert (await stepped.health()).queues["__alkstore_runs"].ready == 1


async def test_the_moment_of_publishing_counts(stepped: Store) -> None:
    await publish(stepped)
    assert await once(stepped) == {"admitted": 1}
    assert (await only_run(stepped)).scheduled_for == at(START)


async def test_a_late_first_cycle_admits_what_has_come_since_the_publishing(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression=HALF_PAST)
    clock.advance(1_800 + 300)
    assert await once(stepped) == {"admitted": 1}


@pytest.mark.parametrize(("late", "expected"), [(300, "admitted"), (300.001, "skipped")])
async def test_the_grace_is_inclusive(stepped: Store, clock: ManualClock, late: float, expected: str) -> None:
    await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    clock.advance(1_800 + late)
    assert await once(stepped) == {expected: 1}


async def test_each_profile_has_its_own_grace(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, "a", expression=HALF_PAST)
    await once(stepped)
    clock.advance(1_800 + 30.001)
    assert await once(stepped, EDGE) == {"skipped": 1}


async def test_a_week_of_silence_skipped_costs_one_decision_and_no_run(stepped: Store, clock: ManualClock) -> None:
    """S03: no burst, whatever was missed."""
    await publish(stepped, expression=HALF_PAST, misfire="skip")
    await once(stepped)
    clock.advance(7 * 86_400)
    assert await once(stepped) == {"skipped": 1}
    assert (await stepped.cron.schedule_once(STANDALONE)).scanned == 0
    assert await stepped.cron.runs() == []
    stands = await trigger(stepped)
    assert (stands.skipped_total, stands.last_skipped_at) == (1, at(START + WEEK_MS))
    assert (stands.next_fire_at, stands.last_scheduled_at) == (at(START + WEEK_MS + HOUR_MS // 2), None)


async def test_a_week_of_silence_is_made_up_for_by_one_run_of_the_oldest(stepped: Store, clock: ManualClock) -> None:
    """S03: and the rest is not scanned."""
    await publish(stepped, expression=HALF_PAST, misfire="fire_once")
    await once(stepped)
    clock.advance(7 * 86_400)
    assert await once(stepped) == {"admitted": 1}
    assert (await stepped.cron.schedule_once(STANDALONE)).scanned == 0
    assert (await only_run(stepped)).scheduled_for == at(START + HOUR_MS // 2)
    stands = await trigger(stepped)
    assert (stands.skipped_total, stands.next_fire_at) == (0, at(START + WEEK_MS + HOUR_MS // 2))


@pytest.mark.parametrize("misfire", ["skip", "fire_once"])
async def test_after_a_week_of_silence_every_occurrence_has_its_run_again(
    stepped: Store, clock: ManualClock, misfire: str
) -> None:
    await publish(stepped, expression=HALF_PAST, misfire=misfire)
    await once(stepped)
    clock.advance(7 * 86_400)
    await once(stepped)
    clock.advance(1_800)
    for _ in range(24):
        assert await once(stepped) == {"admitted": 1}
        clock.advance(3_600)


async def test_a_trigger_gets_at_most_one_run_in_a_cycle(stepped: Store, clock: ManualClock) -> None:
    """However many occurrences are within the grace."""
    await publish(stepped, expression="* * * * * *", misfire="fire_once")
    await once(stepped)
    clock.advance(60)
    assert await once(stepped) == {"admitted": 1}
    assert [made.scheduled_for for made in await stepped.cron.runs()] == [at(START), at(START + 1_000)]
    assert (await trigger(stepped)).next_fire_at == at(START + 61_000)


async def test_a_zone_decides_when_an_occurrence_is(stepped: Store, clock: ManualClock) -> None:
    clock.set(round(datetime(2027, 3, 27, 12, tzinfo=UTC).timestamp() * 1000))  # the day before summer time
    await publish(stepped, expression="30 2 * * *", timezone="Europe/Berlin")
    await once(stepped)
    assert (await trigger(stepped)).next_fire_at == datetime(2027, 3, 28, 1, tzinfo=UTC)  # the end of the gap


# -------------------------------------------------------------------------------------------------------- overlap


async def test_an_occurrence_that_comes_while_a_run_is_not_over_is_given_up_and_counted(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, overlap="skip")
    assert await once(stepped) == {"admitted": 1}
    for n in range(1, 4):
        clock.advance(60)
        assert await once(stepped) == {"skipped": 1}
        assert (await trigger(stepped)).skipped_total == n
    assert len(await stepped.cron.runs()) == 1


async def test_overlap_is_told_as_what_it_is(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, overlap="skip")
    await once(stepped)
    clock.advance(60)
    events = stepped.events()
    await once(stepped)
    (event,) = seen(events, "skipped")
    assert (event.subject, event.details) == ("g", {"count": 1, "overlap": True})


async def test_once_the_run_is_over_the_next_occurrence_has_its_run(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, overlap="skip")
    await once(stepped)
    assert await stepped.cron.cancel_run((await only_run(stepped)).id)
    clock.advance(60)
    assert await once(stepped) == {"admitted": 1}


async def test_overlap_is_of_the_task_whatever_has_started_its_run(stepped: Store) -> None:
    await stepped.cron.publish_task("t", call="h", overlap="skip")
    await stepped.cron.run_now("t")
    await publish(stepped, "one")
    await publish(stepped, "other")
    assert await once(stepped) == {"skipped": 2}


async def test_of_two_triggers_of_a_task_that_are_due_together_one_gets_its_run(stepped: Store) -> None:
    await stepped.cron.publish_task("t", call="h", overlap="skip")
    await publish(stepped, "one")
    await publish(stepped, "other")
    assert await once(stepped) == {"admitted": 1, "skipped": 1}


async def test_overlap_is_allowed_unless_said_otherwise(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    for _ in range(3):
        assert await once(stepped) == {"admitted": 1}
        clock.advance(60)
    assert await states(stepped) == ["queued"] * 3


# --------------------------------------------------------------------------------------------------- races, fences


async def test_whoever_is_second_finds_the_trigger_decided_and_writes_nothing(stepped: Store) -> None:
    await publish(stepped)
    engine = stepped._context.engine
    (candidate,) = (await engine.read(lambda tx: admission.page(tx, 16))).candidates
    assert await once(stepped) == {"admitted": 1}
    before = await trigger(stepped)
    for decision in (
        lambda tx: admission.admit(tx, candidate, candidate.needs(), START, START + MINUTE_MS),
        lambda tx: admission.advance(tx, candidate, START + MINUTE_MS, skipped=True),
        lambda tx: admission.fail(tx, candidate, "no"),
    ):
        assert await engine.run(decision) == "raced"
    assert await trigger(stepped) == before
    assert len(await stepped.cron.runs()) == 1


CHANGES = {
    "the trigger is replaced": lambda cron: cron.publish_trigger(
        "g", task="t", expression="5 * * * *", timezone="UTC", expected_revision=1
    ),
    "the trigger is disabled": lambda cron: cron.disable_trigger("g"),
    "the trigger is deleted": lambda cron: cron.delete_trigger("g"),
    "the task is replaced": lambda cron: cron.publish_task("t", call="g", expected_revision=1),
    "the task is disabled": lambda cron: cron.disable_task("t"),
    "the task is deleted": lambda cron: cron.delete_task("t"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_fact_that_has_changed_since_the_look_makes_the_decision_void(stepped: Store, change: str) -> None:
    await publish(stepped)
    engine = stepped._context.engine
    (candidate,) = (await engine.read(lambda tx: admission.page(tx, 16))).candidates
    await CHANGES[change](stepped.cron)
    assert (
        await engine.run(lambda tx: admission.admit(tx, candidate, candidate.needs(), START, START + MINUTE_MS))
        == "raced"
    )
    assert await stepped.cron.runs() == []


async def test_an_occurrence_that_has_its_run_gets_no_other(stepped: Store) -> None:
    """As after a cursor that was set back: the key is the last word, and the cursor moves on."""
    await publish(stepped)
    await once(stepped)
    await sql(stepped, "UPDATE __alkstore_cron_schedules SET next_fire_at = :start", start=START)
    events = stepped.events()
    assert await once(stepped) == {"raced": 1}
    assert await cursor(stepped) == START + MINUTE_MS
    assert len(await stepped.cron.runs()) == 1
    assert seen(events, "admitted") == []


NEW_REVISIONS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "the trigger's": lambda store: store.cron.publish_trigger(
        "g", task="u", expression="* * * * *", timezone="UTC", expected_revision=1
    ),
    "the task's": lambda store: store.cron.publish_task("t", call="g", expected_revision=1),
    "from now": lambda store: store.cron.disable_task("t"),
}


@pytest.mark.parametrize("whose", NEW_REVISIONS)
async def test_an_occurrence_has_one_run_whatever_revisions_come_after_it(
    stepped: Store, clock: ManualClock, whose: str
) -> None:
    """A task that is edited, and a clock that is set back then, would else repeat what has run already."""
    await stepped.cron.publish_task("u", call="h")
    await publish(stepped)
    for _ in range(10):
        await once(stepped)
        clock.advance(60)
    clock.set(START)
    await NEW_REVISIONS[whose](stepped)
    await stepped.cron.enable_task("t")
    for _ in range(10):
        assert "admitted" not in await once(stepped)
        clock.advance(60)
    assert await once(stepped) == {"admitted": 1}
    scheduled = [made.scheduled_for for made in await stepped.cron.runs()]
    assert len(set(scheduled)) == len(scheduled) == 11


async def test_the_state_version_grows_with_every_change_and_is_never_reset(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression=HALF_PAST)
    versions = [(await trigger(stepped)).state_version]
    for change in (
        lambda: once(stepped),
        lambda: once(stepped),  # admits
        lambda: stepped.cron.publish_task("t", call="g", expected_revision=1),
        lambda: stepped.cron.disable_trigger("g"),
        lambda: stepped.cron.enable_trigger("g"),
        lambda: stepped.cron.disable_task("t"),
        lambda: stepped.cron.enable_task("t"),
        lambda: stepped.cron.publish_trigger(
            "g", task="t", expression="5 * * * *", timezone="UTC", expected_revision=2
        ),
    ):
        await change()
        clock.advance(1_800)
        versions.append((await trigger(stepped)).state_version)
    assert all(before < after for before, after in pairwise(versions)), versions


async def test_two_processes_that_cycle_at_once_admit_each_occurrence_once(open_shared_store: OpenStore) -> None:
    async with two_stores(open_shared_store) as stores:
        for n in range(20):
            await publish(stores[0], f"g{n}")
        summaries: list[dict[str, int | bool]] = []

        async def cycle(store: Store) -> None:
            summaries.append(await once(store, later(page=20)))

        async with trio.open_nursery() as nursery:
            for store in stores:
                nursery.start_soon(cycle, store)
        assert sum(summary.get("admitted", 0) for summary in summaries) == 20
        made = await stores[0].cron.runs()
        assert len({one.key for one in made}) == len(made) == 20


@pytest.mark.parametrize("misfire", ["skip", "fire_once"])
async def test_of_several_that_are_due_in_time_the_oldest_has_its_run_and_the_others_are_not_counted(
    stepped: Store, clock: ManualClock, misfire: str
) -> None:
    await publish(stepped, misfire=misfire)
    await once(stepped)
    clock.advance(285)  # four are due, and the first is late by less than the grace
    assert await once(stepped) == {"admitted": 1}
    assert [made.scheduled_for for made in await stepped.cron.runs()] == [at(START), at(START + MINUTE_MS)]
    found = await trigger(stepped)
    assert (found.skipped_total, found.next_fire_at) == (0, at(START + 5 * MINUTE_MS))


# ---------------------------------------------------------------------------------------------------------- pages


async def test_a_page_has_the_size_of_its_profile_and_the_rest_is_said_to_be_there(stepped: Store) -> None:
    for n in range(20):
        await publish(stepped, f"g{n:02}")
    summary = await stepped.cron.schedule_once(STANDALONE)
    assert (summary.scanned, summary.admitted, summary.truncated) == (16, 16, True)
    assert await once(stepped) == {"admitted": 4}


async def test_a_page_that_holds_exactly_what_there_is_is_not_truncated(stepped: Store) -> None:
    for n in range(4):
        await publish(stepped, f"g{n}")
    assert await once(stepped, EDGE) == {"admitted": 4}


async def test_the_soonest_occurrences_come_first(stepped: Store, clock: ManualClock) -> None:
    for minute in (3, 1, 4, 2, 0):
        await publish(stepped, f"g{minute}", expression=f"{30 + minute} * * * *")
    await once(stepped)
    clock.advance(1_800 + 240)
    await once(stepped, later(page=4))
    assert sorted(str(made.trigger) for made in await stepped.cron.runs()) == ["g0", "g1", "g2", "g3"]


async def due_and_new(store: Store, clock: ManualClock, *, due: int, new: int) -> None:
    for n in range(due):
        await publish(store, f"due{n:02}", expression=HALF_PAST)
    await once(store, later(page=256))
    clock.advance(1_800)
    for n in range(new):
        await publish(store, f"new{n:02}", expression="45 * * * *")


@pytest.mark.parametrize(
    ("due", "new", "page", "expected"),
    [
        (40, 40, 16, {"admitted": 12, "initialized": 4, "truncated": True}),
        (40, 2, 16, {"admitted": 14, "initialized": 2, "truncated": True}),
        (3, 40, 16, {"admitted": 3, "initialized": 13, "truncated": True}),
        (8, 8, 16, {"admitted": 8, "initialized": 8}),
        (40, 40, 4, {"admitted": 3, "initialized": 1, "truncated": True}),
        (40, 40, 2, {"admitted": 1, "initialized": 1, "truncated": True}),
        (1, 1, 1, {"admitted": 1, "truncated": True}),  # due and new since the same moment
    ],
)
async def test_a_page_keeps_a_share_for_triggers_without_a_cursor(
    stepped: Store, clock: ManualClock, due: int, new: int, page: int, expected: dict[str, int]
) -> None:
    await due_and_new(stepped, clock, due=due, new=new)
    assert await once(stepped, later(page=page)) == expected


async def test_a_flood_of_due_triggers_does_not_starve_the_new_ones(stepped: Store, clock: ManualClock) -> None:
    await due_and_new(stepped, clock, due=40, new=8)
    for _ in range(2):
        await once(stepped)
    assert (await trigger(stepped, "new07")).next_fire_at is not None
    assert (await trigger(stepped, "due39")).next_fire_at == at(START + HOUR_MS // 2)  # still to come


async def test_a_flood_of_new_triggers_does_not_starve_the_due_ones(stepped: Store, clock: ManualClock) -> None:
    await due_and_new(stepped, clock, due=12, new=40)
    await once(stepped)
    assert len(await stepped.cron.runs()) == 12


@pytest.mark.parametrize("page", [1, 2, 4])
async def test_what_is_always_due_keeps_no_new_trigger_waiting(stepped: Store, clock: ManualClock, page: int) -> None:
    for n in range(page):
        await publish(stepped, f"busy{n}", expression="* * * * * *")
    await publish(stepped, "far", expression=HALF_PAST)
    await once(stepped)
    clock.advance(1)
    await publish(stepped, "new", expression=HALF_PAST)
    await sql(
        stepped,
        "UPDATE __alkstore_cron_schedules SET moved_at = :late WHERE trigger = 'far'",
        late=START + 100 * HOUR_MS,
    )
    for _ in range(2 * page + 2):
        await once(stepped, later(page=page))
        clock.advance(1)
    assert (await trigger(stepped, "new")).next_fire_at is not None
    assert (
        await sql(stepped, "SELECT 1 FROM __alkstore_cron_schedules WHERE moved_at > :now", now=START + HOUR_MS) == []
    )


async def test_what_was_just_published_keeps_no_due_trigger_waiting(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, "due")
    await once(stepped)
    clock.advance(60)
    for n in range(5):
        await publish(stepped, f"new{n}", expression=HALF_PAST)
        clock.advance(1)
    assert await once(stepped, later(page=1)) == {"admitted": 1, "truncated": True}


# ------------------------------------------------------------------------------------------------------- failures


async def test_a_trigger_that_cannot_be_decided_is_counted_marked_and_told_once(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped)
    await spoil_trigger(stepped, "g", '{"expression":"99 * * * *","timezone":"UTC","misfire":"skip"}')
    events = stepped.events()
    for minutes in (1, 2, 4, 8, 16, 32, 60, 60):
        assert await once(stepped) == {"failed": 1}
        clock.advance(minutes * 60 - 0.001)
        assert await once(stepped) == {}
        clock.advance(0.001)
    error = (await trigger(stepped)).error
    assert error is not None
    assert "minute field" in error
    (event,) = seen(events, "row_error")
    assert (event.subject, event.details) == ("g", {"error": error})
    assert (await stepped.health()).cron.failing == ("g",)


@pytest.mark.parametrize(
    "definition", ["{}", "[]", "null", '{"expression":1,"timezone":2,"misfire":"skip"}', "no JSON"], ids=range(5)
)
async def test_a_spoiled_trigger_stops_no_other(stepped: Store, definition: str) -> None:
    await publish(stepped, "a")
    await publish(stepped, "b")
    await sql(
        stepped,
        "UPDATE __alkstore_cron_trigger_revisions SET definition = :definition WHERE id = 'a'",
        definition=definition,
    )
    assert await once(stepped) == {"failed": 1, "admitted": 1}


async def test_a_spoiled_task_stops_no_other(stepped: Store) -> None:
    await publish(stepped, "a", task="spoiled")
    await publish(stepped, "b")
    await sql(stepped, "UPDATE __alkstore_cron_task_revisions SET definition = '{}' WHERE id = 'spoiled'")
    assert await once(stepped) == {"failed": 1, "admitted": 1}
    assert (await stepped.health()).cron.failing == ("a",)


async def test_a_trigger_that_can_be_decided_again_goes_on_where_it_was(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression=HALF_PAST, misfire="fire_once")
    await once(stepped)
    ((definition,),) = await sql(stepped, "SELECT definition FROM __alkstore_cron_trigger_revisions")
    await spoil_trigger(stepped, "g")
    clock.advance(1_800)
    assert await once(stepped) == {"failed": 1}
    await spoil_trigger(stepped, "g", definition)
    clock.advance(60)
    assert await once(stepped) == {"admitted": 1}
    assert (await trigger(stepped)).error is None
    assert (await stepped.health()).cron.failing == ()


async def test_publishing_a_failing_trigger_anew_clears_its_error(stepped: Store) -> None:
    await publish(stepped)
    await spoil_trigger(stepped, "g")
    await once(stepped)
    await stepped.cron.publish_trigger(
        "g", task="t", expression="* * * * *", timezone="UTC", misfire="fire_once", expected_revision=1
    )
    assert (await trigger(stepped)).error is None
    assert await once(stepped) == {"admitted": 1}


# ---------------------------------------------------------------------------------------------------------- clocks


async def test_a_clock_set_back_a_little_admits_nothing_twice(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    for _ in range(10):
        await once(stepped)
        clock.advance(60)
    clock.advance(-600)
    for _ in range(10):
        assert await once(stepped) == {}
        clock.advance(60)
    assert len(await stepped.cron.runs()) == 10


async def test_a_cursor_from_a_clock_far_ahead_is_set_anew_and_told(stepped: Store, clock: ManualClock) -> None:
    """S13: a machine that once booted in 2098."""
    clock.advance(70 * 365 * 86_400)
    await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    far = (await trigger(stepped)).next_fire_at
    events = stepped.events()
    clock.set(START)
    assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + HOUR_MS // 2)
    (event,) = seen(events, "schedule_realigned")
    assert (event.subject, event.details) == ("g", {"was": far})
    assert await once(stepped) == {}
    clock.advance(1_800)
    assert await once(stepped) == {"admitted": 1}


async def test_a_trigger_published_by_a_clock_far_ahead_is_set_right_too(stepped: Store, clock: ManualClock) -> None:
    """It counts from a moment that is not here for seventy years."""
    clock.advance(70 * 365 * 86_400)
    await publish(stepped, expression=HALF_PAST)
    clock.set(START)
    for _ in range(2):
        assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + HOUR_MS // 2)
    assert await once(stepped) == {}


async def test_a_pause_from_a_clock_far_ahead_is_over_too(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    ((definition,),) = await sql(stepped, "SELECT definition FROM __alkstore_cron_trigger_revisions")
    await spoil_trigger(stepped, "g")
    clock.advance(70 * 365 * 86_400)
    assert await once(stepped) == {"failed": 1}
    await spoil_trigger(stepped, "g", definition)
    clock.set(START + HOUR_MS // 2)
    assert await once(stepped) == {"admitted": 1}


async def test_a_row_from_a_clock_far_ahead_that_cannot_be_decided_waits_for_its_pause(
    stepped: Store, clock: ManualClock
) -> None:
    clock.advance(70 * 365 * 86_400)
    await publish(stepped, expression=HALF_PAST)
    await once(stepped)
    ((definition,),) = await sql(stepped, "SELECT definition FROM __alkstore_cron_trigger_revisions")
    await spoil_trigger(stepped, "g")
    clock.set(START)
    assert await once(stepped) == {"failed": 1}
    assert await once(stepped) == {}
    await spoil_trigger(stepped, "g", definition)
    clock.advance(60)
    assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + HOUR_MS // 2)


async def test_a_trigger_whose_next_occurrence_is_honestly_far_away_is_not_taken_for_one(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, expression="0 0 29 2 *")
    await once(stepped)
    before = await trigger(stepped)
    assert before.next_fire_at == datetime(2028, 2, 29, tzinfo=UTC)
    clock.advance(-7_200)
    await once(stepped)
    assert (await trigger(stepped)).next_fire_at == before.next_fire_at


@pytest.mark.parametrize("kind", ["due", "new"])
async def test_what_a_clock_far_ahead_has_left_takes_no_more_than_its_share(
    stepped: Store, clock: ManualClock, kind: str
) -> None:
    clock.advance(70 * 365 * 86_400)
    for n in range(20):
        await publish(stepped, f"far{n}", expression=HALF_PAST)
    await once(stepped, later(page=256))
    clock.set(START)
    for n in range(20):
        await publish(stepped, f"{kind}{n:02}", expression="* * * * *" if kind == "due" else HALF_PAST)
    if kind == "due":
        await sql(
            stepped,
            "UPDATE __alkstore_cron_schedules SET next_fire_at = :start WHERE next_fire_at IS NULL",
            start=START,
        )
        assert await once(stepped) == {"admitted": 12, "initialized": 4, "truncated": True}
    else:
        for _ in range(3):
            await once(stepped)
        assert await once(stepped) == {}


async def test_the_end_of_the_calendar_is_no_occurrence(stepped: Store, clock: ManualClock) -> None:
    clock.set(round(datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp() * 1000))
    await publish(stepped, expression="0 0 1 1 *")
    assert await once(stepped) == {"initialized": 1}
    assert await cursor(stepped) == NEVER
    assert (await trigger(stepped)).next_fire_at is None
    assert await once(stepped) == {}


# --------------------------------------------------------------------------------------------------------- refused


async def test_a_cycle_wants_a_profile(one_store: Store) -> None:
    error = await refused(TypeError, lambda: one_store.cron.schedule_once("EDGE"))  # type: ignore[arg-type]
    assert "EDGE, STANDALONE" in str(error)


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("page", 0, ValueError),
        ("page", 257, ValueError),
        ("page", 1.5, TypeError),
        ("period", 0, ValueError),
        ("period", 3_601, ValueError),
        ("grace", -1, ValueError),
        ("grace", 301, ValueError),
        ("stop_within", -1, ValueError),
        ("stop_within", 3_601, ValueError),
        ("starts", 0, ValueError),
        ("starts", 257, ValueError),
    ],
)
def test_a_profile_is_checked_where_it_is_made(option: str, value: float, kind: type[Exception]) -> None:
    given: dict[str, float] = {"page": 1, "period": 1, "grace": 1, "stop_within": 1, "starts": 1, option: value}
    with pytest.raises(kind, match=f"{option} must be"):
        Profile(**given)  # type: ignore[arg-type]


def test_the_two_profiles() -> None:
    assert Profile(page=4, period=5, grace=30, stop_within=5, starts=1) == EDGE
    assert Profile(page=16, period=1, grace=300, stop_within=10, starts=4) == STANDALONE


# ------------------------------------------------------------------------------------------------------ looking


async def test_health_counts_the_enabled_triggers_and_those_that_wait_for_a_cycle(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, "a")
    await publish(stepped, "b", expression="45 * * * *")
    await publish(stepped, "c")
    await stepped.cron.disable_trigger("c")
    await once(stepped)
    clock.advance(66)
    found = (await stepped.health()).cron
    assert (found.triggers, found.overdue) == (2, 1)


async def test_a_trigger_that_nobody_has_looked_at_for_a_minute_is_overdue(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, "often")
    await publish(stepped, "seldom", expression="0 0 1 1 *")
    await publish(stepped, "disabled")
    await stepped.cron.disable_trigger("disabled")
    clock.advance(59)
    assert (await stepped.health()).cron.overdue == 0
    clock.advance(1)
    assert (await stepped.health()).cron.overdue == 2
    await stepped.cron.disable_task("t")
    assert (await stepped.health()).cron.overdue == 0
    await stepped.cron.enable_task("t")
    assert (await stepped.health()).cron.overdue == 0
    await once(stepped)
    clock.advance(5)
    assert (await stepped.health()).cron.overdue == 0


async def test_a_trigger_about_which_nothing_can_be_decided_is_failing_and_not_overdue(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped)
    await spoil_trigger(stepped, "g")
    await once(stepped)
    clock.advance(600)
    found = (await stepped.health()).cron
    assert (found.overdue, found.failing) == (0, ("g",))


async def test_each_admission_is_told(stepped: Store) -> None:
    events = stepped.events()
    await publish(stepped)
    await once(stepped)
    (event,) = seen(events, "admitted")
    made = await only_run(stepped)
    assert (event.subject, event.details) == ("g", {"run": made.id, "scheduled_for": at(START)})


async def test_runs_are_listed_by_id_of_one_task_or_of_all(stepped: Store) -> None:
    for name in ("t", "u"):
        await stepped.cron.publish_task(name, call="h")
    ids = [(await stepped.cron.run_now(name)).id for name in ("t", "u", "t", "u", "t")]
    assert [found.id for found in await stepped.cron.runs()] == ids
    assert [found.id for found in await stepped.cron.runs("t", limit=2)] == [ids[0], ids[2]]
    assert [found.id for found in await stepped.cron.runs("t", after=ids[2])] == [ids[4]]
    assert await stepped.cron.runs("v") == []


async def test_runs_that_are_over_can_be_pruned_by_age(stepped: Store, clock: ManualClock) -> None:
    await stepped.cron.publish_task("t", call="h")
    old, new, live = [await stepped.cron.run_now("t") for _ in range(3)]
    await stepped.cron.cancel_run(old.id)
    clock.advance(3_600)
    await stepped.cron.cancel_run(new.id)
    clock.advance(3_599)
    assert await stepped.cron.prune_runs(3_600) == 1
    assert [found.id for found in await stepped.cron.runs()] == [new.id, live.id]
    assert await stepped.cron.events(old.id) == []
    left = await sql(stepped, "SELECT count(*) FROM __alkstore_cron_attempts WHERE run = :run", run=old.id)
    assert left == [(0,)]


async def test_pruning_goes_on_page_by_page(stepped: Store) -> None:
    await stepped.cron.publish_task("t", call="h")
    count = runs.PRUNED_PER_STEP + 5
    for _ in range(count):
        await stepped.cron.cancel_run((await stepped.cron.run_now("t")).id)
    assert await stepped.cron.prune_runs(0) == count
    assert await stepped.cron.runs() == []


async def test_a_run_is_shown_in_the_zone_of_its_trigger(stepped: Store) -> None:
    await publish(stepped, timezone="Europe/Berlin")
    await once(stepped)
    made = await only_run(stepped)
    assert made.scheduled_for is not None
    assert str(made.in_zone(made.scheduled_for)) == "2027-01-15 09:00:00+01:00"
    by_hand = await run(stepped, (await stepped.cron.run_now("t")).id)
    assert str(by_hand.in_zone(by_hand.created_at)) == "2027-01-15 08:00:00+00:00"
    assert str((await trigger(stepped)).in_zone(made.scheduled_for)) == "2027-01-15 09:00:00+01:00"


async def test_events_of_a_run_come_a_page_at_a_time(stepped: Store) -> None:
    await stepped.cron.publish_task("t", call="h")
    made = await stepped.cron.run_now("t")
    await stepped.cron.cancel_run(made.id)
    first = await stepped.cron.events(made.id, limit=2)
    assert [event.kind for event in first] == ["run.created", "run.queued"]
    assert [event.kind for event in await stepped.cron.events(made.id, after=first[-1].id)] == ["run.cancelled"]


async def test_what_is_not_there_is_none(store: Store) -> None:
    assert await store.cron.get_run(1) is None
    assert await store.cron.events(1) == []
    assert not await store.cron.cancel_run(1)


async def test_a_cycle_inside_of_an_open_transaction_is_refused(store: Store) -> None:
    await publish(store)
    async with store.transaction():
        await fails(RuntimeError, store.cron.schedule_once, STANDALONE)
