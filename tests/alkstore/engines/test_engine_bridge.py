"""How blocking calls are made: one at a time, never left behind, and with virtual time standing still for them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from alkstore import open_store
from alkstore.engines.bridge import Bridge, InlineBridge, ThreadBridge, in_virtual_time, no_call_in_flight
from tests.alkstore.engines.enginekit import Gate, engine_of, marked_store, marks, until

BRIDGES = pytest.mark.parametrize("make", [ThreadBridge, InlineBridge], ids=["thread", "inline"])
Make = Callable[[], Bridge]


def work_for(seconds: float) -> Callable[[], str]:
    def work() -> str:
        time.sleep(seconds)
        return "done"

    return work


async def test_virtual_time_stands_still_while_a_thread_works(autojump_clock: MockClock) -> None:
    bridge = ThreadBridge()
    assert in_virtual_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 300)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(30):
            assert await bridge.call(work_for(0.002)) == "done"
            assert trio.current_time() == 0
        nursery.cancel_scope.cancel()


async def test_without_the_bridge_the_clock_would_leap(autojump_clock: MockClock) -> None:
    """The fact that this is about: a task that waits for a thread counts as idle."""
    with trio.move_on_after(300):
        await trio.to_thread.run_sync(time.sleep, 0.02)
    assert trio.current_time() >= 300


@pytest.mark.parametrize("threshold", [0, 0.01, math.inf])
async def test_the_users_own_threshold_is_kept_and_restored(threshold: float, mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = threshold
    seen: list[float] = []
    bridge = ThreadBridge()
    await bridge.call(lambda: seen.append(mock_clock.autojump_threshold))
    assert seen == [math.inf]
    assert mock_clock.autojump_threshold == threshold


async def test_what_the_user_sets_while_a_call_is_in_flight_is_kept(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    gate = Gate()
    bridge = ThreadBridge()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.call, gate.pass_through)
        while not gate.reached.is_set():
            await trio.lowlevel.checkpoint()
        mock_clock.autojump_threshold = 0.5
        gate.go_on.set()
    assert mock_clock.autojump_threshold == 0.5


async def test_the_hold_ends_with_the_last_of_several_calls(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    gates = [Gate(), Gate()]
    async with trio.open_nursery() as nursery:
        for gate in gates:
            nursery.start_soon(ThreadBridge().call, gate.pass_through)
        while not all(gate.reached.is_set() for gate in gates):
            await trio.lowlevel.checkpoint()
        for gate in gates:
            assert mock_clock.autojump_threshold == math.inf
            gate.go_on.set()
            await trio.to_thread.run_sync(time.sleep, 0.02)  # the clock is held: this is real time
        await trio.lowlevel.checkpoint()
    assert mock_clock.autojump_threshold == 0
    assert trio.current_time() == 0


async def test_a_call_that_raises_lets_the_clock_go(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    with pytest.raises(ZeroDivisionError):
        await ThreadBridge().call(lambda: 1 // 0)
    assert mock_clock.autojump_threshold == 0


async def test_a_call_that_is_cancelled_while_it_queues_has_not_run_and_lets_the_clock_go(
    mock_clock: MockClock,
) -> None:
    mock_clock.autojump_threshold = 0
    bridge, gate, ran = ThreadBridge(), Gate(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.call, gate.pass_through)
        while not gate.reached.is_set():
            await trio.lowlevel.checkpoint()
        with trio.CancelScope() as scope:
            scope.cancel()
            await bridge.call(lambda: ran.append(1))
        assert scope.cancelled_caught
        assert mock_clock.autojump_threshold == math.inf
        gate.go_on.set()
    assert not ran
    assert mock_clock.autojump_threshold == 0


async def test_a_call_that_is_cancelled_while_it_runs_is_waited_for() -> None:
    bridge, gate = ThreadBridge(), Gate()
    results: list[str] = []

    def work() -> str:
        gate.pass_through()
        return "done"

    async def caller() -> None:
        results.append(await bridge.call(work))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await until(gate.reached.is_set)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.02)
            assert not results
            gate.go_on.set()
    assert results == ["done"]


async def test_calls_run_one_at_a_time() -> None:
    bridge = ThreadBridge()
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(bridge.call, work)
    assert most == 1


async def test_a_program_that_uses_up_trios_threads_cannot_stop_a_store(tmp_path: Path) -> None:
    """T05: each of the program's threads waits for the store."""
    limiter = trio.to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    limiter.total_tokens = 2
    try:
        async with marked_store(tmp_path / "a.db", synchronous="normal") as store:

            def handler(n: int) -> None:
                trio.from_thread.run(store.queue("q").enqueue, n)

            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for n in range(20):
                        nursery.start_soon(trio.to_thread.run_sync, handler, n)
            assert (await store.queue("q").counts()).ready == 20
    finally:
        limiter.total_tokens = before


async def test_nor_the_waiting_for_a_lock_in_virtual_time(autojump_clock: MockClock) -> None:
    """There the store sleeps in threads of its own."""
    import anyio.to_thread

    bridge = ThreadBridge()
    limiter = anyio.to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    limiter.total_tokens = 1
    gate = Gate()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anyio.to_thread.run_sync, gate.pass_through)
            while not gate.reached.is_set():
                await trio.lowlevel.checkpoint()
            real = threading.Timer(5, gate.go_on.set)
            real.start()
            await bridge.sleep(0.01)
            assert not gate.go_on.is_set(), "it waited for the program's thread"
            real.cancel()
            gate.go_on.set()
    finally:
        limiter.total_tokens = before


async def test_waiting_for_somebody_outside_takes_no_virtual_time(autojump_clock: MockClock) -> None:
    bridge = ThreadBridge()
    began = bridge.time()
    with trio.move_on_after(0.001):
        await bridge.sleep(0.02)
    assert trio.current_time() < 0.001
    assert bridge.time() - began >= 0.02


@BRIDGES
async def test_every_call_is_a_checkpoint(make: Make) -> None:
    bridge = make()
    with trio.testing.assert_checkpoints():
        await bridge.call(lambda: None)
    others: list[int] = []

    async def other() -> None:
        others.append(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(3):
            await bridge.call(lambda: None)
        assert others, "another task had no turn"


@BRIDGES
async def test_a_call_in_a_cancelled_scope_does_not_run(make: Make) -> None:
    bridge, ran = make(), []
    with trio.CancelScope() as scope:
        scope.cancel()
        await bridge.call(lambda: ran.append(1))
    assert scope.cancelled_caught
    assert not ran


@BRIDGES
async def test_what_a_call_raises_leaves_as_itself(make: Make) -> None:
    with pytest.raises(ZeroDivisionError):
        await make().call(lambda: 1 // 0)


async def test_an_inline_call_runs_in_the_trio_thread_and_a_threaded_one_does_not() -> None:
    here = threading.get_ident()
    assert await InlineBridge().call(threading.get_ident) == here
    assert await ThreadBridge().call(threading.get_ident) != here


async def test_several_stores_share_the_clock_of_one_run(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Each call of each holds it; none lets it go while another's is in flight."""
    async with (
        marked_store(tmp_path / "a.db") as a,
        marked_store(tmp_path / "b.db") as b,
        open_store(":memory:") as c,
        trio.open_nursery() as nursery,
    ):

        async def work(n: int) -> None:
            for _ in range(5):
                await engine_of((a, b, c)[n % 3]).run(lambda tx: time.sleep(0.001))
                await engine_of((a, b, c)[n % 3]).read(lambda tx: time.sleep(0.001))

        nursery.start_soon(trio.sleep, 300)
        async with trio.open_nursery() as workers:
            for n in range(6):
                workers.start_soon(work, n)
        assert trio.current_time() == 0
        nursery.cancel_scope.cancel()
    assert autojump_clock.autojump_threshold == 0


async def test_a_cancelled_call_of_a_store_leaves_the_clock_as_it_was(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    gate = Gate()
    async with marked_store(tmp_path / "a.db") as store:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine_of(store).run, lambda tx: gate.pass_through())
            nursery.start_soon(engine_of(store).run, marks("withdrawn"))
            while not gate.reached.is_set():
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
            gate.go_on.set()
        await trio.sleep(10)
        assert trio.current_time() == 10
    assert autojump_clock.autojump_threshold == 0


async def test_no_call_in_flight_returns_when_the_last_call_has_ended(mock_clock: MockClock) -> None:
    assert not await no_call_in_flight()
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ThreadBridge().call, gate.pass_through)
        while not gate.reached.is_set():
            await trio.lowlevel.checkpoint()
        threading.Timer(0.02, gate.go_on.set).start()
        assert await no_call_in_flight()
        assert gate.go_on.is_set()
    assert not await no_call_in_flight()


async def test_without_virtual_time_there_is_nothing_to_hold() -> None:
    assert not in_virtual_time()
    assert not await no_call_in_flight()
    assert await ThreadBridge().call(work_for(0)) == "done"
