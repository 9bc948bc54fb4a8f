"""Interval schedules: registering them, and firing their boundaries under the leader's lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import evolve, frozen

from alkstore.errors import InvalidName, InvalidSpec, ReservedName
from alkstore.every import MAX_MS, catch_up, first_after, parse_every
from alkstore.names import check_name
from alkstore.payload import decode
from alkstore.sql import jobs
from alkstore.sql.text import escaped, raw, shown, text
from alkstore.sql.tx import SCHEDULES, Row, Tx
from alkstore.values import Schedule, ScheduleOpts, at

__all__ = ["LEADER_LOCK", "Due", "Fired", "Firing", "NewSchedule", "fire", "leads", "look", "register", "unregister"]

Firing: TypeAlias = Callable[[Tx], "Fired"]
"""`fire` of one schedule, to be run as a unit."""

LEADER_LOCK = "__alkstore_scheduler"

AHEAD_SLACK_MS = 3_600_000
"""A cursor more than its interval plus this ahead of now was set by a clock that was wrong, not by a grid."""

LOOK_LIMIT = 1_000
"""Schedules handled between two looks at the due index."""


@frozen
class NewSchedule:
    """A schedule to register: validated, and in the store's units."""

    name: str
    spec: str
    interval: int
    queue: str
    payload: str
    priority: int | None
    max_attempts: int | None
    expires: int | None


@frozen
class Due:
    """What a tick has to do."""

    names: list[str]
    """Schedules with a due boundary, or with a cursor that no honest clock can have set; each as `escaped` names it."""
    next_at: int | None
    """The soonest of the other cursors, in ms; None: there is no other schedule that can fire."""
    more: bool
    """There may be more to do than `names`: look again after these."""


@frozen
class Fired:
    """What became of one schedule in a tick."""

    led: bool
    """False: the leader does not lead any more, and nothing was done."""
    next_at: int | None = None
    """Its cursor now (ms); None: it is gone, or cannot fire."""


_COLUMNS = """name, spec, queue, payload, priority, max_attempts, expires, next_fire_at, fired_total, skipped_total,
  last_fired_at, last_skipped_at, error"""

CURSOR = "SELECT interval, next_fire_at FROM __alkstore_scheduler_tasks WHERE name = :name"

UPSERT = f"""
INSERT INTO __alkstore_scheduler_tasks (name, spec, interval, queue, payload, priority, max_attempts, expires,
                                        next_fire_at, created_at, updated_at)
VALUES (:name, :spec, :interval, :queue, :payload, :priority, :max_attempts, :expires, :next_fire_at, :now, :now)
ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, interval = excluded.interval, queue = excluded.queue,
  payload = excluded.payload, priority = excluded.priority, max_attempts = excluded.max_attempts,
  expires = excluded.expires, next_fire_at = excluded.next_fire_at, updated_at = excluded.updated_at, error = NULL,
  realigned_total = __alkstore_scheduler_tasks.realigned_total + :realigned
RETURNING {_COLUMNS}"""

UNREGISTER = "DELETE FROM __alkstore_scheduler_tasks WHERE name = :name RETURNING name"

# rides on __alkstore_scheduler_tasks_due
DUE = f"""
SELECT CAST(name AS BLOB) FROM __alkstore_scheduler_tasks INDEXED BY __alkstore_scheduler_tasks_due
WHERE error IS NULL AND next_fire_at <= :now
ORDER BY next_fire_at LIMIT {LOOK_LIMIT}"""

# rides on __alkstore_scheduler_tasks_ahead
AHEAD = f"""
SELECT CAST(name AS BLOB) FROM __alkstore_scheduler_tasks INDEXED BY __alkstore_scheduler_tasks_ahead
WHERE error IS NULL AND next_fire_at - interval > :now + {AHEAD_SLACK_MS}
LIMIT {LOOK_LIMIT}"""

SOONEST = """
SELECT min(next_fire_at) FROM (
  SELECT next_fire_at FROM __alkstore_scheduler_tasks INDEXED BY __alkstore_scheduler_tasks_due
  WHERE error IS NULL AND next_fire_at > :now /*first by next_fire_at*/) AS later"""

ROW = """
SELECT CAST(spec AS BLOB), interval, CAST(queue AS BLOB), CAST(payload AS BLOB), priority, max_attempts, expires,
  next_fire_at
FROM __alkstore_scheduler_tasks WHERE name = :name AND error IS NULL"""

LOCK_LEASE = "SELECT name FROM __alkstore_locks WHERE name = :name /*for share*/"

LOCK = "SELECT name FROM __alkstore_scheduler_tasks WHERE name = :name /*for update*/"

LEADS = "SELECT 1 FROM __alkstore_locks WHERE name = :name AND owner = :owner AND expires_at > :now"

# the guard: the cursor that was decided on
ADVANCE = """
UPDATE __alkstore_scheduler_tasks SET next_fire_at = :next_fire_at, fired_total = fired_total + :fired,
  skipped_total = skipped_total + :skipped, realigned_total = realigned_total + :realigned,
  last_fired_at = COALESCE(:last_fired_at, last_fired_at), last_skipped_at = COALESCE(:last_skipped_at, last_skipped_at)
WHERE name = :name AND next_fire_at = :cursor
RETURNING name"""

# of a name that is no UTF-8 too
MARK = """
UPDATE __alkstore_scheduler_tasks SET error = :error WHERE name = CAST(:name AS TEXT) AND error IS NULL RETURNING 1"""


def register(tx: Tx, new: NewSchedule) -> Schedule:
    """Insert or replace the schedule; its cursor starts anew only when the interval differs.

    Raises:
        InvalidSpec: the next boundary would lie past the year 9999.
    """
    tx.lock(LOCK, {"name": new.name})
    row = tx.one(CURSOR, {"name": new.name})
    now = tx.now()
    if now + new.interval > MAX_MS:
        raise InvalidSpec(new.spec, f"the next boundary of {new.spec!r} would lie past the year 9999")
    cursor = row[1] if row is not None and row[0] == new.interval else now + new.interval
    realigned = _is_ahead(cursor, new.interval, now)
    if realigned:
        tx.report("schedule_realigned", new.name, was=at(cursor))
        cursor = first_after(cursor, new.interval, now)
    stored = tx.one(
        UPSERT,
        {
            "name": new.name,
            "spec": new.spec,
            "interval": new.interval,
            "queue": new.queue,
            "payload": new.payload,
            "priority": new.priority,
            "max_attempts": new.max_attempts,
            "expires": new.expires,
            "next_fire_at": cursor,
            "now": now,
            "realigned": int(realigned),
        },
    )
    assert stored is not None
    tx.touch(SCHEDULES)
    return _schedule(stored)


def unregister(tx: Tx, name: str) -> bool:
    """Delete the schedule; False if there is none. Jobs that it has fired stay."""
    return tx.one(UNREGISTER, {"name": name}) is not None


def look(tx: Tx) -> Due:
    """Return which schedules a tick has to fire now, and when the next one is due."""
    now = tx.now()
    names = [escaped(row[0]) for sql in (DUE, AHEAD) for row in tx.all(sql, {"now": now})]
    soonest = tx.one(SOONEST, {"now": now})
    return Due(names, soonest[0] if soonest else None, len(names) >= LOOK_LIMIT)


def leads(tx: Tx, owner: str) -> bool:
    """Return whether `owner` holds the leader's lease, and it has not ended."""
    return tx.one(LEADS, {"name": LEADER_LOCK, "owner": owner, "now": tx.now()}) is not None


def fire(tx: Tx, name: str, owner: str | None) -> Fired:
    """Fire the due boundaries of one schedule and advance its cursor, together.

    `owner` is the leader whose lease this tick rests on; None ticks without leadership, which the cursor's guard
    makes harmless. A row that cannot fire is marked, reported once, and leaves the due index.
    """
    tx.lock(LOCK_LEASE, {"name": LEADER_LOCK})
    if isinstance(raw(name), bytes):
        if owner is not None and not leads(tx, owner):
            return Fired(led=False)
        _mark(tx, name, "InvalidName: the schedule's name is no UTF-8")
        return Fired(led=True)
    tx.lock(LOCK, {"name": name})
    row = tx.one(ROW, {"name": name})
    if owner is not None and not leads(tx, owner):
        return Fired(led=False)
    if row is None:
        return Fired(led=True)
    interval, priority, max_attempts, expires, cursor = row[1], *row[4:]
    now = tx.now()
    try:
        spec, queue, payload = text(row[0]), text(row[2]), text(row[3])
        _check_row(spec, interval, queue, payload)
    except (InvalidSpec, InvalidName, ReservedName, ValueError, RecursionError) as error:
        _mark(tx, name, f"{type(error).__name__}: {error}")
        return Fired(led=True)
    if _is_ahead(cursor, interval, now):
        tx.report("schedule_realigned", name, was=at(cursor))
        realigned = first_after(cursor, interval, now)
        _advance(tx, name, cursor, realigned, realigned=1)
        return Fired(led=True, next_at=realigned)
    owed = catch_up(cursor, interval, now)
    if not owed.boundaries:
        return Fired(led=True, next_at=cursor)
    job = jobs.NewJob(
        queue=queue,
        payload=payload,
        visibility=300_000,
        max_attempts=3 if max_attempts is None else max_attempts,
        backoff=5_000,
        priority=priority or 0,
        expires=expires,
        schedule=name,
    )
    ids = jobs.enqueue_many(tx, [evolve(job, run_at=boundary, boundary=boundary) for boundary in owed.boundaries])
    first, last = at(owed.boundaries[0]), at(owed.boundaries[-1])
    tx.report("fired", name, queue=queue, count=len(ids), first=first, last=last, ids=ids)
    if owed.skipped:
        tx.report("skipped", name, count=owed.skipped)
    _advance(
        tx,
        name,
        cursor,
        min(owed.next_fire_at, MAX_MS),
        fired=len(ids),
        skipped=owed.skipped,
        last_fired_at=owed.boundaries[-1],
        last_skipped_at=now if owed.skipped else None,
    )
    if owed.next_fire_at > MAX_MS:
        _mark(tx, name, f"InvalidSpec: the next boundary of {spec!r} would lie past the year 9999")
        return Fired(led=True)
    return Fired(led=True, next_at=owed.next_fire_at)


def _check_row(spec: str, interval: int, queue: str, payload: str) -> None:
    if parse_every(spec) != interval:  # the index of cursors too far ahead goes by the interval
        raise InvalidSpec(spec, f"the row's interval of {interval} ms is not that of its spec {spec!r}")
    check_name(queue, "queue")
    decode(payload)


def _advance(
    tx: Tx,
    name: str,
    cursor: int,
    next_fire_at: int,
    *,
    fired: int = 0,
    skipped: int = 0,
    realigned: int = 0,
    last_fired_at: int | None = None,
    last_skipped_at: int | None = None,
) -> None:
    moved = tx.one(
        ADVANCE,
        {
            "name": name,
            "cursor": cursor,
            "next_fire_at": next_fire_at,
            "fired": fired,
            "skipped": skipped,
            "realigned": realigned,
            "last_fired_at": last_fired_at,
            "last_skipped_at": last_skipped_at,
        },
    )
    assert moved is not None, "the cursor moved under the row lock"


def _mark(tx: Tx, name: str, error: str) -> None:
    if tx.one(MARK, {"name": raw(name), "error": error}):
        tx.report("row_error", shown(raw(name)), error=error)


def _is_ahead(cursor: int, interval: int, now: int) -> bool:
    return cursor - interval > now + AHEAD_SLACK_MS


def _schedule(row: Row) -> Schedule:
    (name, spec, queue, payload, priority, max_attempts, expires, next_fire_at, fired_total, skipped_total,
     last_fired_at, last_skipped_at, error) = row  # fmt: skip
    return Schedule(
        name=name,
        spec=spec,
        queue=queue,
        payload=decode(payload),
        opts=ScheduleOpts(priority, max_attempts, None if expires is None else expires / 1000),
        next_fire_at=at(next_fire_at),
        fired_total=fired_total,
        skipped_total=skipped_total,
        last_fired_at=None if last_fired_at is None else at(last_fired_at),
        last_skipped_at=None if last_skipped_at is None else at(last_skipped_at),
        error=error,
    )
