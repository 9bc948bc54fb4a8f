"""Worker: what holds for every mix of works, leases, failures, cancellations and stops."""

from __future__ import annotations

import math

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.handlers import HandlerTimeout
from actors.ports import Interrupted, Outcome, Raised, Returned
from actors.stop import StopToken
from actors.worker import Worker
from tests.actors.fakes import FakeSource, FakeWork


@attrs.define(eq=False)
class Plan(FakeWork):
    """A work, what its handler will do, and what really happened."""

    arrives: float = 0.0
    takes: float = 1.0
    fails: bool = False
    cancelled_after: float = math.inf
    begun: float = math.nan
    ended: float = math.nan

    async def run(self, nursery: trio.Nursery) -> None:
        self.begun = trio.current_time()
        if self.cancelled_after < math.inf:
            nursery.start_soon(self.cancel_later)
        try:
            await trio.sleep(self.takes)
            if self.fails:
                raise ValueError(self.name)
        finally:
            self.ended = trio.current_time()

    async def cancel_later(self) -> None:
        await trio.sleep(self.cancelled_after)
        self.cancel("not wanted any more")


# Sixteenths are exact as float, so that limits and lengths often meet in the same instant.
def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(math.ceil(low * 16), math.floor(high * 16)).map(lambda n: n / 16)


plans = st.builds(
    Plan,
    lease=seconds(0.5, 20),
    arrives=seconds(0, 30),
    takes=seconds(0, 40),
    fails=st.booleans(),
    cancelled_after=st.one_of(st.just(math.inf), seconds(0, 20)),
)


def possible(plan: Plan, timeout: float, stop_at: float, grace: float) -> set[type[Outcome] | None]:
    """The outcomes that are right; more than one when several things happen in the same instant."""
    ends: dict[type[Outcome] | None, float] = {
        Raised if plan.fails else Returned: plan.takes,
        None: plan.cancelled_after,
        Interrupted: max(0, stop_at + grace - plan.begun),
    }
    first = min(*ends.values(), timeout)
    right = {outcome for outcome, end in ends.items() if end == first}
    return right | ({Raised} if timeout == first else set())


@settings(deadline=None)
@given(
    works=st.lists(plans, max_size=12),
    concurrency=st.integers(1, 4),
    timeout=st.one_of(st.just(math.inf), seconds(1, 20)),
    stop_at=seconds(0, 60),
    grace=seconds(0, 20),
)
def test_every_work_has_the_one_outcome_that_is_right(
    works: list[Plan], concurrency: int, timeout: float, stop_at: float, grace: float
) -> None:
    source = FakeSource()
    running: set[FakeWork] = set()
    most = 0

    async def main() -> float:
        stop = StopToken()

        async def handler(work: FakeWork) -> None:
            nonlocal most
            assert isinstance(work, Plan)
            running.add(work)
            most = max(most, len(running))
            try:
                await work.run(background)
            finally:
                running.discard(work)

        async def arrive(plan: Plan) -> None:
            await trio.sleep(plan.arrives)
            source.add(plan)

        async def stop_later() -> None:
            await trio.sleep(stop_at)
            stop.stop()

        limit = None if timeout == math.inf else timeout
        async with trio.open_nursery() as background:
            for plan in works:
                background.start_soon(arrive, plan)
            background.start_soon(stop_later)
            await Worker(source, handler, concurrency=concurrency, timeout=limit, grace=grace).run(stop)
            ended = trio.current_time()
            background.cancel_scope.cancel()
        return ended

    ended = trio.run(main, clock=MockClock(autojump_threshold=0))

    assert stop_at <= ended <= stop_at + grace
    assert most <= concurrency
    assert not running
    assert source.refused == []  # no lease was ever over
    outcomes = dict(source.settled)
    assert len(outcomes) == len(source.settled)  # nothing is settled twice
    for plan in works:
        outcome = outcomes.get(plan)
        if math.isnan(plan.begun):
            # never taken, or taken in the moment of the stop and given back
            assert outcome is None or outcome == Interrupted("shutdown")
        else:
            assert plan.begun <= stop_at
            assert (None if outcome is None else type(outcome)) in possible(plan, timeout, stop_at, grace)
        if isinstance(outcome, Raised) and isinstance(outcome.error, HandlerTimeout):
            assert plan.ended - plan.begun == timeout
