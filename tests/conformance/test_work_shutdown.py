"""Stopping a worker: no new work, a grace for what runs, and jobs that go back at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from alkstore import JobHandle, StopToken, Store
from tests.conformance.helpers import OpenStore, calm, claim, job, running, seen


def sleeping(seconds: float) -> Callable[[JobHandle], Awaitable[None]]:
    async def handler(_: JobHandle) -> None:
        await trio.sleep(seconds)

    return handler


async def test_after_a_stop_nothing_more_is_claimed(store: Store) -> None:
    queue = store.queue("q")

    async def handler(_: object) -> None:
        await trio.sleep(5)

    await queue.enqueue(1)
    async with running(queue.work, handler) as stop:
        await calm()
        stop.stop()
        await queue.enqueue(2)
        await trio.sleep(10)
    assert [job.payload for job in await queue.list()] == [2]


async def test_a_worker_that_has_nothing_in_hand_ends_at_once(store: Store) -> None:
    began = trio.current_time()
    async with running(store.queue("q").work, sleeping(1)):
        await calm()
    assert trio.current_time() == began


async def test_a_worker_whose_stop_is_flipped_before_it_begins_takes_nothing(store: Store) -> None:
    await store.queue("q").enqueue(1)
    stop = StopToken()
    stop.stop()
    await store.queue("q").work(sleeping(1), stop=stop)
    assert (await store.queue("q").counts()).ready == 1


async def test_a_handler_that_ends_within_the_grace_has_done_its_job(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1)
    began = trio.current_time()
    async with running(queue.work, sleeping(29.9)):
        await calm()
    assert trio.current_time() == began + 29.9
    assert await queue.get_job(id) is None


async def test_a_handler_that_does_not_is_cancelled_and_its_job_goes_back_at_once(store: Store) -> None:
    """H02: claimable now, and not when its lease ends."""
    queue = store.queue("q")
    id = await queue.enqueue(1)
    began = trio.current_time()
    async with running(queue.work, sleeping(60), grace=3):
        await calm()
    assert trio.current_time() == began + 3
    assert (await claim(queue)).id == id


async def test_the_grace_is_thirty_seconds_by_itself(store: Store) -> None:
    await store.queue("q").enqueue(1)
    began = trio.current_time()
    async with running(store.queue("q").work, sleeping(1_000)):
        await calm()
    assert trio.current_time() == began + 30


async def test_deploys_cost_no_attempts(store: Store) -> None:
    """H04: interrupted by us is not failed."""
    queue = store.queue("q", max_attempts=2)
    id = await queue.enqueue(1)
    for n in range(1, 4):
        async with running(queue.work, sleeping(60), grace=1):
            await calm()
        found = await job(queue, id)
        assert (found.state, found.attempt, found.fence, found.error) == ("ready", 0, n, "interrupted by shutdown")


async def test_a_job_that_went_back_keeps_its_place_in_the_order(store: Store) -> None:
    queue = store.queue("q")
    first = await queue.enqueue(1)
    async with running(queue.work, sleeping(60), grace=0):
        await calm()
        await queue.enqueue(2)
    assert (await claim(queue)).id == first


async def test_the_lease_is_renewed_until_the_last_handler_has_ended(store: Store) -> None:
    """H01: or others would steal what is being drained."""
    queue = store.queue("q", visibility=2)
    id = await queue.enqueue(1)
    async with running(queue.work, sleeping(20)) as stop:
        await calm()
        stop.stop()
        for _ in range(19):
            await trio.sleep(1)
            assert await queue.claim("thief") == []
    assert await queue.get_job(id) is None


@pytest.mark.parametrize("n", range(5))
async def test_a_handler_that_returns_in_the_moment_of_the_stop_has_done_its_job(store: Store, n: int) -> None:
    """H05: sixty at once; each is done, and none is done and failed as well."""
    queue = store.queue("q")
    await queue.enqueue_many(range(60))
    with store.events() as events:
        async with running(queue.work, sleeping(1), concurrency=60, grace=0):
            await trio.sleep(1)
        outcomes = [event.details["outcome"] for event in seen(events, "settled")]
    counts = await queue.counts()
    assert (counts.leased, counts.dead, counts.delayed) == (0, 0, 0)
    assert len(outcomes) == 60
    assert outcomes.count("acked") == 60 - counts.ready


async def test_what_is_done_when_the_stop_comes_is_acknowledged(store: Store) -> None:
    """H05: the last ack is shielded from the stop."""
    queue = store.queue("q")
    await queue.enqueue_many(range(50))
    stop = StopToken()
    done = 0

    async def handler(_: object) -> None:
        nonlocal done
        done += 1
        if done == 25:
            stop.stop()

    await queue.work(handler, stop=stop, grace=0)
    assert (await queue.counts()).ready == 50 - done


async def test_a_cancelled_worker_gives_its_jobs_back(store: Store) -> None:
    """T02."""
    queue = store.queue("q", max_attempts=1)
    await queue.enqueue_many(range(5))
    with trio.move_on_after(3):
        await queue.work(sleeping(60), concurrency=5, stop=StopToken())
    assert [(j.attempt, j.error) for j in await queue.list()] == [(0, "interrupted by cancellation")] * 5


async def test_a_worker_that_is_cancelled_while_it_waits_leaves_nothing_behind(store: Store) -> None:
    queue = store.queue("q")
    with trio.move_on_after(3):
        await queue.work(sleeping(60), stop=StopToken())
    await queue.enqueue(1)
    assert (await queue.counts()).ready == 1


async def test_a_handler_may_shield_its_end_from_the_grace(store: Store) -> None:
    queue = store.queue("q", visibility=5)
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    began = trio.current_time()
    async with running(queue.work, handler, grace=1):
        await calm()
    assert trio.current_time() == began + 100
    assert await queue.get_job(id) is None


async def test_two_stops_are_one(store: Store) -> None:
    await store.queue("q").enqueue(1)
    began = trio.current_time()
    async with running(store.queue("q").work, sleeping(60), grace=10) as stop:
        await calm()
        stop.stop()
        await trio.sleep(5)
        stop.stop()
    assert trio.current_time() == began + 10


async def test_a_worker_that_stops_leaves_the_others_working(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        done: list[str] = []

        def handler(name: str) -> object:
            async def handle(job: JobHandle) -> None:
                done.append(name)

            return handle

        async with running(b.queue("q").work, handler("b")):
            async with running(a.queue("q").work, handler("a")):
                await calm()
            await a.queue("q").enqueue(1)
            await trio.sleep(1)
        assert done == ["b"]
