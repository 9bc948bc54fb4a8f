"""Units of work on their way to the writer: two lanes, handed over between the trio thread and the writer's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import outcome
import trio
from attrs import define, field

from alkstore.engines.driver import Connection
from alkstore.sql.tx import Params, Row, Tx
from alkstore.values import Event, at

__all__ = ["Lanes", "SQLiteTx", "Unit", "Work"]

Work: TypeAlias = Callable[[Tx], Any]


@define(eq=False)
class Unit:
    """One guarded state change, and the task that waits for its answer."""

    work: Work
    urgent: bool
    since: float
    """When it began to wait, on the bridge's clock."""
    task: trio.lowlevel.Task | None = None
    alone: bool = False
    """Runs with nobody beside it: a user's function, or a unit whose group another unit's failure has rolled back."""
    turn: bool = False
    """It wants the connection for itself: an interactive transaction, which lives across many calls."""
    answer: outcome.Outcome[Any] | None = None

    def answered(self, answer: outcome.Outcome[Any]) -> None:
        """Give the answer to the waiting task. In the trio thread only."""
        self.answer = answer
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None


@define(eq=False)
class Lanes:
    """Units that wait. What has a deadline of its own goes in front, so that bulk writes cannot starve a lease."""

    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _front: deque[Unit] = field(factory=deque, init=False)
    _urgent: deque[Unit] = field(factory=deque, init=False)
    _bulk: deque[Unit] = field(factory=deque, init=False)
    _begun: list[Unit] = field(factory=list, init=False)
    """Units taken and not answered: if their group is never finished, somebody still has to answer them."""

    def put(self, unit: Unit) -> None:
        with self._lock:
            (self._urgent if unit.urgent else self._bulk).append(unit)

    def put_back(self, units: list[Unit]) -> None:
        """Put units that had their turn without effect before all others, in their order."""
        with self._lock:
            self._front.extendleft(reversed(units))
            self._begun = [unit for unit in self._begun if unit not in units]

    def settled(self) -> None:
        """All units that were taken have been answered."""
        with self._lock:
            self._begun.clear()

    def take_turn(self, unit: Unit) -> bool:
        """Take the interactive transaction that `next_turn` gave; False: it was withdrawn meanwhile."""
        with self._lock:
            if unit not in self._bulk:
                return False
            self._bulk.remove(unit)
            self._begun.append(unit)
            return True

    def take(self, *, first: bool) -> Unit | None:
        """Take the next unit for a group, of which it is the `first` or a further one. In any thread."""
        with self._lock:
            lane = self._front or self._urgent or self._bulk
            if not lane or lane[0].turn or (lane[0].alone and not first):
                return None
            unit = lane.popleft()
            self._begun.append(unit)
            return unit

    @property
    def has_units(self) -> bool:
        """Whether `take` would give a first unit."""
        with self._lock:
            lane = self._front or self._urgent or self._bulk
            return bool(lane) and not lane[0].turn

    @property
    def next_turn(self) -> Unit | None:
        """The interactive transaction that is the next in the bulk lane, if one is; it stays there."""
        with self._lock:
            return self._bulk[0] if self._bulk and self._bulk[0].turn else None

    def discard(self, unit: Unit) -> bool:
        """Withdraw a unit; False: it has begun."""
        with self._lock:
            for lane in (self._front, self._urgent, self._bulk):
                if unit in lane:
                    lane.remove(unit)
                    return True
        return False

    def take_all(self, *, begun: bool) -> list[Unit]:
        """Take every unit that waits, to refuse them; with `begun` those too that a group has taken."""
        with self._lock:
            units = [*(self._begun if begun else ()), *self._front, *self._urgent, *self._bulk]
            for lane in (self._front, self._urgent, self._bulk):
                lane.clear()
            if begun:
                self._begun.clear()
            return units

    def take_waiting_since(self, moment: float) -> list[Unit]:
        """Take the units that have waited since this moment or longer."""
        with self._lock:
            found = [u for lane in (self._front, self._urgent, self._bulk) for u in lane if u.since <= moment]
            for lane in (self._front, self._urgent, self._bulk) if found else ():
                kept = [u for u in lane if u.since > moment]
                lane.clear()
                lane.extend(kept)
            return found

    def __len__(self) -> int:
        return len(self._front) + len(self._urgent) + len(self._bulk)


@define(eq=False)
class SQLiteTx:
    """The `Tx` of SQLite: a connection inside a transaction, one reading of the clock, and what to tell afterwards."""

    connection: Connection
    moment: int
    topics: set[str] = field(factory=set)
    events: list[Event] = field(factory=list)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        return self.connection.all(sql, params)

    def one(self, sql: str, params: Params = {}) -> Row | None:  # noqa: B006 - never changed
        rows = self.connection.all(sql, params)
        return rows[0] if rows else None

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        return [self.all(sql, one) for one in params]

    def user(self, sql: str, params: Params) -> list[Row]:
        """Run a statement that is not the store's."""
        return self.connection.all(sql, params)

    @property
    def is_open(self) -> bool:
        """Whether SQLite still has the transaction open; FULL and IOERR undo all of it."""
        return self.connection.in_transaction

    def lock(self, sql: str, params: Params = {}) -> None:  # noqa: B006 - never changed
        """The write lock is held."""

    def now(self) -> int:
        return self.moment

    def touch(self, topic: str) -> None:
        self.topics.add(topic)

    def report(self, kind: str, subject: str, **details: object) -> None:
        self.events.append(Event(kind, at(self.moment), subject, details))
