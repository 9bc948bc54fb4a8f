"""Runs whose process was killed, or whose lease ended: lost, and failed or tried again."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from alkstore import Store
from alkstore.cron import RetryPolicy, RunHandle
from alkstore.sql.cron import runs
from tests.conformance.cronning import (
    SUCCEEDED,
    broken,
    kinds,
    nothing,
    once,
    only_run,
    publish,
    run,
    runs_here,
    states,
    two_stores,
)
from tests.conformance.helpers import OpenStore, calm, seen, sql


async def lose(store: Store, made: int, **options: Any) -> None:
    """Take a run as a runner does that dies right afterwards."""
    engine = store._context.engine
    (taken,) = await engine.run(lambda tx: runs.dispatch(tx, ("h",), "dead", 1))
    if options.get("started", True):
        assert await engine.run(lambda tx: runs.started(tx, made, taken.run.attempt, taken.job.id, taken.job.fence))


@pytest.mark.parametrize("started", [True, False])
async def test_a_run_whose_runner_is_gone_is_lost_when_its_lease_ends(store: Store, started: bool) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    await lose(store, made.id, started=started)
    async with runs_here(store, nothing):
        await trio.sleep(29.9)
        assert (await run(store, made.id)).state == ("running" if started else "dispatching")
        await trio.sleep(0.2)
    assert (await kinds(store, made))[-2:] == ["lost", "failed"]
    over = await run(store, made.id)
    assert (over.state, over.error) == ("failed", "its runner was lost: the lease ended")
    attempts = await sql(store, "SELECT state FROM __alkstore_cron_attempts")
    assert attempts == [("lost",)]


async def test_a_lost_run_gets_another_attempt_if_its_policy_says_so(store: Store) -> None:
    await store.cron.publish_task("t", call="h", retry=RetryPolicy(1, 10))
    made = await store.cron.run_now("t")
    await lose(store, made.id)
    async with runs_here(store, nothing):
        await trio.sleep(30)
        await calm()
        assert (await kinds(store, made))[-2:] == ["lost", "queued"]
        await trio.sleep(10)
        await calm()
        assert (await kinds(store, made))[-1] == "succeeded"
    assert (await run(store, made.id)).attempt == 2


async def test_recovery_comes_before_the_first_cycle(stepped: Store, clock: Any) -> None:
    """What a crash has left is over before anything new is decided: with overlap skip it would block the new."""
    await publish(stepped, overlap="skip")
    await once(stepped)
    made = await only_run(stepped)
    await lose(stepped, made.id)
    clock.advance(60)
    async with runs_here(stepped):
        assert await states(stepped) == ["failed", "queued"]


async def test_a_runner_that_was_suspended_for_too_long_has_lost_its_run(stepped: Store, clock: Any) -> None:
    """S03: its handler is cancelled, and its late end counts for nothing."""
    cancelled = []

    async def handler(handle: RunHandle) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(handle.attempt)
            raise

    await stepped.cron.publish_task("t", call="h", retry=RetryPolicy(1, 3_600))
    made = await stepped.cron.run_now("t")
    events = stepped.events()
    async with runs_here(stepped, handler):
        await calm()
        clock.advance(1_200)
        await trio.sleep(30)
        assert cancelled == [1]
        assert (await kinds(stepped, made))[-2:] == ["lost", "queued"]
        assert [event.subject for event in seen(events, "lost")] == ["__alkstore_runs"]


async def test_the_lease_of_a_long_run_is_renewed(open_shared_store: OpenStore) -> None:
    begun = trio.Event()

    async def long(_: RunHandle) -> None:
        begun.set()
        await trio.sleep(300)

    async with two_stores(open_shared_store) as (one, other):
        await one.cron.publish_task("t", call="h")
        made = await one.cron.run_now("t")
        async with runs_here(one, long):
            await begun.wait()
            async with runs_here(other, broken):
                await trio.sleep(310)
        assert await kinds(one, made) == SUCCEEDED


async def test_many_lost_runs_are_all_recovered_before_the_start(stepped: Store, clock: Any) -> None:
    await stepped.cron.publish_task("t", call="h")
    count = runs.RECOVERED_PER_STEP + 5
    for _ in range(count):
        await stepped.cron.run_now("t")
    engine = stepped._context.engine
    await engine.run(lambda tx: runs.dispatch(tx, ("h",), "dead", count))
    clock.advance(31)
    async with runs_here(stepped):
        assert await states(stepped) == ["failed"] * count
