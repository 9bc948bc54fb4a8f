"""What happens inside, told to whoever listens: an in-process stream that can never hold up its publisher.

A publisher is often in the middle of something that must not wait (a transaction, a restart), and a
listener is often a health page that nobody looks at. So a slow listener loses its oldest events, and is
told how many.
"""

# ruff: noqa: SLF001  a stream and its subscriptions are one mechanism in two classes

from __future__ import annotations

import weakref
from collections import deque
from types import TracebackType
from typing import Generic, Self, TypeVar

import trio

E = TypeVar("E")


class Broadcast(Generic[E]):
    """A stream of events to any number of subscriptions. Made anywhere; used in one trio thread only."""

    def __init__(self) -> None:
        self._subscriptions: weakref.WeakSet[Subscription[E]] = weakref.WeakSet()
        self._closed = False

    def publish(self, event: E) -> None:
        """Give `event` to every subscription there is. Never waits; call it only in the trio thread."""
        if self._subscriptions:  # mostly there are none, and to begin a walk over weak references is not free
            for subscription in self._subscriptions:
                subscription._put(event)

    def subscribe(self, buffer: int = 1000) -> Subscription[E]:
        """A subscription to all that is published from this call on.

        `buffer`: how many events it keeps for a reader that is behind, 1 or more; then the oldest go.
        """
        if buffer < 1:
            raise ValueError(f"buffer must be 1 or more events, not {buffer!r}")
        subscription = Subscription(self, buffer)
        if self._closed:
            subscription._end()
        else:
            self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription once its buffer is read. What is published later reaches nobody."""
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription._end()
        self._subscriptions.clear()


class Subscription(Generic[E]):
    """The events of one `Broadcast` from `subscribe` on, as an async iterator.

    Closed by `close`, by leaving it as a context manager, or by being dropped: the stream does not hold it.
    Iteration ends when the subscription is closed, or when the stream is closed and the buffer read.
    Waiting is cancellable and each step is a checkpoint; a cancelled step takes no event.
    """

    def __init__(self, broadcast: Broadcast[E], buffer: int) -> None:
        self.missed = 0
        """How many events were dropped so far because the buffer was full."""
        self._broadcast = broadcast
        self._buffer: deque[E] = deque(maxlen=buffer)
        self._readers = trio.lowlevel.ParkingLot()
        self._ended = False

    def _put(self, event: E) -> None:
        if len(self._buffer) == self._buffer.maxlen:
            self.missed += 1
        self._buffer.append(event)
        self._readers.unpark()

    def _end(self) -> None:
        self._ended = True
        self._readers.unpark_all()

    def close(self) -> None:
        """Leave the stream and forget what was not read. May be called more than once."""
        self._broadcast._subscriptions.discard(self)
        self._buffer.clear()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        await trio.lowlevel.checkpoint()
        while not self._buffer:
            if self._ended:
                raise StopAsyncIteration
            await self._readers.park()
        return self._buffer.popleft()
