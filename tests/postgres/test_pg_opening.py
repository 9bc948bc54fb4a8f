"""Opening: the schema is made once, however many try; what is missing, foreign, too new or forbidden is said."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from alkstore import (
    InvalidName,
    SchemaMissing,
    SchemaTooNew,
    StoreBusy,
    StoreError,
    StoreForeign,
    StoreReadOnly,
    StoreUnavailable,
    open_store,
)
from alkstore.engines.postgres import schema as schemas
from alkstore.engines.postgres.connection import connect
from alkstore.engines.postgres.statements import MIGRATIONS
from alkstore.sql.schema import VERSION
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place, as_user, engine_of
from tests.postgres.schemas import drop_schema
from tests.postgres.server import run_server

PROCESSES, ROUNDS = 8, 20


async def _open(place: Place, **options: Any) -> None:
    async with place.open(**options):
        pass


# ------------------------------------------------------------------------------------------------ many at once (PG03)


def _open_each_round(url: str, names: list[str], barrier: Any, answers: Any) -> None:
    async def all_rounds() -> list[str]:
        wrong = []
        for name in names:
            barrier.wait()
            try:
                async with open_store(url, schema=name, connections=1, listen=False) as store:
                    await store.queue("q").enqueue(os.getpid())
            except Exception as error:  # noqa: BLE001 - the parent judges
                wrong.append(f"{type(error).__name__}: {error}")
        return wrong

    answers.put(trio.run(all_rounds))


def test_many_processes_make_the_schema_together(postgres_url: str) -> None:
    names = [f"test_{secrets.token_hex(4)}" for _ in range(ROUNDS)]
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    arguments = (postgres_url, names, barrier, answers)
    processes = [context.Process(target=_open_each_round, args=arguments) for _ in range(PROCESSES)]
    try:
        for process in processes:
            process.start()
        wrong = [error for _ in processes for error in answers.get(timeout=120)]
        assert wrong == []
        with psycopg.connect(postgres_url) as connection:
            for name in names:
                rows = connection.execute(f"SELECT count(DISTINCT payload) FROM {name}.__alkstore_jobs".encode())
                assert rows.fetchall() == [(PROCESSES,)]
    finally:
        for process in processes:
            process.join(timeout=20)
        answers.close()
        answers.join_thread()
        for name in names:
            drop_schema(postgres_url, name)


async def test_who_makes_the_schema_keeps_the_others_waiting_for_so_long(place: Place, admin: Admin) -> None:
    with admin.holding("SELECT pg_advisory_xact_lock(%s)", schemas.LOCK_NUMBER):
        await fails(StoreBusy, _open, place, busy_timeout=0.3)
    await _open(place)


# ---------------------------------------------------------------------------------------------------- what is there


async def test_where_making_is_forbidden_a_missing_schema_is_an_error(place: Place, admin: Admin) -> None:
    error = await fails(SchemaMissing, _open, place, create=False, migrate=False)
    assert place.schema in str(error)
    assert admin.value("SELECT count(*) FROM pg_namespace WHERE nspname = %s", place.schema) == 0


async def test_an_old_schema_is_brought_to_the_present_version(place: Place, admin: Admin) -> None:
    admin.rows(f"BEGIN; CREATE SCHEMA {place.schema}; SET LOCAL search_path = {place.schema}; {MIGRATIONS[1]}")
    admin.rows(f"INSERT INTO {place.table('meta')} VALUES ('schema_version', 1); COMMIT")
    error = await fails(SchemaMissing, _open, place, migrate=False)
    assert "migrate=False" in str(error)
    await _open(place, create=False)
    assert admin.value(f"SELECT value FROM {place.table('meta')} WHERE key = 'schema_version'") == VERSION


async def test_a_newer_schema_is_not_touched(place: Place, admin: Admin) -> None:
    await _open(place)
    admin.rows(f"UPDATE {place.table('meta')} SET value = {VERSION + 1} WHERE key = 'schema_version'")
    await fails(SchemaTooNew, _open, place)
    assert admin.value(f"SELECT value FROM {place.table('meta')} WHERE key = 'schema_version'") == VERSION + 1


FOREIGN: dict[str, Callable[[Place], str]] = {
    "another table of a name of ours": lambda place: f"CREATE TABLE {place.table('jobs')} (id int)",
    "another meta": lambda place: f"CREATE TABLE {place.table('meta')} (key text)",
    "a view": lambda place: f"CREATE VIEW {place.table('meta')} AS SELECT 1 AS one",
    "a meta without a version": lambda place: f"CREATE TABLE {place.table('meta')} (key text, value bigint)",
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
async def test_tables_of_another_program_are_not_touched(
    place: Place, admin: Admin, make: Callable[[Place], str]
) -> None:
    admin.rows(f"CREATE SCHEMA {place.schema}")
    admin.rows(make(place))
    tables = "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace ORDER BY relname"
    before = admin.rows(tables, place.schema)
    await fails(StoreForeign, _open, place)
    assert admin.rows(tables, place.schema) == before


async def test_a_changed_table_of_ours_is_another_programs(place: Place, admin: Admin) -> None:
    await _open(place)
    admin.rows(f"ALTER TABLE {place.table('locks')} RENAME COLUMN fence TO token")
    await fails(StoreForeign, _open, place)


@pytest.mark.parametrize("what", ["INDEX {}.__alkstore_jobs_key", "TABLE {}.__alkstore_cron_events"])
async def test_what_is_missing_is_named(place: Place, admin: Admin, what: str) -> None:
    await _open(place)
    admin.rows(f"DROP {what.format(place.schema)}")
    error = await fails(SchemaMissing, _open, place)
    assert what.rpartition(".")[2] in str(error)


@pytest.mark.parametrize("name", ['sche"ma %s', "UPPER", "ünï", "x" * 54])
async def test_a_schema_may_have_any_name(postgres_url: str, name: str) -> None:
    place = Place(postgres_url, name)
    try:
        async with open_store(postgres_url, schema=name) as store:
            queue = store.queue("q")
            await queue.enqueue("100%")
            (handle,) = await queue.claim("w")
            assert handle.payload == "100%"
            assert await handle.ack()
            await store.health()
        async with open_store(postgres_url, schema=place.schema, create=False, migrate=False):
            pass
    finally:
        drop_schema(postgres_url, name)


async def test_a_name_that_the_server_would_cut_is_refused(postgres_url: str) -> None:
    await fails(InvalidName, _open, Place(postgres_url, "x" * 55))


# --------------------------------------------------------------------------------------------------------- rights


def _as(place: Place, user: str) -> Place:
    return Place(as_user(place.server, user), place.schema)


async def test_who_may_not_make_tables_is_told_what_an_administrator_has_to_run(
    place: Place, admin: Admin, clerk: str
) -> None:
    error = await fails(StoreReadOnly, _open, _as(place, clerk))
    sql = str(error).partition(":\n")[2]
    assert sql.startswith("CREATE SCHEMA")
    admin.rows("BEGIN")
    admin.rows(sql.replace("USER_OF_THE_STORE", clerk))
    admin.rows("COMMIT")
    async with _as(place, clerk).open() as store:
        queue = store.queue("q")
        await queue.enqueue(1, key="k")
        (handle,) = await queue.claim("w")
        assert await handle.ack()
        await store.schedule("s", "@every 1m", "q")
        await store.cron.publish_task("t", call="h")
        await store.cron.run_now("t")
        assert await store.lock("l").acquire(1) is not None


async def test_who_owns_the_schema_needs_no_right_to_make_one(place: Place, admin: Admin, clerk: str) -> None:
    admin.rows(f"CREATE SCHEMA {place.schema} AUTHORIZATION {clerk}")
    async with _as(place, clerk).open() as store:
        await store.queue("q").enqueue(1)


async def test_who_may_only_read_can_open_and_look(place: Place, admin: Admin, clerk: str) -> None:
    async with place.open() as store:
        await store.queue("q").enqueue(1)
    admin.rows(f"GRANT USAGE ON SCHEMA {place.schema} TO {clerk}")
    admin.rows(f"GRANT SELECT ON ALL TABLES IN SCHEMA {place.schema} TO {clerk}")
    async with _as(place, clerk).open() as store:
        assert (await store.queue("q").counts()).ready == 1
        await fails(StoreReadOnly, store.queue("q").enqueue, 2)


async def test_a_standby_is_read_only() -> None:
    with run_server() as server:
        place = Place(server.url(), "alkstore")
        await _open(place)
        await trio.to_thread.run_sync(server.stand_by)
        async with place.open(listen=False) as store:
            await fails(StoreReadOnly, store.queue("q").enqueue, 2)
            assert (await store.queue("q").counts()).ready == 0


# -------------------------------------------------------------------------------- what a user or a database defaults to

DEFAULTS = {
    "default_transaction_isolation": ["serializable", "repeatable read", "read uncommitted"],
    "default_transaction_read_only": ["on"],
    "default_transaction_deferrable": ["on"],
    "client_encoding": ["LATIN1", "SQL_ASCII", "SJIS"],
    "search_path": ["nowhere"],
    "datestyle": ["German"],
    "standard_conforming_strings": ["off"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in DEFAULTS.items() for value in values], ids=str
)
async def test_a_users_defaults_make_no_difference(
    place: Place, admin: Admin, clerk: str, name: str, value: str
) -> None:
    admin.rows(f"ALTER ROLE {clerk} SUPERUSER; ALTER ROLE {clerk} SET {name} = '{value}'")
    async with _as(place, clerk).open() as store:
        queue = store.queue("日本")
        isolation = "SELECT current_setting('transaction_isolation')"
        await queue.enqueue("naïve 日本 \\ '")
        (handle,) = await queue.claim("w")
        assert handle.payload == "naïve 日本 \\ '"
        assert await handle.retry("日本")
        assert (await queue.counts()).delayed == 1
        assert await engine_of(store).run(lambda tx: tx.one(isolation)) == ("read committed",)
        assert await store.transact(lambda tx: tx.execute(isolation)) == [("read committed",)]
        async with store.transaction() as tx:
            assert await tx.execute(isolation) == [("read committed",)]


async def test_the_environments_encoding_makes_no_difference(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with place.open() as store:
        queue = store.queue("日本")
        await queue.enqueue("日本")
        (handle,) = await queue.claim("w")
        assert handle.payload == "日本"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
async def test_a_database_that_cannot_hold_every_text_is_refused(place: Place, admin: Admin, encoding: str) -> None:
    name = f"encoded_{secrets.token_hex(4)}"
    admin.rows(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        info = psycopg.conninfo.conninfo_to_dict(place.server)
        port = f"&port={info['port']}" if "port" in info else ""
        url = f"postgresql://{info['user']}@/{name}?host={info['host']}{port}"
        error = await fails(StoreError, _open, Place(url, place.schema))
        assert encoding in str(error)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM pg_class WHERE relname LIKE '%alk%'").fetchall() == [(0,)]
    finally:
        admin.rows(f"DROP DATABASE {name} WITH (FORCE)")


# ------------------------------------------------------------------------------------------- addresses and passwords

SECRET = "s3cr3t:p@ss"  # noqa: S105 - nobody's

BAD_URLS = [
    "postgresql://u:s3cr3t:p@ss@127.0.0.1:1/db",
    "postgresql://u:s3cr3t%3Ap%40ss@127.0.0.1:1/db",
    "postgresql://u:s3cr3t:p@ss@127.0.0.1:port/db",
    "postgresql://u:s3cr3t%zz@127.0.0.1:1/db",
    "postgresql://u@127.0.0.1:1/db?password=s3cr3t&nonsense=1",
    "postgresql://u@127.0.0.1:1/db?password=s3cr3t%3Ap%40ss",
    "postgresql://u:s3cr3t@/db?host=/nowhere",
]


@pytest.mark.parametrize("url", BAD_URLS)
async def test_a_password_is_never_shown(url: str) -> None:
    error = await fails(StoreUnavailable, _open, Place(url, "s"), busy_timeout=0)
    shown = "".join(traceback.format_exception(error))
    for part in ("s3cr3t", "p@ss@", "ss@127", "p%40ss"):
        assert part not in shown


NO_URLS = [
    "postgresql+psycopg://app:s3cr3t@db/app",
    "postgres+asyncpg://app:s3cr3t@db/app",
    "jdbc:postgresql://db/app?password=s3cr3t",
    "Postgresql://app:s3cr3t@db/app",
    "POSTGRES://app:s3cr3t@db/app",
    " postgresql://app:s3cr3t@db/app",
    "postgresql:/app:s3cr3t@db/app",
    "postgresql:app:s3cr3t@db/app",
    "app:s3cr3t@db/app",
    "mysql://app:s3cr3t@db/app",
    "host=/tmp password=s3cr3t dbname=app",
    "application_name=a password = 's3cr3t' host = /tmp",
    "password=s3cr3t",
    "postgresql://app:s3cr3t@db/app\0",
    b"postgresql://app:s3cr3t@db/app",
    {"host": "db", "password": "s3cr3t"},
]


@pytest.mark.parametrize("target", NO_URLS, ids=str)
async def test_what_is_nearly_a_url_is_refused_and_not_shown(target: Any) -> None:
    async def use() -> None:
        async with open_store(target):
            pass

    error = await fails(ValueError if isinstance(target, str) else TypeError, use)
    assert "s3cr3t" not in "".join(traceback.format_exception(error))
    if isinstance(target, str) and "\0" not in target:
        assert "postgresql://user@host/database" in str(error)
        with pytest.raises((ValueError, StoreUnavailable)) as told:
            connect(target)
        assert "s3cr3t" not in "".join(traceback.format_exception(told.value))


async def test_a_path_may_look_like_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./host=db.db", "a@b.db", "postgres.db", "day=1.db", "./password=x.db", str(tmp_path / "a:b@c.db")):
        async with open_store(path):
            assert await trio.Path(path).exists()


async def test_a_store_does_not_show_the_password_of_its_url(place: Place) -> None:
    info = psycopg.conninfo.conninfo_to_dict(place.server)
    for server in (
        f"postgresql://{info['user']}:s3cr3t@/{info['dbname']}?host={info['host']}",
        f"postgresql://{info['user']}@/{info['dbname']}?host={info['host']}&password=s3cr3t",
    ):
        async with Place(server, place.schema).open() as store:
            for thing in (store, store._context.engine, store._context, store.queue("q"), store.lock("l")):
                assert "s3cr3t" not in repr(thing)


NEVER = {
    "postgresql://nobody_of_this_name@/{dbname}?host={host}": 'refuses.*"nobody_of_this_name" does not exist',
    "postgresql://{user}@/no_such_database?host={host}": 'refuses.*"no_such_database" does not exist',
    "postgresql://{user}@/{dbname}?host={host}&nonsense=1": 'URL is wrong.*"nonsense"',
    "postgresql://{user}@127.0.0.1:fivefour/{dbname}": 'URL is wrong.*"fivefour"',
    "postgresql://{user}@127.0.0.1:70000/{dbname}": 'URL is wrong.*"70000"',
    "postgresql://{user}@127.0.0.1/{dbname}?sslmode=safe": 'URL is wrong.*"safe"',
    "postgresql://{user}@[::1/{dbname}": "URL is wrong.*IPv6",
}


@pytest.mark.parametrize(("url", "told"), NEVER.items())
async def test_what_will_never_do_is_said_and_not_tried_again(place: Place, url: str, told: str) -> None:
    info = psycopg.conninfo.conninfo_to_dict(place.server)
    began = time.monotonic()
    error = await fails(StoreUnavailable, _open, Place(url.format(**info), place.schema), busy_timeout=30)
    assert time.monotonic() - began < 5
    assert type(error) is StoreUnavailable
    assert re.search(told, str(error))
    assert "cannot be reached" not in str(error)


async def test_a_server_that_is_away_is_waited_for(place: Place) -> None:
    began = time.monotonic()
    await fails(StoreUnavailable, _open, Place("postgresql://u@/db?host=/nowhere", "s"), busy_timeout=0.5)
    assert 0.4 < time.monotonic() - began < 5


def test_a_connection_prepares_nothing(postgres_url: str) -> None:
    with connect(postgres_url) as connection:
        assert connection.prepare_threshold is None
        for _ in range(20):
            connection.execute("SELECT %s::int", (1,))
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchall() == [(0,)]
