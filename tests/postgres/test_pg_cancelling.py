"""A call that is cancelled ends soon, wherever it waits; and Cancelled leaves it only if nothing has come of it."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from alkstore import JobHandle, OutcomeUnknown, Store
from alkstore.engines.postgres import engine, pool
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place, engine_of, eventually
from tests.postgres.proxy import open_proxy

SOON_S = 3.0
"""On a busy machine; of what would else be waited for for many times as long."""

KEY = 4_711


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STOPPED_AFTER_S", 0.05)
    monkeypatch.setattr(engine, "CANCEL_S", 0.3)


@contextmanager
def _soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


async def _cancelled_when(call: Callable[[], Awaitable[object]], waits: Callable[[], object]) -> bool:
    """Cancel `call` as soon as it `waits`, and return whether Cancelled has left it."""
    scope = trio.CancelScope()

    async def cancel() -> None:
        await eventually(waits)
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        with scope:
            await call()
    return scope.cancelled_caught


async def _claimed(store: Store) -> JobHandle:
    await store.queue("q").enqueue(1)
    (handle,) = await store.queue("q").claim("w", lease=600)
    return handle


async def _no_statement_runs(admin: Admin) -> None:
    await eventually(
        lambda: (
            not admin.rows(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle'", admin.place.schema
            )
        )
    )


async def test_who_waits_for_a_connection(place: Place) -> None:
    async with place.open(connections=1, busy_timeout=60, transaction_timeout=60) as store:
        release = trio.Event()

        async def hold() -> None:
            async with store.transaction():
                await release.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await trio.sleep(0.1)
            for call in (lambda: store.queue("q").enqueue(1), store.queue("q").counts):
                with _soon():
                    assert await _cancelled_when(call, lambda: len(engine_of(store).pool))
            release.set()
        assert (await store.queue("q").counts()).ready == 0


async def test_who_waits_for_a_row(place: Place, admin: Admin) -> None:
    async with place.open(busy_timeout=60) as store:
        handle = await _claimed(store)
        with admin.holding(f"SELECT 1 FROM {place.table('jobs')} WHERE id = %s FOR UPDATE", handle.id):
            for call in (handle.ack, handle.heartbeat, lambda: handle.retry("e")):
                with _soon():
                    assert await _cancelled_when(call, admin.waiting)
            await _no_statement_runs(admin)
        assert (await store.queue("q").counts()).leased == 1
        assert await handle.ack()


async def test_who_reads_from_a_table_that_is_locked(place: Place, admin: Admin) -> None:
    async with place.open(busy_timeout=60) as store:
        with admin.holding(f"LOCK TABLE {place.table('jobs')}"), _soon():
            assert await _cancelled_when(store.queue("q").counts, admin.waiting)
        assert (await store.queue("q").counts()).ready == 0


async def test_who_opens_a_store_that_is_locked(place: Place, admin: Admin) -> None:
    async def use() -> None:
        async with place.open(busy_timeout=60):
            pass

    await use()
    with admin.holding(f"LOCK TABLE {place.table('meta')}"), _soon():
        assert await _cancelled_when(use, admin.waiting)
    await use()


@pytest.fixture
async def committing(place: Place, admin: Admin) -> Place:
    """A place where the COMMIT of each job waits for an advisory lock."""
    async with place.open():
        pass
    admin.rows(
        f"CREATE FUNCTION {place.schema}.wait() RETURNS trigger LANGUAGE plpgsql AS "
        f"'BEGIN PERFORM pg_advisory_xact_lock({KEY}); RETURN NULL; END'"
    )
    admin.rows(
        f"CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON {place.table('jobs')} DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW EXECUTE FUNCTION {place.schema}.wait()"
    )
    return place


async def test_who_waits_for_a_commit_that_comes(
    committing: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CANCEL_S", 60)
    async with committing.open(busy_timeout=60) as store:
        ids: list[int] = []

        async def enqueue() -> None:
            ids.append(await store.queue("q").enqueue(1))

        async with trio.open_nursery() as nursery:
            with admin.holding("SELECT pg_advisory_xact_lock(%s)", KEY):
                answers: list[bool] = []

                async def cancelled() -> None:
                    answers.append(await _cancelled_when(enqueue, admin.waiting))

                nursery.start_soon(cancelled)
                await eventually(admin.waiting)
                await trio.sleep(0.5)  # many times it would have been asked to stop
                assert not answers
        assert answers == [False]
        assert [job.id for job in await store.queue("q").list()] == ids


async def test_who_waits_for_a_commit_that_does_not_come(committing: Place, admin: Admin) -> None:
    async with committing.open(busy_timeout=60) as store:
        with admin.holding("SELECT pg_advisory_xact_lock(%s)", KEY), _soon():
            assert not await _cancelled_when(lambda: fails(OutcomeUnknown, store.queue("q").enqueue, 1), admin.waiting)
        await eventually(lambda: admin.value(f"SELECT count(*) FROM {committing.table('jobs')}"))  # so it was right
        await store.queue("q").enqueue(2)


async def test_who_waits_for_a_server_that_says_nothing(place: Place, admin: Admin, short_folder: Path) -> None:
    async with open_proxy(short_folder, place.server) as proxy:
        through = Place(proxy.url(place.server), place.schema)
        async with through.open(busy_timeout=60, listen=False) as store:
            handle = await _claimed(store)

            def is_silent() -> bool:
                if admin.waiting():
                    proxy.stall_all()
                return proxy.is_silent

            with admin.holding(f"SELECT 1 FROM {place.table('jobs')} WHERE id = %s FOR UPDATE", handle.id), _soon():
                assert await _cancelled_when(handle.ack, is_silent)
        assert admin.value(f"SELECT count(*) FROM {place.table('jobs')} WHERE state = 1") == 1


async def _begin(store: Store) -> None:
    async with store.transaction():
        raise AssertionError("it has begun")


SILENT: dict[str, Callable[[Store], Awaitable[object]]] = {
    "enqueue": lambda store: store.queue("q").enqueue(1),
    "counts": lambda store: store.queue("q").counts(),
    "transaction": _begin,
    "transact": lambda store: store.transact(lambda tx: tx.enqueue("q", 1)),
}


@pytest.mark.parametrize("call", SILENT.values(), ids=SILENT)
async def test_who_begins_on_a_server_that_says_nothing(
    place: Place, admin: Admin, short_folder: Path, call: Callable[[Store], Awaitable[object]]
) -> None:
    async with open_proxy(short_folder, place.server) as proxy:
        through = Place(proxy.url(place.server), place.schema)
        with _soon():
            async with through.open(busy_timeout=60, listen=False) as store:
                proxy.stall_all()
                with trio.move_on_after(0.1) as scope:
                    await call(store)
                assert scope.cancelled_caught
    assert admin.value(f"SELECT count(*) FROM {place.table('jobs')}") == 0


async def test_at_any_moment_it_has_had_no_effect_or_all_of_it(
    place: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no connection in doubt."""
    monkeypatch.setattr(pool, "STOPPED_AFTER_S", 0.0)
    monkeypatch.setattr(engine, "CANCEL_S", 5.0)
    async with place.open(connections=2) as store:
        queue = store.queue("q")
        stored: list[int] = []
        for n in range(80):
            with trio.move_on_after(n * 0.0001):
                stored.append(await queue.enqueue(n))
            with trio.move_on_after(n * 0.0001):
                async with store.transaction() as tx:
                    await tx.enqueue("r", n)
                    await tx.execute("SELECT 1")
            with trio.move_on_after(n * 0.0001):
                await queue.counts()
        assert [job.id for job in await queue.list(limit=100)] == stored
        assert 0 < len(stored) < 80
        states = admin.rows("SELECT state FROM pg_stat_activity WHERE application_name = %s", place.schema)
        assert {state for (state,) in states} == {"idle"}
        assert len(states) <= 4


async def test_among_others_with_locks_and_lost_connections_too(
    place: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are told apart by what they hold: those of cancelled calls are not there, those of the others are."""
    monkeypatch.setattr(pool, "STOPPED_AFTER_S", 0.002)
    chance = random.Random(11)  # noqa: S311 - it has to be repeatable
    stored, doubtful, cancelled = set[int](), set[int](), set[int]()
    async with place.open(connections=4, busy_timeout=30, listen=False) as store:
        queue = store.queue("q")

        async def enqueue(first: int) -> None:
            for n in range(first, first + 60):
                with trio.move_on_after(chance.uniform(0, 0.03)) as scope:
                    try:
                        await queue.enqueue(n)
                        stored.add(n)
                    except OutcomeUnknown:
                        doubtful.add(n)
                if scope.cancelled_caught:
                    cancelled.add(n)

        async def disturb() -> None:
            while True:
                with admin.holding(f"LOCK TABLE {place.table('jobs')} IN EXCLUSIVE MODE"):
                    await trio.sleep(chance.uniform(0, 0.02))
                if pids := admin.backends():
                    admin.rows("SELECT pg_terminate_backend(%s)", chance.choice(pids))
                await trio.sleep(chance.uniform(0, 0.02))

        async with trio.open_nursery() as disturbing:
            disturbing.start_soon(disturb)
            async with trio.open_nursery() as nursery:
                for task in range(6):
                    nursery.start_soon(enqueue, task * 60)
            disturbing.cancel_scope.cancel()
        found = {int(payload) for (payload,) in admin.rows(f"SELECT payload FROM {place.table('jobs')}")}
        assert len(stored) + len(doubtful) + len(cancelled) == 360
        assert len(stored) > 20
        assert len(cancelled) > 20
        assert stored <= found <= stored | doubtful
        await queue.enqueue(0)
