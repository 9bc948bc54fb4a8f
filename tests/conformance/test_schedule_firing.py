"""Firing: when a boundary fires, what the job looks like, and that each fires once."""

from __future__ import annotations

from datetime import timedelta

import trio

from alkstore import ScheduleOpts, Store
from tests.conformance.helpers import (
    OpenStore,
    TaskSteps,
    after,
    boundaries,
    calm,
    claim,
    copy_schedule,
    now,
    rogue_tick,
    running,
    seen,
)


async def test_nothing_fires_while_nobody_runs_the_schedules(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    await trio.sleep(100)
    assert (await store.queue("q").counts()).ready == 0


async def test_the_silence_shows_in_health(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    assert not (await store.health()).schedules.unattended
    await trio.sleep(100)
    health = await store.health()
    assert (health.schedules.overdue, health.schedules.leader, health.schedules.unattended) == (1, None, True)


async def test_a_boundary_fires_at_its_moment_exactly(store: Store) -> None:
    first = after(store, 60)
    await store.schedule("s", "@every 60s", "q", {"n": 1})
    async with running(store.run_schedules):
        handle = await claim(store.queue("q"), wait=1000)
        assert now(store) == first
        assert handle.payload == {"n": 1}


async def test_a_fired_job_knows_its_schedule_and_its_boundary(store: Store) -> None:
    first = after(store, 60)
    await store.schedule("s", "@every 60s", "q")
    await trio.sleep(75)
    async with running(store.run_schedules):
        handle = await claim(store.queue("q"), wait=1)
    assert (handle.schedule, handle.boundary, handle.job.run_at) == ("s", first, first)


async def test_another_job_knows_none(store: Store) -> None:
    await store.queue("q").enqueue(1)
    handle = await claim(store.queue("q"))
    assert (handle.schedule, handle.boundary) == (None, None)


async def test_boundaries_lie_on_a_grid_without_drift(store: Store) -> None:
    began = now(store)
    await store.schedule("s", "@every 7s", "q")
    async with running(store.run_schedules):
        await trio.sleep(7 * 100 + 0.5)
        await calm()
    assert await boundaries(store) == [began + timedelta(seconds=7 * n) for n in range(1, 101)]


async def test_a_fired_job_has_the_queues_defaults(store: Store) -> None:
    store.queue("q", visibility=10, max_attempts=9, backoff=1)  # a handle's stamp is not the queue's
    await store.schedule("s", "@every 1s", "q")
    async with running(store.run_schedules):
        job = (await claim(store.queue("q"), wait=10)).job
    assert (job.visibility, job.max_attempts, job.backoff, job.expires_at, job.priority) == (300, 3, 5, None, 0)


async def test_a_fired_job_has_the_schedules_options_over_the_defaults(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q", None, ScheduleOpts(priority=7, max_attempts=1, expires=30))
    async with running(store.run_schedules):
        job = (await claim(store.queue("q"), wait=10)).job
    assert (job.priority, job.max_attempts, job.expires_at) == (7, 1, job.run_at + timedelta(seconds=30))


async def test_a_runner_with_nothing_to_do_sleeps(store: Store) -> None:
    async with running(store.run_schedules):
        await calm()
        with TaskSteps() as steps:
            await trio.sleep(5)
            await calm()
    assert steps.count < 60


async def test_a_schedule_registered_while_the_runner_sleeps_fires_in_time(store: Store) -> None:
    """S21."""
    await store.schedule("daily", "@every 1d", "other")
    async with running(store.run_schedules):
        await trio.sleep(100)
        await store.schedule("s", "@every 2s", "q")
        due = after(store, 2)
        await claim(store.queue("q"), wait=1000)
        assert now(store) == due


async def test_a_schedule_registered_by_another_store_fires_in_time(open_shared_store: OpenStore) -> None:
    """S21."""
    async with open_shared_store() as a, open_shared_store() as b:
        await a.schedule("daily", "@every 1d", "other")
        async with running(a.run_schedules):
            await trio.sleep(100)
            await b.schedule("s", "@every 2s", "q")
            due = after(a, 2)
            await claim(a.queue("q"), wait=1000)
            assert now(a) == due


async def test_an_interval_made_shorter_while_the_runner_sleeps_counts_from_now(store: Store) -> None:
    """S21."""
    await store.schedule("s", "@every 1d", "q")
    async with running(store.run_schedules):
        await trio.sleep(100)
        await store.schedule("s", "@every 2s", "q")
        due = after(store, 2)
        await claim(store.queue("q"), wait=1000)
        assert now(store) == due


async def test_an_unregistered_schedule_does_not_fire_any_more(store: Store) -> None:
    await store.schedule("s", "@every 10s", "q")
    async with running(store.run_schedules):
        await trio.sleep(5)
        assert await store.unschedule("s")
        await trio.sleep(100)
    assert await boundaries(store) == []


async def test_a_changed_payload_is_what_fires_next(store: Store) -> None:
    """S10: and a changed payload keeps the grid."""
    await store.schedule("s", "@every 10s", "q", "old")
    async with running(store.run_schedules):
        await trio.sleep(5)
        await store.schedule("s", "@every 10s", "q", "new")
        due = after(store, 5)
        handle = await claim(store.queue("q"), wait=100)
    assert (handle.payload, handle.boundary) == ("new", due)


async def test_what_fires_goes_into_the_queue_that_was_registered_last(store: Store) -> None:
    await store.schedule("s", "@every 10s", "q")
    await store.schedule("s", "@every 10s", "other")
    async with running(store.run_schedules):
        await trio.sleep(10.5)
    assert (await store.queue("q").counts()).ready == 0
    assert (await store.queue("other").counts()).ready == 1


async def test_a_fired_job_wakes_who_waits_for_it(store: Store) -> None:
    await store.schedule("s", "@every 10s", "q")
    done: list[float] = []

    async def handler(job: object) -> None:
        done.append(trio.current_time())

    began = trio.current_time()
    async with running(store.run_schedules), running(store.queue("q").work, handler):
        await trio.sleep(35)
    assert done == [began + 10, began + 20, began + 30]


async def test_many_schedules_due_at_once_all_fire_at_once(store: Store) -> None:
    await store.schedule("s", "@every 1h", "q")
    await copy_schedule(store, "s", 1_049)  # more than are handled between two looks
    async with running(store.run_schedules):
        await trio.sleep(3600)
        await trio.sleep(0.001)
        assert (await store.queue("q").counts()).ready == 1_050


async def test_a_rogue_second_ticker_finds_the_boundary_fired_already(store: Store) -> None:
    await store.schedule("s", "@every 60s", "q")
    async with running(store.run_schedules):
        await trio.sleep(60)
        await calm()
        await rogue_tick(store, "s")
    assert len(await boundaries(store)) == 1


async def test_two_rogue_tickers_at_once_fire_each_boundary_once(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        for n in range(20):
            await a.schedule(f"s{n}", "@every 60s", "q")
        await trio.sleep(60)

        async def tick(store: Store) -> None:
            for n in range(20):
                await rogue_tick(store, f"s{n}")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, a)
            nursery.start_soon(tick, b)
        assert len(await boundaries(a)) == 20


async def test_a_fire_is_reported_with_its_jobs(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    with store.events() as events:
        async with running(store.run_schedules):
            handle = await claim(store.queue("q"), wait=10)
        (fired,) = seen(events, "fired")
    assert (fired.subject, fired.at, fired.details["ids"]) == ("s", handle.boundary, [handle.id])


async def test_what_has_fired_stands_in_the_row(store: Store) -> None:
    first = await store.schedule("s", "@every 1s", "q")
    async with running(store.run_schedules):
        await trio.sleep(3.5)
    found = await store.schedule("s", "@every 1s", "q")
    assert (first.last_fired_at, found.last_fired_at) == (None, first.next_fire_at + timedelta(seconds=2))
    assert found.fired_total == 3
