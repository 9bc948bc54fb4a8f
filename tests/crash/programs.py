"""The programs of a campaign: clients, workers, deliverers and runners, which write down in the ledger what they do.

What the library does by itself (it renews, acknowledges, retries) is written down by wrapping its methods here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from unittest import mock

import trio
from attrs import define, field

from actors.ports import Outcome, Raised, Returned
from alkstore import Discard, JobHandle, LeadershipLost, LockHandle, Snooze, StopToken, Store, job, open_store, queue
from alkstore.lease import Renewal
from alkstore.queue import Queue, QueueSource
from alkstore.schedule import SchedulerLease
from tests.crash.child import Talk
from tests.crash.clocks import SharedClock
from tests.crash.ledger import Ledger
from tests.crash.points import KillPoint
from tests.crash.watching import watch

__all__ = ["LEASE_S", "OUTBOX", "QUEUE", "TTL_S", "client", "deliverer", "runner", "worker"]

QUEUE, OUTBOX = "work", "mail"

LEASE_S = 1.0
"""Of the clients' jobs: shorter than the longest stop, so that leases are lost all the time."""

TTL_S = 1.5
"""Of the leader."""

PATIENCE_S = 120.0
"""Somebody who is stopped while it holds the write lock makes all others wait, and nobody may give up for that."""

GRACE_S = 0.5

DEEDS = {
    "ok": 55,
    "slow": 8,
    "stubborn": 12,
    "fails once": 6,
    "poison": 2,
    "discarded": 2,
    "snoozes": 5,
    "acks itself": 10,
}
"""What a handler does with a job, and how many in a hundred are so. A stubborn one cannot be cancelled when its lease
is lost, and acknowledges the job all the same: that has to be refused."""


@define(eq=False)
class Program:
    """What every program has: a name in the ledger, a point where it may die, and dice."""

    ledger: Ledger
    point: KillPoint
    dice: random.Random
    stop: StopToken = field(factory=StopToken)

    @asynccontextmanager
    async def open_store(self, talk: Talk, path: str, clock: str) -> AsyncIterator[Store]:
        """Open the store until a signal flips `stop`, with all that happens in it written down."""
        logging.getLogger("alkstore.worker").setLevel(logging.CRITICAL)  # handlers fail here all the time
        watch(self.point)
        _write_down(self.ledger, self.point)
        async with (
            open_store(
                path,
                clock=SharedClock(clock),
                leadership_ttl=TTL_S,
                busy_timeout=PATIENCE_S,
                transaction_timeout=PATIENCE_S,
            ) as store,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(self.stop.stop_on_signals)
            talk.say("working")
            yield store
            nursery.cancel_scope.cancel()

    async def handle(self, job: JobHandle) -> None:
        """Do with a job what its payload says."""
        self.ledger.write(
            "started",
            id=job.id,
            fence=job.fence,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            token=job.payload["token"],
            key=job.key,
            schedule=job.schedule,
            boundary=None if job.boundary is None else _ms(job.boundary.timestamp()),
        )
        try:
            await self._do(job)
        except Exception as error:
            self.ledger.write("raised", id=job.id, fence=job.fence, error=repr(error))
            raise

    async def _do(self, job: JobHandle) -> None:
        deed = job.payload["do"]
        with trio.CancelScope(shield=deed == "stubborn"):
            await trio.sleep(self.dice.uniform(0, 0.1) if deed not in ("slow", "stubborn") else 1.5 * LEASE_S)
        if deed == "poison" or (deed == "fails once" and job.attempt == 1):
            raise ValueError(deed)
        if deed == "discarded":
            raise Discard(deed)
        if deed == "snoozes" and job.fence == 1:
            raise Snooze(0.1)
        self.ledger.write("ended", id=job.id, fence=job.fence)
        if deed in ("acks itself", "stubborn"):
            with trio.CancelScope(shield=True):
                await job.ack()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _program(ledger: str, name: str, seed: int) -> Program:
    book = Ledger(ledger, name)
    return Program(book, KillPoint.from_environment(book), random.Random(seed))  # noqa: S311 - a test's dice


async def client(talk: Talk, path: str, clock: str, ledger: str, name: str, seed: int) -> None:
    """Store jobs and messages in every way there is, one after the other."""
    program = _program(ledger, name, seed)
    dice = program.dice
    async with program.open_store(talk, path, clock) as store:
        ways = {_one: 50, _many: 15, _keyed: 10, _message: 10, _order: 15}
        with program.stop.intake():
            number = 0
            while True:
                (way,) = dice.choices(list(ways), list(ways.values()))
                number += 1
                with trio.CancelScope(shield=True):
                    await way(program, store, f"{name}/{seed}/{number}")
                await trio.sleep(dice.expovariate(1 / 0.06))


async def _one(program: Program, store: Store, token: str) -> None:
    await _ask(program, [token], lambda payloads: _listed(_queue(store).enqueue(payloads[0])))


async def _many(program: Program, store: Store, token: str) -> None:
    await _ask(program, [f"{token}.{n}" for n in range(3)], lambda payloads: _queue(store).enqueue_many(payloads))


async def _keyed(program: Program, store: Store, token: str) -> None:
    """One of few keys, so that there often is a live job with it already."""
    key = f"key {program.dice.randrange(5)}"
    await _ask(program, [key], lambda payloads: _listed(_queue(store).enqueue(payloads[0], key=key)))


async def _message(program: Program, store: Store, token: str) -> None:
    await _ask(program, [token], lambda payloads: _listed(store.outbox(OUTBOX).enqueue(payloads[0])))


async def _order(program: Program, store: Store, token: str) -> None:
    """A row of our own and a message that tells of it: both, or neither."""
    token = f"order {token}"

    async def order(payloads: Sequence[dict[str, str]]) -> list[int]:
        async with store.transaction() as tx:
            await tx.execute("INSERT INTO orders (token) VALUES (?)", (token,))
            program.point.passed("inside transaction")
            return [await tx.outbox_enqueue(OUTBOX, payloads[0])]

    await _ask(program, [token], order)


async def _listed(id: Awaitable[int]) -> list[int]:
    return [await id]


async def _ask(
    program: Program, tokens: list[str], store_them: Callable[[list[dict[str, str]]], Awaitable[list[int]]]
) -> None:
    deeds = program.dice.choices(list(DEEDS), list(DEEDS.values()), k=len(tokens))
    program.ledger.write("asking", tokens=tokens)
    ids = await store_them([{"token": token, "do": deed} for token, deed in zip(tokens, deeds, strict=True)])
    program.ledger.write("answered", tokens=tokens, ids=ids)


def _queue(store: Store) -> Queue:
    return store.queue(QUEUE, visibility=LEASE_S, max_attempts=6, backoff=0.05)


async def worker(talk: Talk, path: str, clock: str, ledger: str, name: str, seed: int) -> None:
    program = _program(ledger, name, seed)
    async with program.open_store(talk, path, clock) as store:
        await store.queue(QUEUE).work(program.handle, stop=program.stop, concurrency=8, grace=GRACE_S)


async def deliverer(talk: Talk, path: str, clock: str, ledger: str, name: str, seed: int) -> None:
    program = _program(ledger, name, seed)
    async with program.open_store(talk, path, clock) as store:
        await store.outbox(OUTBOX).deliver(program.handle, stop=program.stop, concurrency=2, grace=GRACE_S)


async def runner(talk: Talk, path: str, clock: str, ledger: str, name: str, seed: int) -> None:
    program = _program(ledger, name, seed)
    async with program.open_store(talk, path, clock) as store:
        while not program.stop.stopped:
            try:
                await store.run_schedules(program.stop)
            except LeadershipLost:
                program.ledger.write("lost")


def _write_down(ledger: Ledger, point: KillPoint) -> None:
    """Wrap what the library does by itself, so that it is in the ledger too, and may be torn apart."""
    ack, renewed, take, acquire = JobHandle.ack, JobHandle._renewed, QueueSource.take, SchedulerLease.acquire
    settle: Callable[[JobHandle, Outcome], Awaitable[bool]] = job.settle

    async def acked(work: JobHandle, call: Callable[[], Awaitable[bool]] | None = None) -> bool:
        ledger.write("acking", id=work.id, fence=work.fence, now=_now(work))
        point.passed("after handler before ack")
        answer = await (ack(work) if call is None else call())
        if answer:
            point.passed("after ack before log")
        ledger.write("acked", id=work.id, fence=work.fence, answer=answer)
        return answer

    async def settled(work: JobHandle, outcome: Outcome) -> bool:
        if isinstance(outcome, Returned):
            return await acked(work, lambda: settle(work, outcome))
        kind = _kind(outcome)
        ledger.write("settling", id=work.id, fence=work.fence, kind=kind, now=_now(work))
        answer = await settle(work, outcome)
        ledger.write("settled", id=work.id, fence=work.fence, kind=kind, answer=answer)
        return answer

    def beaten(self: JobHandle, renewal: Renewal) -> bool:
        if renewal.written is not None:
            point.passed("after heartbeat")
            ledger.write("beat", id=self.id, fence=self.fence, lease_end=renewal.written[1])
        return renewed(self, renewal)

    async def taken(self: QueueSource, limit: int) -> Sequence[JobHandle]:
        handles = await take(self, limit)
        for work in handles:
            assert work.job.lease_until is not None
            end = _ms(work.job.lease_until.timestamp())
            claimed_at = end - _ms(work.job.visibility)
            ledger.write("claimed", id=work.id, fence=work.fence, claimed_at=claimed_at, lease_end=end)
        point.passed("after claim before handler")
        return handles

    async def acquired(self: SchedulerLease) -> LockHandle:
        grant = await acquire(self)
        point.passed("after leading")
        ledger.write("leads", token=grant.fencing_token)
        return grant

    mock.patch.object(JobHandle, "ack", acked).start()
    mock.patch.object(queue, "settle", settled).start()
    mock.patch.object(JobHandle, "_renewed", beaten).start()
    mock.patch.object(QueueSource, "take", taken).start()
    mock.patch.object(SchedulerLease, "acquire", acquired).start()


def _now(handle: JobHandle) -> int:
    return handle._context.engine.clock.now_ms()


def _kind(outcome: Outcome) -> str:
    """What becomes of the job."""
    if not isinstance(outcome, Raised):
        return "_give_back"
    failure = job.Failure.of(outcome.error, None)
    if failure.discard:
        return "_fail"
    return "retry" if failure.snooze is None else "_give_back"
