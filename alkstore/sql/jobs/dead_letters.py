"""Dead letters by hand: cancelled or swept, given a new life, or pruned."""

from __future__ import annotations

from collections.abc import Iterable

from alkstore.sql.jobs.burying import bury
from alkstore.sql.jobs.enqueueing import live_job
from alkstore.sql.jobs.rows import LOCK
from alkstore.sql.text import escaped, raw
from alkstore.sql.tx import Row, Tx, queue_topic

__all__ = [
    "CANCEL",
    "DEAD_KEY",
    "DEAD_PAGE",
    "EXPIRED",
    "OLD",
    "PAGE",
    "PRUNE",
    "REDRIVE",
    "cancel",
    "prune",
    "redrive",
    "redrive_page",
    "sweep_expired",
]

PAGE = 1_000
"""Rows that one unit of a sweep, a prune or a redrive touches, so that a lease never waits behind a long one."""

CANCEL = """
UPDATE __alkstore_jobs SET state = 2, reason = 'cancelled', died_at = :now,
  worker = NULL, lease = NULL, lease_end = NULL
WHERE id = :id AND queue = :queue AND state < 2
RETURNING id"""

# rides on __alkstore_jobs_dead
DEAD_PAGE = f"""
SELECT id, CAST(key AS BLOB) FROM __alkstore_jobs INDEXED BY __alkstore_jobs_dead
WHERE queue = :queue AND state = 2 AND id > :after ORDER BY id LIMIT {PAGE} /*skip locked*/"""

DEAD_KEY = (
    "SELECT CAST(key AS BLOB) FROM __alkstore_jobs WHERE id = :id AND queue = :queue AND state = 2 /*for update*/"
)

REDRIVE = """
UPDATE __alkstore_jobs SET state = 0, attempt = 0, run_at = :now, expires_at = NULL, reason = NULL, died_at = NULL
WHERE id = :id AND state = 2
RETURNING id"""

# rides on __alkstore_jobs_prune
OLD = f"""
SELECT id FROM __alkstore_jobs INDEXED BY __alkstore_jobs_prune
WHERE queue = :queue AND state = 2 AND died_at <= :before ORDER BY died_at LIMIT {PAGE} /*skip locked*/"""

PRUNE = "DELETE FROM __alkstore_jobs WHERE id = :id AND state = 2 RETURNING id"

# rides on __alkstore_jobs_expiry
EXPIRED = f"""
SELECT id FROM __alkstore_jobs INDEXED BY __alkstore_jobs_expiry
WHERE queue = :queue AND state = 0 AND expires_at IS NOT NULL AND expires_at <= :now
ORDER BY expires_at LIMIT {PAGE} /*skip locked*/"""


def cancel(tx: Tx, queue: str, id: int) -> bool:
    """Make a job that is ready, delayed or leased a dead letter ``cancelled``; its lease is over with that."""
    tx.lock(LOCK, {"id": id})
    if tx.one(CANCEL, {"id": id, "queue": queue, "now": tx.now()}) is None:
        return False
    tx.report("dead", queue, id=id, reason="cancelled")
    return True


def redrive(tx: Tx, queue: str, id: int) -> bool:
    """Make a dead letter ready again; False if it is none, or if a live job has taken its key meanwhile."""
    row = tx.one(DEAD_KEY, {"id": id, "queue": queue})
    return row is not None and _redrive(tx, queue, [(id, row[0])]) == 1


def redrive_page(tx: Tx, queue: str, after: int) -> tuple[int, int | None]:
    """Redrive a page of dead letters after the id `after`; return how many, and where the next page begins."""
    page = tx.all(DEAD_PAGE, {"queue": queue, "after": after})
    return _redrive(tx, queue, page), (page[-1][0] if len(page) == PAGE else None)


def _redrive(tx: Tx, queue: str, dead: Iterable[Row]) -> int:
    free: list[int] = []
    keys: set[str] = set()
    known = [(id, None if key is None else escaped(key)) for id, key in dead]
    for id, key in sorted(known, key=lambda row: (row[1] or "", row[0])):  # live jobs are locked in one order by all
        if key is not None and isinstance(raw(key), bytes):
            continue  # no UTF-8: whether a live job has it cannot be asked
        if key is None:
            free.append(id)
        elif key not in keys and live_job(tx, queue, key) is None:
            free.append(id)
            keys.add(key)
    done = sum(map(len, tx.each(REDRIVE, [{"id": id, "now": tx.now()} for id in free])))
    if done:
        tx.touch(queue_topic(queue))
    return done


def prune(tx: Tx, queue: str, age: int) -> int:
    """Delete up to a page of dead letters that died at least `age` ms ago; return how many."""
    old = tx.all(OLD, {"queue": queue, "before": tx.now() - age})
    return sum(map(len, tx.each(PRUNE, [{"id": id} for (id,) in old])))


def sweep_expired(tx: Tx, queue: str) -> int:
    """Make up to a page of expired jobs dead letters; return how many."""
    ids = tx.all(EXPIRED, {"queue": queue, "now": tx.now()})
    bury(tx, [id for (id,) in ids], "expired")
    return len(ids)
