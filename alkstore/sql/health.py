"""What a health page shows, read on one snapshot."""

from __future__ import annotations

from alkstore.sql.cron import runs
from alkstore.sql.schedules import LEADER_LOCK
from alkstore.sql.text import shown
from alkstore.sql.tx import Tx
from alkstore.values import Counts, CronHealth, ScheduleHealth, at

__all__ = ["cron_health", "queue_counts", "schedule_health"]

OVERDUE_AFTER_MS = 5_000
"""A boundary that is this late is overdue: a healthy runner looks at least this often."""

UNSEEN_AFTER_MS = 60_000
"""A trigger that nobody has looked at for so long after its publishing is overdue, whenever it may first occur."""

QUEUES = """
SELECT CAST(queue AS BLOB),
  sum(CASE WHEN state = 0 AND run_at > :now THEN 1 ELSE 0 END),
  sum(CASE WHEN state = 0 AND run_at <= :now THEN 1 ELSE 0 END),
  sum(CASE WHEN state = 1 THEN 1 ELSE 0 END), sum(CASE WHEN state = 2 THEN 1 ELSE 0 END),
  min(CASE WHEN expires_at <= :now OR (state = 1 AND attempt >= max_attempts) THEN NULL
           WHEN state = 0 AND run_at <= :now THEN run_at WHEN state = 1 AND lease_end <= :now THEN lease_end END)
FROM __alkstore_jobs GROUP BY queue ORDER BY queue"""

PAUSED = "SELECT queue FROM __alkstore_queues ORDER BY queue"

SCHEDULES = """
SELECT count(*), count(CASE WHEN error IS NULL AND next_fire_at <= :late THEN 1 END) FROM __alkstore_scheduler_tasks"""

BROKEN = "SELECT CAST(name AS BLOB) FROM __alkstore_scheduler_tasks WHERE error IS NOT NULL ORDER BY name LIMIT 100"

LEADER = "SELECT owner, acquired_at FROM __alkstore_locks WHERE name = :name AND expires_at > :now"


def queue_counts(tx: Tx) -> tuple[dict[str, Counts], dict[str, float], tuple[str, ...]]:
    """Return the counts of each queue, the age in seconds of its oldest claimable job, and the paused queues."""
    now = tx.now()
    rows = tx.all(QUEUES, {"now": now})
    counts = {shown(row[0]): Counts(*(int(n) for n in row[1:5])) for row in rows}
    ages = {shown(row[0]): (now - row[5]) / 1000 for row in rows if row[5] is not None}
    return counts, ages, tuple(row[0] for row in tx.all(PAUSED))


def schedule_health(tx: Tx, late: int = OVERDUE_AFTER_MS) -> ScheduleHealth:
    """Return how the schedules stand and who leads; a boundary that passed `late` ms ago is overdue."""
    now = tx.now()
    row = tx.one(SCHEDULES, {"late": now - late})
    assert row is not None
    leader = tx.one(LEADER, {"name": LEADER_LOCK, "now": now})
    return ScheduleHealth(
        total=row[0],
        overdue=row[1],
        broken=tuple(shown(name) for (name,) in tx.all(BROKEN)),
        leader=None if leader is None else leader[0],
        leading_since=None if leader is None else at(leader[1]),
        unattended=leader is None and row[1] > 0,
    )


# one without a cursor was never looked at, unless it has an error
TRIGGERS = """
SELECT count(*), count(CASE WHEN schedule.error IS NULL AND (schedule.next_fire_at <= :late
  OR (schedule.next_fire_at IS NULL AND head.published_at <= :unseen)) THEN 1 END)
FROM __alkstore_cron_schedules AS schedule JOIN __alkstore_cron_triggers AS head ON head.id = schedule.trigger
WHERE schedule.active = 1"""

FAILING = """
SELECT CAST(trigger AS BLOB) FROM __alkstore_cron_schedules INDEXED BY __alkstore_cron_schedules_failing
WHERE active = 1 AND error IS NOT NULL ORDER BY trigger LIMIT 100"""


def cron_health(tx: Tx, handlers: frozenset[str]) -> CronHealth:
    """Return how the cron triggers stand, and which runs wait for another handler than `handlers`."""
    now = tx.now()
    row = tx.one(TRIGGERS, {"late": now - OVERDUE_AFTER_MS, "unseen": now - UNSEEN_AFTER_MS})
    assert row is not None
    return CronHealth(
        triggers=row[0],
        overdue=row[1],
        failing=tuple(shown(name) for (name,) in tx.all(FAILING)),
        waiting={name: count for name, count in runs.waiting(tx).items() if name not in handlers},
    )
