"""One bad row never stops the others: what the table refuses, and what a tick does about the rest."""

from __future__ import annotations

import sqlite3

import pytest

from alkstore.sql import schedules
from alkstore.sql.tx import Tx
from tests.alkstore.sqltx import MINUTE, START, Database, fired_at, register, tick

GOOD = [f"good {n:02}" for n in range(20)]


def plant(db: Database, assignment: str, name: str = "bad") -> None:
    db.run(lambda tx: tx.all(f"UPDATE __alkstore_scheduler_tasks SET {assignment} WHERE name = :name", {"name": name}))


def errors(tx: Tx) -> list[str]:
    return [row[0] for row in tx.all("SELECT name FROM __alkstore_scheduler_tasks WHERE error IS NOT NULL")]


@pytest.mark.parametrize(
    "assignment",
    [
        "next_fire_at = '2026-03-12 03:11:13'",
        "next_fire_at = 'abc'",
        "next_fire_at = 1.5",
        "next_fire_at = x'00'",
        "next_fire_at = NULL",
        "next_fire_at = -1",
        "next_fire_at = 253402300800000",
        "interval = 0",
        "interval = -1",
        "interval = 'x'",
        "interval = NULL",
        "spec = NULL",
        "spec = x'00'",
        "queue = NULL",
        "payload = NULL",
        "payload = x'00'",
        "priority = 101",
        "priority = -101",
        "priority = 'high'",
        "max_attempts = 0",
        "max_attempts = 10001",
        "max_attempts = 1.5",
        "expires = -1",
        "fired_total = NULL",
        "name = NULL",
    ],
)
def test_the_table_refuses_what_is_not_of_its_kind(db: Database, assignment: str) -> None:
    register(db, "bad")
    with pytest.raises(sqlite3.IntegrityError):
        plant(db, assignment)


breaks_a_row = pytest.mark.parametrize(
    "assignment",
    [
        "spec = ''",
        "spec = 'bad'",
        "spec = '@every 0s'",
        "spec = '@every 60s' || char(10)",
        "spec = '@every 60s' || char(0)",
        "spec = '*/5 * * * *'",
        "spec = '@every 1d'",  # parses, but the cursor and the indexes are those of the other interval
        "interval = 1",
        "queue = ''",
        "queue = '   '",
        "queue = 'a' || char(0)",
        "queue = '__alkstore_outbox:mail'",
        "queue = replace(hex(zeroblob(128)), '0', 'q')",
        "payload = ''",
        "payload = 'abc'",
        "payload = '{\"a\":'",
        "payload = '1 2'",
        "payload = replace(hex(zeroblob(50000)), '0', '[')",
    ],
    ids=ascii,
)


@breaks_a_row
def test_twenty_good_schedules_fire_beside_a_bad_one(db: Database, assignment: str) -> None:
    for name in ["bad", *GOOD]:
        register(db, name)
    plant(db, assignment)
    db.ms = START + MINUTE
    assert len(tick(db)) == 20
    assert fired_at(db) == [START + MINUTE] * 20
    assert db.run(errors) == ["bad"]


@breaks_a_row
def test_a_bad_row_is_reported_once_and_leaves_the_due_index(db: Database, assignment: str) -> None:
    register(db, "bad")
    plant(db, assignment)
    for n in range(1, 5):
        db.ms = START + n * MINUTE
        tick(db)
    (report,) = db.kinds("row_error")
    assert report[0] == "bad"
    found = db.run(schedules.look)
    assert (found.names, found.next_at) == ([], None)


@breaks_a_row
def test_registering_again_clears_the_error(db: Database, assignment: str) -> None:
    register(db, "bad")
    plant(db, assignment)
    db.ms = START + MINUTE
    tick(db)
    assert register(db, "bad").error is None
    db.ms += MINUTE
    assert tick(db)
    assert db.run(errors) == []


@pytest.mark.parametrize("assignment", ["spec = '@every 1d'", "interval = 1", "interval = 86400000"])
def test_after_every_tick_there_is_nothing_left_to_do(db: Database, assignment: str) -> None:
    register(db, "bad")
    plant(db, assignment)
    plant(db, "next_fire_at = next_fire_at + 7200000")
    tick(db)
    assert db.run(schedules.look).names == []


def test_the_error_says_what_is_wrong(db: Database) -> None:
    register(db, "bad")
    plant(db, "spec = 'bad'")
    db.ms = START + MINUTE
    tick(db)
    ((_, details),) = db.kinds("row_error")
    assert str(details["error"]).startswith("InvalidSpec: a schedule's spec is '@every <n><unit>'")
    assert str(details["error"]).endswith("got 'bad'")


def test_an_expiry_beyond_every_calendar_is_cut_to_the_year_9999(db: Database) -> None:
    register(db, "bad")
    plant(db, "expires = 9223372036854775807")
    db.ms = START + MINUTE
    assert len(tick(db)) == 1


def test_an_interval_that_reaches_past_the_year_9999_fires_once_and_is_marked(db: Database) -> None:
    register(db, "bad")
    plant(db, "spec = '@every 999999999999s', interval = 999999999999000")
    db.ms = START + MINUTE
    assert len(tick(db)) == 1
    assert db.run(errors) == ["bad"]
    assert db.run(schedules.look).names == []
