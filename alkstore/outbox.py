"""The transactional outbox: messages that are stored together with what they tell of, and delivered afterwards."""

# ruff: noqa: SLF001 - an outbox works on a queue of its own, and both are one mechanism

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import trio
from attrs import define, field

from actors.deliverer import Deliverer, checked_delivery
from actors.stop import StopToken
from actors.unwinding import Alone
from alkstore.context import Context, checked_stop
from alkstore.errors import StoreError
from alkstore.job import JobHandle, Stamp
from alkstore.names import RESERVED_PREFIX, check_name
from alkstore.payload import JSON
from alkstore.queue import Jobs, Queue, QueueSource
from alkstore.sql import jobs
from alkstore.values import SEVEN_DAYS_S, Counts, Job, Seconds, integer, milliseconds

__all__ = ["OUTBOX_STAMP", "Outbox", "outbox_key", "outbox_queue"]

OUTBOX_STAMP = Stamp.of(visibility=60, max_attempts=5, backoff=5, expires=None)
"""The derived set 60/5/5: a delivery has a minute, a message five attempts, the first retry waits five seconds."""


def outbox_queue(name: str) -> str:
    """Return the queue behind the outbox `name`: reserved, so that no enqueue into a queue can reach it."""
    return f"{RESERVED_PREFIX}outbox:{check_name(name, 'outbox')}"


def outbox_key(key: str | None) -> str:
    """Return the idempotency key of a message: its own, or one made for it."""
    return secrets.token_hex(16) if key is None else check_name(key, "key")


@define(eq=False)
class Outbox:
    """Messages on their way out of this system, delivered at least once. Get one from `Store.outbox`."""

    name: str
    _context: Context = field(repr=False)
    _queue: Queue = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._queue = Queue(outbox_queue(self.name), self._context, OUTBOX_STAMP)

    async def enqueue(
        self,
        payload: JSON,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
    ) -> int:
        """Store one message durably and return its id.

        `key` is its idempotency key: the receiver sees the same one at every attempt and can recognise a duplicate.
        At most one message that is not delivered has it; enqueueing it again returns the id that is there. None: one
        is made. To store a message together with what it tells of use `tx.outbox_enqueue` or `alkstore.seam`.

        A checkpoint. Cancelled while it waits: nothing is stored.
        """
        job = OUTBOX_STAMP.job(
            self._queue.name, payload, key=outbox_key(key), headers=headers, delay=delay, priority=priority
        )
        return await self._context.engine.run(lambda tx: jobs.enqueue(tx, job), in_tx="tx.outbox_enqueue(name, …)")

    async def run_once(self, worker_id: str, delivery: Callable[[JobHandle], Awaitable[object]]) -> bool:
        """Claim one message and deliver it; True: one was processed, False: there is nothing to do now.

        Returning from `delivery` acknowledges the message; an Exception retries it with its backoff. The lease of 60 s
        is not renewed meanwhile, and `delivery` is not bounded by it: a long one calls ``handle.heartbeat()``. True
        also when the lease was lost meanwhile: then somebody else delivers it again.

        Cancelled: the message goes back with its attempt, under a shield of bounded length. TypeError, and nothing is
        claimed: `delivery` is not an async function.
        """
        return await self._queue._run_once(worker_id, checked_delivery(delivery))

    async def deliver(
        self,
        delivery: Callable[[JobHandle], Awaitable[object]],
        *,
        stop: StopToken,
        concurrency: int = 1,
        grace: Seconds = 30,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Deliver messages until `stop` is flipped, sleeping while there are none.

        Each is bounded by its lease of 60 s: a delivery that takes longer is cancelled before somebody else may start
        it, unless it calls ``handle.heartbeat()``. With `concurrency` 1 messages leave in the order in which they were
        enqueued, except those that wait for a retry, and as long as the clock does not step back; no order is
        promised beyond that. A message's failure delays only that message.

        At a stop deliveries have `grace` seconds. Cancelled: they are cancelled, and their messages go back.
        """
        source = OutboxSource(self._queue, f"deliverer-{secrets.token_hex(8)}")
        deliverer = Deliverer(
            source,
            delivery,
            concurrency=integer(concurrency, "concurrency", 1, 1_000),
            grace=milliseconds(grace, "grace", 0, SEVEN_DAYS_S) / 1000,
        )
        with Alone(StoreError):
            await deliverer.run(checked_stop(stop), task_status=task_status)

    async def get_message(self, id: int) -> Job | None:
        """Return a message that is not delivered yet, or a dead letter; None: it is delivered or pruned."""
        return await self._queue.get_job(id)

    async def counts(self) -> Counts:
        """Return how many messages are in each state."""
        return await self._queue.counts()

    async def dead(self, *, after: int = 0, limit: int = 100) -> Jobs:
        """Return a page of the dead letters by id; `after` is the last id of the page before."""
        return await self._queue.dead(after=after, limit=limit)

    async def redrive(self, id: int) -> bool:
        """Give a dead letter a new life, due now, with the same key; False: it is none, or its key is taken."""
        return await self._queue.redrive(id)

    async def redrive_all(self) -> int:
        """Redrive every dead letter and return how many."""
        return await self._queue.redrive_all()

    async def prune(self, older_than: Seconds) -> int:
        """Delete the dead letters that died at least `older_than` seconds ago and return how many."""
        return await self._queue.prune(older_than)


@define(eq=False)
class OutboxSource(QueueSource):
    """The port of a `Deliverer`: as a queue's, but no lease is renewed for a delivery."""

    async def renew(self, works: Sequence[JobHandle]) -> Collection[JobHandle]:
        raise AssertionError("a delivery's lease is its own to renew")

    def renew_in(self, work: JobHandle) -> float:
        return math.inf
