"""Between a store and its SQLite file in a simulation: connections and calls that fail as the plan says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio
from attrs import define, field

from alkstore.engines.driver import Connection, DiskError, Driver
from alkstore.errors import StoreBusy, StoreClosed, StoreError, StoreFull, StoreUnavailable
from alkstore.sql import locks
from alkstore.sql.jobs import settling
from alkstore.sql.tx import Params, Row
from alkstore.testing.faults import FaultPlan
from alkstore.testing.processes import Life, present_life

__all__ = ["InlineCalls", "QueuedCalls", "Wires"]

T = TypeVar("T")

_RENEWALS = frozenset({locks.RENEW, settling.HEARTBEAT})
_WRITES = ("INSERT", "UPDATE", "DELETE")
_READS = ("SELECT", "WITH", "PRAGMA data_version")


@define(eq=False)
class InlineCalls:
    """The bridge of an inline store: calls in place, one of which may hang."""

    plan: FaultPlan

    async def call(self, function: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        who = present_life().name
        await self.plan.stall(who)
        try:
            return function()
        finally:
            await self.plan.stall(who)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    def time(self) -> float:
        return trio.current_time()


@define(eq=False)
class QueuedCalls(InlineCalls):
    """The bridge of a store with threads, without the thread: one call at a time, not cancelled once it has begun."""

    _turn: trio.Lock = field(factory=trio.Lock, init=False)

    async def call(self, function: Callable[[], T]) -> T:
        async with self._turn:
            return await self._to_its_end(function)

    async def _to_its_end(self, function: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            result = await super().call(function)
        return result  # noqa: RET504 - a scope may swallow, so that a type checker wants it here


@define(eq=False)
class Wires:
    """The driver of a simulated store."""

    driver: Driver
    plan: FaultPlan
    on_connect: Callable[[Connection, str], None]
    """Called with each new connection, and whose it is."""
    on_commit: Callable[[str], None]
    """Called after each commit, with whose it was."""

    @property
    def name(self) -> str:
        return self.driver.name

    @property
    def version(self) -> tuple[int, ...]:
        return self.driver.version

    def connect(self, path: str) -> Connection:
        life = present_life()
        if life.killed or (life.connections and self.plan.strikes("no_file", life.name)):
            raise StoreUnavailable("the database cannot be opened (simulated)")
        inner = self.driver.connect(path)
        life.connections.append(inner)
        self.on_connect(inner, life.name)
        return _Wire(inner, self, life, in_memory=path == ":memory:")


@define(eq=False)
class _Wire:
    """One connection. The database of a killed process's connection is gone for it."""

    _inner: Connection
    _wires: Wires
    _life: Life
    _in_memory: bool
    _writing: bool = field(default=False, init=False)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        if self._life.killed:
            raise StoreClosed("this process was killed (simulated)")
        plan, who = self._wires.plan, self._life.name
        plan.history.absorb(f"{who}{sql}{params}")
        if sql == "BEGIN IMMEDIATE":
            if not self._in_memory and plan.strikes("busy", who):
                raise StoreBusy("the database is locked (simulated)")
            self._inner.all(sql)
            self._writing = True
            return []
        if sql == "COMMIT" and self._writing:
            return self._commit(plan, who)
        if sql in _RENEWALS and plan.strikes("lost_renewal", who):
            return []
        statement = sql.lstrip()
        if not self._in_memory and statement.startswith(_READS) and plan.strikes("unreadable", who):
            raise DiskError("the disk cannot be read (simulated)")
        if self._writing:
            if sql == "ROLLBACK":
                self._writing = False
            elif statement.startswith(_WRITES):
                if plan.strikes("slow_group", who):
                    plan.lag_s += 0.05
                if plan.strikes("full", who):
                    self._undo()
                    raise StoreFull("the disk is full (simulated)")
        return self._inner.all(sql, params)

    def script(self, sql: str) -> None:
        self._inner.script(sql)

    @property
    def in_transaction(self) -> bool:
        return not self._life.killed and self._inner.in_transaction

    def interrupt(self) -> None:
        if not self._life.killed:
            self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()
        with suppress(ValueError):  # killed, and so forgotten
            self._life.connections.remove(self._inner)

    def _commit(self, plan: FaultPlan, who: str) -> list[Row]:
        self._writing = False
        if not self._in_memory and plan.strikes("before_commit", who):
            self._undo()
            raise DiskError("the disk failed before COMMIT (simulated)")
        if plan.strikes("full", who):
            self._undo()
            raise StoreFull("the disk is full at COMMIT (simulated)")
        self._inner.all("COMMIT")
        self._wires.on_commit(who)
        if not self._in_memory and plan.strikes("after_commit", who):
            raise DiskError("the disk failed after COMMIT (simulated)")
        return []

    def _undo(self) -> None:
        """SQLite rolls back by itself when the disk is full or fails."""
        self._writing = False
        with suppress(StoreError):
            self._inner.all("ROLLBACK")
