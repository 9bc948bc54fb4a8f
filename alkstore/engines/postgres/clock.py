"""The server's clock, as far as it is known here between two transactions."""

from __future__ import annotations

from attrs import define, field

from alkstore.clock import WallClock

__all__ = ["ServerClock"]


@define(eq=False)
class ServerClock(WallClock):
    """This machine's clock, put right by every reading of the server's.

    Good for knowing how long to wait and how much of a lease is left; what is decided is decided by the server's.
    """

    _ahead: int = field(default=0, init=False)
    """Milliseconds that the server's clock is ahead of this machine's."""

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead

    def learn(self, server_ms: int) -> None:
        """Take note of a reading of the server's clock, made just now. In any thread."""
        self._ahead = server_ms - super().now_ms()
