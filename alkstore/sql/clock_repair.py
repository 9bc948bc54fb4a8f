"""What has to be mended in the store after the clock was set back.

Every store that has the database open notices the step, one after the other, and meanwhile rows are written by the new
clock. Leases can be cut again: none of the new clock is too long. What came due before the step cannot be told from
what was delayed after it, so only the first to notice makes jobs due. Rows of the meta table say so to the others:
``clock_repairs`` counts the repairs, and who finds more than at its own last commit comes late; ``clock_repaired_at``
and ``clock_repaired_to`` are what the clock read then, and the newest stamp of the old one, for who opens the store
later. What the first one finds may be of the new clock too, written through an embedder's own connection: it leaves
alone what was created when the new clock may have read that.
"""

from __future__ import annotations

from attrs import frozen

from alkstore.every import MAX_MS
from alkstore.sql.tx import Tx

__all__ = ["Repaired", "counted", "newest_stamp", "repair"]

# rides on the primary key, and on __alkstore_jobs_lapse
NEWEST = """
SELECT max(stamp) FROM (
  SELECT (SELECT created_at FROM __alkstore_jobs ORDER BY id DESC LIMIT 1) AS stamp
  UNION ALL SELECT max(lease_end - lease) FROM __alkstore_jobs WHERE state = 1
  UNION ALL SELECT max(expires_at - ttl) FROM __alkstore_locks
) AS stamps"""

CUT_JOBS = """
UPDATE __alkstore_jobs SET lease_end = :now + lease WHERE state = 1 AND lease_end > :now + lease RETURNING id"""

CUT_LOCKS = """
UPDATE __alkstore_locks SET expires_at = :now + ttl WHERE expires_at > :now + ttl RETURNING name"""

_WAS_DUE = "(run_at <= created_at OR (run_at <= :before AND (created_at > :now OR created_at < :since)))"

# due before the step, as what is leased was, or meant to be due at once when it was stored
MAKE_DUE = f"""
UPDATE __alkstore_jobs SET run_at = :now
WHERE state < 2 AND run_at > :now AND (state = 1 OR {_WAS_DUE})
RETURNING id"""

MAKE_RUNS_DUE = f"""
UPDATE __alkstore_cron_runs SET available_at = :now
WHERE state = 'queued' AND available_at > :now AND {_WAS_DUE.replace("run_at", "available_at")}
RETURNING id"""

NOTED = "SELECT value FROM __alkstore_meta WHERE key = :key"

NOTE = """
INSERT INTO __alkstore_meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value"""

COUNTED, REPAIRED_AT, REPAIRED_TO = "clock_repairs", "clock_repaired_at", "clock_repaired_to"


@frozen
class Repaired:
    """How many rows a repair changed."""

    leases: int
    locks: int
    jobs: int
    runs: int

    def __bool__(self) -> bool:
        return bool(self.leases or self.locks or self.jobs or self.runs)


def newest_stamp(tx: Tx) -> int:
    """Return the newest moment (ms) at which anybody is known to have written to the store; 0 if nobody has.

    What was written before a step that is repaired says nothing any more, unless the clock was set back again.
    """
    newest = _newest(tx)
    return 0 if newest <= _noted(tx, REPAIRED_TO) and tx.now() >= _noted(tx, REPAIRED_AT) else newest


def counted(tx: Tx) -> int:
    """Return how many steps were repaired, by whichever store came first."""
    return _noted(tx, COUNTED)


def repair(tx: Tx, before: int, since: int = MAX_MS, *, again: bool = False) -> Repaired:
    """Cut every lease to now + its own length, make due what was due, and count that.

    `before` (ms) is what the clock would read without the step: what came due until then was due. `since` (ms) is what
    it may have read after the step at the soonest. `again`: another store has repaired this step; only leases are cut.
    """
    now = tx.now()
    newest = _newest(tx)
    leases, locks = tx.all(CUT_JOBS, {"now": now}), tx.all(CUT_LOCKS, {"now": now})
    if again:
        return Repaired(len(leases), len(locks), 0, 0)
    moments = {"now": now, "before": before, "since": since}
    jobs, runs = tx.all(MAKE_DUE, moments), tx.all(MAKE_RUNS_DUE, moments)
    for key, value in ((COUNTED, counted(tx) + 1), (REPAIRED_AT, now), (REPAIRED_TO, newest)):
        tx.all(NOTE, {"key": key, "value": value})
    return Repaired(len(leases), len(locks), len(jobs), len(runs))


def _newest(tx: Tx) -> int:
    row = tx.one(NEWEST)
    return 0 if row is None or row[0] is None else int(row[0])


def _noted(tx: Tx, key: str) -> int:
    row = tx.one(NOTED, {"key": key})
    return 0 if row is None else int(row[0])
