"""Closing: bounded, whatever is under way; no thread, descriptor or caller is left behind, and no answer is wrong."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from alkstore import Store, open_store
from alkstore.clock import ManualClock
from alkstore.engines.driver import DiskError
from alkstore.engines.writer import Writer
from alkstore.errors import OutcomeUnknown, StoreClosed, StoreError
from alkstore.sql.tx import Tx
from tests.alkstore.engines.enginekit import (
    START,
    WITHIN_S,
    Gate,
    Gathered,
    durable,
    engine_of,
    error,
    file_bytes,
    gathered,
    marked_store,
    marks,
    open_files,
    spy,
    until,
    value,
    write_lock,
)
from tests.conformance.helpers import cancelled_at

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


class BrokenError(Exception):
    """What nobody has foreseen."""


def busy_threads() -> list[str]:
    """What threads are in the middle of; those that trio keeps idle for a few seconds do not count."""
    stacks = {ident: "".join(traceback.format_stack(frame)) for ident, frame in sys._current_frames().items()}
    return [stack for ident, stack in stacks.items() if ident != threading.get_ident() and "/alkstore/" in stack]


# --------------------------------------------------------------------------------------------------- in peace


@INLINE
async def test_after_closing_every_call_says_closed(tmp_path: Path, inline: bool) -> None:
    async with open_store(tmp_path / "a.db", inline=inline) as store:
        id = await store.queue("q").enqueue(1)
        (job,) = await store.queue("q").claim("w")
    engine = engine_of(store)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.queue("q").enqueue(1),
        lambda: store.queue("q").enqueue_many([1]),
        lambda: store.queue("q").claim("w"),
        lambda: store.get_job(id),
        job.ack,
        job.heartbeat,
        lambda: store.lock("l").acquire(1),
        lambda: store.transact(lambda tx: None),
        store.transaction().__aenter__,
        store.health,
        lambda: engine.run_each([marks("a")]),
    ]
    for call in calls:
        with pytest.raises(StoreClosed, match="closed"):
            await call()
    await engine.close()  # once more does no harm


@INLINE
async def test_what_waits_at_the_end_of_the_body_is_still_done(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with trio.open_nursery() as nursery, marked_store(path, inline=inline) as store:
        units = Gathered(engine_of(store), nursery)
        for n in range(5):
            await units.submit(str(n))
    assert durable(path) == ["0", "1", "2", "3", "4"]
    assert len(units.answers) == 5
    assert not [answer for answer in units.answers.values() if isinstance(answer, outcome.Error)]


@INLINE
async def test_nothing_is_left_open(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with marked_store(path, inline=inline) as store:
            await store.queue("q").enqueue(1)
            assert open_files(path) != []
        assert open_files(path) == []
        assert busy_threads() == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert file_bytes(path).keys() == {"a.db"}


@INLINE
async def test_what_the_body_raises_leaves_as_itself(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    for failure in (BrokenError("mine"), KeyboardInterrupt(), ExceptionGroup("g", [ValueError()])):
        with pytest.raises(type(failure)) as caught:
            async with open_store(path, inline=inline):
                raise failure
        assert caught.value is failure
        assert open_files(path) == []


@INLINE
async def test_a_body_that_ends_before_the_store_has_had_a_turn(tmp_path: Path, inline: bool) -> None:
    for _ in range(10):
        async with open_store(tmp_path / "a.db", inline=inline):
            pass
        with trio.move_on_after(5) as scope:
            async with open_store(tmp_path / "a.db", inline=inline):
                scope.cancel()
        assert open_files(tmp_path / "a.db") == []


async def test_a_large_log_does_not_make_closing_long(tmp_path: Path) -> None:
    """A reader that keeps an old snapshot stands in the way of emptying it."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        async with marked_store(path, synchronous="normal") as store:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM marks").fetchall()
            await store.queue("q").enqueue_many(["x" * 1000] * 5000)
            began = time.monotonic()
        assert time.monotonic() - began < 2.5
    assert open_files(path) == []


# -------------------------------------------------------------------------------------- with work under way


async def test_a_unit_that_has_begun_is_answered_with_what_became_of_it(tmp_path: Path) -> None:
    """Longer than closing waits: whoever has not begun is refused; nobody is told that a commit did not happen."""
    path = tmp_path / "a.db"
    gate = Gate()

    def slow(tx: Tx) -> str:
        marks("begun")(tx)
        gate.pass_through()
        return "begun"

    with marks_of_time() as elapsed:
        async with trio.open_nursery() as nursery, marked_store(path) as store:
            units = Gathered(engine_of(store), nursery)
            await units.submit("begun", slow, alone=True)
            await until(gate.reached.is_set)
            await units.submit("waits")
            threading.Timer(1.6, gate.go_on.set).start()
    assert elapsed() < 4
    assert value(units.answers["begun"]) == "begun"
    assert isinstance(error(units.answers["waits"]), StoreClosed)
    assert durable(path) == ["begun"]


class marks_of_time:  # noqa: N801 - reads as a statement
    def __enter__(self) -> Callable[[], float]:
        began = time.monotonic()
        return lambda: time.monotonic() - began

    def __exit__(self, *_: object) -> None:
        return None


async def test_a_statement_without_end_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    gate = Gate()

    def work(tx: Tx) -> None:
        marks("a")(tx)
        gate.reached.set()
        tx.all(endless)

    with marks_of_time() as elapsed:
        async with trio.open_nursery() as nursery, marked_store(path) as store:
            units = Gathered(engine_of(store), nursery)
            await units.submit("endless", work, alone=True)
            await until(gate.reached.is_set)
        assert elapsed() < 5
    assert isinstance(error(units.answers["endless"]), StoreError)
    assert durable(path) == []
    assert open_files(path) == []


@pytest.mark.parametrize("target", ["file", ":memory:"])
async def test_a_read_that_is_under_way_is_waited_for(tmp_path: Path, target: str) -> None:
    """Its connection is not closed under it."""
    path = str(tmp_path / "a.db") if target == "file" else target
    gate = Gate()
    results: list[object] = []

    def slow(tx: Tx) -> list[tuple[Any, ...]]:
        gate.pass_through()
        return tx.all("SELECT 7")

    async def reader(store: Store, work: Callable[[Tx], object]) -> None:
        try:
            results.append(await engine_of(store).read(work))
        except StoreError as failure:
            results.append(failure)

    async with trio.open_nursery() as nursery, marked_store(path) as store:
        nursery.start_soon(reader, store, slow)
        await until(gate.reached.is_set)
        nursery.start_soon(reader, store, lambda tx: tx.all("SELECT 8"))
        await trio.testing.wait_all_tasks_blocked()
        threading.Timer(0.2, gate.go_on.set).start()
    assert results[0] == [(7,)]
    assert results[1] == [(8,)] or isinstance(results[1], StoreClosed)


async def test_a_read_without_end_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    gate = Gate()
    results: list[object] = []

    def endless(tx: Tx) -> None:
        gate.reached.set()
        tx.all("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")

    async def reader(store: Store) -> None:
        try:
            await engine_of(store).read(endless)
        except StoreError as failure:
            results.append(failure)

    with marks_of_time() as elapsed:
        async with trio.open_nursery() as nursery, marked_store(path) as store:
            nursery.start_soon(reader, store)
            await until(gate.reached.is_set)
        assert elapsed() < 6
    assert len(results) == 1
    assert open_files(path) == []


@INLINE
async def test_a_transaction_that_is_open_elsewhere_ends_with_an_error_of_ours(tmp_path: Path, inline: bool) -> None:
    """Some other task has it open when the body of the store is left."""
    path = tmp_path / "a.db"
    opened, closed = trio.Event(), trio.Event()
    failures: list[BaseException] = []

    async def holder(store: Store) -> None:
        try:
            async with store.transaction() as tx:
                await tx.execute("INSERT INTO marks (name) VALUES ('a')")
                opened.set()
                await closed.wait()
                await tx.execute("INSERT INTO marks (name) VALUES ('b')")
        except Exception as failure:  # noqa: BLE001 - this is what we look at
            failures.append(failure)

    async def committer(store: Store) -> None:
        try:
            async with store.transaction():
                opened.set()
                await closed.wait()
        except Exception as failure:  # noqa: BLE001 - this is what we look at
            failures.append(failure)

    for task in (holder, committer):
        opened, closed = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            async with marked_store(path, inline=inline) as store:
                nursery.start_soon(task, store)
                await opened.wait()
            closed.set()
    assert [type(failure) for failure in failures] == [StoreClosed, StoreClosed]
    assert durable(path) == []


# ------------------------------------------------------------------------------------- when the inside fails


def break_publish(store: Store) -> None:
    def broken(_: object) -> None:
        raise BrokenError("publish")

    engine_of(store).writer.publish = broken


def break_clock(store: Store) -> None:
    class Broken(ManualClock):
        def now_ms(self) -> int:
            raise BrokenError("clock")

    engine_of(store).writer.clock = Broken(START)


def break_begin(store: Store) -> None:
    def broken() -> None:
        raise BrokenError("intact")

    engine_of(store).writer.intact = broken


BREAKS = pytest.mark.parametrize("break_it", [break_publish, break_clock, break_begin])


@INLINE
@BREAKS
@pytest.mark.parametrize("queued", [True, False], ids=["while they wait", "at once"])
async def test_a_failure_inside_reaches_every_caller_and_cancels_the_body(
    tmp_path: Path, inline: bool, break_it: Callable[[Store], None], queued: bool
) -> None:
    """The error leaves the store as itself; what was committed all the same is not called undone."""
    path = tmp_path / "a.db"
    answers: dict[str, outcome.Outcome[Any]] = {}
    cancelled = False

    async def body(store: Store) -> None:
        nonlocal cancelled
        async with gathered(store) as units:
            units.answers = answers
            if queued:
                with trio.CancelScope(shield=True), write_lock(path):
                    for name in "abc":
                        await units.submit(name)
                    break_it(store)
            else:
                break_it(store)
                for name in "abc":
                    units.nursery.start_soon(units.submit, name)
            try:
                await trio.sleep(WITHIN_S)
            except trio.Cancelled:
                cancelled = True
                raise

    async def main() -> None:
        async with marked_store(path, inline=inline) as store:
            stores.append(store)
            await body(store)

    stores: list[Store] = []
    with pytest.raises(BrokenError):
        await main()
    assert cancelled
    assert set(answers) == set("abc")
    told = [name for name, answer in answers.items() if isinstance(answer, outcome.Value)]
    assert sorted(told) == sorted(durable(path))
    for answer in answers.values():
        if isinstance(answer, outcome.Error):
            assert isinstance(answer.error, StoreClosed)
            assert isinstance(answer.error.__cause__, BrokenError)
    with pytest.raises(StoreClosed, match="BrokenError"):
        await engine_of(stores[0]).run(marks("later"))
    assert open_files(path) == []


@INLINE
async def test_a_failure_inside_reaches_an_interactive_transaction_that_waits(tmp_path: Path, inline: bool) -> None:
    failures: list[BaseException] = []

    async def begin(store: Store) -> None:
        try:
            async with store.transaction():
                pass
        except StoreClosed as failure:
            failures.append(failure)

    async def main() -> None:
        async with marked_store(tmp_path / "a.db", inline=inline) as store, trio.open_nursery() as nursery:
            break_clock(store)
            nursery.start_soon(begin, store)
            await trio.sleep(WITHIN_S)

    with pytest.raises(BrokenError):
        await main()
    assert [str(failure) for failure in failures] == ["the store's writer failed: BrokenError('clock')"]


async def test_the_death_of_the_watch_ends_the_store_too(tmp_path: Path) -> None:
    stores: list[Store] = []

    def raising(*_: object) -> None:
        raise BrokenError("watch")

    async def main() -> None:
        async with marked_store(tmp_path / "a.db") as store:
            stores.append(store)
            watcher = engine_of(store)._watcher
            assert watcher is not None
            watcher.all = raising  # type: ignore[method-assign,assignment]
            await trio.sleep(WITHIN_S)

    with pytest.raises(BrokenError):
        await main()
    with pytest.raises(StoreClosed):
        await engine_of(stores[0]).run(marks("later"))


def test_an_interrupt_from_the_keyboard_between_commit_and_answers_wakes_everybody(tmp_path: Path) -> None:
    """It is put off until everybody has their answer; then it ends the program as usual."""
    path = tmp_path / "a.db"
    answers: dict[str, outcome.Outcome[Any]] = {}

    async def main(inline: bool) -> None:
        async with marked_store(path, inline=inline) as store:
            writer: Writer = engine_of(store).writer
            publish = writer.publish

            def interrupted(done: Any) -> None:
                if done.committed:
                    signal.raise_signal(signal.SIGINT)
                publish(done)

            async with gathered(store) as units:
                units.answers = answers
                writer.publish = interrupted
                with trio.CancelScope(shield=True):
                    for name in "abc":
                        await units.submit(f"{name} {inline}")
                    while len(answers) % 3:
                        await trio.lowlevel.cancel_shielded_checkpoint()

    for inline in (False, True):
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:
            trio.run(main, inline)
        error = caught.value
        assert not isinstance(error, BaseExceptionGroup) or error.split(KeyboardInterrupt)[1] is None
    assert sorted(name for name, answer in answers.items() if isinstance(answer, outcome.Value)) == sorted(
        durable(path)
    )


# -------------------------------------------------------------------------------------- cancelled anywhere


@INLINE
async def test_opening_can_be_cancelled_at_every_step(tmp_path: Path, inline: bool) -> None:
    """T06: no descriptor stays open, and the database is not locked."""
    path = tmp_path / "a.db"

    async def opening() -> None:
        async with open_store(path, inline=inline) as store:
            await store.queue("q").enqueue(1)

    await opening()
    before = len(os.listdir("/proc/self/fd"))
    steps, cancelled = 0, True
    while cancelled:
        steps += 1
        cancelled = await cancelled_at(opening, steps)
        assert open_files(path) == []
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
    assert steps > 5
    assert len(os.listdir("/proc/self/fd")) == before


async def test_opening_can_be_cancelled_at_any_time(tmp_path: Path) -> None:
    """T06, in real time: the thread may be anywhere."""
    path = tmp_path / "a.db"
    before = len(os.listdir("/proc/self/fd"))
    for n in range(60):
        with trio.move_on_after(n * 0.0002):
            async with open_store(path) as store:
                await store.queue("q").enqueue(1)
        assert open_files(path) == []
        assert busy_threads() == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() < 10
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")


@INLINE
@pytest.mark.parametrize("what", ["run", "run_each", "alone", "turn"])
async def test_a_write_can_be_cancelled_at_every_step_and_is_there_or_not(
    tmp_path: Path, inline: bool, what: str
) -> None:
    """T01: all of it or nothing; who was told "cancelled" finds nothing, and the writer goes on."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, synchronous="normal") as store:
        engine = engine_of(store)

        async def call(name: str) -> str:
            if what == "run":
                return await engine.run(marks(name, 50))
            if what == "alone":
                return await engine.run_alone(marks(name, 50))
            if what == "run_each":
                await engine.run_each([marks(name), marks(name)])
                return name
            async with store.transaction() as tx:
                await tx.execute("INSERT INTO marks (name) VALUES (:name)", {"name": name})
                await tx.execute("INSERT INTO marks (name) VALUES (:name)", {"name": name})
            return name

        whole = {"run": 50, "alone": 50}.get(what, 2)
        steps, cancelled, done = 0, True, []

        async def noted() -> None:
            done.append(await call(str(steps)))

        while cancelled:
            steps += 1
            cancelled = await cancelled_at(noted, steps)
            count = durable(path).count(str(steps))
            assert count in (0, whole)
            if str(steps) in done:
                assert count == whole
            elif what != "turn":  # a commit that is under way is not undone
                assert count == 0
            with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                other.execute("ROLLBACK")
        assert steps > 1
        assert await engine.run(marks("next")) == "next"


async def test_a_large_write_that_is_cancelled_at_any_time_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """T01, with real threads: 2,000 rows in many groups of transactions of their own."""
    path = tmp_path / "a.db"
    async with marked_store(path, synchronous="normal") as store:
        sizes = set()
        for n in range(40):
            name = str(n)
            with trio.move_on_after(n * 0.0005) as scope:
                await engine_of(store).run(marks(name, 2000))
            rows = await engine_of(store).read(
                lambda tx, name=name: tx.all("SELECT count(*) FROM marks WHERE name = :n", {"n": name})  # type: ignore[misc]
            )
            sizes.add(rows[0][0])
            assert not (scope.cancelled_caught and rows[0][0]), "it was called cancelled, and it is there"
        assert sizes <= {0, 2000}


# ------------------------------------------------------------------------------------------ the whole process


@pytest.mark.parametrize(
    ("end", "warns"),
    [
        ("pass", False),
        ("raise SystemExit(0)", False),
        ("store = await manager.__aenter__(); await store.queue('q').enqueue(2); import sys; sys.exit(0)", True),
    ],
    ids=["left", "exit inside", "never closed"],
)
def test_a_program_ends_by_itself(tmp_path: Path, end: str, warns: bool) -> None:
    """H06: no thread keeps it alive, and what was committed is there."""
    path = tmp_path / "a.db"
    code = f"""
import trio
from alkstore import open_store
async def main():
    async with open_store({str(path)!r}) as store:
        await store.queue("q").enqueue(1)
        manager = open_store({str(path)!r})
        {end}
trio.run(main)
"""
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    assert warns or run.returncode == 0, run.stderr  # trio itself does not allow what "never closed" does
    assert time.monotonic() - began < 8
    assert ("was not closed" in run.stderr) == warns
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM __alkstore_jobs").fetchone() == (2 if warns else 1,)


async def test_an_unknown_outcome_in_the_last_commit_of_all_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with trio.open_nursery() as nursery, marked_store(path) as store:
        spied = spy(store)

        def broken(sql: str) -> None:
            if sql == "COMMIT":
                raise DiskError("the disk failed")

        spied.before = broken
        units = Gathered(engine_of(store), nursery)
        await units.submit("a")
    assert isinstance(error(units.answers["a"]), OutcomeUnknown)
    assert open_files(path) == []
