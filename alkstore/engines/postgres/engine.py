"""The PostgreSQL engine: each unit is a short transaction of its own on a connection of the pool."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
import trio
from attrs import define, field, frozen

from alkstore.clock import Clock
from alkstore.engines.bridge import in_virtual_time
from alkstore.engines.feed import COMMITS, Feed
from alkstore.engines.postgres.clock import ServerClock
from alkstore.engines.postgres.connection import BEGIN, CHECK, RESET, PostgresTx, connect, cut, is_repeatable, mapped
from alkstore.engines.postgres.notice import channel
from alkstore.engines.postgres.notify import Listener, Notifier, look_regularly
from alkstore.engines.postgres.pool import Pool, Slot
from alkstore.engines.postgres.schema import prepare
from alkstore.engines.steps import TOLERANCE_MS, ClockSteps
from alkstore.engines.turn import OF_A_READ, refuse_elsewhere, refuse_inside
from alkstore.errors import InvalidName, OutcomeUnknown, StoreClosed, StoreError, StoreUnavailable
from alkstore.every import MAX_MS
from alkstore.sql import clock_repair
from alkstore.sql.tx import Row, Tx
from alkstore.values import Event, at

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["PostgresEngine"]

T = TypeVar("T")

STATEMENT_S = 5.0
"""Beyond the wait for a row, no statement of the store's own that changes something takes longer."""

READ_S = 60.0
"""Neither does one that only reads, such as the counts of millions of jobs."""

SILENT_AFTER_S = 5.0
"""So long after its time limit a call whose server has said nothing finds its connection cut."""

LOOK_FOR_SILENT_S = 1.0

CANCEL_S = 2.0
"""A statement that has not stopped this long after the server was asked to stop it: its connection is cut."""

REPEATS = 5
"""How often a unit is run again after a deadlock, a serialization failure or a lost connection."""

PROMPT_S = 0.25
"""A reading of the server's clock that took longer says little about what it reads now."""

SLOWEST_S = 0.9
"""But where all take long, such as over a slow line, it may take twice as long as the quickest, up to this."""

IDLE_TOO_LONG = "25P03"
"""How the server ends a transaction in which it waits for a statement: it has not seen a COMMIT."""

_WHEREVER = ("53", "57", "58", "XX")
"""Classes of errors that any statement may meet."""

CLOSE_S = 1.0
"""How long closing waits for what is under way."""

MAX_SCHEMA_BYTES = 63 - len(channel(""))
"""The server cuts longer identifiers."""


@frozen
class _Step:
    """A step of the clock."""

    read: int
    """What it read afterwards (ms)."""
    by: int
    """How far it was stepped (ms); negative: back."""
    since: int
    """What it may have read after the step at the soonest (ms)."""


@define(eq=False)
class PostgresTurn:
    """An interactive transaction: a slot that is lent to it for as long as it is open."""

    tx: PostgresTx
    slot: Slot
    lent: AsyncExitStack


@define(eq=False)
class PostgresEngine:
    """Runs transactions on a PostgreSQL server. Made by `open`, closed by `close`."""

    url: str = field(repr=False)
    schema: str
    clock: Clock
    """The server's, unless another one was given to the store, for a test."""
    feed: Feed
    publish: Callable[[list[Event]], None]
    busy_timeout: float
    home: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token, init=False, repr=False)
    """The trio run that it belongs to."""
    virtual: bool = field(factory=in_virtual_time, init=False)
    pool: Pool = field(init=False)
    notifier: Notifier = field(init=False)
    steps: ClockSteps = field(init=False)
    _stepping: threading.Lock = field(factory=threading.Lock, init=False, repr=False)
    _quickest: float = field(default=math.inf, init=False)
    """Seconds that the quickest reading of the server's clock took."""
    _unmended: list[_Step] = field(factory=list, init=False)
    """Those that nobody has seen to yet."""
    _repairs: int = field(default=0, init=False)
    """How many steps of the clock were repaired in the database, by anybody, as far as this store has noticed them."""
    _opening: list[Event] = field(factory=list, init=False)
    _listener: Listener | None = field(default=None, init=False)
    _closed: bool = field(default=True, init=False)
    _busy: int = field(default=0, init=False)
    _idle: trio.Event = field(factory=trio.Event, init=False)
    _forget_clock: Callable[[], None] = field(init=False)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str,
        clock: Clock,
        create: bool,
        migrate: bool,
        busy_timeout: float,
        connections: int,
        listen: bool,
        publish: Callable[[list[Event]], None],
    ) -> PostgresEngine:
        """Connect, make or check the schema, and return an engine whose `serve` is not running yet.

        Waits up to `busy_timeout` seconds for a server that is away. Cancelled: everything is closed again.

        Raises:
            InvalidName: the schema's name is longer than 54 bytes.
        """
        if len(schema.encode()) > MAX_SCHEMA_BYTES:
            raise InvalidName(f"schema must not be longer than {MAX_SCHEMA_BYTES} bytes, which {schema!r} is")
        self = cls(url, schema, clock, Feed(clock), publish, busy_timeout)
        self.pool = Pool(lambda: connect(url), connections, busy_timeout)
        self.notifier = Notifier(lambda: connect(url), schema)
        if listen and not self.virtual:
            self._listener = Listener(lambda: connect(url), schema, self.notifier.me, self.feed)
        self.steps = ClockSteps.of(clock)
        clock.now_ms()
        try:
            async with self.pool.lend(urgent=True) as slot:
                connection = await self.pool.open(slot)
                await slot.call(
                    lambda: prepare(connection, schema, create=create, may_migrate=migrate, patience=busy_timeout),
                    within=math.inf,
                    stop=slot.cut,
                )
                await self._mend_at_open(slot)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await self.pool.close()
            if isinstance(error, StoreUnavailable):  # perhaps it was cut off since it was cancelled
                await trio.lowlevel.checkpoint_if_cancelled()
            raise
        self._closed = False
        if self.virtual:
            _virtual_engines().append(self)
        self._forget_clock = clock.on_set(self.feed.touch_clock)
        return self

    async def serve(self) -> None:
        """Tell and hear what changes, and cut what is lost, until cancelled."""
        self.publish(self._opening)  # not sooner: nobody could have subscribed
        if self.virtual:  # time would leap over what is on its way: see `_committed`
            await trio.sleep_forever()
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            nursery.start_soon(self.notifier.serve)
            nursery.start_soon(look_regularly, self.feed)
            nursery.start_soon(self._cut_silent)
            if self._listener is not None:
                nursery.start_soon(self._listener.serve)

    @property
    def database(self) -> tuple[str, str]:
        """What a transaction is on: one that is open on the same would be waited for for ever."""
        return self.url, self.schema

    def refuse_inside(self, instead: str | None) -> None:
        """See `alkstore.engines.turn.refuse_inside`."""
        refuse_elsewhere(self.home)
        refuse_inside(self.database, instead)

    async def run(self, work: Callable[[Tx], T], *, urgent: bool = False, in_tx: str | None = None) -> T:
        """Run `work` as one guarded state change, again if it meets a deadlock or a connection that was lost.

        Cancelled: it has had no effect, which may take a few seconds. What has come to its COMMIT runs to its end,
        and its result is returned.

        Raises:
            OutcomeUnknown: the connection was lost at COMMIT; or it was cut, since no answer came to one who was
                cancelled.
        """
        self.refuse_inside(in_tx)
        return await self._run(work, urgent=urgent)

    async def run_each(self, works: list[Callable[[Tx], T]], *, urgent: bool = False) -> list[T]:
        """Run each of `works` as a unit of its own, as many at a time as there are connections.

        All run, whatever becomes of others; the first error is raised.
        """
        self.refuse_inside(None)
        results: list[Any] = [None] * len(works)
        errors: list[BaseException] = []

        left = iter(range(len(works)))

        async def some() -> None:
            for index in left:
                try:
                    results[index] = await self._run(works[index], urgent=urgent)
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)

        await trio.lowlevel.checkpoint()
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            for _ in range(min(len(works), self.pool.size)):  # more would only wait in line, against busy_timeout
                nursery.start_soon(some)
        if errors:
            raise errors[0]
        return cast(list[T], results)

    async def run_alone(self, work: Callable[[PostgresTx], T]) -> T:
        """Run a user's function in a transaction of its own, once."""
        self.refuse_inside("tx itself")
        return await self._run(cast(Callable[[Tx], T], work), begin=self._begin_users, again=False)

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run `work` on one consistent snapshot. Cancelled: the server is asked to stop, and then cut off."""
        self.refuse_inside(OF_A_READ)
        return await self._run(work, urgent=True, begin=_READ, commit=False)

    async def begin(self) -> PostgresTurn:
        """Open an interactive transaction, which has to be given to `end`. Cancelled while it waits: none is open."""
        refuse_elsewhere(self.home)
        async with AsyncExitStack() as stack:
            await self._mend()
            slot = await stack.enter_async_context(self._lent(urgent=False))
            tx = await self._attempt(slot, lambda tx: tx, begin=self._begin_users, again=False, end=False)
            return PostgresTurn(tx, slot, stack.pop_all())
        raise AssertionError

    async def in_turn(self, turn: PostgresTurn, work: Callable[[], T]) -> T:
        """Run `work` on the connection of an open turn. Cancelled while it waits: it has not run."""
        return await turn.slot.bridge.call(work)

    async def end(self, turn: PostgresTurn, *, commit: bool) -> None:
        """Commit or roll back what `begin` has opened. Not cancelled half-way."""
        slot, tx = turn.slot, turn.tx
        with trio.CancelScope(shield=True):
            try:
                await _uninterrupted(tx)
                await slot.call(lambda: self._end(slot, tx, commit=commit), within=self._longest)
                if commit:
                    self._committed(tx)
            finally:
                await turn.lent.aclose()

    def interrupt(self, tx: PostgresTx) -> None:
        """Ask the server to stop the statement that runs in `tx`; if it has not stopped soon, cut the connection."""
        if tx.interrupted_at is None:
            tx.interrupted_at = time.monotonic()
        if time.monotonic() - tx.interrupted_at > CANCEL_S:
            cut(tx.connection)
        elif tx.interruption is None and not tx.committing:
            tx.interruption = trio.Event()
            trio.lowlevel.spawn_system_task(_cancel, tx, tx.interruption)

    def wal_bytes(self) -> int:
        return 0

    @property
    def checkpoint_blocked(self) -> bool:
        return False

    @property
    def clock_steps(self) -> int:
        return self.steps.count

    @property
    def pending_writes(self) -> int:
        return len(self.pool)

    @property
    def feed_state(self) -> str:
        return "polling" if self._listener is None else self._listener.state

    async def drain(self) -> None:
        """Take no more work, and wait a bounded time until what is under way has ended."""
        self._closed = True
        with trio.move_on_after(CLOSE_S):
            while self._busy:
                await self._idle.wait()
        with trio.move_on_after(CLOSE_S):
            await self.notifier.flush()

    async def close(self) -> None:
        """Close every connection. Idempotent; not cancelled half-way."""
        self._closed = True
        if self in _virtual_engines():
            _virtual_engines().remove(self)
        self._forget_clock()
        with trio.CancelScope(shield=True):
            self.pool.cut_lent()
            await self.pool.close()
            self.notifier.close()

    # ---------------------------------------------------------------------------------------------- plumbing

    async def _run(
        self, work: Callable[[Tx], T], *, urgent: bool = False, begin: str = "", again: bool = True, commit: bool = True
    ) -> T:
        await self._mend()
        async with self._lent(urgent=urgent) as slot:
            return await self._attempt(slot, work, begin=begin or self._begin_ours, again=again, commit=commit)

    async def _attempt(
        self,
        slot: Slot,
        work: Callable[[PostgresTx], T],
        *,
        begin: str,
        again: bool,
        commit: bool = True,
        end: bool = True,
    ) -> T:
        """Run `work` in a transaction, anew while nothing has come of it.

        `again`: although it has begun, since it is the store's own. Only of those it is known how long they may take,
        and only those are stopped when the caller is cancelled: a user's have a time limit that does.
        """
        limit = READ_S if begin is _READ else self._longest

        def stop(tx: PostgresTx) -> None:
            if again or not tx.begun:
                self.interrupt(tx)

        for attempt in range(REPEATS + 1):
            tx = self._tx(await self.pool.open(slot))
            try:
                result = await slot.call(
                    lambda tx=tx: self._transact(slot, tx, work, begin, again=again, commit=commit, end=end),  # type: ignore[misc]
                    within=limit + SILENT_AFTER_S,
                    stop=lambda tx=tx: stop(tx),  # type: ignore[misc]
                )
            except OutcomeUnknown:
                raise
            except StoreError as error:
                if tx.interrupted_at is not None:  # then it is our own interruption that made it fail
                    await trio.lowlevel.checkpoint_if_cancelled()
                if attempt == REPEATS or (tx.begun and not again) or not is_repeatable(error):
                    raise
            else:
                if commit and end:
                    self._committed(tx)
                return result
            finally:
                await _uninterrupted(tx)
        raise AssertionError

    @asynccontextmanager
    async def _lent(self, *, urgent: bool) -> AsyncIterator[Slot]:
        self._check_open()
        async with self.pool.lend(urgent=urgent) as slot:
            self._check_open()
            self._busy += 1
            try:
                yield slot
            finally:
                self._busy -= 1
                if self._busy == 0:
                    self._idle.set()
                    self._idle = trio.Event()

    def _tx(self, connection: Connection[Row]) -> PostgresTx:
        manual = None if isinstance(self.clock, ServerClock) else self.clock.now_ms()
        return PostgresTx(connection, self.schema, manual, self._learn)

    def _transact(
        self,
        slot: Slot,
        tx: PostgresTx,
        work: Callable[[PostgresTx], T],
        begin: str,
        *,
        again: bool,
        commit: bool,
        end: bool,
    ) -> T:
        """Run `work` after BEGIN. Whatever fails, the connection is clean afterwards, or closed."""
        self._command(slot, tx, begin)
        tx.begun = True
        if not again:
            slot.due = math.inf
        try:
            result = work(tx)
        except BaseException:
            self._end(slot, tx, commit=False)
            raise
        if end:
            self._end(slot, tx, commit=commit)
        return result

    # SET LOCAL and not a setting of the session, which a transaction pooler would give to somebody else.
    # A user's statements are bounded by the time limit of their transaction.

    @property
    def _begin_users(self) -> str:
        return f"{BEGIN}; SET LOCAL lock_timeout = {max(round(self.busy_timeout * 1000), 1)}"

    @property
    def _begin_ours(self) -> str:
        return f"{self._begin_users}; SET LOCAL statement_timeout = {round(self._longest * 1000)}"

    @property
    def _longest(self) -> float:
        return self.busy_timeout + STATEMENT_S

    def _end(self, slot: Slot, tx: PostgresTx, *, commit: bool) -> None:
        slot.due = time.monotonic() + SILENT_AFTER_S + (self._longest if commit else 0)
        reset = RESET if tx.has_users else ""
        if not commit:
            with suppress(StoreError):  # then the connection is closed, and the server rolls back
                self._command(slot, tx, "ROLLBACK" + reset)
            return
        tx.will_commit()
        check = CHECK if tx.has_users else ""
        try:
            cursor = tx.connection.execute(f"{check}COMMIT{reset}".encode())
            if check:
                cursor.nextset()
            message = cursor.statusmessage
        except psycopg.Error as error:
            if tx.is_open:  # it has not come to the COMMIT
                with suppress(StoreError):
                    self._command(slot, tx, "ROLLBACK" + reset)
                raise mapped(error) from error
            slot.discard()
            if _may_be_committed(error, reset):
                raise OutcomeUnknown(
                    f"the server went away at COMMIT, so what was committed is not known: {error}; look whether it is "
                    "there, or repeat it with the same key"
                ) from error
            raise mapped(error) from error
        if message == "ROLLBACK":
            raise StoreError("nothing was committed, since a statement of the transaction failed")

    def _command(self, slot: Slot, tx: PostgresTx, sql: str) -> None:
        try:
            tx.connection.execute(sql.encode())
        except psycopg.Error as error:
            slot.discard()
            raise mapped(error) from error

    def _committed(self, tx: PostgresTx) -> None:
        topics = (*tx.topics, COMMITS)
        self.feed.touch(topics)
        if self.virtual:
            for other in _virtual_engines():
                if other is not self and other.database == self.database:
                    other.feed.touch(topics)
        else:
            self.notifier.tell(tx.topics)
        if tx.events:
            self.publish(tx.events)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    async def _cut_silent(self) -> None:
        while True:
            await trio.sleep(LOOK_FOR_SILENT_S)
            self.pool.cut_silent()

    # ------------------------------------------------------------------------------------- a clock that is stepped

    def _learn(self, read: int, took: float) -> None:
        """Take note of what the clock reads now, unless it `took` so many seconds that it may read otherwise by now.

        In any thread.
        """
        with self._stepping:
            self._quickest = min(self._quickest, took)
            is_prompt = took <= max(PROMPT_S, min(2 * self._quickest, SLOWEST_S))
            if isinstance(self.clock, ServerClock) and (is_prompt or not self.clock.is_known):
                self.clock.learn(read)
            if not is_prompt:
                return
            by, before = self.steps.step(read), self.steps.accepted
            self.steps.accept(read, stepped=by != 0)
            if by:
                self._unmended.append(_Step(read, by, before + by - TOLERANCE_MS))

    async def _mend(self) -> None:
        """Before anything else is decided, put right what a step of the clock has spoiled."""
        if not isinstance(self.clock, ServerClock):
            self._learn(self.clock.now_ms(), 0.0)
        while self._unmended:
            step = self._unmended.pop()
            kind = "clock_set_forward" if step.by > 0 else "clock_set_back"
            details: dict[str, object] = {"seconds": abs(step.by) / 1000}
            if step.by < 0:
                try:
                    async with self._lent(urgent=True) as slot:
                        details |= await self._repair(slot, step.read - step.by, step.since)
                except BaseException:
                    self._unmended.append(step)
                    raise
            self.publish([Event(kind, at(step.read), "store", details)])
            self.feed.touch_clock()

    async def _mend_at_open(self, slot: Slot) -> None:
        """A server that has taken over from another may have a clock that is behind it."""

        def look(tx: Tx) -> tuple[int, int, int]:
            return clock_repair.newest_stamp(tx), tx.now(), clock_repair.counted(tx)

        newest, now, self._repairs = await self._attempt(slot, look, begin=_READ, again=True, commit=False)
        if newest > now + TOLERANCE_MS:
            repaired = await self._repair(slot, 0)
            if any(repaired.values()):
                self.steps.count += 1
                details = {"seconds": (newest - now) / 1000, **repaired}
                self._opening.append(Event("clock_set_back", at(now), "store", details))

    async def _repair(self, slot: Slot, before: int, since: int = MAX_MS) -> dict[str, int]:
        def repair(tx: Tx) -> tuple[clock_repair.Repaired, int]:
            tx.lock(_ONE_AT_A_TIME)
            by_others = clock_repair.counted(tx) > self._repairs
            return clock_repair.repair(tx, before, since, again=by_others), clock_repair.counted(tx)

        repaired, self._repairs = await self._attempt(slot, repair, begin=self._begin_ours, again=True)
        return {"leases": repaired.leases, "locks": repaired.locks, "jobs": repaired.jobs}


# who notices a step second has to find what the first has noted
_ONE_AT_A_TIME = "SELECT value FROM __alkstore_meta WHERE key = 'schema_version' /*for update*/"

_READ = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = {round(READ_S * 1000)}"

_engines_of_this_run: trio.lowlevel.RunVar[list[PostgresEngine]] = trio.lowlevel.RunVar("engines in virtual time")


def _virtual_engines() -> list[PostgresEngine]:
    """The open engines of this trio run. In virtual time everybody is in here, and is told at once."""
    try:
        return _engines_of_this_run.get()
    except LookupError:
        engines: list[PostgresEngine] = []
        _engines_of_this_run.set(engines)
        return engines


def _may_be_committed(error: psycopg.Error, reset: str) -> bool:
    """Whether a message of COMMIT and `reset` that failed so may have come beyond the COMMIT."""
    state = error.sqlstate or ""
    if reset and state.startswith(_WHEREVER):
        return True
    return isinstance(mapped(error), StoreUnavailable) and state != IDLE_TOO_LONG


async def _cancel(tx: PostgresTx, asked: trio.Event) -> None:
    try:
        limiter = trio.CapacityLimiter(1)  # of its own: the program's threads may all be waiting
        await trio.to_thread.run_sync(tx.ask_to_stop, CANCEL_S, limiter=limiter)
    finally:
        tx.interruption = None
        asked.set()


async def _uninterrupted(tx: PostgresTx) -> None:
    """Return when nobody is asking the server to stop `tx`: a late request would stop what comes after it."""
    with trio.CancelScope(shield=True):
        while tx.interruption is not None:
            await tx.interruption.wait()
