"""What a child does to itself: hears of every statement that its stores run, and dies where it is told to."""

from __future__ import annotations

import os
import signal
from unittest import mock

from attrs import define, field

from alkstore.engines.driver import Connection, StdlibConnection, StdlibDriver
from alkstore.errors import StoreError
from alkstore.sql.tx import Params, Row
from tests.crash.child import Talk

__all__ = ["Fault", "Refusals", "Watcher", "die", "watch"]

BUSY_SNAPSHOT = 517


def die() -> None:
    """Be killed, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watcher:
    """Hears of each statement of every connection that this process opens. Does nothing unless it is overridden."""

    def before(self, connection: Connection, sql: str) -> None:
        """The statement is about to run."""

    def after(self, connection: Connection, sql: str) -> None:
        """The statement has run."""

    def refused(self, connection: Connection, sql: str, error: StoreError) -> None:
        """The statement has failed."""


def watch(watcher: Watcher) -> None:
    """Let `watcher` hear of every connection that this process opens from now on."""
    mock.patch.object(StdlibDriver, "connect", lambda _, path: _Watched(StdlibConnection(path), watcher)).start()


@define(eq=False)
class _Watched:
    """A connection with a watcher."""

    _raw: Connection
    _watcher: Watcher

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        self._watcher.before(self._raw, sql)
        try:
            rows = self._raw.all(sql, params)
        except StoreError as error:
            self._watcher.refused(self._raw, sql, error)
            raise
        self._watcher.after(self._raw, sql)
        return rows

    def script(self, sql: str) -> None:
        self._raw.script(sql)

    @property
    def in_transaction(self) -> bool:
        return self._raw.in_transaction

    def interrupt(self) -> None:
        self._raw.interrupt()

    def close(self) -> None:
        self._raw.close()


@define(eq=False)
class Fault(Watcher):
    """Kills this process after the `nth` writing statement since it was armed, on whatever connection it runs."""

    talk: Talk
    nth: int
    armed: bool = False
    _committed: str = field(default="", init=False)
    _inside: str = field(default="", init=False)

    def after(self, connection: Connection, sql: str) -> None:
        verb = " ".join(sql.split()[:3])
        if not self.armed or verb.startswith(("SELECT", "PRAGMA", "WITH")):
            return
        self._inside += f"{verb}; "
        if verb == "COMMIT":
            self._committed, self._inside = self._committed + self._inside, ""
        self.nth -= 1
        if self.nth == 0:
            self.talk.say("dying", after=verb, committed=self._committed)
            die()


@define(eq=False)
class Refusals(Watcher):
    """Counts what cannot be waited for: a transaction that has read, and may not write any more."""

    snapshots: int = field(default=0, init=False)
    """SQLITE_BUSY_SNAPSHOT: no busy timeout helps against it."""
    waits: int = field(default=0, init=False)
    """Other refusals, which a later attempt gets over."""

    def refused(self, connection: Connection, sql: str, error: StoreError) -> None:
        if getattr(error.__cause__, "sqlite_errorcode", None) == BUSY_SNAPSHOT:
            self.snapshots += 1
        else:
            self.waits += 1
