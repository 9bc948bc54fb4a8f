"""The way in: `open_store` opens a file, a `Store` hands out what works on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import trio
from attrs import define, field

from actors.events import Broadcast, Subscription
from actors.stop import StopToken
from alkstore.clock import Clock, TrioClock, WallClock
from alkstore.context import Context, open_helpers
from alkstore.cron.handle import Cron
from alkstore.engines.bridge import in_virtual_time
from alkstore.engines.engine import Engine
from alkstore.engines.postgres.address import is_url, redacted, refuse_other_addresses
from alkstore.engines.postgres.clock import ServerClock
from alkstore.engines.sqlite import SQLiteEngine
from alkstore.entering import async_with
from alkstore.job import Stamp
from alkstore.lock import Lock
from alkstore.names import check_name
from alkstore.outbox import Outbox
from alkstore.payload import JSON
from alkstore.queue import Queue, cancel_job
from alkstore.schedule import new_schedule, run_schedules
from alkstore.sql import health, jobs, schedules
from alkstore.sql.cron.runs import RUNS_QUEUE
from alkstore.transaction import SyncTransaction, Transaction, open_transaction, transact
from alkstore.values import (
    MAX_ID,
    SEVEN_DAYS_S,
    Event,
    Health,
    Job,
    Schedule,
    ScheduleOpts,
    Seconds,
    at,
    integer,
    milliseconds,
)

__all__ = ["Store", "open_store"]

T = TypeVar("T")


@async_with("async with open_store(…) as store:")
async def open_store(
    target: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    inline: bool = False,
    synchronous: str = "full",
    create: bool = True,
    migrate: bool = True,
    driver: str = "sqlite3",
    leadership_ttl: Seconds = 30,
    busy_timeout: Seconds = 10,
    transaction_timeout: Seconds = 5,
    schema: str = "alkstore",
    connections: int = 8,
    listen: bool = True,
) -> AsyncIterator[Store]:
    """Open a store for the body, and close it in a bounded time afterwards.

    Nothing runs by itself: a schedule fires only while somebody calls `Store.run_schedules`.

    Args:
        target: the path of a SQLite file, which may be the program's own database, ``":memory:"``, or a
            ``postgresql://`` URL. The file is put in WAL mode and stays so; the store's tables all begin with
            ``__alkstore_``.
        clock: where "now" comes from; None: the machine's clock, or trio's clock under a `trio.testing.MockClock`.
        inline: run SQLite in the trio thread, with no thread at all: for tests and simulation.
        synchronous: ``"full"`` keeps every acknowledged commit through a power cut; ``"normal"`` is faster and may
            lose the last ones then (never in a crash of the process).
        create: make the tables in a file that has none; False: `SchemaMissing`.
        migrate: bring older tables to the present version; False: `SchemaMissing`.
        driver: which copy of SQLite to use, ``"sqlite3"`` or ``"apsw"``: one copy for each file of a process.
        leadership_ttl: seconds that a leader of the schedules leads without renewing, 0.1 to 7 days.
        busy_timeout: seconds to wait for the database's write lock before `StoreBusy`, 0 to 1 hour.
        transaction_timeout: seconds that a transaction may stay open before `TransactionTimeout`, 0.001 to 1 hour.
        schema: of a PostgreSQL store, the schema of its tables; it is made if it is not there.
        connections: of a PostgreSQL store, 1 to 100; one more listens, and one tells.
        listen: of a PostgreSQL store: hear by LISTEN what others commit; False looks every 5 s and no more, which
            a pooler that gives each transaction another connection needs.

    What the body raises leaves as itself. If a background task of the store dies, every waiting caller gets
    `StoreClosed`, the body is cancelled, and the error leaves. Cancelled while it opens: everything is closed again.

    Raises:
        TypeError, ValueError: an option, named, with its range.
        StoreCorrupt, StoreForeign, StoreReadOnly, StoreFull, StoreUnavailable, StoreBusy, SchemaTooNew, SchemaMissing,
        MixedSQLite: as the file demands; it is not touched.
    """
    ttl = milliseconds(leadership_ttl, "leadership_ttl", 0.1, SEVEN_DAYS_S)
    transaction_limit = milliseconds(transaction_timeout, "transaction_timeout", 0.001, 3_600) / 1000
    patience = milliseconds(busy_timeout, "busy_timeout", 0, 3_600) / 1000
    for name, flag in {"inline": inline, "create": create, "migrate": migrate, "listen": listen}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r:.80}")
    check_name(schema, "schema")
    integer(connections, "connections", 1, 100)
    if synchronous not in ("full", "normal"):
        raise ValueError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
    if clock is not None and not isinstance(clock, Clock):
        raise TypeError(f"clock must be a Clock such as ManualClock or TrioClock, not {clock!r:.80}")
    if clock is None and in_virtual_time():
        clock = TrioClock()
    events: Broadcast[Event] = Broadcast()

    def publish(happened: list[Event]) -> None:
        for event in happened:
            events.publish(event)

    path = _checked_path(target)
    engine: Engine
    if is_url(path):
        if inline or driver != "sqlite3" or synchronous != "full":
            raise ValueError("inline, driver and synchronous are options of a SQLite file, not of a PostgreSQL server")
        engine = await _open_postgres(
            path,
            schema=schema,
            clock=clock,
            create=create,
            migrate=migrate,
            busy_timeout=patience,
            connections=connections,
            listen=listen,
            publish=publish,
        )
    else:
        if (schema, connections, listen) != ("alkstore", 8, True):
            raise ValueError("schema, connections and listen are options of a PostgreSQL server, not of a SQLite file")
        engine = await SQLiteEngine.open(
            path,
            clock=clock or WallClock(),
            inline=inline,
            synchronous=synchronous,
            create=create,
            migrate=migrate,
            driver=driver,
            busy_timeout=patience,
            publish=publish,
        )
    try:
        async with open_helpers() as helpers:
            serving = trio.CancelScope(shield=True)  # a cancellation reaches the body first: it has last writes to make
            helpers.start_soon(_serve, engine, serving)
            try:
                yield Store(path, Context(engine, ttl, transaction_limit, events))
            finally:
                with trio.CancelScope(shield=True):
                    await engine.drain()
                serving.cancel()
    finally:
        events.close()
        await engine.close()
        engine.feed.close()  # whoever still waits would wait for ever


async def _serve(engine: Engine, serving: trio.CancelScope) -> None:
    with serving:
        await engine.serve()


async def _open_postgres(url: str, *, clock: Clock | None, **options: Any) -> Engine:
    try:
        from alkstore.engines.postgres.engine import PostgresEngine  # noqa: PLC0415 - an extra: only who asks needs it
    except ImportError as error:
        raise ImportError("a postgresql:// URL needs psycopg: install alkstore[postgres]") from error
    return await PostgresEngine.open(url, clock=clock or ServerClock(), **options)


def _checked_path(target: object) -> str:
    """Return the target as text; what may hold a password is not shown."""
    must = "target must be a path, ':memory:' or a postgresql:// URL, not"
    if not isinstance(target, str | os.PathLike):
        raise TypeError(f"{must} an object of the type {type(target).__name__}")
    path = os.fspath(target)
    if not isinstance(path, str):
        raise TypeError("target must be a path as text, not bytes")
    refuse_other_addresses(path)
    if not path or "\0" in path:
        raise ValueError(f"{must} {'a text with a NUL character in it' if path else 'an empty text'}")
    return path


@define(eq=False)
class Store:
    """An open store. Its methods may be called from any task of the trio run that opened it."""

    target: str = field(repr=lambda target: repr(redacted(target, target)))
    """What it was opened on; a password in it is not shown."""
    _context: Context = field(repr=False)

    def queue(
        self,
        name: str,
        *,
        visibility: Seconds = 300,
        max_attempts: int = 3,
        backoff: Seconds = 5,
        expires: Seconds | None = None,
    ) -> Queue:
        """Return a handle on the queue `name`; a queue is a name, and needs no creating.

        The options are what this handle stamps on the jobs that it enqueues: `visibility`, seconds of lease that a
        claim gives, 0.1 to 7 days; `max_attempts`, 1 to 10,000; `backoff`, seconds before the first retry, doubled for
        each further one up to an hour, 0 to 3,600; `expires`, seconds until an unclaimed job expires, 0 to ten years,
        None: never.

        Raises:
            InvalidName, ReservedName: the name.
            TypeError, ValueError: an option, named, with its range.
        """
        return Queue(check_name(name, "queue"), self._context, Stamp.of(visibility, max_attempts, backoff, expires))

    def lock(self, name: str) -> Lock:
        """Return a handle on the lock `name`. InvalidName or ReservedName: the name."""
        return Lock(check_name(name, "lock"), self._context)

    def outbox(self, name: str) -> Outbox:
        """Return a handle on the outbox `name`. InvalidName or ReservedName: the name."""
        return Outbox(check_name(name, "outbox"), self._context)

    @property
    def cron(self) -> Cron:
        """Wall-clock schedules whose occurrences become durable runs; see `alkstore.cron`."""
        return Cron(self._context)

    @async_with("async with store.transaction() as tx:")
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Open a transaction for the body: your own statements and the store's calls commit together, or not at all.

            async with store.transaction() as tx:
                await tx.execute("INSERT INTO orders (total) VALUES (?)", (42,))
                await tx.outbox_enqueue("webhooks", {"order": 1})

        On SQLite it holds the database's only write lock, in all processes. Keep it short: after `transaction_timeout`
        seconds the body is cancelled and rolled back. Waits for the lock as any write does. Workers are woken at the
        commit, and not before. What the body raises rolls back and leaves as itself; so does a cancellation.

        Raises:
            TransactionTimeout: the body took too long; nothing of it happened.
            RuntimeError: there is a transaction open around this call already.
            StoreError: the commit failed; nothing happened, but for OutcomeUnknown.
        """
        async with open_transaction(self._context, self._context.transaction_timeout) as tx:
            yield tx

    async def transact(self, function: Callable[[SyncTransaction], T]) -> T:
        """Run a plain `function` of a `SyncTransaction` in one transaction and return what it returns.

        As `transaction`, in a single hop into the database's thread: `function` must not wait for anything else. It
        runs once; what it raises rolls back and leaves as itself. Cancelled while it waits: it has not run.
        """
        return await transact(self._context, function, self._context.transaction_timeout)

    async def get_job(self, id: int) -> Job | None:
        """Return the job `id` of any queue, or None: it is acknowledged or pruned."""
        integer(id, "id", 0, MAX_ID)
        return await self._context.engine.read(lambda tx: jobs.get(tx, id))

    async def cancel_job(self, id: int) -> bool:
        """Cancel the job `id` of any queue; see `Queue.cancel_job`. The job of a cron run: see `Cron.cancel_run`."""
        self._context.engine.refuse_inside(None)
        job = await self.get_job(id)
        if job is None or job.queue == RUNS_QUEUE:
            return False
        return await cancel_job(self._context, job.queue, id)

    async def schedule(
        self, name: str, spec: str, queue: str, payload: JSON = None, opts: ScheduleOpts | None = None
    ) -> Schedule:
        """Register the schedule `name`, or replace it, and return it as it is stored.

        **Nothing fires until somebody calls `run_schedules`**, in this process or another.

        `spec` is ``@every <n><unit>`` with a unit of s, m, h or d. The first boundary is one interval after
        registering; later ones lie on that grid without drift. Registering again replaces queue, payload and options,
        and clears an error; the grid starts anew only if the interval changes, so a program may register at each
        start. At each boundary `payload` is enqueued into `queue` with that queue's defaults (300 s visibility, 3
        attempts, 5 s backoff, no expiry) and `opts` over them. To update a schedule register it again; to pause it
        unregister it.

        A checkpoint. Cancelled while it waits: nothing changed.

        Raises:
            InvalidName, ReservedName: the name of the schedule or of the queue.
            InvalidSpec, InvalidPayload: before anything is sent to the store.
        """
        new = new_schedule(self._context.engine.clock.now_ms(), name, spec, queue, payload, opts)
        return await self._context.engine.run(lambda tx: schedules.register(tx, new), in_tx="tx.schedule(…)")

    async def unschedule(self, name: str) -> bool:
        """Delete the schedule `name`; False: there is none. Jobs that it has fired stay."""
        check_name(name, "schedule")
        return await self._context.engine.run(lambda tx: schedules.unregister(tx, name), in_tx="tx.unschedule(name)")

    async def run_schedules(
        self, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Fire the boundaries of all schedules of this store until `stop` is flipped.

        One runner leads, in all processes; any further one waits as a standby and takes over when the leader stops or
        its lease of `leadership_ttl` seconds ends. Each boundary fires at least once while somebody runs the
        schedules: after an outage the oldest 64 that were missed fire one by one, the rest is skipped and counted.

        Ready (`task_status.started`) as soon as it stands by. Returns None after a stop, having released the lease.
        Cancelled: the lease is released under a shield of bounded length.

        Raises:
            LeadershipLost: the lease ended or was taken; nothing was fired on it. Start it again (a Supervisor does).
        """
        await run_schedules(self._context, stop, task_status=task_status)

    def events(self, buffer: int = 1000) -> Subscription[Event]:
        """Return what happens in this process from now on, as an async iterator of `Event`.

        Kinds: ``fired``, ``skipped``, ``schedule_realigned``, ``row_error`` (of a schedule); ``leader``, ``lost``;
        ``claimed``, ``settled``, ``dead``, ``lost``, ``raised``, ``handler_abandoned`` (of a queue's jobs);
        ``clock_set_back``, ``clock_set_forward`` (of the store). A reader that is more than `buffer` events behind
        loses the oldest; the subscription counts them as `missed`.
        """
        return self._context.events.subscribe(integer(buffer, "buffer", 1, 1_000_000))

    async def health(self) -> Health:
        """Return how the store stands. Costs time in proportion to the number of jobs; waits behind no writer."""
        engine = self._context.engine
        here = frozenset(name for name, runners in self._context.handlers.items() if runners > 0)
        (counts, ages, paused), of_schedules, of_cron = await engine.read(
            lambda tx: (health.queue_counts(tx), health.schedule_health(tx), health.cron_health(tx, here))
        )
        return Health(
            at=at(engine.clock.now_ms()),
            queues=counts,
            oldest_claimable=ages,
            paused=paused,
            schedules=of_schedules,
            cron=of_cron,
            clock_steps=engine.clock_steps,
            wal_bytes=engine.wal_bytes(),
            checkpoint_blocked=engine.checkpoint_blocked,
            feed=engine.feed_state,
            pending_writes=engine.pending_writes,
        )
