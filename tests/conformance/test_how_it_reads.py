"""The public names, used the way a program uses them."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from actors import Supervisor
from alkstore import JobHandle, ScheduleOpts, StopToken, open_store
from alkstore.clock import ManualClock, TrioClock
from tests.conformance.helpers import OpenStore, calm


async def test_an_app_reads_like_this(open_engine_store: OpenStore) -> None:
    sent: list[Any] = []
    posted: list[Any] = []

    async def send_email(job: JobHandle) -> None:
        sent.append(job.payload)

    async def post_webhook(message: JobHandle) -> None:
        posted.append(message.payload)

    async with open_engine_store() as store:
        emails = store.queue("emails")
        await emails.enqueue({"to": "alice@example.com"}, priority=5, delay=10)
        await emails.enqueue_many([{"n": n} for n in range(10)], expires=3600)
        await store.schedule("sweep", "@every 15m", "sweeps", {"older_than": 86400}, ScheduleOpts(max_attempts=1))

        async with store.transaction() as tx:
            await tx.outbox_enqueue("webhooks", {"order": 1})

        stop = StopToken()
        async with Supervisor(stop) as sup:
            await sup.start("schedules", store.run_schedules)
            await sup.start("emails", partial(emails.work, send_email, concurrency=20))
            await sup.start("webhooks", partial(store.outbox("webhooks").deliver, post_webhook))
            await trio.sleep(901)
            stop.stop()
        assert (await store.queue("sweeps").counts()).ready == 1
    assert len(sent) == 11
    assert posted == [{"order": 1}]


async def test_by_hand_it_reads_like_this(open_engine_store: OpenStore) -> None:
    async with open_engine_store() as store:
        await store.queue("emails").enqueue_many([1, 2])
        jobs = await store.queue("emails").claim("worker-1", 10)
        assert [(handle.payload, handle.attempt) for handle in jobs] == [(1, 1), (2, 1)]
        for handle in jobs:
            assert await handle.ack()

        async with store.lock("nightly").hold(ttl=30) as held:
            assert held.fencing_token > 0


async def test_in_a_bare_nursery_it_reads_like_this(open_engine_store: OpenStore) -> None:
    done: list[object] = []

    async def handler(job: JobHandle) -> None:
        done.append(job.payload)

    async with open_engine_store() as store:
        stop = StopToken()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run_schedules, stop)
            nursery.start_soon(partial(store.queue("q").work, handler, stop=stop))
            await store.queue("q").enqueue(1)
            await calm()
            stop.stop()
    assert done == [1]


async def test_a_deterministic_test_reads_like_this() -> None:
    async with open_store(":memory:", inline=True, clock=TrioClock()) as store:
        await store.queue("q").enqueue(1, delay=86_400)
        (handle,) = await store.queue("q").claim("w", wait=100_000)
        assert await handle.ack()
    clock = ManualClock(1_800_000_000_000)
    async with open_store(":memory:", inline=True, clock=clock) as store:
        await store.queue("q").enqueue(1, delay=10)
        clock.advance(10)
        assert len(await store.queue("q").claim("w")) == 1
        clock.set(1_800_000_000_000)
