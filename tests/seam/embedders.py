"""The connections that an embedder may already have, behind one face: how each begins, commits and rolls back."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import apsw
import sqlalchemy
from attrs import define, field, frozen
from sqlalchemy import event, orm

__all__ = ["KINDS", "Embedder", "Kind", "core", "core_autocommit", "session"]

PATIENCE_S = 5.0
"""A store of the same test may have the write lock at the moment, in its thread."""


@define(eq=False)
class Embedder:
    """One connection of the embedder's, as he uses it."""

    conn: Any
    """What he gives to the seam."""
    begin: Callable[[], object]
    commit: Callable[[], object]
    rollback: Callable[[], object]
    _execute: Callable[[str], list[tuple[Any, ...]]]
    _close: Callable[[], object]

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        return self._execute(sql)

    def order(self, total: int = 42) -> None:
        """Write a row of his own."""
        self._execute(f"INSERT INTO orders (total) VALUES ({total})")

    def close(self) -> None:
        self._close()


@frozen
class Kind:
    """A way to have a connection."""

    name: str
    open: Callable[[str], Embedder] = field(repr=False)
    driver: str = "sqlite3"
    """Which copy of SQLite it speaks to."""
    commits_alone: bool = False
    """Without a transaction each statement is committed by itself."""
    never_alone: bool = False
    """There always is a transaction: the next one is open as soon as one has ended."""


def _stdlib(path: str, **options: Any) -> Embedder:
    conn = sqlite3.connect(path, timeout=PATIENCE_S, **options)
    explicit = conn.isolation_level is None or getattr(conn, "autocommit", -1) is True

    def begin() -> None:
        if explicit:
            conn.execute("BEGIN IMMEDIATE")

    return Embedder(
        conn,
        begin,
        (lambda: conn.execute("COMMIT")) if explicit else conn.commit,
        (lambda: conn.execute("ROLLBACK")) if explicit else conn.rollback,
        lambda sql: conn.execute(sql).fetchall(),
        conn.close,
    )


def _apsw(path: str) -> Embedder:
    conn = apsw.Connection(path)
    conn.set_busy_timeout(int(PATIENCE_S * 1000))
    return Embedder(
        conn,
        lambda: conn.execute("BEGIN IMMEDIATE"),
        lambda: conn.execute("COMMIT"),
        lambda: conn.execute("ROLLBACK"),
        lambda sql: list(conn.execute(sql)),
        conn.close,
    )


def _engine(path: str, *, immediate: bool) -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", connect_args={"timeout": PATIENCE_S})
    if immediate:  # the recipe of SQLAlchemy's manual for pysqlite

        @event.listens_for(engine, "connect")
        def connect(dbapi_connection: Any, _: object) -> None:
            dbapi_connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(conn: sqlalchemy.Connection) -> None:
            conn.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _rows(result: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in result] if result.returns_rows else []


def core(engine: sqlalchemy.Engine) -> Embedder:
    """`Connection`, which begins by itself ("commit as you go")."""
    conn = engine.connect()

    def begin() -> None:
        with suppress(sqlalchemy.exc.InvalidRequestError):
            conn.begin()

    def close() -> None:
        conn.close()
        engine.dispose()

    return Embedder(conn, begin, conn.commit, conn.rollback, lambda sql: _rows(conn.exec_driver_sql(sql)), close)


def core_autocommit(engine: sqlalchemy.Engine, begin: str) -> Embedder:
    """`Connection` in AUTOCOMMIT mode, whose transactions are those that the embedder spells out."""
    conn = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def close() -> None:
        conn.close()
        engine.dispose()

    return Embedder(
        conn,
        lambda: conn.exec_driver_sql(begin),
        lambda: conn.exec_driver_sql("COMMIT"),
        lambda: conn.exec_driver_sql("ROLLBACK"),
        lambda sql: _rows(conn.exec_driver_sql(sql)),
        close,
    )


def session(engine: sqlalchemy.Engine, *, scoped: bool = False) -> Embedder:
    session: Any = orm.scoped_session(orm.sessionmaker(engine)) if scoped else orm.Session(engine)

    def begin() -> None:
        with suppress(sqlalchemy.exc.InvalidRequestError):
            session.begin()

    def close() -> None:
        session.close()
        engine.dispose()

    return Embedder(
        session,
        begin,
        session.commit,
        session.rollback,
        lambda sql: _rows(session.connection().exec_driver_sql(sql)),
        close,
    )


KINDS = [
    Kind("sqlite3-legacy", _stdlib),
    Kind("sqlite3-legacy-immediate", lambda path: _stdlib(path, isolation_level="IMMEDIATE")),
    Kind("sqlite3-none", lambda path: _stdlib(path, isolation_level=None), commits_alone=True),
    Kind("apsw", _apsw, driver="apsw", commits_alone=True),
    Kind("sqlalchemy-core", lambda path: core(_engine(path, immediate=False))),
    Kind("sqlalchemy-core-immediate", lambda path: core(_engine(path, immediate=True))),
    Kind(
        "sqlalchemy-core-autocommit",
        lambda path: core_autocommit(_engine(path, immediate=False), "BEGIN IMMEDIATE"),
        commits_alone=True,
    ),
    Kind("sqlalchemy-session", lambda path: session(_engine(path, immediate=False))),
    Kind("sqlalchemy-session-immediate", lambda path: session(_engine(path, immediate=True))),
    Kind("sqlalchemy-scoped-session", lambda path: session(_engine(path, immediate=False), scoped=True)),
]

if sys.version_info >= (3, 12):
    KINDS += [
        Kind("sqlite3-autocommit-true", lambda path: _stdlib(path, autocommit=True), commits_alone=True),
        Kind("sqlite3-autocommit-false", lambda path: _stdlib(path, autocommit=False), never_alone=True),
    ]
