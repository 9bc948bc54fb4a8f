"""Durable queues: `Queue` enqueues, claims and works, and is a source of work for a `Worker`."""

# ruff: noqa: SLF001 - a queue, its handles and its port for the worker are one mechanism

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

import trio
from attrs import define, field

from actors.handlers import refuse_unfinished
from actors.ports import Interrupted, Outcome, Raised, Returned
from actors.stop import StopToken
from actors.unwinding import Alone, part, write_within
from actors.worker import Worker
from alkstore.context import Context, checked_stop, while_busy, write_on_leaving
from alkstore.countdown import Countdown
from alkstore.engines.bridge import autojump_held
from alkstore.engines.engine import Engine
from alkstore.errors import InvalidPayload, StoreBusy, StoreError
from alkstore.job import Failure, JobHandle, Stamp, settle
from alkstore.lease import Lease
from alkstore.names import check_name
from alkstore.payload import JSON
from alkstore.sql import jobs
from alkstore.sql.tx import Tx, queue_topic
from alkstore.values import (
    MAX_ID,
    SEVEN_DAYS_S,
    TEN_YEARS_S,
    Counts,
    Job,
    JobState,
    Seconds,
    integer,
    milliseconds,
    moment,
)

__all__ = ["Jobs", "Queue", "QueueSource", "cancel_job"]

Jobs: TypeAlias = list[Job]  # `Queue.list` hides the builtin inside the class

MANY_ITEMS = 100_000
CHECKED_AT_ONCE = 1_000
"""Payloads that are encoded before other tasks get their turn."""

MANY_BYTES = 64 * 1024 * 1024
PAGE_LIMIT = 1_000


async def cancel_job(context: Context, queue: str, id: int) -> bool:
    """Cancel the job `id` of `queue`; see `Queue.cancel_job`."""
    done = await context.engine.run(lambda tx: jobs.cancel(tx, queue, id), urgent=True)
    if done and (running := context.hands.jobs.get(id)) is not None:
        running.cancel_handler("the job was cancelled")
    return done


@define(eq=False)
class Queue:
    """A queue and what this handle stamps on the jobs it enqueues. Get one from `Store.queue`."""

    name: str
    _context: Context = field(repr=False)
    _stamp: Stamp

    # -------------------------------------------------------------------------------------------------- enqueue

    async def enqueue(
        self,
        payload: JSON,
        *,
        priority: int = 0,
        delay: Seconds | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        expires: Seconds | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store one job durably and return its id.

        Args:
            payload: a JSON value; what the handler gets equals it.
            priority: -100 to 100, higher first.
            delay: seconds until it may be claimed, 0 to ten years; or instead
            run_at: the moment from which it may be claimed, an aware datetime.
            max_attempts: 1 to 10,000; None: this handle's.
            expires: seconds after that moment until it may not be claimed any more; None: this handle's.
            key: at most one live job of the queue has it; enqueueing it again returns the id that is there.
            headers: a flat mapping from str to str that travels beside the payload.

        A checkpoint. Cancelled while it waits: nothing is stored; afterwards the id is returned.

        Raises:
            InvalidPayload, InvalidName, TypeError, ValueError: before anything is sent to the store.
            StoreError: as the store's state demands; nothing is stored, but for OutcomeUnknown.
        """
        job = self._stamp.job(
            self.name,
            payload,
            priority=priority,
            delay=delay,
            run_at=run_at,
            max_attempts=max_attempts,
            expires=expires,
            key=key,
            headers=headers,
        )
        return await self._context.engine.run(lambda tx: jobs.enqueue(tx, job), in_tx="tx.enqueue(queue, …)")

    async def enqueue_many(
        self,
        payloads: Iterable[JSON],
        *,
        priority: int = 0,
        delay: Seconds | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        expires: Seconds | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Store one job for each of `payloads`, all or none, and return their ids in order.

        Up to 100,000 items and 64 MiB; the options are those of `enqueue` and hold for every job. It is one
        transaction, and nobody else writes meanwhile: where leases are short, send a few thousand at a time.

        Raises:
            ValueError: too many, or too large altogether.
        """
        if isinstance(payloads, Mapping | str | bytes) or not isinstance(payloads, Iterable):
            raise TypeError(f"payloads must be an iterable of payloads, such as a list, not {payloads!r:.80}")
        news: list[jobs.NewJob] = []
        size = 0
        for index, payload in enumerate(payloads):
            if index == MANY_ITEMS:
                raise ValueError(f"enqueue_many takes up to {MANY_ITEMS:,} payloads at once; send them in parts")
            try:
                job = self._stamp.job(
                    self.name,
                    payload,
                    priority=priority,
                    delay=delay,
                    run_at=run_at,
                    max_attempts=max_attempts,
                    expires=expires,
                    headers=headers,
                )
            except InvalidPayload as error:
                raise InvalidPayload(f"payloads[{index}]: {error}") from None
            size += _bytes(job.payload) + _bytes(job.headers or "")
            if size > MANY_BYTES:
                raise ValueError(f"enqueue_many takes up to {MANY_BYTES:,} bytes of JSON at once; send them in parts")
            news.append(job)
            if len(news) % CHECKED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return await self._context.engine.run(
            lambda tx: jobs.enqueue_many(tx, news), in_tx="tx.enqueue(queue, …) for each"
        )

    # ---------------------------------------------------------------------------------------------------- claim

    async def claim(
        self, worker_id: str, limit: int = 1, *, lease: Seconds | None = None, wait: Seconds = 0
    ) -> list[JobHandle]:
        """Lease up to `limit` (1 to 1,000) due jobs to `worker_id` and return their handles.

        Order: priority descending, then run_at, then id. Jobs whose lease has run out are due again; one without an
        attempt left becomes a dead letter here. `lease` is in seconds, 0.1 to 7 days; None gives each job the
        visibility it was enqueued with. With `wait` (seconds, up to 7 days) it sleeps until there is a job or the
        time is over; an empty list means that there was none.

        A checkpoint. Cancelled: nothing is leased; what was claimed in that moment is given back.
        """
        check_name(worker_id, "worker")
        integer(limit, "limit", 1, 1_000)
        length = None if lease is None else milliseconds(lease, "lease", 0.1, SEVEN_DAYS_S)
        patience = Countdown(self._context.engine.clock, milliseconds(wait, "wait", 0, SEVEN_DAYS_S))
        return await Claims(self, worker_id, length).take(limit, patience)

    def jobs(self, worker_id: str, *, lease: Seconds | None = None) -> AsyncIterator[JobHandle]:
        """Yield claimed jobs one by one, waiting for work, for as long as they are asked for.

        A job is claimed when it is asked for, so leaving the loop leaves at most the one in hand to its lease. The
        arguments and each step are those of `claim`.
        """
        check_name(worker_id, "worker")
        return Claims(self, worker_id, None if lease is None else milliseconds(lease, "lease", 0.1, SEVEN_DAYS_S))

    async def _give_back_if_cancelled(self, claimed: list[Job]) -> None:
        """A claim that completes after its caller was cancelled must not leave jobs to their leases."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException as leaving:

            async def give_back() -> None:
                await self._context.engine.run(
                    lambda tx: [jobs.give_back(tx, job.id, job.fence, None, None) for job in claimed], urgent=True
                )

            await write_on_leaving(give_back, leaving, lambda: True)
            raise

    def _handle(self, job: Job, lease: int | None) -> JobHandle:
        assert job.lease_until is not None
        length = round(job.visibility * 1000) if lease is None else lease
        return JobHandle(job, self._context, Lease(length, moment(job.lease_until, "lease_until")))

    # ----------------------------------------------------------------------------------------------------- work

    async def work(
        self,
        handler: Callable[[JobHandle], object],
        *,
        stop: StopToken,
        concurrency: int = 1,
        timeout: Seconds | None = None,
        grace: Seconds = 30,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run `handler` for each job, up to `concurrency` at once, until `stop` is flipped and all is drained.

        The handler gets the `JobHandle`. Returning acknowledges the job; raising retries it; `Discard` makes it a
        dead letter and `Snooze` postpones it; a handler that settles the job itself has settled it. A plain function
        runs in a thread. The lease is renewed at a third of its length until the ack is committed; a handler whose
        lease is lost is cancelled.

        Args:
            handler: an async or a plain function of one `JobHandle`.
            stop: flipped, nothing more is claimed, handlers get `grace` seconds, are then cancelled, and their jobs go
                back with their attempt.
            concurrency: 1 to 1,000 jobs at once.
            timeout: seconds that one handler may run; None: no limit but a living lease.
            grace: seconds, 0 to 7 days.

        Cancelled: handlers are cancelled and their jobs go back, under a shield of bounded length. A StoreError
        leaves it, for its supervisor to see; if there are several, the first, with the others as notes.
        """
        source = QueueSource(self, f"worker-{secrets.token_hex(8)}")
        worker = Worker(
            source,
            handler,
            concurrency=integer(concurrency, "concurrency", 1, 1_000),
            timeout=None if timeout is None else milliseconds(timeout, "timeout", 0.001, SEVEN_DAYS_S) / 1000,
            grace=milliseconds(grace, "grace", 0, SEVEN_DAYS_S) / 1000,
            while_in_thread=autojump_held,
        )
        with Alone(StoreError):
            await worker.run(checked_stop(stop), task_status=task_status)

    async def _run_once(self, worker_id: str, delivery: Callable[[JobHandle], Awaitable[object]]) -> bool:
        """Claim one job, await `delivery` of it, and settle it; see `Outbox.run_once`."""
        handles = await self.claim(worker_id)
        if not handles:
            return False
        (handle,) = handles
        outcome: Outcome = Returned()
        leaving: BaseException | None = None
        try:
            refuse_unfinished(await delivery(handle))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this delivery's failure, and is stored as such
            outcome = Raised(error)
        except BaseException as error:  # noqa: BLE001 - raised again, once the job is settled
            leaving = error
            failure = part(error, lambda leaf: isinstance(leaf, Exception))
            outcome = Interrupted("cancellation") if failure is None else Raised(failure)
        settle = partial(QueueSource(self, worker_id).settle, handle, outcome)
        with Alone(StoreError):
            await write_within(handle.lease_remaining, "settling a message", settle, leaving)
        return True

    # --------------------------------------------------------------------------- looking, dead letters, pausing

    async def get_job(self, id: int) -> Job | None:
        """Return the job `id` of this queue, or None: it is acknowledged, pruned, or another queue's."""
        integer(id, "id", 0, MAX_ID)
        job = await self._context.engine.read(lambda tx: jobs.get(tx, id))
        return job if job is not None and job.queue == self.name else None

    async def list(self, state: JobState = "ready", after: int = 0, limit: int = 100) -> Jobs:
        """Return up to `limit` (1 to 1,000) jobs in `state`, by id; `after` is the last id of the page before."""
        if state not in ("delayed", "ready", "leased", "dead"):
            raise ValueError(f"state must be 'delayed', 'ready', 'leased' or 'dead', not {state!r}")
        integer(limit, "limit", 1, PAGE_LIMIT)
        integer(after, "after", 0, MAX_ID)
        return await self._context.engine.read(lambda tx: jobs.list_jobs(tx, self.name, state, after, limit))

    async def counts(self) -> Counts:
        """Return how many jobs are in each state. Costs time in proportion to their number."""
        return await self._context.engine.read(lambda tx: jobs.counts(tx, self.name))

    async def cancel_job(self, id: int) -> bool:
        """Make a delayed, ready or leased job a dead letter ``cancelled``; False: there is no such live job.

        A handler that has it is cancelled at once in this process, and at its next heartbeat in another.
        """
        integer(id, "id", 0, MAX_ID)
        return await cancel_job(self._context, self.name, id)

    async def dead(self, *, after: int = 0, limit: int = 100) -> Jobs:
        """Return a page of the dead letters; see `list`."""
        return await self.list("dead", after=after, limit=limit)

    async def redrive(self, id: int) -> bool:
        """Give a dead letter a new life: same id and fence, no attempts used, due now, no expiry.

        False: it is no dead letter of this queue, or a live job has taken its key.
        """
        integer(id, "id", 0, MAX_ID)
        return await self._context.engine.run(lambda tx: jobs.redrive(tx, self.name, id))

    async def redrive_all(self) -> int:
        """Redrive every dead letter, a page per transaction, and return how many. Cancelled: some are done."""
        done, after = 0, 0
        while True:
            start = after
            count, next_page = await self._context.engine.run(
                lambda tx, start=start: jobs.redrive_page(tx, self.name, start)  # type: ignore[misc]
            )
            done += count
            if next_page is None:
                return done
            after = next_page

    async def prune(self, older_than: Seconds) -> int:
        """Delete the dead letters that died at least `older_than` seconds ago and return how many.

        A page of 1,000 per transaction. Cancelled: some pages are done.
        """
        age = milliseconds(older_than, "older_than", 0, TEN_YEARS_S)
        return await self._in_pages(lambda tx: jobs.prune(tx, self.name, age))

    async def sweep_expired(self) -> int:
        """Make every expired job a dead letter and return how many. Claims do this too, for those they meet.

        A page of 1,000 per transaction. Cancelled: some pages are done.
        """
        return await self._in_pages(lambda tx: jobs.sweep_expired(tx, self.name))

    async def pause(self) -> bool:
        """Let no claim find anything, in any process, until `resume`; False: it was paused already."""
        return await self._context.engine.run(lambda tx: jobs.pause(tx, self.name))

    async def resume(self) -> bool:
        """End a pause and wake the claimers; False: it was not paused."""
        return await self._context.engine.run(lambda tx: jobs.resume(tx, self.name))

    async def _in_pages(self, work: Callable[[Tx], int]) -> int:
        done, count = 0, jobs.PAGE
        while count == jobs.PAGE:
            count = await self._context.engine.run(work)
            done += count
        return done


LOCKED_PAUSE_S = 0.05
"""Between two claims of what others have locked: nobody tells of the end of a lock."""


@define(eq=False)
class Claims:
    """The claims of one worker, one after the other, and the iterator of `Queue.jobs`.

    (An async generator would have to be closed by whoever leaves the loop.)
    """

    queue: Queue
    worker_id: str
    lease: int | None
    _more: bool = field(default=True, init=False)
    """Whether the last claim has left something to claim at once. If not, a look comes first: it takes no lock."""

    def __aiter__(self) -> Claims:
        return self

    async def __anext__(self) -> JobHandle:
        (handle,) = await self.take(1, None)
        return handle

    async def take(self, limit: int, patience: Countdown | None) -> list[JobHandle]:
        """Claim, and while there is nothing sleep until there may be, for as long as `patience` (None: for ever)."""
        engine, queue = self.queue._context.engine, self.queue
        seen = engine.feed.position()
        next_at = 0 if self._more else await self._look()
        while await self._may_find(seen, next_at, patience):
            seen = engine.feed.position()
            claimed = await engine.run(lambda tx: jobs.claim(tx, queue.name, self.worker_id, limit, self.lease))
            next_at = claimed.next_at
            self._more = self._has_come(next_at)
            if claimed.jobs:
                await queue._give_back_if_cancelled(claimed.jobs)
                return [queue._handle(job, self.lease) for job in claimed.jobs]
            if claimed.blocked:
                if patience is not None and patience.is_over():
                    return []
                with trio.move_on_after(LOCKED_PAUSE_S):  # or it was committed while this claim was under way
                    await engine.feed.moved_past(queue_topic(queue.name), seen, None)
        return []

    async def _may_find(self, seen: int, next_at: int | None, patience: Countdown | None) -> bool:
        """Sleep until a claim may find something: from `next_at` on, or after a change. False: `patience` is over.

        Woken, it looks: others may have been faster, or it was not about this queue. Only a change of this very queue
        by this process is worth a claim at once.
        """
        feed = self.queue._context.engine.feed
        while not self._has_come(next_at):
            if patience is not None and patience.is_over():
                return False
            ends = None if patience is None else patience.end()
            soonest = min((ms for ms in (next_at, ends) if ms is not None), default=None)
            if await feed.moved_past(queue_topic(self.queue.name), seen, soonest):
                return True
            seen = feed.position()
            next_at = await self._look()
        return True

    async def _look(self) -> int | None:
        return await self.queue._context.engine.read(lambda tx: jobs.look(tx, self.queue.name))

    def _has_come(self, moment: int | None) -> bool:
        return moment is not None and moment <= self.queue._context.engine.clock.now_ms()


@define(eq=False)
class QueueSource:
    """The port through which a `Worker` works on a queue."""

    queue: Queue
    worker_id: str
    _claims: Claims = field(init=False, repr=False)
    _in_hand: WeakSet[JobHandle] = field(factory=WeakSet, init=False, repr=False)

    @_claims.default
    def _claims_with_their_own_leases(self) -> Claims:
        return Claims(self.queue, self.worker_id, None)

    async def take(self, limit: int) -> Sequence[JobHandle]:
        """Take; a busy store is asked again while there are jobs in hand that an error would interrupt."""
        return await while_busy(lambda: self._claims.take(limit, None), self.holds_any)

    def holds_any(self) -> bool:
        """Whether there are jobs in hand that an error would interrupt."""
        return any(map(_is_alive, self._in_hand))

    async def renew(self, works: Sequence[JobHandle]) -> Collection[JobHandle]:
        """Renew; a store that is busy or away is asked again as long as any of the leases lives."""
        try:
            renewals = await while_busy(
                lambda: self._engine.run(lambda tx: [work._renew(tx, None) for work in works], urgent=True),
                lambda: any(map(_is_alive, works)),
                repeatable=True,
            )
        except StoreBusy:
            if all(work._settling for work in works):
                return works  # their leases are over, and who settles them is told the same
            raise
        lost = []
        for work, renewal in zip(works, renewals, strict=True):
            if work._renewed(renewal):
                continue
            work._refused = True
            if not work._settled:
                work._cancelled = True
                lost.append(work)
                self.queue._context.publish("lost", self.queue.name, id=work.id)
        return lost

    def lease(self, work: JobHandle) -> float:
        return work._lease.length / 1000

    def remaining(self, work: JobHandle) -> float:
        return math.inf if work._done else work._lease.remaining(self._engine.clock.now_ms())

    def renew_in(self, work: JobHandle) -> float:
        over = work._done or (work._refused and work._settling)  # nothing is left to renew, whoever has it
        return math.inf if over else work._lease.renew_in(self._engine.clock.now_ms())

    async def pause(self, seconds: float) -> None:
        await self._engine.feed.pause(seconds)

    async def settle(self, work: JobHandle, outcome: Outcome) -> None:
        if work._done:
            if isinstance(outcome, Raised):
                self.raised(work, outcome.error)
        elif not await settle(work, outcome) and not work._settled:
            self.queue._context.publish("lost", self.queue.name, id=work.id)

    def started(self, work: JobHandle, cancel: Callable[[str], None], look: Callable[[], None]) -> None:
        work._cancel = cancel
        work._lease.on_changed = look  # the handler may have extended its lease, cut it short, or settled the job
        self.queue._context.hands.jobs[work.id] = work
        self._in_hand.add(work)

    def tell(self, work: JobHandle, reason: str) -> None:
        work._cancelled = True

    def lapsed(self, work: JobHandle) -> None:
        work._cancelled = True
        self.queue._context.publish("lost", self.queue.name, id=work.id)

    def raised(self, work: JobHandle, error: BaseException) -> None:
        failure = Failure.of(error, f"job {work.id} of {work.queue}, settled or lost before")
        if not failure.discard and failure.snooze is None:
            self.queue._context.publish("raised", self.queue.name, id=work.id, error=failure.text)

    def abandoned(self, work: JobHandle, reason: str) -> None:
        self.queue._context.publish("handler_abandoned", self.queue.name, id=work.id, reason=reason)

    @property
    def _engine(self) -> Engine:
        return self.queue._context.engine


def _is_alive(work: JobHandle) -> bool:
    """Whether the job is still to be settled, and its lease lives."""
    return not work._done and work.lease_remaining > 0


def _bytes(text: str) -> int:
    return len(text if text.isascii() else text.encode())
