"""Claiming: what is due, in which order, what a claim does to a job, and how long it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alkstore import JobHandle, ManualClock, Queue, Store
from alkstore.sql import jobs
from alkstore.sql.tx import Tx
from tests.conformance.helpers import (
    START,
    OpenStore,
    TaskSteps,
    WallLikeClock,
    after,
    at,
    calm,
    claim,
    elapsed,
    fresh,
    job,
    kill,
    now,
    virtually,
)

# --------------------------------------------------------------------------------------------------------- order


plans = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(-3, 3)),  # so that priorities and moments often meet
    max_size=30,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=plans, limits=st.lists(st.integers(1, 10), min_size=1, max_size=10))
def test_jobs_are_claimed_by_priority_then_run_at_then_id(
    open_engine_store: OpenStore, jobs: list[tuple[int, int]], limits: list[int]
) -> None:
    """Q16, Q20: in portions of any size, and never more than was asked for."""

    async def main() -> None:
        async with open_engine_store(clock=ManualClock(START)) as store:
            queue = store.queue(fresh("q"))
            stored = [
                (-priority, moment, await queue.enqueue(None, priority=priority, run_at=at(START + moment)))
                for priority, moment in jobs
            ]
            claimed: list[int] = []
            for n in range(len(jobs) + 1):
                handles = await queue.claim("w", limits[n % len(limits)])
                assert len(handles) <= limits[n % len(limits)]
                claimed += [handle.id for handle in handles]
            assert claimed == [id for _, moment, id in sorted(stored) if moment <= 0]

    virtually(main)


async def test_jobs_that_are_alike_are_claimed_in_the_order_of_enqueueing(store: Store) -> None:
    """Q16: also when the newest row is deleted between enqueues."""
    queue, ids = store.queue("q"), []
    for n in range(50):
        ids.append(await queue.enqueue(n))
        await kill(store.queue("other"), n)
        await store.queue("other").prune(0)
    assert [handle.id for handle in await queue.claim("w", 100)] == ids


async def test_a_delayed_job_of_high_priority_does_not_hide_a_due_one(store: Store) -> None:
    await store.queue("q").enqueue("later", priority=100, delay=10)
    await store.queue("q").enqueue("now", priority=-100)
    assert (await claim(store.queue("q"))).payload == "now"


async def test_a_queue_gives_only_its_own_jobs(store: Store) -> None:
    await store.queue("other").enqueue(1, priority=100)
    assert await store.queue("q").claim("w", 10) == []


@pytest.mark.parametrize("limit", [1, 2, 20, 21, 22])
async def test_as_many_are_leased_as_are_returned(store: Store, limit: int) -> None:
    """Q20."""
    queue = store.queue("q")
    await queue.enqueue_many(range(21))
    handles = await queue.claim("w", limit)
    assert len(handles) == (await queue.counts()).leased == min(limit, 21)


async def test_delayed_jobs_that_come_due_at_once_are_all_claimed(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(5), delay=10)
    await trio.sleep(10)
    assert [handle.payload for handle in await queue.claim("w", 10)] == [0, 1, 2, 3, 4]


async def test_two_claimers_never_get_the_same_job(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        await a.queue("q").enqueue_many(range(60))
        got: list[int] = []

        async def take(store: Store) -> None:
            while handles := await store.queue("q").claim("w", 7):
                got.extend(handle.id for handle in handles)

        async with trio.open_nursery() as nursery:
            for store in (a, b, a, b):
                nursery.start_soon(take, store)
        assert len(got) == len(set(got)) == 60


# ----------------------------------------------------------------------------------------------- what a claim does


async def test_a_claim_leases_the_job_to_the_worker_for_its_visibility(store: Store) -> None:
    queue = store.queue("q", visibility=20)
    id = await queue.enqueue(1)
    handle = await claim(queue, "me")
    found = await job(queue, id)
    assert (found.state, found.worker, found.lease_until) == ("leased", "me", after(store, 20))
    assert (handle.job, handle.lease_remaining) == (found, 20)


async def test_a_claim_may_ask_for_a_lease_of_its_own(store: Store) -> None:
    await store.queue("q").enqueue(1)
    handle = await claim(store.queue("q"), lease=7)
    assert (handle.lease_remaining, handle.job.visibility) == (7, 300)


async def test_attempts_and_fences_count_at_the_claim(store: Store) -> None:
    queue = store.queue("q", max_attempts=3)
    await queue.enqueue(1)
    for n in (1, 2, 3):
        handle = await claim(queue, lease=1)
        assert (handle.attempt, handle.fence) == (n, n)
        await trio.sleep(1)


async def test_lease_remaining_goes_down_to_zero(store: Store) -> None:
    await store.queue("q").enqueue(1)
    handle = await claim(store.queue("q"), lease=10)
    await trio.sleep(4)
    assert handle.lease_remaining == 6
    await trio.sleep(60)
    assert handle.lease_remaining == 0


async def test_a_lease_that_ran_out_makes_the_job_due_again(store: Store) -> None:
    await store.queue("q").enqueue(1)
    first = await claim(store.queue("q"), lease=10)
    await trio.sleep(9.999)
    assert await store.queue("q").claim("w2") == []
    await trio.sleep(0.001)
    second = await claim(store.queue("q"), "w2")
    assert (second.id, second.attempt, second.job.error) == (first.id, 2, "lease expired")


async def test_a_lapsed_job_keeps_its_place_in_the_order(store: Store) -> None:
    queue = store.queue("q")
    first = await queue.enqueue(1)
    await claim(queue, lease=1)
    await queue.enqueue(2)
    await trio.sleep(1)
    assert (await claim(queue)).id == first


async def test_a_job_whose_last_lease_ran_out_is_a_dead_letter_in_the_claim_itself(store: Store) -> None:
    queue = store.queue("q", max_attempts=2)
    id = await queue.enqueue(1)
    for _ in range(2):
        await claim(queue, lease=1)
        await trio.sleep(1)
    assert await queue.claim("w") == []
    dead = await job(queue, id)
    assert (dead.state, dead.reason, dead.attempt) == ("dead", "lease expired", 2)
    assert "attempts exhausted" in (dead.error or "")


async def test_an_expired_job_is_a_dead_letter_in_the_claim_itself(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, expires=10)
    await trio.sleep(10)
    assert await queue.claim("w") == []
    dead = await job(queue, id)
    assert (dead.state, dead.reason, dead.died_at, dead.attempt) == ("dead", "expired", now(store), 0)


async def test_a_job_is_claimed_until_the_very_millisecond_of_its_expiry(store: Store) -> None:
    await store.queue("q").enqueue(1, expires=10)
    await trio.sleep(9.999)
    assert len(await store.queue("q").claim("w")) == 1


async def test_a_job_that_expires_while_it_is_leased_can_be_finished(store: Store) -> None:
    await store.queue("q").enqueue(1, expires=10)
    handle = await claim(store.queue("q"), lease=100)
    await trio.sleep(50)
    assert await handle.heartbeat()
    assert await handle.ack()


async def test_a_job_that_expired_while_it_was_leased_is_not_claimed_again(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, expires=10)
    await claim(queue, lease=100)
    await trio.sleep(100)
    assert await queue.claim("w") == []
    assert (await job(queue, id)).reason == "expired"


async def test_a_live_job_behind_many_expired_ones_is_found(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(1_100), expires=1, priority=1)
    await trio.sleep(1)
    await queue.enqueue("live")
    assert (await claim(queue, wait=0.001)).payload == "live"


# ---------------------------------------------------------------------------------------------------------- waiting


async def made_due(queue: Queue, call: Callable[[], Awaitable[object]]) -> float:
    """After how many seconds a claim that waits gets its job, when `call` is made after 5."""
    took = float("nan")

    async def wait() -> None:
        nonlocal took
        took = await elapsed(partial(claim, queue, wait=1000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(5)
        await call()
    return took


async def test_a_claim_without_waiting_returns_at_once(store: Store) -> None:
    assert await elapsed(lambda: store.queue("q").claim("w")) == 0


async def test_a_claim_waits_as_long_as_it_may(store: Store) -> None:
    assert await elapsed(lambda: store.queue("q").claim("w", wait=30)) == 30


async def test_a_clock_set_back_does_not_make_a_claim_wait_longer(open_engine_store: OpenStore) -> None:
    """Its `wait` is so many seconds, not a moment."""
    clock = WallLikeClock()
    async with open_engine_store(clock=clock) as store:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(store.queue("q").claim, "w", wait=60))
            await trio.sleep(30)
            clock.step(-3_600)
        assert trio.current_time() - began == 60


async def test_a_claim_waits_by_the_clock_of_its_store(stepped: Store, clock: ManualClock) -> None:
    got: list[list[JobHandle]] = []

    async def wait() -> None:
        got.append(await stepped.queue("q").claim("w", wait=60))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for seconds in (30, -3_600, 29):
            await calm()
            clock.advance(seconds)
        await calm()
        assert not got
        clock.advance(1)
    assert got == [[]]


async def test_a_claim_that_waits_gets_what_is_there_at_once(store: Store) -> None:
    await store.queue("q").enqueue(1)
    assert await elapsed(lambda: claim(store.queue("q"), wait=30)) == 0


async def test_a_claim_that_waits_is_woken_by_an_enqueue(store: Store) -> None:
    queue = store.queue("q")
    assert await made_due(queue, lambda: queue.enqueue(1)) == 5


async def test_a_claim_that_has_just_missed_a_commit_is_made_again_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL it may not have taken what is there already when it looks when to claim next."""
    queue, real, took = store.queue("q"), jobs.claim, float("nan")

    def miss(tx: Tx, *_: Any) -> jobs.Claimed:
        monkeypatch.setattr(jobs, "claim", real)
        return jobs.Claimed([], tx.now(), blocked=True)

    async def wait() -> None:
        nonlocal took
        took = await elapsed(partial(claim, queue, wait=1000))

    monkeypatch.setattr(jobs, "claim", miss)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await calm()
        await queue.enqueue(1)
    assert took == 0


async def test_a_claim_that_waits_is_woken_by_an_enqueue_of_another_store(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        assert await made_due(a.queue("q"), lambda: b.queue("q").enqueue(1)) == 5


async def test_a_claim_that_waits_gets_a_delayed_job_at_its_moment(store: Store) -> None:
    """Q19: not a whole idle interval later."""
    queue = store.queue("q")
    await queue.enqueue(1, delay=2)
    assert await elapsed(lambda: claim(queue, wait=1000)) == 2


async def test_a_claim_that_waits_gets_a_sooner_job_at_its_moment(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1, delay=500)
    assert await made_due(queue, lambda: queue.enqueue(1, delay=2)) == 7


async def test_a_claim_that_waits_gets_a_job_whose_lease_runs_out(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1)
    await claim(queue, lease=20)
    assert await elapsed(lambda: claim(queue, wait=1000)) == 20


async def test_a_claim_that_waits_gets_a_job_that_was_given_a_retry(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1)
    handle = await claim(queue)
    assert await made_due(queue, lambda: handle.retry("no", delay=3)) == 8


async def test_a_claim_that_waits_gets_a_job_that_is_redriven(store: Store) -> None:
    queue = store.queue("q")
    await kill(queue, 1)
    assert await made_due(queue, queue.redrive_all) == 5


async def test_a_claim_that_waits_sleeps_without_polling(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1, delay=900)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(claim, queue, wait=1000))
        await calm()
        with TaskSteps() as steps:
            await trio.sleep(899)
            await calm()
    assert steps.count < 10


async def test_of_many_that_wait_each_job_wakes_one_who_gets_it(store: Store) -> None:
    queue = store.queue("q")
    got: list[list[JobHandle]] = []

    async def wait() -> None:
        got.append(await queue.claim("w", wait=100))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(wait)
        await calm()
        await queue.enqueue_many(range(4))
    assert sorted(len(handles) for handles in got) == [0] * 6 + [1] * 4


async def test_jobs_are_iterated_one_by_one_as_they_come(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many([1, 2])
    await queue.enqueue(3, delay=10)
    got: list[tuple[Any, float]] = []
    began = trio.current_time()
    async for handle in queue.jobs("w"):
        got.append((handle.payload, trio.current_time() - began))
        assert await handle.ack()
        if len(got) == 3:
            break
    assert got == [(1, 0), (2, 0), (3, 10)]


async def test_leaving_an_iteration_leaves_at_most_the_one_in_hand(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many([1, 2, 3])
    async for _ in queue.jobs("w", lease=5):
        break
    counts = await queue.counts()
    assert (counts.leased, counts.ready) == (1, 2)


# ------------------------------------------------------------------------------------------------------------ pause


async def test_a_paused_queue_gives_nothing(store: Store) -> None:
    await store.queue("q").enqueue(1)
    assert await store.queue("q").pause()
    assert await store.queue("q").claim("w") == []


async def test_a_pause_holds_for_every_process(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        await a.queue("q").enqueue(1)
        await a.queue("q").pause()
        assert await b.queue("q").claim("w") == []
        assert await made_due(b.queue("q"), a.queue("q").resume) == 5


async def test_a_pause_outlives_the_store(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as store:
        await store.queue("q").enqueue(1)
        await store.queue("q").pause()
    async with open_shared_store() as store:
        assert await store.queue("q").claim("w") == []


async def test_resuming_wakes_who_waits(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1)
    await queue.pause()
    assert await made_due(queue, queue.resume) == 5


async def test_pausing_and_resuming_tell_whether_they_changed_anything(store: Store) -> None:
    queue = store.queue("q")
    assert [await queue.resume(), await queue.pause(), await queue.pause()] == [False, True, False]
    assert [await queue.resume(), await queue.resume()] == [True, False]


async def test_a_pause_touches_neither_leased_jobs_nor_enqueues_nor_other_queues(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1)
    handle = await claim(queue)
    await queue.pause()
    assert await handle.heartbeat()
    assert await handle.ack()
    await queue.enqueue(2)
    await store.queue("other").enqueue(3)
    assert (await claim(store.queue("other"))).payload == 3


async def test_paused_queues_show_in_health(store: Store) -> None:
    await store.queue("b").pause()
    await store.queue("a").pause()
    assert (await store.health()).paused == ("a", "b")
