"""From a due trigger to a durable run: a page of candidates, and one guarded transaction for each decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import frozen

from alkstore.payload import decode
from alkstore.sql.cron import runs
from alkstore.sql.text import escaped, raw, shown, text
from alkstore.sql.tx import CRON, Row, Tx
from alkstore.values import Overlap, at

__all__ = ["Candidate", "Deciding", "Needs", "Outcome", "Page", "admit", "advance", "fail", "page", "raced", "soonest"]

Outcome: TypeAlias = Literal["initialized", "skipped", "admitted", "raced", "failed"]

Deciding: TypeAlias = "Callable[[Tx], Outcome]"
"""One decision, to be carried out as a unit."""

RETRY_MINUTES = 60
"""A row that fails is looked at again after 1, 2, 4 … and at most this many minutes."""

AHEAD_SLACK_MS = RETRY_MINUTES * 60_000
"""What a row says of the clock may be this far ahead of now, no more: no honest clock has read the rest."""

_FACTS = """
SELECT CAST(schedule.trigger AS BLOB), schedule.trigger_revision, schedule.next_fire_at, schedule.state_version,
  schedule.active, head.revision, CAST(head.digest AS BLOB), head.enabled, head.deleted_at, head.published_at,
  CAST(pinned.definition AS BLOB), CAST(pinned.task AS BLOB), pinned.task_revision, CAST(pinned.task_digest AS BLOB),
  task.revision, CAST(task.digest AS BLOB), task.enabled, task.deleted_at, CAST(work.definition AS BLOB)
FROM __alkstore_cron_schedules AS schedule {index}
JOIN __alkstore_cron_triggers AS head ON head.id = schedule.trigger
JOIN __alkstore_cron_trigger_revisions AS pinned
  ON pinned.id = schedule.trigger AND pinned.revision = schedule.trigger_revision
JOIN __alkstore_cron_tasks AS task ON task.id = pinned.task
JOIN __alkstore_cron_task_revisions AS work ON work.id = pinned.task AND work.revision = pinned.task_revision"""

_CURSOR, _PUBLISHED_AT = 2, 9
"""Where they stand in a row of facts."""

_BY_DUE = "INDEXED BY __alkstore_cron_schedules_due"
_BY_NEW = "INDEXED BY __alkstore_cron_schedules_new"
_BY_AHEAD = "INDEXED BY __alkstore_cron_schedules_ahead"

# the moment at which a row is to be looked at; as it stands in the index
_LOOK_AT = "(CASE WHEN schedule.retry_at > schedule.next_fire_at THEN schedule.retry_at ELSE schedule.next_fire_at END)"

DUE = f"""{_FACTS.format(index=_BY_DUE)}
WHERE schedule.active = 1 AND schedule.next_fire_at IS NOT NULL AND {_LOOK_AT} <= :now
ORDER BY {_LOOK_AT}, schedule.trigger LIMIT :limit"""

NEW = f"""{_FACTS.format(index=_BY_NEW)}
WHERE schedule.active = 1 AND schedule.next_fire_at IS NULL AND schedule.retry_at <= :now
ORDER BY schedule.retry_at, schedule.trigger LIMIT :limit"""

# what the clock has read at least when the row was last decided on, or that and a pause; as it stands in the index
_CLOCK_READ = "(CASE WHEN schedule.retry_at > schedule.moved_at THEN schedule.retry_at ELSE schedule.moved_at END)"

AHEAD = f"""{_FACTS.format(index=_BY_AHEAD)}
WHERE schedule.active = 1 AND {_CLOCK_READ} > :now + {AHEAD_SLACK_MS}
  AND (schedule.retry_at <= :now OR schedule.retry_at > :now + {AHEAD_SLACK_MS})
ORDER BY {_CLOCK_READ} DESC LIMIT :limit"""

SOONEST_DUE = f"""
SELECT {_LOOK_AT} FROM __alkstore_cron_schedules AS schedule {_BY_DUE}
WHERE schedule.active = 1 AND schedule.next_fire_at IS NOT NULL ORDER BY {_LOOK_AT} LIMIT 1"""

SOONEST_NEW = f"""
SELECT schedule.retry_at FROM __alkstore_cron_schedules AS schedule {_BY_NEW}
WHERE schedule.active = 1 AND schedule.next_fire_at IS NULL ORDER BY schedule.retry_at LIMIT 1"""

SOONEST_AHEAD = f"""
SELECT :now FROM __alkstore_cron_schedules AS schedule {_BY_AHEAD}
WHERE schedule.active = 1 AND {_CLOCK_READ} > :now + {AHEAD_SLACK_MS} LIMIT 1"""

# before the schedule, as publishing does
LOCK_TASK = "SELECT id FROM __alkstore_cron_tasks WHERE id = :task /*for update*/"

LOCK = "SELECT trigger FROM __alkstore_cron_schedules WHERE trigger = :trigger /*for update*/"

AGAIN = f"{_FACTS.format(index='')} WHERE schedule.trigger = :trigger"

# the guard: the state that was decided on
MOVE = """
UPDATE __alkstore_cron_schedules SET next_fire_at = :next_fire_at, moved_at = :moved_at,
  state_version = state_version + 1,
  last_scheduled_at = COALESCE(:scheduled_for, last_scheduled_at), skipped_total = skipped_total + :skipped,
  last_skipped_at = COALESCE(:skipped_at, last_skipped_at), retry_at = 0, failures = 0, error = NULL
WHERE trigger = :trigger AND state_version = :state_version AND trigger_revision = :revision
RETURNING trigger"""

# both of a name that is no UTF-8 too
FAIL = """
UPDATE __alkstore_cron_schedules SET retry_at = :retry_at, failures = failures + 1, error = :error
WHERE trigger = CAST(:trigger AS TEXT) AND state_version = :state_version
RETURNING 1"""

FAILURES = """
SELECT failures, CAST(error AS BLOB) FROM __alkstore_cron_schedules WHERE trigger = CAST(:trigger AS TEXT)"""

# Every revision of the trigger has keys of its own. They are probed one by one, which is as cheap as they are few.
HAS_RUN = """
SELECT 1 FROM __alkstore_cron_trigger_revisions AS one CROSS JOIN __alkstore_cron_runs AS run
WHERE one.id = :trigger AND one.revision <= :revision
  AND run.key = 'ql3:cron:v1:' || one.id || ':' || one.revision || ':' || CAST(:scheduled_for AS TEXT)
LIMIT 1"""


@frozen
class Candidate:
    """A trigger that is due or to be initialised, and every fact that the decision about it rests on."""

    facts: Row
    trigger: str
    revision: int
    digest: str
    cursor: int | None
    published_at: int
    state_version: int
    definition: str
    """The trigger's, JSON."""
    task: str
    task_revision: int
    task_digest: str
    work: str
    """The task's definition, JSON."""

    def needs(self) -> Needs:
        """Return what a run takes from the definitions.

        Raises:
            LookupError, TypeError, ValueError: the definitions were made by other hands.
        """
        for fact in self.facts:
            if isinstance(fact, bytes):
                text(fact)
        work = decode(self.work)
        return Needs(work["call"] or "", work["overlap"], decode(self.definition)["timezone"])


@frozen
class Needs:
    """What a run takes from the definitions besides their revisions."""

    handler: str
    """Empty for a command."""
    overlap: Overlap
    timezone: str


@frozen
class Page:
    """What one cycle looks at."""

    now: int
    candidates: list[Candidate]
    truncated: bool
    """There was more."""


def page(tx: Tx, size: int) -> Page:
    """Return up to `size` candidates: due ones first, soonest first, and a share kept for those without a cursor.

    Without the share the one kind could starve the other: a quarter of the page, at least one row. A page of one row
    is for whoever has waited longer. What a clock that was far ahead has left behind counts among those without a
    cursor: one look sets it right.
    """
    now = tx.now()
    ahead, new, due = (tx.all(sql, {"now": now, "limit": size + 1}) for sql in (AHEAD, NEW, DUE))
    share = max(1, size // 4)
    if size == 1 and due and new and not ahead and due[0][_CURSOR] <= new[0][_PUBLISHED_AT]:
        share = 0
    new = [*ahead, *new]
    of_due = min(len(due), size - min(len(new), share))
    of_new = min(len(new), size - of_due)
    rows = [*due[:of_due], *new[:of_new]]
    return Page(now, [_candidate(row) for row in rows], len(due) + len(new) > len(rows))


def soonest(tx: Tx) -> int | None:
    """Return the soonest moment (ms) at which a cycle has something to decide; None: nothing is in sight."""
    now = tx.now()
    moments = [row[0] for sql in (SOONEST_DUE, SOONEST_NEW, SOONEST_AHEAD) for row in tx.all(sql, {"now": now})]
    return min(moments, default=None)


def advance(tx: Tx, seen: Candidate, next_fire_at: int, *, skipped: bool, abandoned: int | None = None) -> Outcome:
    """Move the cursor and make no run: to initialise it, or to give up what is late.

    `abandoned` is a cursor that no honest clock can have set, to be reported.
    """
    if not _is_as_seen(tx, seen):
        return raced(tx)
    if abandoned is not None:
        tx.report("schedule_realigned", seen.trigger, was=at(abandoned))
    _move(tx, seen, next_fire_at, skipped=skipped)
    if skipped:
        tx.report("skipped", seen.trigger, count=1)
    return "skipped" if skipped else "initialized"


def admit(tx: Tx, seen: Candidate, needs: Needs, scheduled_for: int, next_fire_at: int) -> Outcome:
    """Make the run for the occurrence `scheduled_for` and move the cursor, together or not at all.

    An occurrence that had its run is not given another, also not by a later revision of the trigger when the clock
    was set back: the cursor moves, and it counts as raced. A task
    whose overlap is ``skip`` and that has a run which is not over gives the occurrence up.
    """
    if needs.overlap == "skip":  # or two triggers of one task would not see each other's run
        tx.lock(LOCK_TASK, {"task": seen.task})
    if not _is_as_seen(tx, seen):
        return raced(tx)
    occurrence = {"trigger": seen.trigger, "revision": seen.revision, "scheduled_for": scheduled_for}
    if tx.one(HAS_RUN, occurrence):
        _move(tx, seen, next_fire_at)
        return "raced"
    if needs.overlap == "skip" and runs.is_active(tx, seen.task):
        _move(tx, seen, next_fire_at, skipped=True)
        tx.report("skipped", seen.trigger, count=1, overlap=True)
        return "skipped"
    run = runs.create(
        tx,
        runs.NewRun(
            task=seen.task,
            task_revision=seen.task_revision,
            task_digest=seen.task_digest,
            handler=needs.handler,
            args=None,
            trigger=seen.trigger,
            trigger_revision=seen.revision,
            trigger_digest=seen.digest,
            scheduled_for=scheduled_for,
            timezone=needs.timezone,
            key=f"ql3:cron:v1:{seen.trigger}:{seen.revision}:{scheduled_for}",
        ),
    )
    _move(tx, seen, next_fire_at, scheduled_for=scheduled_for)
    tx.report("admitted", seen.trigger, run=run, scheduled_for=at(scheduled_for))
    return "admitted"


def fail(tx: Tx, seen: Candidate, error: str) -> Outcome:
    """Note that nothing can be decided about the trigger, and when to look again. It stops no other; told once."""
    row = tx.one(FAILURES, {"trigger": raw(seen.trigger)})
    if row is None:
        return "raced"
    pause = min(2 ** min(row[0], 30), RETRY_MINUTES) * 60_000
    params = {"trigger": raw(seen.trigger), "state_version": seen.state_version, "error": error}
    if not tx.all(FAIL, {**params, "retry_at": tx.now() + pause}):
        return "raced"
    if row[1] is None or shown(row[1]) != error:
        tx.report("row_error", shown(raw(seen.trigger)), error=error)
    return "failed"


def raced(_: Tx) -> Outcome:
    """Somebody else has decided, or a definition has changed since it was read: nothing is written."""
    return "raced"


def _is_as_seen(tx: Tx, seen: Candidate) -> bool:
    """Lock the row, and read again every fact that was decided on."""
    tx.lock(LOCK, {"trigger": seen.trigger})
    return tx.one(AGAIN, {"trigger": seen.trigger}) == seen.facts


def _move(
    tx: Tx, seen: Candidate, next_fire_at: int, *, scheduled_for: int | None = None, skipped: bool = False
) -> None:
    now = tx.now()
    moved = tx.all(
        MOVE,
        {
            "trigger": seen.trigger,
            "revision": seen.revision,
            "state_version": seen.state_version,
            "next_fire_at": next_fire_at,
            # a first cursor counts from the time of publishing, which is what that clock has read
            "moved_at": max(now, seen.published_at) if seen.cursor is None else now,
            "scheduled_for": scheduled_for,
            "skipped": int(skipped),
            "skipped_at": now if skipped else None,
        },
    )
    assert moved, "the schedule moved under the row lock"
    tx.touch(CRON)


def _candidate(row: Row) -> Candidate:
    return Candidate(
        facts=row,
        trigger=escaped(row[0]),
        revision=row[1],
        digest=escaped(row[6]),
        cursor=row[2],
        published_at=row[9],
        state_version=row[3],
        definition=escaped(row[10]),
        task=escaped(row[11]),
        task_revision=row[12],
        task_digest=escaped(row[13]),
        work=escaped(row[18]),
    )
