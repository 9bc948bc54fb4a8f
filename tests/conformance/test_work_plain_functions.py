"""Plain functions as handlers: in threads of the worker's own, told to stop, and abandoned when they do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio

from alkstore import Discard, JobHandle, Snooze, Store
from tests.conformance.helpers import job, running

pytestmark = pytest.mark.usefixtures("real_time")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a handler waits for; opened at the latest when the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def until(store: Store, kind: str) -> dict[str, object]:
    """Wait for an event of this kind, and return its details."""
    with trio.fail_after(10), store.events() as events:
        async for event in events:
            if event.kind == kind:
                return dict(event.details)
    raise AssertionError


async def test_a_plain_function_runs_in_a_thread(store: Store) -> None:
    threads: list[int] = []

    def handler(handle: JobHandle) -> None:
        assert handle.payload == 1
        threads.append(threading.get_ident())

    async with running(store.queue("q").work, handler):
        await _settled(store, 1)
    assert threads != [threading.get_ident()]


async def _settled(store: Store, payload: object) -> dict[str, object]:
    """Enqueue, and wait until a worker has settled it."""
    with trio.fail_after(10), store.events() as events:
        await store.queue("q").enqueue(payload)
        async for event in events:
            if event.kind == "settled":
                return dict(event.details)
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "acked"), (ValueError("no"), "retried"), (Discard("no"), "failed"), (Snooze(60), "snoozed")],
)
async def test_what_it_returns_or_raises_means_what_it_means_for_others(
    store: Store, error: Exception | None, outcome: str
) -> None:
    def handler(_: object) -> None:
        if error is not None:
            raise error

    async with running(store.queue("q").work, handler):
        assert (await _settled(store, 1))["outcome"] == outcome


async def test_plain_functions_that_call_the_store_do_not_lock_each_other_out(store: Store) -> None:
    """T05: on one thread of trio's own, and as many of the worker's as there are handlers."""
    queue = store.queue("q")
    trio.to_thread.current_default_thread_limiter().total_tokens = 1

    def handler(handle: JobHandle) -> None:
        trio.from_thread.run(store.queue("out").enqueue, handle.payload)
        assert trio.from_thread.run(handle.heartbeat)

    await queue.enqueue_many(range(40))
    done = 0
    with trio.fail_after(10):
        async with running(queue.work, handler, concurrency=40):
            async for _ in store.queue("out").jobs("w"):
                done += 1
                if done == 40:
                    break


async def test_a_plain_function_is_told_to_stop_and_its_job_goes_back(store: Store) -> None:
    queue = store.queue("q")
    begun = trio.Event()
    stopped = threading.Event()

    def handler(handle: JobHandle) -> None:
        trio.from_thread.run_sync(begun.set)
        while not handle.cancelled:
            stopped.wait(0.001)
        raise Snooze(0)

    id = await queue.enqueue(1)
    with trio.fail_after(10):
        async with running(queue.work, handler) as stop:
            await begun.wait()
            stop.stop()
    found = await job(queue, id)
    assert (found.state, found.attempt) == ("ready", 0)


async def test_a_plain_function_is_told_that_its_job_was_cancelled(store: Store) -> None:
    queue = store.queue("q")
    begun, ended = trio.Event(), trio.Event()
    pause = threading.Event()

    def handler(handle: JobHandle) -> None:
        trio.from_thread.run_sync(begun.set)
        while not handle.cancelled:
            pause.wait(0.001)
        trio.from_thread.run_sync(ended.set)

    id = await queue.enqueue(1)
    with trio.fail_after(10):
        async with running(queue.work, handler):
            await begun.wait()
            assert await queue.cancel_job(id)
            await ended.wait()
    assert (await job(queue, id)).reason == "cancelled"


async def test_one_that_does_not_stop_is_abandoned_after_the_grace_and_reported(
    store: Store, gate: threading.Event
) -> None:
    queue = store.queue("q")
    begun = trio.Event()

    def handler(_: object) -> None:
        trio.from_thread.run_sync(begun.set)
        gate.wait(10)

    id = await queue.enqueue(1)
    reported: list[dict[str, object]] = []

    async def listen() -> None:
        reported.append(await until(store, "handler_abandoned"))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            async with running(queue.work, handler, grace=0.05) as stop:
                await begun.wait()
                stop.stop()
    assert reported[0]["id"] == id
    assert not gate.is_set()


async def test_the_job_of_one_that_was_abandoned_is_left_to_its_lease(store: Store, gate: threading.Event) -> None:
    queue = store.queue("q", visibility=60)
    begun = trio.Event()

    def handler(_: object) -> None:
        trio.from_thread.run_sync(begun.set)
        gate.wait(10)

    id = await queue.enqueue(1)
    with trio.fail_after(10):
        async with running(queue.work, handler, grace=0) as stop:
            await begun.wait()
            stop.stop()
    found = await job(queue, id)
    assert (found.state, found.attempt) == ("leased", 1)
    assert await queue.claim("w") == []


async def test_one_that_ends_within_the_grace_has_done_its_job(store: Store, gate: threading.Event) -> None:
    queue = store.queue("q")
    begun = trio.Event()

    def handler(_: object) -> None:
        trio.from_thread.run_sync(begun.set)
        gate.wait(10)

    id = await queue.enqueue(1)
    with trio.fail_after(10):
        async with running(queue.work, handler, grace=10) as stop:
            await begun.wait()
            stop.stop()
            gate.set()
    assert await queue.get_job(id) is None


async def test_a_plain_function_that_returns_an_awaitable_is_an_error_that_says_so(store: Store) -> None:
    async def forgotten(_: object) -> None:
        raise AssertionError

    def handler(handle: JobHandle) -> object:
        return forgotten(handle)

    queue = store.queue("q")
    async with running(queue.work, handler):
        await _settled(store, 1)
    (retried,) = await queue.list("delayed")
    assert "async def" in (retried.error or "")
