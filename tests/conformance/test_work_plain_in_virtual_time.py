"""Plain handlers under an autojump clock: virtual time stands still while one runs in its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio

from alkstore import JobHandle, Store
from alkstore.testing import drain, pass_time, settle
from tests.conformance.helpers import running

REAL_S = 0.03
"""An autojump clock leaps as soon as all tasks wait; a thread that takes this long would be leapt over."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a handler waits for; opened at the latest when the test is over."""
    event = threading.Event()
    yield event
    event.set()


class Slow:
    """A plain handler that takes real time, and notes when it begins and ends in virtual time."""

    def __init__(self) -> None:
        self.moments: list[tuple[float, float]] = []

    def __call__(self, job: JobHandle) -> None:
        began = trio.from_thread.run_sync(trio.current_time)
        threading.Event().wait(REAL_S)
        self.moments.append((began, trio.from_thread.run_sync(trio.current_time)))


async def test_no_time_passes_and_no_timeout_strikes_while_one_runs(store: Store) -> None:
    queue, slow = store.queue("q", max_attempts=1), Slow()
    await queue.enqueue_many([1, 2, 3], delay=5)
    began = trio.current_time()
    async with running(queue.work, slow, timeout=0.001, concurrency=2):
        await pass_time(5)
        assert slow.moments == [(began + 5, began + 5)] * 3
    assert await queue.dead() == []


async def test_settle_and_drain_wait_for_one(store: Store) -> None:
    queue, slow = store.queue("q"), Slow()
    async with running(queue.work, slow):
        await queue.enqueue(1)
        await settle()
        assert len(slow.moments) == 1
        await queue.enqueue_many([2, 3])
        began = trio.current_time()
        await drain(store)
        assert (len(slow.moments), trio.current_time()) == (3, began)


async def test_one_that_was_abandoned_holds_time_no_longer(store: Store, gate: threading.Event) -> None:
    queue, begun = store.queue("q"), trio.Event()

    def stuck(job: JobHandle) -> None:
        trio.from_thread.run_sync(begun.set)
        gate.wait(10)

    id = await queue.enqueue(1)
    async with running(queue.work, stuck):
        await begun.wait()
        assert await queue.cancel_job(id)
        await trio.sleep(1_000)
    assert not gate.is_set()
