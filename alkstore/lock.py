"""Named locks: `Lock` is the name, `LockHandle` is one acquisition of it."""

# ruff: noqa: SLF001 - a lock and its handles are one mechanism

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from datetime import datetime

import trio
from attrs import define, field

from alkstore.context import Context, open_helpers, while_busy, write_on_leaving
from alkstore.entering import async_with
from alkstore.errors import LockLost, OutcomeUnknown
from alkstore.lease import Lease, Renewal
from alkstore.sql import locks
from alkstore.sql.tx import lock_topic
from alkstore.values import SEVEN_DAYS_S, Seconds, at, milliseconds

__all__ = ["Lock", "LockHandle", "acquire_patiently"]

MARGIN_S = 1.0
MARGIN_SHARE = 0.1
"""A body is cancelled a second, or a tenth of the ttl if that is less, before somebody else could take the lock."""


async def acquire_patiently(context: Context, name: str, ttl: int) -> locks.Grant:
    """Wait until the lock `name` is ours for `ttl` ms, as a new random owner. Cancelled: it is not held."""
    engine, owner = context.engine, secrets.token_hex(16)
    engine.refuse_inside(None)  # before it waits: the holder could not release the lock meanwhile
    while True:
        seen = engine.feed.position()
        until = await engine.read(lambda tx: locks.expiry(tx, name))
        if until is not None and until > engine.clock.now_ms():
            await engine.feed.moved_past(lock_topic(name), seen, until)
            continue
        grant = await engine.run(lambda tx: locks.acquire(tx, name, owner, ttl), urgent=True)
        if grant is not None:
            await _give_up_if_cancelled(context, grant)
            return grant


async def _give_up_if_cancelled(context: Context, grant: locks.Grant) -> None:
    """A lock that comes after its caller was cancelled is released at once: nobody would hold it."""
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
    except BaseException as leaving:

        async def release() -> None:
            await context.engine.run(lambda tx: locks.release(tx, grant.name, grant.owner), urgent=True)

        await write_on_leaving(release, leaving, lambda: grant.expires_at > context.engine.clock.now_ms())
        raise


@define(eq=False, repr=False)
class LockHandle:
    """One acquisition of a lock, with an owner of its own: nobody else can renew or release it."""

    _context: Context
    _grant: locks.Grant
    _lease: Lease
    _releasing: int = field(default=0, init=False)
    _released: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"LockHandle(name={self.name!r}, fencing_token={self.fencing_token}, owner={self.owner!r})"

    @property
    def name(self) -> str:
        return self._grant.name

    @property
    def fencing_token(self) -> int:
        """Grows with every acquisition in the store: what is protected can refuse a smaller one than it has seen."""
        return self._grant.fence

    @property
    def owner(self) -> str:
        """Random for each acquisition."""
        return self._grant.owner

    @property
    def expires_at(self) -> datetime:
        """When the lease ends unless it is renewed."""
        return at(self._lease.end)

    @property
    def remaining(self) -> float:
        """Seconds of lease left by the store's clock; 0 once it is over."""
        return max(self._lease.remaining(self._context.engine.clock.now_ms()), 0.0)

    async def renew(self, ttl: Seconds | None = None) -> bool:
        """Extend the lease to `ttl` seconds from now (None: as before); False: it is over, nothing changed.

        A checkpoint. Cancelled while it waits: nothing changed.
        """
        length = None if ttl is None else milliseconds(ttl, "ttl", 0.1, SEVEN_DAYS_S)
        try:
            renewal = await self._context.engine.run(
                lambda tx: Renewal(locks.renew(tx, self.name, self._grant.owner, length)), urgent=True
            )
        except OutcomeUnknown:
            self._lease.doubt(length, self._context.engine.clock.now_ms())
            raise
        return self._lease.accept(renewal)

    async def release(self) -> bool:
        """Give the lock up and wake who waits for it; False: it was not ours any more, nothing changed.

        A checkpoint. Cancelled while it waits: the lock is still held.
        """
        self._releasing += 1
        try:
            done = await self._context.engine.run(
                lambda tx: locks.release(tx, self.name, self._grant.owner), urgent=True
            )
        finally:
            self._releasing -= 1
        self._released = self._released or done
        return done

    def is_alive(self) -> bool:
        """Whether there is any of the lease left, by the store's clock."""
        return self.remaining > 0

    def renew_in(self) -> float:
        """Seconds until a third of the ttl has gone, by the store's clock; 0 or less: now."""
        return self._lease.renew_in(self._context.engine.clock.now_ms())


@define(eq=False)
class Lock:
    """A name that at most one owner holds at a time. Get one from `Store.lock`."""

    name: str
    _context: Context = field(repr=False)

    async def acquire(self, ttl: Seconds) -> LockHandle | None:
        """Take the lock for `ttl` seconds (0.1 to 7 days) if it is free; None: somebody holds it.

        A checkpoint. Cancelled: the lock is not held.
        """
        length = milliseconds(ttl, "ttl", 0.1, SEVEN_DAYS_S)
        owner = secrets.token_hex(16)
        grant = await self._context.engine.run(lambda tx: locks.acquire(tx, self.name, owner, length), urgent=True)
        if grant is None:
            return None
        await _give_up_if_cancelled(self._context, grant)
        return LockHandle(self._context, grant, Lease(length, grant.expires_at))

    @async_with("async with lock.hold() as held:")
    async def hold(self, ttl: Seconds = 30) -> AsyncIterator[LockHandle]:
        """Wait for the lock, hold it for the body, renewing at a third of `ttl` seconds, and release it.

        Waits for a release or for the end of the holder's lease; no fairness is promised. It is not re-entrant: whoever
        holds the lock and waits for it waits for himself. If the lease is lost, or
        cannot be renewed in time, the body is cancelled and `LockLost` raised; so it is at the end of a body that could
        not be cancelled. A body that releases the lock itself goes on without it. What the body raises leaves as
        itself, with a note if the release fails too. Cancelled: the lock is released, under a shield of bounded length.
        A busy store is asked again: to renew as long as the lease lives, to release for ten seconds.
        """
        length = milliseconds(ttl, "ttl", 0.1, SEVEN_DAYS_S)
        grant = await acquire_patiently(self._context, self.name, length)
        handle = LockHandle(self._context, grant, Lease(length, grant.expires_at))
        try:
            async with open_helpers() as helpers:
                helpers.start_soon(self._keep, handle)
                yield handle
                helpers.cancel_scope.cancel()
        except BaseException as leaving:
            await write_on_leaving(handle.release, leaving, handle.is_alive)
            raise
        await write_on_leaving(handle.release, None, handle.is_alive)
        if not handle._released:
            raise LockLost(f"the lock {self.name!r} was lost before the body had ended")

    async def _keep(self, handle: LockHandle) -> None:
        while not handle._released:
            if (wait := handle.renew_in()) > 0:
                with trio.CancelScope() as nap:
                    handle._lease.on_changed = nap.cancel  # the body may have extended the lease, or cut it short
                    await self._context.engine.feed.pause(wait)
                continue
            remaining = handle.remaining
            with trio.move_on_after(remaining - min(MARGIN_S, remaining * MARGIN_SHARE)) as in_time:
                renewed = await while_busy(handle.renew, handle.is_alive)
                if not renewed and not handle._released and not handle._releasing:
                    raise LockLost(f"the lock {self.name!r} was lost: its lease ended or was taken away")
            if in_time.cancelled_caught:
                raise LockLost(f"the lock {self.name!r} could not be renewed before its lease ends")
