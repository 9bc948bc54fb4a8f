"""A few connections, lent to one transaction at a time; what has a deadline gets one first."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import outcome
import psycopg
import trio
from attrs import define, field

from alkstore.engines.bridge import ThreadBridge
from alkstore.engines.postgres.connection import cut, is_final
from alkstore.errors import StoreBusy, StoreUnavailable
from alkstore.sql.tx import Row

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["Pool", "Slot"]

T = TypeVar("T")

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to connect; the last one repeats. Up to half of it is added, so that not all come at once."""

STOPPED_AFTER_S = 0.5
"""A call that has begun may end well for so long after its caller was cancelled; then it is stopped."""

STOP_AGAIN_S = 0.010
"""What comes just before a statement begins does not stop it: so it is repeated until the call is over."""

PROBE_S = 5.0
"""It has to answer within this time."""

PROBED_AFTER_S = 30.0
"""A connection that lay idle for longer is asked whether it still lives before it is lent."""


@define(eq=False)
class Slot:
    """A place for a connection, and the thread bridge on which it is used."""

    bridge: ThreadBridge = field(factory=ThreadBridge, init=False)
    connection: Connection[Row] | None = field(default=None, init=False)
    used_at: float = field(default=0.0, init=False)
    due: float = field(default=math.inf, init=False)
    """When the call that is under way has to be over, on time.monotonic's clock."""

    urgent: bool = field(default=False, init=False)
    """Whom it is lent to has a deadline."""

    async def call(self, function: Callable[[], T], *, within: float, stop: Callable[[], object] | None = None) -> T:
        """Run `function`, which uses the connection, in a thread; after `within` seconds the connection may be cut.

        Cancelled while it waits: it has not run. Cancelled when it has begun: it is waited for, and what comes of it
        is told. If it does not end soon, `stop` is called again and again until it does; None: it ends by itself.
        """
        self.due = time.monotonic() + within
        try:
            if stop is None:
                return await self.bridge.call(function)
            return await self._call(function, stop)
        finally:
            self.due = math.inf

    async def _call(self, function: Callable[[], T], stop: Callable[[], object]) -> T:
        over = trio.Event()

        async def stop_if_cancelled() -> None:
            try:
                await over.wait()
            except trio.Cancelled:  # the caller meets it at its next checkpoint, if nothing has come of the call
                with trio.CancelScope(shield=True):
                    await self._stop_until(over, stop)

        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            nursery.start_soon(stop_if_cancelled)
            answer = await outcome.acapture(self.bridge.call, function)  # so that its error leaves as itself
            over.set()
        return answer.unwrap()

    async def _stop_until(self, over: trio.Event, stop: Callable[[], object]) -> None:
        begin_at = self.bridge.time() + STOPPED_AFTER_S
        while not over.is_set():
            if self.bridge.time() >= begin_at:
                stop()
            await self.bridge.sleep(STOP_AGAIN_S)

    def cut(self) -> None:
        """Let the call that is under way find the connection lost."""
        if self.connection is not None:
            cut(self.connection)

    def take_from(self, other: Slot) -> None:
        """Take the connection of another slot, which is not in use."""
        self.connection, self.used_at = other.connection, other.used_at
        other.connection = None

    def discard(self) -> None:
        """Close the connection: nobody knows in which state it is. Blocks shortly."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@define(eq=False)
class Pool:
    """`size` slots; one of them is for what is urgent, so that bulk writes never keep a lease waiting."""

    connect: Callable[[], Connection[Row]]
    size: int
    patience: float
    """Seconds for which a lost server is waited for."""
    slots: list[Slot] = field(init=False)
    _free: list[Slot] = field(init=False)
    _closed: bool = field(default=False, init=False)
    _urgent: deque[trio.Event] = field(factory=deque, init=False)
    _bulk: deque[trio.Event] = field(factory=deque, init=False)
    _woken: int = field(default=0, init=False)
    """How many have been told that there is a slot for them, and have not taken it yet."""
    _starving: dict[Slot, trio.Event] = field(factory=dict, init=False)
    """Slots that are lent and have no connection, since the server gives none."""

    @slots.default
    def _make_slots(self) -> list[Slot]:
        return [Slot() for _ in range(self.size)]

    @_free.default
    def _all_slots(self) -> list[Slot]:
        return list(self.slots)

    def __len__(self) -> int:
        """How many wait for a connection."""
        return len(self._urgent) + len(self._bulk)

    @asynccontextmanager
    async def lend(self, *, urgent: bool) -> AsyncIterator[Slot]:
        """Wait for a slot and give it to the body. Cancelled while it waits: nothing is lent.

        Raises:
            StoreBusy: all connections were in use for the whole patience.
        """
        if self._has(urgent):
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            with trio.move_on_after(self.patience) as in_time:
                await self._turn(urgent)
            if in_time.cancelled_caught:
                raise StoreBusy(f"all {self.size} connections were in use for {self.patience:g} s (busy_timeout)")
        slot = self._spare() or self._free[-1]
        self._free.remove(slot)
        slot.urgent = urgent
        try:
            yield slot
        finally:
            if self._closed:
                slot.discard()
            self._free.append(slot)
            self._feed_starving(slot)
            self._wake()

    async def open(self, slot: Slot) -> Connection[Row]:
        """Return the slot's connection, alive as far as can be known, and open one if there is none.

        If that cannot be had, one will do that comes free meanwhile. Cancelled: nothing is lost.

        Raises:
            StoreUnavailable: the server could not be reached for the whole patience, or refuses.
        """
        began, attempt = time.monotonic(), 0
        while True:
            now = time.monotonic()
            if slot.connection is not None and not slot.connection.closed and now - slot.used_at <= PROBED_AFTER_S:
                slot.used_at = now
                return slot.connection
            try:
                return await slot.call(lambda: self._opened(slot), within=PROBE_S, stop=slot.cut)
            except StoreUnavailable as error:
                if is_final(error) or time.monotonic() - began >= self.patience:
                    raise
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            await self._starve(slot, pause * (1 + random.random() / 2))  # noqa: S311 - it is not a secret
            attempt += 1

    async def close(self) -> None:
        """Close every connection that is not lent now, and the others when they come back."""
        self._closed = True
        for slot in self._free:
            await slot.bridge.call(slot.discard)

    def cut_lent(self) -> None:
        """Cut every connection that is lent: the store closes."""
        for slot in self.slots:
            if slot not in self._free:
                slot.cut()

    def cut_silent(self) -> None:
        """Cut every connection whose call should have been over."""
        now = time.monotonic()
        for slot in self.slots:
            if now > slot.due:
                slot.cut()

    def _opened(self, slot: Slot) -> Connection[Row]:
        if slot.connection is not None and time.monotonic() - slot.used_at > PROBED_AFTER_S:
            try:
                slot.connection.execute("SELECT 1")
            except psycopg.Error:
                slot.discard()
        if slot.connection is not None and slot.connection.closed:
            slot.discard()
        if slot.connection is None:
            slot.connection = self.connect()
        slot.used_at = time.monotonic()
        return slot.connection

    def _spare(self) -> Slot | None:
        """A free slot that has a connection."""
        return next((slot for slot in reversed(self._free) if slot.connection is not None), None)

    async def _starve(self, slot: Slot, seconds: float) -> None:
        """Wait so long until it is tried again to connect, or less: until another slot's connection is free."""
        if (other := self._spare()) is not None:
            slot.take_from(other)
            slot.used_at = -math.inf  # it may have been lost at the same time
            return
        fed = self._starving[slot] = trio.Event()

        async def wait() -> None:
            await slot.bridge.sleep(seconds)
            fed.set()

        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                nursery.start_soon(wait)
                await fed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._starving.pop(slot, None)

    def _feed_starving(self, spare: Slot) -> None:
        """Give the connection of a slot that has come free to who cannot have another one, the urgent first."""
        if spare.connection is None or spare.connection.closed or not self._starving:
            return
        slot = next((one for one in self._starving if one.urgent), next(iter(self._starving)))
        slot.take_from(spare)
        self._starving.pop(slot).set()

    def _has(self, urgent: bool) -> bool:
        return len(self._free) - self._woken > (0 if urgent else self._kept)

    async def _turn(self, urgent: bool) -> None:
        turn = trio.Event()
        lane = self._urgent if urgent else self._bulk
        lane.append(turn)
        while True:
            try:
                await turn.wait()
            finally:
                if turn.is_set():
                    self._woken -= 1
                else:
                    lane.remove(turn)
            if self._has(urgent):
                return
            turn = trio.Event()  # something urgent was faster
            lane.appendleft(turn)

    @property
    def _kept(self) -> int:
        """Slots that are kept for what is urgent."""
        return 1 if self.size > 1 else 0

    def _wake(self) -> None:
        for urgent, lane in (True, self._urgent), (False, self._bulk):
            if lane and self._has(urgent):
                lane.popleft().set()
                self._woken += 1  # who comes now does not take it away from those who have waited
                return
