"""PG02: a claim and a sweep touch no more rows than they are meant to, whatever the planner makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from alkstore.engines.postgres.connection import PostgresTx
from alkstore.engines.postgres.schema import prepare
from alkstore.sql import jobs, locks
from alkstore.sql.cron import runs
from alkstore.sql.jobs import claiming, dead_letters
from alkstore.sql.tx import Tx
from tests.postgres.server import old_binaries, run_server

SCHEMA = "limits"
NOW = 1_800_000_000_000

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(scope="module", params=["present", "15"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server whose statistics are never brought up to date; of an old version too, if there is one."""
    binaries = None
    if request.param == "15" and (binaries := old_binaries()) is None:
        pytest.skip("PostgreSQL 15 is not installed")
    with run_server(binaries, autovacuum="off") as found:
        yield found.url()


@pytest.fixture
def connection(server: str) -> Iterator[Connection]:
    """A store's tables with one row each when they were last looked at, and the settings under which the trap bites."""
    with psycopg.connect(server, autocommit=True, prepare_threshold=None) as connection:
        prepare(connection, SCHEMA)
        yield connection
        connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE".encode())


JOB = (
    f"INSERT INTO {SCHEMA}.__alkstore_jobs (queue, priority, run_at, expires_at, max_attempts, visibility, backoff, "
    f"payload, created_at, state, worker, lease, lease_end, reason, died_at, parked) "
    f"SELECT 'q', 0, {NOW} - 1000, {{expires_at}}, 3, 1000, 1, '1', {NOW} - 1000, {{state}}, {{worker}}, {{lease}}, "
    f"{{lease}}, {{reason}}, {{died_at}}, {{parked}} FROM generate_series(1, %s)"
)
KINDS: dict[str, dict[str, object]] = {
    "ready": {},
    "parked": {"parked": 1},
    "expired": {"expires_at": NOW - 1},
    "lapsed": {"state": 1, "worker": "'w'", "lease": 1},
    "dead": {"state": 2, "reason": "'failed'", "died_at": NOW - 1},
}
PLAIN = {"expires_at": "NULL", "state": 0, "worker": "NULL", "lease": "NULL", "reason": "NULL", "died_at": "NULL"}


def _fill(connection: Connection, kind: str, count: int) -> None:
    """One row, of which the planner hears, and the others, of which it does not."""
    sql = JOB.format(**{**PLAIN, "parked": 0, **KINDS[kind]})
    connection.execute(sql.encode(), (1,))
    connection.execute("ANALYZE")
    connection.execute(sql.encode(), (count - 1,))
    for setting in ("hashjoin", "mergejoin", "material"):
        connection.execute(f"SET enable_{setting} = off".encode())


def _in_transaction(connection: Connection, function: Callable[[Tx], Any]) -> Any:
    connection.execute("BEGIN")
    result = function(PostgresTx(connection, SCHEMA, NOW, lambda *_: None))
    connection.execute("COMMIT")
    return result


def _count(connection: Connection, condition: str) -> int:
    rows = connection.execute(f"SELECT count(*) FROM {SCHEMA}.__alkstore_jobs WHERE {condition}".encode()).fetchall()
    return int(rows[0][0])


@pytest.mark.parametrize("kind", ["ready", "parked", "lapsed"])
@pytest.mark.parametrize("limit", [1, 5])
def test_a_claim_takes_as_many_as_it_returns(connection: Connection, kind: str, limit: int) -> None:
    _fill(connection, kind, 21)
    claimed = _in_transaction(connection, lambda tx: jobs.claim(tx, "q", "w", limit, 60_000))
    assert len(claimed.jobs) == limit
    assert _count(connection, "state = 1 AND lease = 60000") == limit


def test_under_these_settings_a_limit_in_a_subquery_is_none(connection: Connection) -> None:
    """The trap bites here: else the other tests would say nothing."""
    table = f"{SCHEMA}.trap"
    connection.execute(f"CREATE TABLE {table} (id int, state int, run_at int)".encode())
    connection.execute(f"INSERT INTO {table} VALUES (1, 0, 1)".encode())
    connection.execute(f"ANALYZE {table}".encode())
    connection.execute(f"INSERT INTO {table} SELECT i, 0, i FROM generate_series(2, 21) AS i".encode())
    for setting in ("hashjoin", "mergejoin", "material"):
        connection.execute(f"SET enable_{setting} = off".encode())
    rows = connection.execute(
        f"UPDATE {table} SET state = 1 WHERE id IN (SELECT id FROM {table} WHERE state = 0 ORDER BY run_at "
        "FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id".encode()
    ).fetchall()
    assert len(rows) == 21


SWEEPS: dict[str, tuple[str, str, Callable[[Tx], Any], str]] = {
    "sweep_expired": ("expired", "PAGE", lambda tx: jobs.sweep_expired(tx, "q"), "reason = 'expired'"),
    "prune": ("dead", "PAGE", lambda tx: jobs.prune(tx, "q", 0), ""),
    "redrive": ("dead", "PAGE", lambda tx: jobs.redrive_page(tx, "q", 0)[0], "state = 0"),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_touches_one_page(connection: Connection, name: str) -> None:
    kind, _, sweep, condition = SWEEPS[name]
    _fill(connection, kind, dead_letters.PAGE + 50)
    assert _in_transaction(connection, sweep) == dead_letters.PAGE
    touched = _count(connection, condition) if condition else dead_letters.PAGE + 50 - _count(connection, "true")
    assert touched == dead_letters.PAGE


def test_a_claim_buries_no_more_than_its_share(connection: Connection) -> None:
    _fill(connection, "expired", claiming.BURIED_PER_CLAIM + 50)
    _in_transaction(connection, lambda tx: jobs.claim(tx, "q", "w", 1, None))
    assert _count(connection, "reason = 'expired'") == claiming.BURIED_PER_CLAIM


def test_a_claim_takes_back_no_more_lapsed_leases_than_its_share(connection: Connection) -> None:
    _fill(connection, "lapsed", claiming.LAPSED_PER_CLAIM + 50)
    _in_transaction(connection, lambda tx: jobs.claim(tx, "q", "w", 1, None))
    assert _count(connection, "error = 'lease expired'") == claiming.LAPSED_PER_CLAIM


def test_a_claim_lets_in_no_more_delayed_jobs_than_its_share(connection: Connection) -> None:
    _fill(connection, "parked", claiming.UNPARKED_PER_CLAIM + 50)
    _in_transaction(connection, lambda tx: jobs.claim(tx, "q", "w", 1, None))
    assert _count(connection, "parked = 1") == 50


def test_forgetting_expired_locks_is_bounded(connection: Connection) -> None:
    table = f"{SCHEMA}.__alkstore_locks"
    sql = f"INSERT INTO {table} SELECT 'l' || i, 'o', 1, 1, 1, 1 FROM generate_series(%s::int, %s::int) AS i"
    connection.execute(sql.encode(), (1, 1))
    connection.execute("ANALYZE")
    connection.execute(sql.encode(), (2, 150))
    for setting in ("hashjoin", "mergejoin", "material"):
        connection.execute(f"SET enable_{setting} = off".encode())
    assert _in_transaction(connection, lambda tx: locks.acquire(tx, "mine", "me", 1_000)) is not None
    (row,) = connection.execute(f"SELECT count(*) FROM {table} WHERE name <> 'mine'".encode()).fetchall()
    assert row == (50,)


def test_pruning_runs_is_bounded(connection: Connection) -> None:
    table = f"{SCHEMA}.__alkstore_cron_runs"
    sql = (
        f"INSERT INTO {table} (task, task_revision, task_digest, handler, state, attempt, available_at, created_at, "
        "ended_at) SELECT 't', 1, 'd', 'h', 'succeeded', 1, 1, 1, 1 FROM generate_series(1, %s)"
    )
    connection.execute(sql.encode(), (1,))
    connection.execute("ANALYZE")
    connection.execute(sql.encode(), (249,))
    assert _in_transaction(connection, lambda tx: runs.prune(tx, 0)) == runs.PRUNED_PER_STEP
    (row,) = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchall()
    assert row == (250 - runs.PRUNED_PER_STEP,)
