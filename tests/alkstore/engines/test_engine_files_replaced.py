"""A file that is taken away or replaced under an open store ends the writing: nothing is acknowledged into nowhere."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from alkstore import MixedSQLite, StopToken, StoreUnavailable, TrioClock, open_store
from alkstore.clock import WallClock
from tests.conformance.helpers import fails


def deleted(path: Path) -> None:
    path.unlink()


def moved(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))


def restored(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("how", [deleted, moved, restored])
async def test_a_file_that_is_not_the_same_any_more_ends_the_writing(
    tmp_path: Path, how: Callable[[Path], None], suffix: str
) -> None:
    path = tmp_path / "app.db"
    async with open_store(path) as store:
        queue = store.queue("q")
        await queue.enqueue(1)
        how(path.with_name(path.name + suffix))
        for _ in range(2):
            with pytest.raises(MixedSQLite, match="was taken away or replaced while the store was open"):
                await queue.enqueue(2)


@pytest.mark.parametrize("how", [deleted, moved, restored])
async def test_who_only_reads_or_waits_is_told_too(tmp_path: Path, how: Callable[[Path], None]) -> None:
    """Else an idle worker would sleep on, while others enqueue into the file that is there now."""
    path = tmp_path / "app.db"
    async with open_store(path, inline=True) as store:
        waiting: list[Callable[[], Awaitable[object]]] = [
            lambda: store.queue("q").work(print, stop=StopToken()),
            lambda: store.run_schedules(StopToken()),
            lambda: store.queue("other").claim("w", wait=60),
        ]
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for call in waiting:
                    nursery.start_soon(fails, MixedSQLite, call)
                await trio.testing.wait_all_tasks_blocked()
                how(path)
            await fails(MixedSQLite, store.health)
            await fails(MixedSQLite, store.queue("q").counts)


async def test_a_file_with_two_names_is_refused(tmp_path: Path) -> None:
    """SQLite keeps a log beside each name, and commits that are in the one do not show in the other."""
    path = tmp_path / "app.db"
    async with open_store(path):
        pass
    os.link(path, tmp_path / "other.db")
    for name in (path, tmp_path / "other.db"):
        with pytest.raises(MixedSQLite, match="has another name too"):
            async with open_store(name):
                pass
    (tmp_path / "other.db").unlink()
    async with open_store(path) as store:
        assert await store.queue("q").enqueue(1) == 1


async def test_a_link_that_leads_nowhere_is_told_by_the_stores_error(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    path.symlink_to(path)
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        async with open_store(path):
            pass


@pytest.mark.parametrize("how", [deleted, moved])
async def test_a_store_opens_anew_where_its_file_was(tmp_path: Path, how: Callable[[Path], None]) -> None:
    path = tmp_path / "app.db"
    async with open_store(path) as store:
        await store.queue("q").enqueue(1)
        how(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    async with open_store(path) as store:
        assert await store.queue("q").enqueue(1) == 1


def in_a_forked_child(child: Callable[[], str]) -> str:
    """What `child` returns in a process that is forked from this one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, child().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:It looks like Trio's signal:RuntimeWarning")
async def test_a_forked_child_opens_no_store_on_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "app.db"

    async def open_it() -> str:
        try:
            async with open_store(path, inline=True):
                return "opened"
        except MixedSQLite as error:
            return str(error)

    async with open_store(path, inline=True) as store:
        said = in_a_forked_child(lambda: _apart(open_it))
        assert "was open when this process was forked" in said
        assert await store.queue("q").enqueue(1) == 1


def _apart(main: Callable[[], object]) -> str:
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(str(trio.run(main))))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    return said[0]


class TickingByItself:
    """A program's own clock, which runs as it likes."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def wait_s(self, until_ms: int) -> float:
        return 0.01

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


async def test_a_clock_of_the_programs_own_may_stand_still_and_jump_ahead() -> None:
    clock = TickingByItself()
    async with open_store(":memory:", inline=True, clock=clock) as store:
        queue = store.queue("q")
        await queue.enqueue(1, delay=3600)
        await trio.sleep(1.2)
        await queue.enqueue(2)
        clock.ms += 60_000
        assert [handle.payload for handle in await queue.claim("w", 10)] == [2]
        assert (await store.health()).clock_steps == 0


async def test_a_clock_of_the_programs_own_that_goes_back_is_noticed() -> None:
    clock = TickingByItself()
    async with open_store(":memory:", inline=True, clock=clock) as store:
        await store.queue("q").enqueue(1)
        clock.ms -= 60_000
        await store.queue("q").enqueue(2)
        assert (await store.health()).clock_steps == 1
        assert len(await store.queue("q").claim("w", 10)) == 2


def test_the_machines_clock_is_not_measured_by_virtual_time() -> None:
    async def main() -> None:
        async with open_store(":memory:", inline=True, clock=WallClock()) as store:
            await store.queue("q").enqueue(1, delay=3600)
            await trio.sleep(7200)
            assert await store.queue("q").claim("w") == []
            assert (await store.health()).clock_steps == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_trios_clock_is_measured_by_itself() -> None:
    async def main() -> None:
        async with open_store(":memory:", inline=True, clock=TrioClock()) as store:
            await store.queue("q").enqueue(1, delay=3600)
            await trio.sleep(3600)
            assert len(await store.queue("q").claim("w")) == 1
            assert (await store.health()).clock_steps == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))
