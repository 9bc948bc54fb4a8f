"""Locks by hand: acquire, renew, release, fencing tokens, and who may do what to whose lock."""

from __future__ import annotations

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alkstore import LockHandle, ManualClock, Store
from tests.conformance.helpers import START, OpenStore, after, fresh, locks, rob_lock, virtually


async def held(store: Store, name: str = "l", ttl: float = 10) -> LockHandle:
    handle = await store.lock(name).acquire(ttl)
    assert handle is not None
    return handle


async def test_a_free_lock_is_acquired_for_its_ttl(store: Store) -> None:
    handle = await held(store, "nightly", 10)
    assert (handle.name, handle.remaining, handle.expires_at) == ("nightly", 10, after(store, 10))


async def test_a_held_lock_is_not_acquired(store: Store) -> None:
    await held(store)
    assert await store.lock("l").acquire(10) is None


async def test_a_lock_is_not_acquired_twice_by_the_same_caller(store: Store) -> None:
    lock = store.lock("l")
    assert await lock.acquire(10) is not None
    assert await lock.acquire(10) is None


async def test_another_lock_is_free(store: Store) -> None:
    await held(store, "a")
    await held(store, "b")


async def test_a_lock_excludes_across_stores(open_shared_store: OpenStore) -> None:
    """L05, with one clock."""
    async with open_shared_store() as a, open_shared_store() as b:
        handle = await held(a)
        assert await b.lock("l").acquire(10) is None
        await handle.release()
        assert await b.lock("l").acquire(10) is not None


async def test_a_lease_is_over_at_its_end_for_the_next_one_too(store: Store) -> None:
    await held(store)
    await trio.sleep(9.999)
    assert await store.lock("l").acquire(10) is None
    await trio.sleep(0.001)
    assert await store.lock("l").acquire(10) is not None


async def test_a_released_lock_is_free(store: Store) -> None:
    assert await (await held(store)).release()
    assert await store.lock("l").acquire(10) is not None


async def test_the_row_of_a_released_lock_is_deleted(store: Store) -> None:
    await (await held(store)).release()
    assert await locks(store) == {}


async def test_the_rows_of_locks_that_expired_long_ago_are_deleted(stepped: Store, clock: ManualClock) -> None:
    for n in range(10):
        await held(stepped, f"old{n}", 1)
    clock.advance(86_400)
    await held(stepped, "young", 1)
    clock.advance(86_400)
    await held(stepped, "new", 1)
    assert set(await locks(stepped)) <= {"young", "new"}


async def test_every_owner_is_random(store: Store) -> None:
    owners = set()
    for _ in range(20):
        handle = await held(store)
        owners.add(handle.owner)
        await handle.release()
    assert len(owners) == 20


# ------------------------------------------------------------------------------------------------------- renewing


async def test_a_renewal_gives_the_ttl_from_now(store: Store) -> None:
    handle = await held(store)
    await trio.sleep(4)
    assert await handle.renew()
    assert (handle.remaining, handle.expires_at) == (10, after(store, 10))


async def test_a_renewal_may_ask_for_another_ttl(store: Store) -> None:
    handle = await held(store)
    assert await handle.renew(60)
    assert handle.remaining == 60
    await trio.sleep(59.999)
    assert await store.lock("l").acquire(10) is None


async def test_renewals_keep_a_lock(store: Store) -> None:
    handle = await held(store, ttl=1)
    for _ in range(10):
        await trio.sleep(0.999)
        assert await handle.renew()
    assert await store.lock("l").acquire(1) is None


@pytest.mark.parametrize("late", [0, 0.001, 100])
async def test_an_expired_lock_is_not_renewed_though_nobody_took_it(store: Store, late: float) -> None:
    """L02: a renewal revives nothing."""
    handle = await held(store)
    await trio.sleep(10 + late)
    assert not await handle.renew()
    assert handle.remaining == 0
    assert await store.lock("l").acquire(10) is not None


async def test_an_expired_lock_is_not_released(store: Store) -> None:
    handle = await held(store)
    await trio.sleep(10)
    assert not await handle.release()


async def test_a_late_release_does_not_free_the_next_holders_lock(store: Store) -> None:
    """L01: the owner is compared, not the name."""
    late = await held(store, ttl=1)
    await trio.sleep(1.5)
    holder = await held(store)
    assert not await late.release()
    assert await store.lock("l").acquire(10) is None
    assert await holder.renew()


async def test_a_late_renewal_does_not_extend_the_next_holders_lock(store: Store) -> None:
    """L03."""
    late = await held(store, ttl=1)
    await trio.sleep(1)
    holder = await held(store, ttl=10)
    assert not await late.renew(1000)
    await trio.sleep(10)
    assert await store.lock("l").acquire(10) is not None
    assert not await holder.renew()


async def test_a_stolen_lock_is_neither_renewed_nor_released(store: Store) -> None:
    """L03: and the thief's row is left as it is."""
    handle = await held(store)
    await rob_lock(store, "l")
    assert not await handle.renew()
    assert not await handle.release()
    assert await locks(store) == {"l": "thief"}


async def test_a_lock_is_released_once(store: Store) -> None:
    handle = await held(store)
    assert await handle.release()
    assert not await handle.release()
    assert not await handle.renew()


# -------------------------------------------------------------------------------------------------- fencing tokens


async def test_fencing_tokens_come_from_one_counter_and_only_grow(store: Store) -> None:
    tokens = []
    for name in ("a", "b", "a", "c", "a"):
        handle = await held(store, name)
        tokens.append(handle.fencing_token)
        await handle.release()
    assert tokens == sorted(set(tokens))


async def test_a_renewal_keeps_its_token(store: Store) -> None:
    handle = await held(store)
    token = handle.fencing_token
    await handle.renew()
    assert handle.fencing_token == token


async def test_fencing_tokens_grow_over_a_close_and_after_rows_were_deleted(
    open_shared_store: OpenStore, clock: ManualClock
) -> None:
    tokens = []
    for _ in range(3):
        async with open_shared_store(clock=clock) as store:
            handle = await held(store)
            tokens.append(handle.fencing_token)
            await handle.release()
            clock.advance(3 * 86_400)
    assert tokens == sorted(set(tokens))


# ------------------------------------------------------------------------------------------------------ clock, law


async def test_a_clock_set_back_leaves_no_lock_held_for_longer_than_its_ttl(stepped: Store, clock: ManualClock) -> None:
    handle = await held(stepped, ttl=10)
    clock.advance(-86_400)
    assert await stepped.lock("l").acquire(10) is None
    assert await handle.renew()
    clock.advance(10)
    assert await stepped.lock("l").acquire(10) is not None


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["acquire", "renew", "release", "advance"]), st.integers(1, 8)), max_size=30
    )
)
def test_at_most_one_owner_holds_a_lock(open_engine_store: OpenStore, steps: list[tuple[str, int]]) -> None:
    """Whatever is acquired, renewed and released in which order: against a naive model."""

    async def main() -> None:
        clock = ManualClock(START)
        async with open_engine_store(clock=clock) as store:
            lock = store.lock(fresh("l"))
            handles: list[LockHandle] = []
            holder, end = None, 0
            for action, n in steps:
                free = holder is None or end <= clock.now_ms()
                if action == "advance":
                    clock.advance(float(n))
                elif action == "acquire":
                    handle = await lock.acquire(n)
                    assert (handle is not None) == free
                    if handle is not None:
                        handles.append(handle)
                        holder, end = handle, clock.now_ms() + n * 1000
                elif handles:
                    handle = handles[-1 - n % len(handles)]
                    right = handle is holder and not free
                    assert await (handle.renew(n) if action == "renew" else handle.release()) == right
                    if right:
                        holder, end = (holder, clock.now_ms() + n * 1000) if action == "renew" else (None, 0)
            tokens = [handle.fencing_token for handle in handles]
            assert tokens == sorted(set(tokens))

    virtually(main)
