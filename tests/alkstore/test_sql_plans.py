"""Each statement rides on the index named beside it, and what a claim passes by does not make it dearer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from alkstore.sql import health, jobs, locks, schedules
from alkstore.sql.cron import admission, definitions, runs
from alkstore.sql.jobs import burying, claiming, dead_letters, enqueueing, looking, rows, settling
from alkstore.sql.schema import INDEXES
from tests.alkstore.sqltx import START, TASK, TRIGGER, Database, add, claim, ids, new_job, opened, register

ROWID = "INTEGER PRIMARY KEY"
KEY_OF_JOBS = "__alkstore_jobs_key"
READY = "__alkstore_jobs_ready"
PARKED = "__alkstore_jobs_parked"
LAPSE = "__alkstore_jobs_lapse"
EXPIRY = "__alkstore_jobs_expiry"
DEAD = "__alkstore_jobs_dead"
PRUNE = "__alkstore_jobs_prune"
LOCK_EXPIRY = "__alkstore_locks_expiry"
DUE = "__alkstore_scheduler_tasks_due"
AHEAD = "__alkstore_scheduler_tasks_ahead"
TRIGGERS_TASK = "__alkstore_cron_triggers_task"
CRON_DUE = "__alkstore_cron_schedules_due"
CRON_NEW = "__alkstore_cron_schedules_new"
CRON_AHEAD = "__alkstore_cron_schedules_ahead"
FAILING = "__alkstore_cron_schedules_failing"
RUNS_KEY = "__alkstore_cron_runs_key"
RUNS_JOB = "__alkstore_cron_runs_job"
RUNS_TASK = "__alkstore_cron_runs_task"
RUNS_ACTIVE = "__alkstore_cron_runs_active"
RUNS_WAITING = "__alkstore_cron_runs_waiting"
RUNS_ENDED = "__alkstore_cron_runs_ended"
EVENTS_RUN = "__alkstore_cron_events_run"
PRIMARY = "PRIMARY KEY"

RIDES: dict[tuple[ModuleType, str], str] = {
    (enqueueing, "LIVE_KEY"): KEY_OF_JOBS,
    (claiming, "PAUSED"): PRIMARY,
    (claiming, "LAPSED"): LAPSE,
    (claiming, "LAPSE"): ROWID,
    (claiming, "ARRIVED"): PARKED,
    (claiming, "UNPARK"): ROWID,
    (claiming, "PICK"): READY,
    (claiming, "TAKE"): ROWID,
    (burying, "BURY"): ROWID,
    (claiming, "SOONEST"): READY,
    (claiming, "SOONEST_LAPSE"): LAPSE,
    (settling, "ACK"): ROWID,
    (settling, "HEARTBEAT"): ROWID,
    (settling, "MINE"): ROWID,
    (settling, "RETRY"): ROWID,
    (settling, "FAIL"): ROWID,
    (settling, "GIVE_BACK"): ROWID,
    (looking, "GET"): ROWID,
    (dead_letters, "CANCEL"): ROWID,
    (dead_letters, "DEAD_PAGE"): DEAD,
    (dead_letters, "DEAD_KEY"): ROWID,
    (dead_letters, "REDRIVE"): ROWID,
    (dead_letters, "OLD"): PRUNE,
    (dead_letters, "PRUNE"): ROWID,
    (dead_letters, "EXPIRED"): EXPIRY,
    (claiming, "RESUME"): PRIMARY,
    (settling, "HELD"): ROWID,
    (rows, "LOCK"): ROWID,
    (settling, "PUT_BACK"): ROWID,
    (settling, "DELETE"): ROWID,
    (locks, "HOLDER"): PRIMARY,
    (locks, "LOCK"): PRIMARY,
    (locks, "NEXT_FENCE"): PRIMARY,
    (locks, "RENEW"): PRIMARY,
    (locks, "RELEASE"): PRIMARY,
    (locks, "FORGET"): PRIMARY,
    (locks, "LONG_EXPIRED"): LOCK_EXPIRY,
    (locks, "LOCK_FENCE"): PRIMARY,
    (schedules, "CURSOR"): PRIMARY,
    (schedules, "LOCK"): PRIMARY,
    (schedules, "LOCK_LEASE"): PRIMARY,
    (schedules, "UNREGISTER"): PRIMARY,
    (schedules, "DUE"): DUE,
    (schedules, "AHEAD"): AHEAD,
    (schedules, "SOONEST"): DUE,
    (schedules, "ROW"): PRIMARY,
    (schedules, "LEADS"): PRIMARY,
    (schedules, "ADVANCE"): PRIMARY,
    (schedules, "MARK"): PRIMARY,
    (definitions, "ONE_AT_A_TIME"): PRIMARY,
    (definitions, "TASK_HEAD"): PRIMARY,
    (definitions, "TASK_ENABLE"): PRIMARY,
    (definitions, "TASK_DELETE"): PRIMARY,
    (definitions, "TASK"): PRIMARY,
    (definitions, "TASKS"): PRIMARY,
    (definitions, "TRIGGER_HEAD"): PRIMARY,
    (definitions, "TRIGGER_ENABLE"): PRIMARY,
    (definitions, "TRIGGER_FROM_NOW"): PRIMARY,
    (definitions, "TRIGGER_DELETE"): PRIMARY,
    (definitions, "TRIGGERS_OF"): TRIGGERS_TASK,
    (definitions, "ALL_TRIGGERS_OF"): TRIGGERS_TASK,
    (definitions, "TRIGGER"): PRIMARY,
    (definitions, "TRIGGERS"): PRIMARY,
    (definitions, "SCHEDULE_PIN"): PRIMARY,
    (admission, "DUE"): CRON_DUE,
    (admission, "NEW"): CRON_NEW,
    (admission, "AHEAD"): CRON_AHEAD,
    (admission, "SOONEST_DUE"): CRON_DUE,
    (admission, "SOONEST_NEW"): CRON_NEW,
    (admission, "SOONEST_AHEAD"): CRON_AHEAD,
    (admission, "LOCK_TASK"): PRIMARY,
    (admission, "LOCK"): PRIMARY,
    (admission, "AGAIN"): PRIMARY,
    (admission, "MOVE"): PRIMARY,
    (admission, "FAIL"): PRIMARY,
    (admission, "FAILURES"): PRIMARY,
    (admission, "HAS_RUN"): RUNS_KEY,
    (runs, "IS_ACTIVE"): RUNS_ACTIVE,
    (runs, "SET_JOB"): ROWID,
    (runs, "WAITING"): RUNS_WAITING,
    (runs, "LAPSED"): LAPSE,
    (runs, "SOONEST_WAITING"): RUNS_WAITING,
    (runs, "HANDLERS"): RUNS_WAITING,
    (runs, "WORK"): ROWID,
    (runs, "MOVE"): ROWID,
    (runs, "MOVE_ATTEMPT"): PRIMARY,
    (runs, "RUN_OF_JOB"): RUNS_JOB,
    (runs, "STATE"): ROWID,
    (runs, "TAKEN_BY"): PRIMARY,
    (runs, "GET"): ROWID,
    (runs, "LIST_OF_TASK"): RUNS_TASK,
    (runs, "EVENTS"): EVENTS_RUN,
    (runs, "OLD"): RUNS_ENDED,
    (health, "FAILING"): FAILING,
}

INSERTS = {
    (enqueueing, "INSERT"),
    (claiming, "PAUSE"),
    (locks, "TAKE"),
    (schedules, "UPSERT"),
    (definitions, "TASK_ADD"),
    (definitions, "TASK_MOVE"),
    (definitions, "TRIGGER_ADD"),
    (definitions, "TRIGGER_MOVE"),
    (definitions, "SCHEDULE_RESTART"),
    (runs, "INSERT"),
    (runs, "ADD_ATTEMPT"),
    (runs, "ADD_EVENT"),
}
"""They look nothing up but what a unique index must know."""

WALKS = {(runs, "LIST")}
"""It lists everything there is, a page at a time."""

STATEMENT = ("SELECT", "UPDATE", "DELETE", "INSERT", "WITH")


def populate(db: Database, rows: int, queues: int = 1) -> None:
    for queue in ["q", "r", "s", "t", "u"][:queues]:
        for state in ("ready", "leased", "dead"):
            given = many(db, rows, queue, expires=10**9)
            if state == "leased":
                claim(db, queue, "w", rows, None)
            if state == "dead":
                for job_id in given:
                    db.run(jobs.cancel, queue, job_id)
        many(db, rows, queue, key=f"k{queue}", priority=7)
    for n in range(rows):
        register(db, f"s{n}", f"@every {n + 1}m")
        db.run(locks.acquire, f"l{n}", "w", 1_000 + n)
        db.run(definitions.publish_task, f"task{n}", TASK, None, None)
        for kind in ("due", "new", "disabled"):
            db.run(definitions.publish_trigger, f"{kind}{n}", f"task{n}", TRIGGER, None, kind != "disabled")
        db.connection.execute(
            "UPDATE __alkstore_cron_schedules SET next_fire_at = :at WHERE trigger = :trigger",
            {"at": START + n, "trigger": f"due{n}"},
        ).fetchall()
        db.run(runs.create, runs.NewRun(f"task{n}", 1, "", "handler", None, key=f"key{n}"))


def claim_that_every_index_has_one_row(db: Database) -> None:
    db.connection.execute("ANALYZE").fetchall()
    db.connection.execute("DELETE FROM sqlite_stat1").fetchall()
    for table, index in db.all("SELECT tbl_name, name FROM sqlite_master WHERE type = 'index'"):
        db.connection.execute("INSERT INTO sqlite_stat1 VALUES (?, ?, '1 1 1 1 1')", (table, index))
        db.connection.execute("INSERT INTO sqlite_stat1 VALUES (?, NULL, '1')", (table,))
    db.connection.execute("ANALYZE sqlite_schema").fetchall()  # reads the statistics again


def analyzed(db: Database, rows: int, queues: int = 1) -> None:
    populate(db, rows, queues)
    db.connection.execute("ANALYZE").fetchall()


# The embedder may run ANALYZE or PRAGMA optimize at any time; the plans must not depend on what they found.
STATISTICS: dict[str, Callable[[Database], None]] = {
    "no statistics": lambda db: None,
    "statistics of a few jobs": lambda db: analyzed(db, 3),
    "statistics of a job of each kind": lambda db: analyzed(db, 1),
    "statistics of a job of each kind in five queues": lambda db: analyzed(db, 1, 5),
    "statistics of many jobs": lambda db: analyzed(db, 1_000),
    "statistics that are wrong": claim_that_every_index_has_one_row,
}


@pytest.fixture(scope="module", params=STATISTICS)
def db(request: pytest.FixtureRequest) -> Iterator[Database]:
    for db in opened():
        STATISTICS[request.param](db)
        yield db


def plan(db: Database, sql: str) -> list[str]:
    params = dict.fromkeys(re.findall(r"(?<=:)[a-z_]+", sql))
    return [row[3] for row in db.all(f"EXPLAIN QUERY PLAN {sql}", params)]


STATEMENTS = [pytest.param(getattr(module, name), index, id=f"{module.__name__.split('.')[-1]}.{name}")
              for (module, name), index in RIDES.items()]  # fmt: skip


@pytest.mark.parametrize(("sql", "index"), STATEMENTS)
def test_a_statement_rides_on_its_index(db: Database, sql: str, index: str) -> None:
    lines = plan(db, sql)
    assert any(f" {index} " in f"{line} " for line in lines), lines


@pytest.mark.parametrize(("sql", "index"), STATEMENTS)
def test_a_statement_scans_no_table_and_sorts_nothing(db: Database, sql: str, index: str) -> None:
    lines = plan(db, sql)
    assert not [line for line in lines if line.startswith("SCAN __alkstore") and index not in line], lines
    assert not [line for line in lines if line.startswith("SCAN job")], lines
    assert not [line for line in lines if "TEMP B-TREE" in line or "AUTOMATIC" in line or "BLOOM" in line], lines


def test_the_soonest_moment_is_found_by_one_seek_in_each_index(db: Database) -> None:
    lines = plan(db, claiming.SOONEST)
    for index, seeks in ((READY, 2), (PARKED, 1), (LAPSE, 1)):
        assert len([line for line in lines if line.startswith("SEARCH") and f" {index} " in line]) == seeks, lines


def test_what_is_parked_is_sought_by_its_moment(db: Database) -> None:
    (line,) = plan(db, claiming.ARRIVED)
    assert line.endswith(f"{PARKED} (queue=? AND run_at<?)"), line


@pytest.mark.parametrize("name", ["DUE", "NEW", "AHEAD"])
def test_a_page_of_triggers_begins_with_their_schedules(db: Database, name: str) -> None:
    """Everything else is looked up for the few that are found."""
    assert plan(db, getattr(admission, name))[0].startswith("SEARCH schedule USING INDEX")


MODULES = [jobs, locks, schedules, definitions, admission, runs]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_every_statement_has_its_plan_tested(module: ModuleType) -> None:
    statements = {
        (module, name)
        for name, value in vars(module).items()
        if name.isupper()
        and not name.startswith("_")
        and isinstance(value, str)
        and value.lstrip().startswith(STATEMENT)
    }
    assert statements == {key for key in {*RIDES, *INSERTS, *WALKS} if key[0] is module}


def test_every_index_carries_a_statement() -> None:
    assert set(RIDES.values()) - {ROWID, PRIMARY} == INDEXES


# -------------------------------------------------------------------------------------------------- flat cost

OTHERS: dict[str, Callable[[Database, int], object]] = {
    "pending": lambda db, count: many(db, count, priority=-1),
    "pending at the same priority": lambda db, count: many(db, count, run_at=START),
    "delayed": lambda db, count: many(db, count, delay=1_000),
    "delayed at a higher priority": lambda db, count: many(db, count, delay=1_000, priority=5),
    "delayed at a lower priority": lambda db, count: many(db, count, delay=1_000, priority=-5),
    "delayed at many priorities": lambda db, count: [many(db, 1, delay=1_000, priority=n % 100) for n in range(count)],
    "leased": lambda db, count: leased(db, count),  # noqa: PLW0108 - defined below
    "dead": lambda db, count: [db.run(jobs.cancel, "q", job_id) for job_id in many(db, count)],
    "of another queue": lambda db, count: many(db, count, queue="other", priority=100),
}


def many(db: Database, count: int, queue: str = "q", **options: Any) -> list[int]:
    return db.run(lambda tx: [jobs.enqueue(tx, new_job(queue, **options)) for _ in range(count)])


def leased(db: Database, count: int) -> None:
    many(db, count)
    assert len(claim(db, "q", "w", count, 10**6)) == count


def steps(db: Database, work: Callable[[], object]) -> int:
    """How many instructions of SQLite's virtual machine `work` takes."""
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    db.connection.set_progress_handler(count, 1)
    work()
    db.connection.set_progress_handler(None, 0)
    return taken


def analyze(db: Database) -> None:
    db.connection.execute("ANALYZE").fetchall()


@pytest.mark.parametrize("statistics", ["never analyzed", "analyzed when nearly empty", "analyzed when full"])
@pytest.mark.parametrize("kind", OTHERS)
def test_the_cost_of_a_claim_and_a_look_does_not_depend_on_how_many_other_jobs_there_are(
    kind: str, statistics: str
) -> None:
    claims: list[int] = []
    looks: list[int] = []
    for count in (10, 1_000):
        for db in opened():
            if statistics == "analyzed when nearly empty":
                add(db)
                analyze(db)
                db.run(jobs.cancel, "q", 1)
            OTHERS[kind](db, count)
            if statistics == "analyzed when full":
                analyze(db)
            wanted = add(db, run_at=START - 1)
            looks.append(steps(db, partial(db.run, jobs.look, "q")))
            claims.append(steps(db, partial(claimed, db, wanted)))
    assert claims[1] <= claims[0] + 20, claims
    assert looks[1] <= looks[0] + 20, looks


def claimed(db: Database, wanted: int) -> None:
    assert ids(claim(db, "q", "w", 1, None)) == [wanted]


def test_the_cost_of_a_look_at_schedules_does_not_depend_on_how_many_wait() -> None:
    costs: list[int] = []
    for count in (10, 1_000):
        for db in opened():
            for n in range(count):
                register(db, f"s{n}", f"@every {n + 1}m")
            costs.append(steps(db, partial(db.run, schedules.look)))
    assert costs[1] <= costs[0] + 20, costs


COPY_TRIGGERS = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_triggers (id, revision, digest, enabled, task, published_at)
SELECT :kind || i, revision, digest, :active, task, published_at FROM n, __alkstore_cron_triggers WHERE id = 'one'"""

COPY_REVISIONS = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_trigger_revisions
SELECT :kind || i, revision, digest, definition, task, task_revision, task_digest, created_at
FROM n, __alkstore_cron_trigger_revisions WHERE id = 'one'"""

COPY_SCHEDULES = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_schedules (trigger, trigger_revision, next_fire_at, moved_at, active)
SELECT :kind || i, 1, :next_fire_at, :moved_at, :active FROM n"""


def copy_trigger(
    db: Database, kind: str, count: int, *, due_in: int | None, active: int = 1, moved_at: int = START
) -> None:
    """Make as many triggers like the trigger ``one``."""
    next_fire_at = None if due_in is None else START + due_in
    params = {"kind": kind, "count": count, "active": active, "next_fire_at": next_fire_at, "moved_at": moved_at}
    for sql in (COPY_TRIGGERS, COPY_REVISIONS, COPY_SCHEDULES):
        db.connection.execute(sql, params).fetchall()


def cycle(db: Database) -> None:
    """What a cycle does, for one due trigger."""
    page = db.run(admission.page, 16)
    assert [seen.trigger for seen in page.candidates] == ["due1"]
    assert not page.truncated
    for seen in page.candidates:
        assert db.run(admission.admit, seen, seen.needs(), START - 1, START + 1) == "admitted"
    db.run(admission.soonest)


@pytest.mark.parametrize("statistics", ["never analyzed", "analyzed when full"])
def test_the_cost_of_a_cycle_does_not_depend_on_how_many_triggers_wait_or_are_disabled(statistics: str) -> None:
    costs: list[int] = []
    for count in (100, 10_000):
        for db in opened():
            db.run(definitions.publish_task, "t", TASK, None, None)
            db.run(definitions.publish_trigger, "one", "t", TRIGGER, None, False)
            copy_trigger(db, "waiting", count, due_in=1_000)
            copy_trigger(db, "disabled", count, due_in=-1_000, active=0)
            copy_trigger(db, "unset", count, due_in=None, active=0)
            copy_trigger(db, "ahead", count, due_in=10**12, active=0, moved_at=START + 10**12)
            copy_trigger(db, "due", 1, due_in=-1)
            if statistics == "analyzed when full":
                analyze(db)
            costs.append(steps(db, partial(cycle, db)))
    assert costs[1] <= costs[0] + 50, costs
