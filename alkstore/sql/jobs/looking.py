"""Looking at jobs, one by one, in pages, or as counts. Changes nothing."""

from __future__ import annotations

from alkstore.sql.jobs.rows import COLUMNS, read
from alkstore.sql.tx import Row, Tx
from alkstore.values import Counts, Job, JobState

__all__ = ["COUNT", "GET", "LIST", "counts", "get", "list_jobs"]

GET = f"SELECT {COLUMNS} FROM __alkstore_jobs WHERE id = :id"

_STATES: dict[JobState, str] = {
    "delayed": "state = 0 AND run_at > :now",
    "ready": "state = 0 AND run_at <= :now",
    "leased": "state = 1",
    "dead": "state = 2",
}

LIST: dict[JobState, str] = {
    state: f"SELECT {COLUMNS} FROM __alkstore_jobs WHERE queue = :queue AND {condition} AND id > :after "
    "ORDER BY id LIMIT :limit"
    for state, condition in _STATES.items()
}

COUNT: dict[JobState, str] = {
    state: f"SELECT count(*) FROM __alkstore_jobs WHERE queue = :queue AND {condition}"
    for state, condition in _STATES.items()
}


def get(tx: Tx, id: int) -> Job | None:
    """Return the job, or None once it is acknowledged or pruned. Of one that cannot be read the error says why."""
    row = tx.one(GET, {"id": id})
    return None if row is None else read(row, tx.now())[0]


def list_jobs(tx: Tx, queue: str, state: JobState, after: int, limit: int) -> list[Job]:
    """Return a page of the queue's jobs in `state`, by id, beginning after the id `after`."""
    now = tx.now()
    params = {"queue": queue, "after": after, "limit": limit, "now": now}
    return [read(row, now)[0] for row in tx.all(LIST[state], params)]


def counts(tx: Tx, queue: str) -> Counts:
    """Return how many jobs of the queue are in each state."""
    params = {"queue": queue, "now": tx.now()}
    return Counts(**{state: _number(tx.one(sql, params)) for state, sql in COUNT.items()})


def _number(row: Row | None) -> int:
    return int(row[0]) if row else 0
