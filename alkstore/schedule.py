"""Interval schedules: registering them, and running them as a leader or a standby."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field

from actors.stop import StopToken
from actors.ticker import lead_and_tick
from actors.unwinding import Alone
from alkstore.context import Context, checked_stop, while_busy
from alkstore.errors import InvalidSpec, LeadershipLost, StoreBusy, StoreClosed, StoreError
from alkstore.every import MAX_MS, parse_every
from alkstore.lease import Lease
from alkstore.lock import LockHandle, acquire_patiently
from alkstore.names import check_name
from alkstore.payload import JSON, encode
from alkstore.sql import schedules
from alkstore.sql.tx import SCHEDULES
from alkstore.values import TEN_YEARS_S, ScheduleOpts, milliseconds

__all__ = ["new_schedule", "run_schedules"]

T = TypeVar("T")

AT_ONCE = 16
"""Schedules that go to the writer together: each may fire 64 boundaries, and leases wait behind them."""


def new_schedule(
    now: int, name: str, spec: str, queue: str, payload: JSON, opts: ScheduleOpts | None
) -> schedules.NewSchedule:
    """Validate everything that registering takes; nothing is sent to the store.

    Raises:
        InvalidName, ReservedName: of `name`, and of `queue` too.
        InvalidSpec: the grammar, or a next boundary past the year 9999.
        InvalidPayload: the payload is not JSON.
    """
    name = check_name(name, "schedule")
    interval = parse_every(spec)
    if now + interval > MAX_MS:
        raise InvalidSpec(spec, f"the next boundary of {spec!r} would lie past the year 9999")
    queue = check_name(queue, "queue")
    opts = ScheduleOpts() if opts is None else opts
    if not isinstance(opts, ScheduleOpts):
        raise TypeError(f"opts must be ScheduleOpts, not {opts!r:.80}")
    return schedules.NewSchedule(
        name=name,
        spec=spec,
        interval=interval,
        queue=queue,
        payload=encode(payload),
        priority=opts.priority,
        max_attempts=opts.max_attempts,
        expires=None if opts.expires is None else milliseconds(opts.expires, "expires", 0, TEN_YEARS_S),
    )


async def run_schedules(
    context: Context, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Fire due boundaries while we lead, stand by while another does; see `Store.run_schedules`."""
    lease, ticks = SchedulerLease(context), SchedulerTicks(context)
    try:
        with Alone(LeadershipLost, StoreError):
            await lead_and_tick(lease, ticks, checked_stop(stop), task_status=task_status)
    except LeadershipLost:
        context.publish("lost", "schedules", owner=lease.owner)
        raise


async def _while_leading(grant: LockHandle, call: Callable[[], Awaitable[T]]) -> T:
    """Return what `call` returns; made again while the store is busy and the lease lives."""
    try:
        return await while_busy(call, grant.is_alive)
    except StoreBusy as busy:
        raise LeadershipLost(f"the store was busy until the schedules' lease was over: {busy}") from busy


@define(eq=False)
class SchedulerLease:
    """The port through which `Leadership` leads: the lock ``__alkstore_scheduler``."""

    _context: Context
    lost: type[LeadershipLost] = field(default=LeadershipLost, init=False)
    owner: str = field(default="", init=False)
    """Of the term of office, once there is one."""

    async def acquire(self) -> LockHandle:
        ttl = self._context.leadership_ttl
        grant = await acquire_patiently(self._context, schedules.LEADER_LOCK, ttl)
        self.owner = grant.owner
        self._context.publish("leader", "schedules", owner=grant.owner, fencing_token=grant.fence)
        return LockHandle(self._context, grant, Lease(ttl, grant.expires_at))

    async def renew(self, grant: LockHandle) -> bool:
        return await _while_leading(grant, grant.renew)

    async def release(self, grant: LockHandle) -> None:
        with suppress(StoreClosed):  # the ticker is told the same; the lease runs out by itself
            await while_busy(grant.release, grant.is_alive)

    def renew_in(self, grant: LockHandle) -> float:
        return grant.renew_in()


@define(eq=False)
class SchedulerTicks:
    """The port through which `Ticker` fires: each due schedule is one guarded unit that proves the lease again."""

    _context: Context
    _next_at: int | None = field(default=None, init=False)
    """When to look again (ms); 0: at once, None: nothing is in sight."""

    def position(self) -> int:
        return self._context.engine.feed.position()

    async def tick(self, grant: LockHandle) -> float | None:
        engine = self._context.engine
        due = await engine.read(schedules.look)

        def firing(name: str) -> schedules.Firing:
            return lambda tx: schedules.fire(tx, name, grant.owner)

        fired: list[schedules.Fired] = []
        for start in range(0, len(due.names), AT_ONCE):  # heartbeats and renewals come in between
            names = due.names[start : start + AT_ONCE]
            firings = [firing(name) for name in names]
            fired += await _while_leading(grant, partial(engine.run_each, firings, urgent=True))
        if not all(one.led for one in fired):
            raise LeadershipLost("the schedules' lease ended or was taken: nothing was fired on it")
        cursors = [one.next_at for one in fired if one.next_at is not None]
        moments = [*cursors, *(() if due.next_at is None else (due.next_at,))]
        self._next_at = 0 if due.more else min(moments, default=None)
        return None if self._next_at is None else max(self._next_at - engine.clock.now_ms(), 0) / 1000

    async def changed(self, seen: int, within: float | None) -> None:
        await self._context.engine.feed.moved_past(SCHEDULES, seen, None if within is None else self._next_at)
