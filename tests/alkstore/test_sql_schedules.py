"""Registering schedules: what is stored, and when the cursor starts anew."""

from __future__ import annotations

import pytest

from alkstore.errors import InvalidSpec
from alkstore.every import MAX_MS, parse_every
from alkstore.payload import encode
from alkstore.sql import schedules
from alkstore.sql.tx import Tx
from alkstore.values import Schedule, ScheduleOpts, at
from tests.alkstore.sqltx import HOUR, MINUTE, START, Database, fired_at, register, tick


def move_cursor(db: Database, cursor: int) -> None:
    db.run(lambda tx: tx.all("UPDATE __alkstore_scheduler_tasks SET next_fire_at = :cursor", {"cursor": cursor}))


def realigned(tx: Tx) -> int:
    row = tx.one("SELECT realigned_total FROM __alkstore_scheduler_tasks")
    assert row is not None
    return int(row[0])


def test_a_schedule_is_shown_as_stored(db: Database) -> None:
    assert register(db, payload=encode({"a": 1}), priority=7, max_attempts=1, expires=1_500) == Schedule(
        name="s",
        spec="@every 60s",
        queue="q",
        payload={"a": 1},
        opts=ScheduleOpts(priority=7, max_attempts=1, expires=1.5),
        next_fire_at=at(START + MINUTE),
        fired_total=0,
        skipped_total=0,
        last_fired_at=None,
        last_skipped_at=None,
        error=None,
    )


def test_options_that_were_not_given_stay_open(db: Database) -> None:
    assert register(db).opts == ScheduleOpts()


def test_the_first_boundary_is_one_interval_after_registration(db: Database) -> None:
    register(db)
    db.ms += MINUTE - 1
    assert tick(db) == []
    db.ms += 1
    assert len(tick(db)) == 1


def test_registering_wakes_the_runner(db: Database) -> None:
    register(db)
    assert db.topics == ["schedules"]


@pytest.mark.parametrize("spec", ["@every 60s", "@every 1m", "@every 001m"])
def test_registering_the_same_interval_again_keeps_the_cursor(db: Database, spec: str) -> None:
    register(db, spec="@every 1m")
    db.ms += MINUTE - 1
    again = register(db, spec=spec)
    assert (again.spec, again.next_fire_at) == (spec, at(START + MINUTE))


def test_registering_again_keeps_a_backlog_to_catch_up(db: Database) -> None:
    register(db)
    db.ms += 3 * MINUTE
    register(db)
    tick(db)
    assert fired_at(db) == [START + MINUTE, START + 2 * MINUTE, START + 3 * MINUTE]


@pytest.mark.parametrize("spec", ["@every 59s", "@every 2m", "@every 1h"])
def test_registering_another_interval_starts_the_cursor_anew(db: Database, spec: str) -> None:
    register(db)
    db.ms += 1_000
    assert register(db, spec=spec).next_fire_at == at(db.ms + parse_every(spec))


def test_registering_again_replaces_queue_payload_and_options(db: Database) -> None:
    register(db, priority=7, max_attempts=1, expires=1_500)
    again = register(db, queue="other", payload="2", priority=None, max_attempts=9)
    assert (again.queue, again.payload, again.opts) == ("other", 2, ScheduleOpts(max_attempts=9))


def test_registering_again_keeps_what_was_counted(db: Database) -> None:
    register(db)
    db.ms += 65 * MINUTE
    tick(db)
    again = register(db)
    assert (again.fired_total, again.skipped_total) == (64, 1)
    assert (again.last_fired_at, again.last_skipped_at) == (at(START + 64 * MINUTE), at(db.ms))


def test_a_daily_schedule_fires_in_a_program_that_is_restarted_every_six_hours(db: Database) -> None:
    for _ in range(40):
        register(db, spec="@every 24h")
        db.ms += 6 * HOUR
        tick(db)
    assert fired_at(db) == [START + day * 24 * HOUR for day in range(1, 11)]


def test_unregistering_tells_whether_there_was_one(db: Database) -> None:
    register(db)
    assert [db.run(schedules.unregister, "s") for _ in range(2)] == [True, False]


def test_an_unregistered_schedule_does_not_fire_any_more(db: Database) -> None:
    register(db)
    db.run(schedules.unregister, "s")
    db.ms += HOUR
    assert tick(db) == []


def test_jobs_that_were_fired_outlive_their_schedule(db: Database) -> None:
    register(db)
    db.ms += MINUTE
    tick(db)
    db.run(schedules.unregister, "s")
    assert fired_at(db) == [START + MINUTE]


# --------------------------------------------------------------------------------- the year 9999


@pytest.mark.parametrize("spec", ["@every 999999999999d", "@every 999999999999s", "@every 3000000d"])
def test_an_interval_whose_next_boundary_is_past_the_year_9999_is_refused(db: Database, spec: str) -> None:
    with pytest.raises(InvalidSpec, match="past the year 9999") as caught:
        register(db, spec=spec)
    assert caught.value.spec == spec
    assert db.run(schedules.look).next_at is None


def test_the_last_millisecond_of_the_year_9999_may_be_a_boundary(db: Database) -> None:
    db.ms = MAX_MS - MINUTE
    assert register(db).next_fire_at == at(MAX_MS)


def test_one_millisecond_later_there_is_no_boundary_left(db: Database) -> None:
    db.ms = MAX_MS - MINUTE + 1
    with pytest.raises(InvalidSpec):
        register(db)


# ------------------------------------------------------------------------------ a clock that was wrong


@pytest.mark.parametrize(
    ("ahead", "cursor"),
    [
        (MINUTE + HOUR, MINUTE + HOUR),  # as far ahead as an honest clock can have set it
        (MINUTE + HOUR + 1, 1),
        (72 * 365 * 24 * HOUR, MINUTE),
        (72 * 365 * 24 * HOUR + 1_234, 1_234),
    ],
)
def test_a_cursor_far_ahead_is_put_back_on_its_grid_by_registering_again(db: Database, ahead: int, cursor: int) -> None:
    register(db)
    move_cursor(db, START + ahead)
    assert register(db).next_fire_at == at(START + cursor)


def test_putting_a_cursor_back_is_counted_and_reported_once(db: Database) -> None:
    register(db)
    move_cursor(db, START + 10**12)
    register(db)
    register(db)
    assert db.kinds("schedule_realigned") == [("s", {"was": at(START + 10**12)})]
    assert db.run(realigned) == 1
