"""Enqueueing through the program's own connection to the server: with its commit, and never without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import sqlalchemy
import trio
from psycopg.rows import dict_row, namedtuple_row

from alkstore import (
    InvalidPayload,
    JobHandle,
    ReservedName,
    SchemaMissing,
    SchemaTooNew,
    StoreError,
    StoreForeign,
    open_store,
    seam,
)
from alkstore.sql.schema import VERSION
from tests.conformance.helpers import running
from tests.postgres.kit import Admin, Place, engine_of, eventually
from tests.postgres.server import run_server
from tests.seam.embedders import Embedder, Kind, core, core_autocommit, session


def _psycopg(url: str, **options: Any) -> Embedder:
    conn = psycopg.connect(url, **options)

    def begin() -> None:
        if conn.autocommit:
            conn.execute("BEGIN")

    def end(how: str) -> Callable[[], object]:
        return (lambda: conn.execute(how.encode())) if conn.autocommit else getattr(conn, how.lower())

    return Embedder(
        conn, begin, end("COMMIT"), end("ROLLBACK"), lambda sql: conn.execute(sql.encode()).fetchall(), conn.close
    )


def _engine(url: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))


KINDS = [
    Kind("psycopg", _psycopg),
    Kind("psycopg-autocommit", lambda url: _psycopg(url, autocommit=True), commits_alone=True),
    Kind("psycopg-dicts", lambda url: _psycopg(url, row_factory=dict_row)),
    Kind("psycopg-namedtuples", lambda url: _psycopg(url, row_factory=namedtuple_row)),
    Kind("psycopg-client-cursors", lambda url: _psycopg(url, cursor_factory=psycopg.ClientCursor)),
    Kind("psycopg-raw-cursors", lambda url: _psycopg(url, cursor_factory=psycopg.RawCursor)),
    Kind("psycopg-pipeline-able", lambda url: _psycopg(url, prepare_threshold=0)),
    Kind("sqlalchemy-core", lambda url: core(_engine(url))),
    Kind("sqlalchemy-core-autocommit", lambda url: core_autocommit(_engine(url), "BEGIN"), commits_alone=True),
    Kind("sqlalchemy-core-streaming", lambda url: core(_engine(url).execution_options(stream_results=True))),
    Kind("sqlalchemy-core-by-pages", lambda url: core(_engine(url).execution_options(yield_per=10))),
    Kind("sqlalchemy-session", lambda url: session(_engine(url))),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def made(place: Place) -> Place:
    """A place with the store's tables."""

    async def make() -> None:
        async with place.open():
            pass

    trio.run(make)
    return place


@pytest.fixture
def embedder(kind: Kind, made: Place) -> Iterator[Embedder]:
    opened = kind.open(made.server)
    yield opened
    opened.close()


@pytest.fixture
def conn(made: Place) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(made.server) as conn:
        yield conn


def _count(admin: Admin) -> int:
    return int(admin.value(f"SELECT count(*) FROM {admin.place.table('jobs')}"))


# --------------------------------------------------------------------------------------------- the program's own commit


def test_a_job_is_there_with_the_commit(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    id = seam.enqueue(embedder.conn, "q", {"n": 1}, schema=admin.place.schema, priority=5, delay=3, key="k")
    assert _count(admin) == 0
    embedder.commit()
    rows = admin.rows(f"SELECT id, queue, payload, priority, key, run_at - created_at FROM {admin.place.table('jobs')}")
    assert rows == [(id, "q", '{"n":1}', 5, "k", 3_000)]


def test_a_job_is_not_there_after_a_rollback(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    seam.enqueue(embedder.conn, "q", 1, schema=admin.place.schema)
    seam.outbox_enqueue(embedder.conn, "o", 1, schema=admin.place.schema)
    embedder.rollback()
    assert _count(admin) == 0
    embedder.begin()
    seam.enqueue(embedder.conn, "q", 1, schema=admin.place.schema)
    embedder.commit()
    assert _count(admin) == 1


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
def test_another_client_encoding_is_refused_by_its_name(made: Place, encoding: str) -> None:
    with psycopg.connect(made.server, client_encoding=encoding) as conn:
        with pytest.raises(StoreError, match="connect with client_encoding=UTF8"):
            seam.enqueue(conn, "q", 1, schema=made.schema)
        conn.execute("SET client_encoding = UTF8")
        seam.enqueue(conn, "q", "\N{SNOWMAN}", schema=made.schema)


def test_a_key_that_is_there_gives_its_job(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    first = seam.enqueue(embedder.conn, "q", 1, key="k", schema=admin.place.schema)
    assert seam.enqueue(embedder.conn, "q", 2, key="k", schema=admin.place.schema) == first
    embedder.commit()
    assert _count(admin) == 1


def test_the_time_may_be_given(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    seam.enqueue(embedder.conn, "q", 1, now=datetime(2030, 1, 1, tzinfo=UTC), key="k", schema=admin.place.schema)
    seam.enqueue(embedder.conn, "q", 1, now=1_000, schema=admin.place.schema)
    embedder.commit()
    rows = admin.rows(f"SELECT created_at FROM {admin.place.table('jobs')} ORDER BY id")
    assert rows == [(1_893_456_000_000,), (1_000,)]


def test_without_a_given_time_the_servers_counts(
    embedder: Embedder, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 0)
    embedder.begin()
    seam.enqueue(embedder.conn, "q", 1, schema=admin.place.schema)
    embedder.commit()
    late = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint - created_at FROM"
    assert 0 <= admin.value(f"{late} {admin.place.table('jobs')}") < 60_000


def test_a_message_needs_a_transaction(kind: Kind, embedder: Embedder, admin: Admin) -> None:
    """One that begins by itself, as psycopg's do, will do: it stays open until the program commits."""
    if kind.commits_alone:
        with pytest.raises(ValueError, match="no transaction is open"):
            seam.outbox_enqueue(embedder.conn, "o", 1, schema=admin.place.schema)
    elif kind.name.startswith("psycopg"):
        seam.outbox_enqueue(embedder.conn, "o", 1, schema=admin.place.schema)
    assert _count(admin) == 0


def test_what_is_refused_spoils_no_transaction(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    with pytest.raises(InvalidPayload):
        seam.enqueue(embedder.conn, "q", {1: 2}, schema=admin.place.schema)
    with pytest.raises(ReservedName):
        seam.enqueue(embedder.conn, "__alkstore_outbox:o", 1, schema=admin.place.schema)
    with pytest.raises(SchemaMissing):
        seam.enqueue(embedder.conn, "q", 1, schema="not_there")
    seam.enqueue(embedder.conn, "q", 1, schema=admin.place.schema)
    embedder.commit()
    assert _count(admin) == 1


def test_in_a_failed_transaction_the_error_is_the_stores(embedder: Embedder, admin: Admin) -> None:
    embedder.begin()
    with suppress(Exception):
        embedder.execute("SELECT 1 / 0")
    with pytest.raises(StoreError):
        seam.enqueue(embedder.conn, "q", 1, schema=admin.place.schema)
    embedder.rollback()


# ------------------------------------------------------------------------------------------ pipelines, two phases


def _failing_in_a_pipeline(conn: psycopg.Connection[Any], schema: str, begin: str) -> None:
    """Write a message in a pipeline that fails afterwards."""
    with conn.pipeline():
        conn.execute(begin.encode())
        conn.execute("SELECT 1")
        assert seam.enqueue(conn, "q", 1, schema=schema)
        assert seam.outbox_enqueue(conn, "o", 1, schema=schema)
        raise ZeroDivisionError


@pytest.mark.parametrize(("autocommit", "begin"), [(False, "SELECT 1"), (True, "BEGIN")])
def test_in_a_pipeline_a_message_needs_its_transaction(
    conn: psycopg.Connection[Any], admin: Admin, autocommit: bool, begin: str
) -> None:
    conn.autocommit = autocommit
    with pytest.raises(ZeroDivisionError):
        _failing_in_a_pipeline(conn, admin.place.schema, begin)
    conn.rollback()
    assert _count(admin) == 0


def test_in_a_pipeline_without_a_transaction_a_message_is_refused(conn: psycopg.Connection[Any], admin: Admin) -> None:
    conn.autocommit = True
    with conn.pipeline():
        conn.execute("SELECT 1")
        with pytest.raises(ValueError, match="no transaction is open"):
            seam.outbox_enqueue(conn, "o", 1, schema=admin.place.schema)
        conn.execute("BEGIN")
        seam.outbox_enqueue(conn, "o", 2, schema=admin.place.schema)
        conn.execute("COMMIT")
    assert _count(admin) == 1


def test_what_has_failed_in_a_pipeline_before_is_a_stores_error(conn: psycopg.Connection[Any], admin: Admin) -> None:
    conn.autocommit = True
    with suppress(psycopg.errors.PipelineAborted), conn.pipeline():
        conn.execute("SELECT 1 / 0")
        with pytest.raises(StoreError, match="division by zero"):
            seam.outbox_enqueue(conn, "o", 1, schema=admin.place.schema)
    assert _count(admin) == 0


def _by_psycopg(url: str, schema: str) -> None:
    with psycopg.connect(url) as conn:
        conn.tpc_begin("psycopg")
        seam.outbox_enqueue(conn, "o", 1, schema=schema)
        conn.tpc_prepare()
        conn.tpc_commit()


def _by_sqlalchemy(url: str, schema: str) -> None:
    engine = _engine(url)
    with engine.connect() as conn:
        transaction = conn.begin_twophase()
        seam.outbox_enqueue(conn, "o", 1, schema=schema)
        transaction.prepare()
        transaction.commit()
    engine.dispose()


def test_a_transaction_of_two_phases_can_be_prepared() -> None:
    """The server refuses one that has sent a notice."""

    async def make() -> None:
        async with open_store(url, schema="s"):
            pass

    with run_server(max_prepared_transactions="5") as server:
        url = server.url()
        trio.run(make)
        _by_psycopg(url, "s")
        _by_sqlalchemy(url, "s")
        with psycopg.connect(url) as conn:
            assert conn.execute("SELECT count(*) FROM s.__alkstore_jobs").fetchall() == [(2,)]


# --------------------------------------------------------------------------------------------------------- waking


async def test_the_commit_wakes_workers_and_nothing_before(kind: Kind, made: Place) -> None:
    done: list[object] = []

    async def note(handle: JobHandle) -> None:
        done.append(handle.payload)

    embedder = kind.open(made.server)
    try:
        async with made.open() as store, running(store.queue("q").work, note):
            await eventually(lambda: engine_of(store).feed_state == "listening")
            embedder.begin()
            seam.enqueue(embedder.conn, "q", 1, schema=made.schema)
            await trio.sleep(0.1)
            assert done == []
            embedder.commit()
            assert await eventually(lambda: done) < 2
    finally:
        embedder.close()


# ------------------------------------------------------------------------------------------------ what is no store


def test_a_newer_store_is_refused(conn: psycopg.Connection[Any], admin: Admin) -> None:
    admin.rows(f"UPDATE {admin.place.table('meta')} SET value = {VERSION + 1} WHERE key = 'schema_version'")
    with pytest.raises(SchemaTooNew):
        seam.enqueue(conn, "q", 1, schema=admin.place.schema)


def test_an_old_store_is_refused(conn: psycopg.Connection[Any], admin: Admin) -> None:
    admin.rows(f"UPDATE {admin.place.table('meta')} SET value = 1 WHERE key = 'schema_version'")
    with pytest.raises(SchemaMissing):
        seam.enqueue(conn, "q", 1, schema=admin.place.schema)


def test_another_programs_table_is_refused(conn: psycopg.Connection[Any], admin: Admin) -> None:
    admin.rows(f"ALTER TABLE {admin.place.table('meta')} RENAME COLUMN value TO worth")
    with pytest.raises(StoreForeign):
        seam.enqueue(conn, "q", 1, schema=admin.place.schema)


async def test_an_asynchronous_connection_is_refused(made: Place) -> None:
    conn = psycopg.AsyncConnection.__new__(psycopg.AsyncConnection)
    with pytest.raises(TypeError, match=r"AsyncConnection is an asynchronous one.*use tx\.enqueue"):
        seam.enqueue(conn, "q", 1, schema=made.schema)
    conn.__dict__.clear()


async def test_the_default_schema_is_that_of_open_store(place: Place, admin: Admin) -> None:
    if admin.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'alkstore'"):
        pytest.skip("the server has a store in the default schema already")
    try:
        async with open_store(place.server) as store:
            with psycopg.connect(place.server) as conn:
                id = seam.enqueue(conn, "q", 1)
            assert await store.get_job(id) is not None
    finally:
        admin.rows("DROP SCHEMA alkstore CASCADE")
