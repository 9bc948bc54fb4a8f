"""Worker: leases are renewed while anything is in hand, and a handler never outlives its lease."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors.keeper import LOOK_AFTER
from actors.ports import Interrupted, Raised, Returned
from actors.stop import StopToken
from actors.worker import Worker
from tests.actors.fakes import FakeSource, FakeWork


def sleeping(seconds: float) -> Callable[[FakeWork], object]:
    async def handler(work: FakeWork) -> None:
        await trio.sleep(seconds)

    return handler


async def start(
    nursery: trio.Nursery, source: FakeSource, handler: Callable[[FakeWork], object], **options: Any
) -> None:
    """Start a worker that the end of the test cancels."""
    await nursery.start(Worker(source, handler, **options).run, StopToken())


def renewed_at(source: FakeSource, work: FakeWork) -> list[float]:
    return [when for when, works in source.renewals if work in works]


async def test_renews_each_third_of_the_lease_and_nobody_else_could_take_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    work = FakeWork(lease=3)
    source = FakeSource(work)
    await start(nursery, source, sleeping(10.5))
    for _ in range(105):
        assert not work.gone
        await trio.sleep(0.1)
        assert source.ours(work) or source.settled
    await source.until(lambda: source.settled)
    assert source.outcome() == Returned()
    assert renewed_at(source, work) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


async def test_each_lease_has_its_own_period(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    short, long = FakeWork("short", lease=3), FakeWork("long", lease=12)
    source = FakeSource(long, short)
    await start(nursery, source, sleeping(9.5), concurrency=2)
    await source.until(lambda: len(source.settled) == 2)
    assert renewed_at(source, short) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert renewed_at(source, long) == [4, 8]


async def test_all_leases_that_are_due_are_renewed_in_one_call(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    works = [FakeWork(f"{n}", lease=3) for n in range(10)]
    source = FakeSource(*works)
    await start(nursery, source, sleeping(1.5), concurrency=10)
    await source.until(lambda: len(source.settled) == 10)
    assert source.renewals == [(1, works)]


async def test_a_shorter_lease_that_starts_later_wakes_the_keeper(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork(lease=300))
    await start(nursery, source, sleeping(50), concurrency=2)
    await trio.sleep(10)
    short = FakeWork(lease=3)
    source.add(short)
    await trio.sleep(2.5)
    assert renewed_at(source, short) == [11, 12]


async def test_a_longer_lease_that_starts_later_does_not_wake_the_keeper(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork(lease=300))
    await start(nursery, source, sleeping(50), concurrency=2)
    await trio.sleep(10)
    source.add(FakeWork(lease=600))
    await trio.sleep(10)
    assert source.pauses == 1


async def test_with_nothing_in_hand_the_keeper_sleeps(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=30))
    await start(nursery, source, sleeping(5))
    await trio.sleep(80_000)
    assert source.pauses == 1
    assert source.renewals == []


async def test_short_works_do_not_wake_the_keeper(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource()
    await start(nursery, source, sleeping(LOOK_AFTER / 2))
    for _ in range(100):
        await trio.sleep(100)
        source.add(FakeWork(lease=30))
    await source.until(lambda: len(source.settled) == 100)
    assert source.pauses == 0


async def test_a_clock_step_is_noticed_in_time_by_an_idle_keeper(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource()
    await start(nursery, source, sleeping(100))
    await trio.sleep(10)
    source.add(FakeWork(lease=3_000))
    await trio.sleep(LOOK_AFTER / 2)
    source.step(1_500)
    await source.until(lambda: source.renewals)
    assert trio.current_time() == 10 + LOOK_AFTER


async def test_a_source_without_renewals_bounds_the_handler_by_its_lease(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    class Bounded(FakeSource):
        def renew_in(self, work: FakeWork) -> float:
            return math.inf

    source = Bounded(FakeWork(lease=60))
    ended = await cancelled_at(nursery, source)
    assert ended == 59
    assert source.renewals == []
    assert "lapsed work" in source.log, "nothing that goes wrong passes without a word"


async def test_without_renewals_a_handler_that_extends_its_lease_goes_on(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    class Bounded(FakeSource):
        def renew_in(self, work: FakeWork) -> float:
            return math.inf

        def extend(self, work: FakeWork) -> None:
            super().extend(work)
            self.nap.cancel()

        nap = trio.CancelScope()

        async def pause(self, seconds: float) -> None:
            with trio.CancelScope() as self.nap:
                await super().pause(seconds)

    source = Bounded(FakeWork(lease=60))

    async def handler(work: FakeWork) -> None:
        for _ in range(5):
            await trio.sleep(58.9)
            source.extend(work)

    await start(nursery, source, handler)
    await source.until(lambda: source.settled)
    assert source.outcome() == Returned()
    assert trio.current_time() == 5 * 58.9


async def test_without_renewals_a_clock_step_over_the_end_of_the_lease_cancels_the_handler(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    class Bounded(FakeSource):
        def renew_in(self, work: FakeWork) -> float:
            return math.inf

    source = Bounded(FakeWork(lease=60))

    async def step() -> None:
        await trio.sleep(10)
        source.step(3600)

    nursery.start_soon(step)
    assert await cancelled_at(nursery, source) == 10


async def cancelled_at(nursery: trio.Nursery, source: FakeSource, **options: Any) -> float:
    """When a handler that would go on for ever is cancelled."""
    ended: list[float] = []

    async def handler(work: FakeWork) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())
            source.moved()

    await start(nursery, source, handler, **options)
    await source.until(lambda: ended)
    await trio.testing.wait_all_tasks_blocked()
    return ended[0]


@pytest.mark.parametrize(("lease", "margin"), [(300, 1), (10, 1), (5, 0.5), (0.1, 0.01)])
async def test_a_handler_is_cancelled_a_margin_before_a_lease_that_could_not_be_renewed(
    lease: float, margin: float, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork(lease=lease))
    source.renew_takes = math.inf
    assert await cancelled_at(nursery, source) == pytest.approx(lease - margin)
    assert source.settled == []


async def test_a_renewal_moves_the_deadline(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=30))

    def third_time_slow() -> None:
        if len(source.renewals) == 2:
            source.renew_takes = math.inf

    source.on_renew = third_time_slow
    assert await cancelled_at(nursery, source) == 20 + 30 - 1


async def test_a_lease_end_is_not_taken_for_a_timeout(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=30))
    source.renew_takes = math.inf
    assert await cancelled_at(nursery, source, timeout=29.5) == 29
    assert source.settled == []


async def test_the_timeout_holds_whatever_is_renewed(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=3))
    assert await cancelled_at(nursery, source, timeout=29.5) == 29.5
    assert isinstance(source.outcome(), Raised)


async def test_a_lost_lease_cancels_the_handler_and_settles_nothing(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lost = FakeWork(lease=30)
    source = FakeSource(lost)

    def stolen() -> None:
        lost.gone = True

    source.on_renew = stolen
    assert await cancelled_at(nursery, source) == 10
    assert source.settled == source.refused == []
    assert source.limits == [1, 1]  # its slot is free again


async def test_a_renewal_that_comes_too_late_does_not_revive_the_lease(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    work = FakeWork(lease=3)
    source = FakeSource(work)
    source.renew_takes = 5
    assert await cancelled_at(nursery, source) == pytest.approx(2.7)
    await source.until_logged("renewed")
    await trio.sleep(10)
    assert not source.ours(work)
    assert source.settled == source.refused == []


async def test_a_forward_clock_step_makes_every_due_renewal_happen_at_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    works = [FakeWork("short", lease=30), FakeWork("long", lease=60), FakeWork("longest", lease=300)]
    source = FakeSource(*works)
    await start(nursery, source, sleeping(9), concurrency=3)
    await trio.sleep(2)
    source.step(25)
    await source.until(lambda: len(source.settled) == 3)
    assert source.renewals == [(2, works[:2])]
    assert all(outcome == Returned() for _, outcome in source.settled)


async def test_a_forward_clock_step_over_the_lease_cancels_the_handler(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork(lease=30))

    async def step() -> None:
        await trio.sleep(5)
        source.step(100)

    nursery.start_soon(step)
    assert await cancelled_at(nursery, source) == 5
    assert source.settled == []


async def test_a_failing_renewal_fails_the_worker_and_hands_its_works_back(autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("1"), FakeWork("2"))
    error = OSError("disk")

    def fail() -> None:
        raise error

    source.on_renew = fail
    source.settle_takes = 1
    with pytest.raises(OSError, match="disk") as caught:
        await Worker(source, sleeping(math.inf), concurrency=2).run(StopToken())
    assert caught.value is error
    assert [outcome for _, outcome in source.settled] == [Interrupted("cancellation")] * 2


async def test_a_handler_that_has_settled_its_work_is_not_bound_by_the_lease(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    work = FakeWork(lease=3)
    source = FakeSource(work)
    ended: list[float] = []

    async def handler(work: FakeWork) -> None:
        await trio.sleep(0.5)
        work.self_settled = True
        work.gone = True
        await trio.sleep(100)
        ended.append(trio.current_time())

    await start(nursery, source, handler)
    await source.until_logged("settled")
    assert ended == [100.5]
    assert source.renewals == []


async def test_a_handler_that_extends_its_lease_itself_is_not_cancelled(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork(lease=30))

    async def handler(work: FakeWork) -> None:
        for _ in range(100):
            source.extend(work)
            await trio.sleep(5)

    await start(nursery, source, handler)
    await source.until(lambda: source.settled)
    assert source.outcome() == Returned()
    assert trio.current_time() == 500
    assert source.renewals == []


async def test_renews_while_the_settle_waits(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=3))
    source.settle_takes = 10
    await start(nursery, source, sleeping(0))
    await source.until(lambda: source.settled or source.refused)
    assert source.outcome() == Returned()


async def test_a_work_that_was_settled_while_it_was_renewed_is_no_loss(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    work = FakeWork(lease=30)
    source = FakeSource(work, FakeWork("next"))
    source.renew_takes = 1  # from 10 to 11; the handler ends at 10.5, and its row is gone then
    await start(nursery, source, sleeping(10.5))
    await source.until(lambda: len(source.settled) == 2)
    assert [outcome for _, outcome in source.settled] == [Returned(), Returned()]


async def test_renews_while_a_cancelled_handler_cleans_up(autojump_clock: MockClock) -> None:
    work = FakeWork(lease=3)
    source = FakeSource(work)

    async def handler(work: FakeWork) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(20)

    with trio.move_on_after(1):
        await Worker(source, handler).run(StopToken())
    assert source.outcome() == Interrupted("cancellation")
    assert trio.current_time() == 21


async def test_works_are_told_apart_by_identity(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    class EqualWork(FakeWork):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Strict(FakeSource):
        async def renew(self, works: Sequence[FakeWork]) -> Collection[FakeWork]:
            await FakeSource.renew(self, works)
            return [work for work in works if work.name == "lost"]

    source = Strict(EqualWork("kept"), EqualWork("lost"))
    await start(nursery, source, sleeping(15), concurrency=2)
    await source.until(lambda: source.settled)
    await trio.testing.wait_all_tasks_blocked()
    assert [work.name for work, _ in source.settled] == ["kept"]


async def test_a_lease_that_is_cut_short_while_others_are_renewed_holds_its_handler_at_once(
    autojump_clock: MockClock,
) -> None:
    """The renewal may take its time: somebody may have locked a row."""
    slow, short = FakeWork("slow", lease=9), FakeWork("short", lease=30)
    source = FakeSource(slow, short)
    source.renew_takes = 8.0
    ended: list[float] = []

    async def handler(work: FakeWork) -> None:
        if work is short:
            await trio.sleep(4)  # the other one's renewal is under way
            work.lease, work.end = 2.0, source.now() + 2.0
            work.look()
        try:
            await trio.sleep_forever()
        finally:
            if work is short:
                ended.append(trio.current_time())

    stop = StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(source, handler, concurrency=2).run, stop)
        began = trio.current_time()
        await trio.sleep(7)
        assert ended == [pytest.approx(began + 4 + 2 - 0.2)]
        nursery.cancel_scope.cancel()
