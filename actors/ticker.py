"""Ticker: asks for a fresh lease, fires what is due, sleeps until the next boundary or a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic

import trio

from actors.leadership import Leadership
from actors.ports import Grant, Lease, Seen, Ticks
from actors.stop import StopToken
from actors.unwinding import Alone


async def lead_and_tick(
    lease: Lease[Grant],
    ticks: Ticks[Grant, Seen],
    stop: StopToken,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run Leadership and a Ticker as one group: tick while we lead, stand by while another does.

    Ready (`task_status.started`) as soon as it stands by. Returns when `stop` is flipped: the tick in flight has
    ended, and after it the lease is released, so that a standby takes over at once. A lost lease cancels the group
    and raises `lease.lost`, alone and not in a group. Any other error of either actor ends the group too, and
    leaves as itself when it is the only one. Cancellation cancels a tick in flight, and releases the lease as well.
    """
    leadership = Leadership(lease)
    with Alone(lease.lost):
        async with trio.open_nursery(strict_exception_groups=True) as group:
            group.start_soon(leadership.run)
            await Ticker(ticks, leadership.fresh).run(stop, task_status=task_status)
            group.cancel_scope.cancel("the ticker has stopped")


class Ticker(Generic[Grant, Seen]):
    """The one who fires, for as long as `fresh` answers with a grant."""

    def __init__(self, ticks: Ticks[Grant, Seen], fresh: Callable[[], Awaitable[Grant]]) -> None:
        """`fresh` waits until we lead and the lease needs no renewal (`Leadership.fresh`)."""
        self._ticks = ticks
        self._fresh = fresh

    async def run(self, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tick until `stop` is flipped; a tick that has begun runs to its end first.

        Whatever `fresh` and the port raise leaves as it is. Cancellation is passed on to a tick in flight.
        """
        task_status.started()
        ticked: tuple[Seen, float | None] | None = None
        while not stop.stopped:
            with stop.intake() as waiting:
                if ticked is not None:
                    await self._ticks.changed(*ticked)
                grant = await self._fresh()
            if waiting.cancel_called:
                break
            seen = self._ticks.position()  # before the look, so that a change during the tick ends the sleep
            ticked = seen, await self._ticks.tick(grant)
