"""Runs a program with its stores in virtual time, repeatably from a seed, while everything around it goes wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random

import trio
import trio.testing
from attrs import define, field

from actors.handlers import is_async
from actors.unwinding import Alone
from alkstore.clock import Clock, TrioClock
from alkstore.engines.driver import Connection, StdlibDriver
from alkstore.testing.clocks import SteppedClock
from alkstore.testing.faults import FaultPlan, Faults
from alkstore.testing.history import History
from alkstore.testing.processes import Life, Process, hold_back_the_stopped, present_life, present_scope, spared
from alkstore.testing.wires import Wires
from alkstore.testing.world import repeatable, wired

__all__ = ["Deadlock", "Simulation", "simulate"]

RESTART_WITHIN_S = 5.0
"""A killed process is started anew after a pause of up to this."""

IDLE_ROUNDS = 1_000
"""Rounds of trio's loop without any task: one is normal, a few more are rounding of virtual time."""

IN_MEMORY = "/dev/shm"  # noqa: S108 - a folder of the simulation's own is made in it


class Deadlock(Exception):
    """Every task of a simulation waits for another one."""


@define(eq=False)
class Simulation:
    """What the program under simulation can do besides: start processes, note what happens, let the faults cease."""

    seed: int
    random: Random
    """For the program's own choices; it follows from the seed."""
    folder: str
    """Where its files belong: a temporary folder, in memory where there is such a thing."""
    plan: FaultPlan
    history: History
    stepped: SteppedClock
    """The machine's clock, for those who let `Faults.step_every` or themselves step it."""
    on_connect: Callable[[Connection, str], None] = field(default=lambda _connection, _who: None, init=False)
    """Called with each connection to a database that is opened, and the name of the process that does it."""
    on_commit: Callable[[str], None] = field(default=lambda _who: None, init=False)
    """Called after each commit, with the name of the process that made it."""
    processes: list[Process] = field(factory=list, init=False)
    _nursery: trio.Nursery = field(init=False)
    _trouble: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    def path(self, name: str) -> str:
        """Return the path of the file `name` in the simulation's folder."""
        return os.path.join(self.folder, name)

    def note(self, what: str) -> None:
        """Add a line to the history; it counts in the digest. What a killed process says in its grave does not."""
        if not (life := present_life()).killed:
            self.history.note(life.name, what.replace(self.folder, "."))

    def process(self, name: str, function: Callable[[], Awaitable[object]]) -> Process:
        """Start `function` as a process of its own: frozen, killed, cancelled as the plan says, and started anew.

        It opens its own store. It runs until it returns, or the program ends. Its errors end the simulation.
        """
        process = Process(name, function, lambda: self.random.uniform(0, RESTART_WITHIN_S))
        self.processes.append(process)
        self._nursery.start_soon(process.run, self._nursery)
        return process

    @contextmanager
    def cancellable(self) -> Iterator[trio.CancelScope]:
        """A scope that `Faults.cancel` may cancel at any checkpoint, in place of the whole process."""
        with trio.CancelScope() as scope:
            before = present_scope.set(scope)
            try:
                yield scope
            finally:
                present_scope.reset(before)

    @contextmanager
    def spared(self) -> Iterator[None]:
        """In the body, and in the tasks that it starts, nothing goes wrong: for who only watches."""
        with spared("observer"):
            yield

    def cease_faults(self) -> None:
        """From now on nothing goes wrong any more; what was stopped goes on."""
        self.plan.active = False
        self._trouble.cancel()
        for process in self.processes:
            if not process.life.killed:
                process.life.go_on()

    def _connected(self, connection: Connection, who: str) -> None:
        self.on_connect(connection, who)

    def _committed(self, who: str) -> None:
        self.on_commit(who)

    async def _live(self, program: Callable[[Simulation], Awaitable[object]]) -> None:
        hold_back_the_stopped()
        if self.plan.faults.cancel:
            trio.lowlevel.add_instrument(_Canceller(self.plan))
        with Alone():
            async with trio.open_nursery(strict_exception_groups=True) as self._nursery:
                watch = _Watch(self._nursery.cancel_scope.cancel)
                trio.lowlevel.add_instrument(watch)
                self._nursery.start_soon(self._make_trouble)
                try:
                    await program(self)
                finally:
                    self.cease_faults()
                    self._nursery.cancel_scope.cancel()
                    for process in self.processes:
                        process.bury()
            if watch.barked:
                raise Deadlock("every task of the simulation waits, and none for a moment in time")

    async def _make_trouble(self) -> None:
        faults = self.plan.faults
        with self._trouble:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                for every, strike in (
                    (faults.step_every, self._step),
                    (faults.freeze_every, self._freeze),
                    (faults.kill_every, self._kill),
                ):
                    if every is not None:
                        nursery.start_soon(self._strike_again_and_again, every, strike)

    async def _strike_again_and_again(self, every: float, strike: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self.plan.wait(every)
            await strike()

    async def _step(self) -> None:
        wanted = round(self.plan.random.uniform(0, self.plan.faults.step_up_to), 3)
        by = wanted - self.stepped.stepped_s
        self.plan.tell("step_every", "clock", f" {by:+.3f} s")
        self.stepped.step(by)

    async def _freeze(self) -> None:
        life = self._victim()
        if life is not None and not life.stopped:
            length = self.plan.random.uniform(0, self.plan.faults.freeze_up_to)
            self.plan.tell("freeze_every", life.name, f" {length:.3f} s")
            life.stop()
            await trio.sleep(length)
            if not life.killed:
                self.history.note(life.name, "goes on")
                life.go_on()

    async def _kill(self) -> None:
        life = self._victim()
        if life is not None:
            self.plan.tell("kill_every", life.name)
            life.kill()

    def _victim(self) -> Life | None:
        living = [process.life for process in self.processes if process.lives and not process.life.over.is_set()]
        return self.plan.random.choice(living) if living else None


class _Watch(trio.abc.Instrument):
    """Barks when nothing can ever happen any more: no task can run, and none waits for a moment in time."""

    def __init__(self, bark: Callable[[], object]) -> None:
        self.barked = False
        self._bark = bark
        self._idle = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._idle = 0

    def before_io_wait(self, timeout: float) -> None:
        self._idle += 1
        if self._idle > IDLE_ROUNDS and not self.barked:
            self.barked = True
            self._bark()


class _Canceller(trio.abc.Instrument):
    """Cancels what stands in a scope for it, at any checkpoint."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        scope = task.context.get(present_scope)
        if scope is not None and not scope.cancel_called and self._plan.strikes("cancel", task.name):
            scope.cancel()


def simulate(seed: int, program: Callable[[Simulation], Awaitable[object]], *, faults: Faults | None = None) -> History:
    """Run `program` in a trio run of its own, in virtual time, and return its history.

    `program` is an async function of one `Simulation`: a supervisor tree, say, with the stores that it opens itself.
    The same `seed` gives the same history, to the last event, in any process: trio's order of tasks, randomness,
    clocks and faults follow from it. Stores are opened without threads and, unless they name a clock, on virtual time
    (on `Simulation.stepped` where the plan steps the clock). A plain handler runs in place, in the trio thread, so it
    cannot call back by `trio.from_thread`. A command of a cron task is refused, and its run fails with the reason.

    Raises TypeError, naming a wrong argument, and Deadlock if nothing can ever happen any more. Any other failure
    leaves as itself. Once it runs, the notes of the exception tell the seed, and what happened last.

        def test_orders_are_paid() -> None:
            simulate(7, shop, faults=ROUGH)
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, not {seed!r:.80}")
    if not is_async(program, "program"):
        raise TypeError(f"program must be an async function of one Simulation, not {program!r:.80}")
    if not isinstance(faults, Faults | None):
        raise TypeError(f"faults must be a Faults, such as ROUGH, not {faults!r:.80}")
    history = History(seed)
    plan = FaultPlan(Faults() if faults is None else faults, Random(f"{seed} faults"), history)  # noqa: S311
    stepped = SteppedClock()
    clock = trio.testing.MockClock(autojump_threshold=0)
    wall: Clock = TrioClock() if plan.faults.step_every is None else stepped
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None) as folder:
        simulation = Simulation(seed, Random(f"{seed} program"), folder, plan, history, stepped)  # noqa: S311
        wires = Wires(
            StdlibDriver(),
            plan,
            simulation._connected,  # noqa: SLF001 - one mechanism
            simulation._committed,  # noqa: SLF001
        )
        try:
            with repeatable(seed, clock, lambda: plan.lag_s), wired(wires, wall):
                trio.run(simulation._live, program, clock=clock)  # noqa: SLF001 - one mechanism
        except BaseException as error:
            error.add_note(f"in the simulation of seed {seed}; the last of its {history.count} events:")
            error.add_note(history.trace())
            raise
    return history
