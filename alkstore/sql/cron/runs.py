"""The life of a run: queued, dispatching, running, and its end. Every step is a compare-and-set with an event.

A run that is not over has one job in the reserved queue, whose lease and fence are those of the attempt.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from attrs import frozen

from alkstore.payload import decode, describe
from alkstore.sql import jobs
from alkstore.sql.jobs import claiming, settling
from alkstore.sql.text import shown, text
from alkstore.sql.tx import Row, Tx, queue_topic
from alkstore.values import Job, Run, RunEvent, RunState, at

__all__ = [
    "RUNS_QUEUE",
    "Dispatched",
    "Ending",
    "NewRun",
    "cancel",
    "create",
    "dispatch",
    "end",
    "events",
    "get",
    "give_back",
    "has_taken",
    "is_active",
    "list_runs",
    "look",
    "prune",
    "recover",
    "started",
    "waiting",
]

RUNS_QUEUE = "__alkstore_runs"

LEASE_MS = 30_000
"""The lease of an attempt: a runner that died is noticed within it, a cancelled run elsewhere within a third of it."""

RECOVERED_PER_STEP = 100
"""Attempts ended as lost in one transaction."""

PRUNED_PER_STEP = 200
"""Runs deleted in one transaction, so that a lease never waits behind a long one."""

# looked up one by one: where the planner believes that there is one run it would walk over a join
_ATTEMPT = "(SELECT {} FROM __alkstore_cron_attempts WHERE run = one.id AND number = one.attempt)"

_COLUMNS = f"""id, CAST(task AS BLOB), task_revision, CAST(task_digest AS BLOB), CAST(trigger AS BLOB),
  trigger_revision, CAST(trigger_digest AS BLOB), scheduled_for, CAST(timezone AS BLOB), CAST(key AS BLOB), state,
  attempt, created_at, {_ATTEMPT.format("started_at")}, ended_at, {_ATTEMPT.format("exit_code")}, CAST(error AS BLOB),
  {_ATTEMPT.format("CAST(output AS BLOB)")}
FROM __alkstore_cron_runs AS one"""


# ------------------------------------------------------------------------------------------------------- making


@frozen
class NewRun:
    """A run to be, of a pinned revision of its task."""

    task: str
    task_revision: int
    task_digest: str
    handler: str
    """The name of the handler that it needs; empty for a command."""
    args: str | None
    """JSON to be used in place of the task's own arguments; None: those."""
    trigger: str | None = None
    trigger_revision: int | None = None
    trigger_digest: str | None = None
    scheduled_for: int | None = None
    timezone: str | None = None
    key: str | None = None


# rides on __alkstore_cron_runs_active
IS_ACTIVE = """
SELECT 1 FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_active
WHERE task = :task AND state IN ('queued', 'dispatching', 'running') LIMIT 1"""

INSERT = """
INSERT INTO __alkstore_cron_runs (task, task_revision, task_digest, handler, args, trigger, trigger_revision,
  trigger_digest, scheduled_for, timezone, key, state, attempt, available_at, created_at)
VALUES (:task, :task_revision, :task_digest, :handler, :args, :trigger, :trigger_revision,
  :trigger_digest, :scheduled_for, :timezone, :key, 'queued', 1, :now, :now)
RETURNING id"""

SET_JOB = "UPDATE __alkstore_cron_runs SET job = :job WHERE id = :run RETURNING id"

ADD_ATTEMPT = """
INSERT INTO __alkstore_cron_attempts (run, number, state, executor, created_at)
VALUES (:run, :number, 'claimed', 'local_process', :now)"""

ADD_EVENT = """
INSERT INTO __alkstore_cron_events (run, attempt, kind, at, details) VALUES (:run, :attempt, :kind, :now, :details)"""


def is_active(tx: Tx, task: str) -> bool:
    """Return whether the task has a run that is not over."""
    return tx.one(IS_ACTIVE, {"task": task}) is not None


def create(tx: Tx, new: NewRun) -> int:
    """Make a queued run with its first attempt, its job and its first two events; return its id."""
    now = tx.now()
    row = tx.one(
        INSERT,
        {
            "task": new.task,
            "task_revision": new.task_revision,
            "task_digest": new.task_digest,
            "handler": new.handler,
            "args": new.args,
            "trigger": new.trigger,
            "trigger_revision": new.trigger_revision,
            "trigger_digest": new.trigger_digest,
            "scheduled_for": new.scheduled_for,
            "timezone": new.timezone,
            "key": new.key,
            "now": now,
        },
    )
    assert row is not None
    run = int(row[0])
    tx.all(ADD_ATTEMPT, {"run": run, "number": 1, "now": now})
    job = jobs.enqueue(
        tx,
        jobs.NewJob(queue=RUNS_QUEUE, payload=f'{{"run":{run}}}', visibility=LEASE_MS, max_attempts=10_000, backoff=0),
    )
    tx.all(SET_JOB, {"run": run, "job": job})
    _event(tx, run, 1, "run.created")
    _event(tx, run, 1, "run.queued")
    return run


# ---------------------------------------------------------------------------------------------------- executing


@frozen
class Dispatched:
    """An attempt that was taken: its run, what to do, and the claim of its job that keeps it."""

    run: Run
    definition: dict[str, Any]
    """The task's pinned definition."""
    args: str | None
    """JSON in place of the definition's own arguments."""
    job: Job


# rides on __alkstore_cron_runs_waiting
WAITING = """
SELECT id, job, attempt FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_waiting
WHERE handler = :handler AND state = 'queued' AND available_at <= :now
ORDER BY available_at, id LIMIT :limit /*skip locked*/"""

SOONEST_WAITING = """
SELECT available_at FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_waiting
WHERE handler = :handler AND state = 'queued'
ORDER BY available_at LIMIT 1"""

HANDLERS = """
SELECT CAST(handler AS BLOB), count(*) FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_waiting
WHERE state = 'queued' GROUP BY handler ORDER BY handler"""

WORK = """
SELECT
  (SELECT CAST(definition AS BLOB) FROM __alkstore_cron_task_revisions
   WHERE id = one.task AND revision = one.task_revision), CAST(args AS BLOB)
FROM __alkstore_cron_runs AS one WHERE id = :run"""

# the guard: the state and the attempt that were decided on
MOVE = """
UPDATE __alkstore_cron_runs SET state = :state, ended_at = :ended_at,
  error = CASE WHEN :state = 'succeeded' THEN NULL ELSE COALESCE(:error, error) END,
  available_at = COALESCE(:available_at, available_at), attempt = :next_attempt
WHERE id = :run AND state = :was AND attempt = :attempt
RETURNING id"""

MOVE_ATTEMPT = """
UPDATE __alkstore_cron_attempts SET state = :state, worker = COALESCE(:worker, worker),
  started_at = COALESCE(:started_at, started_at), ended_at = :ended_at, exit_code = COALESCE(:exit_code, exit_code),
  error = COALESCE(:error, error), output = COALESCE(:output, output)
WHERE run = :run AND number = :number
RETURNING number"""

RUN_OF_JOB = """
SELECT id, state, attempt FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_job WHERE job = :job
/*for update*/"""


# rides on __alkstore_jobs_lapse
LAPSED = f"""
SELECT id FROM __alkstore_jobs INDEXED BY __alkstore_jobs_lapse
WHERE queue = :queue AND state = 1 AND lease_end <= :now
ORDER BY lease_end, id LIMIT {RECOVERED_PER_STEP}"""


def dispatch(tx: Tx, handlers: tuple[str, ...], worker: str, limit: int) -> list[Dispatched]:
    """Take up to `limit` queued runs whose handler is one of `handlers` (empty text: commands), oldest first.

    One whose definition or arguments cannot be read fails here: nobody can run it.
    """
    now = tx.now()
    waiting = [row for name in handlers for row in tx.all(WAITING, {"handler": name, "now": now, "limit": limit})]
    taken: list[Dispatched] = []
    for run, job_id, attempt in sorted(waiting)[:limit]:
        job = jobs.take(tx, job_id, worker)
        if job is None:  # queued, and its job is not: no transaction of ours leaves this
            _move(tx, run, attempt, "queued", "cancelled", error="its job is gone")
            continue
        _move(tx, run, attempt, "queued", "dispatching")
        _move_attempt(tx, run, attempt, "dispatching", worker=worker)
        try:
            definition, args = _work(tx, run)
        except _UNREADABLE as error:
            _end(tx, run, attempt, job_id, "dispatching", Ending("failed", _flaw(error), final=True))
            continue
        present = get(tx, run)
        assert present is not None
        taken.append(Dispatched(present, definition, args, job))
    return taken


_UNREADABLE = (LookupError, TypeError, ValueError, RecursionError)
"""What reading a definition that was made by other hands may raise."""


def _work(tx: Tx, run: int) -> tuple[dict[str, Any], str | None]:
    """Return the pinned definition of the run's task, and the run's own arguments (JSON). Raises `_UNREADABLE`."""
    row = tx.one(WORK, {"run": run})
    assert row is not None
    if row[0] is None:
        raise LookupError("there is no such revision of the task")
    definition = decode(text(row[0]))
    for name in ("kind", "call", "args", "command", "shell", "env", "cwd", "timeout"):
        definition[name]
    timeout, numbers = definition["timeout"], (definition["retries"], definition["backoff"])
    if not all(isinstance(number, int) and number >= 0 for number in (*numbers, timeout or 0)):
        raise TypeError("timeout, retries and backoff must be whole numbers")
    args = None if row[1] is None else text(row[1])
    if args is not None:
        decode(args)
    return definition, args


def _flaw(error: BaseException) -> str:
    return f"the run's definition cannot be read: {describe(error)}"


def look(tx: Tx, handlers: tuple[str, ...]) -> int | None:
    """Return the soonest moment (ms) at which there may be a run to take or to recover; None: none is in sight."""
    rows = [row for name in handlers for row in tx.all(SOONEST_WAITING, {"handler": name})]
    rows += tx.all(claiming.SOONEST_LAPSE, {"queue": RUNS_QUEUE})
    return min((row[0] for row in rows if row[0] is not None), default=None)


# the worker too: the fence of a claim that was rolled back is given to the next one
TAKEN_BY = """
SELECT worker FROM __alkstore_cron_attempts WHERE run = :run AND number = :number AND state = 'dispatching'"""


def has_taken(tx: Tx, one: Dispatched, worker: str) -> bool:
    """Return whether `worker` has this attempt, when the answer to the commit of `dispatch` was lost."""
    run, attempt = one.run.id, one.run.attempt
    tx.lock(STATE, {"run": run})
    held = jobs.is_held(tx, one.job.id, one.job.fence)
    return held and tx.one(TAKEN_BY, {"run": run, "number": attempt}) == (worker,)


def give_back(tx: Tx, one: Dispatched, worker: str) -> None:
    """Let another runner have the attempt, if `worker` has it."""
    if has_taken(tx, one, worker):
        _go_back(tx, one.run.id, one.run.attempt, one.job.id, "dispatching", tx.now(), None)


def started(tx: Tx, run: int, attempt: int, job: int, fence: int) -> bool:
    """The attempt begins to run, or has done so already; False: it is not ours any more."""
    tx.lock(STATE, {"run": run})
    if not jobs.is_held(tx, job, fence):
        return False
    if tx.one(STATE, {"run": run}) == ("running", attempt, job):
        return True
    if not _move(tx, run, attempt, "dispatching", "running"):
        return False
    _move_attempt(tx, run, attempt, "running", started_at=tx.now())
    return True


@frozen
class Ending:
    """How an attempt ended."""

    state: RunState
    """``succeeded``, ``failed``, ``timed_out``, ``cancelled`` (interrupted by a stop) or ``lost``."""
    error: str | None = None
    exit_code: int | None = None
    output: str | None = None
    final: bool = False
    """No further attempt, whatever the policy says."""
    snooze: int | None = None
    """Not now, but in so many ms; the attempt does not count."""
    begun: bool = True
    """Whether the handler was called. If not, the run may be ``running`` all the same: the store did not answer."""


def end(tx: Tx, run: int, attempt: int, job: int, fence: int, ending: Ending) -> bool:
    """Settle an attempt: the run is over, or queued for another one if its task's policy says so.

    One that has not begun to run goes back as it was, whatever came between. False: the attempt was not ours any
    more, nothing changed.
    """
    tx.lock(STATE, {"run": run})
    if not jobs.is_held(tx, job, fence):
        return False
    row = tx.one(RUN_OF_JOB, {"job": job})
    if row is None or row[0] != run or row[2] != attempt or row[1] not in ("dispatching", "running"):
        return False
    if ending.snooze is not None:
        _go_back(tx, run, attempt, job, row[1], tx.now() + ending.snooze, ending.error)
    elif row[1] == "dispatching" or not ending.begun:
        _go_back(tx, run, attempt, job, row[1], tx.now(), None if ending.state == "cancelled" else ending.error)
    else:
        _end(tx, run, attempt, job, row[1], ending)
    return True


def recover(tx: Tx) -> int:
    """End the attempts whose lease is over as lost, a page at a time; return how many."""
    now = tx.now()
    lapsed = tx.all(LAPSED, {"queue": RUNS_QUEUE, "now": now})
    for (job,) in lapsed:
        tx.lock(RUN_OF_JOB, {"job": job})
        row = tx.one(RUN_OF_JOB, {"job": job})
        if not jobs.take_back(tx, job):
            continue  # its holder was faster
        if row is not None and row[1] in ("dispatching", "running"):
            ending = Ending("lost", "its runner was lost: the lease ended")
            _end(tx, row[0], row[2], job, row[1], ending)
    return len(lapsed)


def cancel(tx: Tx, run: int) -> tuple[bool, int | None]:
    """End the run as cancelled. Returns whether it did, and the job that its handler holds.

    Nothing is settled for a job that is gone: a handler that still runs finds its lease lost at the next heartbeat.
    """
    row = tx.one(STATE, {"run": run})
    if row is None or row[0] not in ("queued", "dispatching", "running"):
        return False, None
    state, attempt, job = row
    error = "cancelled"
    _move_attempt(tx, run, attempt, "cancelled", ended_at=tx.now(), error=error)
    _move(tx, run, attempt, state, "cancelled", error=error)
    jobs.delete(tx, job)
    return True, job


STATE = "SELECT state, attempt, job FROM __alkstore_cron_runs WHERE id = :run /*for update*/"


def _go_back(tx: Tx, run: int, attempt: int, job: int, was: RunState, available_at: int, error: str | None) -> None:
    """The attempt does not count: it waits for the next runner."""
    _move_attempt(tx, run, attempt, "claimed")
    _move(tx, run, attempt, was, "queued", error=error, available_at=available_at)
    jobs.put_back(tx, job, available_at)
    tx.touch(queue_topic(RUNS_QUEUE))


def _end(tx: Tx, run: int, attempt: int, job: int, was: RunState, ending: Ending) -> None:
    _move_attempt(
        tx,
        run,
        attempt,
        ending.state,
        ended_at=tx.now(),
        error=ending.error,
        exit_code=ending.exit_code,
        output=ending.output,
    )
    retries = backoff = 0
    with suppress(*_UNREADABLE):  # then it is not tried again
        policy, _ = _work(tx, run)
        retries, backoff = policy["retries"], policy["backoff"]
    again = ending.state != "succeeded" and not ending.final and attempt <= retries
    if ending.state == "lost" or again:
        _move(tx, run, attempt, was, ending.state, error=ending.error)
        was = ending.state
    if again:
        delay = min(backoff << min(attempt - 1, 32), settling.BACKOFF_CAP_MS)
        available_at = tx.now() + delay
        tx.all(ADD_ATTEMPT, {"run": run, "number": attempt + 1, "now": tx.now()})
        _move(tx, run, attempt, was, "queued", next_attempt=attempt + 1, available_at=available_at)
        jobs.put_back(tx, job, available_at)
        tx.touch(queue_topic(RUNS_QUEUE))
    else:
        final: RunState = "failed" if ending.state == "lost" else ending.state
        _move(tx, run, attempt, was, final, error=ending.error)
        jobs.delete(tx, job)


_STEPS: dict[RunState, tuple[RunState, ...]] = {
    "queued": ("dispatching", "cancelled"),
    "dispatching": ("queued", "running", "failed", "cancelled", "lost"),
    "running": ("queued", "succeeded", "failed", "timed_out", "cancelled", "lost"),
    "lost": ("queued", "failed"),
    "failed": ("queued",),
    "timed_out": ("queued",),
    "cancelled": ("queued",),
}
"""The state machine. What is over goes on only within the transaction that ended it, for another attempt."""


def _move(
    tx: Tx,
    run: int,
    attempt: int,
    was: RunState,
    state: RunState,
    *,
    next_attempt: int | None = None,
    available_at: int | None = None,
    error: str | None = None,
) -> bool:
    """Go from one state to another, with its event; False: it is not in that state any more."""
    assert state in _STEPS.get(was, ()), f"a run cannot go from {was} to {state}"
    over = state not in ("queued", "dispatching", "running")
    moved = tx.all(
        MOVE,
        {
            "run": run,
            "attempt": attempt,
            "was": was,
            "state": state,
            "error": error,
            "ended_at": tx.now() if over else None,
            "available_at": available_at,
            "next_attempt": attempt if next_attempt is None else next_attempt,
        },
    )
    if moved:
        details = {} if error is None else {"error": error}
        _event(tx, run, attempt if next_attempt is None else next_attempt, f"run.{state}", **details)
    return bool(moved)


def _move_attempt(
    tx: Tx,
    run: int,
    number: int,
    state: str,
    *,
    worker: str | None = None,
    started_at: int | None = None,
    ended_at: int | None = None,
    exit_code: int | None = None,
    error: str | None = None,
    output: str | None = None,
) -> None:
    tx.all(
        MOVE_ATTEMPT,
        {
            "run": run,
            "number": number,
            "state": state,
            "worker": worker,
            "started_at": started_at,
            "ended_at": ended_at,
            "exit_code": exit_code,
            "error": error,
            "output": output,
        },
    )


def _event(tx: Tx, run: int, attempt: int, kind: str, **details: Any) -> None:
    text = json.dumps(details, ensure_ascii=False)
    tx.all(ADD_EVENT, {"run": run, "attempt": attempt, "kind": kind, "now": tx.now(), "details": text})
    tx.report(kind, str(run), attempt=attempt, **details)


# ------------------------------------------------------------------------------------------------------ reading

GET = f"SELECT {_COLUMNS} WHERE id = :run"

# ride on __alkstore_cron_runs_task and the primary key
LIST = f"SELECT {_COLUMNS} NOT INDEXED WHERE id > :after ORDER BY id LIMIT :limit"
LIST_OF_TASK = f"""
SELECT {_COLUMNS} INDEXED BY __alkstore_cron_runs_task WHERE task = :task AND id > :after ORDER BY id LIMIT :limit"""

EVENTS = """
SELECT id, run, attempt, kind, at, details
FROM __alkstore_cron_events INDEXED BY __alkstore_cron_events_run
WHERE run = :run AND id > :after ORDER BY id LIMIT :limit"""


def get(tx: Tx, run: int) -> Run | None:
    """Return the run, or None."""
    row = tx.one(GET, {"run": run})
    return None if row is None else _run(row)


def list_runs(tx: Tx, task: str | None, after: int, limit: int) -> list[Run]:
    """Return a page of the runs, of one task or of all, by id, beginning after the id `after`."""
    sql = LIST if task is None else LIST_OF_TASK
    return [_run(row) for row in tx.all(sql, {"task": task, "after": after, "limit": limit})]


def events(tx: Tx, run: int, after: int, limit: int) -> list[RunEvent]:
    """Return a page of what happened to a run, oldest first, beginning after the event `after`."""
    rows = tx.all(EVENTS, {"run": run, "after": after, "limit": limit})
    return [RunEvent(row[0], row[1], row[2], row[3], at(row[4]), decode(row[5])) for row in rows]


# rides on __alkstore_cron_runs_ended
OLD = f"""
SELECT id FROM __alkstore_cron_runs INDEXED BY __alkstore_cron_runs_ended
WHERE ended_at IS NOT NULL AND ended_at <= :before
ORDER BY ended_at LIMIT {PRUNED_PER_STEP} /*skip locked*/"""

PRUNE = (
    "DELETE FROM __alkstore_cron_events WHERE run = :run",
    "DELETE FROM __alkstore_cron_attempts WHERE run = :run",
    "DELETE FROM __alkstore_cron_runs WHERE id = :run",
)


def prune(tx: Tx, age: int) -> int:
    """Delete up to a page of runs that ended at least `age` ms ago, with their attempts and events; return how many."""
    old = tx.all(OLD, {"before": tx.now() - age})
    for (run,) in old:
        for sql in PRUNE:
            tx.all(sql, {"run": run})
    return len(old)


def waiting(tx: Tx) -> dict[str, int]:
    """Return how many runs are queued for each handler; the empty text is for commands."""
    return {shown(name): int(count) for name, count in tx.all(HANDLERS)}


def _run(row: Row) -> Run:
    (id, task, task_revision, task_digest, trigger, trigger_revision, trigger_digest, scheduled_for, timezone, key,
     state, attempt, created_at, started_at, ended_at, exit_code, error, output) = row  # fmt: skip
    return Run(
        id=id,
        task=shown(task),
        task_revision=task_revision,
        task_digest=shown(task_digest),
        trigger=_shown(trigger),
        trigger_revision=trigger_revision,
        trigger_digest=_shown(trigger_digest),
        scheduled_for=None if scheduled_for is None else at(scheduled_for),
        timezone=_shown(timezone),
        key=_shown(key),
        state=state,
        attempt=attempt,
        created_at=at(created_at),
        started_at=None if started_at is None else at(started_at),
        ended_at=None if ended_at is None else at(ended_at),
        exit_code=exit_code,
        error=_shown(error),
        output=_shown(output),
    )


def _shown(value: bytes | str | None) -> str | None:
    return None if value is None else shown(value)
