"""A row of the table of jobs: locked, and read as a `Job`."""

from __future__ import annotations

from alkstore.payload import decode, describe
from alkstore.sql.text import shown, text
from alkstore.sql.tx import Row
from alkstore.values import Job, JobState, at

__all__ = ["COLUMNS", "LOCK", "LOCK_TO_DELETE", "read"]

# not "for update", which would wait for whoever has enqueued the job's key again and has not committed yet
LOCK = "SELECT id FROM __alkstore_jobs WHERE id = :id /*for no key update*/"

LOCK_TO_DELETE = "SELECT id FROM __alkstore_jobs WHERE id = :id /*for update*/"

COLUMNS = """id, CAST(queue AS BLOB), state, CAST(payload AS BLOB), CAST(headers AS BLOB), priority,
  CAST(key AS BLOB), attempt, max_attempts, fence, run_at, expires_at, visibility, backoff, CAST(worker AS BLOB),
  lease_end, CAST(error AS BLOB), CAST(reason AS BLOB), died_at, CAST(schedule AS BLOB), boundary, created_at"""


def read(row: Row, now: int) -> tuple[Job, str | None]:
    """Return the job, and why no handler could read it (then its payload is None); None: it can be read."""
    (id, queue, state, payload, headers, priority, key, attempt, max_attempts, fence, run_at, expires_at,
     visibility, backoff, worker, lease_end, error, reason, died_at, schedule, boundary, created_at) = row  # fmt: skip
    states: tuple[JobState, JobState, JobState] = ("delayed" if run_at > now else "ready", "leased", "dead")
    content: tuple[object, dict[str, str]] = None, {}
    flaw = None
    try:
        content = decode(text(payload)), {} if headers is None else _headers(text(headers))
    except (ValueError, RecursionError) as unreadable:
        flaw = f"the job cannot be read: {describe(unreadable)}"
    job = Job(
        id=id,
        queue=shown(queue),
        state=states[state],
        payload=content[0],
        headers=content[1],
        priority=priority,
        key=_shown(key),
        attempt=attempt,
        max_attempts=max_attempts,
        fence=fence,
        run_at=at(run_at),
        expires_at=None if expires_at is None else at(expires_at),
        visibility=visibility / 1000,
        backoff=backoff / 1000,
        worker=_shown(worker),
        lease_until=None if lease_end is None else at(lease_end),
        error=flaw if flaw and not error else _shown(error),
        reason=_shown(reason),
        died_at=None if died_at is None else at(died_at),
        schedule=_shown(schedule),
        boundary=None if boundary is None else at(boundary),
        created_at=at(created_at),
    )
    return job, flaw


def _headers(written: str) -> dict[str, str]:
    headers = decode(written)
    if not isinstance(headers, dict):
        raise ValueError("the headers are no JSON object")  # noqa: TRY004 - a row of other hands, not an argument
    return headers


def _shown(value: bytes | str | None) -> str | None:
    return None if value is None else shown(value)
