"""A row that no program can read (text that is no UTF-8, no JSON) is ended or marked once, and stops no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from alkstore.sql import clock_repair, health, jobs
from alkstore.sql.cron import admission, definitions, runs
from tests.alkstore.sqltx import HOUR, MINUTE, START, TASK, TRIGGER, Database, add, claim, ids, register, tick

NO_UTF8 = "CAST(x'40ff' AS TEXT)"
NO_UTF8_IN_JSON = "CAST(x'7b2261223a22ff227d' AS TEXT)"


def plant(db: Database, table: str, assignment: str, where: str) -> None:
    db.run(lambda tx: tx.all(f"UPDATE __alkstore_{table} SET {assignment} WHERE {where}"))


# -------------------------------------------------------------------------------------------------------- jobs

spoils_a_job = pytest.mark.parametrize(
    "assignment",
    [
        "payload = 'no json'",
        "payload = ''",
        f"payload = {NO_UTF8}",
        f"payload = {NO_UTF8_IN_JSON}",
        "payload = replace(hex(zeroblob(100000)), '0', '[')",
        "headers = '{'",
        "headers = '[]'",
        "headers = '1'",
        f"headers = {NO_UTF8}",
        f"headers = {NO_UTF8_IN_JSON}",
    ],
)


@spoils_a_job
def test_a_job_that_cannot_be_read_is_buried_by_the_claim_that_finds_it(db: Database, assignment: str) -> None:
    bad, good = add(db), add(db)
    plant(db, "jobs", assignment, f"id = {bad}")
    assert ids(claim(db, limit=2)) == [good]
    assert claim(db, limit=2) == []
    found = db.run(jobs.get, bad)
    assert found is not None
    assert (found.state, found.reason, found.payload, found.headers) == ("dead", "failed", None, {})
    assert found.error is not None
    assert found.error.startswith("the job cannot be read: ")
    assert db.kinds("dead") == [("q", {"id": bad, "reason": "failed"})]


@spoils_a_job
def test_a_claim_of_one_goes_on_to_the_next_that_can_be_read(db: Database, assignment: str) -> None:
    given = [add(db) for _ in range(5)]
    plant(db, "jobs", assignment, f"id < {given[-1]}")
    assert ids(claim(db, limit=1)) == [given[-1]]


@spoils_a_job
def test_a_job_that_cannot_be_read_is_shown_as_it_waits(db: Database, assignment: str) -> None:
    bad, good = add(db), add(db)
    plant(db, "jobs", assignment, f"id = {bad}")
    shown, other = db.run(jobs.list_jobs, "q", "ready", 0, 10)
    assert (shown.id, shown.payload, other.id, other.error) == (bad, None, good, None)
    assert shown.error is not None
    assert shown.error.startswith("the job cannot be read: ")


@pytest.mark.parametrize("column", ["key", "error", "schedule"])
def test_text_beside_the_payload_does_not_keep_a_job_from_its_handler(db: Database, column: str) -> None:
    bad, good = add(db), add(db)
    plant(db, "jobs", f"{column} = {NO_UTF8}", f"id = {bad}")
    assert ids(claim(db, limit=2)) == [bad, good]
    assert getattr(db.run(jobs.get, bad), column) == "@\N{REPLACEMENT CHARACTER}"


def test_a_dead_letter_with_an_unreadable_key_stops_no_redrive(db: Database) -> None:
    bad, good = add(db, key="a"), add(db, key="b")
    for id in (bad, good):
        db.run(jobs.cancel, "q", id)
    plant(db, "jobs", f"key = {NO_UTF8}", f"id = {bad}")
    assert db.run(jobs.redrive_page, "q", 0) == (1, None)
    assert not db.run(jobs.redrive, "q", bad)
    assert ids(claim(db, limit=2)) == [good]


def test_a_queue_with_an_unreadable_name_is_counted(db: Database) -> None:
    add(db)
    plant(db, "jobs", f"queue = {NO_UTF8}", "id = 1")
    assert list(db.run(health.queue_counts)[0]) == ["@\N{REPLACEMENT CHARACTER}"]


# --------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("column", ["name", "spec", "queue", "payload"])
def test_a_schedule_that_cannot_be_read_is_marked_once(db: Database, column: str) -> None:
    for name in ("a", "bad", "c"):
        register(db, name)
    plant(db, "scheduler_tasks", f"{column} = {NO_UTF8}", "name = 'bad'")
    for _ in range(3):
        db.ms += MINUTE
        assert len(tick(db)) == 2
    ((subject, _),) = db.kinds("row_error")
    expected = "@\N{REPLACEMENT CHARACTER}" if column == "name" else "bad"
    assert subject == expected
    assert db.run(health.schedule_health).broken == (expected,)


@pytest.mark.parametrize("column", ["spec", "queue", "payload"])
def test_a_schedule_that_cannot_be_read_fires_again_when_it_is_registered_again(db: Database, column: str) -> None:
    register(db, "bad")
    plant(db, "scheduler_tasks", f"{column} = {NO_UTF8}", "name = 'bad'")
    db.ms += MINUTE
    assert tick(db) == []
    register(db, "bad")
    assert len(tick(db)) == 1


# -------------------------------------------------------------------------------------------------------- cron


def publish(db: Database, *triggers: str, task: str = "t") -> None:
    db.run(definitions.publish_task, task, TASK, None, None)
    for trigger in triggers:
        db.run(definitions.publish_trigger, trigger, task, TRIGGER, None, None)


@pytest.mark.parametrize(
    ("table", "assignment", "where"),
    [
        ("cron_trigger_revisions", f"definition = {NO_UTF8}", "id = 'b'"),
        ("cron_trigger_revisions", f"task_digest = {NO_UTF8}", "id = 'b'"),
        ("cron_trigger_revisions", f"definition = {NO_UTF8_IN_JSON}", "id = 'b'"),
        ("cron_triggers", f"digest = {NO_UTF8}", "id = 'b'"),
    ],
)
def test_a_trigger_that_cannot_be_read_is_a_candidate_that_fails(
    db: Database, table: str, assignment: str, where: str
) -> None:
    publish(db, "a", "b", "c")
    plant(db, table, assignment, where)
    seen = {one.trigger: one for one in db.run(admission.page, 16).candidates}
    assert list(seen) == ["a", "b", "c"]
    seen["a"].needs()
    with pytest.raises(ValueError, match="utf-8"):
        seen["b"].needs()
    assert db.run(admission.fail, seen["b"], "told") == "failed"
    assert db.run(admission.advance, seen["a"], START, skipped=False) == "initialized"
    assert [one.trigger for one in db.run(admission.page, 16).candidates] == ["a", "c"]


def test_a_trigger_with_an_unreadable_name_fails_as_any_other(db: Database) -> None:
    publish(db, "a", "b")
    for table, column in (("triggers", "id"), ("trigger_revisions", "id"), ("schedules", "trigger")):
        plant(db, f"cron_{table}", f"{column} = {NO_UTF8}", f"{column} = 'b'")
    (bad,) = [one for one in db.run(admission.page, 16).candidates if one.trigger != "a"]
    assert db.run(admission.fail, bad, "told") == "failed"
    assert db.kinds("row_error") == [("@\N{REPLACEMENT CHARACTER}", {"error": "told"})]
    assert db.run(health.cron_health, frozenset()).failing == ("@\N{REPLACEMENT CHARACTER}",)


unreadable = pytest.mark.parametrize("definition", ["'{'", "'{}'", "'[]'", "'null'", NO_UTF8, NO_UTF8_IN_JSON])


@unreadable
def test_definitions_that_cannot_be_read_are_listed_pinned_and_replaced(db: Database, definition: str) -> None:
    publish(db, "a", "b")
    plant(db, "cron_trigger_revisions", f"definition = {definition}", "id = 'b'")
    plant(db, "cron_task_revisions", f"definition = {definition}", "id = 't'")
    assert [one.expression for one in db.run(definitions.list_triggers, "", 10)] == ["0 * * * *", ""]
    assert [one.call for one in db.run(definitions.list_tasks, "", 10)] == [None]
    db.run(definitions.publish_task, "t", TASK.replace("5000", "6000"), 1, None)
    replaced = db.run(definitions.publish_trigger, "b", "t", TRIGGER, 2, None)
    assert (replaced.expression, replaced.task_revision, replaced.error) == ("0 * * * *", 2, None)


def started(db: Database, task: str) -> int:
    return db.run(runs.create, runs.NewRun(task, 1, "", "handler", None))


@unreadable
def test_a_run_whose_definition_cannot_be_read_fails_when_it_is_dispatched(db: Database, definition: str) -> None:
    publish(db)
    publish(db, task="u")
    bad, good = started(db, "t"), started(db, "u")
    plant(db, "cron_task_revisions", f"definition = {definition}", "id = 't'")
    assert [one.run.id for one in db.run(runs.dispatch, ("handler",), "w", 10)] == [good]
    found = db.run(runs.get, bad)
    assert found is not None
    assert found.state == "failed"
    assert found.error is not None
    assert found.error.startswith("the run's definition cannot be read: ")
    assert [one.id for one in db.run(jobs.list_jobs, runs.RUNS_QUEUE, "leased", 0, 10)] == [2]
    assert db.run(runs.look, ("handler",)) == START + runs.LEASE_MS, "only the good one's lease is in sight"


@unreadable
def test_a_definition_that_becomes_unreadable_while_it_runs_does_not_stop_the_recovery(
    db: Database, definition: str
) -> None:
    publish(db)
    run = started(db, "t")
    db.run(runs.dispatch, ("handler",), "w", 10)
    plant(db, "cron_task_revisions", f"definition = {definition}", "id = 't'")
    db.ms += runs.LEASE_MS
    assert db.run(runs.recover) == 1
    found = db.run(runs.get, run)
    assert found is not None
    assert found.state == "failed"


@pytest.mark.parametrize("args", ["'{'", NO_UTF8])
def test_a_run_whose_own_arguments_cannot_be_read_fails_when_it_is_dispatched(db: Database, args: str) -> None:
    publish(db)
    bad, good = started(db, "t"), started(db, "t")
    plant(db, "cron_runs", f"args = {args}", f"id = {bad}")
    assert [one.run.id for one in db.run(runs.dispatch, ("handler",), "w", 10)] == [good]


# ------------------------------------------------------------------------------------- what had its run keeps it


@pytest.mark.parametrize("edits", [0, 1, 5])
def test_an_occurrence_that_had_its_run_gets_none_from_a_later_revision(db: Database, edits: int) -> None:
    publish(db, "a")
    admitted = partial(admit_at, db, START)
    assert admitted() == "admitted"
    for n in range(edits):
        db.run(definitions.publish_task, "t", TASK.replace("5000", str(6000 + n)), 1 + n, None)
    assert admitted() == "raced"
    assert admit_at(db, START + 1) == "admitted"


def test_the_same_occurrence_of_another_trigger_has_its_own_run(db: Database) -> None:
    publish(db, "a", "a:1")
    for seen in db.run(admission.page, 16).candidates:
        assert db.run(admission.admit, seen, seen.needs(), START, START) == "admitted"


def admit_at(db: Database, moment: int) -> admission.Outcome:
    (seen,) = db.run(admission.page, 16).candidates
    return db.run(admission.admit, seen, seen.needs(), moment, START)


# ------------------------------------------------------------------------------------------- a clock set back


@pytest.mark.parametrize(
    ("write", "is_due"),
    [
        pytest.param(lambda db: add(db, delay=MINUTE), False, id="delayed after the step"),
        pytest.param(add, False, id="ready after the step"),
    ],
)
def test_a_repair_leaves_alone_what_was_created_since_the_step(
    db: Database, write: Callable[[Database], int], is_due: bool
) -> None:
    before = db.ms
    db.ms -= HOUR
    id = write(db)
    row = db.one("SELECT run_at FROM __alkstore_jobs WHERE id = :id", {"id": id})
    repaired = db.run(clock_repair.repair, before, db.ms)
    assert bool(repaired) is is_due
    assert db.one("SELECT run_at FROM __alkstore_jobs WHERE id = :id", {"id": id}) == row


def test_a_repair_makes_due_what_came_due_before_the_step(db: Database) -> None:
    old = add(db, delay=MINUTE)
    db.ms += 10 * HOUR
    retried, later = add(db, delay=MINUTE), add(db, delay=2 * HOUR)
    db.ms += 2 * MINUTE
    before = db.ms
    db.ms -= HOUR
    db.run(clock_repair.repair, before, db.ms)
    assert ids(claim(db, limit=5)) == [old, retried]
    assert [job.id for job in db.run(jobs.list_jobs, "q", "delayed", 0, 5)] == [later]


def test_repairs_are_counted_but_not_those_that_come_late(db: Database) -> None:
    assert db.run(clock_repair.counted) == 0
    for n in (1, 2):
        db.run(clock_repair.repair, db.ms)
        db.run(clock_repair.repair, db.ms, again=True)
        assert db.run(clock_repair.counted) == n


def test_a_repaired_stamp_says_nothing_until_the_clock_is_set_back_again(db: Database) -> None:
    add(db)
    db.ms -= HOUR
    assert db.run(clock_repair.newest_stamp) == START
    db.run(clock_repair.repair, START)
    assert db.run(clock_repair.newest_stamp) == 0
    db.ms -= 1
    assert db.run(clock_repair.newest_stamp) == START
