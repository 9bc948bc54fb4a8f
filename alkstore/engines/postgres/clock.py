"""The server's clock, as far as it is known here between two transactions."""

from __future__ import annotations

import time
from functools import partial

from attrs import define, field

from alkstore.clock import WallClock

__all__ = ["ServerClock"]

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)
_steady_ns = time.monotonic_ns if _BOOT is None else partial(time.clock_gettime_ns, _BOOT)
"""Nobody can set it, and where the machine has such a clock it does not stand still while the machine sleeps."""


@define(eq=False)
class ServerClock(WallClock):
    """What the server's clock read last, and the time since then on a clock of this machine that nobody can set.

    Good for knowing how long to wait and how much of a lease is left; what is decided is decided by the server's.
    Before the first reading it is this machine's clock.
    """

    is_known: bool = field(default=False, init=False)
    """There was a reading."""
    _ahead: int = field(init=False)
    """Milliseconds that the server's clock is ahead of the steady one."""

    def now_ms(self) -> int:
        return _steady_ns() // 1_000_000 + self._ahead

    def learn(self, server_ms: int) -> None:
        """Take note of a reading of the server's clock, made just now. In any thread."""
        self._ahead = server_ms - _steady_ns() // 1_000_000
        self.is_known = True

    @_ahead.default
    def _by_this_machine(self) -> int:
        return super().now_ms() - _steady_ns() // 1_000_000
