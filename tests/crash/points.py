"""Where a process may be made to kill itself: the classic places between two steps that must not be torn apart.

The environment names one, and at which pass it strikes: ``ALKSTORE_KILL_POINT="before COMMIT#3"``.
"""

from __future__ import annotations

import os

from attrs import define, field

from alkstore.engines.driver import Connection
from tests.crash.ledger import Ledger
from tests.crash.watching import Watcher, die

__all__ = ["KILL_POINT", "POINTS", "KillPoint"]

KILL_POINT = "ALKSTORE_KILL_POINT"

POINTS: dict[str, tuple[str, ...]] = {
    "client": ("after job insert", "before COMMIT", "after COMMIT before answer", "inside transaction"),
    "runner": ("after job insert", "after advance", "before COMMIT", "after COMMIT before answer", "after leading"),
    "worker": (
        "after claim before handler",
        "after handler before ack",
        "before COMMIT",
        "after COMMIT before answer",
        "after ack before log",
        "after heartbeat",
    ),
    "deliverer": (
        "after claim before handler",
        "after handler before ack",
        "before COMMIT",
        "after COMMIT before answer",
        "after ack before log",
    ),
}
"""For each program the points that it passes."""


@define(eq=False)
class KillPoint(Watcher):
    """Kills the process at the `nth` pass of the point `name`. Those in SQL it finds by watching the connections."""

    ledger: Ledger
    name: str = ""
    nth: int = 0
    _writing: set[int] = field(factory=set, init=False)

    @classmethod
    def from_environment(cls, ledger: Ledger) -> KillPoint:
        """Return the point that the environment names; without one, one that is never passed."""
        name, _, nth = os.environ.get(KILL_POINT, "").partition("#")
        if name and not any(name in points for points in POINTS.values()):
            raise ValueError(f"there is no kill point {name!r}")
        return cls(ledger, name, int(nth or 1))

    def passed(self, name: str) -> None:
        """This process is at the point `name`."""
        if name != self.name:
            return
        self.nth -= 1
        if self.nth == 0:
            self.ledger.write("died", point=name)
            die()

    def before(self, connection: Connection, sql: str) -> None:
        if sql == "COMMIT" and id(connection) in self._writing:
            self.passed("before COMMIT")

    def after(self, connection: Connection, sql: str) -> None:
        if sql == "BEGIN IMMEDIATE":
            self._writing.add(id(connection))
        elif sql in ("COMMIT", "ROLLBACK") and id(connection) in self._writing:
            self._writing.discard(id(connection))
            if sql == "COMMIT":
                self.passed("after COMMIT before answer")
        elif sql.lstrip().startswith("INSERT INTO __alkstore_jobs"):
            self.passed("after job insert")
        elif sql.lstrip().startswith("UPDATE __alkstore_scheduler_tasks SET next_fire_at"):
            self.passed("after advance")
