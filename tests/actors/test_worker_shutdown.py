"""Worker: a stop drains what is in hand; nothing is lost, failed or left locked by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from actors.ports import Interrupted, Raised, Returned
from actors.stop import StopToken
from actors.unwinding import LAST_WRITE_WITHIN
from actors.worker import Worker
from tests.actors.fakes import FakeSource, FakeWork


async def stop_after(stop: StopToken, seconds: float) -> None:
    await trio.sleep(seconds)
    stop.stop()


async def for_ever(work: FakeWork) -> None:
    await trio.sleep_forever()


async def test_an_idle_worker_stops_at_once_and_its_take_is_cancelled(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource()
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 5)
    assert await Worker(source, for_ever).run(stop) is None  # type: ignore[func-returns-value]
    assert source.log == ["take cancelled"]
    assert trio.current_time() == 5


async def test_stopped_before_it_begins_it_takes_nothing(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    stop.stop()
    await nursery.start(Worker(source, for_ever).run, stop)
    assert source.limits == []


async def test_renews_until_the_last_handler_has_ended(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    work = FakeWork(lease=2)
    source = FakeSource(work)
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)

    async def handler(work: FakeWork) -> None:
        await trio.sleep(9)

    await Worker(source, handler).run(stop)
    assert source.outcome() == Returned()
    assert len(source.renewals) == 13
    assert trio.current_time() == 9


async def test_renews_until_the_last_settle_has_ended(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=2))
    source.settle_takes = 9
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)
    await Worker(source, for_ever, grace=1).run(stop)
    assert source.outcome() == Interrupted("shutdown")
    assert trio.current_time() == 11


async def test_after_the_grace_works_go_back_at_once(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork("1"), FakeWork("2"))
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 10)
    await Worker(source, for_ever, concurrency=2, grace=3).run(stop)
    assert [outcome for _, outcome in source.settled] == [Interrupted("shutdown")] * 2
    assert trio.current_time() == 13


async def test_without_a_grace_handlers_are_cancelled_with_the_stop(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 10)
    await Worker(source, for_ever, grace=0).run(stop)
    assert source.outcome() == Interrupted("shutdown")
    assert trio.current_time() == 10


async def test_takes_nothing_after_the_stop(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()

    async def handler(work: FakeWork) -> None:
        stop.stop()
        source.add(FakeWork("late"))
        await trio.sleep(5)

    await Worker(source, handler, concurrency=5).run(stop)
    assert [work.name for work, _ in source.settled] == ["work"]
    assert [work.name for work in source.ready] == ["late"]


async def test_what_was_taken_in_the_moment_of_the_stop_goes_back_unstarted(autojump_clock: MockClock) -> None:
    stop = StopToken()

    class Late(FakeSource):
        async def take(self, limit: int) -> Sequence[FakeWork]:
            works = await FakeSource.take(self, limit)
            stop.stop()
            return works

    source = Late(FakeWork())
    await Worker(source, for_ever).run(stop)
    assert source.outcome() == Interrupted("shutdown")
    assert trio.current_time() == 0


@pytest.mark.parametrize("settle_takes", [0, 100 / 3_000, 5])
async def test_a_handler_that_returns_with_the_stop_is_settled_as_returned(
    settle_takes: float, autojump_clock: MockClock
) -> None:
    for _ in range(300):
        source = FakeSource(FakeWork())
        source.settle_takes = settle_takes
        stop = StopToken()

        async def handler(work: FakeWork) -> None:
            await trio.lowlevel.checkpoint()
            stop.stop()  # noqa: B023  run in this round

        await Worker(source, handler, grace=0).run(stop)
        assert source.outcome() == Returned()


async def test_a_handler_that_ends_with_the_grace_is_settled_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)

    async def handler(work: FakeWork) -> None:
        await trio.sleep(6)  # the very instant at which the grace ends

    await Worker(source, handler, grace=5).run(stop)
    assert source.outcome() in (Returned(), Interrupted("shutdown"))


async def test_an_error_raised_because_of_the_shutdown_is_recorded(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)

    async def handler(work: FakeWork) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("real")

    await Worker(source, handler, grace=1).run(stop)
    assert isinstance(outcome := source.outcome(), Raised)
    assert type(outcome.error) is ValueError


async def test_a_timeout_during_the_grace_is_a_timeout(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)
    await Worker(source, for_ever, timeout=5, grace=30).run(stop)
    assert isinstance(source.outcome(), Raised)


async def test_a_dead_store_cannot_hang_the_shutdown(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork(lease=1_000))
    source.settle_takes = math.inf
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)
    with pytest.raises(trio.TooSlowError):
        await Worker(source, for_ever, grace=2).run(stop)
    assert trio.current_time() == 3 + LAST_WRITE_WITHIN


async def test_a_store_that_fails_during_the_shutdown_is_not_hidden(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source = FakeSource(FakeWork())
    error = OSError("disk")

    def fail(work: FakeWork) -> None:
        raise error

    source.on_settle = fail
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)
    with pytest.raises(OSError, match="disk") as caught:
        await Worker(source, for_ever, grace=2).run(stop)
    assert caught.value is error


async def test_an_outer_cancellation_cuts_the_grace_short(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = FakeSource(FakeWork())
    stop = StopToken()
    nursery.start_soon(stop_after, stop, 1)
    with trio.move_on_after(5) as scope:
        await Worker(source, for_ever, grace=100).run(stop)
    assert scope.cancelled_caught
    assert source.outcome() == Interrupted("shutdown")
    assert trio.current_time() == 5
