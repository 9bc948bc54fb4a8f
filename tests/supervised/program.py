"""A whole program: schedules, two queues and an outbox under one Supervisor with one StopToken, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, cast

import trio
from attrs import define, field

from actors import ChildEvent, StopToken, Supervisor
from alkstore import JobHandle, Store, open_store
from alkstore.sql import locks
from alkstore.sql.jobs import claiming, settling
from alkstore.sql.tx import Params, Row

__all__ = ["CHILDREN", "Boom", "Program", "open_program"]

CHILDREN = ("emails", "reports", "webhooks", "schedules")
"""In the order in which they are started, so that the schedules are stopped first."""


class Boom(Exception):
    """What a child crashes with."""


@define(eq=False)
class Program:
    """What runs, and what it has done."""

    store: Store
    stop: StopToken
    log: list[str] = field(factory=list)
    """What happened in which order: to the database, in the handlers, to the children."""
    events: list[ChildEvent] = field(factory=list)
    handled: list[Any] = field(factory=list)
    """Payloads of emails, and boundaries of reports, whose handler has ended."""
    delivered: list[Any] = field(factory=list)
    takes: float = 0.5
    """Seconds that each handler and each delivery takes."""
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    """Around the supervisor, and not around the test."""
    over: trio.Event = field(factory=trio.Event)
    """Set when the supervisor has ended."""
    _bombs: dict[str, trio.Event] = field(factory=lambda: {name: trio.Event() for name in CHILDREN})

    async def handle(self, job: JobHandle) -> None:
        await trio.sleep(self.takes)
        self.handled.append(job.payload if job.boundary is None else job.boundary)
        self.log.append("handled")

    async def deliver(self, message: JobHandle) -> None:
        await trio.sleep(self.takes)
        self.delivered.append(message.payload)
        self.log.append("delivered")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until the token is flipped."""
        store = self.store
        await store.schedule("report", "@every 10s", "reports")
        functions: dict[str, Callable[..., Awaitable[object]]] = {
            "emails": partial(store.queue("emails").work, self.handle, concurrency=4),
            "reports": partial(store.queue("reports").work, self.handle),
            "webhooks": partial(store.outbox("webhooks").deliver, self.deliver),
            "schedules": store.run_schedules,
        }
        with self.scope:
            async with Supervisor(self.stop, on_event=self._tell, random=Random(1)) as supervisor:  # noqa: S311
                for name in CHILDREN:
                    await supervisor.start(name, _Crashable(functions[name], self._bombs, name).run)
                task_status.started()
        self.log.append("supervisor has ended")
        self.over.set()

    def crash(self, child: str) -> None:
        """Let everything of this child be cancelled by an error of its own."""
        self._bombs[child].set()

    async def order(self, number: int) -> None:
        """Store an email and a webhook together."""
        async with self.store.transaction() as tx:
            await tx.enqueue("emails", number, visibility=3)
            await tx.outbox_enqueue("webhooks", number)

    def story(self, child: str) -> list[str]:
        """The events of this child so far."""
        return [event.kind for event in self.events if event.child == child]

    def _tell(self, event: ChildEvent) -> None:
        self.events.append(event)
        self.log.append(f"{event.child} {event.kind}")


@define(eq=False)
class _Crashable:
    function: Callable[..., Awaitable[object]]
    bombs: dict[str, trio.Event]
    name: str

    async def run(self, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.bombs[self.name] = trio.Event()
        errors: list[BaseException] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._explode, self.bombs[self.name])
                try:
                    await self.function(stop=stop, task_status=task_status)
                except Exception as error:  # noqa: BLE001  raised again without the nursery's group
                    errors.append(error)
                nursery.cancel_scope.cancel()
        except* Boom as group:
            errors.extend(group.exceptions)
        if errors:
            raise errors[0]

    async def _explode(self, bomb: trio.Event) -> None:
        await bomb.wait()
        raise Boom(self.name)


@asynccontextmanager
async def open_program(target: str = ":memory:", **options: Any) -> AsyncIterator[Program]:
    """Run the program beside the body; it is over when the body has flipped its token."""
    logs: list[str] = []
    async with open_store(target, inline=True, **options) as store:
        program = Program(store, StopToken(), logs)
        writer = cast(Any, store._context.engine).writer
        writer.connection = _Recorded(writer.connection, logs)
        async with trio.open_nursery() as nursery:
            await nursery.start(program.run)
            yield program


_TOLD = {
    claiming.TAKE: "claim",
    settling.ACK: "ack",
    settling.HEARTBEAT: "heartbeat",
    settling.GIVE_BACK: "give back",
    locks.RELEASE: "lease released",
    "PRAGMA wal_checkpoint(PASSIVE)": "checkpoint",
}


class _Recorded:
    """The writer's connection, which tells what it does."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self._inner, self._log = inner, log

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        rows: list[Row] = self._inner.all(sql, params)
        if sql in _TOLD:
            self._log.append(_TOLD[sql])
        return rows

    def close(self) -> None:
        self._log.append("connection closed")
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
