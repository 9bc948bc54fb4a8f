"""The SQLite engine: one file, three connections, one writer."""

from __future__ import annotations

import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar, cast

import trio
from attrs import define, field

from alkstore.clock import Clock
from alkstore.engines import files, migrate
from alkstore.engines.bridge import Bridge, InlineBridge, ThreadBridge, in_virtual_time
from alkstore.engines.driver import Connection, Driver, WideText, load_driver
from alkstore.engines.feed import COMMITS, Feed
from alkstore.engines.inotify import Inotify
from alkstore.engines.steps import ClockSteps
from alkstore.engines.turn import OF_A_READ, Turn, refuse_elsewhere, refuse_inside
from alkstore.engines.units import SQLiteTx
from alkstore.engines.watch import ForeignWatch
from alkstore.engines.writer import LOCK_DELAYS_S, Committed, Writer
from alkstore.errors import (
    MixedSQLite,
    SchemaMissing,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
)
from alkstore.sql import clock_repair
from alkstore.sql.schema import VERSION
from alkstore.sql.tx import Tx
from alkstore.values import Event, at

__all__ = ["SQLiteEngine"]

T = TypeVar("T")

CLOSE_S = 1.0
"""How long closing waits for units that still want the lock, and then for the checkpoint."""

WAL_KEPT_BYTES = 4 * 1024 * 1024
"""A log larger than this is emptied when the writer has nothing to do; SQLite keeps a file of this size for reuse."""

CHECKPOINT_EVERY_S = 1.0
"""The shortest time between two attempts to empty the log: one that is forbidden still walks over all of it."""


class _TurnIsOpen(Exception):
    """An interactive transaction has the connection that this read needs."""


FILES = ("", "-wal", "-shm")
"""The database, its log and the index of the log."""


@define(eq=False)
class SQLiteEngine:
    """Runs transactions on one SQLite file, or on a database in memory. Made by `open`, closed by `close`."""

    path: str
    driver: Driver
    clock: Clock
    feed: Feed
    steps: ClockSteps
    publish: Callable[[list[Event]], None]
    inline: bool
    synchronous: str
    busy_timeout: float
    virtual: bool
    _write_bridge: Bridge
    _read_bridge: Bridge
    home: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token, init=False, repr=False)
    """The trio run that it belongs to."""
    writer: Writer = field(init=False)
    checkpoint_blocked: bool = field(default=False, init=False)
    _reader: Connection = field(init=False)
    _watcher: Connection | None = field(default=None, init=False)
    _seen: int = field(default=0, init=False)
    _inotify: Inotify | None = field(default=None, init=False)
    _files: dict[str, files.FileIdentity] = field(factory=dict, init=False)
    """The database and what SQLite keeps beside it, by path."""
    _pid: int = field(factory=os.getpid, init=False)
    _identity: files.FileIdentity | None = field(default=None, init=False)
    _checkpointed: float = field(default=0.0, init=False)
    _closed: bool = field(default=True, init=False)
    _served: trio.Event = field(factory=trio.Event, init=False)
    _opening: list[Event] = field(factory=list, init=False)
    _forget_clock: Callable[[], None] = field(init=False)
    _unclosed: weakref.finalize[..., SQLiteEngine] = field(init=False)
    """Warns when this is forgotten, or the program ends."""

    @classmethod
    async def open(
        cls,
        path: str,
        *,
        clock: Clock,
        inline: bool,
        synchronous: str,
        create: bool,
        migrate: bool,
        driver: str,
        busy_timeout: float,
        publish: Callable[[list[Event]], None],
    ) -> SQLiteEngine:
        """Open the file, make or check the schema, and return an engine whose `serve` is not running yet.

        Waits up to `busy_timeout` seconds for others who open or convert the same file. Cancelled: everything that
        was opened is closed again.
        """
        bridge: Bridge = InlineBridge() if inline else ThreadBridge()
        self = cls(
            path=_resolved(path),
            driver=load_driver(driver),
            clock=clock,
            feed=Feed(clock),
            steps=ClockSteps.of(clock),
            publish=publish,
            inline=inline,
            synchronous=synchronous,
            busy_timeout=busy_timeout,
            virtual=in_virtual_time(),
            write_bridge=bridge,
            # a database in memory has one connection, and so one queue for it
            read_bridge=bridge if inline or path == ":memory:" else ThreadBridge(),
        )
        clock.now_ms()  # a clock that belongs to this trio run learns it here, in the trio thread
        await self._patiently(lambda: self._connect_all(create=create, may_migrate=migrate))
        self._forget_clock = clock.on_set(self.feed.touch_clock)
        return self

    async def serve(self) -> None:
        """Commit and watch for the commits of others, until `close` or cancelled."""
        self.publish(self._opening)  # not sooner: nobody could have subscribed
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            if self._watcher is not None:
                watch = ForeignWatch(
                    connection=self._watcher,
                    version=self._seen,
                    bridge=InlineBridge() if self.inline else ThreadBridge(),
                    inotify=self._inotify,
                    intact=self._check_files,
                    own_commits=lambda: self.writer.commits,
                    ask=self.writer.probe,
                    wake_all=self.feed.touch_all,
                    virtual=self.virtual,
                )
                nursery.start_soon(watch.serve)
            try:
                await self.writer.serve()
            finally:
                self._served.set()
            nursery.cancel_scope.cancel()

    async def run(self, work: Callable[[Tx], T], *, urgent: bool = False, in_tx: str | None = None) -> T:
        """Run `work` as one guarded state change; see `Writer.run`.

        `urgent`: it has a deadline of its own, so it goes first. `in_tx` names what does the same inside a
        transaction, for who calls this there and would wait for himself.
        """
        self.refuse_inside(in_tx)
        return cast(T, await self.writer.run(work, urgent=urgent))

    async def run_each(self, works: list[Callable[[Tx], T]], *, urgent: bool = False) -> list[T]:
        """Run each of `works` as a unit of its own, together; see `Writer.run_each`."""
        self.refuse_inside(None)
        if not works:
            await trio.lowlevel.checkpoint()
            return []
        return cast(list[T], await self.writer.run_each(cast(list[Callable[[Tx], Any]], works), urgent=urgent))

    async def run_alone(self, work: Callable[[SQLiteTx], T]) -> T:
        """Run a user's function in a transaction of its own, once; see `Writer.run_alone`."""
        self.refuse_inside("tx itself")
        return cast(T, await self.writer.run_alone(cast(Callable[[Tx], Any], work)))

    def refuse_inside(self, in_tx: str | None) -> None:
        """Raise at once if the caller stands in an open transaction of this database; see `run`."""
        refuse_elsewhere(self.home)
        refuse_inside(self.database, in_tx)

    @property
    def database(self) -> Hashable:
        """What tells this database from all others: stores of one process may have the same file open."""
        return self if self._identity is None else self._identity

    async def begin(self) -> Turn:
        """Open an interactive transaction, which has to be given to `end`; see `Writer.begin`."""
        refuse_elsewhere(self.home)
        return await self.writer.begin()

    async def in_turn(self, _turn: Turn, work: Callable[[], T]) -> T:
        """Run `work` on the connection of the open turn. Cancelled while it waits: it has not run."""
        return await self._write_bridge.call(work)

    async def end(self, turn: Turn, *, commit: bool) -> None:
        """Commit or roll back what `begin` has opened; see `Writer.end`."""
        await self.writer.end(turn, commit=commit)

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run `work` on one consistent snapshot, without waiting behind writes. Cancelled while it waits: nothing."""
        self.refuse_inside(OF_A_READ)
        if self._closed:
            raise StoreClosed("the store is closed")
        while True:
            if self._watcher is None and (turn := self.writer.turn) is not None:
                await turn.over.wait()
            with suppress(_TurnIsOpen):
                return await self._patiently(lambda: self._read(work), self._read_bridge)

    def interrupt(self, tx: SQLiteTx) -> None:
        """Stop the statement that runs in `tx`, if one does."""
        tx.connection.interrupt()

    @property
    def clock_steps(self) -> int:
        """How often the clock was seen to step."""
        return self.steps.count

    @property
    def pending_writes(self) -> int:
        """Units that wait for the writer."""
        return len(self.writer.lanes)

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log; 0 in memory."""
        try:
            return 0 if self._identity is None else os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    @property
    def feed_state(self) -> str:
        if self._watcher is None:
            return "none"
        return "polling" if self._inotify is None else "inotify"

    async def drain(self) -> None:
        """Take no more work and wait a bounded time until what waits is answered. Call while `serve` is running."""
        self.writer.drain()
        with trio.move_on_after(CLOSE_S):
            await self._served.wait()
            return
        self.writer.refuse("the store is closed", begun=False)
        self.writer.connection.interrupt()

    async def close(self) -> None:
        """Close every connection, after a checkpoint of bounded length. Idempotent; not cancelled half-way."""
        if self._closed:
            return
        self._closed = True
        self._unclosed.detach()
        self.writer.refuse("the store is closed")
        self._forget_clock()
        if self._inotify is not None:
            self._inotify.close()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                nursery.start_soon(self._interrupt_long_checkpoint)
                await self._write_bridge.call(self._last_checkpoint)
                nursery.cancel_scope.cancel()
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                nursery.start_soon(self._interrupt_long_read)
                await self._read_bridge.call(self._reader.close)  # there may be a read in flight
                nursery.cancel_scope.cancel()
            await self._write_bridge.call(self._disconnect_all)

    async def _interrupt_long_checkpoint(self) -> None:
        await trio.sleep(CLOSE_S)
        self.writer.connection.interrupt()

    async def _interrupt_long_read(self) -> None:
        await trio.sleep(CLOSE_S)
        self._reader.interrupt()

    # ---------------------------------------------------------------------------------------------- plumbing

    async def _patiently(self, function: Callable[[], T], bridge: Bridge | None = None) -> T:
        """Call until it is not busy any more, at most for `busy_timeout`."""
        bridge = bridge or self._write_bridge
        began, attempt = bridge.time(), 0
        while True:
            try:
                return await bridge.call(function)
            except StoreBusy:
                if bridge.time() - began >= self.busy_timeout:
                    raise
            await bridge.sleep(LOCK_DELAYS_S[min(attempt, len(LOCK_DELAYS_S) - 1)])
            attempt += 1

    def _read(self, work: Callable[[Tx], T]) -> T:
        if self._closed:
            raise StoreClosed("the store is closed")
        if self._watcher is None and self.writer.turn is not None:  # in memory there is one connection for all
            raise _TurnIsOpen
        connection = self._reader
        if self._watcher is None:  # nobody else can write between two statements
            return work(SQLiteTx(connection, self.clock.now_ms()))
        self._check_files()
        connection.all("BEGIN")
        try:
            return work(SQLiteTx(connection, self.clock.now_ms()))
        finally:
            if connection.in_transaction:
                connection.all("COMMIT")

    def _connect_all(self, *, create: bool, may_migrate: bool) -> None:
        connections: list[Connection] = []
        try:
            writer = self._connect_file(connections, create=create, may_migrate=may_migrate)
            if self.path == ":memory:":
                self._reader = writer
            else:
                self._reader = self._connect(connections)
                self._reader.all("PRAGMA query_only = ON")
                self._watcher = self._connect(connections)
                self._watcher.all("PRAGMA query_only = ON")
                self._seen = _data_version(self._watcher)  # before anybody can look at the store and wait
                beside = {f"{self.path}{suffix}": files.identity(f"{self.path}{suffix}") for suffix in FILES}
                self._files = {path: found for path, found in beside.items() if found is not None}
            version = _data_version(writer)
            self.writer = Writer(
                bridge=self._write_bridge,
                inline=self.inline,
                clock=self.clock,
                steps=self.steps,
                connect=self._connect_anew,
                intact=self._check_files,
                publish=self._published,
                untidy=self._untidy,
                tidy=self._tidy,
                busy_timeout=self.busy_timeout,
                connection=writer,
                alone=self.path == ":memory:",
                data_version=version,
            )
            if self._watcher is not None:  # at last, so that no failure leaves it open
                self._inotify = Inotify.open(f"{self.path}-wal")
        except BaseException as error:
            for connection in connections:
                connection.close()
            self._unregister()
            if isinstance(error, StoreError) and self.path not in str(error):
                error.args = (f"{self.path}: {error}",)
            raise
        self._closed = False
        self._unclosed = weakref.finalize(self, _warn_of_unclosed, self.path)

    def _connect_file(self, connections: list[Connection], *, create: bool, may_migrate: bool) -> Connection:
        in_memory = self.path == ":memory:"
        if not in_memory:
            self._check_path(create=create)
            self._register()  # before a second copy of SQLite has the file open: even its closing would do harm
        writer = self._connect(connections)
        version = migrate.found_version(writer)  # before anything is touched
        if version < VERSION and not (create if version == 0 else may_migrate):
            what = "has no tables of alkstore" if version == 0 else f"has schema version {version}"
            option = "create=False" if version == 0 else "migrate=False"
            raise SchemaMissing(f"{self.path} {what}, and {option} forbids making version {VERSION}")
        if version == VERSION:
            migrate.verify(writer)
        if not in_memory:
            self._register()  # now there is a file
            if writer.all("PRAGMA journal_mode")[0][0] != "wal":
                mode = writer.all("PRAGMA journal_mode = WAL")[0][0]
                if mode != "wal":
                    raise StoreUnavailable(f"{self.path} cannot be put in WAL mode, it stays in {mode!r}")
        self._prepare(writer)
        writer.all("BEGIN IMMEDIATE")
        migrate.install(writer)
        migrate.verify(writer)
        now = self.clock.now_ms()
        self.steps.step(now)
        opening = self._repair_at_open(SQLiteTx(writer, now))
        writer.all("COMMIT")
        self.steps.accept(now, stepped=bool(opening))
        self._opening += opening
        return writer

    def _connect(self, connections: list[Connection]) -> Connection:
        connection = self.driver.connect(self.path)
        connections.append(connection)
        if connection.all("PRAGMA encoding")[0][0] != "UTF-8":
            connections[-1] = connection = WideText(connection)
        return connection

    def _connect_anew(self) -> Connection:
        connections: list[Connection] = []
        try:
            connection = self._connect(connections)
            self._prepare(connection)
        except BaseException:
            for opened in connections:
                opened.close()
            raise
        return connection

    def _prepare(self, connection: Connection) -> None:
        connection.all(f"PRAGMA synchronous = {self.synchronous}")
        connection.all(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")

    def _repair_at_open(self, tx: SQLiteTx) -> list[Event]:
        now = tx.now()
        newest = clock_repair.newest_stamp(tx)
        if newest > now + 1_000 and (repaired := clock_repair.repair(tx, 0)):
            details = {
                "seconds": (newest - now) / 1000,
                "leases": repaired.leases,
                "locks": repaired.locks,
                "jobs": repaired.jobs,
            }
            return [Event("clock_set_back", at(now), "store", details)]
        return []

    def _published(self, done: Committed) -> None:
        if done.stepped:
            self.feed.touch_clock()
        elif done.foreign:
            self.feed.touch_all()
        if done.committed:
            self.feed.touch((*done.topics, COMMITS))
        if done.events:
            self.publish(done.events)

    def _check_path(self, *, create: bool) -> None:
        folder = os.path.dirname(os.path.abspath(self.path))
        if os.path.isdir(self.path):
            raise StoreUnavailable(f"{self.path} is a folder; a store is one file in a folder")
        if not os.path.isdir(folder):
            raise StoreUnavailable(f"{self.path} cannot be opened: the folder {folder} does not exist")
        if not os.path.exists(self.path):
            if not create:
                raise SchemaMissing(f"{self.path} does not exist, and create=False forbids making it")
            if not os.access(folder, os.W_OK):
                raise StoreReadOnly(f"{self.path} cannot be made: the folder {folder} is not writable")
        elif not os.access(self.path, os.W_OK) or not os.access(folder, os.W_OK):
            raise StoreReadOnly(
                f"{self.path} or its folder is not writable; a store writes, and SQLite keeps its log beside the file"
            )
        elif os.stat(self.path).st_nlink > 1:
            raise MixedSQLite(
                f"{self.path} has another name too (a hard link): SQLite keeps the log beside the name by which it has "
                "opened the file, so whoever uses the other name would lose commits; remove it, or make it a copy"
            )

    def _check_files(self) -> None:
        """Refuse to go on without one of the files: commits would go into one that nobody will ever find.

        Reads would come from there too, and whoever sleeps until there is work would sleep for ever.
        """
        if self._pid != os.getpid():
            raise MixedSQLite(
                f"{self.path} was opened before this process was forked, and SQLite's locks do not survive a fork: let "
                "every process open a store of its own (multiprocessing: spawn)"
            )
        for path, found in self._files.items():
            if files.identity(path) != found:
                raise MixedSQLite(
                    f"{path} was taken away or replaced while the store was open: either another copy of SQLite in "
                    "this process has closed the file (use one copy for all, see driver=), or somebody deleted, moved "
                    "or restored it; nothing more is read or written"
                )

    def _register(self) -> None:
        if self._identity is None:
            self._identity = files.register(self.path, self.driver.name)

    def _unregister(self) -> None:
        if self._identity is not None:
            files.unregister(self._identity)
            self._identity = None

    def _untidy(self) -> bool:
        return self.checkpoint_blocked or self.wal_bytes() > WAL_KEPT_BYTES

    def _tidy(self) -> float:
        """Empty a large log when there is nothing else to do, and return the seconds until that is wanted again.

        A reader's old snapshot can forbid it, and nobody tells us when that has gone.
        """
        if self.wal_bytes() <= WAL_KEPT_BYTES:
            self.checkpoint_blocked = False
            return math.inf
        wait = self._checkpointed + CHECKPOINT_EVERY_S - time.monotonic()
        if wait <= 0:
            try:
                self._check_files()
                busy, logged, moved = self.writer.connection.all("PRAGMA wal_checkpoint(TRUNCATE)")[0]
            except StoreError:  # a full disk, say: the log keeps everything, and the writers meet it themselves
                self.checkpoint_blocked = True
            else:
                self.checkpoint_blocked = bool(busy) or moved < logged
            self._checkpointed = time.monotonic()
            wait = CHECKPOINT_EVERY_S if self.checkpoint_blocked else math.inf
        return math.inf if self.virtual else wait  # nothing polls in virtual time

    def _last_checkpoint(self) -> None:
        with suppress(StoreError):  # closing tries once more, and the next open replays the log in any case
            self._check_files()
            self.writer.connection.all("PRAGMA wal_checkpoint(PASSIVE)")

    def _disconnect_all(self) -> None:
        for connection in {id(c): c for c in (self._watcher, self._reader, self.writer.connection) if c}.values():
            connection.close()
        self._unregister()


def _warn_of_unclosed(path: str) -> None:
    warnings.warn(f"the store {path} was not closed", ResourceWarning, stacklevel=2)


def _resolved(path: str) -> str:
    # the working directory may change; and SQLite keeps the log beside the file, not beside a link to it
    return path if path == ":memory:" else os.path.realpath(path)


def _data_version(connection: Connection) -> int:
    return int(connection.all("PRAGMA data_version")[0][0])
