"""Simulated processes in one trio run: they can be stopped, killed and started anew, as real ones can."""

# ruff: noqa: SLF001 - trio has no public way to keep a task from running

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeAlias

import trio
import trio._core._run
from attrs import define, field

from alkstore.engines.driver import Connection

__all__ = ["Life", "Process", "hold_back_the_stopped", "present_life", "present_scope", "spared"]

Task: TypeAlias = trio.lowlevel.Task

present_scope: ContextVar[trio.CancelScope | None] = ContextVar("present_scope", default=None)
"""What a fault may cancel around this task; child tasks inherit it."""


@define(eq=False)
class Life:
    """One run of a process, from its start to its end or its being killed."""

    name: str
    spared: bool = False
    """Nothing goes wrong in it."""
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    stopped: bool = field(default=False, init=False)
    """Its tasks are not run, whatever happens to them."""
    killed: bool = field(default=False, init=False)
    connections: list[Connection] = field(factory=list, init=False)
    over: trio.Event = field(factory=trio.Event, init=False)
    _held: list[Task] = field(factory=list, init=False)

    def stop(self) -> None:
        """As SIGSTOP does."""
        self.stopped = True
        queue = trio._core._run.GLOBAL_RUN_CONTEXT.runner.runq
        tasks = list(queue)
        queue.clear()
        queue.extend(tasks)

    def go_on(self) -> None:
        """As SIGCONT does: everything that has become due meanwhile is due at once."""
        self.stopped = False
        trio._core._run.GLOBAL_RUN_CONTEXT.runner.runq.extend(self._held)
        self._held.clear()

    def kill(self) -> None:
        """As SIGKILL does: what was not committed is gone, and nothing more happens."""
        self.killed = True
        self.stop()
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        self.over.set()


_outside = Life("simulation")
_life: ContextVar[Life] = ContextVar("life", default=_outside)


def present_life() -> Life:
    """Return the process that this task belongs to."""
    return _life.get()


@contextmanager
def spared(name: str) -> Iterator[None]:
    """In the body, and in the tasks that it starts, nothing goes wrong."""
    before = _life.set(Life(name, spared=True))
    try:
        yield
    finally:
        _life.reset(before)


class _RunQueue(deque[Task]):
    """Holds back the tasks of processes that are stopped."""

    def append(self, task: Task) -> None:
        life = task.context.get(_life, _outside)
        if life.stopped:
            life._held.append(task)
        else:
            super().append(task)

    def extend(self, tasks: Any) -> None:
        for task in tasks:
            self.append(task)


def hold_back_the_stopped() -> None:
    """Make processes stoppable in this trio run."""
    runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
    queue = _RunQueue()
    queue.extend(runner.runq)
    runner.runq = queue


@define(eq=False)
class Process:
    """A function that is run anew whenever it was killed or cancelled, until it returns or its simulation ends."""

    name: str
    _function: Callable[[], Awaitable[object]]
    _pause: Callable[[], float]
    """How many seconds pass before the next start."""
    life: Life = field(init=False)
    lives: int = field(default=0, init=False)
    """How often it was started."""
    _buried: list[Life] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.life = Life(self.name)

    async def run(self, nursery: trio.Nursery) -> None:
        """Keep it running. Each life's tasks belong to `nursery`, and its errors go there."""
        while True:
            self.lives += 1
            life = self.life = Life(f"{self.name}.{self.lives}")
            context = copy_context()
            context.run(_life.set, life)
            context.run(present_scope.set, life.scope)
            context.run(nursery.start_soon, self._live, life)
            await life.over.wait()
            if life.killed:
                self._buried.append(life)
            elif not life.scope.cancel_called:
                return
            await trio.sleep(self._pause())

    async def _live(self, life: Life) -> None:
        try:
            with life.scope:
                await self._function()
        except BaseException:
            if not life.killed:  # else there is nobody left whom it could concern
                raise
        finally:
            life.over.set()

    def bury(self) -> None:
        """Let the tasks of the killed lives unwind, without any effect."""
        for life in self._buried:
            life.scope.cancel()
            life.go_on()
