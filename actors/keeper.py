"""Keeper: renews the leases of what a worker has in hand, and cancels the handlers of those that are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic

import attrs
import trio

from actors.ports import Work, WorkSource

# A handler is cancelled this much before its lease ends: time to unwind before somebody else may start the
# work. A second is plenty for that; a tenth leaves short leases (0.1 s is the shortest) most of their time.
LEASE_MARGIN = 1.0
LEASE_MARGIN_SHARE = 0.1

# Work that is over sooner than this never wakes an idle keeper: a short job costs it no task switch. The price is
# that a clock step is noticed this late, well within the 5 s that the stores promise.
LOOK_AFTER = 1.0


@attrs.define(eq=False)
class InHand(Generic[Work]):
    """One work from take to settle, and the scope of its handler. The deadlines are in trio's time."""

    work: Work
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    lease_until: float = math.inf
    """When the handler must have ended because of the lease."""
    timeout_at: float = math.inf
    """When the handler must have ended because of the worker's timeout."""
    cancelled: str | None = None
    """Why the work is not ours any more (lost, or cancelled by a user). None: it is, as far as we know."""
    abandoned: bool = False
    """Whether the handler still runs, in a thread that nobody waits for."""

    def limit_to_lease(self, seconds: float) -> None:
        """Move the handler's deadline, which its lease sets, to so many `seconds` from now; not once it has struck."""
        if not self.scope.cancel_called:
            self.lease_until = trio.current_time() + seconds
            self._set_deadline()

    def limit_to(self, timeout: float) -> None:
        """Give the handler `timeout` seconds from now, and no more than its lease."""
        self.timeout_at = trio.current_time() + timeout
        self._set_deadline()

    def _set_deadline(self) -> None:
        deadline = min(self.lease_until, self.timeout_at)
        if deadline != self.scope.deadline:  # to move it costs a good deal more than to look
            self.scope.deadline = deadline

    def cancel(self, reason: str) -> None:
        """The work is not ours any more: cancel the handler at once. The first reason stays."""
        if self.cancelled is None:
            self.cancelled = reason
            self.scope.cancel(reason)

    @property
    def timed_out(self) -> bool:
        """Whether the timeout, and nothing else, has cancelled the handler."""
        return self.cancelled is None and self.scope.cancel_called and self.timeout_at <= self.lease_until


class Keeper(Generic[Work]):
    """Renews, in one call, all leases that are due, and sleeps until the next one is (none: for ever)."""

    def __init__(self, source: WorkSource[Work]) -> None:
        self._source = source
        self._kept: dict[InHand[Work], None] = {}  # a set that remembers the order
        # Shielded: it must outlive every cancellation, until `stop`, which comes after the last settle.
        self._scope = trio.CancelScope(shield=True)
        self._nap = trio.CancelScope()  # its deadline is when `run` looks again
        self._hears_steps = False

    def __iter__(self) -> Iterator[InHand[Work]]:
        return iter(self._kept)

    def keep(self, hand: InHand[Work]) -> None:
        """From now on renew this work's lease, and hold its handler's deadline to it."""
        self._kept[hand] = None
        self._limit(hand)
        wait = self._source.renew_in(hand.work)
        if not self._hears_steps:
            wait = min(wait, LOOK_AFTER)
        self._nap.deadline = min(self._nap.deadline, trio.current_time() + wait)

    def drop(self, hand: InHand[Work]) -> None:
        """The work is settled, or left to its lease. May be called for what was dropped before."""
        self._kept.pop(hand, None)
        if not self._kept and not self._hears_steps:
            self._nap.deadline = math.inf

    def look(self) -> None:
        """A handler may have moved the end of its lease, or settled its work: look at all of them now."""
        for hand in self._kept:  # now: a renewal that is under way may take its time
            self._limit(hand)
        self._nap.cancel("a lease was changed")

    def stop(self) -> None:
        """End `run`, after the last settle."""
        self._scope.cancel("nothing is left to keep")

    async def run(self) -> None:
        """Keep until `stop`, whatever is cancelled around it. Raises what `renew` raises."""
        with self._scope:
            while True:
                await self._renew()
                await self._sleep()

    async def _renew(self) -> None:
        due = [hand for hand in self._kept if self._source.renew_in(hand.work) <= 0]
        if not due:
            return
        lost = {id(work) for work in await self._source.renew([hand.work for hand in due])}
        for hand in due:
            if id(hand.work) in lost:
                self.drop(hand)
                hand.cancel("the lease was lost")

    def _limit(self, hand: InHand[Work]) -> float:
        """Hold the handler's deadline to its lease, and return how many seconds are left of that."""
        remaining = self._source.remaining(hand.work)
        hand.limit_to_lease(remaining - min(LEASE_MARGIN, LEASE_MARGIN_SHARE * self._source.lease(hand.work)))
        return remaining

    async def _sleep(self) -> None:
        soonest = math.inf
        for hand in self._kept:
            # Each time, not only after a renewal of ours: a handler may have extended its lease itself.
            remaining = self._limit(hand)
            wait = self._source.renew_in(hand.work)
            # A lease that nobody renews needs a look too: its handler may extend it, and the clock may be stepped.
            soonest = min(soonest, remaining if wait == math.inf and remaining > 0 else wait)
        if soonest <= 0:  # it became due while the others were renewed
            return
        with trio.CancelScope(deadline=trio.current_time() + soonest) as self._nap:
            if soonest == math.inf:
                await trio.sleep_forever()
            self._hears_steps = True
            await self._source.pause(soonest)
        self._hears_steps = False
