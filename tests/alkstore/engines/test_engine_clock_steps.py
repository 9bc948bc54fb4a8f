"""A clock that was stepped is noticed once, mended once, told once, and everybody who waits looks again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from alkstore import Event, ManualClock, Store, TrioClock, open_store
from alkstore.engines.feed import CLOCK
from alkstore.engines.steps import TOLERANCE_MS, ClockSteps
from alkstore.errors import StoreFull
from alkstore.sql.tx import Tx
from tests.alkstore.engines.enginekit import START, Fault, engine_of, spy

LEASES = "SELECT lease_end FROM __alkstore_jobs WHERE state = 1 ORDER BY id"
RUN_AT = "SELECT run_at FROM __alkstore_jobs WHERE state = 0 ORDER BY id"
LOCKS = "SELECT expires_at FROM __alkstore_locks ORDER BY name"


async def look(store: Store, sql: str) -> list[int]:
    return [ms for (ms,) in await engine_of(store).read(lambda tx: tx.all(sql))]


async def write(store: Store) -> None:
    """Any write at all: the writer looks at the clock at each."""
    await store.queue("unrelated").pause()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture(params=[":memory:", "file"])
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    target = request.param if request.param == ":memory:" else str(tmp_path / "a.db")
    async with open_store(target, inline=True, clock=clock) as store:
        yield store


def steps_told(events: object) -> list[tuple[str, float]]:
    buffer: list[Event] = list(events._buffer)  # type: ignore[attr-defined]
    return [(e.kind, float(str(e.details["seconds"]))) for e in buffer if e.kind.startswith("clock_")]


async def test_a_step_back_cuts_each_lease_to_its_own_length(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    queue = store.queue("q")
    await queue.enqueue_many([1, 2])
    await queue.claim("w", lease=10)
    await queue.claim("w", lease=1000)
    assert await store.lock("l").acquire(50)
    with store.events() as events:
        clock.advance(-3600)
        await write(store)
        assert steps_told(events) == [("clock_set_back", 3600.0)]
        (told,) = [e for e in events._buffer if e.kind == "clock_set_back"]
    now = START - 3_600_000
    assert await look(store, LEASES) == [now + 10_000, now + 1_000_000]
    assert await look(store, LOCKS) == [now + 50_000]
    assert (told.details["leases"], told.details["locks"]) == (2, 1)
    assert (await store.health()).clock_steps == 1


async def test_a_step_back_makes_due_what_was_due_and_leaves_what_was_delayed(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    queue = store.queue("q")
    await queue.enqueue("due")
    await queue.enqueue("delayed", delay=600)
    clock.advance(-3600)
    await write(store)
    now = START - 3_600_000
    assert await look(store, RUN_AT) == [now, START + 600_000]
    assert [job.payload for job in await queue.claim("w", 5)] == ["due"]


@pytest.mark.parametrize("ms", [-TOLERANCE_MS, TOLERANCE_MS, 0, -1])
async def test_a_drift_within_the_tolerance_is_no_step(
    store: Store, clock: ManualClock, mock_clock: MockClock, ms: int
) -> None:
    await store.queue("q").enqueue(1)
    await store.queue("q").claim("w", lease=10)
    with store.events() as events:
        clock.set(START + ms)
        await write(store)
        assert steps_told(events) == []
    assert await look(store, LEASES) == [START + 10_000]


@pytest.mark.parametrize(
    ("ms", "kind"), [(-TOLERANCE_MS - 1, "clock_set_back"), (TOLERANCE_MS + 1, "clock_set_forward")]
)
async def test_a_millisecond_more_is_one(
    store: Store, clock: ManualClock, mock_clock: MockClock, ms: int, kind: str
) -> None:
    with store.events() as events:
        clock.set(START + ms)
        await write(store)
        await write(store)
        assert steps_told(events) == [(kind, abs(ms) / 1000)]


async def test_many_small_drifts_never_add_up_to_a_step(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    """What time synchronisation does all day."""
    with store.events() as events:
        for _ in range(10):
            clock.advance(-0.9)
            await write(store)
        assert steps_told(events) == []


async def test_a_step_forward_is_told_and_mends_nothing(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    await store.queue("q").enqueue(1)
    await store.queue("q").claim("w", lease=10)
    with store.events() as events:
        clock.advance(86_400)
        await write(store)
        assert steps_told(events) == [("clock_set_forward", 86_400.0)]
    assert await look(store, LEASES) == [START + 10_000]
    assert (await store.health()).clock_steps == 1


async def test_there_and_back_again_are_two_steps(store: Store, clock: ManualClock, mock_clock: MockClock) -> None:
    with store.events() as events:
        for seconds in (-60, 60, -60):
            clock.advance(seconds)
            await write(store)
        assert [kind for kind, _ in steps_told(events)] == ["clock_set_back", "clock_set_forward", "clock_set_back"]
    assert (await store.health()).clock_steps == 3


async def test_a_clock_that_is_moved_by_hand_may_stand_still(
    store: Store, clock: ManualClock, autojump_clock: MockClock
) -> None:
    with store.events() as events:
        await trio.sleep(100)
        await write(store)
        assert steps_told(events) == []


async def test_a_clock_that_keeps_pace_is_never_stepped(autojump_clock: MockClock) -> None:
    async with open_store(":memory:", inline=True, clock=TrioClock()) as store:
        with store.events() as events:
            for seconds in (0.001, 1, 5_000, 0.5, 86_400 * 365):
                await trio.sleep(seconds)
                await write(store)
            assert steps_told(events) == []


@pytest.mark.parametrize("target", [":memory:", "file"])
async def test_a_long_transaction_is_no_step_of_the_clock(
    tmp_path: Path, target: str, autojump_clock: MockClock
) -> None:
    """Its reading of the clock is as old as its beginning when it commits."""
    path = target if target == ":memory:" else str(tmp_path / "a.db")
    async with open_store(path, inline=True, clock=TrioClock()) as store:
        with store.events() as events:
            for _ in range(3):
                async with store.transaction() as tx:
                    await trio.sleep(4)
                    await tx.enqueue("q", 1)
                await write(store)
            assert steps_told(events) == []


async def test_a_step_inside_a_long_transaction_is_found_after_it(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    with store.events() as events:
        async with store.transaction() as tx:
            await tx.enqueue("q", 1)
            clock.advance(-60)
        assert steps_told(events) == []
        await write(store)
        assert steps_told(events) == [("clock_set_back", 60.0)]


async def test_a_step_between_opening_and_the_first_write_is_found(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    with store.events() as events:
        clock.advance(-60)
        await write(store)
        assert steps_told(events) == [("clock_set_back", 60.0)]


async def test_the_repair_is_part_of_the_transaction_that_finds_the_step(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    """Rolled back with it, it is done again by the next one, and told once."""
    queue = store.queue("q")
    await queue.enqueue(1)
    await queue.claim("w", lease=10)

    def failing(tx: Tx) -> None:
        assert tx.all(LEASES) == [(START - 60_000 + 10_000,)], "its own transaction sees it mended"
        raise LookupError

    with store.events() as events:
        clock.advance(-60)
        with pytest.raises(LookupError):
            await engine_of(store).run(failing)
        await write(store)
        await write(store)
        assert steps_told(events) == [("clock_set_back", 60.0)]
    assert await look(store, LEASES) == [START - 60_000 + 10_000]
    assert (await store.health()).clock_steps == 1


async def test_a_repair_whose_commit_fails_is_done_again(
    store: Store, clock: ManualClock, mock_clock: MockClock
) -> None:
    await store.queue("q").enqueue(1)
    await store.queue("q").claim("w", lease=10)
    spied = spy(store)
    spied.before = Fault(spied.inner, StoreFull("the disk is full"), lambda sql: sql == "COMMIT")
    with store.events() as events:
        clock.advance(-60)
        with pytest.raises(StoreFull):
            await write(store)
        assert steps_told(events) == []
        await write(store)
        assert steps_told(events) == [("clock_set_back", 60.0)]
    assert await look(store, LEASES) == [START - 60_000 + 10_000]


@pytest.mark.parametrize("commit", [True, False])
async def test_an_interactive_transaction_mends_what_it_finds_if_it_commits(
    store: Store, clock: ManualClock, mock_clock: MockClock, commit: bool
) -> None:
    await store.queue("q").enqueue(1)
    await store.queue("q").claim("w", lease=10)
    with store.events() as events:
        clock.advance(-60)
        try:
            async with store.transaction() as tx:
                await tx.enqueue("other", 1)
                if not commit:
                    raise LookupError
        except LookupError:
            assert await look(store, LEASES) == [START + 10_000]
            assert steps_told(events) == []
            await write(store)
        assert steps_told(events) == [("clock_set_back", 60.0)]
    assert await look(store, LEASES) == [START - 60_000 + 10_000]


class SilentClock(ManualClock):
    """As a wall clock: it does not tell when it is stepped."""

    def on_set(self, callback: object) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize("seconds", [-60, 60])
async def test_everybody_who_waits_is_woken_by_a_step(mock_clock: MockClock, seconds: int) -> None:
    clock = SilentClock(START)
    async with open_store(":memory:", inline=True, clock=clock) as store:
        feed = engine_of(store).feed
        seen = feed.position()
        clock.advance(seconds)
        assert not feed._has_moved("any topic", seen)
        await write(store)
        assert feed._has_moved("any topic", seen)
        assert feed._moved.get(CLOCK, 0) > seen


# ---------------------------------------------------------------------------------------------------- at open


@pytest.mark.parametrize("what", ["job", "lease", "lock"])
async def test_a_clock_behind_the_newest_stamp_at_open_is_mended_and_told(
    tmp_path: Path, mock_clock: MockClock, what: str
) -> None:
    """The machine came up with a wrong clock: nobody was there to see it stepped."""
    path = tmp_path / "a.db"
    async with open_store(path, inline=True, clock=ManualClock(START)) as store:
        await store.queue("q").enqueue(1)
        if what == "lease":
            await store.queue("q").claim("w", lease=10)
        elif what == "lock":
            await store.queue("q").cancel_job(1)
            assert await store.lock("l").acquire(50)
    clock = ManualClock(START - 3_600_000)
    async with open_store(path, inline=True, clock=clock) as store:
        with store.events() as events:
            await write(store)
            await trio.testing.wait_all_tasks_blocked()
            assert steps_told(events) == [("clock_set_back", 3600.0)], "told once, to who subscribes at once"
        now = clock.now_ms()
        found = {"job": RUN_AT, "lease": LEASES, "lock": LOCKS}[what]
        assert await look(store, found) == [now + {"job": 0, "lease": 10_000, "lock": 50_000}[what]]
        assert (await store.health()).clock_steps == 1


@pytest.mark.parametrize("behind", [1_000, 0, -3_600_000])
async def test_a_clock_that_is_not_behind_at_open_is_left_alone(
    tmp_path: Path, mock_clock: MockClock, behind: int
) -> None:
    path = tmp_path / "a.db"
    async with open_store(path, inline=True, clock=ManualClock(START)) as store:
        await store.queue("q").enqueue(1)
        await store.queue("q").claim("w", lease=10)
    async with open_store(path, inline=True, clock=ManualClock(START - behind)) as store:
        with store.events() as events:
            await write(store)
            assert steps_told(events) == []
        assert await look(store, LEASES) == [START + 10_000]
        assert (await store.health()).clock_steps == 0


async def test_opening_again_does_not_mend_again(tmp_path: Path, mock_clock: MockClock) -> None:
    path = tmp_path / "a.db"
    async with open_store(path, inline=True, clock=ManualClock(START)) as store:
        await store.queue("q").enqueue(1)
        await store.queue("q").claim("w", lease=10)
    for _ in range(2):
        async with open_store(path, inline=True, clock=ManualClock(START - 3_600_000)) as store:
            assert await look(store, LEASES) == [START - 3_600_000 + 10_000]
    assert (START - 3_600_000) < START


# ------------------------------------------------------------------------------------------------ the arithmetic


MOVES = st.lists(st.tuples(st.integers(0, 10**7), st.integers(-(10**8), 10**8)), max_size=20)


@given(start=st.integers(0, 2**42), moves=MOVES)
def test_a_step_is_what_the_wall_clock_did_beyond_what_passed(start: int, moves: list[tuple[int, int]]) -> None:
    """`moves`: ms that pass, and ms by which the clock is stepped then."""
    passed = 0
    steps = ClockSteps(lambda: passed / 1000)
    wall, unseen, count = start, 0, 0
    assert steps.step(wall) == 0
    steps.accept(wall, stepped=False)
    for quiet, step in moves:
        passed += quiet
        wall += quiet + step
        unseen = step
        found = steps.step(wall)
        assert found == (unseen if abs(unseen) > TOLERANCE_MS else 0)
        count += found != 0
        steps.accept(wall, stepped=found != 0)
    assert steps.count == count


def test_what_was_not_accepted_is_found_again() -> None:
    passed = 0.0
    steps = ClockSteps(lambda: passed)
    steps.step(START)
    steps.accept(START, stepped=False)
    assert steps.step(START - 5_000) == -5_000
    passed = 3.0
    assert steps.step(START - 2_000) == -5_000
    assert steps.count == 0


def test_time_that_passes_between_the_reading_and_the_commit_is_no_step() -> None:
    passed = 0.0
    steps = ClockSteps(lambda: passed)
    steps.step(START)
    passed = 30.0  # a long transaction
    steps.accept(START, stepped=False)
    assert steps.step(START + 30_000) == 0
