"""What every handle of one store shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import trio
from attrs import define, field

from actors.events import Broadcast
from actors.stop import StopToken
from actors.unwinding import leaves, may_repeat, shown
from alkstore.engines.engine import Engine
from alkstore.errors import OutcomeUnknown, StoreBusy, StoreUnavailable
from alkstore.values import Event, at

__all__ = [
    "SHIELDED_S",
    "Context",
    "Hands",
    "Running",
    "checked_stop",
    "insist",
    "open_helpers",
    "while_busy",
    "write_on_leaving",
]

SHIELDED_S = 15.0
"""What must be written on the way out (a release, a job given back) is shielded from cancellation for this long."""

REPEATED_FOR_S = 10.0
"""A write on the way out is repeated for this long: then StoreBusy can still be told before the shield has gone.

And so long is repeated what may be repeated, whatever else is at stake: a connection that was lost is soon replaced.
"""

BUSY_PAUSE_S = 0.02
"""Between two tries at a busy store. Each of them has waited for `busy_timeout` already, which may be 0."""

T = TypeVar("T")


class Running(Protocol):
    """A job in the hands of a worker of this process."""

    def cancel_handler(self, reason: str) -> None:
        """Cancel its handler at once, in the trio thread; nothing happens if it has ended."""


@define(eq=False)
class Hands:
    """What the workers of all stores of this trio run have in hand of one database."""

    jobs: WeakValueDictionary[int, Running] = field(factory=WeakValueDictionary)
    """By id."""


_hands: trio.lowlevel.RunVar[WeakValueDictionary[Hashable, Hands]] = trio.lowlevel.RunVar("hands on each database")


@define(eq=False)
class Context:
    """The engine, the stream of events, and what runs in this process."""

    engine: Engine
    leadership_ttl: int
    """In ms."""
    transaction_timeout: float
    """In seconds."""
    events: Broadcast[Event]
    hands: Hands = field(init=False)
    handlers: Counter[str] = field(factory=Counter)
    """How many runners of cron runs of this store have each handler; the empty text is for commands."""

    @hands.default
    def _hands_on_the_same_database(self) -> Hands:
        try:
            hands = _hands.get()
        except LookupError:
            hands = WeakValueDictionary()
            _hands.set(hands)
        return hands.setdefault(self.engine.database, Hands())

    def publish(self, kind: str, subject: str, **details: object) -> None:
        """Publish an event that no transaction has reported."""
        self.events.publish(Event(kind, at(self.engine.clock.now_ms()), subject, details))


def checked_stop(stop: object) -> StopToken:
    """Return `stop`, or raise TypeError: the mistake would else show only when somebody wants to stop."""
    if not isinstance(stop, StopToken):
        raise TypeError(f"stop must be a StopToken, not {stop!r:.80}")
    return stop


async def while_busy(call: Callable[[], Awaitable[T]], worth_it: Callable[[], bool], *, repeatable: bool = False) -> T:
    """Return what `call` returns; made again while the store is busy, for as long as that is worth it.

    StoreBusy means that nothing has happened, so what a living lease protects need not die of it. `repeatable`: done
    twice it is as done once, so it is made again too while the store is away, and when the answer to its commit was
    lost. A checkpoint. Cancelled: as `call`.
    """
    passing = (StoreBusy, StoreUnavailable, OutcomeUnknown) if repeatable else StoreBusy
    while True:
        try:
            return await call()
        except passing:
            if not (worth_it() and may_repeat()):
                raise
        await trio.sleep(BUSY_PAUSE_S)


async def insist(call: Callable[[], Awaitable[T]], worth_it: Callable[[], bool]) -> T:
    """Return what a repeatable `call` returns, tried for REPEATED_FOR_S seconds, and on while that is worth it."""
    give_up_at = trio.current_time() + REPEATED_FOR_S
    return await while_busy(call, lambda: trio.current_time() < give_up_at or worth_it(), repeatable=True)


async def write_on_leaving(
    call: Callable[[], Awaitable[object]], leaving: BaseException | None, worth_it: Callable[[], bool]
) -> None:
    """Write under a shield of SHIELDED_S seconds, and again while the store is busy and that is worth it.

    What fails does not hide what is leaving (None: nothing is): it becomes a note on it.
    """
    give_up_at = trio.current_time() + REPEATED_FOR_S
    try:
        with trio.move_on_after(SHIELDED_S, shield=True):
            await while_busy(call, lambda: trio.current_time() < give_up_at and worth_it())
    except Exception as error:
        if leaving is None:
            raise
        leaving.add_note(f"besides, on the way out: {shown(error)}")


@asynccontextmanager
async def open_helpers() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for the helpers of a context manager, whose body's exception leaves as itself.

    A helper's failure cancels the body and leaves alone. If both fail, the body's error leaves, with a note. A
    cancellation from outside leaves as one Cancelled.
    """
    raised: BaseException | None = None
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            try:
                yield nursery
            except BaseException as error:
                raised = error
                raise
    except BaseExceptionGroup as group:
        of_body, others = _parted(group, raised)
        if of_body is None and not others:  # a cancellation from outside: one Cancelled tells it as well as several
            leaving = raised if isinstance(raised, trio.Cancelled) else next(leaves(group))
        elif of_body is None:
            if len(others) != 1:
                raise
            leaving = others[0]
            while isinstance(leaving, BaseExceptionGroup) and len(leaving.exceptions) == 1:
                leaving = leaving.exceptions[0]  # what a nursery of the helper's own has put around it
        else:
            leaving = of_body
            for other in others:
                leaving.add_note(f"meanwhile: {shown(other)}")
    else:
        return
    context, cause = leaving.__context__, leaving.__suppress_context__
    try:
        raise leaving
    finally:
        leaving.__context__, leaving.__suppress_context__ = context, cause
        del leaving, raised, of_body, others


def _parted(
    group: BaseExceptionGroup[BaseException], raised: BaseException | None
) -> tuple[BaseException | None, list[BaseException]]:
    """Return the body's own part of what has left its nursery, None if that is at most Cancelled, and the others.

    It is `raised` itself, or what is left of it without the Cancelled that the nursery has caught, which must not go
    any further.
    """
    own = set() if raised is None else {id(leaf) for leaf in leaves(raised)}
    of_body = None
    others = []
    for error in group.exceptions:
        parts = list(leaves(error))
        if all(isinstance(leaf, trio.Cancelled) for leaf in parts):
            continue
        if all(id(leaf) in own for leaf in parts):
            of_body = raised if len(parts) == len(own) else error
        else:
            others.append(error)
    return of_body, others
