"""Full disks and failing disks undo a whole transaction: every answer still says what is durable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from alkstore.engines.driver import Connection, DiskError
from alkstore.errors import OutcomeUnknown, StoreBusy, StoreError, StoreFull, StoreUnavailable
from alkstore.sql.tx import Tx
from tests.alkstore.engines.enginekit import (
    MARK,
    Fault,
    durable,
    engine_of,
    error,
    gathered,
    marked_store,
    marks,
    spy,
    value,
    write_lock,
    write_lock_elsewhere,
)

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
FULL = StoreFull("the disk is full")
DISK = DiskError("the disk failed")
PARTS = 2
PER_UNIT = ("SAVEPOINT alkstore_unit", *[MARK] * PARTS, "RELEASE alkstore_unit")
"""The statements of one unit in a group."""


def of_units(sql: str) -> bool:
    return sql in PER_UNIT


@INLINE
@pytest.mark.parametrize("broken", [FULL, DISK], ids=["full", "io"])
@pytest.mark.parametrize("statement", range(len(PER_UNIT)), ids=["savepoint", "first", "last", "release"])
@pytest.mark.parametrize("bad", range(4))
async def test_a_failure_that_undoes_the_transaction_costs_only_the_unit_that_met_it(
    tmp_path: Path, inline: bool, broken: StoreError, statement: int, bad: int
) -> None:
    """Those before it run again, one by one; those behind it are the next group."""
    path = tmp_path / "a.db"
    names = ["0", "1", "2", "3"]
    async with marked_store(path, inline=inline, synchronous="normal") as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for name in names:
                    await units.submit(name, marks(name, PARTS))
                spied.log.clear()
                spied.before = Fault(spied.inner, broken, of_units, at=bad * len(PER_UNIT) + statement + 1)
        assert error(units.answers.pop(str(bad))) is broken
        good = [name for name in names if name != str(bad)]
        assert {name: value(answer) for name, answer in units.answers.items()} == {name: name for name in good}
        assert durable(path) == [name for name in good for _ in range(PARTS)]
        assert spied.count("COMMIT") == bad + (bad < 3)


@INLINE
async def test_what_an_undone_unit_touched_and_reported_is_told_once(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"

    def telling(name: str) -> Callable[[Tx], None]:
        def work(tx: Tx) -> None:
            marks(name, PARTS)(tx)
            tx.touch(f"topic {name}")
            tx.report("told", name)

        return work

    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        feed = engine_of(store).feed
        before = feed.position()
        with store.events() as events:
            async with gathered(store) as units:
                with write_lock(path):
                    for name in "abc":
                        await units.submit(name, telling(name))
                    spied.before = Fault(spied.inner, FULL, of_units, at=len(PER_UNIT) + 2)
            assert sorted(event.subject for event in events._buffer if event.kind == "told") == ["a", "c"]
        assert feed._has_moved("topic a", before)
        assert feed._has_moved("topic c", before)
        assert not feed._has_moved("topic b", feed._all_moved)


@INLINE
async def test_a_unit_that_runs_again_may_fail_again_and_every_one_is_answered(tmp_path: Path, inline: bool) -> None:
    """The disk stays full: all are told so, and nothing is there."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)

        def full(sql: str) -> None:
            if sql == MARK:
                spied.inner.all("ROLLBACK")
                raise StoreFull("the disk is full")

        async with gathered(store) as units:
            with write_lock(path):
                for name in "abcd":
                    await units.submit(name)
                spied.before = full
        assert all(isinstance(error(answer), StoreFull) for answer in units.answers.values())
        assert durable(path) == []
        spied.before = lambda sql: None
        assert await engine_of(store).run(marks("room again")) == "room again"


@INLINE
async def test_a_function_of_the_user_is_never_run_twice(tmp_path: Path, inline: bool) -> None:
    """Whatever fails before it, behind it or in it."""
    path = tmp_path / "a.db"
    ran: list[str] = []

    def noted(name: str) -> Callable[[Tx], Any]:
        def work(tx: Tx) -> str:
            ran.append(name)
            return marks(name)(tx)

        return work

    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        failed = 0

        def every_third(sql: str) -> None:
            nonlocal failed
            failed += sql == MARK
            if sql == MARK and failed % 3 == 0:
                spied.inner.all("ROLLBACK")
                raise StoreFull("the disk is full")

        async with gathered(store) as units:
            with write_lock(path):
                for n in range(12):
                    alone = n % 2 == 1
                    await units.submit(f"{'user' if alone else 'own'} {n}", noted(f"{n}"), alone=alone)
                spied.before = every_third
        ran_by_user = [name for name in ran if int(name) % 2 == 1]
        assert len(ran_by_user) == len(set(ran_by_user)) == 6
        kept = {name.split()[1] for name, answer in units.answers.items() if not hasattr(answer, "error")}
        assert set(durable(path)) == kept


@INLINE
@pytest.mark.parametrize(("broken", "told"), [(FULL, StoreFull), (DISK, OutcomeUnknown)], ids=["full", "io"])
async def test_a_commit_that_fails_is_everybodys_failure(
    tmp_path: Path, inline: bool, broken: StoreError, told: type[StoreError]
) -> None:
    """Each gets an exception object of their own; a unit's own error stays its own."""
    path = tmp_path / "a.db"
    cause = OSError("the driver's own")
    broken.__cause__ = cause

    def telling(tx: Tx) -> None:
        marks("a")(tx)
        tx.touch("t")

    def odd(tx: Tx) -> None:
        raise LookupError("mine")

    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        before = store._context.engine.feed.position()
        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("a", telling)
                await units.submit("odd", odd)
                await units.submit("b")
                spied.before = Fault(spied.inner, broken, lambda sql: sql == "COMMIT")
        assert isinstance(error(units.answers.pop("odd")), LookupError)
        errors = [error(answer) for answer in units.answers.values()]
        assert [type(e) for e in errors] == [told, told]
        assert errors[0] is not errors[1]
        assert [e.__cause__ for e in errors] == [cause, cause]
        assert durable(path) == []
        assert not engine_of(store).feed._has_moved("t", max(before, engine_of(store).feed._all_moved))
        assert await engine_of(store).run(marks("next")) == "next"
        assert durable(path) == ["next"]


@INLINE
async def test_a_disk_failure_at_commit_reopens_the_connection_and_writes_before_any_new_work(
    tmp_path: Path, inline: bool
) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        engine = engine_of(store)
        spied = spy(store)
        spied.before = Fault(spied.inner, DISK, lambda sql: sql == "COMMIT")
        with pytest.raises(OutcomeUnknown, match="repeat it with the same key"):
            await engine.run(marks("lost"))
        commits = frames(path)
        seen: list[int] = []

        def work(tx: Tx) -> str:
            seen.append(frames(path))
            return marks("next")(tx)

        assert await engine.run(work) == "next"
        assert engine.writer.connection is not spied
        assert seen[0] > commits, "the bookkeeping commit wrote nothing to the log"
        with pytest.raises(StoreError, match="closed"):
            spied.inner.all("SELECT 1")
        # once, and not again at each group from here on
        fresh = engine.writer.connection
        await engine.run(marks("more"))
        assert engine.writer.connection is fresh
    assert durable(path) == ["next", "more"]


def frames(path: Path) -> int:
    """The size of the log; it is not opened, since a descriptor of ours would drop SQLite's locks."""
    return Path(f"{path}-wal").stat().st_size


@INLINE
async def test_reopening_can_fail_too_and_is_tried_again_for_the_next(
    tmp_path: Path, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        writer = engine_of(store).writer
        spied = spy(store)
        spied.before = Fault(spied.inner, DISK, lambda sql: sql == "COMMIT")
        with pytest.raises(OutcomeUnknown):
            await engine_of(store).run(marks("lost"))
        connect = writer.connect

        def away() -> Connection:
            raise StoreUnavailable("no such device")

        writer.connect = away
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await engine_of(store).run(marks("refused"))
        writer.connect = connect
        assert await engine_of(store).run(marks("next")) == "next"
    assert durable(path) == ["next"]


@INLINE
async def test_a_lock_that_is_busy_while_reopening_is_waited_for(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        spied.before = Fault(spied.inner, DISK, lambda sql: sql == "COMMIT")
        with pytest.raises(OutcomeUnknown):
            await engine_of(store).run(marks("lost"))
        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("next")
                await trio.sleep(0.05)
                assert not units.answers
        assert value(units.answers["next"]) == "next"
        assert engine_of(store).writer.connection.all("SELECT value FROM __alkstore_meta WHERE key = 'reopened'") == [
            (1,)
        ]


@INLINE
async def test_after_reopening_a_commit_of_others_is_not_overlooked(tmp_path: Path, inline: bool) -> None:
    """Another connection's data_version counts otherwise: equal numbers would mean nothing."""
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        engine = engine_of(store)
        spied = spy(store)
        spied.before = Fault(spied.inner, DISK, lambda sql: sql == "COMMIT")
        with pytest.raises(OutcomeUnknown):
            await engine.run(marks("lost"))
        seen = engine.feed.position()
        await engine.run(marks("next"))
        assert engine.feed._has_moved("any topic", seen)


@INLINE
async def test_a_busy_answer_in_the_middle_of_beginning_leaves_no_transaction_open(
    tmp_path: Path, inline: bool
) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        spied.before = Fault(
            spied.inner, StoreBusy("recovering"), lambda sql: sql == "PRAGMA data_version", at=1, hard=False
        )
        assert await engine_of(store).run(marks("a")) == "a"
        assert spied.count("BEGIN IMMEDIATE") == 2
    assert durable(path) == ["a"]


@INLINE
async def test_a_failure_to_begin_is_told_to_all_who_wait_and_the_next_one_works(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for name in "abc":
                    await units.submit(name)
                spied.before = Fault(spied.inner, DISK, lambda sql: sql == "PRAGMA data_version", hard=False)
        assert [type(error(answer)) for answer in units.answers.values()] == [DiskError] * 3
        assert await engine_of(store).run(marks("next")) == "next"
    assert durable(path) == ["next"]


@INLINE
async def test_a_rollback_that_fails_makes_the_connection_new(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)

        def broken(sql: str) -> None:
            if sql in ("ROLLBACK", "ROLLBACK TO alkstore_unit", "COMMIT"):
                raise DiskError("the disk failed")

        spied.before = broken
        with pytest.raises(StoreError):
            await engine_of(store).run(marks("lost"))
        assert await engine_of(store).run(marks("next")) == "next"
        assert engine_of(store).writer.connection is not spied
    assert durable(path) == ["next"]


# ---------------------------------------------------------------------------------------------------- the law


@define
class Plan:
    """One unit of a group: how much it writes, and what it meets. `fault`: at its how-manieth statement."""

    parts: int
    raises: bool
    fault: int | None
    alone: bool
    urgent: bool


PLANS = st.lists(
    st.builds(
        Plan,
        parts=st.integers(0, 3),
        raises=st.booleans(),
        fault=st.none() | st.integers(0, 4),
        alone=st.booleans(),
        urgent=st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=120)
@given(plans=PLANS, commit_fails=st.sets(st.integers(1, 4), max_size=2), hard=st.sampled_from([FULL, DISK]))
def test_answers_equal_what_is_durable(plans: list[Plan], commit_fails: set[int], hard: StoreError) -> None:
    """Whatever fails where: a value means it is there, an error that it is not (or that it is not known)."""
    outcomes: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []

    def work_of(name: str, plan: Plan, fail: Callable[[], None]) -> Callable[[Tx], str]:
        runs = 0

        def work(tx: Tx) -> str:
            nonlocal runs
            runs += 1
            assert runs == 1 or not plan.alone, "a user's function ran twice"
            for part in range(plan.parts):
                if plan.fault == part and runs == 1:
                    fail()
                tx.all(MARK, {"name": name, "part": part})
            if plan.fault is not None and plan.fault >= plan.parts and runs == 1:
                fail()
            if plan.raises:
                raise LookupError(name)
            return name

        return work

    async def main() -> None:
        async with marked_store(":memory:", inline=True) as store:
            spied = spy(store)
            commits = 0

            def before(sql: str) -> None:
                nonlocal commits
                if sql == "COMMIT":
                    commits += 1
                    if commits in commit_fails:
                        spied.inner.all("ROLLBACK")
                        raise StoreFull("the disk is full")

            def fail() -> None:
                spied.inner.all("ROLLBACK")
                raise hard

            spied.before = before
            async with gathered(store) as units:
                for n, plan in enumerate(plans):
                    work = work_of(str(n), plan, fail)
                    await units.submit(str(n), work, urgent=plan.urgent and not plan.alone, alone=plan.alone)
            outcomes.update(units.answers)
            spied.before = lambda sql: None
            rows.extend(
                await engine_of(store).read(lambda tx: tx.all("SELECT name, count(*) FROM marks GROUP BY name"))
            )

    trio.run(main)
    assert len(outcomes) == len(plans)
    expected = {
        str(n): plan.parts for n, plan in enumerate(plans) if not hasattr(outcomes[str(n)], "error") and plan.parts
    }
    assert dict(rows) == expected
    for n, plan in enumerate(plans):
        if not plan.raises and plan.fault is None and not commit_fails:
            assert value(outcomes[str(n)]) == str(n)


# ---------------------------------------------------------------------------------------------- real failures


@define(eq=False)
class FailingDisk:
    """A VFS below apsw's copy of SQLite, which can fail the next write or sync of the log."""

    vfs: apsw.VFS = field(init=False)
    write: Exception | None = None
    sync: Callable[[], None] | None = None
    """Called once, in place of the next sync."""

    def __attrs_post_init__(self) -> None:
        disk = self

        class File(apsw.VFSFile):
            def __init__(self, name: Any, flags: list[int]) -> None:
                self.is_log = str(name.filename() if isinstance(name, apsw.URIFilename) else name).endswith("-wal")
                super().__init__("unix", name, flags)

            def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's own name
                if self.is_log and disk.write is not None:
                    raise disk.write
                super().xWrite(data, offset)

            def xSync(self, flags: int) -> None:  # noqa: N802
                if self.is_log and disk.sync is not None:
                    instead, disk.sync = disk.sync, None
                    instead()
                else:
                    super().xSync(flags)

        class Vfs(apsw.VFS):
            def __init__(self) -> None:
                super().__init__("alkstore-failing", "unix", makedefault=True)

            def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
                return File(name, flags)

        self.vfs = Vfs()


@pytest.fixture
def disk() -> Iterator[FailingDisk]:
    disk = FailingDisk()
    yield disk
    disk.vfs.unregister()


def crashed_copy(path: Path, folder: Path) -> Path:
    """The files as they are, as a crash now would leave them; copied by another process, for the locks' sake."""
    folder.mkdir()
    subprocess.run(["cp", str(path), f"{path}-wal", str(folder)], check=True)
    return folder / path.name


@INLINE
async def test_a_sync_that_fails_at_commit_cannot_bring_the_commit_back_later(
    tmp_path: Path, inline: bool, disk: FailingDisk
) -> None:
    """What was answered with OutcomeUnknown lies in the log for a recovery to find, until another commit covers it."""
    path = tmp_path / "a.db"

    def fails() -> None:
        crashed_copy(path, tmp_path / "1")  # here and not later: the store may look at its file at any time
        raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)

    async with marked_store(path, inline=inline, driver="apsw") as store:
        disk.sync = fails
        with pytest.raises(OutcomeUnknown) as caught:
            await engine_of(store).run(marks("unknown"))
        assert isinstance(caught.value.__cause__, apsw.IOError)
        assert durable(tmp_path / "1" / path.name) == ["unknown"], "so the test tests nothing"
        rows = await engine_of(store).read(lambda tx: tx.all("SELECT name FROM marks"))
        assert rows == []

        def look(tx: Tx) -> list[str]:
            return durable(crashed_copy(path, tmp_path / "2"))

        assert await engine_of(store).run(look) == []  # before any new work is done


@INLINE
async def test_a_disk_that_is_full_in_the_middle_of_a_group(tmp_path: Path, inline: bool, disk: FailingDisk) -> None:
    """A large unit spills into the log and finds the disk full; the others are none the worse."""
    path = tmp_path / "a.db"

    def large(tx: Tx) -> None:
        disk.write = apsw.exception_for(apsw.SQLITE_FULL)
        try:
            for part in range(400):
                tx.all("INSERT INTO marks (name, part) VALUES (zeroblob(8000) || 'x', :part)", {"part": part})
        finally:
            disk.write = None

    async with marked_store(path, inline=inline, driver="apsw") as store:
        await engine_of(store).run(lambda tx: tx.all("SELECT 1"))
        engine_of(store).writer.connection.all("PRAGMA cache_size = 20")
        engine_of(store).writer.connection.all("PRAGMA cache_spill = 20")
        async with gathered(store) as units, write_lock_elsewhere(path):
            await units.submit("a")
            await units.submit("large", large)
            await units.submit("b")
        assert isinstance(error(units.answers["large"]), StoreFull)
        rows = await engine_of(store).read(lambda tx: tx.all("SELECT name FROM marks ORDER BY rowid"))
        assert rows == [("a",), ("b",)]


@INLINE
async def test_a_full_disk_at_commit_says_so_and_takes_nothing_that_was_there(
    tmp_path: Path, inline: bool, disk: FailingDisk
) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline, driver="apsw") as store:
        await engine_of(store).run(marks("before"))
        disk.write = apsw.exception_for(apsw.SQLITE_FULL)
        with pytest.raises(StoreFull) as caught:
            await engine_of(store).run(marks("refused"))
        assert isinstance(caught.value.__cause__, apsw.FullError)
        disk.write = None
        await engine_of(store).run(marks("after"))
    assert durable(path) == ["before", "after"]


@INLINE
async def test_a_page_limit_is_a_full_disk_with_the_standard_library_too(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        connection = engine_of(store).writer.connection
        pages = connection.all("PRAGMA page_count")[0][0]
        connection.all(f"PRAGMA max_page_count = {pages + 30}")

        def large(tx: Tx) -> None:
            for part in range(200):
                tx.all("INSERT INTO marks (name, part) VALUES (zeroblob(4000) || 'x', :part)", {"part": part})

        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("a")
                await units.submit("large", large)
                await units.submit("b")
        assert isinstance(error(units.answers["large"]), StoreFull)
        assert value(units.answers["a"]) == "a"
        assert value(units.answers["b"]) == "b"
    assert durable(path) == ["a", "b"]


async def test_a_disk_that_is_full_when_the_log_is_emptied_does_not_end_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log keeps everything; whoever writes will meet the trouble, and has somebody to tell."""
    from alkstore.engines import sqlite as engine_module

    monkeypatch.setattr(engine_module, "WAL_KEPT_BYTES", 0)
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        spied = spy(store)

        def full(sql: str) -> None:
            if sql.startswith("PRAGMA wal_checkpoint"):
                raise StoreFull("the disk is full")

        spied.before = full
        await engine_of(store).run(marks("a"))
        await trio.sleep(0.05)
        engine_of(store)._checkpointed = -1e9
        await engine_of(store).run(marks("b"))
        await trio.sleep(0.05)
        assert any(sql.startswith("PRAGMA wal_checkpoint(TRUNCATE)") for sql in spied.log)
        assert (await store.health()).checkpoint_blocked
        assert await engine_of(store).run(marks("c")) == "c"
    assert durable(path) == ["a", "b", "c"]


def test_a_process_on_a_small_disk_loses_nothing_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    """A real file system that is really full."""
    path = small_disk / "a.db"

    async def main() -> None:
        async with marked_store(path) as store:
            done: list[str] = []

            def large(name: str) -> Callable[[Tx], None]:
                return lambda tx: [  # type: ignore[return-value]
                    tx.all("INSERT INTO marks (name, part) VALUES (:name, zeroblob(0) IS NULL)", {"name": name}),
                    tx.all("CREATE TABLE IF NOT EXISTS filler (x)"),
                    tx.all("INSERT INTO filler VALUES (zeroblob(60000))"),
                ]

            async def fill() -> None:
                for n in range(1000):
                    await engine_of(store).run(large(str(n)))
                    done.append(str(n))

            with pytest.raises(StoreFull):
                await fill()
            assert durable_elsewhere(path) == done
            (small_disk / "ballast").unlink()
            await engine_of(store).run(large("room"))
            assert durable_elsewhere(path) == [*done, "room"]

    (small_disk / "ballast").write_bytes(bytes(1_000_000))
    trio.run(main)


def durable_elsewhere(path: Path) -> list[str]:
    code = (
        "import sqlite3, sys; print(*[n for (n,) in sqlite3.connect(sys.argv[1]).execute("
        "'SELECT name FROM marks ORDER BY rowid')])"
    )
    return subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, where mounting one is permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here; the page limit stands for it in the others")
    yield folder
    subprocess.run(["umount", folder], check=True)
