"""How long to wait, by a clock that may be set back."""

from __future__ import annotations

import trio
from attrs import define, field

from alkstore.clock import Clock, TrioClock, WallClock

__all__ = ["Countdown"]


@define(eq=False)
class Countdown:
    """A wait of so many milliseconds from now on: a clock that is set back meanwhile does not make it longer.

    Where the clock goes by itself, the wait is measured by trio's, which is never set. One that goes as its owner
    likes is asked itself.
    """

    _clock: Clock
    _left: int
    _trio_deadline: float | None = field(init=False)
    _seen: int = field(init=False)
    """What the clock read when this was last asked; how far it had gone before it was set back is not known."""

    def end(self) -> int:
        """Return the moment of the clock at which it will be over, as far as is known now."""
        now = self._clock.now_ms()
        if self._trio_deadline is None:
            self._left -= max(now - self._seen, 0)
        else:
            self._left = max(round((self._trio_deadline - trio.current_time()) * 1000), 1)
        self._seen = now
        return now + self._left

    def is_over(self) -> bool:
        if self._trio_deadline is None:
            return self.end() <= self._seen
        return trio.current_time() >= self._trio_deadline

    @_trio_deadline.default
    def _by_trio(self) -> float | None:
        goes_by_itself = isinstance(self._clock, WallClock | TrioClock)
        return trio.current_time() + self._left / 1000 if goes_by_itself else None

    @_seen.default
    def _began(self) -> int:
        return self._clock.now_ms()
