"""Worker: takes work up to its free slots, runs it in a scope, keeps its lease alive, settles it, drains."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, cast

import trio

from actors.handlers import HandlerTimeout, PlainCall, check_takes_one, is_async, refuse_unfinished
from actors.keeper import InHand, Keeper
from actors.ports import Interrupted, Outcome, Raised, Returned, Work, WorkSource
from actors.stop import StopToken
from actors.unwinding import Alone, part, write_within

MAX_CONCURRENCY = 1_000  # what one take may ask a store for
MAX_SECONDS = 7 * 24 * 3600.0  # as long as the longest lease


class Worker(Generic[Work]):
    """Runs a handler for each work of a source. Holds only options: each `run` is on its own."""

    def __init__(
        self,
        source: WorkSource[Work],
        handler: Callable[[Work], object],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
        grace: float = 30.0,
        while_in_thread: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Validate the options; nothing is taken yet.

        - `handler`: an async function of one work, or a plain one, which runs in a thread of this worker's own
        - `concurrency`: works in hand at once, 1 … 1,000
        - `timeout`: seconds that one handler may run, more than 0 … 7 days; None: no limit but the lease
        - `grace`: seconds that handlers may go on after a stop, 0 … 7 days
        - `while_in_thread`: entered for as long as a plain handler is waited for

        Raises TypeError or ValueError, naming option, value and range.
        """
        self.source = source
        self.handler = handler
        self.is_async = is_async(handler)
        check_takes_one(handler)
        self.concurrency = _whole("concurrency", concurrency, 1, MAX_CONCURRENCY)
        self.timeout = math.inf if timeout is None else _seconds("timeout", timeout)
        if self.timeout == 0:
            raise ValueError(f"timeout must be more than 0 seconds (None: no limit), not {timeout!r}")
        self.grace = _seconds("grace", grace)
        self.while_in_thread = while_in_thread

    async def run(self, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Work until `stop` is flipped and what was in hand is settled; at once if it is flipped already.

        Ready (`task_status.started`) when it begins to take. After a stop nothing is taken, handlers have the
        grace, are then cancelled, and their works go back. Leases are renewed until the last settle has ended.

        A work is settled as Returned, Raised or Interrupted; the store has as long for it as the lease lives, and 15 s
        more, and from a cancellation on 15 s, under a shield. It is not settled, but
        left to its lease, when the lease was lost or the work cancelled, and when a plain handler was abandoned in
        its thread (after the grace, its timeout, a lost lease or a cancellation); it holds its slot until it ends.

        Cancelled, or failing: handlers are cancelled and their works go back. Raises the store's errors (from take,
        renew, settle; trio.TooSlowError for a settle that never ends) and a handler's SystemExit or
        KeyboardInterrupt, of several such the first; a single error as itself, never in a group of ours.
        """
        if stop.stopped:
            task_status.started()
            await trio.lowlevel.checkpoint()
            return
        await _Shift(self, stop).run(task_status)


class _Shift(Generic[Work]):
    """One run of a worker, from start to stop.

    KeyboardInterrupt is kept out of everything but the handler: it must not fall between a handler's end and its
    settle.
    """

    def __init__(self, worker: Worker[Work], stop: StopToken) -> None:
        self._worker = worker
        self._source = worker.source
        self._stop = stop
        self._keeper = Keeper(worker.source)
        self._free = worker.concurrency
        self._freed = trio.lowlevel.ParkingLot()
        # Never trio's default limiter: handlers that wait for it while they hold it would wait for ever.
        self._threads = trio.CapacityLimiter(worker.concurrency)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        with Alone(KeyboardInterrupt, SystemExit):
            async with trio.open_nursery(strict_exception_groups=True) as keeping:
                keeping.start_soon(self._keeper.run)
                try:
                    with self._stop.work(self._worker.grace):
                        async with trio.open_nursery(strict_exception_groups=True) as handlers:
                            task_status.started()
                            with self._stop.intake():
                                await self._take(handlers)
                            self._tell_plain_handlers("shutdown")
                finally:
                    self._keeper.stop()

    @trio.lowlevel.enable_ki_protection
    async def _take(self, handlers: trio.Nursery) -> None:
        while True:
            while not self._free:
                await self._freed.park()
            for work in await self._source.take(self._free):
                self._free -= 1
                hand = InHand(work)
                self._keeper.keep(hand)
                self._source.started(work, hand.cancel, self._keeper.look)
                handlers.start_soon(self._job, hand)

    @trio.lowlevel.enable_ki_protection
    async def _job(self, hand: InHand[Work]) -> None:
        try:
            # no name for it here: its traceback holds this frame, and a circle would be left to the collector
            await self._settle(hand, *await self._attempt(hand))
        finally:
            self._keeper.drop(hand)
            if not hand.abandoned:
                self._free_slot()

    async def _settle(self, hand: InHand[Work], outcome: Outcome | None, leaving: BaseException | None) -> None:
        """Settle while the lease lives; cancelled meanwhile, or before, under a shield of bounded length."""
        if outcome is None:
            if leaving is not None:
                raise leaving
            return
        settle = partial(self._source.settle, hand.work, outcome)
        await write_within(self._source.remaining(hand.work), "settling a work", settle, leaving)

    async def _attempt(self, hand: InHand[Work]) -> tuple[Outcome | None, BaseException | None]:
        """Run the handler. What to settle (None: nothing), and what must leave this task (None: nothing)."""
        if self._stop.stopped:  # taken in the moment of the stop
            return Interrupted("shutdown"), None
        hand.limit_to(self._worker.timeout)
        try:
            with hand.scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                if self._worker.is_async:
                    await _call(self._worker.handler, hand.work)
                else:
                    await self._call_in_thread(hand)
        except BaseException as error:  # noqa: BLE001  sorted; what is not the handler's leaves with the task
            return self._sorted(hand, error)
        if hand.cancelled is not None or hand.abandoned:
            return None, None
        if not hand.scope.cancelled_caught:
            return Returned(), None
        if hand.timed_out:
            return Raised(HandlerTimeout(self._why(hand))), None
        self._source.lapsed(hand.work)
        return None, None

    def _sorted(self, hand: InHand[Work], error: BaseException) -> tuple[Outcome | None, BaseException | None]:
        """As `_attempt`, for what has left the handler: a failure, an interruption, or both in a group."""
        leaving = part(error, lambda leaf: not isinstance(leaf, Exception))
        if hand.cancelled is not None or hand.abandoned:
            if (failure := part(error, lambda leaf: isinstance(leaf, Exception))) is not None:
                self._source.raised(hand.work, failure)
            return None, leaving
        if leaving is None:
            failure = error
        else:
            failure = part(error, lambda leaf: not isinstance(leaf, (trio.Cancelled, KeyboardInterrupt)))
        if failure is None:
            by_user = part(error, lambda leaf: isinstance(leaf, KeyboardInterrupt))
            return Interrupted("KeyboardInterrupt" if by_user else self._why(hand)), leaving
        if hand.timed_out:
            failure.add_note(f"raised after {self._why(hand)}")
        return Raised(failure), leaving

    async def _call_in_thread(self, hand: InHand[Work]) -> None:
        call = PlainCall(partial(self._worker.handler, hand.work), ended_late=partial(self._ended_late, hand))
        try:
            with self._worker.while_in_thread():
                await call.run(self._threads)
        except trio.Cancelled:
            if call.abandoned:
                hand.abandoned = True
                self._source.tell(hand.work, self._why(hand))
                self._source.abandoned(hand.work, self._why(hand))
            raise

    def _why(self, hand: InHand[Work]) -> str:
        """Why the handler was cancelled."""
        if hand.cancelled is not None:
            return hand.cancelled
        if hand.timed_out:
            return f"the handler ran longer than its timeout of {self._worker.timeout:g} s"
        if hand.scope.cancel_called:
            return "the lease is about to end"
        return "shutdown" if self._stop.stopped else "cancellation"

    def _tell_plain_handlers(self, reason: str) -> None:
        if not self._worker.is_async:
            for hand in self._keeper:
                self._source.tell(hand.work, reason)

    def _ended_late(self, hand: InHand[Work], error: BaseException | None) -> None:
        if error is not None:
            self._source.raised(hand.work, error)
        self._free_slot()

    def _free_slot(self) -> None:
        self._free += 1
        self._freed.unpark()


@trio.lowlevel.disable_ki_protection
async def _call(handler: Callable[[Work], object], work: Work) -> None:
    refuse_unfinished(await cast(Awaitable[object], handler(work)))


def _whole(option: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} must be a whole number from {low:,} to {high:,}, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{option} must be from {low:,} to {high:,}, not {value!r}")
    return value


def _seconds(option: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} must be a number of seconds from 0 to {MAX_SECONDS:,.0f}, not {value!r}")
    if not 0 <= value <= MAX_SECONDS:  # NaN fails this too
        raise ValueError(f"{option} must be from 0 to {MAX_SECONDS:,.0f} seconds, not {value!r}")
    return value
