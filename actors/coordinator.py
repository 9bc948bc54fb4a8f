"""Coordinator: one bounded cycle at a time, no more often than its period, and asleep while nothing is due."""

from __future__ import annotations

import trio

from actors.ports import Cycles
from actors.stop import StopToken


class Coordinator:
    """Runs the cycles of a port. They never overlap."""

    def __init__(self, cycles: Cycles, *, period: float, stop_within: float) -> None:
        """Both in seconds: from the beginning of a cycle to that of the next, and what a stop leaves to a cycle."""
        self._cycles = cycles
        self._period = period
        self._stop_within = stop_within

    async def run(self, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> bool:
        """Recover, run one cycle, and go on until `stop` is flipped. False: what was in flight had to be cancelled.

        Ready (`task_status.started`) once the recovery and the first cycle have ended; what they raise comes before
        that. After a stop no cycle begins, and what is in flight, the recovery too, has `stop_within` seconds. Errors
        of the port leave as they are.
        """
        ready = False
        with stop.work(self._stop_within) as working:
            await self._cycles.recover()
            while not stop.stopped:
                began = trio.current_time()
                wait = await self._cycles.cycle()
                if not ready:
                    ready = True
                    task_status.started()
                with stop.intake():
                    await trio.sleep_until(began + self._period)
                    await self._cycles.changed(wait)
        if not ready:  # the stop came first: whoever waits for the start need not wait any longer
            task_status.started()
        return not working.cancelled_caught
