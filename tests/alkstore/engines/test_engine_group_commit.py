"""Group commit: whoever waits shares one transaction and one sync, and nobody pays for another's failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from alkstore.engines import writer as writer_module
from alkstore.sql.tx import Tx
from tests.alkstore.engines.enginekit import (
    MARK,
    Gate,
    Spied,
    durable,
    engine_of,
    error,
    gathered,
    marked_store,
    marks,
    spy,
    until,
    value,
    write_lock,
)

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


class OddError(Exception):
    """A unit's own failure."""


def failing(name: str, after: int = 1) -> Callable[[Tx], Any]:
    """A unit that writes rows and then raises."""

    def work(tx: Tx) -> None:
        marks(name, after)(tx)
        raise OddError(name)

    return work


@INLINE
async def test_units_that_wait_together_share_one_commit_in_the_order_of_arrival(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for n in range(20):
                    await units.submit(str(n))
                assert durable(path) == []
                assert not units.answers
        assert durable(path) == [str(n) for n in range(20)]
        assert {name: value(answer) for name, answer in units.answers.items()} == {str(n): str(n) for n in range(20)}
        assert spied.count("COMMIT") == 1
        assert spied.count("SAVEPOINT alkstore_unit") == spied.count("RELEASE alkstore_unit") == 20


async def test_nobody_is_answered_before_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    gate = Gate()
    async with marked_store(path) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for name in "abc":
                    await units.submit(name)
                spied.before = lambda sql: gate.pass_through() if sql == "COMMIT" else None
            await until(gate.reached.is_set)
            await trio.testing.wait_all_tasks_blocked()
            assert spied.count("RELEASE alkstore_unit") == 3
            assert not units.answers
            gate.go_on.set()
        assert {value(answer) for answer in units.answers.values()} == set("abc")


@INLINE
@pytest.mark.parametrize("bad", range(5))
async def test_a_unit_that_raises_undoes_itself_alone(tmp_path: Path, inline: bool, bad: int) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for n in range(5):
                    await units.submit(str(n), failing(str(n), after=3) if n == bad else marks(str(n)))
        failure = error(units.answers[str(bad)])
        assert isinstance(failure, OddError)
        good = [str(n) for n in range(5) if n != bad]
        assert [value(units.answers[name]) for name in good] == good
        assert durable(path) == good
        assert spied.count("COMMIT") == 1


@INLINE
async def test_all_units_may_fail_and_the_next_one_works(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        async with gathered(store) as units:
            with write_lock(path):
                for n in range(3):
                    await units.submit(str(n), failing(str(n)))
        assert all(isinstance(error(answer), OddError) for answer in units.answers.values())
        assert await engine_of(store).run(marks("next")) == "next"
        assert durable(path) == ["next"]


async def test_an_inline_unit_alone_needs_no_savepoint_and_still_undoes_itself(tmp_path: Path) -> None:
    async with marked_store(tmp_path / "a.db", inline=True) as store:
        spied = spy(store)
        with pytest.raises(OddError):
            await engine_of(store).run(failing("bad"))
        assert spied.count("SAVEPOINT alkstore_unit") == 0
        assert not spied.in_transaction
        assert durable(tmp_path / "a.db") == []


@INLINE
async def test_a_base_exception_of_a_unit_is_its_own(tmp_path: Path, inline: bool) -> None:
    def work(tx: Tx) -> None:
        marks("bad")(tx)
        raise SystemExit(3)

    async with marked_store(tmp_path / "a.db", inline=inline) as store:
        with pytest.raises(SystemExit):
            await engine_of(store).run(work)
        assert await engine_of(store).run(marks("next")) == "next"
    assert durable(tmp_path / "a.db") == ["next"]


@INLINE
async def test_urgent_units_go_before_bulk_ones_that_came_first(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store, gathered(store) as units:
        with write_lock(path):
            for name in ("bulk 1", "bulk 2"):
                await units.submit(name)
            for name in ("urgent 1", "urgent 2"):
                await units.submit(name, urgent=True)
            await units.submit("bulk 3")
    assert durable(path) == ["urgent 1", "urgent 2", "bulk 1", "bulk 2", "bulk 3"]


async def test_an_urgent_unit_overtakes_a_backlog_of_bulk_that_has_begun(tmp_path: Path) -> None:
    """The backlog is longer than a group: the urgent one is in the next group, not behind all of it."""
    path = tmp_path / "a.db"
    gate = Gate()
    bulk = 3 * writer_module.GROUP_UNITS

    def first(tx: Tx) -> None:
        marks("first")(tx)
        gate.pass_through()

    async with marked_store(path, synchronous="normal") as store, gathered(store) as units:
        await units.submit("first", first)
        await until(gate.reached.is_set)
        units.nursery.start_soon(engine_of(store).run_each, [marks(f"bulk {n}") for n in range(bulk)])
        await until(lambda: len(engine_of(store).writer.lanes) == bulk)
        await units.submit("urgent", urgent=True)
        gate.go_on.set()
    found = durable(path)
    assert len(found) == bulk + 2
    assert found.index("urgent") <= writer_module.GROUP_UNITS


async def test_a_group_ends_at_its_number_of_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "GROUP_S", 1e9)
    path = tmp_path / "a.db"
    sizes: list[int] = []
    size = 0

    async with marked_store(path, synchronous="normal") as store:
        spied = spy(store)

        def note(sql: str) -> None:
            nonlocal size
            size += sql == MARK
            if sql == "COMMIT":
                sizes.append(size)
                size = 0

        spied.before = note
        await engine_of(store).run_each([marks(str(n)) for n in range(2 * writer_module.GROUP_UNITS + 1)])
    assert sizes == [writer_module.GROUP_UNITS, writer_module.GROUP_UNITS, 1]


async def test_a_group_ends_after_its_time(tmp_path: Path) -> None:
    """The group's time is up after the first slow unit; what waits behind it is another group."""
    path = tmp_path / "a.db"

    def slow(name: str) -> Callable[[Tx], str]:
        def work(tx: Tx) -> str:
            began = time.perf_counter()
            while time.perf_counter() - began < writer_module.GROUP_S:
                pass
            return marks(name)(tx)

        return work

    async with marked_store(path) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                for n in range(3):
                    await units.submit(str(n), slow(str(n)))
        assert spied.count("COMMIT") == 3
    assert durable(path) == ["0", "1", "2"]


@INLINE
async def test_a_function_of_the_user_shares_its_transaction_with_nobody(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        spied = spy(store)
        async with gathered(store) as units:
            with write_lock(path):
                await units.submit("a")
                await units.submit("user", alone=True)
                await units.submit("b")
                await units.submit("c")
        written = [sql for sql in spied.log if sql in (MARK, "COMMIT")]
        assert written == [MARK, "COMMIT", MARK, "COMMIT", MARK, MARK, "COMMIT"]
    assert durable(path) == ["a", "user", "b", "c"]


@INLINE
async def test_run_each_runs_all_and_then_raises_the_first_error(tmp_path: Path, inline: bool) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=inline) as store:
        with pytest.raises(OddError, match="1"):
            await engine_of(store).run_each([marks("0"), failing("1"), marks("2"), failing("3"), marks("4")])
        assert durable(path) == ["0", "2", "4"]


async def test_a_unit_that_is_withdrawn_while_it_waits_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path) as store, gathered(store) as units:
        with write_lock(path):
            await units.submit("a")
            withdrawn = await units.submit("b")
            await units.submit("c")
            withdrawn.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert withdrawn.cancelled_caught
    assert durable(path) == ["a", "c"]
    assert set(units.answers) == {"a", "c"}


async def test_all_units_may_be_withdrawn_and_the_lock_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        async with gathered(store) as units:
            with write_lock(path):
                scopes = [await units.submit(name) for name in "abc"]
                for scope in scopes:
                    scope.cancel()
        with write_lock(path):
            pass
        assert await engine_of(store).run(marks("next")) == "next"
    assert durable(path) == ["next"]


async def test_a_unit_that_has_begun_runs_to_its_end_and_its_caller_learns_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    gate = Gate()

    def work(tx: Tx) -> str:
        gate.pass_through()
        return marks("a")(tx)

    async with marked_store(path) as store, gathered(store) as units:
        scope = await units.submit("a", work)
        await until(gate.reached.is_set)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not units.answers
        gate.go_on.set()
    assert value(units.answers["a"]) == "a"
    assert durable(path) == ["a"]


async def test_withdrawing_in_the_instant_in_which_a_group_is_collected_breaks_nothing(tmp_path: Path) -> None:
    """The last unit that waits is withdrawn after the lock was taken for it: an empty group, and no harm."""
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        spied = spy(store)
        gate = Gate()
        spied.before = lambda sql: gate.pass_through() if sql == "PRAGMA data_version" else None
        async with gathered(store) as units:
            scope = await units.submit("a")
            await until(gate.reached.is_set)
            scope.cancel()
            await until(lambda: scope.cancelled_caught)
            gate.go_on.set()
        assert await engine_of(store).run(marks("b")) == "b"
    assert durable(path) == ["b"]


async def test_a_withdrawal_between_two_looks_of_the_writer_at_its_lanes_cannot_break_it(tmp_path: Path) -> None:
    """What the writer's thread looks at cannot vanish in the middle of the look."""
    import collections
    import threading

    from alkstore.engines.units import Lanes, Unit

    lanes = Lanes()
    unit = Unit(marks("a"), urgent=False, since=0.0)

    class Racing(collections.deque[Unit]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if found and threading.current_thread() is not thread:  # the other thread's moment has come
                thread.start()
                thread.join(0.2)
            return found

    thread = threading.Thread(target=lanes.discard, args=(unit,))
    lanes._bulk = Racing([unit])
    assert lanes.has_units
    thread.join()
    assert not lanes.has_units


async def test_a_store_in_memory_commits_in_groups_too() -> None:
    async with marked_store(":memory:") as store:
        spied: Spied = spy(store)
        await engine_of(store).run_each([marks(str(n)) for n in range(10)])
        assert spied.count("COMMIT") == 1
        rows = await engine_of(store).read(lambda tx: tx.all("SELECT name FROM marks ORDER BY rowid"))
        assert [name for (name,) in rows] == [str(n) for n in range(10)]
