"""Settling: what becomes of a claim, guarded by its fence and by a lease that still lives."""

from __future__ import annotations

from alkstore.every import MAX_MS
from alkstore.sql.jobs.rows import LOCK, LOCK_TO_DELETE
from alkstore.sql.tx import Row, Tx, queue_topic
from alkstore.values import at

__all__ = [
    "ACK",
    "BACKOFF_CAP_MS",
    "DELETE",
    "FAIL",
    "GIVE_BACK",
    "HEARTBEAT",
    "HELD",
    "MINE",
    "PUT_BACK",
    "RETRY",
    "ack",
    "delete",
    "fail",
    "give_back",
    "heartbeat",
    "is_held",
    "put_back",
    "retry",
]

BACKOFF_CAP_MS = 3_600_000
"""No retry waits longer than an hour unless its caller says so: later than that, somebody should look."""

# The guard of every finaliser: this claim's fence, and a lease that has not ended. It rides on the primary key.
_GUARD = "id = :id AND fence = :fence AND state = 1 AND lease_end > :now"

ACK = f"DELETE FROM __alkstore_jobs WHERE {_GUARD} RETURNING queue, attempt"

HEARTBEAT = f"""
UPDATE __alkstore_jobs SET lease = COALESCE(:lease, lease), lease_end = :now + COALESCE(:lease, lease)
WHERE {_GUARD}
RETURNING lease, lease_end, queue"""

MINE = f"SELECT attempt, max_attempts, backoff FROM __alkstore_jobs WHERE {_GUARD}"

RETRY = f"""
UPDATE __alkstore_jobs SET state = 0, run_at = :run_at, parked = 1, error = COALESCE(:error, error),
  worker = NULL, lease = NULL, lease_end = NULL
WHERE {_GUARD}
RETURNING queue"""

FAIL = f"""
UPDATE __alkstore_jobs SET state = 2, reason = :reason, error = COALESCE(:error, error), died_at = :now,
  worker = NULL, lease = NULL, lease_end = NULL
WHERE {_GUARD}
RETURNING queue"""

# the attempt is given back, the fence never
GIVE_BACK = f"""
UPDATE __alkstore_jobs SET state = 0, attempt = attempt - 1, run_at = COALESCE(:run_at, run_at), parked = 1,
  error = COALESCE(:error, error), worker = NULL, lease = NULL, lease_end = NULL
WHERE {_GUARD}
RETURNING queue"""

HELD = f"SELECT 1 FROM __alkstore_jobs WHERE {_GUARD}"

PUT_BACK = """
UPDATE __alkstore_jobs SET state = 0, run_at = :run_at, parked = 1, worker = NULL, lease = NULL, lease_end = NULL
WHERE id = :id AND state < 2
RETURNING id"""

DELETE = "DELETE FROM __alkstore_jobs WHERE id = :id AND state < 2 RETURNING id"


def ack(tx: Tx, id: int, fence: int) -> bool:
    """Delete the job if it is still this claim's."""
    tx.lock(LOCK_TO_DELETE, {"id": id})
    if row := tx.one(ACK, {"id": id, "fence": fence, "now": tx.now()}):
        tx.report("settled", row[0], id=id, outcome="acked", attempt=row[1])
    return row is not None


def heartbeat(tx: Tx, id: int, fence: int, lease: int | None) -> tuple[int, int] | None:
    """Extend the lease to now + `lease` (None: as long as before), return its length and its end; None: not ours."""
    tx.lock(LOCK, {"id": id})
    row = tx.one(HEARTBEAT, {"id": id, "fence": fence, "lease": lease, "now": tx.now()})
    if row is not None and lease is not None:  # it may end sooner now than those who wait for that know
        tx.touch(queue_topic(row[2]))
    return None if row is None else (row[0], row[1])


def retry(tx: Tx, id: int, fence: int, error: str | None, delay: int | None) -> bool:
    """Make the job ready again after `delay` ms (None: its backoff); with its attempts used up, a dead letter."""
    tx.lock(LOCK, {"id": id})
    mine = tx.one(MINE, {"id": id, "fence": fence, "now": tx.now()})
    if mine is None:
        return False
    attempt, max_attempts, backoff = mine
    if attempt >= max_attempts:
        return fail(tx, id, fence, error, "attempts exhausted")
    if delay is None:
        delay = min(backoff << min(attempt - 1, 32), BACKOFF_CAP_MS)
    now = tx.now()
    run_at = min(now + delay, MAX_MS)
    row = tx.one(RETRY, {"id": id, "fence": fence, "error": error, "run_at": run_at, "now": now})
    return _settled(tx, row, id, "retried", error=error, attempt=attempt, run_at=at(run_at))


def fail(tx: Tx, id: int, fence: int, error: str | None, reason: str) -> bool:
    """Make the job a dead letter now."""
    tx.lock(LOCK, {"id": id})
    row = tx.one(FAIL, {"id": id, "fence": fence, "error": error, "reason": reason, "now": tx.now()})
    if row:
        tx.report("dead", row[0], id=id, reason=reason)
    return _settled(tx, row, id, "failed", error=error, reason=reason)


def give_back(tx: Tx, id: int, fence: int, error: str | None, delay: int | None) -> bool:
    """Make the job ready again with its attempt, after `delay` ms (None: at its old place in the order)."""
    tx.lock(LOCK, {"id": id})
    run_at = None if delay is None else min(tx.now() + delay, MAX_MS)
    row = tx.one(GIVE_BACK, {"id": id, "fence": fence, "error": error, "run_at": run_at, "now": tx.now()})
    return _settled(tx, row, id, "given back" if delay is None else "snoozed", error=error)


def _settled(tx: Tx, row: Row | None, id: int, outcome: str, **details: object) -> bool:
    if row is None:
        return False
    tx.touch(queue_topic(row[0]))
    tx.report("settled", row[0], id=id, outcome=outcome, **details)
    return True


def is_held(tx: Tx, id: int, fence: int) -> bool:
    """Return whether the job is still this claim's, and keep it so: who asks may delete it next."""
    tx.lock(LOCK_TO_DELETE, {"id": id})
    return tx.one(HELD, {"id": id, "fence": fence, "now": tx.now()}) is not None


def put_back(tx: Tx, id: int, run_at: int) -> None:
    """Make a live job ready at `run_at`, whoever has it."""
    tx.all(PUT_BACK, {"id": id, "run_at": run_at})


def delete(tx: Tx, id: int) -> None:
    """Delete a live job, whoever has it: its lease is over with that."""
    tx.all(DELETE, {"id": id})
