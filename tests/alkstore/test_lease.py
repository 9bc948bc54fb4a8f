"""Leases that several move at once, and finalisers that come to nothing: what is believed is what is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from alkstore import JobHandle, OutcomeUnknown, StopToken, Store, open_store
from alkstore.lease import Lease, Renewal

ROUNDS = 20
"""Trio wakes tasks in a random order."""


def test_of_two_renewals_the_one_that_was_written_last_counts() -> None:
    first, second = Renewal((3, 103)), Renewal((600, 700))
    for order in ((first, second), (second, first)):
        lease = Lease(3, 100)
        assert all(lease.accept(renewal) for renewal in order)
        assert (lease.length, lease.end) == (600, 700)


def test_a_refused_renewal_changes_nothing() -> None:
    told: list[int] = []
    lease = Lease(3, 100)
    lease.on_changed = lambda: told.append(lease.end)
    assert not lease.accept(Renewal(None))
    assert (lease.length, lease.end, told) == (3, 100, [])
    assert lease.accept(Renewal((5, 105)))
    assert told == [105]


@pytest.mark.parametrize(("length", "believed"), [(3, 53), (100, 100), (None, 100)])
def test_of_a_renewal_whose_answer_was_lost_no_more_is_believed_than_it_may_have_written(
    length: int | None, believed: int
) -> None:
    lease = Lease(90, 100)
    lease.doubt(length, now=50)
    assert lease.end == believed


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Store, StopToken, trio.Nursery]]:
    async with open_store(":memory:", inline=True) as store, trio.open_nursery() as nursery:
        stop = StopToken()
        yield store, stop, nursery
        stop.stop()


async def block_the_writer(store: Store, begin: float, seconds: float) -> None:
    await trio.sleep(begin)
    async with store.transaction():
        await trio.sleep(seconds)


async def row_end(store: Store, id: int) -> float:
    job = await store.get_job(id)
    assert job is not None
    assert job.lease_until is not None
    return job.lease_until.timestamp()


async def test_a_heartbeat_that_is_written_beside_a_renewal_of_the_worker(autojump_clock: MockClock) -> None:
    """Both wait for the writer, and are written in one commit; who wakes first does not matter."""
    for _ in range(ROUNDS):
        starts: list[int] = []
        differences: list[float] = []

        async def handler(job: JobHandle, store: Store, starts: list[int], differences: list[float]) -> None:
            starts.append(job.attempt)
            await trio.sleep(0.95)
            assert await job.heartbeat(600)
            now = store._context.engine.clock.now_ms() / 1000
            differences.append(await row_end(store, job.id) - now - job.lease_remaining)
            await trio.sleep(30)

        async with opened() as (store, stop, nursery):
            queue = store.queue("q", visibility=3)
            await queue.enqueue(1)
            handle = partial(handler, store=store, starts=starts, differences=differences)
            nursery.start_soon(partial(queue.work, handle, stop=stop, concurrency=2))
            await block_the_writer(store, 0.9, 1)
            await trio.sleep(40)
            assert await queue.list("leased") == []
        assert starts == [1]
        assert differences == pytest.approx([0.0], abs=0.001)


async def test_a_renewal_of_a_lock_that_is_written_beside_its_keepers(autojump_clock: MockClock) -> None:
    for _ in range(ROUNDS):
        async with opened() as (store, _, nursery):
            nursery.start_soon(block_the_writer, store, 0.9, 1)
            async with store.lock("x").hold(ttl=3) as held:
                await trio.sleep(0.95)
                assert await held.renew(600)
                await trio.sleep(10)
                assert await store.lock("x").acquire(5) is None
                assert held.remaining > 500


async def test_a_lease_of_less_than_a_second_does_not_cancel_who_has_asked_for_it(autojump_clock: MockClock) -> None:
    ended: list[bool] = []

    async def handler(job: JobHandle) -> None:
        await trio.sleep(2)
        assert await job.heartbeat(0.9)
        await trio.sleep(5)  # renewed meanwhile
        ended.append(True)

    async with opened() as (store, stop, nursery):
        queue = store.queue("q")
        id = await queue.enqueue(1)
        nursery.start_soon(partial(queue.work, handler, stop=stop))
        await trio.sleep(10)
        assert await queue.get_job(id) is None
    assert ended == [True]


@pytest.mark.parametrize("idle_for", [0.0, 5.0])
async def test_a_lease_that_its_handler_cuts_short_at_once_is_renewed(
    autojump_clock: MockClock, idle_for: float
) -> None:
    """Also when nobody minded leases at the moment, since there were none."""

    async def handler(job: JobHandle) -> None:
        await trio.sleep(0.05)
        assert await job.heartbeat(0.2)
        await trio.sleep(3)

    async with opened() as (store, stop, nursery):
        queue = store.queue("q", visibility=2)
        nursery.start_soon(partial(queue.work, handler, stop=stop))
        await trio.sleep(idle_for)
        id = await queue.enqueue(1)
        for _ in range(28):
            await trio.sleep(0.1)
            assert await queue.claim("somebody else") == []
        await trio.sleep(1)
        assert await queue.get_job(id) is None


async def test_a_finaliser_that_is_cancelled_while_it_waits_leaves_the_lease_alive(autojump_clock: MockClock) -> None:
    ended: list[bool] = []

    async def handler(job: JobHandle) -> None:
        await trio.sleep(0.95)
        with trio.move_on_after(0.5):
            await job.ack()
        await trio.sleep(30)
        ended.append(job.cancelled)

    async with opened() as (store, stop, nursery):
        queue = store.queue("q", visibility=3)
        id = await queue.enqueue(1)
        nursery.start_soon(partial(queue.work, handler, stop=stop))
        await block_the_writer(store, 0.9, 1)
        for _ in range(280):
            await trio.sleep(0.1)
            assert await queue.claim("somebody else") == []
        await trio.sleep(5)
        assert await queue.get_job(id) is None
    assert ended == [False]


async def test_returning_acknowledges_though_a_finaliser_of_the_handlers_own_comes_to_nothing(
    autojump_clock: MockClock,
) -> None:
    starts: list[int] = []

    async with opened() as (store, stop, nursery):
        queue = store.queue("q")

        async def give_up(job: JobHandle) -> None:
            with trio.move_on_after(0.3):
                await job.ack()

        async def handler(job: JobHandle) -> None:
            starts.append(job.attempt)
            await trio.sleep(0.95)
            nursery.start_soon(give_up, job)
            await trio.sleep(0.1)

        await queue.enqueue(1)
        with store.events() as events:
            nursery.start_soon(partial(queue.work, handler, stop=stop))
            await block_the_writer(store, 0.9, 1)
            await trio.sleep(1)
            assert await queue.list("leased") == []
            assert [event.kind for event in events._buffer if event.kind == "lost"] == []
    assert starts == [1]


async def test_who_has_settled_a_message_may_go_on_after_the_end_of_its_lease(autojump_clock: MockClock) -> None:
    ended: list[float] = []

    async def delivery(message: JobHandle) -> None:
        await trio.sleep(2)
        assert await message.ack()
        await trio.sleep(100)
        ended.append(trio.current_time())

    async with opened() as (store, stop, nursery):
        await store.outbox("mail").enqueue(1)
        began = trio.current_time()
        with store.events() as events:
            nursery.start_soon(partial(store.outbox("mail").deliver, delivery, stop=stop))
            await trio.sleep(200)
            assert [event.kind for event in events._buffer] == ["claimed", "settled"]
    assert ended == [began + 102]


async def test_what_is_raised_when_the_job_is_gone_is_told(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails_in_cleanup(job: JobHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError(f"in the cleanup of {job.payload}")

    async with opened() as (store, stop, nursery):
        queue = store.queue("q", visibility=3)
        cancelled, lost = await queue.enqueue_many(["cancelled", "lost"])
        with store.events() as events:
            nursery.start_soon(partial(queue.work, fails_in_cleanup, stop=stop, concurrency=2))
            await trio.sleep(0.3)
            await store.cancel_job(cancelled)
            await store.transact(
                lambda tx: tx.execute("UPDATE __alkstore_jobs SET fence = fence + 1 WHERE id = ?", (lost,))
            )
            await trio.sleep(2)
            told = {event.details["id"]: event.details["error"] for event in events._buffer if event.kind == "raised"}
        stop.stop()
    assert set(told) == {cancelled, lost}
    assert "in the cleanup of lost" in str(told[lost])
    assert len([one for one in caplog.records if one.name == "alkstore.worker"]) == 2


async def test_a_lease_that_is_cut_short_wakes_who_waits_for_its_end(autojump_clock: MockClock) -> None:
    async with opened() as (store, _, nursery):
        queue, lock = store.queue("q", visibility=300), store.lock("l")
        await queue.enqueue(1)
        (handle,) = await queue.claim("first")
        held = await lock.acquire(300)
        assert held is not None
        got_at: list[float] = []

        async def claim() -> None:
            assert await queue.claim("second", wait=1_000)
            got_at.append(trio.current_time())

        async def hold() -> None:
            async with lock.hold():
                got_at.append(trio.current_time())

        nursery.start_soon(claim)
        nursery.start_soon(hold)
        await trio.sleep(1)
        now = trio.current_time()
        assert await handle.heartbeat(0.2)
        assert await held.renew(0.2)
        await trio.sleep(1)
        assert got_at == pytest.approx([now + 0.2] * 2, abs=0.01)


async def test_of_a_heartbeat_whose_answer_was_lost_its_handler_has_no_more_than_it_may_have(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has cut the lease short, and the handler goes on: nobody may start the job beside it."""
    starts: list[int] = []

    async with opened() as (store, stop, nursery):
        queue = store.queue("q", visibility=30)
        engine = store._context.engine
        run = type(engine).run

        async def handler(job: JobHandle) -> None:
            starts.append(job.attempt)

            async def lose(self: object, *args: object, **options: object) -> object:
                monkeypatch.setattr(type(engine), "run", run)
                await run(engine, *args, **options)  # type: ignore[arg-type]
                raise OutcomeUnknown("the answer was lost")

            monkeypatch.setattr(type(engine), "run", lose)
            with pytest.raises(OutcomeUnknown):
                await job.heartbeat(0.5)
            await trio.sleep(10)

        id = await queue.enqueue(1)
        nursery.start_soon(partial(queue.work, handler, stop=stop, concurrency=2))
        await trio.sleep(15)
        assert await queue.get_job(id) is None
    assert starts == [1]
