"""PG01: who listens may lose its connection, with or without a word; work starts all the same, and health tells."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from alkstore import JobHandle, OutcomeUnknown, Store, StoreUnavailable
from alkstore.engines.postgres import connection, engine, notify
from alkstore.engines.postgres.notice import heard, notice
from tests.conformance.helpers import fails, running
from tests.postgres.kit import Admin, Place, engine_of, eventually
from tests.postgres.proxy import open_proxy


class Done:
    """A handler that notes when each job starts."""

    def __init__(self) -> None:
        self.started: dict[int, float] = {}

    async def __call__(self, handle: JobHandle) -> None:
        self.started[handle.id] = time.monotonic()


async def _feed(store: Store) -> str:
    return (await store.health()).feed


async def _listening(store: Store) -> None:
    await eventually(lambda: engine_of(store).feed_state == "listening")


async def _starts_within(other: Store, done: Done, seconds: float) -> None:
    """A job that another process enqueues starts within so many seconds."""
    began = time.monotonic()
    id = await other.queue("q").enqueue(1)
    await eventually(lambda: id in done.started)
    assert done.started[id] - began < seconds


async def test_a_job_of_another_process_starts_at_once(place: Place) -> None:
    done = Done()
    async with place.open() as store, place.open() as other, running(store.queue("q").work, done):
        await _listening(store)
        for _ in range(3):
            await _starts_within(other, done, 1.0)
        assert await _feed(store) == "listening"


async def test_a_delayed_job_of_another_process_starts_in_time(place: Place) -> None:
    done = Done()
    async with place.open() as store, place.open() as other, running(store.queue("q").work, done):
        await _listening(store)
        began = time.monotonic()
        id = await other.queue("q").enqueue(1, delay=0.5)
        await eventually(lambda: id in done.started)
        assert 0.4 < done.started[id] - began < 2.0


async def test_a_lock_that_another_process_releases_is_taken_at_once(place: Place) -> None:
    taken: list[float] = []

    async def take(store: Store) -> None:
        async with store.lock("l").hold(ttl=60):
            taken.append(time.monotonic())

    async with place.open() as store, place.open() as other, trio.open_nursery() as nursery:
        await _listening(store)
        held = await other.lock("l").acquire(60)
        assert held is not None
        nursery.start_soon(take, store)
        await trio.sleep(0.3)
        released = time.monotonic()
        assert await held.release()
        await eventually(lambda: taken)
        assert taken[0] - released < 1.0


async def test_a_listener_that_is_killed_listens_again_and_looks(
    place: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FLOOR_S", 1_000.0)  # nothing but the listener can have seen it
    done = Done()
    async with place.open() as store, place.open() as other, running(store.queue("q").work, done):
        for _ in range(2):
            await _listening(store)
            await _listening(other)
            assert admin.kill("LISTEN%") == 2
            id = await other.queue("q").enqueue(1)  # most likely told while nobody listens
            await eventually(lambda id=id: id in done.started)  # type: ignore[misc]
        await _listening(store)
        await _starts_within(other, done, 1.0)


async def test_without_a_listener_a_job_starts_by_the_regular_look(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FLOOR_S", 0.5)
    done = Done()
    async with place.open(listen=False) as store, place.open() as other, running(store.queue("q").work, done):
        assert await _feed(store) == "polling"
        await _starts_within(other, done, 2.0)


async def test_a_listener_that_hears_nothing_any_more_is_noticed(
    place: Place, admin: Admin, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open, and nothing comes: the regular look finds the job, and a question is not answered."""
    monkeypatch.setattr(notify, "FLOOR_S", 0.5)
    monkeypatch.setattr(notify, "SILENCE_S", 1.0)
    monkeypatch.setattr(notify, "ANSWER_S", 0.5)
    done = Done()
    async with open_proxy(short_folder, place.server) as proxy:
        through = Place(proxy.url(place.server), place.schema)
        async with through.open() as store, place.open() as other, running(store.queue("q").work, done):
            await _listening(store)
            (wire,) = proxy.that_said(b"LISTEN")
            wire.stalled = True
            await _starts_within(other, done, 2.0)
            await eventually(lambda: len(proxy.that_said(b"LISTEN")) == 2)
            await _listening(store)
            await _starts_within(other, done, 1.0)
            assert await _feed(store) == "listening"


async def test_nobody_spins_on_a_dead_connection(place: Place, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.open() as store:
        await _listening(store)
        listener = engine_of(store)._listener
        assert listener is not None
        attempts: list[float] = []

        def refuse() -> object:
            attempts.append(time.monotonic())
            raise StoreUnavailable("away")

        monkeypatch.setattr(listener, "connect", refuse)
        admin.kill("LISTEN%")
        await eventually(lambda: engine_of(store).feed_state == "polling")
        await trio.sleep(1.0)
        assert len(attempts) < 10
        assert await _feed(store) == "polling"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "1",
        "1" * 7_000,
        "[" * 7_900,
        '{"by": 1}',
        '{"by": 1, "topics": ["t"]}',
        '{"by": {}, "topics": ["t"]}',
        '{"by": null, "topics": [1]}',
        '{"by": null, "topics": [[]]}',
        '{"by": null, "topics": [{}]}',
        '{"by": null, "topics": "t"}',
        '{"by": null, "topics": null}',
    ],
    ids=lambda text: text[:40],
)
def test_a_notice_of_somebody_elses_says_that_anything_may_have_changed(text: str) -> None:
    assert heard(text) == (None, None)


@pytest.mark.parametrize("by", [None, "me"])
@pytest.mark.parametrize("topics", [["a"], [f"topic {n}" for n in range(1_000)]], ids=len)
def test_a_notice_is_heard_as_it_was_told(by: str | None, topics: list[str]) -> None:
    assert heard(notice(topics, by)) == (by, sorted(topics) if len(topics) == 1 else None)


async def test_what_somebody_else_tells_on_the_channel_ends_nobody(place: Place, admin: Admin) -> None:
    done = Done()
    async with place.open() as store, place.open() as other, running(store.queue("q").work, done):
        await _listening(store)
        for text in ("[" * 7_900, '{"by": 1, "topics": [[]]}', "1" * 7_000, "\x01"):
            admin.rows("SELECT pg_notify(%s, %s)", f"alkstore_{place.schema}", text)
        await _starts_within(other, done, 1.0)
        assert await _feed(store) == "listening"


async def test_many_changes_are_told_together(place: Place, admin: Admin) -> None:
    """One notice at once, and one for all that follows within a few milliseconds."""
    heard: list[str] = []
    async with place.open(connections=8) as store:
        queue = store.queue("q")
        await queue.enqueue(0)
        admin.rows(f'LISTEN "alkstore_{place.schema}"')
        await trio.sleep(0.1)

        async def some() -> None:
            for n in range(10):
                await queue.enqueue(n)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(some)
        await trio.sleep(0.1)
        heard = [told.payload for told in admin.connection.notifies(timeout=0.2)]
        assert 1 <= len(heard) < 60


async def test_a_server_that_is_silent_holds_nobody_for_long(
    place: Place, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word comes back on any connection: a call ends with an error, and so does the store, in a bounded time."""
    for module, name in ((engine, "SILENT_AFTER_S"), (engine, "STATEMENT_S"), (connection, "CONNECT_S")):
        monkeypatch.setattr(module, name, 1)
    async with open_proxy(short_folder, place.server) as proxy:
        silent = Place(proxy.url(place.server), place.schema)
        began = time.monotonic()

        async def use() -> None:
            async with silent.open(busy_timeout=0.5) as store:
                await store.queue("q").enqueue(1)
                proxy.stall_all()
                await store.queue("q").enqueue(2)

        await fails((StoreUnavailable, OutcomeUnknown), use)  # type: ignore[arg-type]
        assert time.monotonic() - began < 15
