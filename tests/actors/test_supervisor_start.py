"""Starting children: order, readiness, what they are given, and starts that come to nothing."""

from __future__ import annotations

import contextvars
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from actors import Child, ChildEvent, StopToken, Supervisor, SupervisorStopping
from tests.actors.children import AT_ONCE, Diary


async def test_start_waits_until_the_child_is_ready_and_returns_what_it_gave(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        assert await sup.start("a", diary.steady("a", ready_after=5)) == "a"
        assert await sup.start(Child("b", diary.steady("b"))) == "b"
        sup.stop()
    assert diary[:4] == ["a starts", "a ready", "b starts", "b ready"]


async def test_a_child_without_task_status_is_ready_at_once(autojump_clock: MockClock) -> None:
    async def run(stop: StopToken) -> None:
        await stop.wait()

    began = trio.current_time()
    async with Supervisor() as sup:
        with assert_checkpoints():
            assert await sup.start("a", run) is None
        assert [info.state for info in sup.children()] == ["running"]
        sup.stop()
    assert trio.current_time() == began


async def given_both(stop: object, *, task_status: trio.TaskStatus[list[bool]]) -> None:
    task_status.started([isinstance(stop, StopToken), True])


async def given_by_keyword(task_status: trio.TaskStatus[Any], **rest: object) -> None:
    task_status.started(sorted(rest))


async def given_all(handler: object, *, concurrency: int, **rest: Any) -> None:
    rest["task_status"].started((handler, concurrency, sorted(rest)))


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (given_both, [True, True]),
        (given_by_keyword, ["stop"]),
        (partial(given_all, "handler", concurrency=20), ("handler", 20, ["stop", "task_status"])),
    ],
)
async def test_a_child_is_given_what_it_accepts(fn: Any, given: object) -> None:
    async with Supervisor() as sup:
        assert await sup.start("a", fn, restart="transient") == given


async def test_the_use_in_the_documentation_works_as_it_is(autojump_clock: MockClock) -> None:
    ran: list[object] = []

    class Emails:
        async def work(
            self,
            handler: object,
            *,
            concurrency: int = 1,
            stop: StopToken,
            task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        ) -> None:
            task_status.started()
            ran.append((handler, concurrency))
            await stop.wait()

    async def run_schedules(stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        ran.append("schedules")
        await stop.wait()

    stop = StopToken()
    async with Supervisor(stop) as sup:
        await sup.start("schedules", run_schedules)
        await sup.start("emails", partial(Emails().work, "send_email", concurrency=20))
        await trio.sleep(1)
        stop.stop()
    assert ran == ["schedules", ("send_email", 20)]


async def test_a_child_that_fails_before_it_is_ready_is_not_retried_and_start_raises_its_error(
    autojump_clock: MockClock,
) -> None:
    error = LookupError("no such table")
    calls = []

    async def run(task_status: trio.TaskStatus[None]) -> None:
        calls.append(1)
        await trio.sleep(1)
        raise error

    async with Supervisor() as sup:
        with pytest.raises(LookupError) as raised:
            await sup.start("a", run)
        assert raised.value is error
        await trio.sleep(100)
        assert sup.children() == []
    assert calls == [1]


async def test_a_group_raised_before_ready_keeps_its_shape() -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        raise ExceptionGroup("mine", [ValueError(), KeyError()])

    async with Supervisor() as sup:
        with pytest.RaisesGroup(ValueError, KeyError, match="mine"):
            await sup.start("a", run)


async def test_a_child_that_returns_before_it_is_ready_is_a_clear_error() -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        await trio.lowlevel.checkpoint()

    async with Supervisor() as sup:
        with pytest.raises(RuntimeError, match="child 'a' returned before it was ready"):
            await sup.start("a", run)


async def test_a_failed_start_that_nobody_catches_takes_the_others_down(autojump_clock: MockClock) -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        raise LookupError

    diary = Diary()

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.steady("a"))
            await sup.start("b", run)

    with pytest.raises(LookupError):
        await main()
    assert diary[-1] == "a ends"


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_a_start_that_is_cancelled_cancels_its_child(autojump_clock: MockClock, strategy: Any) -> None:
    diary = Diary()
    async with Supervisor(strategy=strategy) as sup:
        with trio.move_on_after(2) as scope:
            await sup.start("a", diary.steady("a", ready_after=5))
        assert scope.cancelled_caught
        await wait_all_tasks_blocked()
        assert diary == ["a starts", "a ends"]
        assert await sup.start("a", diary.steady("again")) == "again"
        sup.stop()


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_a_start_that_is_cancelled_ends_when_its_child_has_cleaned_up(
    autojump_clock: MockClock, strategy: Any
) -> None:
    alive = 0

    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal alive
        alive += 1
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            alive -= 1

    diary = Diary()
    async with Supervisor(strategy=strategy) as sup:
        for _ in range(2):
            began = trio.current_time()
            with trio.move_on_after(1) as scope:
                await sup.start("a", slow)
            assert scope.cancelled_caught
            assert (trio.current_time() - began, alive) == (6, 0)
            assert sup.children() == []
        assert await sup.start("a", diary.steady("a")) == "a"
        sup.stop()


async def test_a_start_that_is_cancelled_in_the_moment_in_which_its_child_is_ready(autojump_clock: MockClock) -> None:
    """Either its caller has heard of the child, or there is none."""
    alive = 0

    async def child(stop: StopToken, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal alive
        alive += 1
        try:
            await trio.sleep(1)
            task_status.started()
            await stop.wait()
        finally:
            alive -= 1

    for _ in range(20):  # trio wakes tasks in a random order
        async with Supervisor() as sup:
            with trio.move_on_after(1) as scope:
                await sup.start("a", child)
            assert alive == len(sup.children()) == (not scope.cancelled_caught)
            sup.stop()


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_the_stop_waits_for_a_child_whose_start_was_cancelled(autojump_clock: MockClock, strategy: Any) -> None:
    diary = Diary()

    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            diary.append("slow ends")

    async def start_and_give_up() -> None:
        with trio.move_on_after(1):
            await sup.start("slow", slow)

    async with trio.open_nursery() as nursery, Supervisor(strategy=strategy) as sup:
        await sup.start("first", diary.steady("first"))
        nursery.start_soon(start_and_give_up)
        await trio.sleep(2)
        assert [(child.name, child.state) for child in sup.children()][1:] == [("slow", "stopping")]
        sup.stop()
    assert diary == ["first starts", "first ready", "slow ends", "first ends"]


async def test_two_living_children_cannot_have_one_name(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        await sup.start("a", diary.steady("a"))
        with pytest.raises(ValueError, match="has a child named 'a' already"):
            await sup.start("a", diary.steady("b"))
        sup.stop()
    assert "b starts" not in diary


async def test_the_name_of_a_child_that_has_ended_may_be_used_again(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        await sup.start("a", diary.failing("a", (1, None)), restart="transient")
        await trio.sleep(2)
        assert [info.state for info in sup.children()] == ["ended"]
        await sup.start("a", diary.steady("b"))
        assert [info.state for info in sup.children()] == ["running"]
        sup.stop()


async def test_started_twice_is_an_error_of_the_child() -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        task_status.started()

    events: list[ChildEvent] = []
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", run, restart="temporary")
    assert [str(event.error) for event in events if event.kind == "failed"] == [
        "task_status.started() was called twice, or after the child had ended"
    ]


async def test_a_child_runs_with_the_context_of_whoever_started_it_in_every_life(
    autojump_clock: MockClock,
) -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    seen: list[str] = []

    async def run(stop: StopToken) -> None:
        seen.append(tenant.get())
        if len(seen) == 1:
            raise OSError
        await stop.wait()

    async with Supervisor() as sup:
        tenant.set("alice")
        await sup.start("a", run, backoff=AT_ONCE)
        tenant.set("bob")
        await trio.sleep(1)
        sup.stop()
    assert seen == ["alice", "alice"]


async def test_nothing_starts_outside_of_the_block() -> None:
    sup = Supervisor()
    with pytest.raises(RuntimeError, match="inside its async with block"):
        await sup.start("a", trio.sleep_forever)
    async with sup:
        pass
    with pytest.raises(SupervisorStopping):
        await sup.start("a", trio.sleep_forever)
    with pytest.raises(RuntimeError, match="used before"):
        async with sup:
            pass


async def test_children_may_be_started_by_children(autojump_clock: MockClock) -> None:
    diary = Diary()

    async def parent(stop: StopToken) -> None:
        await sup.start("b", diary.steady("b"))
        await stop.wait()

    async with Supervisor() as sup:
        await sup.start("a", parent)
        await trio.sleep(1)
        assert [info.name for info in sup.children()] == ["a", "b"]
        sup.stop()


async def test_the_children_are_shown_with_state_restarts_and_last_error(autojump_clock: MockClock) -> None:
    diary, error = Diary(), OSError("down")
    async with Supervisor() as sup:
        await sup.start("a", diary.failing("a", (1, error), (50, None)), backoff=AT_ONCE)
        await sup.start("b", diary.steady("b"))
        await trio.sleep(2)
        a, b = sup.children()
        assert (a.name, a.state, a.restarts, a.last_error) == ("a", "running", 1, error)
        assert (b.name, b.state, b.restarts, b.last_error) == ("b", "running", 0, None)
        sup.stop()


async def test_a_child_takes_no_options_beside_its_own() -> None:
    async with Supervisor() as sup:
        with pytest.raises(TypeError, match="a Child alone"):
            await sup.start(Child("a", trio.sleep_forever), restart="temporary")  # type: ignore[call-overload]


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="strategy must be one of one_for_one, one_for_all, rest_for_one"):
        Supervisor(strategy="all_for_one")  # type: ignore[arg-type]
