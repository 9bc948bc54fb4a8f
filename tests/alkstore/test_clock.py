"""The three clocks."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime

import pytest
import trio
from trio.testing import MockClock

from alkstore import clock as clocks
from alkstore.clock import LONGEST_LOOK_AWAY_S, Clock, ManualClock, TrioClock, WallClock

Y2026 = 1_767_225_600_000


@pytest.mark.parametrize("clock", [WallClock(), TrioClock(), ManualClock(0)], ids=lambda clock: type(clock).__name__)
def test_it_is_a_clock(clock: object) -> None:
    assert isinstance(clock, Clock)


# --------------------------------------------------------------------------------------- WallClock


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    monkeypatch.setattr(time, "time_ns", lambda: 1_999_999_999)
    return WallClock()


def test_the_wall_clock_shows_whole_milliseconds_that_have_passed(wall: WallClock) -> None:
    assert wall.now_ms() == 1_999


@pytest.mark.parametrize(("until", "wait"), [(2_499, 0.5), (1_999, 0.0), (0, 0.0), (6_999, 5.0), (10**15, 5.0)])
def test_no_wait_for_the_wall_clock_is_longer_than_five_seconds(wall: WallClock, until: int, wait: float) -> None:
    assert wall.wait_s(until) == wait
    assert LONGEST_LOOK_AWAY_S == 5.0


def test_the_wall_clock_never_calls_back() -> None:
    WallClock().on_set(pytest.fail)()


# --------------------------------------------------------------------------------------- TrioClock


async def test_virtual_time_begins_in_2026(autojump_clock: MockClock) -> None:
    assert TrioClock().now_ms() == Y2026


async def test_virtual_time_begins_where_it_is_told(autojump_clock: MockClock) -> None:
    assert TrioClock(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)).now_ms() == 1_000


async def test_it_follows_trios_clock(autojump_clock: MockClock) -> None:
    clock = TrioClock()
    await trio.sleep(1.5)
    assert clock.now_ms() == Y2026 + 1_500


@pytest.mark.parametrize("step", [1, 7, 333, 1_001, 86_400_001])
async def test_who_sleeps_until_a_moment_finds_it_reached_and_not_passed(autojump_clock: MockClock, step: int) -> None:
    clock = TrioClock()
    await trio.sleep(0.1 + 0.2)  # not a whole number of milliseconds in binary
    for n in range(1, 200):
        until = Y2026 + 1_000 + n * step
        await trio.sleep(clock.wait_s(until))
        assert clock.now_ms() == until


async def test_a_moment_that_has_passed_needs_no_wait_in_virtual_time(autojump_clock: MockClock) -> None:
    assert TrioClock().wait_s(Y2026 - 1) == 0.0


async def test_nothing_in_virtual_time_shortens_a_wait(autojump_clock: MockClock) -> None:
    assert TrioClock().wait_s(Y2026 + 31_536_000_000) == 31_536_000.0


async def test_a_thread_can_read_it_once_it_was_read_in_trio(autojump_clock: MockClock) -> None:
    clock = TrioClock()
    now = clock.now_ms()
    assert await trio.to_thread.run_sync(clock.now_ms) == now


# ------------------------------------------------------------------------------------- ManualClock


def test_a_manual_clock_stands_where_it_is_put() -> None:
    clock = ManualClock(5)
    assert clock.now_ms() == 5
    clock.set(3)
    assert clock.now_ms() == 3


@pytest.mark.parametrize(("seconds", "ms"), [(1, 11_000), (0.0015, 10_002), (-10, 0), (0, 10_000)])
def test_a_manual_clock_is_advanced_in_seconds(seconds: float, ms: int) -> None:
    clock = ManualClock(10_000)
    clock.advance(seconds)
    assert clock.now_ms() == ms


@pytest.mark.parametrize(("until", "wait"), [(9, 0.0), (10, 0.0), (11, math.inf)])
def test_a_manual_clock_reaches_a_moment_only_by_hand(until: int, wait: float) -> None:
    assert ManualClock(10).wait_s(until) == wait


def test_each_change_calls_back_after_the_clock_has_moved() -> None:
    clock = ManualClock(0)
    seen: list[int] = []
    clock.on_set(lambda: seen.append(clock.now_ms()))
    clock.set(5)
    clock.advance(1)
    assert seen == [5, 1_005]


def test_a_callback_that_was_ended_is_not_called() -> None:
    clock = ManualClock(0)
    seen: list[str] = []
    end = clock.on_set(lambda: seen.append("ended"))
    clock.on_set(lambda: seen.append("kept"))
    end()
    clock.set(1)
    assert seen == ["kept"]


def test_a_callback_may_end_itself() -> None:
    clock = ManualClock(0)
    seen: list[str] = []

    def once() -> None:
        seen.append("once")
        end()

    end = clock.on_set(once)
    clock.on_set(lambda: seen.append("other"))
    clock.set(1)
    clock.set(2)
    assert seen == ["once", "other", "other"]


def test_the_public_names_are_there() -> None:
    assert {getattr(clocks, name) for name in clocks.__all__} == {Clock, ManualClock, TrioClock, WallClock}
