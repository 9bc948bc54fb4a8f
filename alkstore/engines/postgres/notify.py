"""NOTIFY as a hint: it says soon what has changed elsewhere. Whoever relies on it looks every few seconds anyhow."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import outcome
import psycopg
import trio
from attrs import define, field

from alkstore.engines.bridge import ThreadBridge
from alkstore.engines.feed import Feed
from alkstore.engines.postgres.connection import cut, mapped
from alkstore.engines.postgres.notice import channel, heard, notice
from alkstore.engines.postgres.statements import quoted
from alkstore.errors import StoreError
from alkstore.sql.tx import Row

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["FLOOR_S", "Listener", "Notifier", "look_regularly"]

T = TypeVar("T")

DEBOUNCE_S = 0.010
"""A notice goes out at once, and what comes within this time after it goes out together."""

FLOOR_S = 5.0
"""Everybody looks this often, whatever was heard."""

SILENCE_S = 10.0
"""After this long without a word the listening connection is asked whether it still lives."""

ANSWER_S = 5.0
"""A connection that does not answer within this time is given up."""

RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts to listen again; the last one repeats, and up to half is added."""


@define(eq=False)
class Notifier:
    """Tells the other processes which topics have changed, once that is committed."""

    connect: Callable[[], Connection[Row]]
    schema: str
    me: str = field(factory=lambda: secrets.token_hex(8), init=False)
    """So that a process knows its own notices."""
    _connection: Connection[Row] | None = field(default=None, init=False)
    _topics: set[str] = field(factory=set, init=False)
    _gathered: trio.Event = field(factory=trio.Event, init=False)
    _bridge: ThreadBridge = field(factory=ThreadBridge, init=False)
    _sending: trio.Lock = field(factory=trio.Lock, init=False)

    def tell(self, topics: Iterable[str]) -> None:
        """Send these topics soon. In the trio thread only."""
        self._topics.update(topics)
        if self._topics:
            self._gathered.set()

    async def serve(self) -> None:
        """Send until cancelled."""
        while True:
            await self._gathered.wait()
            self._gathered = trio.Event()
            await self.flush()
            await trio.sleep(DEBOUNCE_S)

    async def flush(self) -> None:
        """Send what has gathered. What cannot be sent is not minded: the others look every few seconds."""
        async with self._sending:
            topics, self._topics = self._topics, set()
            if topics:
                await self._tell_of(topics)

    async def _tell_of(self, topics: set[str]) -> None:
        with suppress(StoreError):
            if self._connection is None or self._connection.closed:
                self._connection = await self._bridge.call(self.connect)
            connection = self._connection
            await _within(ANSWER_S, connection, self._bridge, lambda: self._send(connection, notice(topics, self.me)))

    def close(self) -> None:
        """Close the connection; nobody sends any more."""
        if self._connection is not None:
            self._connection.close()

    def _send(self, connection: Connection[Row], text: str) -> None:
        try:
            connection.execute("SELECT pg_notify(%s, %s)", (channel(self.schema), text)).fetchall()
        except psycopg.Error as error:
            connection.close()
            raise mapped(error) from error


@define(eq=False)
class Listener:
    """Hears what other processes have changed, on a connection of its own, and wakes who waits for it."""

    connect: Callable[[], Connection[Row]]
    schema: str
    me: str
    feed: Feed
    state: str = field(default="connecting", init=False)
    """``connecting`` for the first time, ``listening``, or ``polling``: only the regular look is left."""
    _bridge: ThreadBridge = field(factory=ThreadBridge, init=False)

    async def serve(self) -> None:
        """Listen until cancelled; after every loss listen anew, and then let everybody look once."""
        attempt = 0
        while True:
            try:
                connection = await self._listening()
            except StoreError:
                self.state = "polling"
                pause = RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)]
                await trio.sleep(pause * (1 + random.random() / 2))  # noqa: S311 - it is not a secret
                attempt += 1
                continue
            attempt, self.state = 0, "listening"
            self.feed.touch_all()  # what was told before we listened was told to nobody here
            try:
                await self._hear(connection)
            except (psycopg.Error, OSError, ValueError):
                self.state = "polling"
            finally:
                connection.close()

    async def _hear(self, connection: Connection[Row]) -> None:
        while True:
            with trio.move_on_after(SILENCE_S) as silence:
                await trio.lowlevel.wait_readable(connection.fileno())
            if silence.cancelled_caught:
                await _within(ANSWER_S, connection, self._bridge, lambda: connection.execute("SELECT 1").fetchall())
            for told in connection.notifies(timeout=0):
                self._take(told.payload)

    def _take(self, text: str) -> None:
        by, topics = heard(text)
        if by == self.me:
            return
        if topics is None:
            self.feed.touch_all()
        else:
            self.feed.touch(topics)

    async def _listening(self) -> Connection[Row]:
        connection = await self._bridge.call(self.connect)
        listen = f"LISTEN {quoted(channel(self.schema))}".encode()
        try:
            await _within(ANSWER_S, connection, self._bridge, lambda: connection.execute(listen))
        except BaseException as error:
            connection.close()
            if isinstance(error, psycopg.Error):
                raise mapped(error) from error
            raise
        return connection


async def look_regularly(feed: Feed) -> None:
    """Let everybody look every few seconds, until cancelled."""
    while True:
        await trio.sleep(FLOOR_S)
        feed.touch_all()


async def _within(seconds: float, connection: Connection[Row], bridge: ThreadBridge, function: Callable[[], T]) -> T:
    """Make a blocking call on `connection`, which is cut if there is no answer in time, and at once if cancelled."""
    answer: outcome.Outcome[T] | None = None

    async def cut_later() -> None:
        try:
            await trio.sleep(seconds)
        finally:
            if answer is None:  # a thread cannot be cancelled, and whoever closes must not wait for a silent server
                cut(connection)

    async with trio.open_nursery(strict_exception_groups=True) as nursery:
        nursery.start_soon(cut_later)
        answer = await outcome.acapture(bridge.call, function)  # so that its error leaves as itself
        nursery.cancel_scope.cancel()
    return answer.unwrap()
