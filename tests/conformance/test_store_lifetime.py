"""Opening and closing a store: options, what leaves the block and how, and what happens to those who wait."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from alkstore import AlkstoreError, LockLost, SchemaMissing, StopToken, Store, StoreClosed, StoreError, open_store
from tests.conformance.helpers import OpenStore, calm, claim, elapsed, fails, mortal_engine

# --------------------------------------------------------------------------------------------------------- opening


async def test_a_store_is_empty_at_first(store: Store) -> None:
    health = await store.health()
    assert (health.queues, health.paused, health.schedules.total, health.clock_steps) == ({}, (), 0, 0)


async def test_what_is_stored_is_there_after_a_close(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as store:
        id = await store.queue("q").enqueue({"n": 1}, key="k")
        await store.schedule("s", "@every 1m", "q")
    async with open_shared_store() as store:
        handle = await claim(store.queue("q"))
        assert (handle.id, handle.payload, handle.key) == (id, {"n": 1}, "k")
        assert (await store.health()).schedules.total == 1


async def test_a_store_may_be_open_more_than_once(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b, open_shared_store() as c:
        id = await a.queue("q").enqueue(1)
        assert await b.get_job(id) is not None
        assert (await claim(c.queue("q"))).id == id


async def test_one_that_is_closed_leaves_the_others_open(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a:
        async with open_shared_store() as b:
            await b.queue("q").enqueue(1)
        assert await (await claim(a.queue("q"))).ack()


async def test_many_may_open_a_new_store_at_once(open_shared_store: OpenStore) -> None:
    ids: set[int] = set()

    async def use() -> None:
        async with open_shared_store() as store:
            ids.add(await store.queue("q").enqueue(1))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(use)
    assert len(ids) == 8


async def test_a_store_is_not_made_where_that_is_forbidden(open_shared_store: OpenStore) -> None:
    with pytest.raises(SchemaMissing, match="create=False"):
        async with open_shared_store(create=False, migrate=False):
            pass


async def test_a_store_that_is_there_opens_without_making_anything(open_shared_store: OpenStore) -> None:
    async with open_shared_store():
        pass
    async with open_shared_store(create=False, migrate=False) as store:
        await store.queue("q").enqueue(1)


async def test_a_store_in_memory_is_gone_with_its_block() -> None:
    for _ in range(2):
        async with open_store(":memory:", inline=True) as store:
            assert (await store.queue("q").counts()).ready == 0
            await store.queue("q").enqueue(1)


async def test_a_store_says_what_it_was_opened_on(store: Store) -> None:
    assert store.target == ":memory:" or "/" in store.target


@pytest.mark.parametrize("steps", [0.0, 0.001, 0.002, 0.005, 0.01])
@pytest.mark.usefixtures("real_time")
async def test_an_opening_that_is_cancelled_leaves_nothing_open(open_engine_store: OpenStore, steps: float) -> None:
    before = threading.active_count()
    with trio.move_on_after(steps):
        async with open_engine_store():
            await trio.sleep_forever()
    async with open_engine_store() as store:
        await store.queue("q").enqueue(1)
    assert threading.active_count() <= before + 1  # one that trio keeps for reuse


# ----------------------------------------------------------------------------------------------- exceptions, shape


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ExceptionGroup("g", [ValueError("x"), KeyError("y")]),
        ExceptionGroup("g", [ValueError("x")]),
        BaseExceptionGroup("g", [KeyboardInterrupt()]),
        KeyboardInterrupt(),
        SystemExit(3),
        LockLost("the body's own"),
        StoreError("the body's own"),
        GeneratorExit(),
    ],
    ids=lambda error: f"{type(error).__name__}({len(getattr(error, 'exceptions', ''))})",
)
async def test_what_the_body_raises_leaves_as_itself(open_engine_store: OpenStore, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        async with open_engine_store():
            raise error
    assert caught.value is error


@pytest.mark.filterwarnings("ignore::trio.TrioDeprecationWarning")
def test_in_a_run_with_loose_groups_the_bodys_error_leaves_as_itself_too(tmp_path: Path) -> None:
    """There a nursery lets a group of the body's own through as if it were its own."""
    error = ExceptionGroup("the body's own", [ValueError("first"), KeyError("second")])

    async def within(context: AbstractAsyncContextManager[object]) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with context:
                raise error
        assert caught.value is error

    async def main() -> None:
        await within(open_store(tmp_path / "other.db"))
        async with open_store(tmp_path / "app.db") as store:
            await within(store.transaction())
            await within(store.lock("l").hold())

    trio.run(main, strict_exception_groups=False)


async def test_a_body_that_is_cancelled_is_cancelled_and_no_more(open_engine_store: OpenStore) -> None:
    with trio.move_on_after(1) as scope:
        async with open_engine_store():
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_return_out_of_the_body_closes_the_store(open_engine_store: OpenStore) -> None:
    async def inside() -> Store:
        async with open_engine_store() as store:
            return store

    await fails(StoreClosed, (await inside()).queue("q").enqueue, 1)


async def test_the_context_of_the_bodys_exception_is_its_own(open_engine_store: OpenStore) -> None:
    async def body() -> None:
        async with open_engine_store():
            try:
                raise KeyError("first")
            except KeyError as first:
                raise ValueError("second") from first

    error = await fails(ValueError, body)
    assert isinstance(error.__cause__, KeyError)
    assert error.__context__ is error.__cause__


async def test_every_error_is_an_alkstore_error() -> None:
    import alkstore

    errors = [getattr(alkstore, name) for name in alkstore.__all__]
    errors = [e for e in errors if isinstance(e, type) and issubclass(e, Exception)]
    handlers_own = {alkstore.Discard, alkstore.Snooze}
    assert [e for e in errors if not issubclass(e, AlkstoreError)] == [e for e in errors if e in handlers_own]


async def test_errors_of_the_store_itself_have_one_root() -> None:
    import alkstore

    errors = [
        alkstore.StoreBusy,
        alkstore.StoreFull,
        alkstore.StoreReadOnly,
        alkstore.StoreCorrupt,
        alkstore.StoreForeign,
        alkstore.MixedSQLite,
        alkstore.StoreUnavailable,
        alkstore.SchemaTooNew,
        alkstore.SchemaMissing,
        alkstore.StoreClosed,
        alkstore.OutcomeUnknown,
    ]
    assert all(issubclass(error, StoreError) for error in errors)


# --------------------------------------------------------------------------------------------------------- closing


Call = Callable[[Store], Awaitable[object]]

CALLS: dict[str, Call] = {
    "enqueue": lambda store: store.queue("q").enqueue(1),
    "claim": lambda store: store.queue("q").claim("w"),
    "claim that waits": lambda store: store.queue("q").claim("w", wait=100),
    "get_job": lambda store: store.get_job(1),
    "list": lambda store: store.queue("q").list(),
    "counts": lambda store: store.queue("q").counts(),
    "acquire": lambda store: store.lock("l").acquire(1),
    "schedule": lambda store: store.schedule("s", "@every 1m", "q"),
    "unschedule": lambda store: store.unschedule("s"),
    "run_schedules": lambda store: store.run_schedules(StopToken()),
    "work": lambda store: store.queue("q").work(print, stop=StopToken()),
    "health": lambda store: store.health(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_call_after_the_close_says_that_the_store_is_closed(open_engine_store: OpenStore, call: Call) -> None:
    async with open_engine_store() as store:
        pass
    await fails(StoreClosed, call, store)


async def hold(store: Store) -> None:
    async with store.lock("l").hold():
        await trio.sleep_forever()


async def wait_for_lock(store: Store) -> None:
    async with store.lock("taken").hold():
        pass


WAITERS: dict[str, Call] = {
    "claim that waits": lambda store: store.queue("q").claim("w", wait=10_000),
    "iteration": lambda store: anext(store.queue("q").jobs("w")),
    "claim that waits for a moment": lambda store: store.queue("later").claim("w", wait=10_000),
    "work": lambda store: store.queue("q").work(print, stop=StopToken()),
    "deliver": lambda store: store.outbox("o").deliver(_never, stop=StopToken()),
    "run_schedules": lambda store: store.run_schedules(StopToken()),
    "hold": hold,
    "hold that waits": wait_for_lock,
}


async def _never(_: object) -> None:
    raise AssertionError


@pytest.mark.parametrize("wait", WAITERS.values(), ids=WAITERS)
async def test_who_waits_when_the_store_is_closed_is_told(open_engine_store: OpenStore, wait: Call) -> None:
    """It was started outside of the block, so nothing cancels it: or it would sleep for ever."""
    told: list[float] = []

    async def waiting(store: Store) -> None:
        await fails(StoreClosed, wait, store)
        told.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        async with open_engine_store() as store:
            await store.lock("taken").acquire(10_000)
            await store.queue("later").enqueue(1, delay=10_000)
            nursery.start_soon(waiting, store)
            await calm()
        closed_at = trio.current_time()
        await trio.sleep(1)  # sooner than any lease has to be renewed
        nursery.cancel_scope.cancel()
    assert [at >= closed_at for at in told] == [True]


async def test_a_subscription_ends_with_the_store(open_engine_store: OpenStore) -> None:
    async with open_engine_store() as store:
        events = store.events()
        await store.queue("q").enqueue(1)
        await store.queue("q").claim("w")
    assert [event.kind async for event in events] == ["claimed"]


async def test_closing_takes_no_time_when_there_is_nothing_to_wait_for(open_engine_store: OpenStore) -> None:
    async def use() -> None:
        async with open_engine_store() as store:
            await store.queue("q").enqueue(1)

    assert await elapsed(use) == 0


async def test_what_was_begun_before_the_end_of_the_block_is_stored(open_shared_store: OpenStore) -> None:
    async with trio.open_nursery() as nursery, open_shared_store() as store:
        for n in range(100):
            nursery.start_soon(store.queue("q").enqueue, n)
        await calm()
    async with open_shared_store() as store:
        assert (await store.queue("q").counts()).ready == 100


# ------------------------------------------------------------------------------------------- a background task dies


class Died(Exception):
    pass


async def test_if_a_background_task_dies_the_body_is_cancelled_and_its_error_leaves(
    open_engine_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    death = mortal_engine(monkeypatch, Died())
    cancelled = False

    async def body() -> None:
        nonlocal cancelled
        async with open_engine_store():
            death.set()
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                cancelled = True
                raise

    await fails(Died, body)
    assert cancelled


async def test_if_a_background_task_dies_what_the_body_raises_leaves_with_a_note(
    open_engine_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    death = mortal_engine(monkeypatch, Died())

    async def body() -> None:
        async with open_engine_store():
            death.set()
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("clean-up")

    error = await fails(ValueError, body)
    assert any("Died" in note for note in error.__notes__)


@pytest.mark.parametrize("wait", WAITERS.values(), ids=WAITERS)
async def test_if_a_background_task_dies_who_waits_gets_the_error(
    open_engine_store: OpenStore, monkeypatch: pytest.MonkeyPatch, wait: Call
) -> None:
    death = mortal_engine(monkeypatch, Died())

    async def body(nursery: trio.Nursery) -> None:
        async with open_engine_store() as store:
            await store.lock("taken").acquire(10_000)
            await store.queue("later").enqueue(1, delay=10_000)
            nursery.start_soon(fails, StoreClosed, wait, store)
            await calm()
            death.set()
            await trio.sleep_forever()

    with trio.fail_after(1):  # sooner than any lease has to be renewed
        async with trio.open_nursery() as nursery:
            await fails(Died, body, nursery)
