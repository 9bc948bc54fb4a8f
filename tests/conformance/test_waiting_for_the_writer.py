"""What waits for the only writer is judged, and dated, by the moment at which it got it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
import trio

from alkstore import Store
from tests.conformance.helpers import OpenStore, after, claim, elapsed, job

T = TypeVar("T")


@pytest.fixture
async def patient(open_embedded_store: OpenStore) -> AsyncIterator[Store]:
    """A store whose writer may be taken for as long as a test likes."""
    async with open_embedded_store(transaction_timeout=3_600, busy_timeout=3_600) as store:
        yield store


async def behind(store: Store, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """Return what `call` returns when somebody else has the writer for `seconds` after it was made."""
    results: list[T] = []
    taken = trio.Event()

    async def waits() -> None:
        await taken.wait()
        results.append(await call())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits)  # outside of the transaction, so that it may call the store
        async with store.transaction():
            taken.set()
            await trio.sleep(seconds)
            assert results == []
    (result,) = results
    return result


async def test_a_lease_begins_when_the_claim_got_the_writer(patient: Store) -> None:
    """Q11: a lease that was counted from before the wait would be over already."""
    queue = patient.queue("q")
    await queue.enqueue(1)
    (handle,) = await behind(patient, 2, lambda: queue.claim("w", lease=1))
    assert handle.lease_remaining == 1
    assert await queue.claim("w2") == []
    assert await handle.ack()


async def test_a_delay_begins_when_the_enqueue_got_the_writer(patient: Store) -> None:
    """Q11."""
    queue = patient.queue("q")
    id = await behind(patient, 2, lambda: queue.enqueue(1, delay=5))
    assert (await job(queue, id)).run_at == after(patient, 5)


async def test_a_heartbeat_that_waited_for_longer_than_its_lease_is_refused(patient: Store) -> None:
    """Q10 (a), Q11."""
    queue = patient.queue("q")
    await queue.enqueue(1)
    handle = await claim(queue, lease=1)
    assert not await behind(patient, 3, handle.heartbeat)
    assert len(await queue.claim("w2")) == 1


@pytest.mark.parametrize("method", ["ack", "retry", "fail"])
async def test_a_finaliser_that_waited_for_longer_than_its_lease_is_refused(patient: Store, method: str) -> None:
    """Q11."""
    queue = patient.queue("q")
    await queue.enqueue(1)
    handle = await claim(queue, lease=1)
    assert not await behind(patient, 3, getattr(handle, method))


async def test_a_lock_is_acquired_for_its_ttl_from_the_end_of_the_wait(patient: Store) -> None:
    """Q11, for a lock."""
    held = await behind(patient, 3, lambda: patient.lock("l").acquire(1))
    assert held is not None
    assert held.remaining == 1


async def test_a_renewal_that_waited_for_longer_than_the_ttl_is_refused(patient: Store) -> None:
    """L02: it revives nothing, though nobody has taken the lock."""
    held = await patient.lock("l").acquire(1)
    assert held is not None
    await trio.sleep(0.5)
    assert not await behind(patient, 3, held.renew)
    assert await patient.lock("l").acquire(1) is not None


async def test_a_claim_that_waits_and_was_kept_from_the_writer_gets_its_job_right_after(patient: Store) -> None:
    """Q19: not a whole idle interval later."""
    queue = patient.queue("q")
    await queue.enqueue(1, delay=1)
    took: list[float] = []

    async def waits() -> None:
        took.append(await elapsed(lambda: claim(queue, wait=1_000)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits)
        await trio.sleep(0.9)
        async with patient.transaction():
            await trio.sleep(1.1)
    assert took == [pytest.approx(2, abs=0.1)]
