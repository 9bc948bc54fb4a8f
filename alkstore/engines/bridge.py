"""How a blocking SQLite call is made from trio: in a thread, or in place; and how virtual time is kept still for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import anyio.to_thread
import trio
import trio.testing
from attrs import define, field

__all__ = ["Bridge", "InlineBridge", "ThreadBridge", "autojump_held", "in_virtual_time", "no_call_in_flight"]

T = TypeVar("T")


def in_virtual_time() -> bool:
    """Return whether this trio run lives under a `trio.testing.MockClock`."""
    return isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)


class Bridge(Protocol):
    """Makes blocking calls. A call that has begun is waited for: cancellation cannot leave it running behind us."""

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result. Cancelled while it waits its turn: it has not run."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass for somebody outside of this trio run, who may hold a lock."""

    def time(self) -> float:
        """Seconds on the clock by which `sleep` sleeps."""


@define(eq=False)
class InlineBridge:
    """Runs every call in the trio thread: exact in virtual time, and still a checkpoint."""

    async def call(self, function: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return function()

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    def time(self) -> float:
        return trio.current_time()


@define(eq=False)
class ThreadBridge:
    """Runs calls one at a time in a worker thread, through anyio, with a limiter that nobody else can exhaust."""

    _limiter: anyio.CapacityLimiter = field(factory=lambda: anyio.CapacityLimiter(1), init=False)
    _sleepers: anyio.CapacityLimiter = field(factory=lambda: anyio.CapacityLimiter(math.inf), init=False)
    _virtual: bool = field(factory=in_virtual_time, init=False)

    async def call(self, function: Callable[[], T]) -> T:
        with autojump_held():
            return await anyio.to_thread.run_sync(function, limiter=self._limiter)

    async def sleep(self, seconds: float) -> None:
        if self._virtual:  # the holder of the lock lives in real time: an autojump clock would leap over the wait
            with autojump_held():
                await anyio.to_thread.run_sync(time.sleep, seconds, limiter=self._sleepers)
        else:
            await trio.sleep(seconds)

    def time(self) -> float:
        return time.monotonic() if self._virtual else trio.current_time()


# Under an autojump clock a task that waits for a thread counts as idle, so the clock would leap while SQLite works, or
# a plain handler. A MockClock has one threshold, so the calls in flight are counted per clock.


@define(eq=False)
class _Hold:
    calls: int = 0
    threshold: float = math.inf
    ended: trio.Event = field(factory=trio.Event)


_holds: WeakKeyDictionary[trio.testing.MockClock, _Hold] = WeakKeyDictionary()


@contextmanager
def autojump_held() -> Iterator[None]:
    """Keep virtual time still while the body waits for a thread."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, trio.testing.MockClock):
        yield
        return
    hold = _holds.setdefault(clock, _Hold())
    if clock.autojump_threshold != math.inf:  # the first call, or the user has set it anew while others were in flight
        hold.threshold = clock.autojump_threshold
        clock.autojump_threshold = math.inf
    hold.calls += 1
    try:
        yield
    finally:
        # in the caller's own task, which is runnable again: from here on the clock cannot leap before it has run
        hold.calls -= 1
        if hold.calls == 0:
            if clock.autojump_threshold == math.inf:
                clock.autojump_threshold = hold.threshold
            hold.threshold = math.inf
            hold.ended.set()
            hold.ended = trio.Event()


async def no_call_in_flight() -> bool:
    """Wait until no call holds this run's virtual clock still; False, at once and no checkpoint, if none did."""
    clock = trio.lowlevel.current_clock()
    hold = _holds.get(clock) if isinstance(clock, trio.testing.MockClock) else None
    if hold is None or hold.calls == 0:
        return False
    await hold.ended.wait()
    return True
