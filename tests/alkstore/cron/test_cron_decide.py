"""What one look at a trigger decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore.cron.decide import NEVER, Admit, Decision, Initialize, Misfire, Skip, decide
from alkstore.cron.expression import timetable

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "decide.json").read_text(encoding="utf-8")
)["decide"]
MINUTE = 60_000
YEAR = 365 * 86_400_000

times = st.integers(0, 4_000_000_000_000)
graces = st.integers(0, 300_000)
policies: st.SearchStrategy[Misfire] = st.sampled_from(["skip", "fire_once"])


def every_minute(after: int) -> int:
    return (after // MINUTE + 1) * MINUTE


def no_more(_after: int) -> None:
    return None


def seen(decision: Decision) -> dict[str, Any]:
    return {
        "disposition": type(decision).__name__.lower(),
        "scheduled_for": decision.scheduled_for if isinstance(decision, Admit) else None,
        "next": decision.next_fire_at,
    }


# ------------------------------------------------------------------------------------------ vectors


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[k]) for k in ("policy", "next", "now")))
def test_the_vectors(case: dict[str, Any]) -> None:
    decision = decide(
        cursor=case["next"],
        published_at=case.get("trigger_updated_at", 0),
        now=case["now"],
        grace=case["grace"],
        misfire=case["policy"],
        next_after=every_minute,
    )
    assert seen(decision) == {"scheduled_for": None, **case["expect"]}


# ------------------------------------------------------------------------------- initialize


def test_the_moment_of_publishing_is_an_occurrence_too() -> None:
    decision = decide(cursor=None, published_at=MINUTE, now=MINUTE, grace=0, misfire="skip", next_after=every_minute)
    assert decision == Admit(MINUTE, 2 * MINUTE)


def test_publishing_asks_only_for_occurrences_since_then() -> None:
    asked: list[int] = []

    def recording(after: int) -> int:
        asked.append(after)
        return every_minute(after)

    decide(cursor=None, published_at=0, now=30, grace=0, misfire="skip", next_after=recording)
    decide(cursor=None, published_at=90_000, now=90_000, grace=0, misfire="skip", next_after=recording)
    assert asked == [0, 89_999]


def test_a_trigger_published_in_the_future_waits_for_its_first_occurrence() -> None:
    decision = decide(cursor=None, published_at=YEAR, now=MINUTE, grace=0, misfire="fire_once", next_after=every_minute)
    assert decision == Initialize(every_minute(YEAR - 1))


def test_a_cursor_that_is_not_due_stays() -> None:
    for cursor in (120_000, 180_000):  # the first and the second occurrence after now
        decision = decide(cursor=cursor, published_at=0, now=60_000, grace=0, misfire="skip", next_after=every_minute)
        assert decision == Initialize(cursor, abandoned=None)


@pytest.mark.parametrize("cursor", [180_001, 240_000, 100 * YEAR, NEVER])
def test_a_cursor_from_a_clock_that_was_far_ahead_is_set_anew_and_told(cursor: int) -> None:
    decision = decide(cursor=cursor, published_at=0, now=60_000, grace=0, misfire="fire_once", next_after=every_minute)
    assert decision == Initialize(120_000, abandoned=cursor)


def test_a_yearly_cursor_is_not_taken_for_a_wrong_clock() -> None:
    yearly = timetable("0 0 29 2 *", "Europe/Berlin").next_after
    now = 1_800_000_000_000
    first = yearly(now)
    assert first is not None
    second = yearly(first)
    assert second is not None
    for cursor in (first, second):
        decision = decide(cursor=cursor, published_at=0, now=now, grace=0, misfire="skip", next_after=yearly)
        assert decision == Initialize(cursor)
    decision = decide(cursor=second + 1, published_at=0, now=now, grace=0, misfire="skip", next_after=yearly)
    assert decision == Initialize(first, abandoned=second + 1)


# --------------------------------------------------------------------------------- no further one


def test_without_a_first_occurrence_the_cursor_is_never() -> None:
    decision = decide(cursor=None, published_at=0, now=MINUTE, grace=0, misfire="fire_once", next_after=no_more)
    assert decision == Initialize(NEVER)


@pytest.mark.parametrize("misfire", ["skip", "fire_once"])
def test_after_the_last_occurrence_the_cursor_is_never_and_never_due(misfire: Misfire) -> None:
    late = decide(cursor=MINUTE, published_at=0, now=2 * MINUTE, grace=0, misfire=misfire, next_after=no_more)
    assert late == (Skip(NEVER) if misfire == "skip" else Admit(MINUTE, NEVER))
    later = decide(cursor=NEVER, published_at=0, now=NEVER - 1, grace=0, misfire=misfire, next_after=no_more)
    assert later == Initialize(NEVER)


# ------------------------------------------------------------------------------------------- laws


@given(cursor=st.none() | times, published=times, now=times, grace=graces, misfire=policies)
def test_whatever_is_decided_the_cursor_ends_up_after_now(
    cursor: int | None, published: int, now: int, grace: int, misfire: Misfire
) -> None:
    decision = decide(
        cursor=cursor, published_at=published, now=now, grace=grace, misfire=misfire, next_after=every_minute
    )
    assert decision.next_fire_at > now
    if not isinstance(decision, Initialize):
        assert decision.next_fire_at == every_minute(now)
    if isinstance(decision, Skip):
        assert misfire == "skip"
    if isinstance(decision, Admit):
        assert decision.scheduled_for <= now
        assert misfire == "fire_once" or now - decision.scheduled_for <= grace


@given(cursor=times, now=times, grace=graces, misfire=policies)
def test_deciding_again_at_the_same_moment_changes_nothing(cursor: int, now: int, grace: int, misfire: Misfire) -> None:
    def again(cursor: int) -> Decision:
        return decide(cursor=cursor, published_at=0, now=now, grace=grace, misfire=misfire, next_after=every_minute)

    settled = again(cursor).next_fire_at
    assert again(settled) == Initialize(settled)


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=60), graces, policies)
def test_no_occurrence_is_admitted_twice_and_one_look_admits_at_most_one(
    steps: list[int], grace: int, misfire: Misfire
) -> None:
    now, cursor = 0, None
    admitted: list[int] = []
    for step in steps:
        now += step
        decision = decide(cursor=cursor, published_at=0, now=now, grace=grace, misfire=misfire, next_after=every_minute)
        cursor = decision.next_fire_at
        if isinstance(decision, Admit):
            admitted.append(decision.scheduled_for)
    assert admitted == sorted(set(admitted))
    assert all(occurrence % MINUTE == 0 for occurrence in admitted)


@given(cursor=times, late=st.integers(0, 10 * YEAR))
def test_fire_once_runs_the_oldest_missed_occurrence_and_no_other(cursor: int, late: int) -> None:
    decision = decide(
        cursor=cursor, published_at=0, now=cursor + late, grace=0, misfire="fire_once", next_after=every_minute
    )
    assert decision == Admit(cursor, every_minute(cursor + late))
