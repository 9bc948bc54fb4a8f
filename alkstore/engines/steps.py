"""Notices that the wall clock was stepped: its advance is compared with that of a clock that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio
from attrs import define, field

from alkstore.clock import Clock, ManualClock, TrioClock, WallClock

__all__ = ["ClockSteps"]

TOLERANCE_MS = 1_000
"""A drift up to this is what time synchronisation does all day."""


@define(eq=False)
class ClockSteps:
    """Knows how far the clock should have come.

    `monotonic` counts seconds; None: the clock may run as it likes, but not back.
    """

    monotonic: Callable[[], float] | None
    count: int = field(default=0, init=False)
    """Steps seen so far."""
    _wall: int | None = field(default=None, init=False)
    _steady: float = field(default=0.0, init=False)
    _asked: float = field(default=0.0, init=False)

    @classmethod
    def of(cls, clock: Clock) -> ClockSteps:
        """Measure `clock` by what goes beside it, if that is known. In the trio thread."""
        match clock:
            case ManualClock():
                return cls(lambda: 0.0)  # it has not been set back by standing still
            case TrioClock():
                return cls(trio.lowlevel.current_clock().current_time)
            case WallClock():
                return cls(time.monotonic)
        return cls(None)

    def step(self, now: int) -> int:
        """Return by how many ms the wall clock, reading `now`, was stepped since `accept`; 0 within the tolerance."""
        self._asked = 0.0 if self.monotonic is None else self.monotonic()
        if self._wall is None or (self.monotonic is None and now > self._wall):
            return 0
        step = now - self._wall - round((self._asked - self._steady) * 1000)
        return step if abs(step) > TOLERANCE_MS else 0

    @property
    def accepted(self) -> int:
        """What the clock read when it was last taken as right."""
        return self._wall or 0

    def accept(self, now: int, *, stepped: bool) -> None:
        """Take `now`, for which `step` was asked last, as right; `stepped`: it was not what it should have been."""
        self.count += stepped
        self._wall, self._steady = now, self._asked
