"""Claiming: which jobs are due, in which order, and leased to whom; and when it is worth to look again."""

from __future__ import annotations

from attrs import frozen

from alkstore.sql.jobs.burying import bury, bury_exhausted
from alkstore.sql.jobs.rows import COLUMNS, LOCK, read
from alkstore.sql.tx import Row, Tx, queue_topic
from alkstore.values import Job

__all__ = [
    "ARRIVED",
    "BURIED_PER_CLAIM",
    "LAPSE",
    "LAPSED",
    "LAPSED_PER_CLAIM",
    "PAUSE",
    "PAUSED",
    "PICK",
    "RESUME",
    "SOONEST",
    "SOONEST_LAPSE",
    "TAKE",
    "UNPARK",
    "UNPARKED_PER_CLAIM",
    "Claimed",
    "claim",
    "look",
    "pause",
    "resume",
    "take",
    "take_back",
]

LAPSED_PER_CLAIM = 100
"""Lapsed leases taken back by one claim, so that no lease has to wait behind it when a large fleet has crashed."""

UNPARKED_PER_CLAIM = 1_000
"""Delayed jobs that one claim lets into the order when they are due, for the same reason."""

BURIED_PER_CLAIM = 1_024
"""Expired jobs buried by one claim; without this, unswept ones would be walked over by every claim."""


@frozen
class Claimed:
    """What a claim has brought."""

    jobs: list[Job]
    next_at: int | None
    """The soonest moment (ms) at which another claim may find one; None: nothing is in sight."""
    blocked: bool = False
    """Something is due, and none of it could be had: others have locked it."""


PAUSED = "SELECT 1 FROM __alkstore_queues WHERE queue = :queue"

# rides on __alkstore_jobs_lapse
LAPSED = f"""
SELECT id, attempt, max_attempts FROM __alkstore_jobs INDEXED BY __alkstore_jobs_lapse
WHERE queue = :queue AND state = 1 AND lease_end <= :now
ORDER BY lease_end LIMIT {LAPSED_PER_CLAIM} /*skip locked*/"""

LAPSE = """
UPDATE __alkstore_jobs SET state = 0, worker = NULL, lease = NULL, lease_end = NULL, error = 'lease expired'
WHERE id = :id AND state = 1 AND lease_end <= :now
RETURNING id"""

# rides on __alkstore_jobs_parked
ARRIVED = f"""
SELECT id FROM __alkstore_jobs INDEXED BY __alkstore_jobs_parked
WHERE queue = :queue AND state = 0 AND parked = 1 AND run_at <= :now
ORDER BY run_at LIMIT {UNPARKED_PER_CLAIM} /*skip locked*/"""

UNPARK = "UPDATE __alkstore_jobs SET parked = 0 WHERE id = :id AND state = 0"

# The order of the index is the order of claims: nothing is sorted, and LIMIT ends the walk. What it would have to pass
# by is parked and not in there, so the cost is that of the rows taken. Rides on __alkstore_jobs_ready. The embedder may
# run ANALYZE or PRAGMA optimize: by what they found the planner would at times sort all ready jobs, or skip through the
# index by `run_at`; the + and the likelihood of what is always true forbid both.
_READY = """
FROM __alkstore_jobs INDEXED BY __alkstore_jobs_ready
WHERE queue = :queue AND state = 0 AND parked = 0 AND likelihood(+run_at <= :now, 0.00000001)
ORDER BY priority DESC, run_at, id"""

PICK = f"SELECT id, expires_at {_READY} LIMIT :limit /*skip locked*/"

TAKE = f"""
UPDATE __alkstore_jobs SET state = 1, attempt = attempt + 1, fence = fence + 1, worker = :worker,
  lease = COALESCE(:lease, visibility), lease_end = :now + COALESCE(:lease, visibility)
WHERE id = :id AND state = 0
RETURNING {COLUMNS}"""


def claim(tx: Tx, queue: str, worker: str, limit: int, lease: int | None) -> Claimed:
    """Lease up to `limit` due jobs to `worker`, in claim order: priority descending, run_at, id.

    `lease` is in milliseconds; None gives each job its own visibility. Lapsed leases are taken back first; jobs
    whose attempts are used up, expired ones and those that cannot be read become dead letters on the way. Nothing is
    leased while more jobs may have to come into the order than one claim lets in: the next claim goes on with them.
    """
    if tx.one(PAUSED, {"queue": queue}):
        return Claimed([], None)
    now = tx.now()
    all_back = _take_back_lapsed(tx, queue, now)
    all_in = _let_in_arrived(tx, queue, now)
    if not (all_back and all_in):
        return Claimed([], now)
    jobs: list[Job] = []
    buried = 0
    while len(jobs) < limit and buried < BURIED_PER_CLAIM:
        wanted = limit - len(jobs)
        picked = tx.all(PICK, {"queue": queue, "now": now, "limit": max(wanted, 64) if buried else wanted})
        live, expired = _parted(picked, now, wanted, BURIED_PER_CLAIM - buried)
        bury(tx, expired, "expired")
        buried += len(expired)
        taken = tx.each(TAKE, [{"id": id, "worker": worker, "lease": lease, "now": now} for id in live])
        rows = [row for rows in taken for row in rows]
        good = [job for row in rows if (job := _taken(tx, row, now)) is not None]
        buried += len(rows) - len(good)
        jobs += good
        if len(picked) < wanted:
            break
    if jobs:
        tx.report("claimed", queue, worker=worker, ids=[job.id for job in jobs])
    soonest = _soonest(tx, queue)
    return Claimed(jobs, soonest, blocked=not jobs and not buried and soonest is not None and soonest <= now)


def _taken(tx: Tx, row: Row, now: int) -> Job | None:
    """Return the job that was taken; None: no handler could read it, so it is a dead letter."""
    job, flaw = read(row, now)
    if flaw is None:
        return job
    bury(tx, [job.id], "failed", flaw)
    return None


def _parted(picked: list[Row], now: int, wanted: int, buriable: int) -> tuple[list[int], list[int]]:
    """Part the picked rows into what to take and what to bury, as far as there is use for either."""
    live: list[int] = []
    expired: list[int] = []
    for id, expires_at in picked:
        if expires_at is not None and expires_at <= now:
            if len(expired) == buriable:
                break
            expired.append(id)
        elif len(live) < wanted:
            live.append(id)
    return live, expired


def _take_back_lapsed(tx: Tx, queue: str, now: int) -> bool:
    """Make ready, or bury, whose lease is over; False: there may be more of them."""
    again: list[int] = []
    lapsed = tx.all(LAPSED, {"queue": queue, "now": now})
    for id, attempt, max_attempts in lapsed:
        if attempt >= max_attempts:
            bury_exhausted(tx, id, attempt, max_attempts)
        else:
            again.append(id)
    tx.each(LAPSE, [{"id": id, "now": now} for id in again])
    return len(lapsed) < LAPSED_PER_CLAIM


def _let_in_arrived(tx: Tx, queue: str, now: int) -> bool:
    """Let delayed jobs whose moment has come into the order; False: there may be more of them."""
    arrived = tx.all(ARRIVED, {"queue": queue, "now": now})
    tx.each(UNPARK, [{"id": id} for (id,) in arrived])
    return len(arrived) < UNPARKED_PER_CLAIM


SOONEST_LAPSE = """
SELECT min(lease_end) FROM (
  SELECT lease_end FROM __alkstore_jobs INDEXED BY __alkstore_jobs_lapse
  WHERE queue = :queue AND state = 1 /*first by lease_end*/) AS leased"""

# The moment of the next job in order; only where the clock was set back is none of those in the order due. Rides on
# __alkstore_jobs_ready, _parked and _lapse.
SOONEST = f"""
SELECT COALESCE(
  (SELECT run_at {_READY} LIMIT 1),
  (SELECT min(run_at) FROM __alkstore_jobs INDEXED BY __alkstore_jobs_ready
   WHERE queue = :queue AND state = 0 AND parked = 0))
UNION ALL
SELECT min(run_at) FROM (
  SELECT run_at FROM __alkstore_jobs INDEXED BY __alkstore_jobs_parked
  WHERE queue = :queue AND state = 0 AND parked = 1 /*first by run_at*/) AS parked
UNION ALL
{SOONEST_LAPSE}"""


def look(tx: Tx, queue: str) -> int | None:
    """Return the soonest moment (ms) at which a claim of `queue` may find something; None: nothing is in sight."""
    return None if tx.one(PAUSED, {"queue": queue}) else _soonest(tx, queue)


def _soonest(tx: Tx, queue: str) -> int | None:
    moments = tx.all(SOONEST, {"queue": queue, "now": tx.now()})
    return min((ms for (ms,) in moments if ms is not None), default=None)


def take(tx: Tx, id: int, worker: str) -> Job | None:
    """Lease one ready job by its id, whatever its place in the order; None: it is not ready, or cannot be read."""
    row = tx.one(TAKE, {"id": id, "worker": worker, "lease": None, "now": tx.now()})
    return None if row is None else _taken(tx, row, tx.now())


def take_back(tx: Tx, id: int) -> bool:
    """Make a job ready whose lease is over; False: it is not."""
    tx.lock(LOCK, {"id": id})
    return tx.one(LAPSE, {"id": id, "now": tx.now()}) is not None


PAUSE = "INSERT INTO __alkstore_queues (queue, paused_at) VALUES (:queue, :now) ON CONFLICT DO NOTHING RETURNING queue"

RESUME = "DELETE FROM __alkstore_queues WHERE queue = :queue RETURNING queue"


def pause(tx: Tx, queue: str) -> bool:
    """Let no claim of the queue find anything, in any process; False if it was paused already."""
    return tx.one(PAUSE, {"queue": queue, "now": tx.now()}) is not None


def resume(tx: Tx, queue: str) -> bool:
    """End a pause; False if there was none."""
    tx.touch(queue_topic(queue))
    return tx.one(RESUME, {"queue": queue}) is not None
