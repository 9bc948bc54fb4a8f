"""The embedder's connection and a store on one file at once: wake-ups, the write lock, two copies of SQLite."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
import sqlalchemy
import trio

from alkstore import JobHandle, MixedSQLite, StopToken, Store, StoreBusy, StoreError, open_store, seam
from tests.seam.embedders import Embedder, Kind

SOON_S = 5.0
"""A wake-up takes a millisecond; a machine under load gets time."""


@contextmanager
def closed(*connections: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for conn in connections:
            conn.close()


# --------------------------------------------------------------------------------------------------------- waking


async def test_the_commit_wakes_a_worker_of_this_process(embedder: Embedder, path: str, kind: Kind) -> None:
    stop, got = StopToken(), []

    async def handler(job: JobHandle) -> None:
        got.append(job.payload)
        stop.stop()

    async with open_store(path, driver=kind.driver) as store, trio.open_nursery() as nursery:
        await nursery.start(_working, store, handler, stop)
        embedder.begin()
        embedder.order()
        seam.enqueue(embedder.conn, "q", "job")
        await trio.sleep(0.05)
        assert got == []
        with trio.fail_after(SOON_S):
            embedder.commit()
            await stop.wait()
    assert got == ["job"]


async def _working(
    store: Store, handler: Any, stop: StopToken, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    await store.queue("q").work(handler, stop=stop, task_status=task_status)


PROGRAM = """
import sqlite3, sys
from alkstore import seam
conn = sqlite3.connect(sys.argv[1])
conn.execute("INSERT INTO orders VALUES (1)")
seam.enqueue(conn, "q", "from another process")
conn.commit()
"""


async def test_the_commit_of_another_process_wakes_a_waiting_claim(path: str) -> None:
    async with open_store(path) as store, trio.open_nursery() as nursery:
        got: list[object] = []

        async def wait() -> None:
            got.extend(handle.payload for handle in await store.queue("q").claim("w", wait=60))

        nursery.start_soon(wait)
        await trio.run_process([sys.executable, "-c", PROGRAM, path], cwd=Path(__file__).parents[2])
        nursery.cancel_scope.deadline = trio.current_time() + SOON_S
    assert got == ["from another process"]


# --------------------------------------------------------------------------------------------------------- locks


def test_while_somebody_else_writes_it_is_busy(connect: Any, kind: Kind) -> None:
    one, other = connect(), connect()
    other.execute("PRAGMA busy_timeout = 0")
    if not kind.commits_alone:
        other.rollback()
    one.begin()
    one.order()
    with pytest.raises(StoreBusy, match="begin your transaction with BEGIN IMMEDIATE") as caught:
        seam.enqueue(other.conn, "q", 1)
    assert caught.value.__cause__ is not None
    one.rollback()
    if not kind.commits_alone:
        other.rollback()
    other.begin()
    seam.enqueue(other.conn, "q", 1)
    other.commit()


@pytest.mark.parametrize("copy", [sqlite3, apsw], ids=["sqlite3", "apsw"])
def test_a_transaction_that_has_read_an_old_snapshot_is_told_how_to_begin(path: str, copy: Any) -> None:
    reader, writer = (
        (sqlite3.connect(path, isolation_level=None), sqlite3.connect(path, isolation_level=None))
        if copy is sqlite3
        else (apsw.Connection(path), apsw.Connection(path))
    )
    with closed(reader, writer):
        reader.execute("BEGIN")
        list(reader.execute("SELECT * FROM orders"))
        writer.execute("INSERT INTO orders VALUES (1)")
        began = time.monotonic()
        with pytest.raises(StoreBusy, match=r"BEGIN IMMEDIATE.*SQLITE_BUSY_SNAPSHOT is final.*roll back and start"):
            seam.outbox_enqueue(reader, "o", 1)
        assert time.monotonic() - began < 1
        reader.execute("ROLLBACK")
        reader.execute("BEGIN IMMEDIATE")
        seam.outbox_enqueue(reader, "o", 1)
        reader.execute("COMMIT")


def test_a_snapshot_of_sqlalchemy_is_told_how_to_begin_too(path: str) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with closed(writer := sqlite3.connect(path, isolation_level=None)), engine.connect() as conn:
        conn.exec_driver_sql("BEGIN")
        conn.exec_driver_sql("SELECT * FROM orders").all()
        writer.execute("INSERT INTO orders VALUES (1)")
        with pytest.raises(StoreBusy, match="BEGIN IMMEDIATE"):
            seam.outbox_enqueue(conn, "o", 1)
        conn.rollback()
    engine.dispose()


async def test_the_store_waits_for_the_embedders_transaction(embedder: Embedder, path: str, kind: Kind) -> None:
    async with open_store(path, driver=kind.driver) as store, trio.open_nursery() as nursery:
        embedder.begin()
        embedder.order()
        seam.enqueue(embedder.conn, "q", "embedder's")
        nursery.start_soon(store.queue("q").enqueue, "store's")
        await trio.sleep(0.05)
        embedder.commit()
    async with open_store(path, inline=True, driver=kind.driver) as store:
        assert [job.payload for job in await store.queue("q").list()] == ["embedder's", "store's"]


def test_a_database_that_cannot_be_written_says_so(path: str) -> None:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn, pytest.raises(StoreError, match="written"):
        seam.enqueue(conn, "q", 1)


# --------------------------------------------------------------------------------------------- two copies of SQLite


def _other(driver: str, path: str) -> Any:
    return apsw.Connection(path) if driver == "sqlite3" else sqlite3.connect(path, isolation_level=None)


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_another_copy_of_sqlite_than_the_stores_is_refused(path: str, driver: str) -> None:
    async with open_store(path, inline=True, driver=driver) as store:
        await store.queue("q").enqueue("before")
        with closing(_other(driver, path)) as conn:
            for call in (seam.enqueue, seam.outbox_enqueue):
                conn.execute("BEGIN")
                with pytest.raises(MixedSQLite, match=rf"open with {driver}.*use one copy of SQLite for all"):
                    call(conn, "q", 1)
                conn.execute("ROLLBACK")
        await store.queue("q").enqueue("after")
    with closing(_other("apsw" if driver == "sqlite3" else "sqlite3", path)) as conn:
        assert list(conn.execute("PRAGMA integrity_check")) == [("ok",)]
        assert list(conn.execute("SELECT payload FROM __alkstore_jobs")) == [('"before"',), ('"after"',)]


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_another_path_to_the_same_file_is_refused_too(path: str, driver: str, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    async with open_store(path, inline=True, driver=driver):
        with closing(_other(driver, str(link))) as conn, pytest.raises(MixedSQLite):
            seam.enqueue(conn, "q", 1)


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_after_the_store_is_closed_another_copy_may_have_the_file(path: str, driver: str) -> None:
    async with open_store(path, inline=True, driver=driver):
        pass
    with closing(_other(driver, path)) as conn:
        assert seam.enqueue(conn, "q", 1) == 1


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
async def test_another_file_may_have_another_copy(path: str, driver: str, tmp_path: Path) -> None:
    async with open_store(tmp_path / "other.db", inline=True, driver=driver):
        with closing(_other(driver, path)) as conn:
            assert seam.enqueue(conn, "q", 1) == 1


CRASH = """
import os, signal, sys, trio
import apsw, sqlite3
from alkstore import MixedSQLite, open_store, seam

async def main():
    async with open_store(sys.argv[1], driver=sys.argv[2]) as store:
        other = apsw.Connection(sys.argv[1]) if sys.argv[2] == "sqlite3" else sqlite3.connect(sys.argv[1])
        try:
            seam.enqueue(other, "q", 1)
        except MixedSQLite:
            print("refused", flush=True)
        for n in range(100):
            await store.queue("q").enqueue(n)
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_after_the_refusal_no_acknowledged_commit_is_lost(path: str, driver: str) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", CRASH, path, driver],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (killed.stdout, killed.stderr) == ("refused\n", "")
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT count(*) FROM __alkstore_jobs").fetchone() == (100,)
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
