"""A tick trusts neither its leadership nor its clock: who does not lead, and what a wrong clock leaves behind."""

from __future__ import annotations

import pytest

from alkstore.sql import locks, schedules
from alkstore.values import at
from tests.alkstore.sqltx import HOUR, MINUTE, START, Database, fire, fired_at, register, task, tick

T = START + MINUTE
"""The first boundary of a schedule of a minute that was registered at the start."""


# ---------------------------------------------------------------------------------------- leadership


def lead(db: Database, owner: str, ttl: int = 30_000) -> None:
    assert db.run(locks.acquire, schedules.LEADER_LOCK, owner, ttl)


def test_the_leader_fires(db: Database) -> None:
    register(db)
    db.ms = T
    lead(db, "a")
    assert fire(db, "s", "a")
    assert fired_at(db) == [T]


@pytest.mark.parametrize("leader", ["nobody", "another", "expired", "released", "taken over"])
def test_who_does_not_lead_fires_nothing(db: Database, leader: str) -> None:
    register(db)
    db.ms = T
    if leader == "another":
        lead(db, "b")
    elif leader != "nobody":
        lead(db, "a", ttl=1_000)
    if leader in ("expired", "taken over"):
        db.ms += 1_000
    if leader == "taken over":
        lead(db, "b")
    if leader == "released":
        db.run(locks.release, schedules.LEADER_LOCK, "a")
    before = db.run(task), len(db.events)
    assert not fire(db, "s", "a")
    assert (fired_at(db), db.run(task), len(db.events)) == ([], *before)


def test_who_does_not_lead_does_not_mark_a_bad_row_either(db: Database) -> None:
    register(db)
    db.ms = T
    db.run(lambda tx: tx.all("UPDATE __alkstore_scheduler_tasks SET spec = 'bad'"))
    assert not fire(db, "s", "a")
    assert db.run(task)[6] is None


def test_who_does_not_lead_is_told_though_the_schedule_is_gone(db: Database) -> None:
    assert not fire(db, "gone", "a")


@pytest.mark.parametrize(("elapsed", "leads"), [(0, True), (999, True), (1_000, False)])
def test_leading_ends_with_the_lease(db: Database, elapsed: int, leads: bool) -> None:
    lead(db, "a", ttl=1_000)
    db.ms += elapsed
    assert db.run(schedules.leads, "a") == leads


# ------------------------------------------------------------------------------- a clock that was wrong


def test_a_clock_set_back_fires_nothing_twice(db: Database) -> None:
    register(db)
    db.ms = T
    tick(db)
    db.ms -= 30 * MINUTE
    for _ in range(31):
        assert tick(db) == []
        db.ms += MINUTE
    assert len(tick(db)) == 1
    assert fired_at(db) == [T, T + MINUTE]


def test_after_a_clock_was_set_back_there_is_nothing_to_do_until_the_cursor(db: Database) -> None:
    register(db)
    db.ms -= 30 * MINUTE
    found = db.run(schedules.look)
    assert (found.names, found.next_at) == ([], T)


def test_after_a_start_in_2098_the_next_boundary_is_the_first_of_the_grid_after_now(db: Database) -> None:
    register(db)
    db.ms = 4_039_372_800_000
    tick(db)
    fired = fired_at(db)
    db.ms = 1_809_000_012_345
    assert tick(db) == []
    cursor = db.run(task)[0]
    assert db.ms < cursor <= db.ms + MINUTE
    assert (cursor - T) % MINUTE == 0
    db.ms = cursor
    tick(db)
    assert fired_at(db) == [*fired, cursor]


def test_a_cursor_put_back_is_counted_and_reported_once(db: Database) -> None:
    register(db)
    db.ms = 4_039_372_800_000
    tick(db)
    was = db.run(task)[0]
    db.ms = START
    tick(db)
    tick(db)
    assert db.kinds("schedule_realigned") == [("s", {"was": at(was)})]
    assert db.run(task)[3] == 1


def test_a_cursor_as_far_ahead_as_an_honest_clock_sets_it_is_left_alone(db: Database) -> None:
    register(db)
    db.ms = START - HOUR
    tick(db)
    assert db.run(task)[0] == T


def test_a_cursor_a_millisecond_further_ahead_is_put_back(db: Database) -> None:
    register(db)
    db.ms = START - HOUR - 1
    tick(db)
    assert db.run(task)[0] < T
