"""Jobs: what is stamped on one, a `JobHandle` for one claim of it, and what becomes of it when its handler ends."""

# ruff: noqa: SLF001 - a handle and what settles it are one mechanism

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from attrs import define, field, frozen

from actors.ports import Interrupted, Outcome, Raised, Returned
from actors.unwinding import leaves, shown
from alkstore.context import Context, while_busy
from alkstore.errors import OutcomeUnknown
from alkstore.lease import Lease, Renewal
from alkstore.names import check_name
from alkstore.payload import JSON, describe, encode, encode_headers, storable
from alkstore.sql import jobs
from alkstore.sql.tx import Tx
from alkstore.values import SEVEN_DAYS_S, TEN_YEARS_S, Job, Seconds, integer, milliseconds, moment

__all__ = ["Discard", "Failure", "JobHandle", "Snooze", "Stamp", "settle"]

logger = logging.getLogger("alkstore.worker")
"""Shows the traceback of a handler that failed; its text is stored with the job, and told as an event."""


class Discard(Exception):
    """Raised by a handler: do not try this job again. It becomes a dead letter at once."""


class Snooze(Exception):
    """Raised by a handler: not now, but in `delay` seconds; the attempt does not count."""

    def __init__(self, delay: Seconds) -> None:
        super().__init__(f"snoozed for {delay} s")
        self.delay = milliseconds(delay, "delay", 0, TEN_YEARS_S)


@frozen
class Stamp:
    """What a queue handle stamps on the jobs it enqueues; the lengths are in milliseconds."""

    visibility: int
    max_attempts: int
    backoff: int
    expires: int | None

    @classmethod
    def of(cls, visibility: Seconds, max_attempts: int, backoff: Seconds, expires: Seconds | None) -> Stamp:
        """Validate and convert; ValueError or TypeError names the option, the value and the range."""
        return cls(
            visibility=milliseconds(visibility, "visibility", 0.1, SEVEN_DAYS_S),
            max_attempts=integer(max_attempts, "max_attempts", 1, 10_000),
            backoff=milliseconds(backoff, "backoff", 0, 3_600),
            expires=None if expires is None else milliseconds(expires, "expires", 0, TEN_YEARS_S),
        )

    def job(
        self,
        queue: str,
        payload: JSON,
        *,
        priority: int = 0,
        delay: Seconds | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        expires: Seconds | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> jobs.NewJob:
        """Validate everything that an enqueue takes and return the job to be; nothing is sent to the store."""
        if delay is not None and run_at is not None:
            raise ValueError("give either delay or run_at, not both")
        return jobs.NewJob(
            queue=queue,
            payload=encode(payload),
            visibility=self.visibility,
            max_attempts=self.max_attempts
            if max_attempts is None
            else integer(max_attempts, "max_attempts", 1, 10_000),
            backoff=self.backoff,
            headers=encode_headers(headers),
            priority=integer(priority, "priority", -100, 100),
            delay=0 if delay is None else milliseconds(delay, "delay", 0, TEN_YEARS_S),
            run_at=None if run_at is None else moment(run_at, "run_at"),
            expires=self.expires if expires is None else milliseconds(expires, "expires", 0, TEN_YEARS_S),
            key=None if key is None else check_name(key, "key"),
        )


@define(eq=False)
class JobHandle:
    """One claim of a job: what to do, and how to say what became of it. Guarded by its `fence` and its lease."""

    job: Job
    """The job as it stood when it was claimed."""
    _context: Context = field(repr=False)
    _lease: Lease = field(repr=False)
    _cancelled: bool = field(default=False, init=False, repr=False)
    _settling: int = field(default=0, init=False, repr=False)
    _refused: bool = field(default=False, init=False, repr=False)
    """Whether the worker was told that the lease is over: it is, or a finaliser has won whose answer was lost."""
    _done: bool = field(default=False, init=False, repr=False)
    _cancel: Callable[[str], None] | None = field(default=None, init=False, repr=False)

    @property
    def id(self) -> int:
        return self.job.id

    @property
    def queue(self) -> str:
        return self.job.queue

    @property
    def payload(self) -> Any:
        return self.job.payload

    @property
    def headers(self) -> Mapping[str, str]:
        return self.job.headers

    @property
    def key(self) -> str | None:
        return self.job.key

    @property
    def attempt(self) -> int:
        """Which attempt this is: 1 for the first."""
        return self.job.attempt

    @property
    def max_attempts(self) -> int:
        return self.job.max_attempts

    @property
    def fence(self) -> int:
        """Grows by one with each claim of this job: what the handler writes to can refuse a smaller one."""
        return self.job.fence

    @property
    def schedule(self) -> str | None:
        """The schedule that fired it, if one did."""
        return self.job.schedule

    @property
    def boundary(self) -> datetime | None:
        """The boundary for which its schedule fired it."""
        return self.job.boundary

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop: the job was cancelled, its lease lost, or the worker is stopping.

        For plain functions, which cannot be cancelled: return early by raising ``Snooze(0)``, and the job goes back.
        """
        return self._cancelled

    @property
    def lease_remaining(self) -> float:
        """Seconds of lease left by the store's clock; 0 once it is over."""
        return max(self._lease.remaining(self._context.engine.clock.now_ms()), 0.0)

    async def heartbeat(self, lease: Seconds | None = None) -> bool:
        """Extend the lease to `lease` seconds from now (None: as long as before); False: it is over.

        A lease that has ended is never revived. A checkpoint. Cancelled while it waits: nothing changed.
        """
        length = None if lease is None else milliseconds(lease, "lease", 0.1, SEVEN_DAYS_S)
        try:
            renewal = await self._context.engine.run(lambda tx: self._renew(tx, length), urgent=True)
        except OutcomeUnknown:
            self._lease.doubt(length, self._context.engine.clock.now_ms())
            raise
        renewed = self._renewed(renewal)
        self._cancelled = self._cancelled or not (renewed or self._settled)
        return renewed

    async def ack(self) -> bool:
        """The job is done: delete it. False: the lease was not ours any more, nothing changed."""
        return await self._settle(lambda tx: jobs.ack(tx, self.id, self.fence), patient=False)

    async def retry(self, error: str | BaseException | None = None, delay: Seconds | None = None) -> bool:
        """The attempt failed: make the job ready again after `delay` seconds, or make it a dead letter.

        Without a delay: backoff × 2^(attempt-1) seconds, 3,600 at most. With its attempts used up it becomes a dead
        letter. False: the lease was not ours any more, nothing changed.
        """
        text = _error_text(error)
        length = None if delay is None else milliseconds(delay, "delay", 0, TEN_YEARS_S)
        return await self._settle(lambda tx: jobs.retry(tx, self.id, self.fence, text, length), patient=False)

    async def fail(self, error: str | BaseException | None = None) -> bool:
        """The job cannot be done: make it a dead letter at once. False: the lease was not ours any more."""
        text = _error_text(error)
        return await self._settle(lambda tx: jobs.fail(tx, self.id, self.fence, text, "failed"), patient=False)

    async def snooze(self, delay: Seconds) -> bool:
        """Not now: make the job ready again in `delay` seconds, with its attempt. False: not ours any more."""
        length = milliseconds(delay, "delay", 0, TEN_YEARS_S)
        return await self._settle(lambda tx: jobs.give_back(tx, self.id, self.fence, None, length), patient=False)

    def cancel_handler(self, reason: str) -> None:
        """Cancel the handler of a worker that has this job; see `Queue.cancel_job`."""
        if self._cancel is not None:
            self._cancelled = True
            self._cancel(reason)

    async def _settle(self, work: Callable[[Tx], bool], *, patient: bool = True, repeatable: bool = False) -> bool:
        """Run one finaliser; there may be others at once, and any number after the one that wins.

        A patient one is run again while the store is busy, as long as the lease lives: what a handler has finished
        must not be lost because somebody else writes for a while. `repeatable` is as for `while_busy`.
        """
        self._settling += 1
        try:
            done = await while_busy(
                lambda: self._context.engine.run(work, urgent=True),
                lambda: patient and self.lease_remaining > 0,
                repeatable=repeatable,
            )
        finally:
            self._settling -= 1
        self._done = self._done or done
        if self._refused or (done and not patient):  # by the handler, which may go on
            self._lease.changed()
        return done

    @property
    def _settled(self) -> bool:
        """Whether a finaliser has won, or is under way: then a refused renewal does not mean a lost lease.

        But one that is under way may still come to nothing, so the lease is renewed until it has won.
        """
        return self._done or self._settling > 0

    def _renew(self, tx: Tx, lease: int | None) -> Renewal:
        return Renewal(jobs.heartbeat(tx, self.id, self.fence, lease))

    def _renewed(self, renewal: Renewal) -> bool:
        return self._lease.accept(renewal)


async def settle(work: JobHandle, outcome: Outcome) -> bool:
    """Say what became of a job; False: the lease was not ours any more."""
    match outcome:
        case Returned():
            return await work._settle(lambda tx: jobs.ack(tx, work.id, work.fence))
        case Interrupted(reason):
            text = storable(f"interrupted by {reason}")
            return await work._settle(lambda tx: jobs.give_back(tx, work.id, work.fence, text, None))
        case Raised(error):
            return await work._settle(_after_failure(work, error))


def _after_failure(work: JobHandle, error: BaseException) -> Callable[[Tx], bool]:
    """What a handler's error makes of its job."""
    failure = Failure.of(error, f"job {work.id} of {work.queue}")
    if failure.discard:
        return lambda tx: jobs.fail(tx, work.id, work.fence, failure.text, "discarded")
    if failure.snooze is not None:
        return lambda tx: jobs.give_back(tx, work.id, work.fence, None, failure.snooze)
    return lambda tx: jobs.retry(tx, work.id, work.fence, failure.text, None)


@frozen
class Failure:
    """What a handler has said by what it has raised."""

    text: str
    """Names every error in it."""
    discard: bool
    """There is a `Discard` in it."""
    snooze: int | None
    """For how many ms it wants to be left alone, if it is `Snooze` and nothing else."""

    @classmethod
    def of(cls, error: BaseException, whose: str | None) -> Failure:
        """Read `error`, whatever its own code does. Logged as a failure of `whose` handler, unless that is None."""
        try:
            failure = cls(describe(error), _wants_discard(error), _wants_snooze(error))
        except Exception as broken:  # noqa: BLE001 - a failure that cannot be read is a failure all the same
            text = storable(f"the handler failed, and its error cannot be read: {shown(broken)}")
            failure = cls(text, discard=False, snooze=None)
        is_news = isinstance(error, Exception)  # what is more than that leaves the worker, for everybody to see
        if whose is not None and is_news and not failure.discard and failure.snooze is None:
            try:
                logger.warning("%s: its handler failed", whose, exc_info=error)
            except Exception:  # noqa: BLE001 - its traceback cannot be written, as when it is nested too deeply
                logger.warning("%s: its handler failed: %s", whose, failure.text)
        return failure


def _wants_discard(error: BaseException) -> bool:
    return any(isinstance(leaf, Discard) for leaf in leaves(error))


def _wants_snooze(error: BaseException) -> int | None:
    parts = list(leaves(error))
    delays = [_delay(leaf) for leaf in parts if isinstance(leaf, Snooze)]
    return max(delays) if len(delays) == len(parts) else None


def _delay(snooze: Snooze) -> int:
    """Its delay in ms; 0 for a subclass that has not called `Snooze.__init__`."""
    delay = getattr(snooze, "delay", 0)
    return min(max(delay, 0), TEN_YEARS_S * 1000) if type(delay) is int else 0


def _error_text(error: str | BaseException | None) -> str | None:
    if error is None:
        return None
    return describe(error) if isinstance(error, BaseException) else storable(error)
