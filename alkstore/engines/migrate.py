"""Finds out whose tables a file holds, and makes or upgrades the store's own."""

from __future__ import annotations

from typing import Protocol

from alkstore.engines.driver import Connection
from alkstore.errors import SchemaMissing, SchemaTooNew, StoreForeign
from alkstore.sql.schema import INDEXES, SQLITE_MIGRATIONS, TABLES, VERSION
from alkstore.sql.tx import Params, Row

__all__ = ["found_version", "install", "verify"]

_OBJECTS = (
    "SELECT type, name FROM sqlite_master WHERE lower(name) GLOB '__alkstore_*' AND type IN ('table', 'index', 'view')"
)


class Readable(Protocol):
    """Whatever runs a statement: a connection of a store, or one that is borrowed."""

    def all(self, sql: str, params: Params = ...) -> list[Row]: ...


def found_version(connection: Readable) -> int:
    """Return the schema's version; 0 if the store's tables are not there.

    Raises:
        StoreForeign: there are tables with the store's names that another program has made.
        SchemaTooNew: a newer alkstore has made them.
    """
    objects = {name: kind for kind, name in connection.all(_OBJECTS)}
    if not objects:
        return 0
    if (
        objects.get("__alkstore_meta") != "table"
        or _columns(connection, "__alkstore_meta") != TABLES["__alkstore_meta"]
    ):
        raise StoreForeign(
            f"this database has {', '.join(sorted(objects)[:3])}, but no table __alkstore_meta as alkstore makes it: "
            "another program uses the names; nothing was touched"
        )
    rows = connection.all("SELECT value FROM __alkstore_meta WHERE key = 'schema_version'")
    if not rows:
        raise StoreForeign("the table __alkstore_meta has no schema_version: another program's; nothing was touched")
    version = rows[0][0]
    if not isinstance(version, int) or version < 1:
        raise StoreForeign(
            f"the table __alkstore_meta says schema_version {version!r}, which no alkstore writes: another program's; "
            "nothing was touched"
        )
    if version > VERSION:
        raise SchemaTooNew(
            f"this store has schema version {version}; this alkstore knows versions up to {VERSION}: upgrade alkstore; "
            "nothing was touched"
        )
    return version


def install(connection: Connection) -> bool:
    """Bring the schema to the present version inside the open transaction; False if it is there already."""
    found = found_version(connection)
    for version in range(found + 1, VERSION + 1):
        connection.script(SQLITE_MIGRATIONS[version])
    if found == VERSION:
        return False
    connection.all(
        "INSERT INTO __alkstore_meta (key, value) VALUES ('schema_version', :version) "
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        {"version": VERSION},
    )
    return True


def verify(connection: Readable) -> None:
    """Check that every table and index of the present version is there.

    Raises:
        StoreForeign: a table has other columns.
        SchemaMissing: a table or an index is not there.
    """
    objects = {name for _, name in connection.all(_OBJECTS)}
    for table, columns in TABLES.items():
        if table in objects and _columns(connection, table) != columns:
            raise StoreForeign(f"the table {table} does not have alkstore's columns: another program's; not touched")
    if missing := sorted({*TABLES, *INDEXES} - objects):
        raise SchemaMissing(f"the store says it has schema version {VERSION}, but it lacks {', '.join(missing)}")


def _columns(connection: Readable, table: str) -> frozenset[str]:
    rows = connection.all("SELECT name FROM pragma_table_info(:table)", {"table": table})
    return frozenset(row[0] for row in rows)
