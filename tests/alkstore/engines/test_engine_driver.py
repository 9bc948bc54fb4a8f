"""The drivers: two copies of SQLite behind one face, whose errors are ours, with the driver's own as the cause."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from alkstore.engines import driver as driver_module
from alkstore.engines.driver import Connection, DiskError, Driver, load_driver, mapped
from alkstore.errors import (
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

CODES = {
    apsw.SQLITE_BUSY: StoreBusy,
    apsw.SQLITE_BUSY_SNAPSHOT: StoreBusy,
    apsw.SQLITE_BUSY_RECOVERY: StoreBusy,
    apsw.SQLITE_LOCKED: StoreBusy,
    apsw.SQLITE_LOCKED_SHAREDCACHE: StoreBusy,
    apsw.SQLITE_PERM: StoreReadOnly,
    apsw.SQLITE_READONLY: StoreReadOnly,
    apsw.SQLITE_READONLY_DBMOVED: StoreReadOnly,
    apsw.SQLITE_IOERR: DiskError,
    apsw.SQLITE_IOERR_WRITE: DiskError,
    apsw.SQLITE_IOERR_FSYNC: DiskError,
    apsw.SQLITE_CORRUPT: StoreCorrupt,
    apsw.SQLITE_CORRUPT_INDEX: StoreCorrupt,
    apsw.SQLITE_NOTADB: StoreCorrupt,
    apsw.SQLITE_FULL: StoreFull,
    apsw.SQLITE_CANTOPEN: StoreUnavailable,
    apsw.SQLITE_ERROR: StoreError,
    apsw.SQLITE_CONSTRAINT_UNIQUE: StoreError,
    apsw.SQLITE_INTERRUPT: StoreError,
    None: StoreError,
}


@pytest.mark.parametrize(("code", "kind"), CODES.items(), ids=str)
def test_each_result_code_has_its_error(code: int | None, kind: type[StoreError]) -> None:
    error = mapped(code, RuntimeError("the driver's words"))
    assert type(error) is kind
    assert "the driver's words" in str(error)


@pytest.fixture(params=["sqlite3", "apsw"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return load_driver(request.param)


@pytest.fixture
def connection(driver: Driver, tmp_path: Path) -> Iterator[Connection]:
    connection = driver.connect(str(tmp_path / "a.db"))
    connection.all("CREATE TABLE t (x INTEGER PRIMARY KEY, y TEXT NOT NULL UNIQUE)")
    yield connection
    connection.close()


def is_open(connection: Connection) -> bool:
    return connection.in_transaction  # it changes between two looks, which a type checker does not expect


def own_error(driver: Driver) -> type[Exception]:
    return sqlite3.Error if driver.name == "sqlite3" else apsw.Error


def fails(kind: type[StoreError], driver: Driver, connection: Connection, sql: str, *params: Any) -> StoreError:
    with pytest.raises(StoreError) as caught:
        connection.all(sql, *params)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, own_error(driver))
    return caught.value


def test_a_lock_of_somebody_else_is_busy_at_once(driver: Driver, connection: Connection, tmp_path: Path) -> None:
    with closing(driver.connect(str(tmp_path / "a.db"))) as other:
        other.all("BEGIN IMMEDIATE")
        error = fails(StoreBusy, driver, connection, "BEGIN IMMEDIATE")
        assert "locked by somebody else" in str(error)


def test_a_stale_snapshot_is_busy(driver: Driver, connection: Connection, tmp_path: Path) -> None:
    connection.all("PRAGMA journal_mode = WAL")
    with closing(driver.connect(str(tmp_path / "a.db"))) as other:
        connection.all("BEGIN")
        connection.all("SELECT * FROM t")
        other.all("INSERT INTO t VALUES (1, 'a')")
        fails(StoreBusy, driver, connection, "INSERT INTO t VALUES (2, 'b')")


def test_a_read_only_connection(driver: Driver, connection: Connection) -> None:
    connection.all("PRAGMA query_only = ON")
    fails(StoreReadOnly, driver, connection, "INSERT INTO t VALUES (1, 'a')")


def test_a_full_database(driver: Driver, connection: Connection) -> None:
    connection.all(f"PRAGMA max_page_count = {connection.all('PRAGMA page_count')[0][0]}")
    fails(StoreFull, driver, connection, "INSERT INTO t VALUES (1, hex(zeroblob(50000)))")


def test_what_is_not_a_database(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "b.db").write_text("no database" * 100)
    with closing(driver.connect(str(tmp_path / "b.db"))) as connection:
        fails(StoreCorrupt, driver, connection, "SELECT * FROM sqlite_master")


def test_a_damaged_database(driver: Driver, connection: Connection, tmp_path: Path) -> None:
    connection.close()
    content = bytearray((tmp_path / "a.db").read_bytes())
    content[100:200] = b"\xff" * 100
    (tmp_path / "a.db").write_bytes(content)
    with closing(driver.connect(str(tmp_path / "a.db"))) as damaged:
        fails(StoreCorrupt, driver, damaged, "SELECT * FROM t")


def test_what_cannot_be_opened(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        driver.connect(str(tmp_path / "missing" / "a.db")).all("SELECT 1")
    assert isinstance(caught.value.__cause__, own_error(driver))


@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("SELECT nonsense", ()),
        ("no SQL at all", ()),
        ("INSERT INTO t VALUES (1, NULL)", ()),
        ("INSERT INTO t VALUES (?, ?)", (1,)),
        ("INSERT INTO t VALUES (?, ?)", (1, "a", 2)),
        ("SELECT 1; SELECT 2", ()),
    ],
)
def test_any_other_failure_of_a_statement_is_a_store_error(
    driver: Driver, connection: Connection, sql: str, params: tuple[Any, ...]
) -> None:
    with pytest.raises(StoreError) as caught:
        connection.all(sql, params)
    assert type(caught.value) is StoreError
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("second", ["COMMIT", "ROLLBACK", "INSERT INTO t VALUES (2, 'b')"])
def test_one_text_is_one_statement(driver: Driver, connection: Connection, second: str) -> None:
    """apsw would run them all: a COMMIT behind a harmless statement would end the store's own transaction."""
    connection.all("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="one statement at a time"):
        connection.all(f"INSERT INTO t VALUES (1, 'a'); {second}")
    assert connection.in_transaction
    assert connection.all("SELECT x FROM t WHERE x = 2") == []
    connection.all("ROLLBACK")
    assert connection.all("SELECT x FROM t") == []


@pytest.mark.parametrize("end", [";", " ; ", "; -- and nothing else", "\n-- nothing\n", " /* nothing */ ", ";\n"])
def test_what_is_no_statement_may_follow(driver: Driver, connection: Connection, end: str) -> None:
    for _ in range(2):
        assert connection.all(f"SELECT 'a;b'{end}") == [("a;b",)]


def test_many_comments_cost_no_time(driver: Driver, connection: Connection) -> None:
    with pytest.raises(StoreError):
        connection.all("SELECT 1; " + "/**/" * 5_000 + " SELECT 2")


def test_all_rows_are_read(driver: Driver, connection: Connection) -> None:
    rows = connection.all("INSERT INTO t VALUES (1, 'a'), (2, 'b') RETURNING x, y")
    assert rows == [(1, "a"), (2, "b")]
    assert all(type(row) is tuple for row in rows)
    assert connection.all("SELECT x FROM t WHERE y = :y", {"y": "b"}) == [(2,)]
    assert connection.all("DELETE FROM t") == []


def test_a_script_runs_inside_the_transaction_that_is_open(driver: Driver, connection: Connection) -> None:
    connection.all("BEGIN IMMEDIATE")
    connection.script("-- a; comment\nCREATE TABLE u (x); -- more; of it\nINSERT INTO u VALUES (1);\n")
    assert connection.in_transaction
    connection.all("ROLLBACK")
    assert connection.all("SELECT name FROM sqlite_master WHERE name = 'u'") == []


def test_a_closed_connection_says_closed_and_has_no_transaction(driver: Driver, connection: Connection) -> None:
    connection.all("BEGIN IMMEDIATE")
    connection.close()
    connection.close()
    with pytest.raises(StoreClosed) as caught:
        connection.all("SELECT 1")
    assert isinstance(caught.value.__cause__, own_error(driver))
    assert not connection.in_transaction
    connection.interrupt()


def test_an_error_inside_a_transaction_leaves_it_to_the_caller(driver: Driver, connection: Connection) -> None:
    connection.all("BEGIN IMMEDIATE")
    connection.all("INSERT INTO t VALUES (1, 'a')")
    fails(StoreError, driver, connection, "INSERT INTO t VALUES (2, 'a')")
    assert is_open(connection)
    connection.all("COMMIT")
    assert not is_open(connection)
    assert connection.all("SELECT x FROM t") == [(1,)]


def test_another_driver_is_refused() -> None:
    for name in ("", "pysqlite3", "SQLITE3"):
        with pytest.raises(ValueError, match="driver must be 'sqlite3' or 'apsw'"):
            load_driver(name)


def test_an_old_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module.StdlibDriver, "version", (3, 36, 9))
    with pytest.raises(StoreError, match=r"SQLite 3.36.9 is too old: alkstore needs 3.37"):
        load_driver("sqlite3")


def test_each_driver_tells_its_own_version() -> None:
    assert load_driver("sqlite3").version == sqlite3.sqlite_version_info
    assert ".".join(map(str, load_driver("apsw").version)) == apsw.sqlite_lib_version()
