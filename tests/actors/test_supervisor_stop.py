"""Stopping: in reverse order, one after the other, bounded, at any moment, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors import Backoff, ChildEvent, StopToken, Supervisor, SupervisorStopping
from tests.actors.children import AT_ONCE, Diary, story


async def test_leaving_the_body_waits_until_all_children_have_ended(autojump_clock: MockClock) -> None:
    diary = Diary()
    began = trio.current_time()
    async with Supervisor() as sup:
        await sup.start("a", diary.failing("a", (10, None)), restart="transient")
        await sup.start("b", diary.failing("b", (20, None)), restart="temporary")
    assert trio.current_time() == pytest.approx(began + 20)


async def test_children_are_stopped_in_reverse_each_after_the_one_before_has_ended(
    autojump_clock: MockClock,
) -> None:
    diary, stop = Diary(), StopToken()
    began = trio.current_time()
    async with Supervisor(stop) as sup:
        for name in "abc":
            await sup.start(name, diary.steady(name, drain=5))
        stop.stop()
    assert diary[-3:] == ["c ends", "b ends", "a ends"]
    assert trio.current_time() == pytest.approx(began + 15)


async def test_each_child_has_a_token_of_its_own(autojump_clock: MockClock) -> None:
    stop = StopToken()
    tokens: dict[str, StopToken] = {}
    seen: list[dict[str, bool]] = []

    def child(name: str) -> Any:
        async def run(stop: StopToken) -> None:
            tokens[name] = stop
            await stop.wait()
            seen.append({name: token.stopped for name, token in sorted(tokens.items())})

        return run

    async with Supervisor(stop) as sup:
        await sup.start("a", child("a"))
        await sup.start("b", child("b"))
        await trio.sleep(1)
        stop.stop()
    assert seen == [{"a": False, "b": True}, {"a": True, "b": True}]


async def test_stopping_a_supervisor_leaves_the_token_it_was_given_alone() -> None:
    stop = StopToken()
    async with Supervisor(stop) as sup:
        sup.stop()
    assert not stop.stopped


async def test_a_child_that_takes_no_stop_is_cancelled(autojump_clock: MockClock) -> None:
    events: list[ChildEvent] = []
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", trio.sleep_forever)
        sup.stop()
    assert story(events) == ["a starting", "a started", "a stopping", "a stopped"]


async def test_a_child_that_overlooks_its_token_is_cancelled_after_its_stop_timeout(
    autojump_clock: MockClock,
) -> None:
    events: list[ChildEvent] = []

    async def deaf(stop: StopToken) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 9):
                await trio.sleep(2)

    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", deaf, stop_timeout=30)
        began = trio.current_time()
        sup.stop()
    assert [(event.kind, event.at - began) for event in events[-3:]] == [
        ("stopping", 0),
        ("cancelled", pytest.approx(30)),
        ("stopped", pytest.approx(32)),
    ]


async def test_without_a_stop_timeout_a_child_has_all_the_time_it_wants(autojump_clock: MockClock) -> None:
    diary = Diary()
    began = trio.current_time()
    async with Supervisor() as sup:
        await sup.start("a", diary.steady("a", drain=5000), stop_timeout=None)
        sup.stop()
    assert trio.current_time() == pytest.approx(began + 5000)


async def test_a_permanent_child_that_returns_because_it_was_stopped_is_not_restarted(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        await sup.start("a", diary.steady("a"))
        sup.stop()
    assert diary == ["a starts", "a ready", "a ends"]


async def test_a_stop_ends_the_wait_for_a_restart(autojump_clock: MockClock) -> None:
    diary, events = Diary(), list[ChildEvent]()
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", diary.steady("a"))
        await sup.start("b", diary.failing("b", (1, OSError())), backoff=Backoff(1000, 1000))
        await trio.sleep(10)
        began = trio.current_time()
        sup.stop()
    assert trio.current_time() == began
    assert story(events)[-4:] == ["b restarting", "b stopped", "a stopping", "a stopped"]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
async def test_a_stop_while_a_child_starts_ends_the_body_quietly(autojump_clock: MockClock, strategy: Any) -> None:
    diary, stop = Diary(), StopToken()

    async def interruptible(stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        diary.append("b starts")
        await stop.wait()

    async with trio.open_nursery() as nursery:

        async def stop_later() -> None:
            await trio.sleep(3)
            stop.stop()

        nursery.start_soon(stop_later)
        async with Supervisor(stop, strategy=strategy) as sup:
            await sup.start("a", diary.steady("a"))
            await sup.start("b", interruptible)
            diary.append("not reached")
    assert diary == ["a starts", "a ready", "b starts", "a ends"]


async def test_a_child_that_becomes_ready_while_it_is_stopped_has_started(autojump_clock: MockClock) -> None:
    async def run(stop: StopToken, task_status: trio.TaskStatus[str]) -> None:
        await stop.wait()
        task_status.started("just so")

    async with trio.open_nursery() as nursery, Supervisor() as sup:
        nursery.start_soon(stop_after, 3, sup)
        assert await sup.start("a", run) == "just so"


async def stop_after(seconds: float, sup: Supervisor) -> None:
    await trio.sleep(seconds)
    sup.stop()


async def test_a_child_that_fails_to_start_while_it_is_stopped_is_still_an_error(
    autojump_clock: MockClock,
) -> None:
    async def run(stop: StopToken, task_status: trio.TaskStatus[str]) -> None:
        await stop.wait()
        raise LookupError

    async with trio.open_nursery() as nursery, Supervisor() as sup:
        nursery.start_soon(stop_after, 3, sup)
        with pytest.raises(LookupError):
            await sup.start("a", run)


async def test_a_stopped_supervisor_starts_nothing_and_its_body_ends_quietly() -> None:
    stop = StopToken()
    stop.stop()
    reached: list[str] = []
    async with Supervisor(stop) as sup:
        reached.append("body")
        await sup.start("a", trio.sleep_forever)
        reached.append("not here")
    assert reached == ["body"]


async def test_a_refusal_inside_a_nursery_of_the_body_is_quiet_too() -> None:
    async with Supervisor() as sup:
        sup.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sup.start, "a", trio.sleep_forever)
            nursery.start_soon(sup.start, "b", trio.sleep_forever)


async def test_a_refusal_inside_a_child_is_no_failure_of_the_child(autojump_clock: MockClock) -> None:
    events: list[ChildEvent] = []

    async def parent(stop: StopToken) -> None:
        await stop.wait()
        await sup.start("child", trio.sleep_forever)

    async with Supervisor(on_event=events.append) as sup:
        await sup.start("parent", parent)
        await trio.sleep(1)
        sup.stop()
    assert story(events)[-2:] == ["parent stopping", "parent stopped"]


async def test_the_refusal_of_another_supervisor_is_an_error() -> None:
    async with Supervisor(name="other") as other:
        pass
    with pytest.raises(SupervisorStopping, match="other is stopping"):
        async with Supervisor():
            await other.start("a", trio.sleep_forever)


async def test_the_body_outlives_the_children(autojump_clock: MockClock) -> None:
    diary, stop = Diary(), StopToken()
    async with Supervisor(stop) as sup:
        await sup.start("a", diary.steady("a"))
        stop.stop()
        await trio.sleep(1)
        diary.append("body ends")
    assert diary[-2:] == ["a ends", "body ends"]


async def test_an_error_raised_while_stopping_leaves_as_itself_after_all_have_ended(
    autojump_clock: MockClock,
) -> None:
    diary, error = Diary(), OSError("the disk is full")

    async def unlucky(stop: StopToken) -> None:
        await stop.wait()
        raise error

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.steady("a"))
            await sup.start("b", unlucky)
            await trio.sleep(1)
            sup.stop()

    with pytest.raises(OSError, match="disk") as raised:
        await main()
    assert raised.value is error
    assert diary[-1] == "a ends"


async def test_several_errors_raised_while_stopping_leave_in_one_group(autojump_clock: MockClock) -> None:
    def unlucky(error: Exception) -> Any:
        async def run(stop: StopToken) -> None:
            await stop.wait()
            raise error

        return run

    with pytest.RaisesGroup(OSError, LookupError):
        async with Supervisor() as sup:
            await sup.start("a", unlucky(LookupError()))
            await sup.start("b", unlucky(OSError()))
            await trio.sleep(1)
            sup.stop()


async def test_a_stop_during_a_group_restart_stops_who_is_left_in_reverse(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(strategy="one_for_all") as sup:
        await sup.start("a", diary.steady("a", drain=4))
        await sup.start("b", diary.steady("b", drain=4))
        await sup.start("c", diary.failing("c", (1, OSError())), backoff=AT_ONCE)
        await trio.sleep(3)  # c has failed, b drains
        sup.stop()
    assert diary[-3:] == ["c ends", "b ends", "a ends"]


async def test_a_stop_timeout_counts_from_the_first_telling(autojump_clock: MockClock) -> None:
    async def deaf(stop: StopToken) -> None:
        await trio.sleep_forever()

    events: list[ChildEvent] = []
    diary = Diary()
    began = trio.current_time()
    async with Supervisor(strategy="one_for_all", on_event=events.append) as sup:
        await sup.start("a", deaf, stop_timeout=10)
        await sup.start("b", diary.failing("b", (1, OSError())))
        await trio.sleep(6)  # a was told at 1
        sup.stop()
    assert trio.current_time() == pytest.approx(began + 11)
    assert story(events).count("a stopping") == 1
    assert story(events).count("a cancelled") == 1


async def test_signals_stop_the_others_first_and_the_listener_last() -> None:
    diary, stop = Diary(), StopToken()
    async with Supervisor(stop) as sup:
        await sup.start("signals", stop.stop_on_signals)
        await sup.start("a", diary.steady("a"))
        os.kill(os.getpid(), signal.SIGTERM)
    assert diary == ["a starts", "a ready", "a ends"]


async def test_a_second_signal_gets_an_impatient_operator_out(autojump_clock: MockClock) -> None:
    stop = StopToken()

    async def stubborn(stop: StopToken) -> None:
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

    async def main() -> None:
        async with Supervisor(stop) as sup:
            await sup.start("signals", stop.stop_on_signals)
            await sup.start("a", stubborn, stop_timeout=None)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        await main()
