"""A campaign: programs on one file, killed, stopped and started again at random, and a verdict at the end."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import trio
from attrs import define, field, frozen

from alkstore import open_store
from tests.crash import judge, ledger, programs
from tests.crash.clocks import SharedClock
from tests.crash.harness import Child, Processes, execute, open_processes, rows
from tests.crash.points import KILL_POINT, POINTS

__all__ = ["CREW", "Campaign", "Report", "run_campaign"]

CREW = {"worker": 2, "runner": 2, "deliverer": 1, "client": 2}
"""How many processes there are of each program."""

SCHEDULES = {"often": "@every 1s", "late": "@every 3s"}

LATE_BY = 100
"""So many boundaries of the schedule ``late`` have elapsed before anybody runs it: 64 fire, the rest is skipped."""

ACTIONS = {"kill": 55, "stop": 30, "tell to end": 15}
"""What the driver does to a process, and how often in a hundred."""

LONGEST_STOP_S = 3.0
"""Longer than the leases, and far shorter than anybody's patience."""

ARMED_SHARE = 0.5
"""How many of the processes are started with a kill point."""

LATEST_PASS = 12
"""A kill point strikes at this pass or an earlier one."""

ACTIONS_PER_JUMP = 40
"""The clock is set forward about once in so many actions: past the lease of a message, or that of a fired job."""

JUMPS_S = (70.0, 70.0, 330.0)

QUIET_S = 90.0
"""How long the end may take: everybody finishes what was begun, and nobody is killed any more."""


@frozen
class Report:
    """What happened, in numbers."""

    seed: int
    seconds: float
    counts: Counter[str]
    broken: list[str]

    def __str__(self) -> str:
        width = max(map(len, self.counts))
        lines = [f"seed {self.seed}, {self.seconds:.0f} s"]
        lines += [f"  {what:{width}}  {count:7,}" for what, count in self.counts.items()]
        lines += [f"BROKEN: {what}" for what in self.broken] or ["  nothing is broken"]
        return "\n".join(lines)


@define(eq=False)
class Slot:
    """The place of one process, which is started anew whenever it has ended."""

    program: str
    name: str
    points: Iterator[str]
    child: Child | None = None
    armed: bool = False
    """It may kill itself at any moment."""
    stopped: bool = False
    told: bool = False
    """It was told to end, and does not have to be started again if `leaving`."""
    leaving: bool = False
    over: trio.Event = field(factory=trio.Event)


@define(eq=False)
class Campaign:
    """Runs the processes. All its dice are thrown with one seed; how the processes are interleaved nobody knows."""

    folder: Path
    processes: Processes
    dice: random.Random
    kills: int
    pace: float
    """Seconds from one action of the driver to the next, on average."""
    slots: list[Slot] = field(init=False)
    killed: int = field(default=0, init=False)
    calm: bool = field(default=False, init=False)
    """Nobody is killed any more."""
    clock: SharedClock = field(init=False)
    ledger: ledger.Ledger = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.clock = SharedClock(str(self.folder / "clock"))
        self.ledger = ledger.Ledger(str(self.folder / "ledger"), "driver")
        self.slots = []
        for program, count in CREW.items():
            points = list(POINTS[program])
            self.dice.shuffle(points)
            turns = cycle(points)
            self.slots += [Slot(program, f"{program}-{n}", turns) for n in range(1, count + 1)]

    @property
    def path(self) -> str:
        return str(self.folder / "store.db")

    async def run(self) -> judge.Facts:
        """Do it all, and return how the store stands at the end."""
        first_boundaries = await self._prepare()
        async with trio.open_nursery() as nursery:
            for slot in self.slots:
                nursery.start_soon(self._keep, slot)
            while not all(slot.child and slot.child.has_said("working") for slot in self.slots):  # noqa: ASYNC110
                await trio.sleep(0.05)
            async with trio.open_nursery() as stops:
                while self.killed < self.kills:
                    await trio.sleep(self.dice.expovariate(1 / self.pace))
                    self._act(stops)
            now = await self._calm_down()
        return judge.facts_of(self.path, now, first_boundaries)

    async def _prepare(self) -> dict[str, int]:
        async with open_store(self.path, clock=self.clock) as store:
            for name, spec in SCHEDULES.items():
                await store.schedule(name, spec, programs.QUEUE, {"token": name, "do": "ok"})
        execute(
            self.path,
            "CREATE TABLE orders (token TEXT PRIMARY KEY)",
            "UPDATE __alkstore_scheduler_tasks SET next_fire_at = next_fire_at - :late * interval WHERE name = 'late'",
            late=LATE_BY,
        )
        return dict(rows(self.path, "SELECT name, next_fire_at FROM __alkstore_scheduler_tasks"))

    # ------------------------------------------------------------------------------------------------ the processes

    async def _keep(self, slot: Slot) -> None:
        """Start the slot's process again and again, until it has left as it was told to."""
        program: Callable[..., object] = getattr(programs, slot.program)
        while True:
            slot.armed = not self.calm and self.dice.random() < ARMED_SHARE
            slot.told = slot.stopped = False
            slot.child = child = await self.processes.start(
                program,
                environment={KILL_POINT: f"{next(slot.points)}#{self.dice.randint(1, LATEST_PASS)}"}
                if slot.armed
                else {},
                path=self.path,
                clock=self.clock.path,
                ledger=self.ledger.path,
                name=slot.name,
                seed=self.dice.getrandbits(32),
            )
            await child.listen_to_the_end()
            status = await child.ended()
            slot.child = None
            await child.reap()
            if status == -signal.SIGKILL:
                self.killed += 1
            elif status != 0 or not slot.told:
                raise AssertionError(f"{slot.name} ended with status {status}:\n{child.errors()}")
            elif slot.leaving:
                slot.over.set()
                return

    def _act(self, stops: trio.Nursery) -> None:
        """Do one thing to one process, or to the clock."""
        if self.dice.random() < 1 / ACTIONS_PER_JUMP:
            self._jump(self.dice.choice(JUMPS_S))
        (action,) = self.dice.choices(list(ACTIONS), list(ACTIONS.values()))
        stopped_most = [slot for slot in self.slots if slot.program == "worker"] if action == "stop" else []
        slot = self.dice.choice([*self.slots, *stopped_most * 2])
        seconds = self.dice.uniform(0.05, LONGEST_STOP_S)
        if slot.child is None or slot.child.process.returncode is not None:
            return
        if action == "kill":
            self.ledger.write("killed", whom=slot.name)
            slot.child.signal_all(signal.SIGKILL)
        elif action == "stop" and not slot.stopped:
            self.ledger.write("stopped", whom=slot.name, seconds=seconds)
            stops.start_soon(self._stop, slot, slot.child, seconds)
        elif action == "tell to end":
            self._tell(slot)

    async def _stop(self, slot: Slot, child: Child, seconds: float) -> None:
        slot.stopped = True
        child.signal_all(signal.SIGSTOP)
        await trio.sleep(seconds)
        if child.process.returncode is None:
            child.signal_all(signal.SIGCONT)
            slot.stopped = False

    def _tell(self, slot: Slot) -> None:
        """Tell the process to end, once it listens to that and if it was not told yet: a second time means now."""
        if slot.child is not None and slot.child.has_said("working") and not slot.told:
            self.ledger.write("told", whom=slot.name)
            slot.told = True
            slot.child.terminate()

    def _jump(self, seconds: float) -> None:
        self.ledger.write("jumped", seconds=seconds)
        self.clock.advance(seconds)
        if self.calm:  # nobody needs to be surprised any more, and a commit makes everybody look at the clock
            execute(self.path, "UPDATE __alkstore_meta SET value = value")

    # ---------------------------------------------------------------------------------------------------- the end

    async def _calm_down(self) -> int:
        """Let everything that was begun be finished, end all processes, and return when the runners ended."""
        self.calm = True
        with trio.fail_after(QUIET_S):
            await self._leave("client")
            await self._disarm()
            self._jump(JUMPS_S[-1])  # what the dead hold in their hands is due
            overdue = "SELECT 1 FROM __alkstore_scheduler_tasks WHERE next_fire_at <= :now"
            while rows(self.path, overdue, now=self.clock.now_ms()):  # noqa: ASYNC110 - it is done by other processes
                await trio.sleep(0.1)
            now = self.clock.now_ms()
            await self._leave("runner")
            while alive := self._alive():
                await trio.sleep(0.2)
                if alive == {"delayed"}:
                    self._jump(60.0)
            await self._leave("worker", "deliverer")
        return now

    async def _disarm(self) -> None:
        """Have every process that may still kill itself replaced by one that will not."""
        while armed := [slot for slot in self.slots if slot.armed and not slot.over.is_set()]:
            for slot in armed:
                self._tell(slot)
            await trio.sleep(0.05)

    def _alive(self) -> set[str]:
        found = rows(
            self.path,
            "SELECT DISTINCT CASE WHEN state = 0 AND run_at > :now THEN 'delayed' ELSE 'due' END "
            "FROM __alkstore_jobs WHERE state < 2",
            now=self.clock.now_ms(),
        )
        return {state for (state,) in found}

    async def _leave(self, *who: str) -> None:
        leaving = [slot for slot in self.slots if slot.program in who]
        for slot in leaving:
            slot.leaving = True
        while not all(slot.over.is_set() for slot in leaving):
            for slot in leaving:
                self._tell(slot)
            await trio.sleep(0.05)


async def run_campaign(folder: Path, *, kills: int, seed: int, pace: float = 0.25) -> Report:
    """Run a campaign of so many `kills` in an empty `folder`, and return what came of it."""
    began = time.monotonic()
    with _naming(seed):
        async with open_processes(folder) as processes:
            campaign = Campaign(folder, processes, random.Random(seed), kills, pace)  # noqa: S311 - dice, not secrets
            facts = await campaign.run()
        entries = ledger.read(campaign.ledger.path)
    campaign.ledger.close()
    counts = _counts(entries, facts, campaign.killed)
    return Report(seed, time.monotonic() - began, counts, judge.judge(entries, facts))


@contextmanager
def _naming(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"the seed was {seed}")
        raise


def _counts(entries: list[ledger.Entry], facts: judge.Facts, killed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    counts["jobs and messages stored"] = facts.last_id
    counts["of them answered"] = len({id for entry in entries if entry["what"] == "answered" for id in entry["ids"]})
    counts["boundaries fired"] = sum(grid.fired for grid in facts.grids)
    counts["boundaries skipped"] = sum(grid.skipped for grid in facts.grids)
    counts["handlers started"] = sum(entry["what"] == "started" for entry in entries)
    counts["of them again"] = sum(entry["what"] == "started" and entry["fence"] > 1 for entry in entries)
    counts["acks True"] = sum(entry["what"] == "acked" and entry["answer"] for entry in entries)
    counts["acks False"] = sum(entry["what"] == "acked" and not entry["answer"] for entry in entries)
    counts["heartbeats"] = sum(entry["what"] == "beat" for entry in entries)
    for reason, count in Counter(left.reason for left in facts.left.values()).items():
        counts[f"dead letters: {reason}"] = count
    counts["leaders"] = sum(entry["what"] == "leads" for entry in entries)
    counts["leaderships lost"] = sum(entry["what"] == "lost" for entry in entries)
    counts["processes killed"] = killed
    for what, name in {"stopped": "stops", "told": "told to end", "jumped": "clock jumps"}.items():
        counts[name] = sum(entry["what"] == what for entry in entries)
    for point, count in Counter(entry["point"] for entry in entries if entry["what"] == "died").items():
        counts[f"died {point}"] = count
    return counts
