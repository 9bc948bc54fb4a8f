"""Laws: what holds whatever the children do, whenever the stop or the cancellation comes."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import get_args

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors import Backoff, ChildEvent, Intensity, RestartsExceeded, StopToken, Supervisor
from actors.child import Restart
from actors.supervisor import Strategy

STOP_TIMEOUT = 4.0
SHIELDED = 1.0


class Flaky:
    """A child that lives as chance has it, and counts how many of it are alive."""

    def __init__(self, name: str, random: Random) -> None:
        self.name = name
        self.random = random
        self.alive = 0
        self.most_alive = 0

    async def run(self, stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        try:
            await trio.sleep(self.random.choice([0, 1, 3]))
            if self.random.random() < 0.1:
                raise LookupError(self.name)
            task_status.started()
            hears = stop if self.random.random() < 0.8 else StopToken()
            with trio.move_on_after(self.random.choice([0, 2, 10, 50])):
                await hears.wait()
            await trio.sleep(self.random.choice([0, 0, 2]))
            if self.random.random() < 0.5:
                raise OSError(self.name)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SHIELDED):
                await trio.sleep_forever()
            self.alive -= 1


@given(
    seed=st.integers(0, 2**32),
    strategy=st.sampled_from(get_args(Strategy)),
    restarts=st.lists(st.sampled_from(get_args(Restart)), min_size=1, max_size=5),
    stop_at=st.integers(0, 60),
    cancelled=st.booleans(),
)
def test_whatever_happens_each_child_lives_once_at_a_time_and_all_end_in_time(
    seed: int, strategy: Strategy, restarts: list[Restart], stop_at: int, cancelled: bool
) -> None:
    random = Random(seed)  # noqa: S311  a repeatable script, not a secret
    flaky = [Flaky(f"child{n}", random) for n in range(len(restarts))]
    events: list[ChildEvent] = []
    ended_after = 0.0

    async def supervise(stop: StopToken) -> None:
        async with Supervisor(stop, strategy=strategy, on_event=events.append, random=random) as sup:
            for child, restart in zip(flaky, restarts, strict=True):
                await sup.start(
                    child.name,
                    child.run,
                    restart=restart,
                    stop_timeout=STOP_TIMEOUT,
                    intensity=Intensity(3, 60),
                    backoff=Backoff(1, 8),
                )

    async def main() -> None:
        nonlocal ended_after
        began = trio.current_time()
        stop = StopToken()

        async def end_it() -> None:
            await trio.sleep(stop_at)
            if cancelled:
                scope.cancel()
            else:
                stop.stop()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_it)
            with trio.CancelScope() as scope:
                try:
                    await supervise(stop)
                except* (OSError, LookupError, RestartsExceeded):
                    pass  # anything else is not theirs, and fails the test
            nursery.cancel_scope.cancel()
            ended_after = trio.current_time() - began

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [child.alive for child in flaky] == [0] * len(flaky)
    assert max(child.most_alive for child in flaky) <= 1
    assert ended_after <= stop_at + len(flaky) * (STOP_TIMEOUT + SHIELDED) + 0.001
    told = [event for event in events if event.kind in ("starting", "ended", "failed", "stopped")]
    for child in flaky:
        lives = [event.kind == "starting" for event in told if event.child == child.name]
        assert not any(one and two for one, two in pairwise(lives))
