"""The database's only write lock: waiting for it can be cancelled, ends after busy_timeout, and costs nothing."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest
import trio
import trio.testing

from alkstore import ManualClock, Store, open_store
from alkstore.errors import StoreBusy, StoreClosed
from alkstore.sql.tx import Tx
from tests.alkstore.engines.enginekit import (
    START,
    Fault,
    durable,
    engine_of,
    error,
    gathered,
    marked_store,
    marks,
    open_files,
    spy,
    until,
    value,
    write_lock,
    write_lock_elsewhere,
)

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


@INLINE
async def test_the_time_behind_a_transaction_of_ones_own_store_does_not_count(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, inline: bool
) -> None:
    """busy_timeout is for the lock in somebody else's hands, which is here for a moment only."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, busy_timeout=1, transaction_timeout=60) as store:
        spied = spy(store)
        async with trio.open_nursery() as nursery, store.transaction():
            nursery.start_soon(engine_of(store).run, marks("late"))
            await trio.sleep(1.5)
            spied.before = Fault(spied, StoreBusy("somebody else has it"), lambda sql: sql == "BEGIN IMMEDIATE")
    assert durable(path) == ["late"]


def test_interrupt_does_not_end_the_drivers_own_busy_wait(tmp_path: Path) -> None:
    """Why the driver's timeout is 0 and the waiting is done in trio."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA journal_mode = WAL")
        holder.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(path, timeout=0.4, isolation_level=None, check_same_thread=False)) as waiter:
            interrupter = threading.Timer(0.1, waiter.interrupt)
            interrupter.start()
            began = time.monotonic()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                waiter.execute("BEGIN IMMEDIATE")
            assert time.monotonic() - began > 0.3
            interrupter.join()


@INLINE
async def test_waiting_for_the_lock_can_be_cancelled_at_once(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, busy_timeout=30) as store:
        async with write_lock_elsewhere(path):
            began = time.monotonic()
            with trio.move_on_after(0.3) as scope:
                await engine_of(store).run(marks("a"))
            assert scope.cancelled_caught
            assert time.monotonic() - began < 1
        assert await engine_of(store).run(marks("b")) == "b"
    assert durable(path) == ["b"]


@INLINE
@pytest.mark.parametrize("busy_timeout", [0, 0.2])
async def test_the_wait_for_the_lock_ends_with_store_busy(tmp_path: Path, inline: bool, busy_timeout: float) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, busy_timeout=busy_timeout) as store:
        with write_lock(path):
            began = time.monotonic()
            with pytest.raises(StoreBusy, match="busy_timeout") as caught:
                await engine_of(store).run(marks("a"))
            assert busy_timeout <= time.monotonic() - began < busy_timeout + 1
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
        assert await engine_of(store).run(marks("b")) == "b"
    assert durable(path) == ["b"]


@INLINE
async def test_every_unit_waits_for_as_long_as_it_was_promised(tmp_path: Path, inline: bool) -> None:
    """One that came later is not refused with an earlier one."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, busy_timeout=0.4) as store:
        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("early")
                await trio.sleep(0.3)
                await units.submit("late")
                await until(lambda: "early" in units.answers)
                assert "late" not in units.answers
        assert isinstance(error(units.answers["early"]), StoreBusy)
        assert value(units.answers["late"]) == "late"
    assert durable(path) == ["late"]


@INLINE
async def test_an_interactive_transaction_waits_for_the_lock_in_the_same_way(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, busy_timeout=0.2) as store:
        with write_lock(path):
            with pytest.raises(StoreBusy) as caught:
                await engine_of(store).begin()
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
            with trio.move_on_after(0.05) as scope:
                await engine_of(store).begin()
            assert scope.cancelled_caught
        async with store.transaction() as tx:
            await tx.execute("INSERT INTO marks (name) VALUES ('a')")
    assert durable(path) == ["a"]


async def test_a_busy_lock_is_asked_for_with_growing_pauses(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        spied = spy(store)
        with write_lock(path), trio.move_on_after(0.5):
            await engine_of(store).run(marks("a"))
        assert 5 <= spied.count("BEGIN IMMEDIATE") <= 35


async def test_nobody_asks_for_the_lock_when_nobody_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        spied = spy(store)
        with write_lock(path):
            with trio.move_on_after(0.1):
                await engine_of(store).run(marks("a"))
            await trio.sleep(0.1)
            asked = spied.count("BEGIN IMMEDIATE")
            await trio.sleep(0.2)
            assert spied.count("BEGIN IMMEDIATE") <= asked + 1


@INLINE
async def test_now_is_read_when_the_lock_is_held(tmp_path: Path, inline: bool) -> None:
    """What was decided by an older reading could revive a lease that has ended while we waited."""
    path = tmp_path / "a.db"
    clock = ManualClock(START)

    def late(tx: Tx) -> int:
        time.sleep(0.002)
        return tx.now()

    async with marked_store(path, inline=inline, clock=clock) as store:
        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("a", lambda tx: tx.now())
                await units.submit("b", late)
                await trio.sleep(0.02)
                clock.set(START + 700)
        assert {value(answer) for answer in units.answers.values()} == {START + 700}


@INLINE
async def test_reading_waits_for_no_writer(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        id = await store.queue("q").enqueue(1)
        with write_lock(path) as other:
            other.execute("INSERT INTO marks (name) VALUES ('not committed')")
            with trio.fail_after(2):
                assert await store.get_job(id) is not None
                rows = await engine_of(store).read(lambda tx: tx.all("SELECT name FROM marks"))
            assert rows == []


@INLINE
async def test_a_read_sees_one_snapshot_whatever_commits_meanwhile(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"

    async with marked_store(path, inline=inline) as store:
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:

            def twice(tx: Tx) -> tuple[int, int]:
                count = "SELECT count(*) FROM marks"
                first = tx.all(count)[0][0]
                other.execute("INSERT INTO marks (name) VALUES ('meanwhile')")
                return first, tx.all(count)[0][0]

            assert await engine_of(store).read(twice) == (0, 0)
        assert await engine_of(store).read(lambda tx: tx.all("SELECT count(*) FROM marks")) == [(1,)]


@INLINE
async def test_a_read_leaves_no_snapshot_behind_that_would_pin_the_log(tmp_path: Path, inline: bool) -> None:
    """D03, the store's own part of it."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:

        def failing(tx: Tx) -> None:
            tx.all("SELECT * FROM marks")
            raise LookupError

        await engine_of(store).read(lambda tx: tx.all("SELECT * FROM marks"))
        with pytest.raises(LookupError):
            await engine_of(store).read(failing)
        await engine_of(store).run(marks("a"))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


async def test_no_write_begins_as_a_reader(tmp_path: Path) -> None:
    """D01: a reader that turns into a writer fails at once when somebody has committed in between."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, timeout=5, isolation_level=None)) as other:
        async with marked_store(path) as store:
            spied = spy(store)
            queue = store.queue("q")
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM marks").fetchall()
            await queue.enqueue(1)
            with pytest.raises(sqlite3.OperationalError) as caught:
                other.execute("INSERT INTO marks (name) VALUES ('stale')")
            assert caught.value.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
            other.execute("ROLLBACK")
            (job,) = await queue.claim("w")
            assert await job.heartbeat()
            assert await job.ack()
            async with store.transaction() as tx:
                await tx.execute("SELECT * FROM marks")
                await tx.enqueue("q", 2)
            await store.transact(lambda tx: tx.enqueue("q", 3))
            begins = [sql for sql in spied.log if sql.startswith("BEGIN")]
            assert set(begins) == {"BEGIN IMMEDIATE"}
            assert len(begins) >= 6


async def test_many_writers_of_several_stores_never_fail(tmp_path: Path) -> None:
    """D01, as a whole: claims, heartbeats and acknowledgements of two stores beside a program's own writes."""
    path = tmp_path / "a.db"
    stop = threading.Event()
    written = 0

    def embedder() -> None:
        nonlocal written
        with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as own:
            while not stop.is_set():
                own.execute("BEGIN IMMEDIATE")
                own.execute("INSERT INTO marks (name) VALUES ('own')")
                own.execute("COMMIT")
                written += 1
                time.sleep(0.001)

    async def work(store: Store, worker: str) -> None:
        queue = store.queue("q")
        for n in range(15):
            await queue.enqueue(n)
            for job in await queue.claim(worker, 2):
                assert await job.heartbeat()
                assert await job.ack()

    async with (
        marked_store(path, synchronous="normal") as a,
        open_store(path, synchronous="normal") as b,
    ):
        thread = threading.Thread(target=embedder)
        thread.start()
        try:
            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(work, a, f"a{n}")
                    nursery.start_soon(work, b, f"b{n}")
        finally:
            stop.set()
            await trio.to_thread.run_sync(thread.join)
        assert written > 3
    assert durable(path) == ["own"] * written


@INLINE
async def test_a_store_closes_soon_while_somebody_else_holds_the_lock(tmp_path: Path, inline: bool) -> None:
    """D12: whoever still waits is told so, and no lease is taken."""
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        await store.queue("q").enqueue(1)
    answers: list[object] = []

    async def claim(store: Store) -> None:
        try:
            answers.append(await store.queue("q").claim("w"))
        except StoreClosed as closed:
            answers.append(closed)

    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with open_store(path, inline=inline, busy_timeout=30) as store:
            await stack.enter_async_context(write_lock_elsewhere(path))
            nursery.start_soon(claim, store)
            with trio.move_on_after(0.2) as scope:
                await store.queue("q").claim("me")
            assert scope.cancelled_caught
            began = time.monotonic()
        assert time.monotonic() - began < 2.5
        assert open_files(path) == []
    assert [type(answer) for answer in answers] == [StoreClosed]
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT state FROM __alkstore_jobs").fetchall() == [(0,)]
