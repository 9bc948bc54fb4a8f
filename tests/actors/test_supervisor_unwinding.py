"""Unwinding: what leaves a supervisor when the body, a child or the outside ends it, and in which shape."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors import Backoff, ChildEvent, Intensity, RestartsExceeded, StopToken, Supervisor, SupervisorStopping
from tests.actors.children import AT_ONCE, Diary, story


async def test_what_the_body_raises_leaves_as_itself_and_cancels_the_children(
    autojump_clock: MockClock,
) -> None:
    diary, error = Diary(), LookupError("mine")

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.steady("a", drain=50))
            raise error

    began = trio.current_time()
    with pytest.raises(LookupError) as raised:
        await main()
    assert raised.value is error
    assert error.__context__ is None
    assert diary[-1] == "a ends"
    assert trio.current_time() == began


async def test_a_group_that_the_body_raises_keeps_its_shape() -> None:
    group = ExceptionGroup("mine", [LookupError()])

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", trio.sleep_forever)
            raise group

    with pytest.raises(ExceptionGroup) as raised:
        await main()
    assert raised.value is group


async def test_a_childs_error_in_clean_up_is_noted_on_the_bodys_error() -> None:
    async def messy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("while cleaning up")

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", messy)
            await wait_all_tasks_blocked()
            raise LookupError

    with pytest.raises(LookupError) as raised:
        await main()
    assert raised.value.__notes__ == ["besides, in supervisor: OSError('while cleaning up')"]


async def test_an_outer_cancel_unwinds_everything_and_shielded_clean_up_runs(
    autojump_clock: MockClock,
) -> None:
    diary, events = Diary(), list[ChildEvent]()

    async def tidy(stop: StopToken) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                await trio.sleep(2)
                diary.append("released")

    with trio.move_on_after(5) as scope:
        async with Supervisor(on_event=events.append) as sup:
            await sup.start("a", tidy)
            await sup.start("b", diary.failing("b", (1, OSError())), backoff=Backoff(100, 100))
    assert scope.cancelled_caught
    assert diary[-1] == "released"
    assert [info.state for info in sup.children()] == ["stopped", "stopped"]
    assert set(story(events)[-2:]) == {"a stopped", "b stopped"}


async def test_an_error_during_an_outer_cancel_is_not_lost(autojump_clock: MockClock) -> None:
    error = OSError("while cleaning up")

    async def messy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    async def main() -> None:
        with trio.move_on_after(5):
            async with Supervisor() as sup:
                await sup.start("a", messy)

    with pytest.raises(OSError, match="while cleaning up") as raised:
        await main()
    assert raised.value is error


async def test_a_childs_error_mixed_with_cancelled_keeps_its_group(autojump_clock: MockClock) -> None:
    async def messy() -> None:
        async def fail() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise OSError

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)

    async def main() -> None:
        with trio.move_on_after(5):
            async with Supervisor() as sup:
                await sup.start("a", messy)

    with pytest.RaisesGroup(OSError):
        await main()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_an_interrupt_in_a_child_unwinds_everything_as_itself(
    autojump_clock: MockClock, kind: type[BaseException], strategy: Any
) -> None:
    diary, events = Diary(), list[ChildEvent]()
    error = kind()

    async def run(stop: StopToken) -> None:
        await trio.sleep(5)
        raise error

    async def main() -> None:
        async with Supervisor(strategy=strategy, on_event=events.append) as sup:
            await sup.start("a", diary.steady("a", drain=50))
            await sup.start("b", run, backoff=AT_ONCE)
            await trio.sleep_forever()

    began = trio.current_time()
    with pytest.raises(kind) as raised:
        await main()
    assert raised.value is error
    assert trio.current_time() == pytest.approx(began + 5)
    assert diary[-1] == "a ends"
    assert "b restarting" not in story(events)


async def test_an_interrupt_while_a_child_starts_leaves_as_itself() -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", run)

    with pytest.raises(KeyboardInterrupt):
        await main()


async def test_the_bodys_error_goes_before_an_escalation(autojump_clock: MockClock) -> None:
    diary = Diary()

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.failing("a", (1, OSError())), intensity=Intensity(0, 60))
            try:
                await trio.sleep_forever()
            finally:
                raise LookupError

    with pytest.raises(LookupError) as raised:
        await main()
    assert any("RestartsExceeded" in note for note in raised.value.__notes__)


async def test_a_start_from_outside_is_refused_when_the_supervisor_unwinds(autojump_clock: MockClock) -> None:
    refused: list[str] = []
    diary = Diary()

    async def outsider(sup: Supervisor) -> None:
        try:
            await sup.start("late", diary.steady("late", ready_after=50))
        except SupervisorStopping:
            refused.append("late")

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            async with Supervisor() as sup:
                nursery.start_soon(outsider, sup)
                await trio.sleep_forever()
    assert refused == ["late"]


async def test_nothing_of_trios_wrapping_shows_in_an_escalation(autojump_clock: MockClock) -> None:
    diary = Diary()

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.failing("a", (1, OSError())), intensity=Intensity(0, 60))

    with pytest.raises(RestartsExceeded) as raised:
        await main()
    assert isinstance(raised.value.__cause__, OSError)
    assert not hasattr(raised.value, "__notes__")


# --- a team is a child of another supervisor by being a function ---


def team(diary: Diary, *lives: tuple[float, Exception | None]) -> Any:
    writer = diary.failing("writer", *lives)

    async def run(stop: StopToken, *, task_status: trio.TaskStatus[None]) -> None:
        async with Supervisor(stop, strategy="one_for_all", name="team") as sup:
            await sup.start("reader", diary.steady("reader"))
            await sup.start("writer", writer, intensity=Intensity(1, 60), backoff=AT_ONCE)
            task_status.started()

    return run


async def test_a_team_stops_in_reverse_order_inside_the_order_of_its_parent(
    autojump_clock: MockClock,
) -> None:
    diary, stop = Diary(), StopToken()
    async with Supervisor(stop) as sup:
        await sup.start("first", diary.steady("first"))
        await sup.start("team", team(diary))
        await sup.start("last", diary.steady("last"))
        stop.stop()
    assert diary[-4:] == ["last ends", "writer ends", "reader ends", "first ends"]


async def test_a_team_that_gives_up_is_a_failed_child_of_its_parent(autojump_clock: MockClock) -> None:
    diary, events, error = Diary(), list[ChildEvent](), OSError("once too often")
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("team", team(diary, (1, OSError()), (1, error)))
        await trio.sleep(30)
        assert [(info.state, info.restarts) for info in sup.children()] == [("running", 1)]
        sup.stop()
    (failure,) = [event.error for event in events if event.kind == "failed"]
    assert isinstance(failure, RestartsExceeded)
    assert failure.__cause__ is error
    assert diary.count("reader starts") == 3


async def test_an_outer_cancel_unwinds_a_team_too(autojump_clock: MockClock) -> None:
    diary = Diary()
    with trio.move_on_after(3) as scope:
        async with Supervisor() as sup:
            await sup.start("team", team(diary))
    assert scope.cancelled_caught
    assert sorted(diary[-2:]) == ["reader ends", "writer ends"]


async def deeply_failing(task_status: trio.TaskStatus[None]) -> None:
    task_status.started()
    error: Exception = ValueError("leaf")
    for _ in range(5_000):
        error = ExceptionGroup("level", [error])
    raise error


async def test_a_temporary_child_takes_nobody_down_however_deep_its_error_is(autojump_clock: MockClock) -> None:
    async with Supervisor() as sup:
        await sup.start("a", deeply_failing, restart="temporary")
        await trio.sleep(1)
        assert [child.state for child in sup.children()] == ["failed"]


async def test_a_listener_that_fails_with_a_deep_error_takes_nobody_down(autojump_clock: MockClock) -> None:
    def listen(event: ChildEvent) -> None:
        if event.error is not None:
            raise event.error

    async with Supervisor(on_event=listen) as sup:
        await sup.start("a", deeply_failing, restart="temporary")
        await trio.sleep(1)
        assert [child.state for child in sup.children()] == ["failed"]
