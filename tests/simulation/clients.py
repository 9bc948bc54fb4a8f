"""Clients of a simulated store: each does one thing after another, whatever it is, and compares what it is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from alkstore import (
    ScheduleOpts,
    Store,
)
from alkstore.testing.processes import present_life
from tests.simulation.world import EXPECTED, World

__all__ = ["LOCKS", "OUTBOX", "QUEUES", "SCHEDULES", "STEADY", "client"]

QUEUES = ("letters", "parcels")
OUTBOX = "mail"
LOCKS = ("north", "south")
SCHEDULES = {"often": ("1s", "7s", "10s"), "sometimes": ("1m", "90s")}
"""The specs that each schedule may have."""

STEADY = "steady"
"""A schedule that keeps its spec."""


async def client(world: World, store: Store) -> None:
    """Does one thing after another, whatever it is, until the faults cease."""
    while not world.over.is_set():
        action = world.random.choice(ACTIONS)
        with world.sim.cancellable():
            try:
                await action(world, store)
            except EXPECTED as error:
                world.sim.note(f"{action.__name__[1:]} raised {error!r:.100}")
            await trio.sleep(world.random.choice((0, 0.1, 1, 5)) * world.random.random())
    await trio.sleep_forever()


def _options(world: World) -> dict[str, Any]:
    random = world.random
    return {
        "priority": random.choice((0, 0, 5, -5)),
        "delay": random.choice((None, None, 0, 3, 30)),
        "max_attempts": random.choice((None, 1, 2)),
        "expires": random.choice((None, None, 0, 5, 100)),
    }


async def _enqueue(world: World, store: Store) -> None:
    token = world.token()
    key = world.random.choice((None, None, "a", "b"))
    queue = store.queue(world.random.choice(QUEUES), visibility=world.plan.visibility, backoff=1)
    with world.told([token]):
        id = await queue.enqueue({"token": token}, key=key, **_options(world))
    world.sim.note(f"enqueued {token} as {id}")
    world.stored([token], unless_there=None if key is None else id)


async def _enqueue_many(world: World, store: Store) -> None:
    tokens = [world.token() for _ in range(world.random.randint(2, 5))]
    with world.told(tokens):
        await store.queue(world.random.choice(QUEUES)).enqueue_many({"token": token} for token in tokens)
    world.stored(tokens)


async def _send(world: World, store: Store) -> None:
    token = world.token()
    with world.told([token]):
        await store.outbox(OUTBOX).enqueue({"token": token})
    world.stored([token])


async def _order(world: World, store: Store) -> None:
    """A transaction with a statement of one's own, a job, a message, and a savepoint that is undone."""
    token = world.token()
    tokens = [f"{token}/order", f"{token}/mail"]
    undone = f"{token}/undone"
    with world.told(tokens):
        async with store.transaction() as tx:
            await tx.execute("INSERT INTO orders (token) VALUES (?)", (tokens[0],))
            await tx.enqueue(world.random.choice(QUEUES), {"token": tokens[0]})
            try:
                async with tx.savepoint():
                    await tx.enqueue(world.random.choice(QUEUES), {"token": undone})
                    await trio.sleep(world.random.choice((0, 0, 1)) * world.random.random())
                    raise KeyError
            except KeyError as error:
                world.not_stored([undone], error)
            await tx.outbox_enqueue(OUTBOX, {"token": tokens[1]})
            if world.random.random() < 0.1:
                await trio.sleep(10)  # longer than it may
    world.stored(tokens)


async def _claim(world: World, store: Store) -> None:
    queue = store.queue(world.random.choice(QUEUES))
    lease = world.random.choice((None, 0.5, 5))
    wait = world.random.choice((0, 0, 2))
    worker = world.token()
    try:
        handles = await queue.claim(worker, world.random.randint(1, 3), lease=lease, wait=wait)
    except trio.Cancelled:
        world.look()
        kept = [id for id, job in world.recorder.jobs.items() if job["worker"] == worker and not present_life().killed]
        if kept and world.plan.sound:
            world.violated(f"a claim was cancelled, and it keeps {kept}")
        raise
    for handle in handles:
        if world.random.random() < 0.1:
            continue  # left to its lease
        with world.inside(handle, kept=False) as me:
            await trio.sleep(world.random.random())
            me.settled_itself = True
            what = world.random.choice(("ack", "retry", "fail", "snooze"))
            calls: dict[str, Callable[[], Awaitable[bool]]] = {
                "ack": handle.ack,
                "retry": partial(handle.retry, "by hand"),
                "fail": partial(handle.fail, "by hand"),
                "snooze": partial(handle.snooze, 1),
            }
            await world.settled(handle, what, calls[what])


async def _hold(world: World, store: Store) -> None:
    name = world.random.choice(LOCKS)
    async with store.lock(name).hold(ttl=world.random.choice((1, 5))) as held:
        me = (held.owner, present_life())
        others = [owner for owner, life in world.holding[name] if not life.killed]
        if others and world.plan.timely:
            world.violated(f"the lock {name} is held by {others} and {held.owner}")
        world.holding[name].append(me)
        try:
            await trio.sleep(world.random.random() * 4)
        finally:
            world.holding[name].remove(me)


async def _acquire(world: World, store: Store) -> None:
    name = world.random.choice(LOCKS)
    held = await store.lock(name).acquire(ttl=world.random.choice((0.5, 3)))
    if held is not None:
        await trio.sleep(world.random.random())
        await held.renew()
        await held.release()


async def _schedule(world: World, store: Store) -> None:
    name = world.random.choice(list(SCHEDULES))
    spec = f"@every {world.random.choice(SCHEDULES[name])}"
    await store.schedule(name, spec, world.random.choice(QUEUES), {"n": 1}, ScheduleOpts(max_attempts=2))


async def _unschedule(world: World, store: Store) -> None:
    await store.unschedule(world.random.choice(list(SCHEDULES)))


async def _start(world: World, store: Store) -> None:
    """What a program does at each start."""
    await store.schedule(STEADY, "@every 5s", QUEUES[0], None)


async def _cancel(world: World, store: Store) -> None:
    if world.recorder.jobs:
        id = world.random.choice(list(world.recorder.jobs))
        world.cancelled.add(id)
        await store.queue(world.recorder.jobs[id]["queue"]).cancel_job(id) if _is_plain(world, id) else None


def _is_plain(world: World, id: int) -> bool:
    return world.recorder.jobs[id]["queue"] in QUEUES


async def _tend(world: World, store: Store) -> None:
    queue = store.queue(world.random.choice(QUEUES))
    match world.random.randrange(7):
        case 0:
            await queue.redrive_all()
        case 1:
            await queue.prune(world.random.choice((0, 60)))
        case 2:
            await queue.sweep_expired()
        case 3:
            await queue.pause()
        case 4 | 5:
            await queue.resume()
        case _:
            await store.health()


ACTIONS: tuple[Callable[[World, Store], Awaitable[None]], ...] = (
    *(_enqueue,) * 6,
    _enqueue_many,
    *(_send,) * 2,
    *(_order,) * 2,
    *(_claim,) * 2,
    *(_hold,) * 2,
    _acquire,
    _schedule,
    _unschedule,
    _start,
    _cancel,
    *(_tend,) * 2,
)
