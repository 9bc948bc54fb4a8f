"""Makes, upgrades and verifies the store's tables in a PostgreSQL schema of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg

from alkstore.engines.postgres.connection import BEGIN, mapped
from alkstore.engines.postgres.statements import MIGRATIONS, quoted
from alkstore.errors import SchemaMissing, SchemaTooNew, StoreError, StoreForeign, StoreReadOnly
from alkstore.sql.schema import INDEXES, TABLES, VERSION
from alkstore.sql.tx import Row

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["administrators_sql", "prepare"]

LOCK_NUMBER = 0x616C6B73  # "alks": an advisory lock of the transaction, so that it holds through a pooler too

USER = "USER_OF_THE_STORE"
"""Stands in the administrator's SQL for whoever opens the store."""

_OBJECTS = """
SELECT c.relname, c.relkind, ARRAY(
  SELECT a.attname::text FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname LIKE '\\_\\_alkstore\\_%%' AND c.relkind IN ('r', 'p', 'v', 'i')"""


def prepare(
    connection: Connection[Row], schema: str, *, create: bool = True, may_migrate: bool = True, patience: float = 10
) -> None:
    """Bring the schema to the present version, once, however many processes try. Blocks.

    Raises:
        StoreBusy: another process was at it for `patience` seconds.
        SchemaMissing: the tables are not there, or old, and the options forbid making them.
        StoreReadOnly: the user may not create; the text holds the SQL for an administrator.
        SchemaTooNew, StoreForeign: nothing was touched.
        StoreError: the database's encoding cannot hold every text; nothing was touched.
    """
    with _looking(connection):
        _check_encoding(connection)
        version = _found_version(connection, schema)
    if version < VERSION:
        if not (create if version == 0 else may_migrate):
            what = "has no tables of alkstore" if version == 0 else f"has schema version {version}"
            option = "create=False" if version == 0 else "migrate=False"
            raise SchemaMissing(f"the schema {schema!r} {what}, and {option} forbids making version {VERSION}")
        _install(connection, schema, patience)
    with _looking(connection):
        _verify(connection, schema)


def administrators_sql(schema: str, since: int = 0) -> str:
    """Return the SQL that makes the present version from the version `since`, in a schema that is there."""
    parts = [f"SET LOCAL search_path = {quoted(schema)};"]
    parts += [MIGRATIONS[version] for version in range(since + 1, VERSION + 1)]
    parts.append(
        f"INSERT INTO __alkstore_meta (key, value) VALUES ('schema_version', {VERSION}) "
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value;"
    )
    return "\n".join(parts)


def _grants(schema: str) -> str:
    return (
        f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {USER};\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {quoted(schema)} TO {USER};\n"
        f"GRANT UPDATE ON ALL SEQUENCES IN SCHEMA {quoted(schema)} TO {USER};"
    )


def _install(connection: Connection[Row], schema: str, patience: float) -> None:
    found, first = 0, ""
    try:
        connection.execute(f"{BEGIN}; SET LOCAL lock_timeout = {max(round(patience * 1000), 1)}".encode())
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_NUMBER,))
        found = _found_version(connection, schema)  # another process may have been faster
        if not _rows(connection, "SELECT 1 FROM pg_namespace WHERE nspname = %s", schema):
            first = f"CREATE SCHEMA {quoted(schema)};\n"  # not IF NOT EXISTS: that asks for the right in any case
            connection.execute(first.encode())
        if found < VERSION:
            connection.execute(administrators_sql(schema, found).encode())
        connection.execute("COMMIT")
    except psycopg.errors.InsufficientPrivilege as error:
        connection.execute("ROLLBACK")
        raise StoreReadOnly(
            f"this user may not make the store's tables: {error}; let an administrator run this in one transaction, "
            f"with the user's name in the place of {USER}:\n"
            f"{first}{administrators_sql(schema, found)}\n{_grants(schema)}"
        ) from error
    except psycopg.Error as error:
        raise mapped(error) from error


@contextmanager
def _looking(connection: Connection[Row]) -> Iterator[None]:
    """Read in the body, whatever is the default isolation of the user or of the database."""
    _rows(connection, "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
    try:
        yield
    finally:
        with suppress(psycopg.Error):  # then the connection is of no use, which its next statement will tell
            connection.execute("ROLLBACK")


def _check_encoding(connection: Connection[Row]) -> None:
    ((encoding, name),) = _rows(connection, "SELECT current_setting('server_encoding'), current_database()")
    if encoding != "UTF8":
        raise StoreError(
            f"the database {name!r} has the encoding {encoding}, which cannot hold every text that a payload or a name "
            f"may have: use one that was made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


def _found_version(connection: Connection[Row], schema: str) -> int:
    objects = {name: columns for name, kind, columns in _rows(connection, _OBJECTS, schema) if kind != "i"}
    if not objects:
        return 0
    if frozenset(objects.get("__alkstore_meta", ())) != TABLES["__alkstore_meta"]:
        raise StoreForeign(
            f"the schema {schema!r} has {', '.join(sorted(objects)[:3])}, but no table __alkstore_meta as alkstore "
            "makes it: another program uses the names; nothing was touched"
        )
    rows = _rows(connection, f"SELECT value FROM {quoted(schema)}.__alkstore_meta WHERE key = 'schema_version'")
    if not rows:
        raise StoreForeign("the table __alkstore_meta has no schema_version: another program's; nothing was touched")
    version = int(rows[0][0])
    if version > VERSION:
        raise SchemaTooNew(
            f"this store has schema version {version}; this alkstore knows versions up to {VERSION}: upgrade alkstore; "
            "nothing was touched"
        )
    return version


def _verify(connection: Connection[Row], schema: str) -> None:
    objects = {name: columns for name, _, columns in _rows(connection, _OBJECTS, schema)}
    for table, columns in TABLES.items():
        if table in objects and frozenset(objects[table]) != columns:
            raise StoreForeign(f"the table {table} does not have alkstore's columns: another program's; not touched")
    if missing := sorted({*TABLES, *INDEXES} - objects.keys()):
        raise SchemaMissing(f"the store says it has schema version {VERSION}, but it lacks {', '.join(missing)}")


def _rows(connection: Connection[Row], sql: str, *params: str) -> list[Row]:
    try:
        cursor = connection.execute(sql.encode(), params or None)
        return cursor.fetchall() if cursor.description is not None else []
    except psycopg.Error as error:
        raise mapped(error) from error
