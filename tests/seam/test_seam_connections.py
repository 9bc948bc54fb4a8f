"""What may be given to the seam, and what is refused: with an error that says what it is and what to do."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import apsw.aio
import pytest
import sqlalchemy
import trio

from alkstore import SchemaMissing, SchemaTooNew, StoreForeign, open_store, seam

ENTRIES: dict[str, Callable[[Any], int]] = {
    "enqueue": lambda conn: seam.enqueue(conn, "q", 1, key="k"),
    "outbox_enqueue": lambda conn: seam.outbox_enqueue(conn, "o", 1, key="k"),
}

entries = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@pytest.fixture
def conn(path: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as conn:
        yield conn


# ---------------------------------------------------------------------------------------------------- asynchronous


class AsyncConnection:
    """As SQLAlchemy's and psycopg's."""

    async def execute(self, sql: str) -> None:
        raise AssertionError


class AsyncSession:
    """As SQLAlchemy's."""

    def begin(self) -> None:
        raise AssertionError


class async_scoped_session:  # noqa: N801 - SQLAlchemy's name
    """As SQLAlchemy's."""


class Connection(threading.Thread):
    """As aiosqlite's."""

    async def commit(self) -> None:
        raise AssertionError

    async def __aenter__(self) -> None:
        raise AssertionError


@entries
@pytest.mark.parametrize("kind", [AsyncConnection, AsyncSession, async_scoped_session, Connection])
def test_an_asynchronous_connection_is_refused(entry: Callable[[Any], int], kind: type) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} is an asynchronous one.*use tx\.enqueue"):
        entry(kind())


@entries
async def test_an_asynchronous_connection_of_apsw_is_refused(entry: Callable[[Any], int], tmp_path: Path) -> None:
    aio: Any = apsw.aio
    with aio.contextvar_set(apsw.async_controller, aio.Trio):
        db: Any = await apsw.Connection.as_async(str(tmp_path / "async.db"))
    with pytest.raises(TypeError, match=r"apsw\.Connection is an asynchronous one"):
        entry(db)
    await db.aclose()


@entries
async def test_a_transaction_of_the_store_is_no_connection(entry: Callable[[Any], int], path: str) -> None:
    async with open_store(path, inline=True) as store, store.transaction() as tx:
        with pytest.raises(TypeError, match="is an asynchronous one"):
            entry(tx)


# ------------------------------------------------------------------------------------------------- no connection


@entries
@pytest.mark.parametrize("what", [None, "app.db", object(), sqlite3, 7], ids=repr)
def test_what_is_no_connection_is_refused(entry: Callable[[Any], int], what: object) -> None:
    with pytest.raises(TypeError, match="conn must be a connection of sqlite3 or apsw, or a SQLAlchemy Connection"):
        entry(what)


@entries
def test_a_cursor_is_no_connection(entry: Callable[[Any], int], conn: sqlite3.Connection) -> None:
    with pytest.raises(TypeError, match=r"not sqlite3\.Cursor"):
        entry(conn.cursor())


@entries
def test_a_sqlalchemy_engine_is_no_connection(entry: Callable[[Any], int]) -> None:
    with pytest.raises(TypeError, match="Engine"):
        entry(sqlalchemy.create_engine("sqlite://"))


def test_a_wrong_argument_is_named_before_a_wrong_connection() -> None:
    with pytest.raises(ValueError, match="priority"):
        seam.enqueue(None, "q", 1, priority=1000)


# --------------------------------------------------------------------------------------------- odd connections


class Subclass(sqlite3.Connection):
    """As embedders make them."""


def _explode(_: object) -> object:
    raise AssertionError("a factory of the embedder's was called")


@pytest.mark.parametrize(
    "row_factory", [sqlite3.Row, lambda _, row: {"row": row}, lambda _, row: None, lambda _, row: _explode(row)]
)
def test_an_odd_row_factory_makes_no_difference_and_stays(conn: sqlite3.Connection, row_factory: Any) -> None:
    conn.row_factory = row_factory
    assert seam.enqueue(conn, "q", 1, key="k") == seam.enqueue(conn, "q", 1, key="k") == 1
    assert conn.row_factory is row_factory


@pytest.mark.parametrize("text_factory", [bytes, bytearray, _explode, lambda text: text.decode().upper()])
def test_an_odd_text_factory_makes_no_difference_and_stays(conn: sqlite3.Connection, text_factory: Any) -> None:
    conn.text_factory = text_factory
    assert seam.enqueue(conn, "q", 1, key="k") == seam.enqueue(conn, "q", 1, key="k") == 1
    assert conn.text_factory is text_factory


def test_a_text_factory_is_put_back_after_an_error(conn: sqlite3.Connection) -> None:
    conn.text_factory = bytes
    conn.execute("PRAGMA query_only = ON")
    with pytest.raises(Exception, match="readonly"):
        seam.enqueue(conn, "q", 1)
    assert conn.text_factory is bytes


def test_a_subclass_is_a_connection(path: str) -> None:
    with closing(sqlite3.connect(path, factory=Subclass)) as conn:
        assert seam.enqueue(conn, "q", 1) == 1


@pytest.mark.parametrize("trace", ["row_trace", "exec_trace"])
def test_an_apsw_trace_makes_no_difference(path: str, trace: str) -> None:
    with closing(apsw.Connection(path)) as conn:
        setattr(conn, trace, (lambda _, row: {"row": row}) if trace == "row_trace" else (lambda *_: True))
        assert seam.enqueue(conn, "q", 1, key="k") == seam.enqueue(conn, "q", 1, key="k") == 1


def test_a_closed_connection_says_so(path: str) -> None:
    conn = sqlite3.connect(path)
    conn.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        seam.enqueue(conn, "q", 1)


def test_a_connection_of_another_thread_says_so(conn: sqlite3.Connection) -> None:
    errors = []

    def use() -> None:
        try:
            seam.enqueue(conn, "q", 1)
        except sqlite3.ProgrammingError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "thread" in errors[0]


async def test_it_may_be_used_in_a_thread(path: str) -> None:
    def enqueue() -> int:
        with closing(sqlite3.connect(path)) as conn, conn:
            return seam.enqueue(conn, "q", 1)

    assert await trio.to_thread.run_sync(enqueue) == 1


# ------------------------------------------------------------------------------------------------------- schemas


@entries
@pytest.mark.parametrize("driver", [sqlite3.connect, apsw.Connection], ids=["sqlite3", "apsw"])
def test_a_database_without_the_stores_tables_says_what_to_do(
    entry: Callable[[Any], int], driver: Callable[[str], Any], tmp_path: Path
) -> None:
    with closing(driver(str(tmp_path / "other.db"))) as conn:
        conn.execute("BEGIN")
        with pytest.raises(SchemaMissing, match=r"other\.db has no tables of alkstore: open it with open_store first"):
            entry(conn)


def test_a_database_in_memory_has_no_tables_of_the_store() -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        conn.text_factory = bytes
        with pytest.raises(SchemaMissing, match="this database has no tables of alkstore"):
            seam.enqueue(conn, "q", 1)


def test_a_newer_store_is_not_touched(conn: sqlite3.Connection) -> None:
    conn.execute("UPDATE __alkstore_meta SET value = 99 WHERE key = 'schema_version'")
    with pytest.raises(SchemaTooNew, match="upgrade alkstore"):
        seam.enqueue(conn, "q", 1)


def test_tables_of_another_program_are_not_touched(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as conn:
        conn.execute("CREATE TABLE __alkstore_meta (mine)")
        with pytest.raises(StoreForeign, match="nothing was touched"):
            seam.enqueue(conn, "q", 1)
