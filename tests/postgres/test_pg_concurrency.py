"""Many at once: late commits, keys that are wanted twice, and no two transactions that wait for each other."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest
import trio

from alkstore import Conflict, Discard, JobHandle, StopToken, Store, StoreBusy, seam
from alkstore.cron import STANDALONE
from alkstore.sql.tx import Tx
from tests.conformance.helpers import fresh, running
from tests.postgres.kit import Admin, Place, engine_of, eventually

# ------------------------------------------------------------------------------------------------ late commits (O01)


async def test_a_message_that_is_committed_late_is_delivered(place: Place) -> None:
    delivered: list[int] = []

    async def deliver(handle: JobHandle) -> None:
        delivered.append(handle.id)

    async with place.open() as store:
        with psycopg.connect(place.server) as late:
            first = seam.outbox_enqueue(late, "o", 1, schema=place.schema)
            second = await store.outbox("o").enqueue(2)
            assert first < second
            assert await store.outbox("o").run_once("w", deliver)
            assert not await store.outbox("o").run_once("w", deliver)
            late.commit()
        assert await store.outbox("o").run_once("w", deliver)
        assert delivered == [second, first]


async def test_a_relay_is_woken_by_a_late_commit(place: Place) -> None:
    delivered: list[int] = []

    async def deliver(handle: JobHandle) -> None:
        delivered.append(handle.id)

    async with place.open() as store, running(store.outbox("o").deliver, deliver):
        with psycopg.connect(place.server) as late:
            first = seam.outbox_enqueue(late, "o", 1, schema=place.schema)
            second = await store.outbox("o").enqueue(2)
            await eventually(lambda: delivered == [second])
            late.commit()
        assert await eventually(lambda: delivered == [second, first]) < 3


async def test_jobs_of_one_transaction_are_claimed_in_their_order(place: Place) -> None:
    """Q16: their times are equal, and their ids tell."""
    async with place.open() as store:
        queue = store.queue("q")
        async with store.transaction() as tx:
            ids = [await tx.enqueue("q", n) for n in range(50)]
        assert ids == sorted(ids)
        claimed = [handle.id for _ in range(5) for handle in await queue.claim("w", 10)]
        assert claimed == ids


# --------------------------------------------------------------------------------------------------- keys, and locks


async def test_a_key_that_many_want_at_once_is_one_job(place: Place) -> None:
    ids: set[int] = set()
    async with place.open(connections=6) as a, place.open(connections=6) as b:

        async def want(store: Store) -> None:
            ids.add(await store.queue("q").enqueue(1, key="k"))

        for _ in range(5):
            ids.clear()
            async with trio.open_nursery() as nursery:
                for store in (a, b) * 8:
                    nursery.start_soon(want, store)
            assert len(ids) == 1
            (handle,) = await a.queue("q").claim("w", 10)
            assert await handle.ack()


async def test_a_key_is_waited_for_while_its_job_is_not_committed(place: Place) -> None:
    """Committed, it is the one job; rolled back, there is room for another."""
    for commit in (True, False):
        key = fresh("k")
        answers: list[int] = []

        async def want(store: Store, key: str, answers: list[int]) -> None:
            answers.append(await store.queue("q").enqueue(2, key=key))

        async with place.open() as store, trio.open_nursery() as nursery:
            with psycopg.connect(place.server) as other:
                first = seam.enqueue(other, "q", 1, key=key, schema=place.schema)
                nursery.start_soon(want, store, key, answers)
                await trio.sleep(0.2)
                assert answers == []
                other.commit() if commit else other.rollback()
            await eventually(answers.__len__)
            assert (answers == [first]) is commit


async def test_a_job_lives_on_while_somebody_has_enqueued_its_key_again(place: Place) -> None:
    """An embedder's transaction may be open for longer than a lease: all that waits for it is the job's deletion."""
    async with place.open(busy_timeout=1) as store:
        queue = store.queue("q")
        ids = [await queue.enqueue(1, key=key) for key in ("a", "b", "c", "d")]
        handles = await queue.claim("w", 4, lease=30)
        with psycopg.connect(place.server) as other:
            for id, key in zip(ids, ("a", "b", "c", "d"), strict=True):
                assert seam.enqueue(other, "q", 2, key=key, schema=place.schema) == id
            assert await handles[0].heartbeat(60)
            assert await handles[1].retry("no", 0)
            assert await handles[2].snooze(1)
            with pytest.raises(StoreBusy):
                await handles[3].ack()
            other.commit()
        assert await handles[3].ack()
        assert await handles[0].ack()
        assert await queue.enqueue(3, key="d") not in ids


@pytest.mark.parametrize("connections", [1, 3])
async def test_who_waits_for_a_connection_is_not_overtaken(place: Place, connections: int) -> None:
    """Not even by those who never pause between two calls."""
    done: Counter[str] = Counter()

    async def call(who: str, times: int) -> None:
        for n in range(times):
            await store.queue("q").enqueue(n)
            done[who] += 1

    async with place.open(connections=connections, busy_timeout=5) as store, trio.open_nursery() as nursery:
        nursery.start_soon(call, "greedy", 200)
        nursery.start_soon(call, "greedy too", 200)
        await trio.lowlevel.checkpoint()
        nursery.start_soon(call, "modest", 10)
        await eventually(lambda: done["modest"] == 10)
        assert max(done.values()) < 60


async def test_a_page_of_decisions_does_not_starve_itself(place: Place) -> None:
    """However many they are: each waits for a connection for less than the patience of one call."""
    async with place.open(connections=2, busy_timeout=1.5) as store:

        def slow(tx: Tx) -> None:
            tx.all("SELECT pg_sleep(0.1)")

        assert await engine_of(store).run_each([slow] * 20) == [None] * 20


async def test_a_lock_has_one_owner_and_a_growing_token(place: Place) -> None:
    async with place.open(connections=6) as a, place.open(connections=6) as b:
        tokens: list[int] = []
        held: Counter[str] = Counter()

        async def take(store: Store) -> None:
            for _ in range(10):
                async with store.lock("l").hold(ttl=30) as lock:
                    held["now"] += 1
                    assert held["now"] == 1
                    tokens.append(lock.fencing_token)
                    await trio.lowlevel.checkpoint()
                    held["now"] -= 1

        async with trio.open_nursery() as nursery:
            for store in (a, b, a, b):
                nursery.start_soon(take, store)
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 40


async def test_a_job_is_run_once_by_many_workers(place: Place) -> None:
    runs: Counter[int] = Counter()

    async def handle(job: JobHandle) -> None:
        runs[job.id] += 1

    async with place.open(connections=4) as a, place.open(connections=4) as b:
        ids = await a.queue("q").enqueue_many(range(400))
        async with running(a.queue("q").work, handle, concurrency=8), running(b.queue("q").work, handle, concurrency=8):
            await eventually(lambda: len(runs) == len(ids))
        assert set(runs.values()) == {1}


# --------------------------------------------------------------------------------------------- nobody waits in a ring

STRESS_S = 6.0


async def test_under_stress_there_is_no_deadlock(place: Place, admin: Admin) -> None:
    """Workers, cancels, redrives, sweeps, keys, publishes, runs and locks, from two stores, all over the same rows."""
    chance = random.Random(3)  # noqa: S311 - it has to be repeatable
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = admin.value(deadlocks)
    until = time.monotonic() + STRESS_S
    did: Counter[str] = Counter()

    async def handle(job: JobHandle) -> None:
        if chance.random() < 0.2:
            raise Discard("no")
        if chance.random() < 0.2:
            raise ValueError("again")

    async def report(_: Any) -> None:
        await trio.sleep(0.001)

    async def again(name: str, call: Any) -> None:
        while time.monotonic() < until:
            await call()
            did[name] += 1
            await trio.sleep(chance.uniform(0, 0.01))

    async def use(store: Store, nursery: trio.Nursery) -> None:
        queue = store.queue("q", max_attempts=2, backoff=0, visibility=0.2)
        ids: list[int] = []

        async def enqueue() -> None:
            ids.append(await queue.enqueue(1, key=f"k{chance.randrange(20)}", expires=chance.choice([None, 0.05])))

        async def cancel() -> None:
            if ids:
                await queue.cancel_job(chance.choice(ids[-30:]))

        async def claim_and_forget() -> None:
            await queue.claim("sloth", 2, lease=0.1)

        async def redrive() -> None:
            await queue.redrive_all()

        async def publish() -> None:
            task = chance.choice(["t", "u"])
            revision = await store.cron.get_task(task)
            expected = None if revision is None else revision.revision
            with suppress(Conflict):  # somebody else was faster
                await store.cron.publish_task(
                    task, call="report", timeout=chance.randrange(1, 50), overlap="skip", expected_revision=expected
                )

        async def toggle() -> None:
            trigger = chance.choice(["t1", "t2", "u1"])
            await (store.cron.enable_trigger if chance.random() < 0.7 else store.cron.disable_trigger)(trigger)

        async def schedule() -> None:
            await store.schedule(f"s{chance.randrange(5)}", f"@every {chance.randrange(1, 3)}s", "q")

        async def unschedule() -> None:
            await store.unschedule(f"s{chance.randrange(5)}")

        async def run_now() -> None:
            made = await store.cron.run_now("t")
            if chance.random() < 0.5:
                await store.cron.cancel_run(made.id)

        async def lock() -> None:
            if held := await store.lock(f"l{chance.randrange(3)}").acquire(0.1):
                await held.renew()
                if chance.random() < 0.7:
                    await held.release()

        async def pause() -> None:
            await queue.pause()
            await queue.resume()

        calls = [
            enqueue, enqueue, cancel, claim_and_forget, redrive, queue.sweep_expired, publish, toggle, schedule,
            unschedule, run_now, lock, pause, lambda: queue.prune(older_than=0.5),
        ]  # fmt: skip
        for number, call in enumerate(calls):
            nursery.start_soon(again, f"{number} {getattr(call, '__name__', 'prune')}", call)

    async with place.open(connections=6) as a, place.open(connections=6) as b:
        for task in ("t", "u"):
            await a.cron.publish_task(task, call="report", overlap="skip")
        for trigger in ("t1", "t2", "u1"):
            await a.cron.publish_trigger(trigger, task=trigger[0], expression="* * * * * *", timezone="UTC")
        stop = StopToken()
        async with trio.open_nursery() as runners:
            for store in (a, b):
                runners.start_soon(partial(store.queue("q").work, handle, concurrency=4, stop=stop))
                runners.start_soon(partial(store.cron.run, {"report": report}, STANDALONE, stop=stop))
                runners.start_soon(store.run_schedules, stop)
            async with trio.open_nursery() as nursery:
                for store in (a, b):
                    await use(store, nursery)
            stop.stop()
        assert min(did.values()) > 5, did
    await trio.sleep(0.2)  # a connection tells its counts when it ends
    assert admin.value(deadlocks) == before
