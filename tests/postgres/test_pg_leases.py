"""A lease is judged by the server's clock, read when the row's lock is held: so none that has ended is ever revived."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from alkstore import JobHandle, LockHandle, Store
from alkstore.engines.postgres.clock import ServerClock
from alkstore.sql import jobs, locks, schedules
from tests.conformance.helpers import seen
from tests.postgres.kit import Admin, Place, engine_of, eventually, run
from tests.postgres.proxy import open_proxy

SETTLE: dict[str, Callable[[JobHandle], Awaitable[bool]]] = {
    "ack": lambda handle: handle.ack(),
    "retry": lambda handle: handle.retry("no"),
    "fail": lambda handle: handle.fail("no"),
    "heartbeat": lambda handle: handle.heartbeat(10),
    "snooze": lambda handle: handle.snooze(1),
}

HOLDS: dict[str, Callable[[LockHandle], Awaitable[bool]]] = {
    "renew": lambda held: held.renew(),
    "release": lambda held: held.release(),
}


async def later(call: Callable[[], Awaitable[Any]], answers: list[Any]) -> None:
    answers.append(await call())


@pytest.mark.parametrize("name", SETTLE)
async def test_a_lease_that_ended_while_its_row_was_locked_is_over(place: Place, admin: Admin, name: str) -> None:
    answers: list[bool] = []
    async with place.open() as store, trio.open_nursery() as nursery:
        queue = store.queue("q")
        id = await queue.enqueue(1)
        (handle,) = await queue.claim("w", lease=0.4)
        with admin.holding(f"SELECT 1 FROM {place.table('jobs')} WHERE id = %s FOR UPDATE", id):
            nursery.start_soon(later, lambda: SETTLE[name](handle), answers)
            await eventually(admin.waiting)
            await trio.sleep(0.5)
            assert not answers
        await eventually(lambda: answers)
        assert answers == [False]
        (again,) = await queue.claim("v")
        assert (again.id, again.attempt) == (id, 2)


@pytest.mark.parametrize("name", SETTLE)
async def test_a_lease_that_has_not_ended_survives_a_locked_row(place: Place, admin: Admin, name: str) -> None:
    answers: list[bool] = []
    async with place.open() as store, trio.open_nursery() as nursery:
        id = await store.queue("q").enqueue(1)
        (handle,) = await store.queue("q").claim("w", lease=30)
        with admin.holding(f"SELECT 1 FROM {place.table('jobs')} WHERE id = %s FOR UPDATE", id):
            nursery.start_soon(later, lambda: SETTLE[name](handle), answers)
            await eventually(admin.waiting)
        await eventually(lambda: answers)
        assert answers == [True]


@pytest.mark.parametrize("kind", ["ready", "delayed", "lapsed"])
@pytest.mark.parametrize("wait", [0, 0.3])
async def test_a_claim_does_not_wait_for_what_others_have_locked(
    place: Place, admin: Admin, kind: str, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = 0

    def counted(*args: Any) -> jobs.Claimed:
        nonlocal claims
        claims += 1
        return claim(*args)

    claim = jobs.claim
    async with place.open() as store:
        queue = store.queue("q")
        await queue.enqueue(1, delay=0.2 if kind == "delayed" else None)
        if kind == "lapsed":
            assert await queue.claim("w", lease=0.1)
        await trio.sleep(0.3)
        with admin.holding(f"SELECT 1 FROM {place.table('jobs')} FOR UPDATE"):
            monkeypatch.setattr(jobs, "claim", counted)
            began = time.monotonic()
            with trio.fail_after(10):
                assert await queue.claim("v", wait=wait) == []
            assert time.monotonic() - began >= wait
            assert claims <= 2 + wait / 0.05
        assert len(await queue.claim("v", wait=10)) == 1


@pytest.mark.parametrize("name", HOLDS)
async def test_a_lock_that_ended_while_its_row_was_locked_is_over(place: Place, admin: Admin, name: str) -> None:
    answers: list[bool] = []
    async with place.open() as store, trio.open_nursery() as nursery:
        held = await store.lock("l").acquire(0.4)
        assert held is not None
        with admin.holding(f"SELECT 1 FROM {place.table('locks')} FOR UPDATE"):
            nursery.start_soon(later, lambda: HOLDS[name](held), answers)
            await eventually(admin.waiting)
            await trio.sleep(0.5)
        await eventually(lambda: answers)
        assert answers == [False]
        assert await store.lock("l").acquire(1) is not None


async def _due_schedule(store: Store, admin: Admin) -> None:
    await store.schedule("s", "@every 1h", "q")
    admin.rows(f"UPDATE {admin.place.table('scheduler_tasks')} SET next_fire_at = next_fire_at - 3600000")


@pytest.mark.parametrize("locked", ["locks", "scheduler_tasks"])
async def test_a_leader_whose_lease_ended_while_a_row_was_locked_fires_nothing(
    place: Place, admin: Admin, locked: str
) -> None:
    answers: list[schedules.Fired] = []
    async with place.open() as store, trio.open_nursery() as nursery:
        await _due_schedule(store, admin)
        engine = engine_of(store)
        await engine.run(lambda tx: locks.acquire(tx, schedules.LEADER_LOCK, "me", 400))
        with admin.holding(f"SELECT 1 FROM {place.table(locked)} FOR UPDATE"):
            nursery.start_soon(later, lambda: run(store, lambda tx: schedules.fire(tx, "s", "me")), answers)
            await eventually(admin.waiting)
            await trio.sleep(0.5)
        await eventually(lambda: answers)
        assert answers[0].led is False
        assert (await store.queue("q").counts()).ready == 0


# ------------------------------------------------------------------------------------- one clock, read after the wait


async def test_a_lease_begins_when_there_is_nothing_more_to_wait_for(place: Place, admin: Admin) -> None:
    """Q11: a claim never waits for a row; what it waits for is a connection, and the clock is read after that."""
    async with place.open(connections=1) as store, trio.open_nursery() as nursery:
        queue = store.queue("q")
        id = await queue.enqueue(1)
        claimed: list[list[JobHandle]] = []
        async with store.transaction():
            nursery.start_soon(later, lambda: queue.claim("w", lease=1), claimed)
            await trio.sleep(1.5)
        await eventually(lambda: claimed)
        (handle,) = claimed[0]
        assert handle.lease_remaining > 0.5
        assert await queue.claim("thief") == []
        assert await handle.ack()
        assert await queue.get_job(id) is None


async def test_a_lock_taken_after_a_wait_has_its_whole_ttl(place: Place, admin: Admin) -> None:
    answers: list[Any] = []
    async with place.open() as store, trio.open_nursery() as nursery:
        with admin.holding(f"SELECT 1 FROM {place.table('meta')} WHERE key = 'fencing_token' FOR UPDATE"):
            nursery.start_soon(later, lambda: store.lock("l").acquire(1), answers)
            await eventually(admin.waiting)
            await trio.sleep(1.2)
        await eventually(lambda: answers)
        assert answers[0] is not None
        assert await store.lock("l").acquire(1) is None
        assert await answers[0].release()


async def test_a_machine_whose_clock_is_ahead_takes_no_live_lock(
    place: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L05: the server's clock writes and judges; what this machine's clock reads makes no difference."""
    real = time.time_ns
    async with place.open() as a:
        held = await a.lock("x").acquire(120)
        assert held is not None
        monkeypatch.setattr(time, "time_ns", lambda: real() + 180 * 10**9)
        async with place.open() as b:
            assert await b.lock("x").acquire(120) is None
            await a.queue("q").enqueue(1, delay=60)
            assert await b.queue("q").claim("w") == []
            clock = engine_of(b).clock
            assert isinstance(clock, ServerClock)
            assert abs(clock.now_ms() - real() // 1_000_000) < 2_000
        monkeypatch.undo()
        assert await held.renew()


async def test_a_machine_whose_clock_is_set_loses_no_lease(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    async with place.open() as store:
        await store.queue("q").enqueue(1)
        (handle,) = await store.queue("q").claim("w", lease=30)
        async with store.lock("l").hold(30) as held:
            for step in (90, -3_600):
                monkeypatch.setattr(time, "time_ns", lambda step=step: real() + step * 10**9)
                assert 20 < held.remaining <= 30.5
                assert 20 < handle.lease_remaining <= 30.5


async def test_over_a_slow_line_the_servers_clock_counts_too(
    place: Place, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although every reading of it is 0.3 s on its way, and this machine's is wrong by more than a lease."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 90 * 10**9)
    async with open_proxy(short_folder, place.server) as proxy:
        proxy.delay = 0.15
        through = Place(proxy.url(place.server), place.schema)
        async with through.open(listen=False) as store, store.lock("l").hold(30) as held:
            assert 20 < held.remaining <= 31


async def test_a_server_whose_clock_was_set_back_is_noticed(place: Place, admin: Admin) -> None:
    """As after a failover to a machine whose clock is behind: no lease may be longer than it was meant."""
    async with place.open() as store:
        events = store.events()
        await store.queue("q").enqueue(1)
        assert await store.queue("q").claim("w", lease=30)
        engine = engine_of(store)
        engine._learn(engine.clock.now_ms() + 3_600_000, 0)  # as if it had been an hour ahead until now
        admin.rows(f"UPDATE {place.table('jobs')} SET lease_end = lease_end + 3600000 WHERE state = 1")
        await store.health()  # reads the clock
        await store.health()
        longer_by = admin.value(
            "SELECT lease_end - lease - (extract(epoch FROM clock_timestamp()) * 1000)::bigint "
            f"FROM {place.table('jobs')} WHERE state = 1"
        )
        assert longer_by <= 0
        assert [event.kind for event in seen(events, "clock_set_forward", "clock_set_back")] == [
            "clock_set_forward",
            "clock_set_back",
        ]
        assert (await store.health()).clock_steps == 2
