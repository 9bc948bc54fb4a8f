"""Two copies of SQLite in one process drop each other's locks on a file: the second is refused, the damage noticed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
import trio

from alkstore import StopToken, Store, open_store
from alkstore.engines import files
from alkstore.errors import MixedSQLite
from tests.alkstore.engines.enginekit import (
    durable,
    engine_of,
    error,
    gathered,
    marked_store,
    marks,
    open_files,
    spy,
    write_lock,
)

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
DRIVERS = pytest.mark.parametrize(("first", "second"), [("sqlite3", "apsw"), ("apsw", "sqlite3")])


def test_two_copies_lose_acknowledged_commits(tmp_path: Path) -> None:
    """The fact that this is about, in a process of its own."""
    path = tmp_path / "a.db"
    code = """
import apsw, os, signal, sqlite3, sys
store = apsw.Connection(sys.argv[1])
store.execute("PRAGMA journal_mode = WAL").fetchall()
store.execute("CREATE TABLE jobs (x)")
other = sqlite3.connect(sys.argv[1])
other.execute("SELECT * FROM jobs").fetchall()
other.close()
for n in range(100):
    store.execute("INSERT INTO jobs VALUES (?)", (n,))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    with closing(sqlite3.connect(path)) as after:
        assert after.execute("SELECT count(*) FROM jobs").fetchone()[0] < 100


@INLINE
@DRIVERS
async def test_a_second_copy_is_refused_and_the_first_store_goes_on_unharmed(
    tmp_path: Path, inline: bool, first: str, second: str
) -> None:
    """It is refused before it has opened the file: even its closing would drop the locks of the first."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, driver=first) as store:
        opened = open_files(path)
        for name in (str(path), f"{tmp_path}/../{tmp_path.name}/a.db"):
            with pytest.raises(MixedSQLite, match=f"open with {first}"):
                async with open_store(name, inline=inline, driver=second):
                    pass
        assert open_files(path) == opened
        await refused_to_others(path)
        assert await engine_of(store).run(marks("a")) == "a"
        assert (await store.health()).wal_bytes > 0
    assert durable(path) == ["a"]
    async with open_store(path, driver=second):  # when the first has closed, either may
        pass


async def refused_to_others(path: Path) -> None:
    """The store's locks still hold: another process cannot take its log away."""
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM marks').fetchall(); c.close()"
    )
    await trio.run_process([sys.executable, "-c", code, str(path)])
    assert await trio.Path(f"{path}-wal").exists()


async def test_a_link_to_the_file_is_the_same_file(tmp_path: Path) -> None:
    path, link, hard = tmp_path / "a.db", tmp_path / "link.db", tmp_path / "hard.db"
    link.symlink_to(path)
    async with marked_store(path):
        os.link(path, hard)
        for name in (link, hard):
            with pytest.raises(MixedSQLite):
                async with open_store(name, driver="apsw"):
                    pass


async def test_several_stores_of_one_driver_share_a_file_and_the_last_one_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with open_store(path) as a:
        async with open_store(path) as b:
            id = await a.queue("q").enqueue(1)
            assert await b.get_job(id) is not None
        with pytest.raises(MixedSQLite):
            async with open_store(path, driver="apsw"):
                pass
    async with open_store(path, driver="apsw"):
        pass
    assert not files._opened


async def test_a_refused_or_failed_opening_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"not a database at all, but long enough" * 100)
    with pytest.raises(Exception, match="damaged"):
        async with open_store(path):
            pass
    assert not files._opened
    async with open_store(":memory:"), open_store(":memory:", driver="apsw"):
        assert not files._opened


async def test_two_copies_may_have_two_files(tmp_path: Path) -> None:
    async with open_store(tmp_path / "a.db"), open_store(tmp_path / "b.db", driver="apsw"):
        pass


# --------------------------------------------------------------------------------- the log is taken away


@INLINE
@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_without_its_log_the_store_stops_writing_and_says_why(tmp_path: Path, inline: bool, how: str) -> None:
    """What it would write then nobody would ever find."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        await engine_of(store).run(marks("before"))
        os.unlink(f"{path}-wal")
        if how == "replaced":
            with open(f"{path}-wal", "wb"):  # noqa: ASYNC230 - it is ours, not SQLite's
                pass
        for _ in range(2):
            with pytest.raises(MixedSQLite, match="-wal was taken away"):
                await engine_of(store).run(marks("after"))
        with pytest.raises(MixedSQLite):
            await engine_of(store).begin()
        with pytest.raises(MixedSQLite):
            await store.transact(lambda tx: tx.execute("INSERT INTO marks (name) VALUES ('after')"))
        spied = spy(store)
    assert not [sql for sql in spied.log if "checkpoint" in sql], "closing wrote what it had into the file"
    assert open_files(path) == []


@INLINE
async def test_all_who_wait_are_told_so(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store, gathered(store) as units:
        with write_lock(path):
            for name in "abc":
                await units.submit(name)
            os.unlink(f"{path}-wal")
    errors = [error(answer) for answer in units.answers.values()]
    assert [type(e) for e in errors] == [MixedSQLite] * 3
    assert len({id(e) for e in errors}) == 3


async def test_a_foreign_copy_that_closes_the_file_is_noticed(tmp_path: Path) -> None:
    """The embedder's own connection, of the other copy: its close takes the log away under us."""
    path = tmp_path / "a.db"
    async with marked_store(path, driver="apsw") as store:
        other = sqlite3.connect(path)
        other.execute("SELECT * FROM marks").fetchall()
        other.close()
        with pytest.raises(MixedSQLite, match="another copy of SQLite in this process"):
            await engine_of(store).run(marks("a"))


# -------------------------------------------------------------------------------- a program that uses apsw


@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("target", ["file", ":memory:"])
async def test_everything_works_with_apsw(tmp_path: Path, inline: bool, target: str) -> None:
    path = target if target == ":memory:" else str(tmp_path / "a.db")
    async with open_store(path, driver="apsw", inline=inline, synchronous="normal") as store:
        await use_everything(store)


async def use_everything(store: Store) -> None:
    queue = store.queue("q", visibility=30, max_attempts=2, backoff=0)
    ids = await queue.enqueue_many([{"n": n, "big": 10**30, "nul": "\0", "owl": "🦉"} for n in range(4)])
    assert await queue.enqueue("keyed", key="k", headers={"h": "1"}, priority=5) == await queue.enqueue(0, key="k")
    jobs = await queue.claim("w", 5)
    assert [job.payload for job in jobs][:2] == ["keyed", {"n": 0, "big": 10**30, "nul": "\0", "owl": "🦉"}]
    assert await jobs[0].heartbeat()
    assert await jobs[0].ack()
    assert not await jobs[0].ack()
    assert await jobs[1].retry("again\0", 0)
    assert await jobs[2].fail("never")
    assert await queue.cancel_job(jobs[3].id)
    (again,) = await queue.claim("w")
    assert again.attempt == 2
    assert (await queue.counts()).dead == 2
    assert await store.get_job(ids[0]) is not None

    async with store.lock("l").hold(ttl=30) as held:
        assert held.fencing_token == 1
        assert await store.lock("l").acquire(1) is None

    async with store.transaction() as tx:
        await tx.execute("CREATE TABLE IF NOT EXISTS own (x)")
        async with tx.savepoint():
            assert await tx.execute("INSERT INTO own VALUES (?), (?) RETURNING x", (1, 2)) == [(1,), (2,)]
        with suppress(LookupError):
            async with tx.savepoint():
                await tx.execute("DELETE FROM own")
                raise LookupError
        await tx.outbox_enqueue("mail", {"to": "bob"})
    assert await store.transact(lambda tx: tx.execute("SELECT count(*) FROM own")) == [(2,)]

    sent: list[object] = []

    async def deliver(message: object) -> None:
        sent.append(message)

    assert await store.outbox("mail").run_once("w", deliver)
    assert len(sent) == 1

    stop = StopToken()
    await store.schedule("s", "@every 1s", "fired", {"x": 1})
    fired = store.queue("fired")
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run_schedules, stop)
        with trio.fail_after(10):
            (job,) = await fired.claim("w", wait=5)
        assert job.schedule == "s"
        assert await job.ack()
        stop.stop()
    assert await store.unschedule("s")
    assert (await store.health()).queues
