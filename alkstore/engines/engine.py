"""What the handles need of an engine: guarded transactions, snapshots, and to be woken by what others commit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from alkstore.clock import Clock
from alkstore.engines.feed import Feed
from alkstore.sql.tx import Params, Row, Tx
from alkstore.values import Event

__all__ = ["Engine", "EngineTx"]

T = TypeVar("T")


class EngineTx(Tx, Protocol):
    """A `Tx` of an engine's own, which holds user's statements too."""

    @property
    def topics(self) -> set[str]: ...

    @property
    def events(self) -> list[Event]: ...

    @property
    def is_open(self) -> bool:
        """Whether the database still has the transaction open; False: it was undone, as a full disk does."""

    def user(self, sql: str, params: Params) -> list[Row]:
        """Run one statement that is not the store's, as the driver takes it, and return all its rows."""


class Turn(Protocol):
    """An interactive transaction: who got it from `begin` must give it to `end`."""

    @property
    def tx(self) -> EngineTx: ...


class Engine(Protocol):
    """Runs transactions on one database. If Cancelled leaves a call, nothing has happened; else its result is told."""

    @property
    def clock(self) -> Clock: ...

    @property
    def feed(self) -> Feed: ...

    @property
    def database(self) -> Hashable:
        """What a transaction is on."""

    @property
    def feed_state(self) -> str: ...

    @property
    def clock_steps(self) -> int: ...

    @property
    def checkpoint_blocked(self) -> bool: ...

    @property
    def pending_writes(self) -> int: ...

    def wal_bytes(self) -> int: ...

    def refuse_inside(self, instead: str | None) -> None:
        """Raise if the caller stands in a transaction on this database, which its call would wait for."""

    async def run(self, work: Callable[[Tx], T], *, urgent: bool = False, in_tx: str | None = None) -> T:
        """Run one guarded state change. `urgent`: it has a deadline of its own, so it goes first."""

    async def run_each(self, works: list[Callable[[Tx], T]], *, urgent: bool = False) -> list[T]:
        """Run each as a unit of its own. All run, whatever becomes of others; the first error is raised."""

    async def run_alone(self, work: Callable[[Any], T]) -> T:
        """Run a user's function of an `EngineTx`: it shares its transaction with nobody, and never runs twice."""

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run `work` on one consistent snapshot, without waiting behind writes."""

    async def begin(self) -> Any:
        """Open a `Turn`."""

    async def in_turn(self, turn: Any, work: Callable[[], T]) -> T:
        """Run `work` on the connection of an open turn."""

    async def end(self, turn: Any, *, commit: bool) -> None:
        """Commit or roll back a turn. Not cancelled half-way."""

    def interrupt(self, tx: Any) -> None:
        """Stop the statement that runs in an open transaction, if one does."""

    async def serve(self) -> None:
        """Do what has to be done all the time, until cancelled."""

    async def drain(self) -> None:
        """Take no more work, and wait a bounded time until what waits is answered."""

    async def close(self) -> None:
        """Close every connection. Idempotent; not cancelled half-way."""
