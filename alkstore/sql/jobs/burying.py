"""Making a dead letter of a job that nobody can handle any more, by whoever comes across it."""

from __future__ import annotations

from alkstore.sql.tx import Tx

__all__ = ["BURY", "bury", "bury_exhausted"]

BURY = """
UPDATE __alkstore_jobs SET state = 2, reason = :reason, error = COALESCE(:error, error), died_at = :now,
  worker = NULL, lease = NULL, lease_end = NULL
WHERE id = :id AND state < 2
RETURNING id, queue"""


def bury(tx: Tx, ids: list[int], reason: str, error: str | None = None) -> None:
    """Make these live jobs dead letters for `reason`; without an `error` they keep the one they have."""
    common = {"reason": reason, "error": error, "now": tx.now()}
    for rows in tx.each(BURY, [{"id": id, **common} for id in ids]):
        for id, queue in rows:
            tx.report("dead", queue, id=id, reason=reason)


def bury_exhausted(tx: Tx, id: int, attempt: int, max_attempts: int) -> None:
    """Make a job a dead letter whose last lease has lapsed."""
    error = f"lease expired on attempt {attempt} of {max_attempts}; attempts exhausted"
    bury(tx, [id], "lease expired", error)
