"""StopToken: flips once, reaches every linked scope and every descendant, and lets go of what has ended."""

from __future__ import annotations

import gc
import math
import os
import signal
import weakref
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors import StopToken


def test_is_made_and_flipped_outside_of_trio() -> None:
    stop = StopToken()
    before = stop.stopped
    stop.stop()
    assert (before, stop.stopped) == (False, True)


async def test_stop_cancels_every_intake_scope_at_once(autojump_clock: MockClock) -> None:
    stop = StopToken()
    ended: list[float] = []

    async def take() -> None:
        with stop.intake() as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(take)
        await trio.sleep(5)
        flipped = trio.current_time()
        stop.stop()
    assert ended == [flipped] * 3


async def test_an_intake_scope_of_a_stopped_token_is_cancelled_from_the_start() -> None:
    stop = StopToken()
    stop.stop()
    with stop.intake() as scope:
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_a_work_scope_has_its_grace_from_the_stop_on(autojump_clock: MockClock) -> None:
    stop = StopToken()
    with stop.work(grace=30) as scope:
        await trio.sleep(100)
        flipped = trio.current_time()
        stop.stop()
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(flipped + 30)


async def test_a_work_scope_of_a_stopped_token_has_its_grace_from_now_on(autojump_clock: MockClock) -> None:
    stop = StopToken()
    stop.stop()
    began = trio.current_time()
    with stop.work(grace=7):
        await trio.sleep_forever()
    assert trio.current_time() == pytest.approx(began + 7)


async def test_work_that_ends_within_its_grace_is_not_cancelled(autojump_clock: MockClock) -> None:
    stop = StopToken()
    with stop.work(grace=30) as scope:
        stop.stop()
        await trio.sleep(29)
    assert not scope.cancelled_caught


async def test_a_second_stop_starts_no_grace_anew(autojump_clock: MockClock) -> None:
    stop = StopToken()
    began = trio.current_time()
    with stop.work(grace=10):
        stop.stop()
        await trio.sleep(6)
        stop.stop()
        await trio.sleep_forever()
    assert trio.current_time() == pytest.approx(began + 10)


async def test_a_grace_never_moves_an_earlier_deadline_back(autojump_clock: MockClock) -> None:
    stop = StopToken()
    began = trio.current_time()
    with stop.work(grace=10) as scope:
        scope.deadline = began + 3
        stop.stop()
        await trio.sleep_forever()
    assert trio.current_time() == pytest.approx(began + 3)


async def test_work_without_a_limit_outlives_the_stop(autojump_clock: MockClock) -> None:
    stop = StopToken()
    with stop.work(grace=math.inf) as scope:
        stop.stop()
        await trio.sleep(80_000)
    assert not scope.cancelled_caught


@pytest.mark.parametrize("grace", [-1, math.nan])
def test_a_grace_out_of_range_is_refused_by_name(grace: float) -> None:
    with (
        pytest.raises(ValueError, match=r"grace must be 0 or more seconds, not (-1|nan)"),
        StopToken().work(grace),
    ):
        pass


async def test_scopes_are_let_go_when_they_end() -> None:
    stop = StopToken()
    with stop.intake() as intake, stop.work(5) as work:
        await trio.lowlevel.checkpoint()
    stop.stop()
    assert not intake.cancel_called
    assert work.deadline == math.inf


async def test_the_runner_of_the_docstring_finishes_what_it_has_begun(autojump_clock: MockClock) -> None:
    stop = StopToken()
    handled: list[int] = []

    async def handle(item: int) -> None:
        await trio.sleep(3)
        handled.append(item)

    async def run() -> None:
        with stop.work(grace=30):
            async with trio.open_nursery() as nursery:
                with stop.intake():
                    for item in range(100):
                        nursery.start_soon(handle, item)
                        await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.sleep(4.5)
        stop.stop()
    assert handled == [0, 1, 2, 3, 4]


async def test_wait_returns_when_flipped_and_is_a_checkpoint_after() -> None:
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop.wait)
        await wait_all_tasks_blocked()
        stop.stop()
    with trio.testing.assert_checkpoints():
        await stop.wait()


def test_stopping_a_token_stops_all_its_descendants() -> None:
    stop = StopToken()
    child = stop.child()
    grandchild = child.child()
    stop.stop()
    assert child.stopped
    assert grandchild.stopped


def test_stopping_a_child_leaves_parent_and_siblings_alone() -> None:
    stop = StopToken()
    child, sibling = stop.child(), stop.child()
    child.stop()
    assert (stop.stopped, child.stopped, sibling.stopped) == (False, True, False)


def test_a_child_of_a_stopped_token_is_born_stopped() -> None:
    stop = StopToken()
    stop.stop()
    assert stop.child().stopped


async def test_stopping_a_token_cancels_the_scopes_of_its_children() -> None:
    stop = StopToken()
    with stop.child().intake() as scope:
        stop.stop()
        await trio.sleep_forever()
    assert scope.cancelled_caught


def test_a_child_that_nobody_holds_is_forgotten() -> None:
    stop = StopToken()
    child = weakref.ref(stop.child())
    gc.collect()
    assert child() is None


def test_a_grandchild_is_reached_though_nobody_holds_its_parent() -> None:
    stop = StopToken()
    grandchild = stop.child().child()
    gc.collect()
    stop.stop()
    assert grandchild.stopped


async def test_every_flag_is_up_before_any_waiter_runs() -> None:
    stop = StopToken()
    family = [stop, stop.child(), stop.child()]
    seen: list[list[bool]] = []

    async def look(token: StopToken) -> None:
        await token.wait()
        seen.append([member.stopped for member in family])

    async with trio.open_nursery() as nursery:
        for token in family:
            nursery.start_soon(look, token)
        await wait_all_tasks_blocked()
        stop.stop()
    assert seen == [[True] * 3] * 3


async def test_a_stop_from_a_foreign_thread_is_refused_whole() -> None:
    stop = StopToken()
    child = stop.child()
    with child.intake() as scope:
        with pytest.raises(RuntimeError, match=r"from_thread.run_sync\(stop.stop\)"):
            await trio.to_thread.run_sync(stop.stop)
        assert not stop.stopped
        assert not child.stopped
        await trio.to_thread.run_sync(trio.from_thread.run_sync, stop.stop)
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_stop_from_a_foreign_thread_is_refused_also_if_somebody_only_waits_for_it() -> None:
    stop = StopToken()
    child = stop.child()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match=r"from_thread.run_sync\(stop.stop\)"):
            await trio.to_thread.run_sync(stop.stop)
        assert not stop.stopped
        assert not child.stopped
        stop.stop()  # and who waits is woken


async def test_a_signal_flips_the_token() -> None:
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.stop_on_signals)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        nursery.cancel_scope.cancel()
    assert stop.stopped


async def test_only_the_named_signals_are_caught() -> None:
    former = signal.getsignal(signal.SIGTERM)
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.stop_on_signals, signal.SIGUSR1)
        caught = signal.getsignal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        await stop.wait()
        nursery.cancel_scope.cancel()
    assert caught == former


async def test_the_second_signal_of_a_kind_raises_keyboard_interrupt() -> None:
    stop = StopToken()

    async def impatient() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            await wait_all_tasks_blocked()
            heard.append(number)

    heard: list[int] = []
    with pytest.RaisesGroup(KeyboardInterrupt):
        async with trio.open_nursery() as nursery:
            await nursery.start(stop.stop_on_signals, signal.SIGUSR1, signal.SIGUSR2)
            await impatient()
            await trio.sleep_forever()
    assert heard[:2] == [signal.SIGUSR1, signal.SIGUSR2]


async def test_former_signal_handlers_come_back() -> None:
    former = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with trio.open_nursery() as nursery:
        await nursery.start(StopToken().stop_on_signals)
        assert signal.getsignal(signal.SIGTERM) != former[0]
        nursery.cancel_scope.cancel()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former


async def test_a_signal_or_a_grace_of_the_wrong_type_is_named() -> None:
    wrong: Any = "SIGTERM"
    with pytest.raises(TypeError, match=r"signals must be of signal\.Signals, .* not 'SIGTERM'"):
        await StopToken().stop_on_signals(wrong)
    with pytest.raises(TypeError, match="grace must be a number of seconds, 0 or more, not 'SIGTERM'"):
        StopToken().work(wrong)
    with pytest.raises(TypeError, match="grace must be a number of seconds, 0 or more, not True"):
        StopToken().work(True)
