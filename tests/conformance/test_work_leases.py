"""Leases of running handlers: kept alive in time, and handlers cancelled before somebody else may start."""

from __future__ import annotations

import pytest
import trio

from alkstore import JobHandle, ManualClock, Store
from tests.conformance.helpers import OpenStore, calm, claim, job, running, seen


class Sleeper:
    """A handler that sleeps, and when it began and ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.handles: list[JobHandle] = []

    async def __call__(self, handle: JobHandle) -> None:
        self.begun.append(trio.current_time())
        self.handles.append(handle)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.ended.append(trio.current_time())


async def test_a_healthy_job_is_never_given_to_somebody_else(store: Store) -> None:
    """Q04: the handler takes several leases, and a second worker looks all the time."""
    queue = store.queue("q", visibility=3)
    id = await queue.enqueue(1)
    async with running(queue.work, Sleeper(10)):
        await calm()
        for _ in range(100):
            assert await queue.claim("thief") == []
            await trio.sleep(0.1)
        await trio.sleep(0.1)
    assert await queue.get_job(id) is None


async def test_a_lease_is_renewed_at_a_third_of_its_length_or_sooner(store: Store) -> None:
    """Q04."""
    queue = store.queue("q", visibility=30)
    await queue.enqueue(1)
    lowest = 30.0

    async def handler(handle: JobHandle) -> None:
        nonlocal lowest
        for _ in range(1_000):
            await trio.sleep(0.1)
            lowest = min(lowest, handle.lease_remaining)

    async with running(queue.work, handler):
        await trio.sleep(101)
    assert lowest >= 19.9


async def test_jobs_with_different_leases_each_have_their_own_period(store: Store) -> None:
    """Q04: in one worker."""
    short, long = store.queue("q", visibility=3), store.queue("q", visibility=300)
    ids = [await short.enqueue(1), await long.enqueue(2)]
    async with running(short.work, Sleeper(100), concurrency=2):
        for _ in range(100):
            await trio.sleep(1)
            assert [handle.id for handle in await short.claim("thief", 10)] == []
        await trio.sleep(0.1)
    assert [await short.get_job(id) for id in ids] == [None, None]


async def test_a_long_job_costs_one_attempt(store: Store) -> None:
    queue = store.queue("q", visibility=3)
    await queue.enqueue(1)
    sleeper = Sleeper(60)
    async with running(queue.work, sleeper):
        await trio.sleep(61)
    assert [(handle.attempt, handle.fence) for handle in sleeper.handles] == [(1, 1)]


async def test_a_handler_may_extend_its_lease_itself(store: Store) -> None:
    queue = store.queue("q", visibility=3)
    await queue.enqueue(1)

    async def handler(handle: JobHandle) -> None:
        assert await handle.heartbeat(600)
        assert handle.lease_remaining == 600
        await trio.sleep(500)

    async with running(queue.work, handler):
        await trio.sleep(501)
    assert (await queue.counts()).leased == 0


async def test_a_handler_whose_job_was_taken_away_is_cancelled_and_settles_nothing(store: Store) -> None:
    """Q01, Q10: its lease ended while nobody could renew it."""
    queue = store.queue("q", visibility=30)
    id = await queue.enqueue(1)
    with store.events() as events:
        async with running(queue.work, Sleeper(100)) as stop:
            await calm()
            stop.stop()  # take nothing more
            await queue.cancel_job(id)
            await queue.redrive(id)
            thief = await claim(queue, "thief")
            await trio.sleep(20)
        assert len(seen(events, "settled")) == 0
    assert (await job(queue, id)).worker == "thief"
    assert await thief.ack()


async def test_a_handler_is_cancelled_before_its_lease_ends_when_it_cannot_be_renewed(
    open_embedded_store: OpenStore,
) -> None:
    """The only writer is taken for longer than the lease lasts."""
    async with open_embedded_store(transaction_timeout=3_600) as store:
        queue = store.queue("q", visibility=30)
        await queue.enqueue(1)
        remaining: list[float] = []

        async def handler(handle: JobHandle) -> None:
            try:
                await trio.sleep_forever()
            finally:
                remaining.append(handle.lease_remaining)

        async with running(queue.work, handler) as stop:
            await calm()
            stop.stop()
            async with store.transaction():
                await trio.sleep(29.99)
        assert 0 < remaining[0] <= 1


async def test_a_forward_step_past_the_lease_cancels_the_handler(stepped: Store, clock: ManualClock) -> None:
    """S13, for a lease."""
    queue = stepped.queue("q", visibility=30)
    id = await queue.enqueue(1)
    sleeper = Sleeper(1_000)
    with stepped.events() as events:
        async with running(queue.work, sleeper) as stop:
            await trio.sleep(2)  # longer than a short job: its lease is watched now
            stop.stop()
            clock.advance(31)
            await calm()
            assert len(sleeper.ended) == 1
        assert [event.details["id"] for event in seen(events, "lost")] == [id]
        assert seen(events, "settled") == []
    assert sleeper.handles[0].cancelled


async def test_a_forward_step_within_the_lease_renews_it(stepped: Store, clock: ManualClock) -> None:
    queue = stepped.queue("q", visibility=30)
    await queue.enqueue(1)
    sleeper = Sleeper(1_000)
    async with running(queue.work, sleeper, grace=0):
        await trio.sleep(2)
        for _ in range(5):
            clock.advance(29)
            await calm()
            assert sleeper.handles[0].lease_remaining == 30


async def test_a_clock_set_back_loses_no_lease(stepped: Store, clock: ManualClock) -> None:
    queue = stepped.queue("q", visibility=30)
    id = await queue.enqueue(1)
    async with running(queue.work, Sleeper(10)):
        await trio.sleep(2)
        clock.advance(-86_400)
        await trio.sleep(9)
    assert await queue.get_job(id) is None


async def test_a_clock_set_back_leaves_no_job_leased_for_longer_than_its_lease(
    embedded_stepped: Store, clock: ManualClock
) -> None:
    queue = embedded_stepped.queue("q", visibility=30)
    await queue.enqueue(1)
    await claim(queue)
    clock.advance(-86_400)
    assert await queue.claim("w2") == []
    clock.advance(30)
    assert len(await queue.claim("w2")) == 1


async def test_after_a_clock_was_set_back_what_was_due_is_still_due(
    embedded_stepped: Store, clock: ManualClock
) -> None:
    await embedded_stepped.queue("q").enqueue("was due")
    await embedded_stepped.queue("q").enqueue("was not", delay=60)
    clock.advance(-3_600)
    assert [handle.payload for handle in await embedded_stepped.queue("q").claim("w", 10)] == ["was due"]


@pytest.mark.parametrize("seconds", [30, 100_000])
async def test_a_clock_that_stands_still_makes_nothing_due(stepped: Store, clock: ManualClock, seconds: int) -> None:
    """However long the test itself takes: a clock that is moved by hand has not been set back by standing still."""
    await stepped.queue("q").enqueue(1, delay=20)
    with stepped.events() as events:
        await trio.sleep(seconds)
        await stepped.queue("q").enqueue(2, delay=20)
        assert await stepped.queue("q").claim("w", 10) == []
        assert seen(events, "clock_set_back") == []
