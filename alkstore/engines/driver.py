"""The two copies of SQLite that a store can speak to, behind one small face, and their errors mapped to ours."""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress
from typing import Any, Protocol

from attrs import define

from alkstore.errors import (
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from alkstore.sql.text import uncast
from alkstore.sql.tx import Params, Row

__all__ = ["Connection", "DiskError", "Driver", "WideText", "load_driver", "mapped"]

_NOTHING = re.compile(r"(?>\s|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*+", re.DOTALL)

OLDEST_SQLITE = (3, 37, 0)  # the first with STRICT tables

_BUSY, _LOCKED, _PERM, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 6, 3, 8, 10, 11, 13, 14, 26


class DiskError(StoreError):
    """The disk refused a read, a write or a sync. At COMMIT it leaves the outcome unknown."""


_ERRORS: dict[int, type[StoreError]] = {
    _BUSY: StoreBusy,
    _LOCKED: StoreBusy,
    _PERM: StoreReadOnly,
    _READONLY: StoreReadOnly,
    _IOERR: DiskError,
    _CORRUPT: StoreCorrupt,
    _NOTADB: StoreCorrupt,
    _FULL: StoreFull,
    _CANTOPEN: StoreUnavailable,
}

_WHAT: dict[type[StoreError], str] = {
    StoreBusy: "the database is locked by somebody else",
    StoreReadOnly: "the database cannot be written",
    DiskError: "the disk failed",
    StoreCorrupt: "the database is damaged, or not a SQLite database",
    StoreFull: "the disk is full",
    StoreUnavailable: "the database cannot be opened",
}


class Connection(Protocol):
    """One connection. Every method may block for as long as one statement takes; none waits for a lock."""

    def all(self, sql: str, params: Params = ...) -> list[Row]:
        """Run one statement and fetch all its rows: an unfetched RETURNING row would keep the write lock.

        Raises:
            StoreError: it failed, or `sql` is more than one statement; the driver's exception is the ``__cause__``.
        """

    def script(self, sql: str) -> None:
        """Run several statements, inside the transaction that is open."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open; a closed connection has none."""

    def interrupt(self) -> None:
        """Make the running statement fail, if there is one; may be called from another thread, and when closed."""

    def close(self) -> None: ...


class Driver(Protocol):
    """A copy of SQLite."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> tuple[int, ...]: ...

    def connect(self, path: str) -> Connection: ...


def load_driver(name: str) -> Driver:
    """Return the driver ``sqlite3`` (the standard library's) or ``apsw``.

    Raises:
        ValueError: another name.
        ImportError: ``apsw`` is not installed.
        StoreError: this copy of SQLite is older than 3.37.
    """
    driver: Driver
    if name == "sqlite3":
        driver = StdlibDriver()
    elif name == "apsw":
        driver = ApswDriver()
    else:
        raise ValueError(f"driver must be 'sqlite3' or 'apsw', not {name!r}")
    if driver.version < OLDEST_SQLITE:
        raise StoreError(
            f"SQLite {'.'.join(map(str, driver.version))} is too old: alkstore needs 3.37 or newer (STRICT tables)"
        )
    return driver


def mapped(code: int | None, error: Exception) -> StoreError:
    """Return the error of ours for a driver's `error`, by SQLite's (extended) result code."""
    kind = _ERRORS.get((code or 0) & 0xFF, StoreError)
    return kind(f"{_WHAT[kind]}: {error}" if kind in _WHAT else str(error))


class StdlibDriver:
    """`sqlite3` of the standard library: the copy that Django, SQLAlchemy and most embedders use."""

    name = "sqlite3"
    version = sqlite3.sqlite_version_info

    def connect(self, path: str) -> Connection:
        return StdlibConnection(path)


class StdlibConnection:
    def __init__(self, path: str) -> None:
        try:
            self._raw = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=256
            )
        except sqlite3.Error as error:
            raise mapped(getattr(error, "sqlite_errorcode", _CANTOPEN), error) from error

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        try:
            return self._raw.execute(sql, params).fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
                raise StoreClosed("the connection is closed") from error
            raise mapped(getattr(error, "sqlite_errorcode", None), error) from error

    def script(self, sql: str) -> None:
        # executescript would commit first
        for statement in _statements(sql):
            self.all(statement)

    @property
    def in_transaction(self) -> bool:
        try:
            return self._raw.in_transaction
        except sqlite3.ProgrammingError:  # it is closed
            return False

    def interrupt(self) -> None:
        with suppress(sqlite3.ProgrammingError):
            self._raw.interrupt()

    def close(self) -> None:
        self._raw.close()


class ApswDriver:
    """apsw's own copy of SQLite, for programs that use apsw throughout."""

    name = "apsw"

    def __init__(self) -> None:
        try:
            import apsw  # noqa: PLC0415 - an extra: only who asks for this driver needs it
        except ImportError as error:
            raise ImportError("driver='apsw' needs apsw: install alkstore[apsw]") from error
        self._apsw = apsw

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self._apsw.sqlite_lib_version().split("."))

    def connect(self, path: str) -> Connection:
        return ApswConnection(self._apsw, path)


class ApswConnection:
    def __init__(self, apsw: Any, path: str) -> None:
        self._apsw = apsw
        try:
            self._raw = apsw.Connection(path, statementcachesize=256)
        except apsw.Error as error:
            raise self._as_ours(error) from error
        self._raw.exec_trace = self._only_one
        self._begun = 0

    def _only_one(self, _: object, sql: str, __: object) -> bool:
        # apsw would run all statements of a text: a COMMIT, say, behind a harmless one
        self._begun += 1
        return self._begun == 1 or _NOTHING.fullmatch(sql) is not None

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        self._begun = 0
        try:
            return list(self._raw.execute(sql, params))
        except self._apsw.ExecTraceAbort as error:
            raise StoreError("you can only execute one statement at a time") from error
        except self._apsw.ConnectionClosedError as error:
            raise StoreClosed("the connection is closed") from error
        except self._apsw.Error as error:
            raise self._as_ours(error) from error

    def script(self, sql: str) -> None:
        for statement in _statements(sql):
            self.all(statement)

    @property
    def in_transaction(self) -> bool:
        try:
            return bool(self._raw.in_transaction)
        except self._apsw.ConnectionClosedError:
            return False

    def interrupt(self) -> None:
        with suppress(self._apsw.ConnectionClosedError):
            self._raw.interrupt()

    def close(self) -> None:
        self._raw.close(True)

    def _as_ours(self, error: Any) -> StoreError:
        return mapped(getattr(error, "extendedresult", None) or getattr(error, "result", None), error)


@define(eq=False)
class WideText:
    """A connection to a database in UTF-16, where all text is proper text, and its bytes are not those of UTF-8."""

    _inner: Connection

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        return self._inner.all(uncast(sql), params)

    def script(self, sql: str) -> None:
        self._inner.script(sql)

    @property
    def in_transaction(self) -> bool:
        return self._inner.in_transaction

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


def _statements(script: str) -> list[str]:
    lines = (line.split("--", 1)[0] for line in script.splitlines())
    return [part for part in "\n".join(lines).split(";") if part.strip()]
