"""Commits of other processes are noticed: soon with inotify, soon enough without, and never overlooked."""

from __future__ import annotations

import math
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from attrs import define, field
from trio.testing import MockClock

from alkstore import Store, open_store
from alkstore.engines.bridge import InlineBridge
from alkstore.engines.feed import COMMITS
from alkstore.engines.inotify import Inotify
from alkstore.engines.watch import FLOOR_S, LOOKS_S, POLL_S, REST_S, ForeignWatch
from alkstore.errors import MixedSQLite, StoreError
from alkstore.sql.tx import Params, Row, Tx
from tests.alkstore.engines.enginekit import Gate, engine_of, marked_store, marks, open_files

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is inotify on Linux only")


class Shared:
    """An inotify that fires when a test says so, or never."""

    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[None](math.inf)

    def fire(self) -> None:
        self.send.send_nowait(None)

    async def wait(self) -> None:
        await self.receive.receive()
        while True:  # what has piled up is one event
            try:
                self.receive.receive_nowait()
            except trio.WouldBlock:
                return

    def close(self) -> None:
        self.receive.close()
        self.send.close()


@define(eq=False)
class Fake:
    """A watch in virtual time over a connection whose data_version the test sets."""

    version: int = 1
    broken: bool = False
    replaced: bool = False
    own: int = 0
    after_a_look: Callable[[], object] = lambda: None
    looks: list[float] = field(factory=list)
    woken: list[float] = field(factory=list)
    asked: list[float] = field(factory=list)
    inotify: Shared | None = field(factory=Shared)

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
        assert sql == "PRAGMA data_version"
        self.looks.append(round(trio.current_time(), 6))
        if self.broken:
            raise StoreError("the disk failed")
        found = self.version
        self.after_a_look()
        return [(found,)]

    def intact(self) -> None:
        if self.replaced:
            raise MixedSQLite("the file was replaced")

    def watch(self) -> ForeignWatch:
        return ForeignWatch(
            connection=cast(Any, self),
            version=self.version,
            bridge=InlineBridge(),
            inotify=cast(Any, self.inotify),
            intact=self.intact,
            own_commits=lambda: self.own,
            ask=lambda: self.asked.append(trio.current_time()),
            wake_all=lambda: self.woken.append(round(trio.current_time(), 6)),
            virtual=False,
        )


async def serve(fake: Fake, body: Callable[[], Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.watch().serve)
        await trio.testing.wait_all_tasks_blocked()
        await body()
        nursery.cancel_scope.cancel()


async def test_who_sleeps_is_woken_when_the_file_was_replaced(autojump_clock: MockClock) -> None:
    """Within a second, although nothing tells of it."""
    fake = Fake()

    async def body() -> None:
        await trio.sleep(10)
        assert fake.woken == []
        fake.replaced = True
        await trio.sleep(1)

    await serve(fake, body)
    assert fake.woken


async def test_after_an_event_it_looks_more_and_more_seldom_until_the_commit_shows(autojump_clock: MockClock) -> None:
    """The event comes when the log is written, before the commit can be seen, and none follows it."""
    fake = Fake()
    assert fake.inotify is not None
    event = fake.inotify.fire

    async def body() -> None:
        await trio.sleep(0.5)
        fake.looks.clear()
        event()
        await trio.sleep(0.4)
        first = fake.looks[0]
        gaps = [later - earlier for earlier, later in zip(fake.looks, fake.looks[1:], strict=False)]
        assert first == pytest.approx(0.5, abs=1e-6)
        assert gaps[0] == pytest.approx(LOOKS_S[0] + REST_S)
        assert gaps[1:] == pytest.approx(list(LOOKS_S[1:]))

    await serve(fake, body)
    assert not fake.woken


@pytest.mark.parametrize("late", [0.0, 0.0003, 0.004, 0.03, 0.15])
async def test_a_commit_that_shows_after_its_event_is_found_at_one_of_the_looks(
    autojump_clock: MockClock, late: float
) -> None:
    fake = Fake()
    assert fake.inotify is not None
    event = fake.inotify.fire

    async def body() -> None:
        await trio.sleep(0.5)
        event()
        await trio.sleep(late)
        fake.version += 1
        await trio.sleep(2 * late + 0.01)
        assert len(fake.woken) == 1

    await serve(fake, body)


async def test_without_any_event_it_looks_once_a_second(autojump_clock: MockClock) -> None:
    """An event may be lost."""
    fake = Fake()

    async def body() -> None:
        await trio.sleep(10)
        assert 9 <= len(fake.looks) <= 12
        fake.version += 1
        await trio.sleep(FLOOR_S + REST_S + 0.001)
        assert len(fake.woken) == 1

    await serve(fake, body)


async def test_without_inotify_it_looks_often(autojump_clock: MockClock) -> None:
    fake = Fake(inotify=None)

    async def body() -> None:
        await trio.sleep(1)
        assert len(fake.looks) == pytest.approx(1 / POLL_S, abs=2)
        fake.version += 1
        await trio.sleep(POLL_S + 0.001)
        assert len(fake.woken) == 1

    await serve(fake, body)


async def test_a_flood_of_commits_wakes_everybody_at_most_every_two_milliseconds(autojump_clock: MockClock) -> None:
    fake = Fake()
    assert fake.inotify is not None
    event = fake.inotify.fire

    async def body() -> None:
        for _ in range(1000):
            fake.version += 1
            event()
            await trio.sleep(0.0001)
        assert 40 <= len(fake.woken) <= 0.1 / REST_S + 2

    await serve(fake, body)


async def test_a_commit_between_opening_and_the_first_look_is_seen(autojump_clock: MockClock) -> None:
    fake = Fake()
    watch = fake.watch()
    fake.version += 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.serve)
        await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert fake.woken == [0]


async def test_commits_of_this_store_wake_nobody_here_but_the_writer_is_asked(autojump_clock: MockClock) -> None:
    """Whose commit it was cannot be told: the writer's own connection can, and it is asked."""
    fake = Fake()

    async def body() -> None:
        fake.version += 1
        fake.own += 2
        await trio.sleep(FLOOR_S * 2)
        assert not fake.woken
        assert len(fake.asked) == 1
        fake.version += 1
        await trio.sleep(FLOOR_S * 2)
        assert len(fake.woken) == 1
        assert len(fake.asked) == 1

    await serve(fake, body)


async def test_a_commit_of_this_store_that_is_made_while_it_looks_is_still_its_own(autojump_clock: MockClock) -> None:
    """The look was too early to see it, and its count too late not to."""
    fake = Fake()

    async def body() -> None:
        fake.after_a_look = lambda: setattr(fake, "own", 2)
        await trio.sleep(FLOOR_S * 2)
        fake.version += 1
        await trio.sleep(FLOOR_S * 2)
        assert not fake.woken
        assert len(fake.asked) == 1

    await serve(fake, body)


async def test_a_commit_of_this_store_that_shows_before_it_has_returned_is_still_its_own(
    autojump_clock: MockClock,
) -> None:
    """It is made in a thread: a look may fall between what everybody can see and what the thread has written down."""
    fake = Fake()

    async def body() -> None:
        fake.own += 1
        await trio.sleep(FLOOR_S * 2)
        fake.version += 1
        await trio.sleep(FLOOR_S * 2)
        fake.own += 1
        await trio.sleep(FLOOR_S * 2)
        assert not fake.woken
        assert len(fake.asked) == 1

    await serve(fake, body)


async def test_a_look_that_fails_is_repeated_and_misses_nothing(autojump_clock: MockClock) -> None:
    fake = Fake()

    async def body() -> None:
        fake.broken = True
        fake.version += 1
        await trio.sleep(5)
        assert not fake.woken
        fake.broken = False
        await trio.sleep(FLOOR_S * 1.5)
        assert len(fake.woken) == 1

    await serve(fake, body)


# -------------------------------------------------------------------------------------------- with real files


@pytest.fixture(params=["inotify", "polling"])
def feed_state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With what the operating system has, and without."""
    if request.param == "polling":
        monkeypatch.setattr(Inotify, "open", lambda path: None)
    elif not sys.platform.startswith("linux"):
        pytest.skip("there is inotify on Linux only")
    return str(request.param)


@INLINE
async def test_each_of_many_commits_of_another_process_wakes_who_waits(
    tmp_path: Path, inline: bool, feed_state: str
) -> None:
    """With FULL nearly every event comes before its commit can be seen: one look per event would oversleep."""
    path = tmp_path / "a.db"
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=5, isolation_level=None);"
        "c.execute('PRAGMA synchronous = FULL');"
        "[(sys.stdin.readline(), c.execute('INSERT INTO marks (name) VALUES (?)', (str(n),))) for n in range(40)]"
    )
    async with marked_store(path, inline=inline) as store:
        assert (await store.health()).feed == feed_state
        engine = engine_of(store)
        process = await trio.lowlevel.open_process([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE)
        assert process.stdin is not None
        waits: list[float] = []
        try:
            for n in range(40):
                seen = engine.feed.position()
                await process.stdin.send_all(b"\n")
                asked = time.monotonic()
                with trio.fail_after(10):
                    while (await engine.read(lambda tx: tx.all("SELECT count(*) FROM marks")))[0][0] <= n:
                        await engine.feed.moved_past("any topic", seen, None)
                        seen = engine.feed.position()
                waits.append(time.monotonic() - asked)
        finally:
            await process.stdin.aclose()
            with trio.CancelScope(shield=True):
                await process.wait()
        assert statistics.median(waits) < FLOOR_S / 3, "it was not the event that woke us, but the floor"


@INLINE
async def test_a_commit_of_somebody_else_right_after_opening_is_not_overlooked(
    tmp_path: Path, inline: bool, feed_state: str
) -> None:
    """Before any task of the store has had its first turn."""
    path = tmp_path / "a.db"
    async with marked_store(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with open_store(path, inline=inline) as store:
            seen = engine_of(store).feed.position()
            other.execute("INSERT INTO marks (name) VALUES ('a')")
            with trio.fail_after(5):
                await engine_of(store).feed.moved_past("any topic", seen, None)


@INLINE
async def test_nor_if_this_store_commits_at_the_same_time(tmp_path: Path, inline: bool, feed_state: str) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with open_store(path, inline=inline) as store:
            seen = engine_of(store).feed.position()
            other.execute("INSERT INTO marks (name) VALUES ('a')")
            await engine_of(store).run(marks("own"))
            with trio.fail_after(5):
                await engine_of(store).feed.moved_past("any topic", seen, None)


@INLINE
async def test_a_commit_of_somebody_else_between_two_of_our_own_wakes_all(
    tmp_path: Path, inline: bool, feed_state: str
) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with marked_store(path, inline=inline, synchronous="normal") as store:
            engine = engine_of(store)
            for n in range(10):
                seen = engine.feed.position()
                await engine.run(marks("own"))
                other.execute("INSERT INTO marks (name) VALUES ('foreign')")
                if n % 2:
                    await engine.run(marks("own"))
                with trio.fail_after(5):
                    await engine.feed.moved_past("any topic", seen, None)


@INLINE
async def test_our_own_commits_wake_only_who_waits_for_what_they_touched(
    tmp_path: Path, inline: bool, feed_state: str
) -> None:
    path = tmp_path / "a.db"

    async with marked_store(path, inline=inline) as store:
        engine = engine_of(store)
        seen = engine.feed.position()

        def touching(tx: Any) -> None:
            tx.touch("mine")

        for _ in range(5):
            await engine.run(touching)
            await trio.sleep(0.05)
        assert engine.feed._has_moved("mine", seen)
        assert engine.feed._has_moved(COMMITS, seen)
        assert not engine.feed._has_moved("other", seen)


@INLINE
async def test_what_was_rolled_back_wakes_nobody(tmp_path: Path, inline: bool) -> None:
    async with marked_store(tmp_path / "a.db", inline=inline) as store:
        engine = engine_of(store)
        seen = engine.feed.position()

        def failing(tx: Any) -> None:
            tx.touch("mine")
            tx.report("told", "mine")
            raise LookupError

        with store.events() as events:
            with pytest.raises(LookupError):
                await engine.run(failing)
            assert not events._buffer
        assert not engine.feed._has_moved("mine", seen)


async def test_a_wake_up_comes_before_the_answer_and_after_the_commit(tmp_path: Path) -> None:
    """Who is woken must find the change; who has the answer must not find others still asleep over it."""
    path = tmp_path / "a.db"
    async with marked_store(path) as store:
        engine = engine_of(store)
        publish = engine.writer.publish
        order: list[str] = []

        def published(done: Any) -> None:
            with closing(sqlite3.connect(path)) as other:
                if not done.committed:  # it was only a look
                    return
                order.append(f"told when {other.execute('SELECT count(*) FROM marks').fetchone()[0]} were there")
            publish(done)

        engine.writer.publish = published
        await engine.run(marks("a"))
        order.append("answered")
    assert order == ["told when 1 were there", "answered"]


@linux_only
async def test_two_stores_of_one_run_wake_each_other_in_virtual_time(tmp_path: Path, autojump_clock: MockClock) -> None:
    """With threads, too, where the event comes while the commit is still under way."""
    path = tmp_path / "a.db"
    async with marked_store(path) as a, open_store(path) as b:
        await wake_each_other(a, b)
    assert trio.current_time() == 0


@linux_only
async def test_an_inline_store_and_one_with_threads_wake_each_other_in_virtual_time(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "a.db"
    async with marked_store(path, inline=True) as a, open_store(path) as b:
        await wake_each_other(a, b)
        await wake_each_other(b, a)


async def wake_each_other(a: Store, b: Store) -> None:
    began = trio.current_time()
    for _ in range(40):
        seen = engine_of(b).feed.position()
        await engine_of(a).run(marks("a"))
        with trio.move_on_after(300) as overslept:
            await engine_of(b).feed.moved_past("any topic", seen, None)
        assert not overslept.cancelled_caught
    assert trio.current_time() - began < 1


@linux_only
async def test_a_watch_in_virtual_time_waits_for_a_commit_that_is_under_way(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event comes first, then the look, then the commit, and no further event."""
    watches: list[Shared] = []

    def watch(path: str) -> Shared:
        watches.append(Shared())
        return watches[-1]

    def work(tx: Tx) -> None:
        gate.pass_through()
        marks("a")(tx)

    monkeypatch.setattr(Inotify, "open", watch)
    path = tmp_path / "a.db"
    gate = Gate()
    async with marked_store(path) as a, open_store(path) as b:
        while watches[1].receive.statistics().tasks_waiting_receive < 1:
            await trio.lowlevel.checkpoint()
        seen = engine_of(b).feed.position()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine_of(a).run, work)
            while not gate.reached.is_set():
                await trio.lowlevel.checkpoint()
            watches[1].fire()
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            gate.go_on.set()
            with trio.move_on_after(300) as overslept:
                await engine_of(b).feed.moved_past("any topic", seen, None)
        assert not overslept.cancelled_caught


@linux_only
async def test_virtual_time_is_not_spent_on_looking(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A year is one jump: nothing polls."""
    async with marked_store(tmp_path / "a.db", inline=True) as store:
        connection = engine_of(store)._watcher
        assert connection is not None
        looked = 0
        original = connection.all

        def counted(sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never changed
            nonlocal looked
            looked += 1
            return original(sql, params)

        connection.all = counted  # type: ignore[method-assign]
        await trio.sleep(365 * 86_400)
        assert looked <= 4


@linux_only
async def test_the_watch_opens_no_descriptor_on_the_files(tmp_path: Path) -> None:
    """Closing one of ours would drop SQLite's POSIX locks."""
    path = tmp_path / "a.db"
    async with marked_store(path):
        with_watch = open_files(path)
    async with marked_store(path):
        watch = Inotify.open(f"{path}-wal")
        assert watch is not None
        assert open_files(path) == with_watch
        watch.close()
        watch.close()


def test_a_watch_on_nothing_is_none(tmp_path: Path) -> None:
    assert Inotify.open(str(tmp_path / "missing")) is None
