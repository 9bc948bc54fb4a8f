"""A durable store for trio programs: queues, locks, schedules, an outbox and cron runs, in SQLite or PostgreSQL."""

from actors.stop import StopToken
from alkstore.clock import ManualClock, TrioClock
from alkstore.errors import (
    AlkstoreError,
    Conflict,
    InvalidName,
    InvalidPayload,
    InvalidSpec,
    LeadershipLost,
    LockLost,
    MixedSQLite,
    OutcomeUnknown,
    ReservedName,
    SchemaMissing,
    SchemaTooNew,
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TransactionTimeout,
)
from alkstore.job import Discard, JobHandle, Snooze
from alkstore.lock import Lock, LockHandle
from alkstore.outbox import Outbox
from alkstore.queue import Queue
from alkstore.store import Store, open_store
from alkstore.transaction import SyncTransaction, Transaction
from alkstore.values import Counts, CronHealth, Event, Health, Job, Schedule, ScheduleHealth, ScheduleOpts

__all__ = [
    "AlkstoreError",
    "Conflict",
    "Counts",
    "CronHealth",
    "Discard",
    "Event",
    "Health",
    "InvalidName",
    "InvalidPayload",
    "InvalidSpec",
    "Job",
    "JobHandle",
    "LeadershipLost",
    "Lock",
    "LockHandle",
    "LockLost",
    "ManualClock",
    "MixedSQLite",
    "Outbox",
    "OutcomeUnknown",
    "Queue",
    "ReservedName",
    "Schedule",
    "ScheduleHealth",
    "ScheduleOpts",
    "SchemaMissing",
    "SchemaTooNew",
    "Snooze",
    "StopToken",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreCorrupt",
    "StoreError",
    "StoreForeign",
    "StoreFull",
    "StoreReadOnly",
    "StoreUnavailable",
    "SyncTransaction",
    "Transaction",
    "TransactionTimeout",
    "TrioClock",
    "open_store",
]
