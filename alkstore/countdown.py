"""How long to wait, by a clock that may be set back."""

from __future__ import annotations

from attrs import define, field

from alkstore.clock import Clock

__all__ = ["Countdown"]


@define(eq=False)
class Countdown:
    """A wait of `left` milliseconds from now on: a clock that is set back meanwhile does not make it longer."""

    _clock: Clock
    _left: int
    _seen: int = field(init=False)
    """What the clock read when this was last asked; how far it had gone before it was set back is not known."""

    def end(self) -> int:
        """Return the moment at which it will be over, as far as is known now."""
        now = self._clock.now_ms()
        self._left -= max(now - self._seen, 0)
        self._seen = now
        return now + self._left

    def is_over(self) -> bool:
        return self.end() <= self._seen

    @_seen.default
    def _began(self) -> int:
        return self._clock.now_ms()
