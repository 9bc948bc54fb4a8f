"""The one open transaction that every function of this package works in.

Every function that decides has three steps: lock the rows it decides about, then ask what time it is, then decide and
write. On SQLite the transaction holds the only write lock already. Rows are locked in the order definitions (one row
for all of them), lease, task, trigger, schedule, run, job, so that no two transactions wait for each other.

The statements are written once, for both engines, in SQLite's dialect; `alkstore.engines.postgres.statements` says
what is changed for PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["CRON", "SCHEDULES", "Params", "Row", "Tx", "lock_topic", "queue_topic"]

Row: TypeAlias = tuple[Any, ...]
Params: TypeAlias = Mapping[str, object] | Sequence[object]

CRON = "cron"
"""The topic of the schedules of cron triggers."""

SCHEDULES = "schedules"
"""The topic of everything about schedules."""


def queue_topic(queue: str) -> str:
    """What a change moves that can make a job of `queue` claimable sooner."""
    return f"queue:{queue}"


def lock_topic(name: str) -> str:
    """What a change moves that can make the lock `name` free sooner."""
    return f"lock:{name}"


class Tx(Protocol):
    """An open transaction. Statements take ``:name`` parameters; all rows are always fetched."""

    def all(self, sql: str, params: Params = ...) -> list[Row]:
        """Run one statement and return all its rows."""

    def one(self, sql: str, params: Params = ...) -> Row | None:
        """Run one statement and return its first row, or None."""

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        """Run one statement with each of `params`, in order, and return the rows of each: fewer round trips."""

    def lock(self, sql: str, params: Params = ...) -> None:
        """Lock the rows that `sql` (with its ``/*for … */``) finds, and read the clock anew afterwards.

        Where one transaction at a time writes, that has happened when it began: nothing is done.
        """

    def now(self) -> int:
        """Milliseconds since the epoch: one reading, taken after the locks are held."""

    def touch(self, topic: str) -> None:
        """Once this is committed, wake who waits for `topic`."""

    def report(self, kind: str, subject: str, **details: object) -> None:
        """Once this is committed, publish an event."""
