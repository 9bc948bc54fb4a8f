"""One simulated day of a small system: processes with runners, workers, deliverers and clients on one file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from random import Random

import trio

from actors import Intensity, Supervisor
from alkstore import (
    StopToken,
    Store,
    open_store,
)
from alkstore.engines.driver import Connection
from alkstore.testing import Simulation, drain
from tests.simulation.clients import OUTBOX, QUEUES, SCHEDULES, STEADY, client
from tests.simulation.plan import Plan
from tests.simulation.recorder import Recorder, Violation
from tests.simulation.world import World, is_expected

__all__ = ["live"]

DRAIN_WITHIN_S = 3 * 86_400
STOP_WITHIN_S = 60
AFTERMATH_S = 120
"""A call that hangs when the faults cease still ends late, and somebody's patience with it."""


async def live(sim: Simulation, plan: Plan) -> None:
    """The whole day: faults, then none, then everything drains; all checks on the way and at the end."""
    world = World(sim, plan, Recorder(sim.path("app.db")))
    world.recorder.on_taken_away = world.taken_away
    world.recorder.on_change = sim.note

    def on_connect(connection: Connection, who: str) -> None:
        raw = connection._raw  # type: ignore[attr-defined]
        raw.create_function("sim_now", 0, sim.stepped.now_ms)
        raw.create_function("sim_who", 0, lambda: who)

    sim.on_connect = on_connect
    with sim.spared():
        async with open_store(sim.path("app.db"), clock=sim.stepped, inline=True) as store:
            await store.transact(lambda tx: tx.execute("CREATE TABLE orders (token TEXT NOT NULL)"))
            world.recorder.install()
            try:
                await _until_over(world, store)
            finally:
                world.recorder.close()


async def _until_over(world: World, store: Store) -> None:
    sim = world.sim
    sim.on_commit = world.committed
    with world.scope:
        for number in range(world.plan.nodes):
            sim.process(f"node{number}", partial(_node, world, number))
        await trio.sleep(world.plan.length)
        sim.cease_faults()
        sim.note("the faults cease")
        await _drain(world, store)
        world.look()
        for check in world.promises:
            check()
    if world.broken:
        raise world.broken[0]
    _finally(world)


async def _drain(world: World, store: Store) -> None:
    """Nothing new comes in; what there is runs dry, and the processes end by themselves."""
    world.over.set()
    await trio.sleep(60)  # who was about to do something does it
    for name in (*SCHEDULES, STEADY):
        await store.unschedule(name)
    for name in QUEUES:
        await store.queue(name).resume()
    began = trio.current_time()
    while True:
        await drain(store, within=DRAIN_WITHIN_S)
        health = await store.health()
        if not any(counts.delayed for counts in health.queues.values()):
            break
        if trio.current_time() - began > DRAIN_WITHIN_S:
            world.violated("delayed jobs never run")
        await trio.sleep(60)
    world.sim.note("drained")
    world.drained.set()
    with trio.move_on_after(STOP_WITHIN_S) as waiting:
        for process in world.sim.processes:
            await process.life.over.wait()
    if waiting.cancelled_caught:
        world.violated(f"a process did not stop within {STOP_WITHIN_S} s")
    leader = (await store.health()).schedules.leader
    if leader is not None:
        world.violated(f"{leader} leads, and everybody has stopped")


def _finally(world: World) -> None:
    recorder = world.recorder
    recorder.compare()
    left = [id for id, job in recorder.jobs.items() if job["state"] != 2]
    if left:
        raise Violation(f"the jobs {left} were never done")
    for id, job in recorder.gone.items():
        if job["state"] == 1 and (id, job["fence"]) not in world.finished:
            raise Violation(f"job {id} was acknowledged, and no handler of fence {job['fence']} ever finished")
    orders = {token for (token,) in recorder.query("SELECT token FROM orders")}
    for token, ids in recorder.by_token.items():
        if len(ids) > 1:
            raise Violation(f"one enqueue stored two jobs: {token} is {ids}")
        if str(token).endswith("/order") and (str(token) in orders) != bool(ids):
            raise Violation(f"{token} is not with what it was committed with")
    for name, grids in recorder.grids.items():
        for grid in grids:
            expected = (grid.cursor - grid.first) // grid.interval
            if len(set(grid.fired)) != len(grid.fired) or len(grid.fired) + grid.skipped != expected:
                raise Violation(f"{name}: {len(grid.fired)} fired and {grid.skipped} skipped of {expected}")


# ------------------------------------------------------------------------------------------------------- a process


async def _node(world: World, number: int) -> None:
    """A process that is started again by whatever starts processes, for as long as faults go on."""
    while not world.drained.is_set():
        try:
            await _node_once(world, number)
        except Exception as error:
            late = trio.current_time() > world.plan.length + AFTERMATH_S
            if late or not is_expected(error):
                raise
            world.sim.note(f"ended with {error!r:.200}")
        await trio.sleep(1)


async def _node_once(world: World, number: int) -> None:
    plan, often = world.plan, Intensity(restarts=1_000, within=10)
    random = Random(f"{world.sim.seed} node {number}")  # noqa: S311
    async with (
        open_store(
            world.sim.path("app.db"),
            clock=world.sim.stepped,
            inline=random.random() < 0.5,
            leadership_ttl=plan.leadership_ttl,
        ) as store,
        Supervisor(on_event=world.heard) as team,
    ):
        start = partial(team.start, intensity=often)
        await start("events", partial(_listen, world, store))
        await start("schedules", _breakable(world, store.run_schedules))
        for name in QUEUES:
            queue = store.queue(name, visibility=plan.visibility, backoff=1)
            work = partial(queue.work, world.handle, concurrency=random.randint(1, 4), grace=random.choice((0, 5)))
            await start(name, _breakable(world, work))
        mail = partial(store.outbox(OUTBOX).deliver, world.handle, concurrency=random.randint(1, 2), grace=1)
        await start(OUTBOX, _breakable(world, mail))
        for each in range(random.randint(1, 2)):
            await start(f"client{each}", partial(client, world, store))
        with trio.move_on_after(plan.deployed_every):
            await world.drained.wait()
        team.stop()  # and what has begun has its grace


async def _listen(world: World, store: Store) -> None:
    """What is published has happened."""
    recorder = world.recorder
    with store.events(buffer=100_000) as events:
        async for event in events:
            world.look()
            ids = set(event.details.get("ids", ()))
            match event.kind, event.details.get("outcome"):
                case "fired", _:
                    true = ids <= {*recorder.jobs, *recorder.gone}
                case "claimed", _:
                    true = ids <= set(recorder.claims)
                case "settled", "acked":
                    true = event.details["id"] in recorder.gone
                case "dead", _:
                    true = event.details["id"] in recorder.died
                case _:
                    true = True
            if not true:
                world.violated(f"published, and it did not happen: {event}")


def _breakable(world: World, serve: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    async def served(*, stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        with world.sim.cancellable():
            await serve(stop=stop, task_status=task_status)

    return served
