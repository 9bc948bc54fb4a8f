"""A program at work, as a user would write it, and the book that is kept on what was promised to it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio
from attrs import define, field

from actors import Backoff, Child, Intensity, Supervisor
from alkstore import JobHandle, OutcomeUnknown, StopToken, Store, StoreError
from alkstore.testing import enqueued

__all__ = ["Load", "working"]

OFTEN, SOON = Intensity(restarts=10_000, within=60), Backoff(base=0.05, cap=0.5)


@define(eq=False)
class Load:
    """What was enqueued, what has run, and what was acknowledged."""

    store: Store
    enqueued: set[int] = field(factory=set)
    """Ids that an enqueue has returned."""
    doubtful: int = 0
    """Enqueues whose outcome is not known."""
    refused: Counter[str] = field(factory=Counter)
    started: Counter[int] = field(factory=Counter)
    acked: set[int] = field(factory=set)
    gone: set[int] = field(factory=set)
    """Jobs that have run and are not there any more, though nobody was told."""
    ran_again: list[int] = field(factory=list)
    """Jobs that were started after they had been acknowledged: there must be none."""
    delivered: Counter[str] = field(factory=Counter)
    promised: set[str] = field(factory=set)
    """Orders whose transaction has committed: each has to be delivered."""
    last: float = field(factory=time.monotonic)
    """When a job was acknowledged last."""
    at_work: trio.Event = field(factory=trio.Event)
    """Producers wait for it."""
    leased: set[object] = field(factory=set)
    """Orders whose message somebody has claimed and not delivered: it is not lost, but waits for the lease's end."""

    async def handle(self, job: JobHandle) -> None:
        if job.id in self.acked or job.id in self.gone:
            self.ran_again.append(job.id)
        self.started[job.id] += 1
        await trio.sleep(0.002)

    async def deliver(self, job: JobHandle) -> None:
        self.delivered[job.payload["order"]] += 1

    async def watch(self) -> None:
        async for event in self.store.events(buffer=100_000):
            if event.kind == "settled" and event.details.get("outcome") == "acked" and event.subject == "q":
                self.acked.add(event.details["id"])
                self.last = time.monotonic()

    def rest(self) -> None:
        """Let the producers pause."""
        self.at_work = trio.Event()

    def go_on(self) -> None:
        self.at_work.set()

    async def produce(self, name: int) -> None:
        queue = self.store.queue("q", visibility=3, max_attempts=100, backoff=0)
        for n in range(1_000_000):
            try:
                self.enqueued.add(await queue.enqueue({"n": n}, priority=n % 3))
                if n % 5 == 0:
                    order = f"{name}:{n}"
                    async with self.store.transaction() as tx:
                        await tx.outbox_enqueue("orders", {"order": order})
                    self.promised.add(order)
            except OutcomeUnknown:
                self.doubtful += 1
            except StoreError as error:
                self.refused[type(error).__name__] += 1
                await trio.sleep(0.05)
            await trio.sleep(0.005)
            await self.at_work.wait()

    async def settled(self, within: float = 40) -> float:
        """Wait until all that was promised is done; return how long that took."""
        began = time.monotonic()
        while waiting := self._waiting():
            assert time.monotonic() - began < within, f"not done: {waiting[:5]}"
            await self._look()
            await trio.sleep(0.05)
        return time.monotonic() - began

    def _waiting(self) -> list[object]:
        return [
            *sorted(self.enqueued - self.acked - self.gone),
            *sorted(self.promised - self.delivered.keys() - self.leased),
        ]

    async def _look(self) -> None:
        """An acknowledgement whose answer was lost is known by the job's being gone."""
        with suppress(StoreError):
            messages = await enqueued(self.store, self.store.outbox("orders"))
            self.leased = {job.payload["order"] for job in messages if job.state == "leased"}
        for id in self.enqueued - self.acked - self.gone:
            with suppress(StoreError):
                if self.started[id] and await self.store.get_job(id) is None:
                    self.gone.add(id)


@asynccontextmanager
async def working(store: Store) -> AsyncIterator[Load]:
    """Run producers, workers, a relay and the schedules beside the body, under a supervisor."""
    load, stop = Load(store), StopToken()
    load.at_work.set()
    await store.schedule("tick", "@every 1s", "ticks")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.watch)
        async with Supervisor(stop) as supervisor:
            children: list[tuple[str, Any]] = [
                ("work", partial(store.queue("q").work, load.handle, concurrency=4)),
                ("ticks", partial(store.queue("ticks").work, load.handle)),
                ("relay", partial(store.outbox("orders").deliver, load.deliver)),
                ("schedules", store.run_schedules),
            ]
            for name, run in children:
                await supervisor.start(Child(name, run, intensity=OFTEN, backoff=SOON))
            for number in range(2):
                nursery.start_soon(load.produce, number)
            yield load
            stop.stop()
        nursery.cancel_scope.cancel()
    assert load.ran_again == []
