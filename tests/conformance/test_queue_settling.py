"""Settling a job: the guard of ack, retry, fail and heartbeat, and the backoff of a retry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alkstore import Job, JobHandle, ManualClock, Queue, Store
from tests.conformance.helpers import START, OpenStore, after, calm, claim, fresh, job, now, seen, virtually

Settle = Callable[[JobHandle], Awaitable[bool]]

FINALISERS: dict[str, Settle] = {
    "ack": lambda handle: handle.ack(),
    "retry": lambda handle: handle.retry("no"),
    "fail": lambda handle: handle.fail("no"),
    "snooze": lambda handle: handle.snooze(5),
}
GUARDED: dict[str, Settle] = {**FINALISERS, "heartbeat": lambda handle: handle.heartbeat()}

guarded = pytest.mark.parametrize("settle", GUARDED.values(), ids=GUARDED)
finalisers = pytest.mark.parametrize("settle", FINALISERS.values(), ids=FINALISERS)


async def leased(queue: Queue, lease: float = 10) -> JobHandle:
    await queue.enqueue(1)
    return await claim(queue, lease=lease)


# ---------------------------------------------------------------------------------------------------- the guard


@guarded
async def test_a_lease_is_live_until_the_millisecond_before_its_end(store: Store, settle: Settle) -> None:
    handle = await leased(store.queue("q"))
    await trio.sleep(9.999)
    assert await settle(handle)


@guarded
@pytest.mark.parametrize("late", [0, 0.001, 100])
async def test_from_its_end_on_a_lease_is_over_though_nobody_took_the_job(
    store: Store, settle: Settle, late: float
) -> None:
    """Q01, Q10 (a): a heartbeat revives nothing."""
    queue = store.queue("q")
    handle = await leased(queue)
    before = await job(queue, handle.id)
    await trio.sleep(10 + late)
    assert not await settle(handle)
    assert await job(queue, handle.id) == before


@guarded
async def test_who_lost_the_job_to_another_worker_changes_nothing(store: Store, settle: Settle) -> None:
    """Q01, Q10 (b)."""
    queue = store.queue("q")
    first = await leased(queue)
    await trio.sleep(10)
    second = await claim(queue, "w2")
    before = await job(queue, first.id)
    assert not await settle(first)
    assert await job(queue, first.id) == before
    assert await second.ack()
    assert second.attempt == 2


@guarded
async def test_a_worker_that_claims_its_own_lost_job_again_is_another_claim(store: Store, settle: Settle) -> None:
    """Q01: the fence is compared, not the worker's name."""
    queue = store.queue("q")
    first = await leased(queue)
    await trio.sleep(10)
    await claim(queue)
    assert not await settle(first)


@guarded
async def test_who_lost_a_job_that_is_done_changes_nothing(store: Store, settle: Settle) -> None:
    """Q10 (c)."""
    queue = store.queue("q")
    first = await leased(queue)
    await trio.sleep(10)
    await (await claim(queue)).ack()
    assert not await settle(first)
    assert await queue.get_job(first.id) is None


@guarded
async def test_a_claim_that_was_snoozed_is_over_though_the_attempt_number_returns(store: Store, settle: Settle) -> None:
    """An attempt that is given back makes two claims alike but for the fence."""
    queue = store.queue("q")
    first = await leased(queue)
    await first.snooze(0)
    second = await claim(queue)
    assert (first.attempt, second.attempt) == (1, 1)
    assert second.fence > first.fence
    assert not await settle(first)
    assert await second.ack()


@guarded
@pytest.mark.parametrize("first", FINALISERS.values(), ids=FINALISERS)
async def test_exactly_one_finaliser_wins_once(store: Store, first: Settle, settle: Settle) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    assert await first(handle)
    before = await queue.get_job(handle.id)
    assert not await settle(handle)
    assert await queue.get_job(handle.id) == before


async def test_of_finalisers_at_once_exactly_one_wins(store: Store) -> None:
    handle = await leased(store.queue("q"))
    won: list[str] = []

    async def finish(name: str, settle: Settle) -> None:
        if await settle(handle):
            won.append(name)

    async with trio.open_nursery() as nursery:
        for name, settle in FINALISERS.items():
            nursery.start_soon(finish, name, settle)
    assert len(won) == 1


@guarded
async def test_a_cancelled_job_is_nobodys(store: Store, settle: Settle) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    assert await queue.cancel_job(handle.id)
    assert not await settle(handle)
    assert (await job(queue, handle.id)).reason == "cancelled"


async def test_a_sweep_of_lapsed_leases_leaves_alone_what_is_done_meanwhile(store: Store) -> None:
    """Q02: claims take lapsed leases back; whoever acknowledged before that is done."""
    queue = store.queue("q")
    await queue.enqueue_many(range(20))
    handles = await queue.claim("w", 20, lease=10)
    await trio.sleep(9.999)
    async with trio.open_nursery() as nursery:
        for handle in handles[::2]:
            nursery.start_soon(handle.ack)
    await trio.sleep(0.001)
    again = await queue.claim("w2", 100)
    assert [handle.id for handle in again] == [handle.id for handle in handles[1::2]]
    assert {handle.attempt for handle in again} == {2}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.just("claim"),
            st.tuples(st.sampled_from(sorted(GUARDED)), st.integers(0, 4)),
            st.tuples(st.just("advance"), st.integers(1, 12)),
        ),
        max_size=25,
    )
)
def test_only_the_newest_claim_within_its_lease_is_believed(
    open_engine_store: OpenStore, steps: list[str | tuple[str, int]]
) -> None:
    """Whatever claims, finalisers, heartbeats and pauses come in which order: against a naive model."""

    async def main() -> None:
        clock = ManualClock(START)
        async with open_engine_store(clock=clock) as store:
            queue = store.queue(fresh("q"), max_attempts=10_000, backoff=0)
            await queue.enqueue(1)
            claims: list[JobHandle] = []
            live, end = False, 0
            for step in steps:
                if step == "claim":
                    for handle in await queue.claim("w", lease=10):
                        assert not live or end <= clock.now_ms()
                        claims.append(handle)
                        live, end = True, clock.now_ms() + 10_000
                elif step[0] == "advance":
                    clock.advance(float(step[1]))
                elif claims:
                    handle = claims[-1 - int(step[1]) % len(claims)]
                    right = live and handle is claims[-1] and clock.now_ms() < end
                    assert await GUARDED[step[0]](handle) == right
                    if right and step[0] == "heartbeat":
                        end = clock.now_ms() + 10_000
                    elif right:
                        live = False
            assert [handle.fence for handle in claims] == list(range(1, len(claims) + 1))

    virtually(main)


# ------------------------------------------------------------------------------------------------ ack, heartbeat


async def test_an_acknowledged_job_is_gone(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    assert await handle.ack()
    assert await queue.get_job(handle.id) is None
    assert await queue.dead() == []


async def test_a_heartbeat_gives_the_claims_own_length_from_now(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue, lease=10)
    await trio.sleep(4)
    assert await handle.heartbeat()
    assert handle.lease_remaining == 10
    assert (await job(queue, handle.id)).lease_until == after(store, 10)


async def test_a_heartbeat_may_ask_for_another_length(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue, lease=10)
    assert await handle.heartbeat(60)
    assert handle.lease_remaining == 60
    assert await handle.heartbeat(5)
    assert (await job(queue, handle.id)).lease_until == after(store, 5)


async def test_heartbeats_keep_a_job_from_others(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue, lease=3)
    for _ in range(10):
        await trio.sleep(2.999)
        assert await queue.claim("w2") == []
        assert await handle.heartbeat()
    assert await handle.ack()


async def test_a_handle_whose_heartbeat_was_refused_knows_that_it_should_stop(store: Store) -> None:
    handle = await leased(store.queue("q"), lease=3)
    assert not handle.cancelled
    await trio.sleep(3)
    assert not await handle.heartbeat()
    assert handle.cancelled


# -------------------------------------------------------------------------------------------------- retry, snooze


async def test_a_retry_waits_the_backoff_doubled_for_each_attempt_up_to_an_hour(store: Store) -> None:
    """Q15."""
    queue = store.queue("q", backoff=5, max_attempts=20)
    id = await queue.enqueue(1)
    found = []
    for _ in range(14):
        await (await claim(queue, wait=3_600)).retry("no")
        found.append(((await job(queue, id)).run_at - now(store)).total_seconds())
    assert found == [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600, 3600, 3600]


async def test_no_attempt_is_too_many_for_the_backoff(stepped: Store, clock: ManualClock) -> None:
    """Q15: no overflow at any attempt, and the job is never lost."""
    queue = stepped.queue("q", backoff=3_600, max_attempts=10_000)
    id = await queue.enqueue(1)
    for attempt in range(1, 101):
        clock.advance(3_600)
        handle = await claim(queue)
        assert handle.attempt == attempt
        assert await handle.retry("no")
        assert (await job(queue, id)).run_at == now(stepped) + timedelta(hours=1)


async def test_a_backoff_of_nothing_retries_at_once(store: Store) -> None:
    queue = store.queue("q", backoff=0)
    await (await leased(queue)).retry("no")
    assert len(await queue.claim("w")) == 1


@pytest.mark.parametrize("delay", [0, 7, 100_000])
async def test_a_retry_may_ask_for_a_delay_of_its_own(store: Store, delay: int) -> None:
    """The cap is for the backoff, not for what is asked for."""
    queue = store.queue("q")
    handle = await leased(queue)
    assert await handle.retry("no", delay)
    assert (await job(queue, handle.id)).run_at == after(store, delay)


async def test_the_last_error_of_a_live_job_is_visible(store: Store) -> None:
    queue = store.queue("q", backoff=0)
    handle = await leased(queue)
    await handle.retry("first")
    assert (await job(queue, handle.id)).error == "first"
    await (await claim(queue)).retry("second")
    assert (await job(queue, handle.id)).error == "second"


@pytest.mark.parametrize(
    "error", [None, "text", ValueError("text"), ExceptionGroup("g", [KeyError("a"), OSError("b")])]
)
async def test_an_error_is_a_text_or_an_exception_or_nothing(store: Store, error: str | BaseException | None) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    await handle.retry(error)
    found = (await job(queue, handle.id)).error
    if isinstance(error, BaseException):
        leaves = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        assert found is not None
        assert all(type(leaf).__name__ in found for leaf in leaves)
    else:
        assert found == error


async def test_a_retry_without_an_attempt_left_is_a_dead_letter_with_the_error(store: Store) -> None:
    queue = store.queue("q", max_attempts=1)
    handle = await leased(queue)
    assert await handle.retry("no", delay=0)
    dead = await job(queue, handle.id)
    assert (dead.state, dead.reason, dead.error) == ("dead", "attempts exhausted", "no")


async def test_a_job_is_tried_as_often_as_it_may_be(store: Store) -> None:
    queue = store.queue("q", max_attempts=4, backoff=0)
    await queue.enqueue(1)
    tries = 0
    while handles := await queue.claim("w"):
        tries += 1
        await handles[0].retry("no")
    assert tries == 4


async def test_a_snoozed_job_gets_its_attempt_back_and_never_its_fence(store: Store) -> None:
    queue = store.queue("q", max_attempts=1)
    await queue.enqueue(1)
    for n in range(1, 6):
        handle = await claim(queue)
        assert (handle.attempt, handle.fence) == (1, n)
        assert await handle.snooze(0)


async def test_a_snoozed_job_waits_for_as_long_as_it_said(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    assert await handle.snooze(30)
    assert (await job(queue, handle.id)).run_at == after(store, 30)


async def test_a_failed_job_is_a_dead_letter_at_once(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    assert await handle.fail("bad")
    dead = await job(queue, handle.id)
    assert (dead.state, dead.reason, dead.error, dead.died_at) == ("dead", "failed", "bad", now(store))


@pytest.mark.parametrize(
    ("settle", "outcome"),
    [("ack", "acked"), ("retry", "retried"), ("fail", "failed"), ("snooze", "snoozed")],
)
async def test_what_became_of_a_job_is_an_event(store: Store, settle: str, outcome: str) -> None:
    with store.events() as events:
        handle = await leased(store.queue("q"))
        await FINALISERS[settle](handle)
        (claimed,) = seen(events, "claimed")
        (settled,) = seen(events, "settled")
    assert (claimed.subject, claimed.details["ids"]) == ("q", [handle.id])
    assert (settled.subject, settled.details["id"], settled.details["outcome"]) == ("q", handle.id, outcome)


@guarded
async def test_a_refusal_wakes_nobody_and_is_no_event(store: Store, settle: Settle) -> None:
    handle = await leased(store.queue("q"), lease=1)
    await trio.sleep(1)
    with store.events() as events:
        await settle(handle)
        await calm()
        assert seen(events, "settled", "dead") == []


async def test_a_job_is_a_value_of_one_moment(store: Store) -> None:
    queue = store.queue("q")
    handle = await leased(queue)
    before: Job = handle.job
    await handle.retry("no")
    assert (before.state, before.error) == ("leased", None)
