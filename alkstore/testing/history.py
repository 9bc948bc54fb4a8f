"""What happened in a simulation: a line for each event, and a digest in which every statement counts."""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from typing import Any

import trio
from attrs import define, field

__all__ = ["History"]

KEPT_LINES = 10_000
"""The newest lines are kept for a trace; the digest has them all."""


@define(eq=False)
class History:
    """The events of one simulation, oldest first. Two runs of one seed have the same `digest`."""

    seed: int
    lines: deque[str] = field(factory=lambda: deque(maxlen=KEPT_LINES), init=False)
    """The newest 10,000 events: seconds of virtual time, who, what."""
    count: int = field(default=0, init=False)
    """How many events there were."""
    _hash: Any = field(factory=sha256, init=False, repr=False)

    def note(self, who: str, what: str) -> None:
        """Add an event at this moment of virtual time."""
        line = f"{trio.current_time():.3f} {who}: {what}"
        self.count += 1
        self.lines.append(line)
        self._hash.update(line.encode("utf-8", "backslashreplace"))

    def absorb(self, detail: str) -> None:
        """Let the digest depend on something that is no event of its own."""
        self._hash.update(detail.encode("utf-8", "backslashreplace"))

    @property
    def digest(self) -> str:
        """SHA-256 of everything so far, in hexadecimal."""
        return str(self._hash.hexdigest())

    def trace(self, last: int = 30) -> str:
        """Return the `last` lines as one text."""
        return "\n".join(list(self.lines)[-last:])
