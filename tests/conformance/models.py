"""What queues and outboxes promise, once more in plain Python: small enough to be seen to be right."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import trio
import trio.testing
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from alkstore import Counts, Job, ManualClock, Store
from tests.conformance.helpers import START, OpenStore, at

__all__ = ["LAPSED", "MODELS", "Lease", "ModelJob", "ModelQueue", "ms", "play", "sequences", "shown"]

HOUR_MS = 3_600_000
DAY_S = 86_400

LAPSED = "lease expired"
"""Stands for any error text that begins like this."""

MODELS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Each example plays in names of its own, later than all before it: so one database serves them all."""


def sequences(calls: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Sequences of calls, long enough to meet: Hypothesis makes them twice their least length on average."""
    return st.lists(calls, min_size=12, max_size=60)


_numbers = itertools.count()
_ages = {"now": START}


def play(open_store: OpenStore, game: Callable[[Store, ManualClock, str], Awaitable[None]]) -> None:
    """Run `game` in a trio run of its own, on the test's database, with names and a time that nobody has used."""

    async def run() -> None:
        clock = ManualClock(_ages["now"])
        async with open_store(clock=clock) as store:
            await game(store, clock, str(next(_numbers)))
        _ages["now"] = max(_ages["now"], clock.now_ms()) + DAY_S * 1000

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def ms(moment: datetime | None) -> int | None:
    """Milliseconds since the epoch."""
    return None if moment is None else round((moment - at(0)).total_seconds() * 1000)


@define(eq=False)
class ModelJob:
    """A job. Times and lengths are in ms."""

    id: int
    payload: Any
    priority: int
    run_at: int
    expires_at: int | None
    key: str | None
    max_attempts: int
    visibility: int
    backoff: int
    created_at: int
    state: str = "live"
    attempt: int = 0
    fence: int = 0
    worker: str | None = None
    lease_end: int | None = None
    error: str | None = None
    reason: str | None = None
    died_at: int | None = None

    def die(self, now: int, reason: str, error: str | None = None) -> None:
        self.state, self.reason, self.died_at = "dead", reason, now
        self.worker = self.lease_end = None
        self.error = self.error if error is None else error

    def rest(self) -> None:
        self.state, self.worker, self.lease_end = "live", None, None

    def is_expired(self, now: int) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@define(eq=False)
class Lease:
    """One claim, as its holder sees it."""

    job: ModelJob
    fence: int
    length: int


@define(eq=False)
class ModelQueue:
    """A queue's jobs, by id."""

    jobs: dict[int, ModelJob] = field(factory=dict)
    paused: bool = False

    def taken(self, key: str, now: int) -> int | None:
        """The live job that has the key. One that could never run again is buried: it must not stop new work."""
        for job in self.jobs.values():
            if job.key == key and job.state != "dead":
                if job.state == "leased" and not self.has_lapsed(job, now):
                    return job.id
                if job.state == "leased" and job.attempt >= job.max_attempts:
                    job.die(now, "lease expired", LAPSED)
                elif job.is_expired(now):
                    job.die(now, "expired")
                else:
                    return job.id
        return None

    @staticmethod
    def has_lapsed(job: ModelJob, now: int) -> bool:
        return job.lease_end is not None and job.lease_end <= now

    def claim(self, now: int, worker: str, limit: int, lease: int | None) -> list[Lease]:
        if self.paused:
            return []
        for job in self.jobs.values():
            if job.state == "leased" and self.has_lapsed(job, now):
                if job.attempt >= job.max_attempts:
                    job.die(now, "lease expired", LAPSED)
                else:
                    job.rest()
                    job.error = LAPSED
        due = [j for j in self.jobs.values() if j.state == "live" and j.run_at <= now and not j.is_expired(now)]
        taken = sorted(due, key=lambda job: (-job.priority, job.run_at, job.id))[:limit]
        for job in taken:
            job.state, job.worker = "leased", worker
            job.attempt += 1
            job.fence += 1
            job.lease_end = now + (job.visibility if lease is None else lease)
        return [Lease(job, job.fence, job.visibility if lease is None else lease) for job in taken]

    def is_mine(self, lease: Lease, now: int) -> bool:
        job = lease.job
        return (
            self.jobs.get(job.id) is job
            and job.state == "leased"
            and job.fence == lease.fence
            and not self.has_lapsed(job, now)
        )

    def ack(self, now: int, lease: Lease) -> bool:
        mine = self.is_mine(lease, now)
        if mine:
            del self.jobs[lease.job.id]
        return mine

    def retry(self, now: int, lease: Lease, error: str | None, delay: int | None) -> bool:
        mine, job = self.is_mine(lease, now), lease.job
        if mine and job.attempt >= job.max_attempts:
            job.die(now, "attempts exhausted", error)
        elif mine:
            job.rest()
            job.run_at = now + (min(job.backoff * 2 ** (job.attempt - 1), HOUR_MS) if delay is None else delay)
            job.error = job.error if error is None else error
        return mine

    def fail(self, now: int, lease: Lease, error: str | None) -> bool:
        mine = self.is_mine(lease, now)
        if mine:
            lease.job.die(now, "failed", error)
        return mine

    def snooze(self, now: int, lease: Lease, delay: int) -> bool:
        mine = self.is_mine(lease, now)
        if mine:
            lease.job.rest()
            lease.job.attempt -= 1
            lease.job.run_at = now + delay
        return mine

    def heartbeat(self, now: int, lease: Lease, length: int | None) -> bool:
        mine = self.is_mine(lease, now)
        if mine:
            lease.length = lease.length if length is None else length
            lease.job.lease_end = now + lease.length
        return mine

    def cancel(self, now: int, id: int) -> bool:
        job = self.jobs.get(id)
        if job is None or job.state == "dead":
            return False
        job.die(now, "cancelled")
        return True

    def redrive(self, now: int, id: int) -> bool:
        job = self.jobs.get(id)
        if job is None or job.state != "dead" or (job.key is not None and self.taken(job.key, now) is not None):
            return False
        job.state, job.attempt, job.run_at, job.expires_at = "live", 0, now, None
        job.reason = job.died_at = None
        return True

    def redrive_all(self, now: int) -> int:
        dead = [id for id, job in sorted(self.jobs.items()) if job.state == "dead"]
        return sum([self.redrive(now, id) for id in dead])

    def prune(self, now: int, age: int) -> int:
        old = [id for id, job in self.jobs.items() if job.died_at is not None and job.died_at <= now - age]
        for id in old:
            del self.jobs[id]
        return len(old)

    def sweep(self, now: int) -> int:
        expired = [job for job in self.jobs.values() if job.state == "live" and job.is_expired(now)]
        for job in expired:
            job.die(now, "expired")
        return len(expired)

    def counts(self, now: int) -> Counts:
        states = [self.state(job, now) for job in self.jobs.values()]
        return Counts(**{name: states.count(name) for name in ("delayed", "ready", "leased", "dead")})

    @staticmethod
    def state(job: ModelJob, now: int) -> str:
        if job.state == "live":
            return "delayed" if job.run_at > now else "ready"
        return job.state

    def adopt_burials(self, now: int, found: dict[int, Job]) -> None:
        """A claim buries the expired jobs that it meets; which those are is the engine's own affair."""
        for id, job in self.jobs.items():
            if job.state == "live" and job.is_expired(now) and id in found and found[id].state == "dead":
                job.die(now, "expired")

    def shown(self, now: int) -> dict[int, tuple[object, ...]]:
        """Everything that can be seen, by id."""
        return {
            id: (
                *(job.payload, self.state(job, now), job.priority, job.key, job.attempt, job.max_attempts, job.fence),
                *(job.run_at, job.expires_at, job.visibility, job.backoff, job.worker, job.lease_end),
                *(job.error, job.reason, job.died_at, job.created_at),
            )
            for id, job in sorted(self.jobs.items())
        }


def shown(found: dict[int, Job]) -> dict[int, tuple[object, ...]]:
    """As `ModelQueue.shown`, of what the store shows."""
    return {
        id: (
            *(job.payload, job.state, job.priority, job.key, job.attempt, job.max_attempts, job.fence),
            *(ms(job.run_at), ms(job.expires_at), round(job.visibility * 1000), round(job.backoff * 1000)),
            *(job.worker, ms(job.lease_until)),
            LAPSED if (job.error or "").startswith(LAPSED) else job.error,
            *(job.reason, ms(job.died_at), ms(job.created_at)),
        )
        for id, job in sorted(found.items())
    }
