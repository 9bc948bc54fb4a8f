"""The tables, their indexes and the versions they went through."""

from __future__ import annotations

import re

__all__ = ["INDEXES", "SQLITE_MIGRATIONS", "TABLES", "VERSION"]

VERSION = 2

_MAX_MS = 253402300799999  # the last millisecond of the year 9999

SQLITE_V1 = f"""
CREATE TABLE __alkstore_meta (
  key   TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- state: 0 ready (also before its run_at), 1 leased, 2 dead. All times and lengths are milliseconds.
-- parked: 1 while a job lies outside the order of claims because it was delayed; a claim that finds it due lets it in.
-- Only a hint for the indexes, so that no claim walks over what is not due: run_at alone says whether a job is.
CREATE TABLE __alkstore_jobs (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  queue        TEXT NOT NULL,
  state        INTEGER NOT NULL DEFAULT 0 CHECK (state IN (0, 1, 2)),
  priority     INTEGER NOT NULL CHECK (priority BETWEEN -100 AND 100),
  run_at       INTEGER NOT NULL CHECK (run_at BETWEEN 0 AND {_MAX_MS}),
  parked       INTEGER NOT NULL DEFAULT 0 CHECK (parked IN (0, 1)),
  expires_at   INTEGER CHECK (expires_at BETWEEN 0 AND {_MAX_MS}),
  key          TEXT,
  attempt      INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),
  max_attempts INTEGER NOT NULL CHECK (max_attempts BETWEEN 1 AND 10000),
  fence        INTEGER NOT NULL DEFAULT 0,
  visibility   INTEGER NOT NULL,
  backoff      INTEGER NOT NULL,
  worker       TEXT,
  lease        INTEGER,
  lease_end    INTEGER CHECK (lease_end BETWEEN 0 AND {_MAX_MS}),
  payload      TEXT NOT NULL,
  headers      TEXT,
  error        TEXT,
  reason       TEXT,
  died_at      INTEGER,
  schedule     TEXT,
  boundary     INTEGER,
  created_at   INTEGER NOT NULL CHECK (created_at BETWEEN 0 AND {_MAX_MS}),
  CHECK ((state = 1) = (lease_end IS NOT NULL AND lease IS NOT NULL AND worker IS NOT NULL)),
  CHECK ((state = 2) = (died_at IS NOT NULL AND reason IS NOT NULL))
) STRICT;
CREATE INDEX __alkstore_jobs_ready  ON __alkstore_jobs (queue, priority DESC, run_at, id)
  WHERE state = 0 AND parked = 0;
CREATE INDEX __alkstore_jobs_parked ON __alkstore_jobs (queue, run_at) WHERE state = 0 AND parked = 1;
CREATE INDEX __alkstore_jobs_lapse  ON __alkstore_jobs (queue, lease_end) WHERE state = 1;
CREATE INDEX __alkstore_jobs_expiry ON __alkstore_jobs (queue, expires_at) WHERE state = 0 AND expires_at IS NOT NULL;
CREATE INDEX __alkstore_jobs_dead   ON __alkstore_jobs (queue, id) WHERE state = 2;
CREATE INDEX __alkstore_jobs_prune  ON __alkstore_jobs (queue, died_at) WHERE state = 2;
CREATE UNIQUE INDEX __alkstore_jobs_key ON __alkstore_jobs (queue, key) WHERE key IS NOT NULL AND state < 2;

-- one row for each queue that is paused
CREATE TABLE __alkstore_queues (
  queue     TEXT PRIMARY KEY,
  paused_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE __alkstore_locks (
  name        TEXT PRIMARY KEY,
  owner       TEXT NOT NULL,
  fence       INTEGER NOT NULL,
  ttl         INTEGER NOT NULL,
  expires_at  INTEGER NOT NULL CHECK (expires_at BETWEEN 0 AND {_MAX_MS}),
  acquired_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX __alkstore_locks_expiry ON __alkstore_locks (expires_at);

CREATE TABLE __alkstore_scheduler_tasks (
  name            TEXT PRIMARY KEY,
  spec            TEXT NOT NULL,
  interval        INTEGER NOT NULL CHECK (interval > 0),
  queue           TEXT NOT NULL,
  payload         TEXT NOT NULL,
  priority        INTEGER CHECK (priority BETWEEN -100 AND 100),
  max_attempts    INTEGER CHECK (max_attempts BETWEEN 1 AND 10000),
  expires         INTEGER CHECK (expires >= 0),
  next_fire_at    INTEGER NOT NULL CHECK (next_fire_at BETWEEN 0 AND {_MAX_MS}),
  fired_total     INTEGER NOT NULL DEFAULT 0,
  skipped_total   INTEGER NOT NULL DEFAULT 0,
  realigned_total INTEGER NOT NULL DEFAULT 0,
  last_fired_at   INTEGER,
  last_skipped_at INTEGER,
  error           TEXT,
  created_at      INTEGER NOT NULL,
  updated_at      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX __alkstore_scheduler_tasks_due ON __alkstore_scheduler_tasks (next_fire_at) WHERE error IS NULL;
CREATE INDEX __alkstore_scheduler_tasks_ahead
  ON __alkstore_scheduler_tasks ((next_fire_at - interval)) WHERE error IS NULL;

INSERT INTO __alkstore_meta (key, value) VALUES ('fencing_token', 0);
"""

SQLITE_V2 = f"""
-- the present revision of each task; a deleted one is a tombstone
CREATE TABLE __alkstore_cron_tasks (
  id         TEXT PRIMARY KEY,
  revision   INTEGER NOT NULL CHECK (revision > 0),
  digest     TEXT NOT NULL,
  enabled    INTEGER NOT NULL CHECK (enabled IN (0, 1)),
  deleted_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE __alkstore_cron_task_revisions (
  id         TEXT NOT NULL,
  revision   INTEGER NOT NULL,
  digest     TEXT NOT NULL,
  definition TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  PRIMARY KEY (id, revision)
) STRICT, WITHOUT ROWID;

CREATE TABLE __alkstore_cron_triggers (
  id           TEXT PRIMARY KEY,
  revision     INTEGER NOT NULL CHECK (revision > 0),
  digest       TEXT NOT NULL,
  enabled      INTEGER NOT NULL CHECK (enabled IN (0, 1)),
  task         TEXT NOT NULL,
  published_at INTEGER NOT NULL CHECK (published_at BETWEEN 0 AND {_MAX_MS}),
  deleted_at   INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX __alkstore_cron_triggers_task ON __alkstore_cron_triggers (task);

CREATE TABLE __alkstore_cron_trigger_revisions (
  id            TEXT NOT NULL,
  revision      INTEGER NOT NULL,
  digest        TEXT NOT NULL,
  definition    TEXT NOT NULL,
  task          TEXT NOT NULL,
  task_revision INTEGER NOT NULL,
  task_digest   TEXT NOT NULL,
  created_at    INTEGER NOT NULL,
  PRIMARY KEY (id, revision)
) STRICT, WITHOUT ROWID;

-- how the schedule of each trigger stands; active: the trigger and its task are there and enabled
-- moved_at: what the clock read when the cursor was set
CREATE TABLE __alkstore_cron_schedules (
  trigger           TEXT PRIMARY KEY,
  trigger_revision  INTEGER NOT NULL,
  next_fire_at      INTEGER CHECK (next_fire_at BETWEEN 0 AND {_MAX_MS}),
  moved_at          INTEGER NOT NULL DEFAULT 0 CHECK (moved_at BETWEEN 0 AND {_MAX_MS}),
  last_scheduled_at INTEGER,
  state_version     INTEGER NOT NULL DEFAULT 1,
  active            INTEGER NOT NULL CHECK (active IN (0, 1)),
  retry_at          INTEGER NOT NULL DEFAULT 0 CHECK (retry_at BETWEEN 0 AND {_MAX_MS}),
  failures          INTEGER NOT NULL DEFAULT 0,
  skipped_total     INTEGER NOT NULL DEFAULT 0,
  last_skipped_at   INTEGER,
  error             TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX __alkstore_cron_schedules_due ON __alkstore_cron_schedules
  ((CASE WHEN retry_at > next_fire_at THEN retry_at ELSE next_fire_at END), trigger)
  WHERE active = 1 AND next_fire_at IS NOT NULL;
CREATE INDEX __alkstore_cron_schedules_new ON __alkstore_cron_schedules (retry_at, trigger)
  WHERE active = 1 AND next_fire_at IS NULL;
CREATE INDEX __alkstore_cron_schedules_ahead ON __alkstore_cron_schedules
  ((CASE WHEN retry_at > moved_at THEN retry_at ELSE moved_at END)) WHERE active = 1;
CREATE INDEX __alkstore_cron_schedules_failing ON __alkstore_cron_schedules (trigger)
  WHERE active = 1 AND error IS NOT NULL;

CREATE TABLE __alkstore_cron_runs (
  id               INTEGER PRIMARY KEY AUTOINCREMENT,
  task             TEXT NOT NULL,
  task_revision    INTEGER NOT NULL,
  task_digest      TEXT NOT NULL,
  handler          TEXT NOT NULL,
  args             TEXT,
  trigger          TEXT,
  trigger_revision INTEGER,
  trigger_digest   TEXT,
  scheduled_for    INTEGER CHECK (scheduled_for BETWEEN 0 AND {_MAX_MS}),
  timezone         TEXT,
  key              TEXT,
  state            TEXT NOT NULL CHECK (state IN
    ('queued', 'dispatching', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled', 'lost')),
  attempt          INTEGER NOT NULL CHECK (attempt > 0),
  job              INTEGER,
  available_at     INTEGER NOT NULL CHECK (available_at BETWEEN 0 AND {_MAX_MS}),
  error            TEXT,
  created_at       INTEGER NOT NULL,
  ended_at         INTEGER
) STRICT;
CREATE UNIQUE INDEX __alkstore_cron_runs_key ON __alkstore_cron_runs (key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX __alkstore_cron_runs_job ON __alkstore_cron_runs (job) WHERE job IS NOT NULL;
CREATE INDEX __alkstore_cron_runs_task ON __alkstore_cron_runs (task, id);
CREATE INDEX __alkstore_cron_runs_active ON __alkstore_cron_runs (task)
  WHERE state IN ('queued', 'dispatching', 'running');
CREATE INDEX __alkstore_cron_runs_waiting ON __alkstore_cron_runs (handler, available_at, id) WHERE state = 'queued';
CREATE INDEX __alkstore_cron_runs_ended ON __alkstore_cron_runs (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE __alkstore_cron_attempts (
  run        INTEGER NOT NULL,
  number     INTEGER NOT NULL,
  state      TEXT NOT NULL CHECK (state IN
    ('claimed', 'dispatching', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled', 'lost')),
  executor   TEXT NOT NULL,
  worker     TEXT,
  created_at INTEGER NOT NULL,
  started_at INTEGER,
  ended_at   INTEGER,
  exit_code  INTEGER,
  error      TEXT,
  output     TEXT,
  PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE __alkstore_cron_events (
  id      INTEGER PRIMARY KEY AUTOINCREMENT,
  run     INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  kind    TEXT NOT NULL,
  at      INTEGER NOT NULL,
  details TEXT NOT NULL
) STRICT;
CREATE INDEX __alkstore_cron_events_run ON __alkstore_cron_events (run, id);
"""

SQLITE_MIGRATIONS: dict[int, str] = {1: SQLITE_V1, 2: SQLITE_V2}
"""For each version the script that makes it from the one before."""

_SCRIPTS = "".join(SQLITE_MIGRATIONS.values())

TABLES: dict[str, frozenset[str]] = {
    table: frozenset(re.findall(r"^  ([a-z_]+) ", columns, re.MULTILINE))
    for table, columns in re.findall(r"CREATE TABLE (\w+) \((.*?)^\)", _SCRIPTS, re.MULTILINE | re.DOTALL)
}
"""The columns that each table must have."""

INDEXES: frozenset[str] = frozenset(re.findall(r"CREATE (?:UNIQUE )?INDEX (\w+)", _SCRIPTS))
"""The indexes that must be there: a guard or the flat cost of a claim rests on each."""
