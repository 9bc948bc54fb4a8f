"""What must not break leases and their work: a busy store, a failing release, odd errors, odd renewals."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from alkstore import JobHandle, LeadershipLost, LockLost, Snooze, StopToken, Store, StoreBusy, StoreFull
from alkstore.sql import jobs, locks
from tests.conformance.helpers import OpenStore, calm, cancelled_at, claim, elapsed, fails, job, now, running, seen

BUSY_TIMEOUT = 0.5

# ------------------------------------------------------------ somebody else writes for longer than the busy_timeout


@pytest.fixture
async def store_and_other(open_embedded_file_store: OpenStore) -> AsyncIterator[tuple[Store, Store]]:
    """A store that soon finds its database busy, and the store of somebody else who makes it so.

    Without threads: to ask a busy file again and again takes them real time.
    """
    async with (
        open_embedded_file_store(inline=True, busy_timeout=BUSY_TIMEOUT, leadership_ttl=9) as store,
        open_embedded_file_store(inline=True, transaction_timeout=3_600) as other,
    ):
        yield store, other


async def lasting(seconds: float, other: Store) -> None:
    """Somebody else holds the write lock."""
    async with other.transaction():
        await trio.sleep(seconds)


async def test_handlers_go_on_and_are_acknowledged(store_and_other: tuple[Store, Store]) -> None:
    """One has a renewal due while the store is busy, and the other is finished then."""
    store, other = store_and_other
    queue = store.queue("q", visibility=9)
    ids = [await queue.enqueue(seconds) for seconds in (12, 4)]
    ended: list[int] = []

    async def handler(handle: JobHandle) -> None:
        await trio.sleep(handle.payload)
        ended.append(handle.payload)

    async with running(queue.work, handler, concurrency=2):
        await trio.sleep(2)
        await lasting(4, other)
        await trio.sleep(10)
    assert ended == [4, 12]
    assert [await store.get_job(id) for id in ids] == [None, None]


async def test_a_finished_job_is_acknowledged_for_as_long_as_its_lease_lives(
    store_and_other: tuple[Store, Store],
) -> None:
    store, other = store_and_other
    queue = store.queue("q", visibility=100)
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        await trio.sleep(1)

    async with running(queue.work, handler):
        await calm()
        await lasting(60, other)
        await trio.sleep(1)
        assert await store.get_job(id) is None


@pytest.mark.parametrize("takes", [0.5, math.inf])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_worker_fails_with_the_stores_error_when_the_lease_is_over(
    store_and_other: tuple[Store, Store], takes: float, count: int
) -> None:
    """With one, although several jobs, or a job and the renewals, may meet it in the same moment."""
    store, other = store_and_other
    queue = store.queue("q", visibility=3)
    ids = [await queue.enqueue(n) for n in range(count)]

    async def handler(_: object) -> None:
        await trio.sleep(takes)

    async def main() -> None:
        async with running(queue.work, handler, concurrency=count):
            await calm()
            await lasting(30, other)

    assert await elapsed(partial(fails, StoreBusy, main)) < 3 + 2 * BUSY_TIMEOUT
    assert [(await job(queue, id)).attempt for id in ids] == [1] * count


@pytest.mark.parametrize("visibility", [3, 60])
async def test_who_cannot_acknowledge_is_told_by_the_store_why(
    store_and_other: tuple[Store, Store], visibility: int
) -> None:
    """However long the lease is, and also of a worker that is stopped the hard way meanwhile."""
    store, other = store_and_other
    queue, outbox = store.queue("q", visibility=visibility), store.outbox("o")

    async def nothing(_: object) -> None:
        await trio.sleep(0.5)

    async def until_cancelled(call: Callable[[], Awaitable[object]]) -> None:
        with trio.move_on_after(5):
            await call()

    calls: list[Callable[[], Awaitable[object]]] = [
        partial(queue.work, nothing, stop=StopToken()),
        partial(outbox.deliver, nothing, stop=StopToken()),
        partial(outbox.run_once, "w", nothing),
    ]
    calls += [partial(until_cancelled, call) for call in calls]
    for call in calls:
        await queue.enqueue(1)
        await outbox.enqueue(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(fails, StoreBusy, call))
            await calm()
            await lasting(100, other)
        await trio.sleep(100)


async def test_a_handler_goes_on_while_a_free_slot_cannot_claim(store_and_other: tuple[Store, Store]) -> None:
    store, other = store_and_other
    queue = store.queue("q", visibility=90)
    await queue.enqueue("first")
    ended: list[str] = []

    async def handler(handle: JobHandle) -> None:
        await trio.sleep(10)
        ended.append(handle.payload)

    async with running(queue.work, handler, concurrency=2):
        await trio.sleep(1)
        await queue.enqueue("second", delay=1)
        await lasting(5, other)
        await trio.sleep(20)
    assert ended == ["first", "second"]


async def test_a_job_is_given_back_at_a_stop(store_and_other: tuple[Store, Store]) -> None:
    store, other = store_and_other
    queue = store.queue("q", visibility=90)
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery, running(queue.work, handler, grace=0):
        await calm()
        nursery.start_soon(lasting, 5, other)
        await trio.sleep(1)
    found = await job(queue, id)
    assert (found.state, found.attempt) == ("ready", 0)


async def test_who_settles_a_job_himself_is_told_at_once(store_and_other: tuple[Store, Store]) -> None:
    store, other = store_and_other
    queue = store.queue("q")
    await queue.enqueue(1)
    handle = await claim(queue)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lasting, 30, other)
        await calm()
        for settle in (handle.ack, handle.retry, handle.fail, lambda: handle.snooze(1), handle.heartbeat):
            assert await elapsed(partial(fails, StoreBusy, settle)) < 2 * BUSY_TIMEOUT
    assert await handle.ack()


async def test_a_lock_is_held_on(store_and_other: tuple[Store, Store]) -> None:
    store, other = store_and_other
    async with store.lock("l").hold(9) as held:
        await trio.sleep(2)
        await lasting(4, other)
        await trio.sleep(9)
        assert held.remaining > 0


async def test_a_lock_is_lost_when_the_store_is_busy_to_the_end_of_its_lease(
    store_and_other: tuple[Store, Store],
) -> None:
    store, other = store_and_other

    async def main() -> None:
        async with store.lock("l").hold(9):
            await lasting(30, other)

    assert await elapsed(partial(fails, LockLost, main)) < 9


async def test_a_leader_goes_on_leading(store_and_other: tuple[Store, Store]) -> None:
    """Its renewal and a tick are due while the store is busy."""
    store, other = store_and_other
    events = store.events()
    await store.schedule("s", "@every 4s", "q", 1)
    async with running(store.run_schedules):
        await trio.sleep(2)
        await lasting(4, other)
        await trio.sleep(9)
    assert len(seen(events, "leader")) == 1
    assert seen(events, "lost") == []
    assert (await store.queue("q").counts()).ready >= 3


@pytest.mark.parametrize("every", [1, 60], ids=["ticking", "waiting"])
async def test_a_leader_fails_with_one_error_when_its_lease_is_over(
    store_and_other: tuple[Store, Store], every: int
) -> None:
    """Its tick, its renewal and its release all meet the busy store."""
    store, other = store_and_other
    await store.schedule("s", f"@every {every}s", "q")

    async def main() -> None:
        async with running(store.run_schedules):
            await calm()
            await lasting(30, other)

    error = await fails(Exception, main)
    assert type(error) is LeadershipLost, repr(error)


# ------------------------------------------------------------------------- leaving, when the last write fails as well


async def test_a_release_that_fails_is_a_note_on_what_the_body_raises(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "release", raising(StoreFull("no room")))

    async def main() -> None:
        async with store.lock("l").hold():
            raise error

    error = ValueError("the body's own")
    assert await fails(ValueError, main) is error
    assert error.__notes__ == ["besides, on the way out: StoreFull('no room')"]
    assert error.__context__ is None


async def test_a_release_that_fails_does_not_end_a_cancellation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "release", raising(StoreFull("no room")))
    with trio.move_on_after(1) as scope:
        async with store.lock("l").hold():
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_release_that_fails_is_raised_after_a_body_that_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "release", raising(StoreFull("no room")))

    async def main() -> None:
        async with store.lock("l").hold():
            pass

    await fails(StoreFull, main)


async def test_a_busy_store_is_asked_again_to_release(store_and_other: tuple[Store, Store]) -> None:
    store, other = store_and_other
    async with trio.open_nursery() as nursery, store.lock("l").hold(90):
        nursery.start_soon(lasting, 5, other)
        await calm()
    assert await store.lock("l").acquire(1) is not None


async def test_a_store_that_stays_busy_does_not_hide_what_the_body_raises(
    store_and_other: tuple[Store, Store],
) -> None:
    store, other = store_and_other

    async def main(nursery: trio.Nursery) -> None:
        async with store.lock("l").hold(90):
            nursery.start_soon(lasting, 30, other)
            await calm()
            raise ValueError("the body's own")

    async with trio.open_nursery() as nursery:
        error = await fails(ValueError, main, nursery)
    assert "StoreBusy" in error.__notes__[0]


@pytest.mark.parametrize("steps", range(1, 12))
async def test_a_claim_or_a_lock_that_cannot_be_given_back_does_not_end_the_cancellation(
    store: Store, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(locks, "release", raising(StoreFull("no room")))
    monkeypatch.setattr(jobs, "give_back", raising(StoreFull("no room")))
    queue = store.queue("q")
    await queue.enqueue(1)
    await cancelled_at(lambda: queue.claim("w"), steps)
    await cancelled_at(lambda: store.lock("l").acquire(1), steps)


@pytest.mark.parametrize("kind", ["hold", "transaction", "open_store"])
async def test_a_cancellation_leaves_as_itself(open_engine_store: OpenStore, kind: str) -> None:
    async def main(scope: trio.CancelScope) -> None:
        async with open_engine_store() as store:
            if kind != "open_store":
                await fails(trio.Cancelled, inside, store, scope)
            scope.cancel()
            await trio.sleep_forever()

    async def inside(store: Store, scope: trio.CancelScope) -> None:
        async with store.lock("l").hold() if kind == "hold" else store.transaction():
            scope.cancel()
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        await fails(trio.Cancelled, main, scope)
    assert scope.cancel_called


# -------------------------------------------------------------------------------------- a lease that is made shorter


async def test_a_body_that_cuts_its_lease_short_is_renewed_at_a_third_of_the_new_one(store: Store) -> None:
    async with store.lock("l").hold(30) as held:
        assert await held.renew(1)
        for _ in range(50):
            await trio.sleep(0.1)
            assert held.remaining > 0
        assert held.remaining <= 1


async def test_a_lease_that_was_cut_short_and_taken_away_cancels_the_body(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = trio.current_time()

    async def main() -> None:
        async with store.lock("l").hold(30) as held:
            await held.renew(3)
            monkeypatch.setattr(locks, "renew", lambda *_: None)
            await trio.sleep_forever()

    await fails(LockLost, main)
    assert trio.current_time() <= began + 3


# ------------------------------------------------------------------------- errors whose own code fails, or is too deep


def raising(error: Exception) -> Callable[..., object]:
    def function(*_: object) -> object:
        raise error

    return function


def deep(depth: int) -> Exception:
    error: Exception = ValueError("leaf")
    for _ in range(depth):
        error = ExceptionGroup("level", [error])
    return error


class RaisesInStr(Exception):
    def __str__(self) -> str:
        raise self.args[0]


class OddText(str):
    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise ValueError("no")

    def replace(self, *_: object) -> str:
        raise ValueError("no")


class OddStr(Exception):
    def __str__(self) -> str:
        return OddText("odd")


class NamelessMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no")


class Nameless(Exception, metaclass=NamelessMeta):
    pass


class Underivable(ExceptionGroup[Exception]):
    def derive(self, _: object) -> Any:
        raise ValueError("no")


ERRORS: dict[str, Callable[[], Exception]] = {
    "deep": lambda: deep(1_500),
    "deeper": lambda: deep(20_000),
    "SystemExit in str": lambda: RaisesInStr(SystemExit(3)),
    "KeyboardInterrupt in str": lambda: RaisesInStr(KeyboardInterrupt()),
    "RecursionError in str": lambda: RaisesInStr(RecursionError()),
    "odd text": OddStr,
    "nameless": lambda: Nameless("x"),
    "underivable": lambda: Underivable("g", [ValueError(1), OddStr()]),
}


async def worked(store: Store, handler: Callable[[JobHandle], Awaitable[object]]) -> list[int]:
    """Let a worker meet two jobs, at this moment only."""
    queue = store.queue("q", max_attempts=1)
    ids = [await queue.enqueue("bad"), await queue.enqueue("good")]
    async with running(queue.work, handler):
        await trio.sleep(1)
    return ids


@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS.keys())
async def test_whatever_a_handler_raises_its_job_has_an_end_and_the_others_go_on(
    store: Store, make: Callable[[], Exception]
) -> None:
    async def handler(handle: JobHandle) -> None:
        if handle.payload == "bad":
            raise make()

    bad, good = await worked(store, handler)
    found = await job(store.queue("q"), bad)
    assert (found.state, found.attempt) == ("dead", 1)
    assert found.error
    assert await store.get_job(good) is None


class NotYet(Snooze):
    def __init__(self, why: str) -> None:
        Exception.__init__(self, why)


class OddDelay(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self)
        self.delay = "soon"  # type: ignore[assignment]


@pytest.mark.parametrize("make", [lambda: NotYet("not yet"), OddDelay])
async def test_a_snooze_of_its_own_kind_gives_the_job_back_at_once(store: Store, make: Callable[[], Snooze]) -> None:
    times = 0

    async def handler(_: object) -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise make()

    began = now(store)
    bad, _ = await worked(store, handler)
    assert times == 3
    assert await store.get_job(bad) is None
    assert (now(store) - began).total_seconds() < 2
