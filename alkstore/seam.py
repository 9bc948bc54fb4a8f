"""Enqueue through a connection that the program already has, so that its own writes and the job commit together."""

from __future__ import annotations

import inspect
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from attrs import define, frozen

from alkstore.engines.driver import mapped
from alkstore.engines.files import refuse_other_copy
from alkstore.engines.migrate import found_version
from alkstore.errors import SchemaMissing, StoreBusy, StoreError
from alkstore.every import MAX_MS
from alkstore.job import Stamp
from alkstore.names import check_name
from alkstore.outbox import OUTBOX_STAMP, outbox_key, outbox_queue
from alkstore.payload import JSON
from alkstore.sql import jobs
from alkstore.sql.schema import VERSION
from alkstore.sql.tx import Params, Row, Tx
from alkstore.values import Seconds, integer, moment

__all__ = ["enqueue", "outbox_enqueue"]


def enqueue(
    conn: Any,
    queue: str,
    payload: JSON,
    *,
    now: datetime | int | None = None,
    visibility: Seconds = 300,
    max_attempts: int = 3,
    backoff: Seconds = 5,
    priority: int = 0,
    delay: Seconds | None = None,
    run_at: datetime | None = None,
    expires: Seconds | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    schema: str = "alkstore",
) -> int:
    """Enqueue a job through `conn` and return its id; it exists once you commit, and not if you roll back.

    `conn` is a connection to the store's own SQLite file, of `sqlite3` or `apsw`, or to its PostgreSQL database, of
    `psycopg`; or a SQLAlchemy `Connection` or ORM `Session` on one of these. Nothing is begun, committed or rolled back
    here: without an open transaction the job is committed as any single statement of this connection would be. On
    SQLite begin with BEGIN IMMEDIATE if you read before you write. `now` is an aware datetime, or milliseconds since
    the epoch; None: the machine's clock, or the server's. `schema` is that of a PostgreSQL store. The other options are
    those of `Queue` and `Queue.enqueue`. Workers in all processes are woken by your commit.

    Blocks for as long as your connection does; use it where you use the connection.

    Raises:
        InvalidName, ReservedName, InvalidPayload, TypeError, ValueError: before anything is sent to the database.
        TypeError: `conn` is asynchronous, or no connection at all.
        MixedSQLite: this process has the file open with another copy of SQLite.
        SchemaMissing, SchemaTooNew, StoreForeign: the file has no store of this version; open it with `open_store`.
        StoreBusy: somebody else writes, or your transaction has read an old snapshot (SQLITE_BUSY_SNAPSHOT).
    """
    job = Stamp.of(visibility, max_attempts, backoff, None).job(
        check_name(queue, "queue"),
        payload,
        priority=priority,
        delay=delay,
        run_at=run_at,
        expires=expires,
        key=key,
        headers=headers,
    )
    return jobs.enqueue(_checked(_borrowed(conn), now, schema), job)


def outbox_enqueue(
    conn: Any,
    name: str,
    payload: JSON,
    *,
    now: datetime | int | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: Seconds | None = None,
    priority: int = 0,
    schema: str = "alkstore",
) -> int:
    """Put a message into the outbox `name` through `conn` and return its id; see `enqueue` and `Outbox.enqueue`.

    Raises, beyond what `enqueue` does:
        ValueError: no transaction is open: the point of an outbox is that the message commits with what it tells of.
    """
    job = OUTBOX_STAMP.job(
        outbox_queue(name), payload, key=outbox_key(key), headers=headers, delay=delay, priority=priority
    )
    borrowed = _borrowed(conn)
    if not borrowed.in_transaction:
        raise ValueError(
            "no transaction is open on this connection: a message of an outbox commits together with what it tells of, "
            "so begin first (BEGIN IMMEDIATE), write, and call outbox_enqueue before you commit"
        )
    return jobs.enqueue(_checked(borrowed, now, schema), job)


_AT_ONCE = {"stream_results": False, "yield_per": None}
"""Options of SQLAlchemy: the program may want its own results bit by bit, by cursors that take SELECT alone."""


@frozen
class _Borrowed:
    """Somebody else's connection: how to execute on it."""

    driver: str
    """Which copy of SQLite it speaks to, or "psycopg"."""
    in_transaction: bool
    execute: Callable[[str, Params], list[Row]]
    raw: Any = None
    """The connection itself, of psycopg."""


@define(eq=False)
class SeamTx:
    """The `Tx` of somebody else's transaction: who commits it is not us, so there is nobody to wake from here."""

    _execute: Callable[[str, Params], list[Row]]
    _moment: int

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        return self._execute(sql, params)

    def one(self, sql: str, params: Params = {}) -> Row | None:  # noqa: B006 - never changed
        rows = self._execute(sql, params)
        return rows[0] if rows else None

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        return [self.all(sql, one) for one in params]

    def lock(self, sql: str, params: Params = {}) -> None:  # noqa: B006 - never changed
        """SQLite has one writer at a time."""

    def now(self) -> int:
        return self._moment

    def touch(self, topic: str) -> None:
        """The commit itself wakes the workers: their stores see that another connection has written."""

    def report(self, kind: str, subject: str, **details: object) -> None:
        """Events tell of what a store of this process has committed."""


def _checked(borrowed: _Borrowed, now: datetime | int | None, schema: str) -> Tx:
    """Return the transaction, once it is sure that the store's tables are there and this copy of SQLite may write.

    On SQLite each time anew: it costs microseconds, and a connection of `sqlite3` cannot be remembered safely.
    """
    ms = None
    if now is not None:
        ms = moment(now, "now") if isinstance(now, datetime) else integer(now, "now", 0, MAX_MS)
    if borrowed.raw is not None:
        return _on_postgres(borrowed, ms, check_name(schema, "schema"))
    tx = SeamTx(borrowed.execute, time.time_ns() // 1_000_000 if ms is None else ms)
    path = next((os.fsdecode(row[2]) for row in tx.all("PRAGMA database_list") if row[0] == 0), "")
    refuse_other_copy(path, borrowed.driver)
    if _has_present_version(tx):
        return tx
    found = found_version(tx)
    raise SchemaMissing(
        f"{path or 'this database'} has {f'version {found} of' if found else 'no'} tables of alkstore: open it with "
        "open_store first"
    )


def _on_postgres(borrowed: _Borrowed, now: int | None, schema: str) -> Tx:
    from alkstore.engines.postgres import borrowed as postgres  # noqa: PLC0415 - psycopg is an extra

    postgres.check(borrowed.raw, borrowed.execute, schema)
    return postgres.BorrowedTx(borrowed.execute, schema, now, postgres.is_two_phase(borrowed.raw))


def _has_present_version(tx: SeamTx) -> bool:
    if not tx.all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '__alkstore_meta'"):
        return False
    try:
        return tx.one("SELECT value FROM __alkstore_meta WHERE key = 'schema_version'") == (VERSION,)
    except StoreBusy:
        raise
    except StoreError:  # another program's table, perhaps: `found_version` tells
        return False


def _borrowed(conn: Any) -> _Borrowed:
    if isinstance(conn, sqlite3.Connection):
        return _Borrowed("sqlite3", conn.in_transaction, lambda sql, params: _stdlib(conn, sql, params))
    apsw = sys.modules.get("apsw")
    if apsw is not None and isinstance(conn, apsw.Connection) and not _is_async(conn):
        return _Borrowed("apsw", bool(conn.in_transaction), lambda sql, params: _apsw(apsw, conn, sql, params))
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(conn, psycopg.Connection):
        return _psycopg(conn)
    alchemy = sys.modules.get("sqlalchemy")
    if alchemy is not None:
        has_begun = None
        orm = sys.modules.get("sqlalchemy.orm")
        if orm is not None and isinstance(conn, orm.scoped_session):
            conn = conn()
        if orm is not None and isinstance(conn, orm.Session):
            has_begun = bool(conn.in_transaction())  # asking for its connection begins
            conn = _connection(alchemy, conn)
        if isinstance(conn, alchemy.Connection):
            return _alchemy(alchemy, conn, bool(conn.in_transaction()) if has_begun is None else has_begun)
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    if _is_async(conn):
        raise TypeError(
            f"conn must be a synchronous connection: this {kind} is an asynchronous one, which cannot be used from "
            "here; in a transaction of the store use tx.enqueue or tx.outbox_enqueue"
        )
    raise TypeError(
        "conn must be a connection of sqlite3 or apsw, or a SQLAlchemy Connection or Session, or a psycopg Connection, "
        f"not {kind}"
    )


def _is_async(conn: Any) -> bool:
    return (
        "async" in type(conn).__name__.lower()
        or bool(getattr(conn, "is_async", False))
        or any(
            inspect.iscoroutinefunction(getattr(type(conn), name, None)) for name in ("execute", "commit", "__aenter__")
        )
    )


def _stdlib(conn: sqlite3.Connection, sql: str, params: Params) -> list[Row]:
    cursor = conn.cursor()
    cursor.row_factory = None  # the program's own factories may give anything
    text_factory, conn.text_factory = conn.text_factory, str
    try:
        return cursor.execute(sql, params).fetchall()
    except sqlite3.Error as error:
        raise _told(mapped(getattr(error, "sqlite_errorcode", None), error)) from error
    finally:
        conn.text_factory = text_factory
        cursor.close()


def _apsw(apsw: Any, conn: Any, sql: str, params: Params) -> list[Row]:
    cursor = conn.cursor()
    cursor.row_trace = None
    try:
        return list(cursor.execute(sql, params))
    except apsw.Error as error:
        raise _told(mapped(getattr(error, "extendedresult", None), error)) from error
    finally:
        cursor.close()


def _alchemy(alchemy: Any, conn: Any, has_begun: bool) -> _Borrowed:
    if (conn.dialect.name, conn.dialect.driver) == ("postgresql", "psycopg"):
        return _alchemy_psycopg(alchemy, conn, has_begun)
    if conn.dialect.name != "sqlite":
        raise TypeError(
            f"the store is on SQLite, or on PostgreSQL by psycopg; this SQLAlchemy connection speaks to "
            f"{conn.dialect.name} by {conn.dialect.driver}"
        )
    raw = conn.connection.driver_connection
    below = _borrowed(raw)
    # In SQLAlchemy's AUTOCOMMIT mode its transaction is none: sqlite3 neither has one open nor begins one by itself.
    begins = below.in_transaction or _begins_by_itself(raw)

    def execute(sql: str, params: Params) -> list[Row]:
        try:  # through SQLAlchemy, which begins its own transaction and emits its events
            return [tuple(row) for row in conn.exec_driver_sql(sql, params, execution_options=_AT_ONCE)]
        except alchemy.exc.DBAPIError as error:
            raise _told(mapped(getattr(error.orig, "sqlite_errorcode", None), error)) from error

    return _Borrowed(below.driver, has_begun and begins, execute)


def _psycopg(conn: Any) -> _Borrowed:
    from alkstore.engines.postgres import borrowed as postgres  # noqa: PLC0415 - psycopg is an extra

    return _Borrowed(
        "psycopg", postgres.in_transaction(conn), lambda sql, params: postgres.execute(conn, sql, params), conn
    )


def _alchemy_psycopg(alchemy: Any, conn: Any, has_begun: bool) -> _Borrowed:
    from alkstore.engines.postgres.connection import mapped as mapped_of_postgres  # noqa: PLC0415 - psycopg is an extra

    raw = conn.connection.driver_connection

    def execute(sql: str, params: Params) -> list[Row]:
        try:  # through SQLAlchemy, which begins its own transaction and emits its events
            return [tuple(row) for row in conn.exec_driver_sql(sql, params or None, execution_options=_AT_ONCE)]
        except alchemy.exc.DBAPIError as error:
            raise mapped_of_postgres(error.orig) from error

    return _Borrowed("psycopg", has_begun and _psycopg(raw).in_transaction, execute, raw)


def _begins_by_itself(raw: Any) -> bool:
    """Whether a connection of `sqlite3` begins a transaction before it writes, as it does in its legacy mode."""
    return getattr(raw, "autocommit", -1) == -1 and getattr(raw, "isolation_level", None) is not None


def _connection(alchemy: Any, session: Any) -> Any:
    try:
        return session.connection()
    except alchemy.exc.DBAPIError as error:  # the program's own BEGIN IMMEDIATE, most likely
        raise _told(mapped(getattr(error.orig, "sqlite_errorcode", None), error)) from error


def _told(error: StoreError) -> StoreError:
    if not isinstance(error, StoreBusy):
        return error
    return StoreBusy(
        f"{error}; begin your transaction with BEGIN IMMEDIATE: one that reads first cannot always become a writer "
        "(SQLITE_BUSY_SNAPSHOT is final for it: roll back and start again)"
    )
