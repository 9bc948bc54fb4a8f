"""A tick: which boundaries fire, what the jobs are like, and that none fires twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alkstore.every import MAX_MS
from alkstore.payload import encode
from alkstore.sql import jobs, schedules
from alkstore.sql.tx import Tx
from alkstore.values import at
from tests.alkstore.sqltx import HOUR, MINUTE, START, Database, fire, fired_at, opened, register, task, tick

T = START + MINUTE
"""The first boundary of a schedule of a minute that was registered at the start."""


# ----------------------------------------------------------------------------------------- catch-up


@pytest.mark.parametrize(
    ("now", "fired", "next_fire_at", "skipped"),
    [
        (T + 62 * MINUTE, 63, T + 63 * MINUTE, 0),
        (T + 63 * MINUTE, 64, T + 64 * MINUTE, 0),
        (T + 64 * MINUTE, 64, T + 65 * MINUTE, 1),
        (T + 63 * MINUTE + 59_000, 64, T + 64 * MINUTE, 0),
        (T - 1, 0, T, 0),
        (T, 1, T + MINUTE, 0),
    ],
)
def test_the_oldest_64_boundaries_fire_and_the_rest_is_skipped(
    db: Database, now: int, fired: int, next_fire_at: int, skipped: int
) -> None:
    register(db)
    db.ms = now
    tick(db)
    assert fired_at(db) == [T + n * MINUTE for n in range(fired)]
    assert db.run(task)[:4] == (next_fire_at, fired, skipped, 0)


def test_a_gap_is_inspectable(db: Database) -> None:
    register(db)
    db.ms = T + 100 * MINUTE
    tick(db)
    assert db.run(task)[4:] == (T + 63 * MINUTE, db.ms, None)
    assert db.kinds("skipped") == [("s", {"count": 37})]


def test_a_tick_without_a_gap_leaves_the_last_one_standing(db: Database) -> None:
    register(db)
    db.ms = T + 100 * MINUTE
    tick(db)
    gap = db.ms
    db.ms += MINUTE
    tick(db)
    assert db.run(task)[5] == gap


def test_a_fire_is_reported_with_its_jobs(db: Database) -> None:
    register(db)
    db.ms = T + MINUTE
    ids = tick(db)
    assert len(ids) == 2
    assert db.kinds("fired") == [("s", {"queue": "q", "count": 2, "first": at(T), "last": at(T + MINUTE), "ids": ids})]


def test_firing_wakes_who_waits_for_the_queue(db: Database) -> None:
    register(db)
    db.topics.clear()
    db.ms = T
    tick(db)
    assert db.topics == ["queue:q"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 62 * 7_000), min_size=1, max_size=8))
def test_ticks_at_any_moments_fire_every_boundary_once_in_order(pauses: list[int]) -> None:
    for db in opened():
        register(db, spec="@every 7s")
        for pause in pauses:
            db.ms += pause
            tick(db)
        assert fired_at(db) == list(range(START + 7_000, db.ms + 1, 7_000))


# -------------------------------------------------------------------------------------- the fired job


def test_a_fired_job_has_the_derived_defaults_300_3_5_none(db: Database) -> None:
    register(db)
    db.ms = T
    (job_id,) = tick(db)
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.visibility, job.max_attempts, job.backoff, job.expires_at) == (300.0, 3, 5.0, None)
    assert (job.priority, job.key, job.headers, job.attempt) == (0, None, {}, 0)


def test_the_schedules_options_go_over_the_defaults(db: Database) -> None:
    register(db, payload=encode({"a": 1}), priority=-7, max_attempts=1, expires=1_500)
    db.ms = T
    (job_id,) = tick(db)
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.priority, job.max_attempts, job.expires_at, job.payload) == (-7, 1, at(T + 1_500), {"a": 1})


def test_a_late_job_expires_as_long_after_its_firing_as_one_in_time(db: Database) -> None:
    register(db, expires=1_500)
    db.ms = T + 5_000
    (job_id,) = tick(db)
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert job.expires_at == at(db.ms + 1_500)


def test_a_fired_job_knows_its_schedule_and_boundary_and_is_due_since_then(db: Database) -> None:
    register(db)
    db.ms = T + 5_000
    (job_id,) = tick(db)
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.schedule, job.boundary, job.run_at, job.created_at) == ("s", at(T), at(T), at(T + 5_000))


# ----------------------------------------------------------------------------------------- once only


def test_a_second_ticker_finds_the_boundary_fired_already(db: Database) -> None:
    register(db)
    db.ms = T
    first, second = db.run(schedules.look).names, db.run(schedules.look).names
    for name in first + second:
        assert fire(db, name, None)
    assert fired_at(db) == [T]


def test_a_fire_that_is_rolled_back_leaves_neither_job_nor_advance(db: Database) -> None:
    register(db)
    db.ms = T

    def crash(tx: Tx) -> None:
        schedules.fire(tx, "s", None)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        db.run(crash)
    assert (fired_at(db), db.run(task)[0]) == ([], T)
    tick(db)
    assert fired_at(db) == [T]


def test_a_schedule_that_was_unregistered_after_the_look_is_passed_over(db: Database) -> None:
    assert fire(db, "gone", None)
    assert fired_at(db) == []


@pytest.mark.parametrize(("now", "next_at"), [(T - 1, T), (T, T + MINUTE), (T + 100 * MINUTE, T + 101 * MINUTE)])
def test_a_fire_tells_where_the_cursor_stands_now(db: Database, now: int, next_at: int) -> None:
    register(db)
    db.ms = now
    assert db.run(schedules.fire, "s", None).next_at == next_at


def test_a_fire_that_puts_a_cursor_back_tells_where_it_stands_now(db: Database) -> None:
    register(db)
    db.ms = START - 2 * HOUR
    assert db.run(schedules.fire, "s", None).next_at == db.ms + MINUTE == db.run(task)[0]


def test_a_fire_of_a_schedule_that_is_gone_tells_no_moment(db: Database) -> None:
    assert db.run(schedules.fire, "gone", None).next_at is None


def test_a_look_beyond_its_limit_tells_that_there_is_more(db: Database) -> None:
    for n in range(schedules.LOOK_LIMIT + 1):
        register(db, f"s{n}")
    db.ms = T
    rounds = [(len(found.names), found.more) for found in (look_and_fire(db), look_and_fire(db))]
    assert rounds == [(schedules.LOOK_LIMIT, True), (1, False)]


def look_and_fire(db: Database) -> schedules.Due:
    found = db.run(schedules.look)
    for name in found.names:
        fire(db, name)
    return found


def test_a_look_tells_the_soonest_boundary(db: Database) -> None:
    register(db, "a", "@every 2m")
    register(db, "b", "@every 1m")
    found = db.run(schedules.look)
    assert (found.names, found.next_at) == ([], T)


def test_a_look_tells_the_due_ones_longest_overdue_first(db: Database) -> None:
    register(db, "a", "@every 2m")
    register(db, "b", "@every 1m")
    register(db, "c", "@every 1h")
    db.ms = START + 2 * MINUTE
    assert db.run(schedules.look).names == ["b", "a"]


# ---------------------------------------------------------------------------------------- the year 9999


def test_the_last_boundary_of_the_year_9999_fires_and_the_schedule_says_that_it_is_over(db: Database) -> None:
    db.ms = MAX_MS - MINUTE
    register(db)
    db.ms = MAX_MS
    assert len(tick(db)) == 1
    assert fired_at(db) == [MAX_MS]
    assert "past the year 9999" in db.run(task)[6]
    assert tick(db) == []
