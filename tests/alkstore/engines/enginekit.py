"""What the tests of the engine share: stores whose connections are watched or fail, and others who use the file."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import outcome
import trio
from attrs import define, field

from alkstore import Store, open_store
from alkstore.engines.driver import Connection, load_driver
from alkstore.engines.sqlite import SQLiteEngine
from alkstore.errors import StoreError
from alkstore.sql.tx import Params, Row, Tx
from tests.conformance.helpers import no_group

START = 1_800_000_000_000
"""Where a clock that is moved by hand begins, in ms."""

WITHIN_S = 20.0
"""No wait for a thread or a process is longer."""

Answer: TypeAlias = outcome.Outcome[Any]


def engine_of(store: Store) -> SQLiteEngine:
    engine = store._context.engine
    assert isinstance(engine, SQLiteEngine)
    return engine


@define(eq=False)
class Spied:
    """A connection that notes its statements; `before` is called with each, and may raise instead of it."""

    inner: Connection
    before: Callable[[str], object] = lambda sql: None
    log: list[str] = field(factory=list)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        self.log.append(sql)
        self.before(sql)
        return self.inner.all(sql, params)

    def script(self, sql: str) -> None:
        self.inner.script(sql)

    @property
    def in_transaction(self) -> bool:
        return self.inner.in_transaction

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()

    def count(self, sql: str) -> int:
        return self.log.count(sql)


def spy(store: Store) -> Spied:
    """Watch the writer's connection from here on."""
    writer = engine_of(store).writer
    spied = Spied(writer.connection)
    writer.connection = spied
    return spied


@define(eq=False)
class Fault:
    """Raises `error` at the `at`-th statement that `matches`, once; `hard`: the transaction is gone with it."""

    connection: Connection
    error: StoreError
    matches: Callable[[str], bool]
    at: int = 1
    hard: bool = True
    seen: int = 0

    def __call__(self, sql: str) -> None:
        if self.matches(sql):
            self.seen += 1
            if self.seen == self.at:
                if self.hard and self.connection.in_transaction:
                    self.connection.all("ROLLBACK")
                raise self.error


MAKE_MARKS = "CREATE TABLE IF NOT EXISTS marks (name TEXT NOT NULL, part INTEGER NOT NULL DEFAULT 0)"
MARK = "INSERT INTO marks (name, part) VALUES (:name, :part)"


def marks(name: str, parts: int = 1) -> Callable[[Tx], str]:
    """A unit of work that writes `parts` rows and returns its name."""

    def work(tx: Tx) -> str:
        for part in range(parts):
            tx.all(MARK, {"name": name, "part": part})
        return name

    return work


@asynccontextmanager
async def marked_store(target: object, **options: Any) -> AsyncIterator[Store]:
    """A store with an embedder's table ``marks`` beside its own."""
    async with open_store(target, **options) as store:  # type: ignore[arg-type]
        await engine_of(store).run(lambda tx: tx.all(MAKE_MARKS))
        yield store


def durable(path: Path | str) -> list[str]:
    """The names in ``marks`` that anybody else can see, in order of writing."""
    with closing(sqlite3.connect(path)) as other:
        return [name for (name,) in other.execute("SELECT name FROM marks ORDER BY rowid")]


def value(answer: Answer) -> Any:
    assert isinstance(answer, outcome.Value), answer
    return answer.value


def error(answer: Answer) -> BaseException:
    assert isinstance(answer, outcome.Error), answer
    return answer.error


@contextmanager
def write_lock(path: Path | str) -> Iterator[sqlite3.Connection]:
    """Somebody else, on a connection of their own, holds the database's write lock for the body."""
    with closing(sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield other
        finally:
            if other.in_transaction:
                other.execute("ROLLBACK")


@asynccontextmanager
async def write_lock_elsewhere(path: Path | str) -> AsyncIterator[None]:
    """Another process holds the database's write lock for the body."""
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=5, isolation_level=None);"
        "c.execute('BEGIN IMMEDIATE'); sys.stdout.write('h'); sys.stdout.flush(); sys.stdin.read()"
    )
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(WITHIN_S):
            assert await process.stdout.receive_some() == b"h"
        yield
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()


async def until(condition: Callable[[], object]) -> None:
    """Wait in real time for what threads or other processes bring about."""
    with trio.fail_after(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - nobody in this trio run can set an event
            await trio.sleep(0.001)


@define(eq=False)
class Gathered:
    """Tasks that each run one unit, in the order of `submit`, and the answers they got."""

    engine: SQLiteEngine
    nursery: trio.Nursery
    answers: dict[str, Answer] = field(factory=dict)

    async def submit(
        self, name: str, work: Callable[[Tx], Any] | None = None, *, urgent: bool = False, alone: bool = False
    ) -> trio.CancelScope:
        """Hand over a unit; return when it is queued (or even answered). Cancel what is returned to withdraw it."""
        scope = trio.CancelScope()
        work = marks(name) if work is None else work
        queued = trio.Event()

        async def task() -> None:
            with scope:
                call = self.engine.run_alone(work) if alone else self.engine.run(work, urgent=urgent)
                queued.set()  # and nobody else runs before it is
                try:
                    self.answers[name] = outcome.Value(await call)
                except Exception as failure:  # noqa: BLE001 - it is the answer
                    self.answers[name] = outcome.Error(failure)

        self.nursery.start_soon(task)
        await queued.wait()
        return scope


@asynccontextmanager
async def gathered(store: Store) -> AsyncIterator[Gathered]:
    """Run the body's units side by side, and wait for all of their answers."""
    with no_group():
        async with trio.open_nursery() as nursery:
            yield Gathered(engine_of(store), nursery)


@define(eq=False)
class Gate:
    """A point in another thread: it says that it was reached, and goes on when it is told to."""

    reached: threading.Event = field(factory=threading.Event)
    go_on: threading.Event = field(factory=threading.Event)

    def pass_through(self) -> None:
        self.reached.set()
        assert self.go_on.wait(WITHIN_S)


def open_files(path: Path | str) -> list[str]:
    """This process's descriptors on the database and its log."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return sorted(found)


def file_bytes(path: Path) -> dict[str, bytes]:
    """The bytes of the database and what lies beside it, read by nobody who has it open with SQLite."""
    return {p.name: p.read_bytes() for p in sorted(path.parent.iterdir()) if p.name.startswith(path.name)}


def sqlite3_connection(path: Path | str) -> Connection:
    return load_driver("sqlite3").connect(str(path))
