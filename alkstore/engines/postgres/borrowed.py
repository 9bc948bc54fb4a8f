"""The `Tx` of a transaction that is the program's own, on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import psycopg
from attrs import define, field
from psycopg.rows import tuple_row

from alkstore.engines.postgres.connection import LOCK, NOW, mapped
from alkstore.engines.postgres.notice import channel, notice
from alkstore.engines.postgres.statements import quoted, translate
from alkstore.errors import SchemaMissing, SchemaTooNew, StoreError, StoreForeign
from alkstore.sql.schema import VERSION
from alkstore.sql.tx import Params, Row

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["BorrowedTx", "begins_by_itself", "check", "execute", "in_transaction", "is_two_phase"]

_checked: WeakKeyDictionary[Connection[Any], set[str]] = WeakKeyDictionary()
"""The schemas that have the present version, as each connection has seen."""


@define(eq=False)
class BorrowedTx:
    """Who commits it is not us: so a notice is sent in the transaction, and goes out with its commit."""

    _execute: Callable[[str, Params], list[Row]]
    _schema: str
    _given: int | None
    """What the time is by the caller; None: by the server's clock."""
    _two_phase: bool
    """The server prepares no transaction that has sent a notice: its jobs are found when workers look regularly."""
    _moment: int | None = field(default=None, init=False)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        return self._execute(translate(sql, self._schema), params)

    def one(self, sql: str, params: Params = {}) -> Row | None:  # noqa: B006 - never changed
        rows = self.all(sql, params)
        return rows[0] if rows else None

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        return [self.all(sql, one) for one in params]

    def lock(self, sql: str, params: Params = {}) -> None:  # noqa: B006 - never changed
        self._moment = self._execute(LOCK.format(translate(sql, self._schema)), params)[0][1]

    def now(self) -> int:
        if self._given is not None:
            return self._given
        if self._moment is None:
            self._moment = self._execute(f"SELECT {NOW}", ())[0][0]
        return self._moment

    def touch(self, topic: str) -> None:
        if self._two_phase:
            return
        told = {"channel": channel(self._schema), "notice": notice([topic])}
        self._execute("SELECT pg_notify(%(channel)s, %(notice)s)", told)

    def report(self, kind: str, subject: str, **details: object) -> None:
        """Events tell of what a store of this process has committed."""


def execute(connection: Connection[Any], sql: Any, params: Params) -> list[Row]:
    """Run a statement, whatever cursors and rows the program prefers on this connection."""
    try:
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall()
    except psycopg.Error as error:
        raise mapped(error) from error


def in_transaction(connection: Connection[Any]) -> bool:
    """Whether what is executed next will be committed together with something.

    In a pipeline that is known of what the server has answered: so what was sent is waited for.
    """
    if begins_by_itself(connection):
        return True
    if connection.info.pipeline_status != psycopg.pq.PipelineStatus.OFF:
        try:
            with connection.pipeline() as pipeline:
                pipeline.sync()
        except psycopg.Error as error:
            raise mapped(error) from error
    return connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE


def is_two_phase(connection: Connection[Any]) -> bool:
    """Whether the program has begun with `tpc_begin`, as far as psycopg lets that be known."""
    return getattr(connection, "_tpc", None) is not None


def begins_by_itself(connection: Connection[Any]) -> bool:
    """Whether the next statement begins a transaction, which stays open."""
    return not connection.autocommit


def check(connection: Connection[Any], run: Callable[[str, Params], list[Row]], schema: str) -> None:
    """Raise if `schema` has no store of this version. Once for each connection, and without a statement that fails:
    that would spoil the program's transaction.
    """
    if connection.info.encoding != "utf-8":
        raise StoreError(
            f"this connection's client_encoding means {connection.info.encoding}, which cannot say every text of a "
            "store: connect with client_encoding=UTF8"
        )
    seen = _checked.setdefault(connection, set())
    if schema in seen:
        return
    meta = f"{quoted(schema)}.__alkstore_meta"
    columns = run(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%(meta)s) AND attnum > 0", {"meta": meta}
    )
    if not columns:
        raise SchemaMissing(f"the schema {schema!r} has no tables of alkstore: open it with open_store first")
    if {name for (name,) in columns} != {"key", "value"}:
        raise StoreForeign(f"the table {meta} is not alkstore's: another program uses the name")
    sql = f"SELECT value FROM {meta.replace('%', '%%')} WHERE key = %(key)s"
    version = next((row[0] for row in run(sql, {"key": "schema_version"})), 0)
    if version > VERSION:
        raise SchemaTooNew(f"the schema {schema!r} has version {version}; this alkstore knows up to {VERSION}: upgrade")
    if version < VERSION:
        raise SchemaMissing(
            f"the schema {schema!r} has version {version} of alkstore's tables: open it with open_store"
        )
    seen.add(schema)
