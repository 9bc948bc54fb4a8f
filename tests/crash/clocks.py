"""A clock that a test sets for several processes at once, also while they are stopped or dead."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from attrs import define, field

from alkstore.clock import WallClock

__all__ = ["SharedClock"]

_OFFSET = struct.Struct("<q")


@define(eq=False)
class SharedClock(WallClock):
    """The machine's clock, ahead of it by as much as stands in the file `path`, which is made if it is not there."""

    path: str
    _offset: mmap.mmap = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        file = Path(self.path)
        if not file.exists():
            file.write_bytes(_OFFSET.pack(0))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), _OFFSET.size)

    def now_ms(self) -> int:
        (ahead,) = _OFFSET.unpack(self._offset)
        return WallClock.now_ms(self) + int(ahead)

    def advance(self, seconds: float) -> None:
        """Set the clock of all who have it forward."""
        (ahead,) = _OFFSET.unpack(self._offset)
        self._offset[:] = _OFFSET.pack(ahead + round(seconds * 1000))
