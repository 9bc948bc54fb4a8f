"""What the planner makes of the hot statements, beside 20,000 other jobs of each kind, with statistics old and new."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from alkstore.engines.postgres.connection import PostgresTx
from alkstore.engines.postgres.schema import prepare
from alkstore.engines.postgres.statements import translate
from alkstore.sql import jobs, schedules
from alkstore.sql.cron import admission, runs
from alkstore.sql.jobs import claiming, dead_letters, enqueueing, settling
from tests.postgres.server import old_binaries, run_server

SCHEMA = "plans"
NOW = 1_800_000_000_000
OTHERS = 20_000

Connection = psycopg.Connection[tuple[Any, ...]]

FILL = f"""
INSERT INTO {SCHEMA}.__alkstore_jobs (queue, priority, run_at, expires_at, max_attempts, visibility, backoff, payload,
  created_at, state, worker, lease, lease_end, reason, died_at, parked)
SELECT 'q', mod(i, 20), {NOW} + CASE kind WHEN 1 THEN 1000 + i ELSE -1000 END, CASE kind WHEN 2 THEN {NOW} + i END,
  3, 1, 1, '{{}}', {NOW}, CASE kind WHEN 3 THEN 1 WHEN 4 THEN 2 ELSE 0 END,
  CASE kind WHEN 3 THEN 'w' END, CASE kind WHEN 3 THEN 1 END, CASE kind WHEN 3 THEN {NOW} + i END,
  CASE kind WHEN 4 THEN 'failed' END, CASE kind WHEN 4 THEN {NOW} - i END, CASE kind WHEN 1 THEN 1 ELSE 0 END
FROM (SELECT i, mod(i, 5) AS kind FROM generate_series(1, {OTHERS * 5}) AS i) AS others"""

SCHEDULES = f"""
INSERT INTO {SCHEMA}.__alkstore_scheduler_tasks (name, spec, interval, queue, payload, next_fire_at, created_at,
  updated_at)
SELECT 's' || i, '@every 1h', 3600000, 'q', '1', {NOW} + i, 0, 0 FROM generate_series(1, 5000) AS i"""

TRIGGERS = f"""
INSERT INTO {SCHEMA}.__alkstore_cron_schedules (trigger, trigger_revision, next_fire_at, active)
SELECT 't' || i, 1, {NOW} + i, 1 FROM generate_series(1, 5000) AS i"""

RUNS = f"""
INSERT INTO {SCHEMA}.__alkstore_cron_runs (task, task_revision, task_digest, handler, state, attempt, job, available_at,
  created_at, ended_at)
SELECT 't', 1, 'd', 'h', CASE WHEN mod(i, 10) = 0 THEN 'queued' ELSE 'succeeded' END, 1, i, {NOW}, {NOW},
  CASE WHEN mod(i, 10) = 0 THEN NULL ELSE {NOW} END FROM generate_series(1, 20000) AS i"""


@pytest.fixture(scope="module", params=["present", "15"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    binaries = None
    if request.param == "15" and (binaries := old_binaries()) is None:
        pytest.skip("PostgreSQL 15 is not installed")
    with run_server(binaries, autovacuum="off") as found:
        yield found.url()


@pytest.fixture(scope="module", params=["fresh statistics", "none", "of an empty table"])
def connection(request: pytest.FixtureRequest, server: str) -> Iterator[Connection]:
    with psycopg.connect(server, autocommit=True, prepare_threshold=None) as connection:
        prepare(connection, SCHEMA)
        if request.param == "of an empty table":
            connection.execute("VACUUM ANALYZE")
        connection.execute(FILL.encode())
        connection.execute(SCHEDULES.encode())
        connection.execute(TRIGGERS.encode())
        connection.execute(RUNS.encode())
        if request.param == "fresh statistics":
            connection.execute("VACUUM ANALYZE")
        yield connection
        connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE".encode())


def _explain(connection: Connection, sql: str, **params: object) -> str:
    rows = connection.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {translate(sql, SCHEMA)}".encode(), params).fetchall()
    return "\n".join(line for (line,) in rows)


HOT: dict[str, tuple[str, dict[str, object], str]] = {
    "the pick of a claim": (claiming.PICK, {"queue": "q", "now": NOW, "limit": 10}, "__alkstore_jobs_ready"),
    "the lapsed of a claim": (claiming.LAPSED, {"queue": "q", "now": NOW}, "__alkstore_jobs_lapse"),
    "the arrived of a claim": (claiming.ARRIVED, {"queue": "q", "now": NOW}, "__alkstore_jobs_parked"),
    "the soonest of a look": (claiming.SOONEST, {"queue": "q", "now": NOW}, "__alkstore_jobs_ready"),
    "a take": (claiming.TAKE, {"id": 5, "worker": "w", "lease": 1, "now": NOW}, "__alkstore_jobs_pkey"),
    "an ack": (settling.ACK, {"id": 5, "fence": 0, "now": NOW}, "__alkstore_jobs_pkey"),
    "a key": (enqueueing.LIVE_KEY, {"queue": "q", "key": "k"}, "__alkstore_jobs_key"),
    "a sweep": (dead_letters.EXPIRED, {"queue": "q", "now": NOW}, "__alkstore_jobs_expiry"),
    "a prune": (dead_letters.OLD, {"queue": "q", "before": 5}, "__alkstore_jobs_prune"),
    "the next lapse": (claiming.SOONEST_LAPSE, {"queue": "q"}, "__alkstore_jobs_lapse"),
    "the next schedule": (schedules.SOONEST, {"now": NOW}, "__alkstore_scheduler_tasks_due"),
    "the next run": (runs.SOONEST_WAITING, {"handler": "h"}, "__alkstore_cron_runs_waiting"),
    "the due triggers": (admission.SOONEST_DUE, {}, "__alkstore_cron_schedules_due"),
    "the due schedules": (schedules.DUE, {"now": NOW}, "__alkstore_scheduler_tasks_due"),
    "the schedules too far ahead": (schedules.AHEAD, {"now": NOW}, "__alkstore_scheduler_tasks_ahead"),
    "the waiting runs": (runs.WAITING, {"handler": "h", "now": NOW, "limit": 4}, "__alkstore_cron_runs_waiting"),
    "the run of a job": (runs.RUN_OF_JOB, {"job": 5}, "__alkstore_cron_runs_job"),
}


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_rides_on_its_index_and_reads_what_it_takes(connection: Connection, name: str) -> None:
    sql, params, index = HOT[name]
    connection.execute("BEGIN")
    plan = _explain(connection, sql, **params)
    connection.execute("ROLLBACK")
    assert index in plan, plan
    assert "Seq Scan" not in plan, plan
    assert not re.search(r"rows=\d{4,}(\.\d+)? loops", plan), plan
    assert not re.search(r"Rows Removed by Filter: \d{3,}", plan), plan


def test_a_claim_reads_no_more_beside_many_others(connection: Connection) -> None:
    """Blocks touched by a whole claim: counted by the server, so that it holds on a busy machine too."""
    connection.execute("BEGIN")
    connection.execute("SELECT pg_stat_reset()")
    tx = PostgresTx(connection, SCHEMA, NOW, lambda *_: None)
    for sql, params in (
        (claiming.PICK, {"queue": "q", "now": NOW, "limit": 1}),
        (claiming.SOONEST, {"queue": "q", "now": NOW}),
    ):
        plan = "\n".join(
            line
            for (line,) in connection.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) {translate(sql, SCHEMA)}".encode(), params
            ).fetchall()
        )
        touched = sum(int(hit) for hit in re.findall(r"shared hit=(\d+)", plan.split("Planning")[0])[:1])
        assert touched < 60, plan
    assert len(jobs.claim(tx, "q", "w", 1, None).jobs) == 1
    connection.execute("ROLLBACK")
