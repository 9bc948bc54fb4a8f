"""Ports without a database: leases, ticks and work in memory, in trio's virtual time, with signals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import trio

from actors.ports import Outcome


class Lost(Exception):
    """What these ports call lost."""


class Fake:
    """A store's clock that can be stepped, a log of what happened, and a way to wait for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.offset = 0.0
        self._moved = trio.Event()

    def now(self) -> float:
        return trio.current_time() + self.offset

    def step(self, seconds: float) -> None:
        """Step the store's clock; trio's goes on as before."""
        self.offset += seconds
        self.moved()

    def note(self, what: str) -> None:
        self.log.append(what)
        self.moved()

    def moved(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await self._moved.wait()

    async def until_logged(self, what: str, times: int = 1) -> None:
        await self.until(lambda: self.log.count(what) >= times)

    async def sleep(self, seconds: float) -> None:
        """Sleep, or until anything moved."""
        with trio.move_on_after(seconds):
            await self._moved.wait()


@attrs.frozen
class Grant:
    owner: str
    fence: int


class FakeLease(Fake):
    """One lease that several leaderships may share, each through a view of its own."""

    lost = Lost

    def __init__(self, ttl: float = 30.0) -> None:
        super().__init__()
        self.ttl = ttl
        self.holder: Grant | None = None
        self.end = -math.inf
        self.renewed_at = -math.inf
        self.renewals: list[float] = []
        self.fence = 0
        self.on_acquire: Callable[[], object] = lambda: None
        self.on_renew: Callable[[], object] = lambda: None
        self.on_release: Callable[[], object] = lambda: None
        self.release_takes = 0.0

    async def acquire(self) -> Grant:
        await trio.lowlevel.checkpoint()
        while self.holder is not None and self.end > self.now():
            with trio.move_on_after(self.end - self.now()):
                await self._moved.wait()
        self.on_acquire()
        return self.take("leader")

    def take(self, owner: str) -> Grant:
        self.fence += 1
        self.holder = Grant(owner, self.fence)
        self._extend()
        self.note(f"acquired {self.fence}")
        return self.holder

    def _extend(self) -> None:
        self.renewed_at = self.now()
        self.end = self.now() + self.ttl

    async def renew(self, grant: Grant) -> bool:
        await trio.lowlevel.checkpoint()
        self.on_renew()
        self.renewals.append(trio.current_time())
        if self.holder != grant or self.end <= self.now():
            self.note("refused")
            return False
        self._extend()
        self.note("renewed")
        return True

    async def release(self, grant: Grant) -> None:
        await trio.sleep(self.release_takes)
        self.on_release()
        if self.holder == grant:
            self.holder = None
            self.note(f"released {grant.fence}")

    def renew_in(self, grant: Grant) -> float:
        del grant
        return min(self.renewed_at + self.ttl / 3 - self.now(), self.ttl / 3)


class FakeTicks(Fake):
    """Schedules: `due` holds the times (of the store's clock) at which a tick fires something."""

    def __init__(self, lease: FakeLease | None = None) -> None:
        super().__init__()
        self.lease = lease
        self.due: list[float] = []
        self.changes = 0
        self.ticks: list[float] = []
        self.fired: list[float] = []
        self.at_most = 64
        self.on_tick: Callable[[], object] = lambda: None
        self.tick_takes = 0.0

    def change(self, *due: float) -> None:
        """Somebody has changed the schedules."""
        self.due += due
        self.changes += 1
        self.moved()

    def position(self) -> int:
        return self.changes

    async def tick(self, grant: Grant) -> float | None:
        self.ticks.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.lease is not None and (self.lease.holder != grant or self.lease.end <= self.lease.now()):
            raise Lost("the tick's own look at the lease")
        self.due.sort()
        for _ in range(self.at_most):
            if not self.due or self.due[0] > self.now():
                break
            self.fired.append(self.due.pop(0))
        self.on_tick()
        self.note("tick begun")
        with trio.CancelScope(shield=True):
            await trio.sleep(self.tick_takes)
        self.note("tick ended")
        return self.due[0] - self.now() if self.due else None

    async def changed(self, seen: int, within: float | None) -> None:
        await trio.lowlevel.checkpoint()
        offset = self.offset
        with trio.move_on_after(math.inf if within is None else max(0, within)):
            await self.until(lambda: self.changes > seen or self.offset != offset)


@attrs.define(eq=False)
class FakeWork:
    """What the handler gets."""

    name: str = "work"
    lease: float = 30.0
    end: float = -math.inf
    renewed_at: float = -math.inf
    gone: bool = False  # settled, or somebody else has it
    self_settled: bool = False
    told: list[str] = attrs.field(factory=list)
    cancel: Callable[[str], None] = attrs.field(default=lambda _reason: None)
    look: Callable[[], None] = attrs.field(default=lambda: None)


class FakeSource(Fake):
    """Leased work in memory. It keeps the guard of a real one: a lease that is over is never revived."""

    def __init__(self, *works: FakeWork) -> None:
        super().__init__()
        self.ready: list[FakeWork] = list(works)
        self.empty_takes = 0
        self.limits: list[int] = []
        self.settled: list[tuple[FakeWork, Outcome]] = []
        self.refused: list[tuple[FakeWork, Outcome]] = []
        self.renewals: list[tuple[float, list[FakeWork]]] = []
        self.pauses = 0
        self.left_running: list[tuple[FakeWork, str]] = []
        self.late_errors: list[tuple[FakeWork, BaseException]] = []
        self.settle_takes = 0.0
        self.renew_takes = 0.0
        self.on_take: Callable[[], object] = lambda: None
        self.on_renew: Callable[[], object] = lambda: None
        self.on_settle: Callable[[FakeWork], object] = lambda _work: None

    def add(self, *works: FakeWork) -> None:
        self.ready += works
        self.moved()

    async def take(self, limit: int) -> Sequence[FakeWork]:
        await trio.lowlevel.checkpoint()
        self.limits.append(limit)
        self.on_take()
        if self.empty_takes:
            self.empty_takes -= 1
            return []
        try:
            await self.until(lambda: self.ready)
        except trio.Cancelled:
            self.note("take cancelled")
            raise
        works, self.ready = self.ready[:limit], self.ready[limit:]
        for work in works:
            self.extend(work)
        return works

    def extend(self, work: FakeWork) -> None:
        work.renewed_at, work.end = self.now(), self.now() + work.lease

    def ours(self, work: FakeWork) -> bool:
        return not work.gone and work.end > self.now()

    async def renew(self, works: Sequence[FakeWork]) -> Collection[FakeWork]:
        self.renewals.append((trio.current_time(), list(works)))
        await trio.sleep(self.renew_takes)
        self.on_renew()
        lost = [work for work in works if not self.ours(work) and not work.self_settled]
        for work in works:
            if work not in lost:
                self.extend(work)
        self.note("renewed")
        return lost

    def lease(self, work: FakeWork) -> float:
        return work.lease

    def remaining(self, work: FakeWork) -> float:
        return math.inf if work.self_settled else work.end - self.now()

    def renew_in(self, work: FakeWork) -> float:
        if work.self_settled:
            return math.inf
        return min(work.renewed_at + work.lease / 3 - self.now(), work.lease / 3)

    async def pause(self, seconds: float) -> None:
        self.pauses += 1
        offset = self.offset
        with trio.move_on_after(seconds):
            await self.until(lambda: self.offset != offset)

    async def settle(self, work: FakeWork, outcome: Outcome) -> None:
        self.note("settling")
        await trio.sleep(self.settle_takes)
        self.on_settle(work)
        (self.settled if self.ours(work) else self.refused).append((work, outcome))
        work.gone = True
        self.note("settled")

    def started(self, work: FakeWork, cancel: Callable[[str], None], look: Callable[[], None]) -> None:
        work.cancel, work.look = cancel, look
        self.note(f"started {work.name}")

    def tell(self, work: FakeWork, reason: str) -> None:
        work.told.append(reason)
        self.note(f"told {work.name}")

    def lapsed(self, work: FakeWork) -> None:
        self.note(f"lapsed {work.name}")

    def raised(self, work: FakeWork, error: BaseException) -> None:
        self.late_errors.append((work, error))
        self.note(f"raised {work.name}")

    def abandoned(self, work: FakeWork, reason: str) -> None:
        self.left_running.append((work, reason))
        self.note(f"abandoned {work.name}")

    def outcome(self) -> Outcome:
        """The only outcome so far."""
        ((_, outcome),) = self.settled
        return outcome
