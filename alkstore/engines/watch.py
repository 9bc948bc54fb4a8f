"""Sees that another process has committed: by inotify on the -wal where there is one, else by looking often."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio
from attrs import define, field

from alkstore.engines.bridge import Bridge, no_call_in_flight
from alkstore.engines.driver import Connection
from alkstore.engines.inotify import Inotify
from alkstore.errors import MixedSQLite, StoreError

__all__ = ["ForeignWatch"]

LOOKS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.010, 0.020, 0.050, 0.100)
"""An event comes when the log is written, before the commit can be seen, and none follows: so look until it shows."""

FLOOR_S = 1.0
"""Look this often whatever happens: an event may be lost."""

POLL_S = 0.020
"""Look this often where there is no inotify."""

REST_S = 0.002
"""However many events come, at most one look, and so one wake-up of everybody, in this time."""


@define(eq=False)
class ForeignWatch:
    """Reads ``data_version`` on a connection of its own, which changes when any other connection commits.

    `own_commits` counts beginnings and ends of this store's commits: if it has moved too, or is odd, whose commit
    it was is not known, and `ask` lets the writer's connection tell (its ``data_version`` ignores its own commits).
    """

    connection: Connection
    version: int
    """What the connection's ``data_version`` was before anybody could look at the store."""
    bridge: Bridge
    inotify: Inotify | None
    intact: Callable[[], None]
    """Raises if a file was taken away or replaced: then who sleeps is woken, to find that out."""
    own_commits: Callable[[], int]
    ask: Callable[[], None]
    wake_all: Callable[[], None]
    virtual: bool
    _own: int = field(default=0, init=False)
    """What `own_commits` was before the last look."""

    async def serve(self) -> None:
        """Watch until cancelled."""
        await self._look()
        if self.inotify is None:
            while True:
                await trio.sleep(POLL_S)
                await self._look()
        # in virtual time every writer is in this trio run, and keeps the clock still until its commit is whole
        pauses = (math.inf,) if self.virtual else (*LOOKS_S, FLOOR_S)
        quiet = step = len(pauses) - 1
        while True:
            with trio.move_on_after(pauses[step]) as pause:
                await self.inotify.wait()
            step = min(step + 1, quiet) if pause.cancelled_caught else 0
            if await self._look():
                step = quiet
            elif self.virtual:
                await no_call_in_flight()
                await self._look()
            if not self.virtual:
                await trio.sleep(REST_S if step in (0, quiet) else 0)

    async def _look(self) -> bool:
        """Return whether another process has certainly committed since the last look."""
        own_before = self.own_commits()
        try:
            version = await self.bridge.call(self._read_version)
        except MixedSQLite:
            self.wake_all()
            return False
        except StoreError:
            return False  # the writer meets the same trouble, and has callers to tell
        own = self.own_commits()
        moved, was_own = version != self.version, own != self._own or own % 2 == 1
        self.version, self._own = version, own_before  # those that this look may not have seen are for the next one
        if not moved:
            return False
        if was_own:
            self.ask()
            return False
        self.wake_all()
        return True

    def _read_version(self) -> int:
        self.intact()
        return int(self.connection.all("PRAGMA data_version")[0][0])
