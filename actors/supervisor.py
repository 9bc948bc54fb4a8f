"""Keeps actors running: starts them in order, restarts those that fail, stops them in reverse, hides nothing.

A nursery ends all its tasks when one fails. A `Supervisor` is a nursery that first tries again, within limits
that are set per child, and gives up loudly (`RestartsExceeded`) when trying again does not help::

    stop = StopToken()
    async with Supervisor(stop) as sup:
        await sup.start("schedules", store.run_schedules)
        await sup.start("emails", partial(emails.work, send_email, concurrency=20))

What happens to an error, since nothing may be lost:

* A permanent or transient child's Exception is an event, and the child is restarted. One restart too many, and
  it is the cause of the RestartsExceeded that leaves the supervisor.
* A temporary child's Exception is an event and stays in `children()`. It takes nobody down, as in OTP.
* An Exception raised while stopping cannot be mended by a restart. It leaves the supervisor once all have ended
  (a temporary child's is an event, as ever).
* A child that fails before it is first ready has not started: `start` raises its error.
* KeyboardInterrupt, SystemExit and every other BaseException unwinds everything at once, as in a nursery.
* What the body raises leaves as itself. Whatever failed besides stands in its notes.

A team is a child of another supervisor by being a function::

    async def team(stop, *, task_status=trio.TASK_STATUS_IGNORED):
        async with Supervisor(stop, strategy="one_for_all", name="team") as sup:
            await sup.start("reader", reader)
            await sup.start("writer", writer)
            task_status.started()
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Literal, Self, get_args, overload

import trio

from actors._leaving import gravest, is_cancelled, without
from actors._slots import Group, Life, Slot
from actors.child import (
    STOP_TIMEOUT,
    Backoff,
    Child,
    ChildEvent,
    ChildInfo,
    ChildState,
    EventKind,
    Intensity,
    Restart,
    RestartsExceeded,
    log_event,
    logger,
)
from actors.events import Broadcast, Subscription
from actors.stop import StopToken
from actors.unwinding import shown

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]

FAILED_KEPT = 100
"""How many failed temporary children `children()` remembers: enough to see what is wrong, never a leak."""


class SupervisorStopping(Exception):
    """The child was not started, because its supervisor is stopping or has ended.

    In the supervisor's own body it needs no handling: it ends the body and goes no further, so that a stop
    in the middle of starting up is a clean one.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(f"{supervisor.name} is stopping: it starts no more children")
        self.supervisor = supervisor


class Supervisor:
    """An async context manager that runs children, restarts them, and stops them in reverse order.

    Leaving the body waits for the children until all have ended. Once the stop token is flipped they are
    stopped one after the other, the last started first; the body is not touched, and is waited for.
    Cancellation, or an error in the body, cancels all children at once and waits for their clean-up. Used
    once, in one trio thread.
    """

    def __init__(
        self,
        stop: StopToken | None = None,
        *,
        strategy: Strategy = "one_for_one",
        on_event: Callable[[ChildEvent], object] = log_event,
        name: str = "supervisor",
        random: Random | None = None,
    ) -> None:
        """`stop`: ends the supervisor when it is flipped; `stop()` does so too, and leaves this token alone.

        `strategy`: who is restarted with a child that failed. "one_for_one": nobody; "rest_for_one": those
        started after it; "one_for_all": all. The others are stopped in reverse order; after the failed
        child's backoff all start in order, each once the one before is ready. Those that had ended for good
        stay ended, and a temporary child is not brought back.

        `on_event`: called with each event as it happens, must not block; what it raises is logged and
        changes nothing. `name` stands in events and errors. `random`: where the jitter comes from; seed it
        to repeat a run.
        """
        if strategy not in get_args(Strategy):
            raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {strategy!r}")
        if stop is not None and not isinstance(stop, StopToken):
            raise TypeError(f"stop must be a StopToken, made by StopToken(), not {stop!r}")
        if not callable(on_event):
            raise TypeError(f"on_event must be a function of a ChildEvent, not {on_event!r}")
        self.name = name
        self._strategy = strategy
        self._on_event = on_event
        self._random = random or Random()  # noqa: S311  jitter, not a secret
        self._stop = StopToken() if stop is None else stop.child()
        self._events: Broadcast[ChildEvent] = Broadcast()
        self._slots: list[Slot] = []
        self._everyone = Group()
        self._body = trio.CancelScope()
        self._late: list[Exception] = []
        self._exceeded: RestartsExceeded | None = None
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        if self._nursery is not None:
            raise RuntimeError(f"{self.name} was used before: make a new Supervisor")
        self._context = self._lifetime()
        await self._context.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, traceback)

    @overload
    async def start(self, child: Child, /) -> Any: ...

    @overload
    async def start(
        self,
        name: str,
        fn: Callable[..., Awaitable[object]],
        /,
        *,
        restart: Restart = "permanent",
        intensity: Intensity = ...,
        backoff: Backoff = ...,
        stop_timeout: float | None = STOP_TIMEOUT,
    ) -> Any: ...

    async def start(self, child: Child | str, fn: Any = None, /, **options: Any) -> Any:
        """Start a child, given as a `Child` or as what makes one, and wait until it is ready.

        Returns what the child gave to ``task_status.started()``; None for one that does not take
        `task_status`. With rest_for_one and one_for_all one child starts at a time, after a restart that is
        under way: a child that starts others must be ready itself before. A checkpoint; cancelled, the child
        is cancelled, waited for, and forgotten. It runs with the context variables of the caller.

        Raises the child's own error if it fails before it is ready (it is not tried again), RuntimeError if
        it returns before, SupervisorStopping if the supervisor is stopping, ValueError if the name is
        taken.
        """
        if not isinstance(child, Child):
            child = Child(child, fn, **options)
        elif fn is not None or options:
            raise TypeError("start takes a Child alone, or a name, a function and options")
        slot = self._admit(child)
        try:
            return await slot.answer()
        except BaseException as error:
            # cancelled: also when the child has become ready in that moment, for its caller will never know
            if error is not slot.refusal and slot in self._slots:
                await self._withdraw(slot)
            raise

    def stop(self) -> None:
        """Stop this supervisor alone. Returns at once; the `async with` ends when the children have."""
        self._stop.stop()

    def children(self) -> list[ChildInfo]:
        """How each child is doing now, in start order.

        A temporary child is forgotten when it has ended; of those that failed the latest hundred are kept.
        """
        return [ChildInfo(s.child.name, s.state, s.restarts, s.last_error) for s in self._slots]

    def events(self, buffer: int = 1000) -> Subscription[ChildEvent]:
        """All events from this call on, of the direct children. Ends when the supervisor has ended."""
        return self._events.subscribe(buffer)

    # The lifetime: two nurseries, so that the one who stops the children is not one that is waited for.

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        body: BaseException | None = None
        raised: list[BaseException] = []
        try:
            async with trio.open_nursery(strict_exception_groups=True) as watch:
                watch.start_soon(self._stop_in_order)
                try:
                    async with trio.open_nursery(strict_exception_groups=True) as self._nursery:
                        try:
                            with self._body:
                                yield
                        except BaseException as error:  # noqa: BLE001  raised below, when all have ended
                            body = without(error, self._is_own_refusal)
                            if body is not None:
                                raised.append(body)
                                self._nursery.cancel_scope.cancel(reason=f"the body raised {shown(body)}")
                except BaseExceptionGroup as group:
                    raised.extend(group.exceptions)
                self._stop.stop()  # from here on nothing is started
                watch.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raised.extend(group.exceptions)
        for slot in self._slots:
            self._retire(slot)
        self._events.close()
        if (verdict := self._verdict(raised, body)) is not None:
            raise verdict

    def _verdict(self, raised: list[BaseException], body: BaseException | None) -> BaseException | None:
        interrupts: list[BaseException] = []
        from_body: list[BaseException] = []
        others: list[BaseException] = list(self._late)
        for error in raised:
            rest = without(error, self._is_no_fault)
            if rest is not None and not isinstance(rest, Exception):
                interrupts.append(rest)
            elif rest is not None:
                (from_body if error is body else others).append(rest)
        given_up = [] if self._exceeded is None else [self._exceeded]
        cancelled = raised[:1]  # only when there is nothing worse
        return gravest(self.name, (interrupts, from_body, given_up, others)) or next(iter(cancelled), None)

    def _is_own_refusal(self, error: BaseException) -> bool:
        return isinstance(error, SupervisorStopping) and error.supervisor is self

    def _is_no_fault(self, error: BaseException) -> bool:
        return is_cancelled(error) or self._is_own_refusal(error)

    # A child comes in, and goes.

    def _admit(self, child: Child) -> Slot:
        if self._stop.stopped:
            raise SupervisorStopping(self)
        if self._nursery is None:
            raise RuntimeError(f"{self.name} is not running yet: start children inside its async with block")
        for slot in self._slots:
            if slot.child.name == child.name:
                if not slot.over:
                    raise ValueError(f"{self.name} has a child named {child.name!r} already")
                self._forget(slot)
                break
        group = Group() if self._strategy == "one_for_one" else self._everyone
        slot = Slot(child, group)
        self._slots.append(slot)
        group.members.append(slot)
        self._mend(group)
        return slot

    def _forget(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.group.members.remove(slot)

    def _forget_temporary(self, slot: Slot) -> None:
        failed = [s for s in self._slots if s.over and s.child.restart == "temporary" and s.state == "failed"]
        if slot.state != "failed":
            self._forget(slot)
        elif len(failed) > FAILED_KEPT:
            self._forget(failed[0])

    async def _withdraw(self, slot: Slot) -> None:
        """The caller of `start` waits no more, and a child that nobody knows of must not run."""
        slot.withdrawn = True
        self._retire(slot)
        slot.refuse(SupervisorStopping(self))
        if (life := slot.life) is None:
            self._forget(slot)
            self._mend(slot.group)
            return
        life.told = True
        self._enter(slot, "stopping", "stopping")
        life.scope.cancel(reason="start() was cancelled")
        with trio.CancelScope(shield=True):
            await life.over.wait()

    # One life of a child.

    def _launch(self, slot: Slot) -> None:
        assert self._nursery is not None
        life = slot.life = Life(lambda value: self._ready(slot, value))
        self._enter(slot, "starting", "starting")
        task = f"{self.name}/{slot.child.name}"
        slot.context.run(partial(self._nursery.start_soon, self._live, slot, life, name=task))
        if not slot.child.takes_task_status:
            life.started()

    async def _live(self, slot: Slot, life: Life) -> None:
        error: BaseException | None = None
        unwinding = False
        try:
            with life.scope:
                await slot.child.run(life.token, life)
        except BaseException as raised:  # looked at and counted here; what is not ours to mend goes on
            error = without(raised, self._is_no_fault)
            interrupted = error is not None and not isinstance(error, Exception)
            cancelled = without(raised, is_cancelled) is not raised
            unwinding = interrupted or cancelled or trio.current_effective_deadline() == -math.inf
            if unwinding:
                raise
        finally:
            life.over.set()
            slot.life = None
            self._account(slot, life, error, unwinding)

    def _ready(self, slot: Slot, value: object) -> None:
        slot.ever_ready = True
        self._enter(slot, "stopping" if slot.state == "stopping" else "running", "started")
        slot.accept(value)
        slot.group.news.unpark_all()

    def _account(self, slot: Slot, life: Life, error: BaseException | None, unwinding: bool) -> None:
        """A life is over. Whether another one follows is decided here, at once, and nowhere else."""
        if error is not None:
            slot.last_error = error
            self._enter(slot, "failed", "failed", error)
        elif life.told or unwinding:
            self._enter(slot, "stopped", "stopped")
        else:
            self._enter(slot, "ended", "ended")

        if unwinding:
            slot.refuse(SupervisorStopping(self))
        elif self._stop.stopped or slot.withdrawn:
            heard = slot.refuse(error or SupervisorStopping(self))
            if isinstance(error, Exception) and not heard and slot.child.restart != "temporary":
                self._late.append(error)
            if slot.withdrawn:
                self._forget(slot)
        elif not slot.ever_ready and (error is not None or not life.told):
            slot.refuse(error or RuntimeError(f"child {slot.child.name!r} returned before it was ready"))
            self._forget(slot)
        elif self._is_restarted(slot, life, error):
            self._restart(slot, life, error)
        elif slot.child.restart == "temporary":
            self._forget_temporary(slot)
        if not unwinding:
            self._mend(slot.group)

    def _is_restarted(self, slot: Slot, life: Life, error: BaseException | None) -> bool:
        if not slot.ever_ready:  # stopped for a sibling's sake, while `start` waits for it
            return True
        if slot.child.restart == "transient":
            return error is not None or life.told
        return slot.child.restart == "permanent"

    def _restart(self, slot: Slot, life: Life, error: BaseException | None) -> None:
        now = trio.current_time()
        if life.told and error is None:  # it did nothing wrong: neither counted nor delayed
            slot.restarts += 1
            slot.state, slot.due = "restarting", now
            return
        delay = slot.log.next_delay(now, life.healthy(now), self._random)
        if delay is None:
            self._give_up(slot, error)
            return
        slot.restarts += 1
        slot.due = now + delay
        self._enter(slot, "restarting", "restarting", delay=delay)
        if not life.told:
            slot.group.faulty.append(slot)

    def _give_up(self, slot: Slot, error: BaseException | None) -> None:
        intensity = slot.child.intensity
        self._exceeded = RestartsExceeded(slot.child.name, intensity.restarts, intensity.within)
        self._exceeded.__cause__ = error
        self._enter(slot, "failed", "escalated", self._exceeded)
        self._body.cancel(reason=str(self._exceeded))
        self._stop.stop()

    # A group is brought back: those that depend on what failed are stopped, then all start in order.

    def _mend(self, group: Group) -> None:
        group.news.unpark_all()
        if not group.mending and not self._stop.stopped and any(slot.waits for slot in group.members):
            assert self._nursery is not None
            group.mending = True
            self._nursery.start_soon(self._repair, group, name=f"{self.name}: restarts")

    async def _repair(self, group: Group) -> None:
        with self._stop.intake():
            while not self._stop.stopped:
                waiting = [slot for slot in group.members if slot.waits]
                if group.faulty:
                    await self._take_down(group)
                elif any(slot.life and slot.state == "starting" for slot in group.members):
                    await group.news.park()
                elif not waiting:
                    break
                elif (due := max(slot.due for slot in waiting)) > trio.current_time():
                    with trio.move_on_at(due):
                        await group.news.park()
                else:
                    self._launch(waiting[0])
        group.mending = False

    async def _take_down(self, group: Group) -> None:
        first = min(group.members.index(slot) for slot in group.faulty)
        if self._strategy == "one_for_all":
            first = 0
        group.faulty.clear()
        for slot in reversed(group.members[first:]):
            await self._halt(slot)

    # Stopping.

    async def _stop_in_order(self) -> None:
        await self._stop.wait()
        for slot in reversed(list(self._slots)):
            await self._halt(slot)
            self._retire(slot)

    async def _halt(self, slot: Slot) -> None:
        """Tell a child to end, wait for it up to its stop_timeout, then cancel it and wait for its clean-up.

        May be cancelled and called again: the child was told once, and its time runs from then.
        """
        if (life := slot.life) is None:
            return
        child = slot.child
        if not life.told:
            life.told = True
            if child.stop_timeout is not None:
                life.end_by = trio.current_time() + child.stop_timeout
            self._enter(slot, "stopping", "stopping")
        if child.takes_stop:
            life.token.stop()
            with trio.move_on_at(life.end_by):
                await life.over.wait()
            if not life.over.is_set() and not life.scope.cancel_called:
                self._enter(slot, "stopping", "cancelled")
        life.scope.cancel(reason=f"{self.name} stops {child.name!r}")
        await life.over.wait()

    def _retire(self, slot: Slot) -> None:
        """A child that waits for its next life, or its first, will not have it."""
        if slot.waits:
            self._enter(slot, "stopped", "stopped")
            slot.refuse(SupervisorStopping(self))

    def _enter(
        self,
        slot: Slot,
        state: ChildState,
        kind: EventKind,
        error: BaseException | None = None,
        delay: float | None = None,
    ) -> None:
        slot.state = state
        event = ChildEvent(
            kind, self.name, slot.child.name, trio.current_time(), slot.restarts, error=error, delay=delay
        )
        self._events.publish(event)
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001  a broken listener must not decide who is restarted
            try:
                logger.exception("%s: on_event failed at %s of child %r", self.name, kind, slot.child.name)
            except Exception as broken:  # noqa: BLE001  its traceback cannot be written
                logger.error(
                    "%s: on_event failed at %s of child %r, and its traceback cannot be written: %s",
                    self.name,
                    kind,
                    slot.child.name,
                    shown(broken),
                )
