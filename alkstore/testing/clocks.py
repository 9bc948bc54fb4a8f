"""A machine's clock for tests: it goes with trio's virtual time, and can be stepped, as real ones are."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from alkstore.clock import LONGEST_LOOK_AWAY_S, TrioClock
from alkstore.values import Seconds, milliseconds

__all__ = ["SteppedClock"]


@define(eq=False)
class SteppedClock(TrioClock):
    """Follows trio's clock, but for the steps that a test gives it. Nobody is told of a step, as in real life.

    So everything that waits looks at it at least every five seconds. `start` is the moment at which trio's clock
    reads zero: 2026-01-01 00:00 UTC unless given.
    """

    stepped_s: float = field(default=0.0, init=False)
    """The sum of all steps, in seconds."""

    def step(self, seconds: Seconds) -> None:
        """Step by `seconds`, forward or (negative) back, up to a hundred years at a time."""
        self.stepped_s += milliseconds(seconds, "seconds", -100 * 365 * 86_400, 100 * 365 * 86_400) / 1000

    def now_ms(self) -> int:
        return TrioClock.now_ms(self) + round(self.stepped_s * 1000)

    def wait_s(self, until_ms: int) -> float:
        return min(TrioClock.wait_s(self, until_ms - round(self.stepped_s * 1000)), LONGEST_LOOK_AWAY_S)

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Nobody hears of a step; the engine finds out at the next transaction."""
        return _nothing


def _nothing() -> None:
    pass
