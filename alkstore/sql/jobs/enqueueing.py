"""Enqueueing: a job is one row, and among live jobs a key is there once."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from alkstore.every import MAX_MS
from alkstore.sql.jobs.burying import bury, bury_exhausted
from alkstore.sql.tx import Tx, queue_topic

__all__ = ["INSERT", "LIVE_KEY", "NewJob", "enqueue", "enqueue_many", "live_job"]


@frozen
class NewJob:
    """A job to be: validated, and in the store's units (JSON text, milliseconds)."""

    queue: str
    payload: str
    visibility: int
    max_attempts: int
    backoff: int
    headers: str | None = None
    priority: int = 0
    delay: int = 0
    run_at: int | None = None
    expires: int | None = None
    key: str | None = None
    schedule: str | None = None
    boundary: int | None = None


# Rides on __alkstore_jobs_key. The job cannot be deleted before whoever asks has committed; the rest of its life goes
# on, heartbeats first of all: an embedder's transaction may be open for longer than a lease.
LIVE_KEY = """
SELECT id, state, attempt, max_attempts, expires_at, lease_end FROM __alkstore_jobs INDEXED BY __alkstore_jobs_key
WHERE queue = :queue AND key = :key AND state < 2 /*for key share*/"""

INSERT = """
INSERT INTO __alkstore_jobs (queue, priority, run_at, parked, expires_at, key, max_attempts, visibility, backoff,
                             payload, headers, schedule, boundary, created_at)
VALUES (:queue, :priority, :run_at, :parked, :expires_at, :key, :max_attempts, :visibility, :backoff,
        :payload, :headers, :schedule, :boundary, :now)
ON CONFLICT (queue, key) WHERE key IS NOT NULL AND state < 2 DO NOTHING
RETURNING id"""


def enqueue(tx: Tx, job: NewJob) -> int:
    """Store `job` and return its id; if a live job of the queue has its key, return that one's id instead."""
    if job.key is not None and (live := live_job(tx, job.queue, job.key)) is not None:
        return live
    row = tx.one(INSERT, _values(job, tx.now()))
    if row is None:  # in a transaction that is not the store's, somebody has been faster with this key
        return enqueue(tx, job)
    tx.touch(queue_topic(job.queue))
    return int(row[0])


def enqueue_many(tx: Tx, new: Sequence[NewJob]) -> list[int]:
    """Store jobs that have no keys and return their ids, in order."""
    assert all(job.key is None for job in new)
    now = tx.now()
    stored = tx.each(INSERT, [_values(job, now) for job in new])
    for queue in {job.queue for job in new}:
        tx.touch(queue_topic(queue))
    return [int(row[0]) for rows in stored for row in rows]


def _values(job: NewJob, now: int) -> dict[str, object]:
    run_at = min(now + job.delay if job.run_at is None else job.run_at, MAX_MS)
    return {
        "queue": job.queue,
        "priority": job.priority,
        "run_at": run_at,
        "parked": int(run_at > now),
        "expires_at": None if job.expires is None else min(max(now, run_at) + job.expires, MAX_MS),
        "key": job.key,
        "max_attempts": job.max_attempts,
        "visibility": job.visibility,
        "backoff": job.backoff,
        "payload": job.payload,
        "headers": job.headers,
        "schedule": job.schedule,
        "boundary": job.boundary,
        "now": now,
    }


def live_job(tx: Tx, queue: str, key: str) -> int | None:
    """Return the live job that has the key. One that a claim would only bury is buried: it must not stop new work."""
    tx.lock(LIVE_KEY, {"queue": queue, "key": key})
    row = tx.one(LIVE_KEY, {"queue": queue, "key": key})
    if row is None:
        return None
    id, state, attempt, max_attempts, expires_at, lease_end = row
    now = tx.now()
    if state == 1 and lease_end > now:
        return int(id)
    if state == 1 and attempt >= max_attempts:
        bury_exhausted(tx, id, attempt, max_attempts)
    elif expires_at is not None and expires_at <= now:
        bury(tx, [id], "expired")
    else:
        return int(id)
    return None
