"""Who waits for a change is woken by it: `position` before looking, then `moved_past`, and no wake-up is lost."""

from __future__ import annotations

from collections.abc import Iterable

import trio
from attrs import define, field

from alkstore.clock import Clock
from alkstore.errors import StoreClosed

__all__ = ["CLOCK", "COMMITS", "Feed"]

CLOCK = "clock"
"""The topic of the clock itself: moved by a step only, so that who minds a lease is not woken by every commit."""

COMMITS = "commits"
"""The topic of every commit, whatever it was about."""

REMEMBERED_TOPICS = 10_000
"""Topics whose last change is remembered one by one; of older ones it is only known that they may have changed."""


@define(eq=False)
class Feed:
    """Counts commits, and remembers for each topic the number of its last one."""

    clock: Clock
    _count: int = field(default=0, init=False)
    _all_moved: int = field(default=0, init=False)
    _moved: dict[str, int] = field(factory=dict, init=False)
    _waiters: dict[str, set[trio.Event]] = field(factory=dict, init=False)
    _closed: bool = field(default=False, init=False)

    def position(self) -> int:
        """Return where the feed stands. Take it before looking at the store."""
        return self._count

    async def moved_past(self, topic: str, seen: int, until: int | None) -> bool:
        """Return when `topic` moved past `seen`, or at the moment `until` (ms), or earlier.

        True: this process has changed just this topic. False: look again, for it may be any other reason, or too
        early: a wall clock has to be watched while waiting for it. Always a checkpoint. Cancelled: nothing is lost, the
        position can be waited for again.

        Raises:
            StoreClosed: nothing will change here any more.
        """
        if self._closed or self._has_moved(topic, seen):
            await trio.lowlevel.checkpoint()
        else:
            await self._wait(topic, until)
        if self._closed:
            raise StoreClosed("the store is closed")
        return self._moved.get(topic, 0) > seen

    async def _wait(self, topic: str, until: int | None) -> None:
        woken = trio.Event()
        waiters = self._waiters.setdefault(topic, set())
        waiters.add(woken)
        try:
            if until is None:
                await woken.wait()
            else:
                with trio.move_on_after(self.clock.wait_s(until)):
                    await woken.wait()
        finally:
            waiters.discard(woken)
            if not waiters and self._waiters.get(topic) is waiters:
                del self._waiters[topic]

    def touch(self, topics: Iterable[str]) -> None:
        """Wake who waits for one of `topics`. In the trio thread only."""
        for topic in topics:
            self._count += 1
            self._moved.pop(topic, None)  # so that the dict stays in the order of the last change
            self._moved[topic] = self._count
            for woken in self._waiters.get(topic, ()):
                woken.set()
        while len(self._moved) > REMEMBERED_TOPICS:
            self._all_moved = self._moved.pop(next(iter(self._moved)))

    def touch_all(self) -> None:
        """Wake everybody who waits for a commit: another process has made one. In the trio thread only."""
        self._count += 1
        self._all_moved = self._count
        self._moved.clear()
        for topic, waiters in self._waiters.items():
            if topic != CLOCK:
                for woken in waiters:
                    woken.set()

    def touch_clock(self) -> None:
        """Wake everybody: the clock was stepped, so every wait has to be measured anew. In the trio thread only."""
        self.touch_all()
        self.touch((CLOCK,))

    def close(self) -> None:
        """Tell everybody who waits, and whoever will, that the store is closed. In the trio thread only."""
        self._closed = True
        self.touch_clock()

    async def pause(self, seconds: float) -> None:
        """Return after `seconds`, or earlier: a wall clock has to be watched, and may be stepped. A checkpoint."""
        await self.moved_past(CLOCK, self._count, self.clock.now_ms() + round(seconds * 1000))

    def _has_moved(self, topic: str, seen: int) -> bool:
        return max(self._moved.get(topic, 0), self._all_moved) > seen
