"""`alkstore.testing.drain`: returns when nothing is due, and says what is if nobody sees to it."""

from __future__ import annotations

import pytest
import trio

from alkstore import Store
from alkstore.cron import RunHandle
from alkstore.testing import drain
from tests.conformance.cronning import once, publish, runs_here, spoil_trigger


async def nothing(_: RunHandle) -> None: ...


async def test_a_boundary_that_nobody_fires_is_due(store: Store) -> None:
    await store.schedule("s", "@every 1h", "q")
    await drain(store)
    await trio.sleep(3_600)
    with pytest.raises(TimeoutError, match="1 schedules have a boundary to fire - is a worker"):
        await drain(store, within=10)


@pytest.mark.parametrize("seen", [False, True], ids=["published only", "with a cursor"])
async def test_an_occurrence_that_nobody_runs_is_due(store: Store, seen: bool) -> None:
    await publish(store, expression="30 * * * *")
    if seen:
        await once(store)
    await drain(store)
    await trio.sleep(3_600)
    with pytest.raises(TimeoutError, match="1 cron triggers have an occurrence to run - is a worker"):
        await drain(store, within=10)
    await store.cron.disable_trigger("g")
    await drain(store)


async def test_a_run_that_nobody_runs_is_due(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.run_now("t")
    with pytest.raises(TimeoutError, match="has 1 ready"):
        await drain(store, within=10)


async def test_an_occurrence_that_comes_at_this_moment_is_run_first(store: Store) -> None:
    await publish(store, expression="*/10 * * * *")  # this moment is one
    async with runs_here(store, nothing):
        for expected in range(2, 10):
            await trio.sleep(600)
            await drain(store)
            assert len(await store.cron.runs()) == expected


async def test_a_trigger_that_cannot_be_read_is_never_due(store: Store) -> None:
    await publish(store)
    await spoil_trigger(store, "g")
    await trio.sleep(3_600)
    await drain(store)
