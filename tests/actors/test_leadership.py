"""Leadership: standing by, renewing, answering, losing, releasing."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from actors.leadership import Leadership
from actors.unwinding import LAST_WRITE_WITHIN
from tests.actors.fakes import FakeLease, Grant, Lost


async def lead(lease: FakeLease, nursery: trio.Nursery) -> Leadership[Grant]:
    leadership = Leadership(lease)
    await nursery.start(leadership.run)
    return leadership


async def test_standing_by_is_ready_and_a_question_waits_for_the_lease(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease(ttl=30)
    lease.take("another")
    leadership = await lead(lease, nursery)
    assert trio.current_time() == 0
    grant = await leadership.fresh()
    assert grant == Grant("leader", 2)
    assert trio.current_time() == 30


async def test_cancelled_while_standing_by_nothing_is_held(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    other = lease.take("another")
    with trio.move_on_after(1):
        await Leadership(lease).run()
    assert lease.holder == other
    assert "released 2" not in lease.log


async def test_renews_each_third_of_the_ttl(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    with trio.move_on_after(65):
        await Leadership(lease).run()
    assert lease.renewals == [10, 20, 30, 40, 50, 60]


async def test_a_question_is_answered_without_a_renewal_when_none_is_due(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease(ttl=30)
    leadership = await lead(lease, nursery)
    await trio.sleep(9)
    assert await leadership.fresh() == lease.holder
    assert trio.current_time() == 9
    assert lease.renewals == []


async def test_questions_do_not_put_off_the_renewal(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    leadership = await lead(lease, nursery)
    for _ in range(21):
        await leadership.fresh()
        await trio.sleep(1)
    assert lease.renewals == [10, 20]


async def test_after_a_clock_step_a_question_is_answered_only_after_a_renewal(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lease = FakeLease(ttl=30)
    leadership = await lead(lease, nursery)
    await trio.sleep(1)
    lease.step(20)
    await leadership.fresh()
    assert lease.renewals == [1]
    assert lease.log[-1] == "renewed"


async def test_a_refused_renewal_raises_lost_and_answers_nobody(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    answers = []

    async def ask(leadership: Leadership[Grant]) -> None:
        await lease.until_logged("stolen")
        answers.append(await leadership.fresh())

    async def all_of_it() -> None:
        async with trio.open_nursery() as nursery:
            leadership = await lead(lease, nursery)
            nursery.start_soon(ask, leadership)
            await trio.sleep(1)
            lease.step(100)
            lease.take("another")
            lease.renewed_at = -1_000
            lease.note("stolen")

    with pytest.raises(ExceptionGroup) as caught:  # of the test's own nursery
        await all_of_it()
    (error,) = caught.value.exceptions
    assert type(error) is Lost
    assert answers == []
    assert lease.holder == Grant("another", 2)


async def test_an_expired_lease_is_lost_even_if_nobody_took_it(autojump_clock: MockClock) -> None:
    lease = FakeLease(ttl=30)
    lease.on_renew = lambda: lease.step(31)
    with pytest.raises(Lost):
        await Leadership(lease).run()
    assert lease.log[-1] == "refused"


async def test_cancelled_while_leading_the_lease_is_released(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    lease.release_takes = 2
    with trio.move_on_after(1) as scope:
        await Leadership(lease).run()
    assert scope.cancelled_caught
    assert lease.holder is None
    assert trio.current_time() == 3


async def test_a_dead_store_cannot_hang_the_release(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    lease.release_takes = 1_000_000
    with pytest.raises(BaseExceptionGroup) as caught, trio.move_on_after(1):
        await Leadership(lease).run()
    (error,) = caught.value.exceptions  # trio has taken its Cancelled out
    assert type(error) is trio.TooSlowError
    assert str(error) == "releasing the lease took more than 15 s"
    assert trio.current_time() == 1 + LAST_WRITE_WITHIN


async def test_an_error_of_the_store_while_renewing_leaves_as_it_is_and_the_lease_is_released(
    autojump_clock: MockClock,
) -> None:
    lease = FakeLease()
    error = OSError("disk")

    def fail() -> None:
        raise error

    lease.on_renew = fail
    with pytest.raises(OSError, match="disk") as caught:
        await Leadership(lease).run()
    assert caught.value is error
    assert lease.holder is None


async def test_neither_the_first_error_nor_that_of_the_release_is_hidden(autojump_clock: MockClock) -> None:
    lease = FakeLease()

    def fail(what: str) -> None:
        raise OSError(what)

    lease.on_renew = lambda: fail("renew")
    lease.on_release = lambda: fail("release")
    with pytest.raises(ExceptionGroup) as caught:
        await Leadership(lease).run()
    assert [str(error) for error in caught.value.exceptions] == ["renew", "release"]


async def test_a_lease_won_in_the_moment_of_the_cancellation_is_released(autojump_clock: MockClock) -> None:
    lease = FakeLease()
    scope = trio.CancelScope()
    lease.on_acquire = scope.cancel
    with scope:
        await Leadership(lease).run()
    assert scope.cancelled_caught
    assert lease.log == ["acquired 1", "released 1"]
    assert lease.holder is None
