"""Schemas for tests: making and dropping thirty tables and indexes takes longer than most tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from attrs import define, field

from alkstore.engines.postgres.schema import prepare
from alkstore.engines.postgres.statements import quoted
from alkstore.sql.schema import TABLES, VERSION

__all__ = ["Schemas", "drop_schema", "in_schema"]

META = "__alkstore_meta"
WITH_IDENTITY = ("__alkstore_jobs", "__alkstore_cron_runs", "__alkstore_cron_events")


def in_schema(url: str, schema: str) -> str:
    """Return the URL of connections whose own tables, too, are in `schema`."""
    return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{schema}"


def drop_schema(url: str, schema: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE".encode())


@define(eq=False)
class Schemas:
    """Lends schemas, and empties each after its use."""

    url: str
    _connection: psycopg.Connection[tuple[Any, ...]] = field(init=False)
    _empty: list[str] = field(factory=list, init=False)

    def __enter__(self) -> Self:
        self._connection = psycopg.connect(self.url, autocommit=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._empty:
            self._do(f"DROP SCHEMA {name} CASCADE")
        self._connection.close()

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Lend an empty one; it is dropped if what the test has left cannot be emptied."""
        if self._empty:
            name = self._empty.pop()
        else:
            name = f"emptied_{secrets.token_hex(4)}"
            prepare(self._connection, name, create=True, may_migrate=True)
        yield name
        try:
            self._clear(name)
        except psycopg.Error:
            self._do(f"DROP SCHEMA IF EXISTS {name} CASCADE")
        else:
            self._empty.append(name)

    def _clear(self, schema: str) -> None:
        rows = self._connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        found = {name for (name,) in rows}
        statements = [f"DROP TABLE {schema}.{quoted(name)} CASCADE" for name in found - TABLES.keys()]
        statements += [f"DELETE FROM {schema}.{name}" for name in TABLES]
        statements += [f"ALTER TABLE {schema}.{name} ALTER id RESTART" for name in WITH_IDENTITY]
        statements.append(f"INSERT INTO {schema}.{META} VALUES ('schema_version', {VERSION}), ('fencing_token', 0)")
        self._do("; ".join(statements))

    def _do(self, statements: str) -> None:
        self._connection.execute(statements.encode())
