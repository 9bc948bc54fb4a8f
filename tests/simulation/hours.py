"""Very many schedule-hours (schedules x hours) in virtual time, with leaders that are killed and a clock that steps."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import trio
from attrs import define, field

from actors import Intensity, Supervisor
from alkstore import JobHandle, Store, open_store
from alkstore.engines.driver import Connection
from alkstore.testing import Faults, Simulation, drain, simulate
from tests.simulation.recorder import Recorder

__all__ = ["Tally", "live_through", "main"]

SPECS = ("15m", "30m", "1h", "2h", "6h")
DENSE = "30s"
"""A step of an hour skips some of its boundaries: more than 64 are due."""
DENSE_SCHEDULES = 2
NODES = 3
HOURS = 10
REGISTERED_WITHIN_S = 900

FAULTS = Faults(
    busy=0.01,
    after_commit=0.0005,
    before_commit=0.0005,
    lost_renewal=0.001,
    step_every=1_800.0,
    freeze_every=1_200.0,
    freeze_up_to=120.0,
    kill_every=900.0,
)


@define(eq=False)
class Tally:
    """What became of the boundaries."""

    expected: int = 0
    fired: int = 0
    skipped: int = 0
    doubled: int = 0
    handled: Counter[tuple[str, str]] = field(factory=Counter)
    unhandled: int = 0
    leaders: int = 0
    overdue: int = 0

    @property
    def lost(self) -> int:
        return self.expected - self.fired - self.skipped


async def live_through(sim: Simulation, schedules: int, hours: float, tally: Tally) -> None:
    """Run `schedules` schedules for so many `hours` on three processes, and count."""
    recorder = Recorder(sim.path("app.db"))

    def on_connect(connection: Connection, who: str) -> None:
        raw = connection._raw  # type: ignore[attr-defined]
        raw.create_function("sim_now", 0, sim.stepped.now_ms)
        raw.create_function("sim_who", 0, lambda: who)

    def told(change: str) -> None:
        tally.leaders += change.startswith("lock __alkstore_scheduler")

    recorder.on_change = told
    sim.on_connect = on_connect
    with sim.spared():
        async with open_store(sim.path("app.db"), clock=sim.stepped, inline=True) as store:
            recorder.install()
            sim.on_commit = lambda _: recorder.read()
            for n in range(NODES):
                sim.process(f"node{n}", partial(_node, sim, tally))
            for n in range(schedules):
                spec = DENSE if n < DENSE_SCHEDULES else SPECS[n % len(SPECS)]
                await store.schedule(f"s{n}", f"@every {spec}", "q", {"n": n})
                await trio.sleep(REGISTERED_WITHIN_S / schedules)
            await trio.sleep(hours * 3_600)
            sim.cease_faults()
            await _come_to_rest(sim, store)
            recorder.read()
    _count(recorder, tally, sim.stepped.now_ms())
    recorder.close()


async def _come_to_rest(sim: Simulation, store: Store) -> None:
    await trio.sleep(120)  # the last leader may have been killed a moment ago, and its lease has to end
    await drain(store)


async def _node(sim: Simulation, tally: Tally) -> None:
    async def handle(job: JobHandle) -> None:
        assert job.schedule is not None
        tally.handled[job.schedule, str(job.boundary)] += 1

    async with (
        open_store(sim.path("app.db"), clock=sim.stepped) as store,
        Supervisor(on_event=lambda _: None) as team,
    ):
        often = Intensity(restarts=1_000, within=10)
        await team.start("schedules", store.run_schedules, intensity=often)
        await team.start("q", partial(store.queue("q").work, handle, concurrency=100), intensity=often)


def _count(recorder: Recorder, tally: Tally, now: int) -> None:
    recorder.compare()
    for name, grids in recorder.grids.items():
        for grid in grids:
            tally.expected += (grid.cursor - grid.first) // grid.interval
            tally.fired += len(grid.fired)
            tally.skipped += grid.skipped
            tally.doubled += len(grid.fired) - len(set(grid.fired))
            tally.overdue += recorder.schedules[name]["next_fire_at"] <= now
    tally.unhandled = tally.fired - len(tally.handled)


def main(hours: int, seed: int) -> int:
    """Live through at least so many schedule-`hours`; tell what became of the boundaries."""
    schedules = -(-hours // HOURS)
    tally, began = Tally(), time.perf_counter()
    history = simulate(seed, partial(live_through, schedules=schedules, hours=HOURS, tally=tally), faults=FAULTS)
    took = time.perf_counter() - began
    faults = Counter(line.split("fault ", 1)[1].split()[0] for line in history.lines if ": fault " in line)
    print(f"{schedules * HOURS:,} schedule-hours ({schedules:,} schedules x {HOURS} h) in {took:.0f} s, seed {seed}")
    print(f"boundaries: {tally.expected:,} passed, {tally.fired:,} fired, {tally.skipped:,} counted as skipped")
    print(f"lost: {tally.lost}, doubled: {tally.doubled}, overdue: {tally.overdue}, unhandled: {tally.unhandled}")
    print(f"leaders: {tally.leaders:,}; faults: {dict(faults)}")
    return 1 if tally.lost or tally.doubled or tally.overdue or tally.unhandled else 0
