"""A lease as this process knows it. What counts is the row; of renewals under way at once the last to be written."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from attrs import define, field, frozen

__all__ = ["Lease", "Renewal"]

_turns = count(1)


@frozen
class Renewal:
    """What a renewal has written. Made in its transaction, while the row is its own: `turn` is the order of writing."""

    written: tuple[int, int] | None
    """The length of the lease and its end, in ms; None: the lease is not ours any more."""
    turn: int = field(factory=lambda: next(_turns), init=False)


@define(eq=False)
class Lease:
    """How long a lease is, and when it ends, in ms."""

    length: int
    end: int
    on_changed: Callable[[], None] | None = field(default=None, init=False, repr=False)
    """Called when there is another end, by whomever it was set."""
    _turn: int = field(default=0, init=False, repr=False)

    def accept(self, renewal: Renewal) -> bool:
        """Take note of a renewal, unless a later one is known already; return whether it has renewed."""
        if renewal.written is None:
            return False
        if renewal.turn > self._turn:
            self._turn = renewal.turn
            self.length, self.end = renewal.written
            self.changed()
        return True

    def doubt(self, length: int | None, now: int) -> None:
        """A renewal to `length` ms, whose answer was lost, may have cut it short: believe no more than that."""
        if length is not None and now + length < self.end:
            self.end = now + length
            self.length = min(self.length, length)
            self.changed()

    def changed(self) -> None:
        """Tell who minds the lease to look at it."""
        if self.on_changed is not None:
            self.on_changed()

    def remaining(self, now: int) -> float:
        """Seconds until the end, negative after it."""
        return (self.end - now) / 1000

    def renew_in(self, now: int) -> float:
        """Seconds until a third of the length has gone; 0 or less: now."""
        wait = self.end - self.length * 2 // 3 - now
        return 0.0 if wait > self.length else wait / 1000  # more than there is: the clock was set back
