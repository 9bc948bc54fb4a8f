"""Several processes on one file: opening it, writing at once, locks held by others, the log that a reader pins."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import threading
import time
from contextlib import closing
from functools import partial

import pytest
import trio

from alkstore import Health, Store, StoreError, open_store
from alkstore.sql import schedules
from tests.crash.child import Talk, fork
from tests.crash.harness import WITHIN_S, Child, Processes, execute, go, rows
from tests.crash.watching import Refusals, watch

CLOSES_WITHIN_S = 10.0
"""It takes a second at most, and the lock is held for far longer than this: the rest is for a loaded machine."""

# ------------------------------------------------------------------------------------------------- opening at once


def openers(talk: Talk, folder: str, count: int, rounds: int) -> None:
    """`count` processes that open the same new file at the same moment, `rounds` times."""
    together = multiprocessing.get_context("fork").Barrier(count)

    async def opener() -> None:
        for n in range(rounds):
            together.wait(WITHIN_S)
            began = time.monotonic()
            try:
                async with open_store(os.path.join(folder, f"round-{n}.db")) as store:
                    took = time.monotonic() - began
                    await store.queue("q").enqueue(n)
            except StoreError as error:
                talk.say("opened", round=n, error=repr(error), took=0)
            else:
                talk.say("opened", round=n, error=None, took=took)

    ended = [fork(partial(trio.run, opener)) for _ in range(count)]
    assert [end() for end in ended] == [0] * count


async def test_sixteen_processes_open_the_same_new_file_at_once(processes: Processes, path: str, long: bool) -> None:
    """D02: the conversion to WAL mode and the migrations are raced for, and nobody is refused."""
    count, rounds = 16, 30 if long else 6
    folder = os.path.dirname(path)
    child = await processes.start(openers, folder=folder, count=count, rounds=rounds)
    opened = [await child.hear("opened") for _ in range(count * rounds)]
    assert await child.ended() == 0
    assert [one for one in opened if one["error"] is not None] == []
    print(f"the slowest of {len(opened)} openings took {max(one['took'] for one in opened):.2f} s")
    for n in range(rounds):
        file = os.path.join(folder, f"round-{n}.db")
        assert rows(file, "PRAGMA integrity_check") == [("ok",)]
        assert rows(file, "SELECT count(*) FROM __alkstore_meta WHERE key = 'schema_version'") == [(1,)]
        assert rows(file, "SELECT count(*), count(DISTINCT id) FROM __alkstore_jobs") == [(count, count)]


# ------------------------------------------------------------------------------------------------- writing at once


async def busy_program(talk: Talk, path: str, name: str, seconds: float) -> None:
    """Enqueue, claim, acknowledge and fire for so long, and tell the ledger."""
    refusals = Refusals()
    watch(refusals)
    async with open_store(path) as store:
        enqueued: list[int] = []
        acked: list[int] = []
        await talk.barrier()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enqueue_on, store, enqueued)
                nursery.start_soon(claim_and_ack_on, store, name, acked)
                nursery.start_soon(fire_on, store)
        talk.say("ledger", enqueued=enqueued, acked=acked, snapshots=refusals.snapshots, waits=refusals.waits)


async def enqueue_on(store: Store, enqueued: list[int]) -> None:
    queue = store.queue("q")
    while True:
        with trio.CancelScope(shield=True):  # what is stored must be in the ledger
            enqueued.append(await queue.enqueue({"n": len(enqueued)}))
        await trio.lowlevel.checkpoint()


async def claim_and_ack_on(store: Store, name: str, acked: list[int]) -> None:
    queue = store.queue("q")
    while True:
        for handle in await queue.claim(name, 5, wait=1):
            with trio.CancelScope(shield=True):
                assert await handle.heartbeat()
                assert await handle.ack()
                acked.append(handle.id)


async def fire_on(store: Store) -> None:
    engine = store._context.engine
    while True:
        due = await engine.read(schedules.look)
        await engine.run_each([partial(schedules.fire, name=name, owner=None) for name in due.names], urgent=True)
        await trio.sleep(0.005)


async def test_two_processes_that_write_all_the_time_lose_nothing_and_are_never_refused(
    processes: Processes, path: str, long: bool
) -> None:
    """D01: whoever will write locks first, so no transaction is refused for what it has read (BUSY_SNAPSHOT)."""
    seconds = 60.0 if long else 3.0
    async with open_store(path) as store:
        for n in range(10):
            await store.schedule(f"s{n}", "@every 1s", "q")
    children = [await processes.start(busy_program, path=path, name=f"p{n}", seconds=seconds) for n in range(2)]
    await go(*children)
    ledgers = [await child.hear("ledger", within=seconds + WITHIN_S) for child in children]
    for child in children:
        assert await child.ended() == 0
    enqueued = [id for ledger in ledgers for id in ledger["enqueued"]]
    acked = [id for ledger in ledgers for id in ledger["acked"]]
    ((fired,),) = rows(path, "SELECT sum(fired_total) FROM __alkstore_scheduler_tasks")
    left = [id for (id,) in rows(path, "SELECT id FROM __alkstore_jobs")]
    waits = sum(ledger["waits"] for ledger in ledgers)
    print(f"{len(enqueued)} enqueued, {len(acked)} acknowledged, {fired} fired, {len(left)} left; waited {waits} times")
    assert [ledger["snapshots"] for ledger in ledgers] == [0, 0]
    assert waits > 0, "they never met: that was no race"
    assert fired > 0
    assert len(set(acked)) == len(acked)
    assert set(enqueued) <= {*acked, *left}
    assert len(acked) + len(left) == len(enqueued) + fired


async def claimer(talk: Talk, path: str) -> None:
    async with open_store(path) as store:
        (handle,) = await store.queue("q").claim("w", 1)
        talk.say("claimed", id=handle.id)
        await talk.hear("end")


async def test_a_claim_of_one_of_two_jobs_leaves_the_database_free_for_others(processes: Processes, path: str) -> None:
    """D10: a RETURNING that is not fetched to its end would keep the write lock, and its rows invisible."""
    async with open_store(path) as store:
        first, _ = await store.queue("q").enqueue_many([1, 2])
    child = await processes.start(claimer, path=path)
    assert (await child.hear("claimed"))["id"] == first
    execute(path, "CREATE TABLE mine (x)", "INSERT INTO mine VALUES (1)", timeout=0)
    assert rows(path, "SELECT id FROM __alkstore_jobs WHERE state = 1") == [(first,)]
    await child.say("end")
    assert await child.ended() == 0


# --------------------------------------------------------------------------------------------- locks held by others


def lock_holder(talk: Talk, path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        talk.say("open")
        talk.hear_blocking("hold")
        connection.execute("BEGIN IMMEDIATE")
        talk.say("holding")
        talk.hear_blocking("end")
        connection.execute("ROLLBACK")


async def impatient(talk: Talk, path: str) -> None:
    async with open_store(path, busy_timeout=30) as store:
        talk.say("open")
        await talk.hear("claim")
        with trio.move_on_after(1.0):
            await store.queue("q").claim("w")
        closing = time.monotonic()
    talk.say(
        "closed",
        took=time.monotonic() - closing,
        threads=[thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
    )


async def test_a_store_closes_in_time_while_another_process_holds_the_lock(processes: Processes, path: str) -> None:
    """D12: a claim that waits for the lock is cancelled, the store closes, no thread is left and nothing is leased."""
    async with open_store(path) as store:
        id = await store.queue("q").enqueue(1)
    holder = await processes.start(lock_holder, path=path)
    child = await processes.start(impatient, path=path)
    await child.hear("open")
    await hold(holder)
    await child.say("claim")
    closed = await child.hear("closed")
    assert closed["took"] < CLOSES_WITHIN_S
    assert all(name.startswith("Trio thread") for name in closed["threads"]), closed["threads"]  # trio's idle cache
    assert await child.ended() == 0
    await holder.say("end")
    assert await holder.ended() == 0
    assert rows(path, "SELECT id, state, attempt, fence FROM __alkstore_jobs") == [(id, 0, 0, 0)]


async def waiting_writer(talk: Talk, path: str) -> None:
    """Leave the block with a write waiting for the lock that somebody else holds."""
    refusals = Refusals()
    watch(refusals)
    async with open_store(path, busy_timeout=30) as store:
        talk.say("open")
        await talk.hear("write")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.queue("q").enqueue, 1)
            while not refusals.waits:  # noqa: ASYNC110 - it is counted in the store's thread
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
            closing = time.monotonic()
    talk.say("closed", took=time.monotonic() - closing)


async def test_a_write_that_waits_for_the_lock_of_another_process_is_withdrawn(processes: Processes, path: str) -> None:
    """D12, for an enqueue: cancelled while it waits, it has had no effect."""
    holder = await processes.start(lock_holder, path=path)
    child = await processes.start(waiting_writer, path=path)
    await child.hear("open")
    await hold(holder)
    await child.say("write")
    assert (await child.hear("closed"))["took"] < CLOSES_WITHIN_S
    assert await child.ended() == 0
    await holder.say("end")
    assert await holder.ended() == 0
    assert rows(path, "SELECT count(*) FROM __alkstore_jobs") == [(0,)]


async def hold(holder: Child) -> None:
    await holder.hear("open")
    await holder.say("hold")
    await holder.hear("holding")


# ------------------------------------------------------------------------------------------------ a pinned snapshot


SMALL_LOG_BYTES = 4 * 1024 * 1024


def snapshot_holder(talk: Talk, path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM __alkstore_jobs").fetchall()
        talk.say("holding")
        talk.hear_blocking("end")
        connection.execute("COMMIT")
        talk.say("ended")
        talk.hear_blocking("end")


async def fill_the_log(store: Store) -> None:
    for _ in range(12):
        await store.queue("q").enqueue_many(["x" * 2_000] * 500)


async def until_log(store: Store, *, blocked: bool, write: bool) -> Health:
    """Wait until the log is reported as pinned, or is small again; `write` meanwhile, or stay idle."""
    with trio.fail_after(WITHIN_S):
        while True:
            health = await store.health()
            if health.checkpoint_blocked == blocked and (blocked or health.wal_bytes <= SMALL_LOG_BYTES):
                return health
            if write:
                await store.queue("q").enqueue(1)
            await trio.sleep(0.1)


@pytest.mark.parametrize("write", [True, False], ids=["busy", "idle"])
async def test_a_log_that_a_reader_pins_is_reported_and_shrinks_once_the_reader_has_gone(
    processes: Processes, path: str, write: bool
) -> None:
    """D03: in a store that goes on writing, and in one that has nothing to do any more."""
    async with open_store(path) as store:
        reader = await processes.start(snapshot_holder, path=path)
        await reader.hear("holding")
        await fill_the_log(store)
        assert (await until_log(store, blocked=True, write=write)).wal_bytes > 12_000_000
        await reader.say("end")
        await reader.hear("ended")
        await until_log(store, blocked=False, write=write)
        await reader.say("end")
        assert await reader.ended() == 0
    assert rows(path, "SELECT count(*) FROM __alkstore_jobs WHERE length(payload) > 2000") == [(6_000,)]
