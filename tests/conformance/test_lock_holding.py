"""Holding a lock for a body: waiting for it, renewing it, losing it, and giving it back whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from alkstore import LockLost, ManualClock, Store
from tests.conformance.helpers import (
    OpenStore,
    TaskSteps,
    calm,
    elapsed,
    fails,
    locks,
    rob_lock,
)


async def hold(store: Store, ttl: float = 30) -> None:
    async with store.lock("l").hold(ttl):
        pass


async def forever(store: Store) -> None:
    async with store.lock("l").hold():
        await trio.sleep_forever()


async def test_a_free_lock_is_held_at_once_and_released_at_the_end(store: Store) -> None:
    async with store.lock("l").hold(30) as held:
        assert (held.name, held.remaining) == ("l", 30)
        assert await store.lock("l").acquire(1) is None
    assert await locks(store) == {}


async def test_a_lock_is_held_for_thirty_seconds_by_itself(store: Store) -> None:
    async with store.lock("l").hold() as held:
        assert held.remaining == 30


async def freed_after(store: Store, free: Callable[[], Awaitable[object]]) -> float:
    """Seconds until somebody who waits holds the lock, which `free` frees after 5."""
    waited = float("nan")

    async def wait() -> None:
        nonlocal waited
        waited = await elapsed(partial(hold, store))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(5)
        await free()
    return waited


async def test_who_waits_is_woken_by_the_release(store: Store) -> None:
    held = await store.lock("l").acquire(1000)
    assert held is not None
    assert await freed_after(store, held.release) == 5


async def test_who_waits_is_woken_by_the_release_in_another_store(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        held = await a.lock("l").acquire(1000)
        assert held is not None
        assert await freed_after(b, held.release) == 5


async def test_who_waits_is_woken_by_the_end_of_the_lease(store: Store) -> None:
    await store.lock("l").acquire(20)
    assert await elapsed(partial(hold, store)) == 20


async def test_who_waits_sleeps_without_polling(store: Store) -> None:
    held = await store.lock("l").acquire(1000)
    assert held is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, store)
        await calm()
        with TaskSteps() as steps:
            await trio.sleep(900)
            await calm()
        await held.release()
    assert steps.count < 10


async def test_all_who_wait_have_their_turn_one_at_a_time(store: Store) -> None:
    inside, turns = 0, 0

    async def work() -> None:
        nonlocal inside, turns
        async with store.lock("l").hold():
            inside += 1
            assert inside == 1
            await trio.sleep(1)
            inside -= 1
            turns += 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(work)
    assert turns == 10


async def test_a_lock_is_renewed_while_it_is_held(store: Store) -> None:
    async with store.lock("l").hold(3) as held:
        for _ in range(100):
            await trio.sleep(1)
            assert held.remaining >= 1
            assert await store.lock("l").acquire(1) is None


async def test_the_shortest_ttl_can_be_held(store: Store) -> None:
    async with store.lock("l").hold(0.1):
        await trio.sleep(5)


# ------------------------------------------------------------------------------------------------------ being lost


async def test_a_lost_lease_cancels_the_body_and_raises_lock_lost_alone(store: Store) -> None:
    ended: list[float] = []

    async def body() -> None:
        async with store.lock("l").hold(30):
            await rob_lock(store, "l")
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())

    await fails(LockLost, body)
    assert ended[0] <= 10


async def test_a_body_is_cancelled_before_somebody_else_can_have_the_lock(open_embedded_store: OpenStore) -> None:
    """L02: the holder cannot renew, since somebody has the only writer for too long."""
    async with open_embedded_store(transaction_timeout=3_600) as store:
        ended: list[float] = []

        async def body() -> None:
            async with store.lock("l").hold(30) as held:
                try:
                    await trio.sleep_forever()
                finally:
                    ended.append(held.remaining)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, LockLost, body)
            await calm()
            async with store.transaction():
                await trio.sleep(40)
        assert 0 < ended[0] <= 1


async def test_a_forward_step_past_the_lease_is_a_lost_lock(stepped: Store, clock: ManualClock) -> None:
    async def body() -> None:
        async with stepped.lock("l").hold(30):
            clock.advance(31)
            await trio.sleep_forever()

    await fails(LockLost, body)


async def test_a_forward_step_within_the_lease_renews_it(stepped: Store, clock: ManualClock) -> None:
    async with stepped.lock("l").hold(30) as held:
        for _ in range(10):
            clock.advance(29)
            await calm()
            assert held.remaining == 30


async def test_a_clock_set_back_does_not_lose_the_lock(stepped: Store, clock: ManualClock) -> None:
    async with stepped.lock("l").hold(30) as held:
        clock.advance(-3_600)
        await calm()
        clock.advance(20)
        await calm()
        assert held.remaining == 30


async def test_a_lease_that_ended_unnoticed_before_the_body_did_is_reported_too(
    stepped: Store, clock: ManualClock
) -> None:
    """A body without a checkpoint cannot be cancelled; what it did at the end, it did without the lock."""
    with pytest.raises(LockLost):
        async with stepped.lock("l").hold(30):
            clock.advance(31)


async def test_a_lock_may_be_given_back_early(store: Store) -> None:
    async with store.lock("l").hold(30) as held:
        assert await held.release()
        await trio.sleep(100)
        assert await store.lock("l").acquire(1) is not None


async def test_what_the_body_raises_when_it_is_cancelled_leaves_with_the_loss_in_its_notes(store: Store) -> None:
    async def body() -> None:
        async with store.lock("l").hold(30):
            await rob_lock(store, "l")
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("clean-up failed")

    error = await fails(ValueError, body)
    assert any("LockLost" in note for note in error.__notes__)


async def test_a_lost_lock_leaves_the_winners_row_alone(store: Store) -> None:
    async def body() -> None:
        async with store.lock("l").hold(30):
            await rob_lock(store, "l")
            await trio.sleep_forever()

    await fails(LockLost, body)
    assert await locks(store) == {"l": "thief"}


# ------------------------------------------------------------------------------------------------- shape, clean-up


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), ExceptionGroup("g", [ValueError("x"), KeyError("y")]), KeyboardInterrupt(), LockLost("mine")],
)
async def test_what_the_body_raises_leaves_as_itself(store: Store, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with store.lock("l").hold():
            raise error
    assert caught.value is error
    assert await locks(store) == {}


async def test_a_return_out_of_the_body_releases_the_lock(store: Store) -> None:
    async def inside() -> int:
        async with store.lock("l").hold():
            return 7

    assert await inside() == 7
    assert await locks(store) == {}


async def test_a_cancelled_body_releases_the_lock_at_once(store: Store) -> None:
    """T02: the clean-up is shielded, so the lock is free now and not when its ttl ends."""
    with trio.move_on_after(0.1):
        await forever(store)
    assert await elapsed(partial(hold, store)) == 0


async def test_who_is_cancelled_while_it_waits_does_not_hold_the_lock(store: Store) -> None:
    held = await store.lock("l").acquire(1000)
    assert held is not None
    with trio.move_on_after(5) as scope:
        await forever(store)
    assert scope.cancelled_caught
    await held.release()
    assert await locks(store) == {}


async def test_of_several_bodies_that_are_cancelled_none_keeps_the_lock(store: Store) -> None:
    """T02."""
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(forever, store)
        await calm()
        nursery.cancel_scope.cancel()
    assert await locks(store) == {}


async def test_locks_can_be_held_inside_each_other(store: Store) -> None:
    async with store.lock("a").hold() as a, store.lock("b").hold() as b:
        assert a.fencing_token < b.fencing_token
    assert await locks(store) == {}
