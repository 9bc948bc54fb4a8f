"""Moving house: a copy of everything that is in a SQLite store, in an empty schema of a PostgreSQL server.

Needs psycopg: install alkstore[postgres].
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from alkstore.engines import driver
from alkstore.engines.files import refuse_other_copy
from alkstore.engines.migrate import found_version, verify
from alkstore.engines.postgres.address import is_url
from alkstore.errors import InvalidName, OutcomeUnknown, SchemaMissing, StoreCorrupt, StoreError, StoreUnavailable
from alkstore.names import check_name
from alkstore.sql.schema import TABLES, VERSION
from alkstore.sql.tx import Params, Row

try:
    import psycopg

    from alkstore.engines.postgres.connection import BEGIN, connect, mapped
    from alkstore.engines.postgres.engine import MAX_SCHEMA_BYTES
    from alkstore.engines.postgres.schema import prepare
    from alkstore.engines.postgres.statements import quoted
except ImportError as error:
    raise ImportError("alkstore.moving needs psycopg: install alkstore[postgres]") from error

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["Copied", "Progress", "copy_store"]

PAGE = 1_000
"""Rows read and sent at once."""

META = "__alkstore_meta"

WITH_IDENTITY = ("__alkstore_jobs", "__alkstore_cron_runs", "__alkstore_cron_events")
"""Tables whose ids are given by the database: none may be given twice, not even that of a row which is gone."""


@frozen
class Progress:
    """How far a copy has come."""

    table: str
    rows: int
    """Rows of this table that are copied."""
    total: int
    """All rows of this table."""


@frozen
class Copied:
    """What a copy consists of."""

    rows: dict[str, int]
    """The rows of each table."""
    checksums: dict[str, str]
    """SHA-256 of each table's rows, the same on both sides."""


def _nothing(_: Progress) -> None:
    pass


async def copy_store(
    source: str | os.PathLike[str],
    url: str,
    *,
    schema: str = "alkstore",
    progress: Callable[[Progress], object] = _nothing,
) -> Copied:
    """Copy the store in the SQLite file `source` into `schema` of the PostgreSQL server at `url`, and verify it.

    Everything is copied: jobs with their ids, leases and fences, locks, schedules, cron definitions and runs, and the
    counters, so that no id and no fencing token is ever given twice. It is one snapshot of the file, and one
    transaction of the server: all or nothing. Nobody may work on the file meanwhile, or what is done there after the
    beginning is not in the copy; nor afterwards, or both stores would run the same jobs. Your own tables are yours to
    copy. `progress` is called in the trio thread.

    Waits for both databases. Cancelled: it ends after the next thousand rows at the latest, and nothing was copied.

    Raises:
        TypeError, ValueError, InvalidName: an argument, named.
        SchemaMissing: the file has no store, or an older one: open it with `open_store` first.
        StoreCorrupt: the file is damaged, or no SQLite database; or a row, which is named, cannot be stored.
        StoreForeign, SchemaTooNew, MixedSQLite: as `open_store`.
        StoreReadOnly: the user may not make the tables, or lacks a right: see the page on PostgreSQL.
        StoreError: the schema is not empty; or the copy is not like the original, and was rolled back.
        StoreUnavailable: the file or the server cannot be reached.
        OutcomeUnknown: the server went away at the commit: look into the schema, or copy again.
    """
    path = _checked_source(source)
    _check_url(url)
    if len(check_name(schema, "schema").encode()) > MAX_SCHEMA_BYTES:
        raise InvalidName(f"schema must not be longer than {MAX_SCHEMA_BYTES} bytes, which {schema!r} is")
    if not callable(progress):
        raise TypeError(f"progress must be a function of a Progress, not {progress!r:.80}")

    def tell(so_far: Progress) -> None:
        trio.from_thread.check_cancelled()
        trio.from_thread.run_sync(progress, so_far)

    return await trio.to_thread.run_sync(_copy, path, url, schema, tell)


# What is wrong is not shown where it may be a URL: it may hold a password.


def _checked_source(source: object) -> str:
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source must be the path of a SQLite file, not {type(source).__name__}")
    path = os.fspath(source)
    if not isinstance(path, str):
        raise TypeError("source must be a path as text, not bytes")
    if "://" in path:
        raise ValueError("source must be the path of a SQLite file, not a URL: copy_store(path, url)")
    if not path or path == ":memory:" or path.startswith("file:") or "\0" in path:
        raise ValueError(f"source must be the path of a SQLite file, not {path!r:.80}")
    return path


def _check_url(url: object) -> None:
    if not isinstance(url, str):
        raise TypeError(f"url must be the postgresql:// URL of a server, not {type(url).__name__}")
    if not is_url(url):
        raise ValueError("url must be the URL of a server, which begins with postgresql://: copy_store(path, url)")


def _copy(source: str, url: str, schema: str, tell: Callable[[Progress], None]) -> Copied:
    with closing(_open_source(source)) as original, connect(url) as copy:
        prepare(copy, schema)
        try:
            return _copy_all(original, copy, schema, tell)
        except psycopg.Error as error:
            raise mapped(error) from error
        except sqlite3.Error as error:
            raise _mapped(error, source) from error


def _copy_all(
    original: sqlite3.Connection, copy: Connection[Row], schema: str, tell: Callable[[Progress], None]
) -> Copied:
    copy.execute(BEGIN)
    _refuse_full(copy, schema)
    tables = {table: sorted(columns) for table, columns in TABLES.items()}
    rows = {table: _copy_table(original, copy, schema, table, tables[table], tell) for table in tables}
    for table in WITH_IDENTITY:
        _copy_sequence(original, copy, schema, table)
    checksums = {}
    for table, columns in tables.items():
        checksums[table] = _checksum(_rows_of(original, table, columns))
        if _checksum(_rows_of_copy(copy, schema, table, columns)) != checksums[table]:
            raise StoreError(f"the copy of {table} is not like the original; nothing was copied")
    _commit(copy)
    return Copied(rows, checksums)


def _commit(copy: Connection[Row]) -> None:
    try:
        copy.execute("COMMIT")
    except psycopg.Error as error:
        if isinstance(mapped(error), StoreUnavailable):
            raise OutcomeUnknown(
                f"the server went away at COMMIT, so it is not known whether everything was copied, or nothing: {error}"
            ) from error
        raise


@frozen
class _Readable:
    connection: sqlite3.Connection

    def all(self, sql: str, params: Params = ()) -> list[Row]:
        return self.connection.execute(sql, params).fetchall()


def _open_source(path: str) -> sqlite3.Connection:
    refuse_other_copy(path, "sqlite3")
    if os.path.isdir(path):
        raise StoreUnavailable(f"{path} is a folder; a store is one file in a folder")
    if not os.path.exists(path):
        raise StoreUnavailable(f"{path} does not exist")
    connection = None
    try:
        connection = sqlite3.connect(f"file:{_quoted_path(path)}?mode=ro", uri=True, isolation_level=None)
        connection.text_factory = _text
        connection.execute("BEGIN")
        _check_version(_Readable(connection))
    except BaseException as error:  # whatever it is, it leaves, and no connection stays behind
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise _mapped(error, path) from error
        if isinstance(error, StoreError):
            error.args = (f"{path}: {error}",)
        raise
    return connection


def _check_version(source: _Readable) -> None:
    found = found_version(source)
    if found < VERSION:
        what = f"version {found} of alkstore's tables, not {VERSION}" if found else "no tables of alkstore"
        raise SchemaMissing(f"it has {what}: open it with open_store first")
    verify(source)


def _mapped(error: sqlite3.Error, path: str) -> StoreError:
    found = driver.mapped(getattr(error, "sqlite_errorcode", None), error)
    found.args = (f"{path}: {found}",)
    return found


def _text(raw: bytes) -> str | bytes:
    """Bytes are what is no text: `_rows_of` says where it stands."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _quoted_path(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _refuse_full(copy: Connection[Row], schema: str) -> None:
    copy.execute(f"LOCK TABLE {', '.join(_named(schema, table) for table in TABLES)}".encode())
    for table in TABLES:
        condition = "WHERE key NOT IN ('schema_version', 'fencing_token') OR (key = 'fencing_token' AND value > 0)"
        sql = f"SELECT 1 FROM {_named(schema, table)} {condition if table == META else ''} LIMIT 1"
        if copy.execute(sql.encode()).fetchall():
            raise StoreError(f"the schema {schema!r} is not empty: {table} has rows; copy into one that is")


def _copy_table(
    original: sqlite3.Connection,
    copy: Connection[Row],
    schema: str,
    table: str,
    columns: list[str],
    tell: Callable[[Progress], None],
) -> int:
    ((total,),) = original.execute(f"SELECT count(*) FROM {table}").fetchall()
    copy.execute(f"DELETE FROM {_named(schema, table)}".encode())  # the version and the counter that it was made with
    done = 0
    sql = f"COPY {_named(schema, table)} ({', '.join(columns)}) FROM STDIN"
    with copy.cursor() as cursor, cursor.copy(sql.encode()) as lines:
        for row in _rows_of(original, table, columns):
            try:
                lines.write_row(row)
            except (psycopg.DataError, UnicodeEncodeError) as error:  # a NUL; an encoding other than UTF-8
                raise StoreCorrupt(f"{_row_named(table, columns, row)} cannot be stored: {error}") from error
            done += 1
            if done % PAGE == 0:
                tell(Progress(table, done, total))
    tell(Progress(table, done, total))
    return done


def _copy_sequence(original: sqlite3.Connection, copy: Connection[Row], schema: str, table: str) -> None:
    found = original.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchall()
    if found and found[0][0] > 0:
        copy.execute("SELECT setval(pg_get_serial_sequence(%s, 'id'), %s)", (_named(schema, table), found[0][0]))


def _rows_of(original: sqlite3.Connection, table: str, columns: list[str]) -> Iterator[Row]:
    for row in original.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {_key(table)}"):
        for column, value in zip(columns, row, strict=True):
            if isinstance(value, bytes):
                raise StoreCorrupt(
                    f"{_row_named(table, columns, row)} has text in {column} that is not UTF-8: mend or delete it"
                )
        yield row


def _row_named(table: str, columns: list[str], row: Row) -> str:
    values = dict(zip(columns, row, strict=True))
    return f"the row of {table} with {', '.join(f'{key} = {values[key]!r:.80}' for key in _key(table).split(', '))}"


def _rows_of_copy(copy: Connection[Row], schema: str, table: str, columns: list[str]) -> Iterator[Row]:
    with copy.cursor(f"of_{table}") as cursor:
        cursor.itersize = PAGE
        cursor.execute(f"SELECT {', '.join(columns)} FROM {_named(schema, table)} ORDER BY {_key(table)}".encode())
        yield from cursor


def _checksum(rows: Iterator[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def _key(table: str) -> str:
    """The columns of the primary key."""
    keys = {
        "__alkstore_meta": "key",
        "__alkstore_queues": "queue",
        "__alkstore_locks": "name",
        "__alkstore_scheduler_tasks": "name",
        "__alkstore_cron_task_revisions": "id, revision",
        "__alkstore_cron_trigger_revisions": "id, revision",
        "__alkstore_cron_schedules": "trigger",
        "__alkstore_cron_attempts": "run, number",
    }
    return keys.get(table, "id")


def _named(schema: str, table: str) -> str:
    return f"{quoted(schema)}.{table}"
