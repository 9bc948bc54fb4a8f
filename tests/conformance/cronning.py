"""What the tests of cron share: publishing with defaults, and looking at triggers, runs and cycles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import attrs
import trio

from alkstore import StopToken, Store
from alkstore.cron import STANDALONE, Profile, Run, RunHandle, Task, Trigger
from tests.conformance.helpers import OpenStore, running, sql

MINUTE, HOUR, DAY, WEEK = (timedelta(**{unit: 1}) for unit in ("minutes", "hours", "days", "weeks"))

Handler = Callable[[RunHandle], Awaitable[object]]

SUCCEEDED = ["created", "queued", "dispatching", "running", "succeeded"]
"""The events of a run that all went well with."""


async def publish(
    store: Store,
    trigger: str = "g",
    *,
    task: str = "t",
    expression: str = "* * * * *",
    timezone: str = "UTC",
    misfire: Any = "skip",
    **options: Any,
) -> Trigger:
    """Publish a task that calls ``h``, with these `options` of its own, and a trigger of it."""
    if await store.cron.get_task(task) is None:
        await store.cron.publish_task(task, **{"call": "h", **options})
    return await store.cron.publish_trigger(
        trigger, task=task, expression=expression, timezone=timezone, misfire=misfire
    )


async def once(store: Store, profile: Profile = STANDALONE) -> dict[str, int | bool]:
    """Run one cycle; return what of its summary is not zero."""
    summary = await store.cron.schedule_once(profile)
    return {
        name: value for name, value in attrs.asdict(summary).items() if value and name not in ("observed_at", "scanned")
    }


async def trigger(store: Store, id: str = "g") -> Trigger:
    found = await store.cron.get_trigger(id)
    assert found is not None
    return found


async def task(store: Store, id: str = "t") -> Task:
    found = await store.cron.get_task(id)
    assert found is not None
    return found


async def run(store: Store, id: int) -> Run:
    found = await store.cron.get_run(id)
    assert found is not None
    return found


async def only_run(store: Store) -> Run:
    (found,) = await store.cron.runs()
    return found


async def kinds(store: Store, run: Run | int) -> list[str]:
    """What has happened to a run, in order, without the prefix that all kinds have."""
    id = run if isinstance(run, int) else run.id
    return [event.kind.removeprefix("run.") for event in await store.cron.events(id)]


async def states(store: Store) -> list[str]:
    return [found.state for found in await store.cron.runs(limit=1000)]


def runs_here(
    store: Store, handler: Handler | None = None, profile: Profile = STANDALONE, **options: Any
) -> AbstractAsyncContextManager[StopToken]:
    """Run cron beside the body, with `handler` as ``h`` if there is one."""
    return running(store.cron.run, {} if handler is None else {"h": handler}, profile, **options)


@asynccontextmanager
async def two_stores(open_shared_store: OpenStore) -> AsyncIterator[tuple[Store, Store]]:
    """Open the test's database twice: each store stands for a process of its own."""
    async with open_shared_store() as one, open_shared_store() as other:
        yield one, other


async def spoil_trigger(store: Store, id: str, definition: str = "{}") -> None:
    """Give a trigger's revisions a definition that nobody could have published."""
    await sql(
        store,
        "UPDATE __alkstore_cron_trigger_revisions SET definition = :definition WHERE id = :id",
        definition=definition,
        id=id,
    )


async def cursor(store: Store, id: str = "g") -> int | None:
    """Where the schedule of a trigger stands, in ms."""
    ((ms,),) = await sql(store, "SELECT next_fire_at FROM __alkstore_cron_schedules WHERE trigger = :id", id=id)
    return None if ms is None else int(ms)


async def until_over(store: Store, id: int, within: float = 30) -> Run:
    """Wait until a run is over, whoever runs it, and return it."""
    with trio.fail_after(within), store.events() as events:
        while (found := await run(store, id)).state in ("queued", "dispatching", "running"):
            with trio.move_on_after(0.5):  # what other processes do is no event here
                await anext(events)
    return found


later = partial(attrs.evolve, STANDALONE)
"""A profile like STANDALONE, but for what is given."""


async def nothing(_: RunHandle) -> None:
    pass


async def forever(_: RunHandle) -> None:
    await trio.sleep_forever()


async def broken(_: RunHandle) -> None:
    raise ValueError("no")


async def sleep_for(seconds: float, _: RunHandle) -> None:
    await trio.sleep(seconds)
