"""What can be seen of a store: health and events. Nothing that goes wrong is visible only in a log."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from alkstore import Event, ManualClock, Store
from tests.conformance.helpers import (
    OpenStore,
    WallLikeClock,
    calm,
    claim,
    copy_schedule,
    now,
    running,
    seen,
    spoil_schedule,
)


async def test_health_tells_its_moment(store: Store) -> None:
    await trio.sleep(100)
    assert (await store.health()).at == now(store)


async def test_health_is_a_value(store: Store) -> None:
    assert await store.health() == await store.health()


async def test_health_tells_how_changes_of_others_are_seen(store: Store) -> None:
    assert (await store.health()).feed in ("inotify", "polling", "none", "listen", "listening")


async def test_health_tells_the_size_of_the_log(store: Store) -> None:
    await store.queue("q").enqueue_many(["x" * 1_000] * 100)
    health = await store.health()
    assert health.wal_bytes >= 0
    assert not health.checkpoint_blocked


async def test_health_tells_that_nothing_waits_for_the_writer(store: Store) -> None:
    await store.queue("q").enqueue(1)
    assert (await store.health()).pending_writes == 0


async def test_health_counts_all_overdue_schedules(store: Store) -> None:
    await store.schedule("s", "@every 1m", "q")
    await copy_schedule(store, "s", 9)
    await trio.sleep(64)
    assert (await store.health()).schedules.overdue == 0
    await trio.sleep(2)
    health = await store.health()
    assert (health.schedules.total, health.schedules.overdue, health.schedules.unattended) == (10, 10, True)


async def test_somebody_who_leads_attends_to_what_is_overdue(store: Store) -> None:
    await store.schedule("s", "@every 1m", "q")
    await trio.sleep(1_000)
    async with running(store.run_schedules):
        await calm()
        health = await store.health()
    assert (health.schedules.overdue, health.schedules.unattended) == (0, False)


async def test_a_step_that_nobody_tells_of_is_noticed_and_counted(open_embedded_store: OpenStore) -> None:
    clock = WallLikeClock()
    async with open_embedded_store(clock=clock) as store:
        with store.events() as events:
            for seconds in (-60.0, 3_600.0):
                await store.queue("q").enqueue(1)
                clock.step(seconds)
                await trio.sleep(5)
            await store.queue("q").enqueue(1)
            steps = seen(events, "clock_set_back", "clock_set_forward")
        assert [(step.kind, round(step.details["seconds"])) for step in steps] == [
            ("clock_set_back", 60),
            ("clock_set_forward", 3_600),
        ]
        assert (await store.health()).clock_steps == 2


async def test_a_drift_of_less_than_a_second_is_no_step(open_engine_store: OpenStore) -> None:
    clock = WallLikeClock()
    async with open_engine_store(clock=clock) as store:
        with store.events() as events:
            for seconds in (-0.9, 0.9, -0.9):
                await store.queue("q").enqueue(1)
                clock.step(seconds)
            await store.queue("q").enqueue(1)
            assert seen(events, "clock_set_back", "clock_set_forward") == []


async def test_a_store_that_was_opened_behind_its_newest_stamp_says_so(open_embedded_file_store: OpenStore) -> None:
    clock = ManualClock(1_800_000_000_000)
    async with open_embedded_file_store(clock=clock) as store:
        await store.queue("q").enqueue(1, delay=5)
        clock.advance(5)
        await claim(store.queue("q"), lease=60)
        await store.queue("q").enqueue(2)
    clock.advance(-86_400)
    async with open_embedded_file_store(clock=clock) as store:
        assert (await store.health()).clock_steps == 1
        assert [handle.payload for handle in await store.queue("q").claim("w", 10)] == [2]
        clock.advance(60)
        assert [handle.payload for handle in await store.queue("q").claim("w", 10)] == [1]


# ---------------------------------------------------------------------------------------------------------- events


async def test_events_are_what_happens_from_now_on(store: Store) -> None:
    await store.queue("q").enqueue(1)
    await claim(store.queue("q"))
    with store.events() as events:
        await calm()
        assert seen(events) == []


async def test_events_are_an_async_iterator(store: Store) -> None:
    events = store.events()
    await store.queue("q").enqueue(1)
    handle = await claim(store.queue("q"), "me")
    await handle.ack()
    claimed, settled = await anext(events), await anext(events)
    assert (claimed.kind, claimed.subject, claimed.at) == ("claimed", "q", now(store))
    assert dict(claimed.details) == {"worker": "me", "ids": [handle.id]}
    assert (settled.kind, settled.details["id"]) == ("settled", handle.id)


async def test_an_event_that_is_waited_for_comes_at_once(store: Store) -> None:
    events, got = store.events(), []

    async def listen() -> None:
        got.append(await anext(events))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(100)
        await store.queue("q").enqueue(1)
        await claim(store.queue("q"))
    assert (got[0].kind, got[0].at) == ("claimed", now(store))


async def test_everybody_who_listens_hears_everything(store: Store) -> None:
    with store.events() as a, store.events() as b:
        await store.queue("q").enqueue(1)
        await claim(store.queue("q"))
        assert seen(a) == seen(b) != []


async def test_a_listener_that_is_behind_loses_the_oldest_and_is_told_how_many(store: Store) -> None:
    with store.events(buffer=2) as events:
        for n in range(5):
            await store.queue("q").enqueue(n)
            await claim(store.queue("q"))
        assert events.missed == 3
        assert [event.details["ids"] for event in seen(events)] == [[4], [5]]


@pytest.mark.parametrize("buffer", [0, -1])
async def test_a_listener_keeps_one_event_at_least(store: Store, buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        store.events(buffer)


async def test_what_is_rolled_back_is_no_event(store: Store) -> None:
    await store.queue("q").enqueue(1)
    handle = await claim(store.queue("q"))
    await trio.sleep(300)
    with store.events() as events:
        assert not await handle.ack()
        assert seen(events) == []


async def test_events_are_told_in_the_order_in_which_they_were_committed(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(30))
    with store.events() as events:

        async def work() -> None:
            for handle in await queue.claim("w", 3):
                await handle.ack()

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(work)
        begun: set[int] = set()
        for event in seen(events):
            if event.kind == "claimed":
                begun.update(event.details["ids"])
            else:
                assert event.details["id"] in begun
    assert len(begun) == 30


async def test_nothing_that_goes_wrong_is_visible_only_in_a_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Failures, lost leases, bad rows: each is an event, and none is a line of a log."""
    caplog.set_level(logging.DEBUG)
    queue = store.queue("q", max_attempts=1, visibility=10)
    await store.schedule("bad", "@every 1s", "q")
    await spoil_schedule(store, "bad")

    async def handler(_: object) -> None:
        raise ValueError("no")

    heard: list[Event] = []
    with store.events() as events:
        await queue.enqueue(1)
        async with running(store.run_schedules), running(queue.work, handler):
            await trio.sleep(2)
        await queue.enqueue(2)
        await claim(queue)
        await trio.sleep(10)
        await queue.claim("w")
        heard = seen(events)
    kinds = {event.kind for event in heard}
    assert {"leader", "row_error", "claimed", "settled", "dead"} <= kinds
    logs = [record for record in caplog.records if record.name.startswith(("alkstore", "actors"))]
    assert {record.name for record in logs} == {"alkstore.worker"}  # the traceback of what an event has told
