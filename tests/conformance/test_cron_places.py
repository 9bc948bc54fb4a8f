"""Which process runs what: handlers that are registered here or elsewhere, and several runners."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from alkstore import Store
from alkstore.cron import STANDALONE, RunHandle
from alkstore.sql.cron import runs
from tests.conformance.cronning import (
    forever,
    later,
    nothing,
    run,
    runs_here,
    states,
    two_stores,
    until_over,
)
from tests.conformance.helpers import OpenStore, calm, running


async def test_a_run_whose_handler_is_not_here_stays_queued_and_is_named(store: Store) -> None:
    await store.cron.publish_task("t", call="elsewhere")
    await store.cron.publish_task("u", call="h")
    await store.cron.run_now("t")
    await store.cron.run_now("u")
    async with runs_here(store, nothing):
        await trio.sleep(60)
        assert await states(store) == ["queued", "succeeded"]
        assert (await store.health()).cron.waiting == {"elsewhere": 1}


async def test_where_nothing_runs_all_that_waits_is_named(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.publish_task("c", command=["true"])
    for name in ("t", "t", "c"):
        await store.cron.run_now(name)
    assert (await store.health()).cron.waiting == {"": 1, "h": 2}
    async with runs_here(store, forever, concurrency=1):
        await calm()
        assert (await store.health()).cron.waiting == {}
    await store.cron.run_now("t")
    assert (await store.health()).cron.waiting["h"] >= 1


async def test_a_run_waits_for_the_process_that_has_its_handler(open_shared_store: OpenStore) -> None:
    async with two_stores(open_shared_store) as (one, other):
        await one.cron.publish_task("t", call="h")
        made = await one.cron.run_now("t")
        async with runs_here(one):
            await trio.sleep(60)
            assert await states(one) == ["queued"]
            async with runs_here(other, nothing):
                await calm()
        assert (await run(one, made.id)).state == "succeeded"


async def test_no_more_runs_at_once_than_there_are_places(store: Store) -> None:
    here = most = 0

    async def handler(_: RunHandle) -> None:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await trio.sleep(1)
        here -= 1

    await store.cron.publish_task("t", call="h")
    for _ in range(9):
        await store.cron.run_now("t")
    async with runs_here(store, handler, concurrency=3):
        await trio.sleep(3.5)
        assert (most, await states(store)) == (3, ["succeeded"] * 9)


async def test_runs_start_in_the_order_in_which_they_were_made(store: Store) -> None:
    handled: list[object] = []

    async def handler(handle: RunHandle) -> None:
        handled.append(handle.args)

    for name in ("b", "a"):
        await store.cron.publish_task(name, call=name)
    for n, name in enumerate("abbaab"):
        await store.cron.run_now(name, args=n)
    async with running(store.cron.run, {"a": handler, "b": handler}, STANDALONE, concurrency=1):
        await calm()
    assert handled == list(range(6))


@pytest.mark.parametrize("starts", [1, 4])
async def test_a_profile_limits_how_many_runs_are_started_together(
    store: Store, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    taken: list[int] = []
    dispatch = runs.dispatch

    def counted(*args: Any) -> Any:
        found = dispatch(*args)
        taken.append(len(found))
        return found

    monkeypatch.setattr(runs, "dispatch", counted)
    await store.cron.publish_task("t", call="h")
    for _ in range(9):
        await store.cron.run_now("t")
    async with runs_here(store, forever, later(starts=starts), grace=0):
        await calm()
        assert await states(store) == ["running"] * 9
    assert max(taken) == starts


async def test_two_runners_run_each_run_once(open_shared_store: OpenStore) -> None:
    handled: list[int] = []

    async def handler(handle: RunHandle) -> None:
        handled.append(handle.run.id)
        await trio.sleep(0.1)

    async with two_stores(open_shared_store) as (one, other):
        await one.cron.publish_task("t", call="h")
        made = [(await one.cron.run_now("t")).id for _ in range(20)]
        async with runs_here(one, handler, concurrency=3), runs_here(other, handler, concurrency=3):
            for id in made:
                await until_over(one, id)
        assert sorted(handled) == made
