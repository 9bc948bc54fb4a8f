"""Whatever is cancelled around an open store, the last writes of what runs on it are made before it closes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from alkstore import JobHandle, StopToken, Store, open_store

Serve = Callable[[Store], Awaitable[object]]


async def forever(_: JobHandle) -> None:
    await trio.sleep_forever()


async def hold(store: Store) -> None:
    async with store.lock("x").hold():
        await trio.sleep_forever()


SERVERS: dict[str, Serve] = {
    "a worker": lambda store: store.queue("q").work(forever, stop=StopToken()),
    "a deliverer": lambda store: store.outbox("q").deliver(forever, stop=StopToken()),
    "a delivery": lambda store: store.outbox("q").run_once("w", forever),
    "a runner": lambda store: store.run_schedules(StopToken()),
    "a lock": hold,
}


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "threads"])
@pytest.mark.parametrize("who", SERVERS)
async def test_last_writes_are_made(quick_folder: Path, autojump_clock: object, who: str, inline: bool) -> None:
    open_it = partial(open_store, quick_folder / "app.db", inline=inline)
    with trio.move_on_after(1):
        async with open_it() as store:
            await store.queue("q").enqueue(1)
            await store.outbox("q").enqueue(1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(SERVERS[who], store)
    async with open_it() as store:
        assert (await store.queue("q").counts()).leased == 0
        assert (await store.outbox("q").counts()).leased == 0
        assert (await store.health()).schedules.leader is None
        assert await store.lock("x").acquire(1) is not None
