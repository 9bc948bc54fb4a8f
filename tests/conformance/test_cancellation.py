"""Cancelling an operation at any step: it has had no effect, or all of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from alkstore import Store
from tests.conformance.helpers import calm, cancelled_at, claim, fresh, kill, locks, no_group

Case = Callable[[int], Awaitable[bool]]


async def at_every_step(case: Case) -> None:
    """Run `case` with a cancellation at its first step, at its second, and so on: until it is over before that."""
    steps = 1
    while await case(steps):
        steps += 1
        assert steps < 100
    assert steps > 1, "it was never cancelled"


async def test_an_enqueue_is_stored_or_not(store: Store) -> None:
    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        ids: list[int] = []

        async def enqueue() -> None:
            ids.append(await queue.enqueue(1))

        cancelled = await cancelled_at(enqueue, steps)
        assert [job.id for job in await queue.list()] == ids
        return cancelled

    await at_every_step(case)


async def test_many_are_stored_all_or_none(store: Store) -> None:
    """T01: in the middle of a long call, too; and the connection is whole afterwards."""

    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        cancelled = await cancelled_at(lambda: queue.enqueue_many(range(300)), steps)
        assert (await queue.counts()).ready in (0, 300)
        await queue.enqueue(1)
        return cancelled

    await at_every_step(case)


@pytest.mark.parametrize("what", ["sweep", "prune"])
async def test_one_page_of_sweeping_or_pruning_is_done_and_counted_or_not(store: Store, what: str) -> None:
    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        await queue.enqueue(1, expires=0)
        if what == "prune":
            await queue.sweep_expired()
        before = await queue.counts()
        done: list[int] = []

        async def call() -> None:
            done.append(await (queue.prune(0) if what == "prune" else queue.sweep_expired()))

        cancelled = await cancelled_at(call, steps)
        assert (await queue.counts() == before) == (done == [])
        return cancelled

    await at_every_step(case)


async def test_a_call_that_is_cancelled_in_the_middle_runs_to_its_end(store: Store) -> None:
    """T01: at some moment of its real time, in the engine's own threads."""
    queue = store.queue("q")
    for n in range(10):
        before = (await queue.counts()).ready
        returned = False
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, scope, n * 0.001)
                await queue.enqueue_many(range(300))
                returned = True
                nursery.cancel_scope.cancel()
        stored = (await queue.counts()).ready - before
        assert stored in ((300,) if returned else (0, 300))


async def _cancel_after(scope: trio.CancelScope, seconds: float) -> None:
    await trio.to_thread.run_sync(time.sleep, seconds)
    scope.cancel()


async def test_a_claim_leaves_no_job_leased_behind(store: Store) -> None:
    """T02: jobs that come too late are given back at once, with their attempt."""

    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"), max_attempts=1)
        await queue.enqueue_many(range(3))
        got: list[object] = []

        async def take() -> None:
            got.extend(await queue.claim("w", 10))

        cancelled = await cancelled_at(take, steps)
        assert len(got) == (await queue.counts()).leased == (0 if cancelled else 3)
        assert len(await queue.claim("w", 10)) == 3 - len(got)
        return cancelled

    await at_every_step(case)


async def test_a_claim_that_waits_leaves_no_job_leased_behind(store: Store) -> None:
    """T02."""

    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        got: list[object] = []

        async def take() -> None:
            got.extend(await queue.claim("w", wait=60))

        cancelled = await cancelled_while_others(take, steps, lambda: queue.enqueue(1))
        assert len(got) == (await queue.counts()).leased == (0 if cancelled else 1)
        return cancelled

    await at_every_step(case)


async def cancelled_while_others(
    call: Callable[[], Awaitable[object]], steps: int, act: Callable[[], Awaitable[object]]
) -> bool:
    """As `cancelled_at`, for what waits until `act` is called."""
    cancelled = False

    async def watched() -> None:
        nonlocal cancelled
        cancelled = await cancelled_at(call, steps)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched)
        await calm()
        await act()
    return cancelled


async def test_an_iteration_leaves_no_job_leased_behind(store: Store) -> None:
    """T02."""

    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        await queue.enqueue_many(range(3))
        got: list[object] = []

        async def take() -> None:
            async for handle in queue.jobs("w"):
                got.append(handle)
                if len(got) == 3:
                    return

        cancelled = await cancelled_at(take, steps)
        assert (await queue.counts()).leased == len(got)
        return cancelled

    await at_every_step(case)


@pytest.mark.parametrize("method", ["ack", "retry", "fail"])
async def test_a_finaliser_happens_or_not(store: Store, method: str) -> None:
    async def case(steps: int) -> bool:
        queue = store.queue(fresh("q"))
        await queue.enqueue(1)
        handle = await claim(queue)
        done: list[bool] = []

        async def settle() -> None:
            done.append(await getattr(handle, method)())

        cancelled = await cancelled_at(settle, steps)
        assert (await queue.counts()).leased == (0 if done else 1)
        assert await handle.ack() == (not done)
        return cancelled

    await at_every_step(case)


async def test_an_acquired_lock_is_returned_or_released(store: Store) -> None:
    """T02."""

    async def case(steps: int) -> bool:
        name = fresh("l")
        got: list[object] = []

        async def acquire() -> None:
            got.append(await store.lock(name).acquire(60))

        cancelled = await cancelled_at(acquire, steps)
        assert (name in await locks(store)) == bool(got) == (not cancelled)
        return cancelled

    await at_every_step(case)


async def test_a_lock_that_is_waited_for_is_held_by_nobody_afterwards(store: Store) -> None:
    """T02."""

    async def case(steps: int) -> bool:
        name = fresh("l")
        held = await store.lock(name).acquire(60)
        assert held is not None

        async def hold() -> None:
            async with store.lock(name).hold():
                pass

        cancelled = await cancelled_while_others(hold, steps, held.release)
        assert name not in await locks(store)
        return cancelled

    await at_every_step(case)


async def test_a_schedule_is_registered_or_not(store: Store) -> None:
    async def case(steps: int) -> bool:
        before = (await store.health()).schedules.total
        done: list[object] = []

        async def register() -> None:
            done.append(await store.schedule(fresh("s"), "@every 1m", "q"))

        cancelled = await cancelled_at(register, steps)
        assert (await store.health()).schedules.total == before + len(done)
        return cancelled

    await at_every_step(case)


async def test_every_operation_is_a_checkpoint(store: Store) -> None:
    """Each can be cancelled, and lets others run, also when it has nothing to do."""
    queue, lock = store.queue("q"), store.lock("l")
    (dead,) = await kill(queue, 1)
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: queue.enqueue(1),
        lambda: queue.enqueue_many([]),
        lambda: queue.claim("empty"),
        lambda: queue.get_job(dead),
        lambda: store.get_job(dead),
        queue.list,
        queue.dead,
        queue.counts,
        lambda: queue.cancel_job(dead),
        lambda: queue.redrive(999),
        queue.redrive_all,
        lambda: queue.prune(1000),
        queue.sweep_expired,
        queue.pause,
        queue.resume,
        lambda: lock.acquire(1),
        lambda: store.schedule("s", "@every 1m", "q"),
        lambda: store.unschedule("none"),
        store.health,
    ]
    for operation in operations:
        with trio.testing.assert_checkpoints():
            await operation()
        with trio.CancelScope() as scope:
            scope.cancel()
            await operation()
        assert scope.cancelled_caught


async def test_who_is_cancelled_gets_cancelled_once(store: Store) -> None:
    """T01."""
    queue = store.queue("q")
    cancellations = 0

    async def waits() -> None:
        nonlocal cancellations
        try:
            await queue.claim("w", wait=100)
        except trio.Cancelled:
            cancellations += 1
            raise

    with no_group():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits)
            await calm()
            nursery.cancel_scope.cancel()
    assert cancellations == 1
