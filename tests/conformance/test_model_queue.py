"""Any sequence of calls of a queue, with time passing, gives the answers of the model."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from alkstore import JobHandle, ManualClock, Queue, Store
from alkstore.testing import enqueued
from tests.conformance.helpers import OpenStore
from tests.conformance.models import MODELS, Lease, ModelJob, ModelQueue, ms, play, sequences, shown

VISIBILITY, ATTEMPTS, BACKOFF = 10, 2, 4

seconds = st.sampled_from([0, 1, 4, 5, 10])
leases = st.sampled_from([None, 1, 5, 0.1])
errors = st.sampled_from([None, "broken"])
which = st.integers(0, 3)
"""Which of the jobs or leases there are, counted from the newest."""

edges = st.sampled_from([-0.001, 0, 0.001])
"""Just before a moment, at it, just after it."""

calls = st.one_of(
    *(st.tuples(st.just("enqueue"), st.just(options)) for options in ({}, {}, {"max_attempts": 1})),
    st.tuples(
        st.just("enqueue"),
        st.fixed_dictionaries(
            {},
            optional={
                "priority": st.sampled_from([-100, 0, 1, 100]),
                "delay": seconds,
                "max_attempts": st.integers(1, 3),
                "expires": seconds,
                "key": st.sampled_from(["a", "b"]),
            },
        ),
    ),
    *(st.tuples(st.just("claim"), st.integers(1, 3), leases) for _ in range(3)),
    *(st.tuples(st.just("ack"), which) for _ in range(2)),
    st.tuples(st.just("retry"), which, errors, st.one_of(st.none(), seconds)),
    st.tuples(st.just("fail"), which, errors),
    st.tuples(st.just("snooze"), which, seconds),
    st.tuples(st.just("heartbeat"), which, leases),
    *(st.tuples(st.just("pass_time"), st.sampled_from([0.001, 0.1, 1, 4, 5, 9.999, 10])) for _ in range(2)),
    st.tuples(st.just("pass_time"), st.just(3600)),
    *(st.tuples(st.just("pass_until"), which, st.just("lease_end"), edges) for _ in range(3)),
    st.tuples(st.just("pass_until"), which, st.sampled_from(["run_at", "expires_at"]), edges),
    st.tuples(st.just("cancel_job"), which),
    st.tuples(st.just("redrive"), which),
    st.tuples(st.sampled_from(["sweep_expired", "redrive_all", "pause", "resume", "resume", "resume"])),
    st.tuples(st.just("prune"), seconds),
)


@define(eq=False)
class QueueGame:
    """Plays every call against the queue and its model, and compares the answers, and then all there is to see."""

    store: Store
    clock: ManualClock
    queue: Queue
    model: ModelQueue = field(factory=ModelQueue)
    ids: list[int] = field(factory=list)
    held: list[tuple[JobHandle, Lease]] = field(factory=list)

    async def play(self, call: str, *given: Any) -> None:
        await getattr(self, call)(self.clock.now_ms(), *given)
        await self.compare()

    async def compare(self) -> None:
        now = self.clock.now_ms()
        found = {job.id: job for job in await enqueued(self.store, self.queue, dead=True)}
        self.model.adopt_burials(now, found)
        assert shown(found) == self.model.shown(now)
        assert await self.queue.counts() == self.model.counts(now)
        for id in self.ids[-3:]:
            one = await self.queue.get_job(id)
            assert one == found.get(id)

    def id(self, back: int) -> int:
        return self.ids[-1 - back % len(self.ids)] if self.ids else 0

    async def enqueue(self, now: int, options: dict[str, Any]) -> None:
        payload = {"n": len(self.ids)}
        key = options.get("key")
        there = None if key is None else self.model.taken(key, now)
        id = await self.queue.enqueue(payload, **options)
        if there is not None:
            assert id == there
            return
        assert id > max(self.ids, default=0)
        self.ids.append(id)
        run_at = now + options.get("delay", 0) * 1000
        expires = options.get("expires")
        self.model.jobs[id] = ModelJob(
            id=id,
            payload=payload,
            priority=options.get("priority", 0),
            run_at=run_at,
            expires_at=None if expires is None else run_at + expires * 1000,
            key=key,
            max_attempts=options.get("max_attempts", ATTEMPTS),
            visibility=VISIBILITY * 1000,
            backoff=BACKOFF * 1000,
            created_at=now,
        )

    async def claim(self, now: int, limit: int, lease: float | None) -> None:
        handles = await self.queue.claim("worker", limit, lease=lease)
        leases = self.model.claim(now, "worker", limit, None if lease is None else round(lease * 1000))
        assert [handle.id for handle in handles] == [lease.job.id for lease in leases]
        for handle, mine in zip(handles, leases, strict=True):
            assert (handle.fence, handle.attempt) == (mine.fence, mine.job.attempt)
            assert ms(handle.job.lease_until) == mine.job.lease_end
        self.held += zip(handles, leases, strict=True)

    def lease(self, back: int) -> tuple[JobHandle, Lease] | None:
        return self.held[-1 - back % len(self.held)] if self.held else None

    async def ack(self, now: int, back: int) -> None:
        if one := self.lease(back):
            assert await one[0].ack() is self.model.ack(now, one[1])

    async def retry(self, now: int, back: int, error: str | None, delay: float | None) -> None:
        if one := self.lease(back):
            length = None if delay is None else round(delay * 1000)
            assert await one[0].retry(error, delay) is self.model.retry(now, one[1], error, length)

    async def fail(self, now: int, back: int, error: str | None) -> None:
        if one := self.lease(back):
            assert await one[0].fail(error) is self.model.fail(now, one[1], error)

    async def snooze(self, now: int, back: int, delay: float) -> None:
        if one := self.lease(back):
            assert await one[0].snooze(delay) is self.model.snooze(now, one[1], round(delay * 1000))

    async def heartbeat(self, now: int, back: int, lease: float | None) -> None:
        if one := self.lease(back):
            length = None if lease is None else round(lease * 1000)
            assert await one[0].heartbeat(lease) is self.model.heartbeat(now, one[1], length)

    async def pass_time(self, now: int, seconds: float) -> None:
        self.clock.advance(seconds)

    async def pass_until(self, now: int, back: int, moment: str, edge: float) -> None:
        job = self.model.jobs.get(self.id(back))
        if job is not None and (until := getattr(job, moment)) is not None:
            self.clock.set(max(now, until + round(edge * 1000)))

    async def cancel_job(self, now: int, back: int) -> None:
        assert await self.queue.cancel_job(self.id(back)) is self.model.cancel(now, self.id(back))

    async def redrive(self, now: int, back: int) -> None:
        assert await self.queue.redrive(self.id(back)) is self.model.redrive(now, self.id(back))

    async def redrive_all(self, now: int) -> None:
        assert await self.queue.redrive_all() == self.model.redrive_all(now)

    async def prune(self, now: int, age: float) -> None:
        assert await self.queue.prune(age) == self.model.prune(now, round(age * 1000))

    async def sweep_expired(self, now: int) -> None:
        assert await self.queue.sweep_expired() == self.model.sweep(now)

    async def pause(self, now: int) -> None:
        assert await self.queue.pause() is not self.model.paused
        self.model.paused = True

    async def resume(self, now: int) -> None:
        assert await self.queue.resume() is self.model.paused
        self.model.paused = False


@MODELS
@given(sequences(calls))
def test_any_sequence_of_calls(open_engine_store: OpenStore, sequence: list[tuple[Any, ...]]) -> None:
    async def game(store: Store, clock: ManualClock, name: str) -> None:
        queue = store.queue(f"model{name}", visibility=VISIBILITY, max_attempts=ATTEMPTS, backoff=BACKOFF)
        table = QueueGame(store, clock, queue)
        for call in sequence:
            await table.play(*call)

    play(open_engine_store, game)


@MODELS
@given(
    st.lists(st.tuples(st.integers(-3, 3), seconds, st.one_of(st.none(), seconds)), max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=10),
    seconds,
)
def test_any_jobs_are_claimed_in_order(
    open_engine_store: OpenStore, jobs: list[tuple[int, float, float | None]], limits: list[int], later: float
) -> None:
    async def game(store: Store, clock: ManualClock, name: str) -> None:
        queue = store.queue(f"model{name}", visibility=VISIBILITY, max_attempts=ATTEMPTS, backoff=BACKOFF)
        table = QueueGame(store, clock, queue)
        for priority, delay, expires in jobs:
            options = {"priority": priority, "delay": delay} | ({} if expires is None else {"expires": expires})
            await table.enqueue(clock.now_ms(), options)
        clock.advance(later)
        for limit in limits:
            await table.claim(clock.now_ms(), limit, None)
        await table.compare()

    play(open_engine_store, game)
