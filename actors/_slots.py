"""The supervisor's own bookkeeping: a child's place, one of its lives, and who is restarted with whom.

Nothing here decides anything; `actors.supervisor` does.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable

import attrs
import trio

from actors.child import Child, ChildState, RestartLog
from actors.stop import StopToken


@attrs.define(eq=False)
class Life:
    """One run of a child, and the task_status that it is given."""

    on_ready: Callable[[object], None]
    token: StopToken = attrs.field(factory=StopToken, init=False)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    over: trio.Event = attrs.field(factory=trio.Event, init=False)
    told: bool = attrs.field(default=False, init=False)
    """Whether its end is our doing."""
    end_by: float = attrs.field(default=math.inf, init=False)
    ready_at: float | None = attrs.field(default=None, init=False)

    def started(self, value: object = None) -> None:
        if self.ready_at is not None or self.over.is_set():
            raise RuntimeError("task_status.started() was called twice, or after the child had ended")
        self.ready_at = trio.current_time()
        self.on_ready(value)

    def healthy(self, now: float) -> float:
        return 0.0 if self.ready_at is None else now - self.ready_at


@attrs.define(eq=False)
class Group:
    """Children that are restarted together: all of a supervisor, or each alone."""

    members: list[Slot] = attrs.field(factory=list, init=False)
    faulty: list[Slot] = attrs.field(factory=list, init=False)
    """Those that failed by themselves, and whose dependants have not been stopped yet."""
    mending: bool = attrs.field(default=False, init=False)
    news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    """Where the repair waits for a child to become ready, end or be added."""


@attrs.define(eq=False)
class Slot:
    """A child's place in the supervisor, from `start` to the end, over all its lives."""

    child: Child
    group: Group
    state: ChildState = attrs.field(default="starting", init=False)
    life: Life | None = attrs.field(default=None, init=False)
    due: float = attrs.field(default=-math.inf, init=False)
    restarts: int = attrs.field(default=0, init=False)
    last_error: BaseException | None = attrs.field(default=None, init=False)
    ever_ready: bool = attrs.field(default=False, init=False)
    withdrawn: bool = attrs.field(default=False, init=False)
    answered: trio.Event = attrs.field(factory=trio.Event, init=False)
    refusal: BaseException | None = attrs.field(default=None, init=False)
    value: object = attrs.field(default=None, init=False)
    log: RestartLog = attrs.field(init=False)
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context, init=False)

    def __attrs_post_init__(self) -> None:
        self.log = RestartLog(self.child.intensity, self.child.backoff)

    async def answer(self) -> object:
        """What `start` returns, or raises."""
        await self.answered.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.value

    def accept(self, value: object) -> None:
        if not self.answered.is_set():
            self.value = value
            self.answered.set()

    def refuse(self, error: BaseException) -> bool:
        """Let `start` raise `error`. False if it had its answer before, and nobody will see this one."""
        if self.answered.is_set():
            return False
        self.refusal = error
        self.answered.set()
        return True

    @property
    def waits(self) -> bool:
        """For its first life, or the next one."""
        return self.life is None and self.state in ("starting", "restarting")

    @property
    def over(self) -> bool:
        return self.life is None and not self.waits
