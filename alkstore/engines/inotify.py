"""Linux tells when a file is written; the standard library does not pass it on, so this asks libc."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys

import trio

__all__ = ["Inotify"]

_IN_MODIFY, _IN_MOVE_SELF, _IN_DELETE_SELF = 0x002, 0x800, 0x400


class Inotify:
    """Watches one path. It never opens the file: a descriptor of ours on it would drop SQLite's POSIX locks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> Inotify | None:
        """Return a watch on `path`, or None where there is no inotify or no watch to be had."""
        if not sys.platform.startswith("linux"):
            return None
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY | _IN_MOVE_SELF | _IN_DELETE_SELF) < 0:
            os.close(fd)
            return None
        return cls(fd)

    async def wait(self) -> None:
        """Return when something happened to the file since the last call; a checkpoint; cancelled: nothing is lost."""
        await trio.lowlevel.wait_readable(self._fd)
        self.drain()

    def drain(self) -> None:
        try:
            while os.read(self._fd, 65_536):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self._fd >= 0:
            trio.lowlevel.notify_closing(self._fd)
            os.close(self._fd)
            self._fd = -1
