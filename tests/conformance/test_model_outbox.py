"""Any sequence of calls of an outbox, with time passing, gives the answers of the model."""

from __future__ import annotations

from typing import Any

import trio
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from alkstore import JobHandle, ManualClock, Outbox, Store
from alkstore.testing import enqueued
from tests.conformance.helpers import OpenStore
from tests.conformance.models import MODELS, ModelJob, ModelQueue, play, sequences, shown

VISIBILITY, ATTEMPTS, BACKOFF = 60, 5, 5
"""The derived set that the contract gives to an outbox."""

which = st.integers(0, 3)

calls = st.one_of(
    st.tuples(
        st.just("enqueue"),
        st.booleans(),
        st.fixed_dictionaries(
            {},
            optional={
                "priority": st.sampled_from([-1, 0, 1]),
                "delay": st.sampled_from([0, 5, 60]),
                "key": st.sampled_from(["a", "b"]),
            },
        ),
    ),
    *[
        st.tuples(st.just("run_once"), st.sampled_from(["delivers", "fails", "overruns", "heartbeats", "is cancelled"]))
        for _ in range(2)
    ],
    st.tuples(st.just("pass_time"), st.sampled_from([0.001, 5, 10, 59.999, 60, 3600])),
    st.tuples(st.just("redrive"), which),
    st.tuples(st.just("redrive_all")),
    st.tuples(st.just("prune"), st.sampled_from([0, 60])),
)


@define(eq=False)
class OutboxGame:
    """Plays every call against the outbox and its model, and compares."""

    store: Store
    clock: ManualClock
    outbox: Outbox
    model: ModelQueue = field(factory=ModelQueue)
    ids: list[int] = field(factory=list)
    keys: dict[int, str | None] = field(factory=dict)
    """The idempotency key that the receiver has seen of each message."""

    async def play(self, call: str, *given: Any) -> None:
        await getattr(self, call)(self.clock.now_ms(), *given)
        now = self.clock.now_ms()
        found = {job.id: job for job in await enqueued(self.store, self.outbox, dead=True)}
        assert shown(found) == self.model.shown(now)
        assert await self.outbox.counts() == self.model.counts(now)
        assert [job.id for job in await self.outbox.dead()] == [id for id, j in found.items() if j.state == "dead"]

    def id(self, back: int) -> int:
        return self.ids[-1 - back % len(self.ids)] if self.ids else 0

    async def enqueue(self, now: int, in_transaction: bool, options: dict[str, Any]) -> None:
        payload = {"n": len(self.ids)}
        key = options.get("key")
        there = None if key is None else self.model.taken(key, now)
        if in_transaction:
            async with self.store.transaction() as tx:
                id = await tx.outbox_enqueue(self.outbox.name, payload, **options)
        else:
            id = await self.outbox.enqueue(payload, **options)
        if there is not None:
            assert id == there
            return
        assert id > max(self.ids, default=0)
        self.ids.append(id)
        message = await self.outbox.get_message(id)
        assert message is not None
        assert message.key is not None
        assert key is None or message.key == key
        self.model.jobs[id] = ModelJob(
            id=id,
            payload=payload,
            priority=options.get("priority", 0),
            run_at=now + options.get("delay", 0) * 1000,
            expires_at=None,
            key=message.key,
            max_attempts=ATTEMPTS,
            visibility=VISIBILITY * 1000,
            backoff=BACKOFF * 1000,
            created_at=now,
        )

    async def run_once(self, now: int, outcome: str) -> None:
        leases = self.model.claim(now, "relay", 1, None)
        delivered: list[int] = []
        scope = trio.CancelScope()

        async def deliver(message: JobHandle) -> None:
            delivered.append(message.id)
            assert self.keys.setdefault(message.id, message.key) == message.key
            if outcome == "fails":
                raise ValueError("the receiver is away")
            if outcome == "overruns":
                self.clock.advance(VISIBILITY)
            if outcome == "heartbeats":
                self.clock.advance(VISIBILITY - 1)
                assert await message.heartbeat()
                self.clock.advance(VISIBILITY - 1)
            if outcome == "is cancelled":
                scope.cancel()
                await trio.lowlevel.checkpoint()

        with scope:
            assert await self.outbox.run_once("relay", deliver) is bool(leases)
        assert delivered == [lease.job.id for lease in leases]
        then = self.clock.now_ms()
        for lease in leases:
            if outcome == "fails":
                assert self.model.retry(then, lease, "ValueError: the receiver is away", None)
            elif outcome == "is cancelled":
                lease.job.rest()
                lease.job.attempt -= 1
                lease.job.error = "interrupted by cancellation"
            elif outcome == "heartbeats":
                self.model.heartbeat(now + (VISIBILITY - 1) * 1000, lease, None)
                assert self.model.ack(then, lease)
            else:
                assert self.model.ack(then, lease) is (outcome == "delivers")

    async def pass_time(self, now: int, seconds: float) -> None:
        self.clock.advance(seconds)

    async def redrive(self, now: int, back: int) -> None:
        assert await self.outbox.redrive(self.id(back)) is self.model.redrive(now, self.id(back))

    async def redrive_all(self, now: int) -> None:
        assert await self.outbox.redrive_all() == self.model.redrive_all(now)

    async def prune(self, now: int, age: float) -> None:
        assert await self.outbox.prune(age) == self.model.prune(now, round(age * 1000))


@MODELS
@given(sequences(calls))
def test_any_sequence_of_calls(open_engine_store: OpenStore, sequence: list[tuple[Any, ...]]) -> None:
    async def game(store: Store, clock: ManualClock, name: str) -> None:
        table = OutboxGame(store, clock, store.outbox(f"model{name}"))
        for call in sequence:
            await table.play(*call)

    play(open_engine_store, game)
