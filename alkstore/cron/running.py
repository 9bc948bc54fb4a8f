"""Executing runs: the Worker's port over queued runs, and what it runs for each."""

# ruff: noqa: SLF001 - a run is kept by the lease of its job, and both are one mechanism

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

import trio
from attrs import define, field

from actors.handlers import refuse_unfinished
from actors.ports import Interrupted, Outcome, Raised, Returned
from alkstore.context import SHIELDED_S, Context, insist, write_on_leaving
from alkstore.cron.command import CommandFailed, Output, run_command
from alkstore.job import Failure, JobHandle, Stamp
from alkstore.payload import decode, describe
from alkstore.queue import LOCKED_PAUSE_S, Queue, QueueSource
from alkstore.sql.cron import runs
from alkstore.sql.tx import Tx, queue_topic
from alkstore.values import Run, RunState

__all__ = ["Handlers", "RunHandle", "RunSource", "run_source"]

Handlers: TypeAlias = Mapping[str, "Callable[[RunHandle], Awaitable[object]]"]
"""For each name that a task calls, an async function of a `RunHandle`."""

RUN_STAMP = Stamp.of(visibility=30, max_attempts=10_000, backoff=0, expires=None)

_SETTLED_BY_ITS_END = "a run is settled by how its handler ends: return, or raise; its task's policy decides on retries"


class RunTimedOut(Exception):
    """An attempt ran longer than its task allows."""


@define(eq=False)
class RunHandle(JobHandle):
    """One attempt of a run, in the hands of its handler. Its lease and its fence are those of the run's job."""

    run: Run = field(kw_only=True)
    """The run as it stood when the attempt was taken."""
    _definition: dict[str, Any] = field(kw_only=True, repr=False)
    _args: str | None = field(kw_only=True, repr=False)
    _output: Output = field(factory=Output, init=False, repr=False)
    _begun: bool = field(default=False, init=False, repr=False)

    @property
    def args(self) -> Any:
        """The task's arguments."""
        return self._definition["args"] if self._args is None else decode(self._args)

    @property
    def task(self) -> str:
        return self.run.task

    @property
    def scheduled_for(self) -> datetime | None:
        """The occurrence for which the run was admitted; None: it was started by hand."""
        return self.run.scheduled_for

    async def ack(self) -> bool:
        """A run is settled by how its handler ends. RuntimeError."""
        raise RuntimeError(_SETTLED_BY_ITS_END)

    async def retry(self, error: object = None, delay: object = None) -> bool:
        """See `ack`."""
        raise RuntimeError(_SETTLED_BY_ITS_END)

    async def fail(self, error: object = None) -> bool:
        """See `ack`."""
        raise RuntimeError(_SETTLED_BY_ITS_END)

    async def snooze(self, delay: object) -> bool:
        """See `ack`."""
        raise RuntimeError(_SETTLED_BY_ITS_END)

    @property
    def attempt(self) -> int:
        """Which attempt of the run this is: 1 for the first."""
        return self.run.attempt

    @property
    def max_attempts(self) -> int:
        return 1 + int(self._definition["retries"])


@define(eq=False)
class RunSource(QueueSource):
    """The port through which a `Worker` executes runs."""

    handlers: Handlers
    starts: int
    _starting: trio.CapacityLimiter = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._starting = trio.CapacityLimiter(self.starts)

    async def take(self, limit: int) -> Sequence[JobHandle]:
        """Wait for a queued run that can be run here; end on the way what others have left to its lease."""
        engine, names = self._engine, ("", *sorted(self.handlers))
        while True:
            seen = engine.feed.position()
            next_at = await insist(lambda: engine.read(lambda tx: runs.look(tx, names)), self.holds_any)
            if next_at is None or next_at > engine.clock.now_ms():
                await engine.feed.moved_past(queue_topic(runs.RUNS_QUEUE), seen, next_at)
                continue
            await insist(lambda: engine.run(runs.recover, urgent=True), self.holds_any)
            if taken := await self._dispatch(names, min(limit, self.starts)):
                handles = [self._handle(one) for one in taken]
                await self._give_back_if_cancelled(handles)
                return handles
            with trio.move_on_after(LOCKED_PAUSE_S):  # others have locked what is due, or were faster
                await engine.feed.moved_past(queue_topic(runs.RUNS_QUEUE), seen, None)

    async def _dispatch(self, names: tuple[str, ...], limit: int) -> list[runs.Dispatched]:
        """Take runs. When the answer was lost, those that were taken all the same must not be left to their leases."""
        taken: list[runs.Dispatched] = []

        def dispatch(tx: Tx) -> list[runs.Dispatched]:
            nonlocal taken
            present = [one for one in taken if runs.has_taken(tx, one, self.worker_id)]
            taken = present or runs.dispatch(tx, names, self.worker_id, limit)
            return taken

        def give_back(tx: Tx) -> None:
            for one in taken:
                runs.give_back(tx, one, self.worker_id)

        try:
            return await insist(lambda: self._engine.run(dispatch, urgent=True), self.holds_any)
        except BaseException as leaving:  # whatever it is, it leaves, and what may be taken goes back
            if taken:
                await write_on_leaving(lambda: self._engine.run(give_back, urgent=True), leaving, lambda: True)
            raise

    async def execute(self, work: JobHandle) -> None:
        """What the Worker runs for each: the handler, or the command, within the task's timeout."""
        assert isinstance(work, RunHandle)
        start = partial(
            self._engine.run,
            lambda tx: runs.started(tx, work.run.id, work.run.attempt, work.id, work.fence),
            urgent=True,
        )
        if not await insist(start, lambda: False):
            return
        work._begun = True
        timeout = work._definition["timeout"]
        limit = math.inf if timeout is None else timeout / 1000
        try:
            with trio.CancelScope(deadline=trio.current_time() + limit) as scope:
                await self._call(work)
        except Exception as error:
            if not scope.cancel_called:
                raise
            raise RunTimedOut(f"ran longer than its timeout of {limit:g} s, then raised {describe(error)}") from error
        if scope.cancelled_caught:
            raise RunTimedOut(f"ran longer than its timeout of {limit:g} s")

    async def _call(self, work: RunHandle) -> None:
        definition = work._definition
        if definition["kind"] == "call":
            refuse_unfinished(await self.handlers[definition["call"]](work))
        else:
            await run_command(
                definition["command"],
                shell=definition["shell"],
                env=definition["env"],
                cwd=definition["cwd"],
                output=work._output,
                starting=self._starting,
                time_left=lambda: work.lease_remaining,
            )

    async def settle(self, work: JobHandle, outcome: Outcome) -> None:
        assert isinstance(work, RunHandle)
        output, exit_code = work._output.text() or None, work._output.exit_code
        match outcome:
            case Returned():
                ending = runs.Ending("succeeded", None, exit_code, output)
            case Interrupted(reason):
                ending = runs.Ending("cancelled", f"interrupted by {reason}", exit_code, output, begun=work._begun)
            case Raised(error):
                state: RunState = "timed_out" if isinstance(error, RunTimedOut) else "failed"
                by_itself = isinstance(error, RunTimedOut | CommandFailed)
                failure = Failure.of(error, None if by_itself else f"run {work.run.id} of {work.task}")
                ending = runs.Ending(
                    state,
                    failure.text,
                    exit_code,
                    output,
                    final=failure.discard,
                    snooze=failure.snooze,
                    begun=work._begun,
                )
        ended = False

        def end(tx: Tx) -> bool:
            nonlocal ended  # the answer to its commit may have been lost
            ended = runs.end(tx, work.run.id, work.run.attempt, work.id, work.fence, ending) or ended
            return ended

        if not await work._settle(end, repeatable=True):
            self.queue._context.publish("lost", self.queue.name, id=work.id)

    def _handle(self, one: runs.Dispatched) -> RunHandle:
        base = self.queue._handle(one.job, None)
        return RunHandle(
            one.job,
            self.queue._context,
            base._lease,
            run=one.run,
            definition=one.definition,
            args=one.args,
        )

    async def _give_back_if_cancelled(self, handles: Sequence[RunHandle]) -> None:
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            with trio.move_on_after(SHIELDED_S, shield=True):
                for handle in handles:
                    await self.settle(handle, Interrupted("shutdown"))
            raise


def run_source(context: Context, handlers: Handlers, starts: int, worker_id: str) -> RunSource:
    """Return the source of the runs that `handlers` can run; commands are always among them."""
    return RunSource(Queue(runs.RUNS_QUEUE, context, RUN_STAMP), worker_id, handlers, starts)
