"""Where "now" comes from. A store reads one clock, once per transaction, after it has the write lock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

import trio
from attrs import define, field

__all__ = ["Clock", "ManualClock", "TrioClock", "WallClock"]

LONGEST_LOOK_AWAY_S = 5.0
"""A wall clock can be stepped, and a suspended machine's trio clock stands still: no wait is longer than this."""


@runtime_checkable
class Clock(Protocol):
    """What a store asks of a clock. `now_ms` is called from the store's own threads too.

    A step of the clock is told from its own course by what it is: a `TrioClock` goes with trio's clock, a `WallClock`
    with the machine's; any other may go as it likes, and only its going back is a step.
    """

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""

    def wait_s(self, until_ms: int) -> float:
        """Seconds, on trio's clock, until it is worth looking at this clock again when waiting for `until_ms`."""

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever the clock is set by hand; returns what ends that."""


@define(eq=False)
class WallClock:
    """The machine's clock, which may be stepped at any time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wait_s(self, until_ms: int) -> float:
        return min(max(until_ms - self.now_ms(), 0) / 1000, LONGEST_LOOK_AWAY_S)

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """A wall clock does not tell when it is stepped; the engine finds out at the next transaction."""
        return _nothing


@define(eq=False)
class TrioClock:
    """Follows trio's clock, so that under `trio.testing.MockClock` a store lives in virtual time.

    `start` is the moment at which trio's clock reads zero: 2026-01-01 00:00 UTC unless given. The instance belongs
    to the trio run in which it is first read.
    """

    start: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    _start_ms: int = field(init=False)
    _trio_clock: trio.abc.Clock | None = field(default=None, init=False)

    def now_ms(self) -> int:
        # round, not floor: a task that slept until a moment must find that moment reached
        return self._start_ms + round(self._read().current_time() * 1000)

    def wait_s(self, until_ms: int) -> float:
        return max((until_ms - self._start_ms) / 1000 - self._read().current_time(), 0.0)

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Trio's clock only moves forward, and trio's own sleeps follow it; nobody needs to be told."""
        return _nothing

    @_start_ms.default
    def _whole_start(self) -> int:
        return round(self.start.timestamp() * 1000)

    def _read(self) -> trio.abc.Clock:
        if self._trio_clock is None:
            self._trio_clock = trio.lowlevel.current_clock()
        return self._trio_clock


@define(eq=False)
class ManualClock:
    """Stands still until it is set or advanced. `ms` is where it starts, in milliseconds since the epoch.

    Everything in a store that waits for a moment looks again at each change. Set it in the trio thread.
    """

    _ms: int
    _callbacks: list[Callable[[], None]] = field(factory=list, init=False)

    def now_ms(self) -> int:
        return self._ms

    def set(self, ms: int) -> None:
        """Move to `ms` milliseconds since the epoch, forward or back."""
        self._ms = int(ms)
        for callback in list(self._callbacks):
            callback()

    def advance(self, seconds: float) -> None:
        """Move by `seconds`; a negative number moves back."""
        self.set(self._ms + round(seconds * 1000))

    def wait_s(self, until_ms: int) -> float:
        return 0.0 if until_ms <= self._ms else math.inf

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)


def _nothing() -> None:
    pass
