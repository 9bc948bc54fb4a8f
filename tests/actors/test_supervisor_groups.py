"""Strategies: who goes down with whom, in which order they come back, and who pays for it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from actors import Backoff, ChildEvent, Intensity, RestartsExceeded, StopToken, Supervisor
from actors.supervisor import Strategy
from tests.actors.children import AT_ONCE, Diary, story


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ("one_for_one", ["b ends", "b starts", "b ready"]),
        ("rest_for_one", ["b ends", "c ends", "b starts", "b ready", "c starts", "c ready"]),
        (
            "one_for_all",
            ["b ends", "c ends", "a ends", "a starts", "a ready", "b starts", "b ready", "c starts", "c ready"],
        ),
    ],
)
async def test_a_failure_restarts_its_group_in_order(
    autojump_clock: MockClock, strategy: Strategy, told: list[str]
) -> None:
    diary = Diary()
    async with Supervisor(strategy=strategy) as sup:
        await sup.start("a", diary.steady("a", ready_after=1, drain=1))
        await sup.start("b", diary.failing("b", (3, OSError()), ready_after=1), backoff=AT_ONCE)
        await sup.start("c", diary.steady("c", ready_after=1, drain=1))
        diary.clear()
        await trio.sleep(100)
        assert diary == told
        sup.stop()


async def test_siblings_are_down_until_the_failed_childs_backoff_is_over(autojump_clock: MockClock) -> None:
    diary, events = Diary(), list[ChildEvent]()
    async with Supervisor(strategy="one_for_all", on_event=events.append) as sup:
        await sup.start("a", diary.steady("a"))
        await sup.start("b", diary.failing("b", (1, OSError())), backoff=Backoff(100, 100))
        await trio.sleep(30)
        assert [info.state for info in sup.children()] == ["restarting", "restarting"]
        await trio.sleep(100)
        assert [info.state for info in sup.children()] == ["running", "running"]
        sup.stop()
    (announced,) = [event for event in events if event.kind == "restarting"]
    again = [event.at for event in events if event.kind == "starting"][2:]
    assert again == pytest.approx([announced.at + (announced.delay or 0)] * 2)


async def test_siblings_that_did_nothing_wrong_spend_nothing(autojump_clock: MockClock) -> None:
    diary = Diary()
    lives = [(1.0, OSError())] * 3
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a"), intensity=Intensity(0, 60))
        await sup.start("b", diary.failing("b", *lives), backoff=AT_ONCE)
        await trio.sleep(30)
        assert [(info.state, info.restarts) for info in sup.children()] == [("running", 3)] * 2
        sup.stop()


async def test_a_failure_during_a_group_restart_counts_against_the_one_that_failed(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()
    lives = 0

    async def unlucky(stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        nonlocal lives
        lives += 1
        if lives > 1:
            raise LookupError
        task_status.started()
        await stop.wait()

    async def main() -> None:
        async with Supervisor(strategy="one_for_all") as sup:
            await sup.start("a", unlucky, intensity=Intensity(2, 60))
            await sup.start("b", diary.failing("b", (1, OSError())), intensity=Intensity(1, 60))

    with pytest.raises(RestartsExceeded) as raised:
        await main()
    assert raised.value.child == "a"
    assert isinstance(raised.value.__cause__, LookupError)
    assert lives == 4
    assert diary.count("b starts") == 1


async def test_a_sibling_that_fails_while_it_is_stopped_pays_for_itself(autojump_clock: MockClock) -> None:
    diary, events = Diary(), list[ChildEvent]()
    error = LookupError()

    async def unlucky(stop: StopToken) -> None:
        await stop.wait()
        if story(events).count("a failed") == 0:
            raise error

    async with Supervisor(strategy="one_for_all", on_event=events.append) as sup:
        await sup.start("a", unlucky)
        await sup.start("b", diary.failing("b", (1, OSError())))
        await trio.sleep(30)
        assert [(info.state, info.restarts) for info in sup.children()] == [("running", 1)] * 2
        sup.stop()
    assert [event.error for event in events if event.child == "a" and event.error] == [error]
    assert story(events).count("a restarting") == 1


async def test_an_earlier_failure_widens_a_restart_under_way(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="rest_for_one") as sup:
        await sup.start("a", diary.failing("a", (5, OSError())), backoff=AT_ONCE)
        await sup.start("b", diary.steady("b"))
        await sup.start("c", diary.failing("c", (3, OSError())), backoff=Backoff(20, 20))
        await trio.sleep(4)
        assert [info.state for info in sup.children()] == ["running", "running", "restarting"]
        diary.clear()
        await trio.sleep(100)
        assert diary == [
            "a ends",
            "b ends",
            "a starts",
            "a ready",
            "b starts",
            "b ready",
            "c starts",
            "c ready",
        ]
        sup.stop()


async def test_a_child_that_had_ended_for_good_is_not_woken_by_a_siblings_failure(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("migrate", diary.failing("migrate", (1, None)), restart="transient")
        await sup.start("a", diary.failing("a", (5, OSError())), backoff=AT_ONCE)
        await trio.sleep(30)
        sup.stop()
    assert diary.count("migrate starts") == 1
    assert diary.count("a starts") == 2


async def test_a_transient_sibling_that_was_told_to_stop_comes_back(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a"), restart="transient")
        await sup.start("b", diary.failing("b", (5, OSError())), backoff=AT_ONCE)
        await trio.sleep(30)
        sup.stop()
    assert diary.count("a ready") == 2


async def test_a_temporary_sibling_is_stopped_and_not_brought_back(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a"), restart="temporary")
        await sup.start("b", diary.failing("b", (5, OSError())), backoff=AT_ONCE)
        await trio.sleep(30)
        assert [info.name for info in sup.children()] == ["b"]
        sup.stop()
    assert diary.count("a starts") == 1


async def test_a_permanent_child_that_returns_takes_its_group_with_it(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a"))
        await sup.start("b", diary.failing("b", (5, None)), backoff=AT_ONCE)
        await trio.sleep(30)
        sup.stop()
    assert diary.count("a ready") == 2


@pytest.mark.parametrize("restart", ["permanent", "temporary"])
async def test_a_sibling_that_fails_while_a_child_starts_starts_it_over(
    autojump_clock: MockClock, restart: str
) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.failing("a", (2, OSError())), backoff=AT_ONCE)
        fn = diary.steady("b", ready_after=5)
        assert await sup.start("b", fn, restart=restart, stop_timeout=0) == "b"  # type: ignore[call-overload]
        assert diary[:5] == ["a starts", "a ready", "b starts", "a ends", "b ends"]
        assert diary[5:] == ["a starts", "a ready", "b starts", "b ready"]
        sup.stop()


async def test_an_error_before_ready_is_raised_by_start_also_when_a_sibling_interrupted_it(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()

    async def unlucky(stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        await stop.wait()
        raise LookupError

    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.failing("a", (2, OSError())), backoff=AT_ONCE)
        with pytest.raises(LookupError):
            await sup.start("b", unlucky, intensity=Intensity(0, 60))
        await trio.sleep(10)
        assert [info.name for info in sup.children()] == ["a"]
        sup.stop()


async def test_a_failed_first_start_leaves_the_group_alone(autojump_clock: MockClock) -> None:
    diary = Diary()

    async def broken(task_status: trio.TaskStatus[None]) -> None:
        raise LookupError

    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a"))
        with pytest.raises(LookupError):
            await sup.start("b", broken)
        await trio.sleep(10)
        sup.stop()
    assert diary == ["a starts", "a ready", "a ends"]


async def test_a_start_during_a_group_restart_waits_for_its_turn(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.failing("a", (1, OSError()), ready_after=1), backoff=Backoff(20, 20))
        await trio.sleep(2)
        await sup.start("b", diary.steady("b"))
        assert diary == ["a starts", "a ready", "a ends", "a starts", "a ready", "b starts", "b ready"]
        sup.stop()
