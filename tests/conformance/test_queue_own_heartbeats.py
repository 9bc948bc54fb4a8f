"""A handler that extends its lease, or cuts it short, by itself: its worker goes by the new end at once."""

from __future__ import annotations

import pytest
import trio

from alkstore import JobHandle, Store
from tests.conformance.helpers import running


@pytest.mark.parametrize("lease", [3, 1000])
async def test_a_lease_of_another_length_is_renewed_in_time(store: Store, lease: float) -> None:
    async def handler(job: JobHandle) -> None:
        await trio.sleep(50)
        assert await job.heartbeat(lease)
        await trio.sleep(2000)
        done.append((job.attempt, job.cancelled))

    done: list[tuple[int, bool]] = []
    await store.queue("q").enqueue(1)
    async with running(store.queue("q").work, handler):
        await trio.sleep(2100)
    assert done == [(1, False)]


async def test_a_heartbeat_just_before_a_renewal_makes_no_trouble(store: Store) -> None:
    async def handler(job: JobHandle) -> None:
        for _ in range(30):
            await trio.sleep(99.9)
            assert await job.heartbeat()
        done.append(job.attempt)

    done: list[int] = []
    await store.queue("q").enqueue(1)
    async with running(store.queue("q").work, handler):
        await trio.sleep(3100)
    assert done == [1]
