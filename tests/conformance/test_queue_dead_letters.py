"""Dead letters and other housekeeping: listing, counting, redriving, pruning, sweeping, cancelling."""

from __future__ import annotations

from datetime import timedelta

import pytest
import trio

from alkstore import Counts, JobHandle, Store
from alkstore.context import Hands
from tests.conformance.helpers import OpenStore, after, calm, claim, job, kill, now, running, seen

STATES = ("delayed", "ready", "leased", "dead")


async def one_of_each(store: Store) -> dict[str, int]:
    queue = store.queue("q")
    (dead,) = await kill(queue, "dead")
    leased = await queue.enqueue("leased")
    await claim(queue)
    return {
        "delayed": await queue.enqueue("delayed", delay=100),
        "ready": await queue.enqueue("ready"),
        "leased": leased,
        "dead": dead,
    }


# ------------------------------------------------------------------------------------------------ list and counts


@pytest.mark.parametrize("state", STATES)
async def test_a_list_shows_the_jobs_of_one_state(store: Store, state: str) -> None:
    ids = await one_of_each(store)
    await store.queue("other").enqueue("another queue's")
    (found,) = await store.queue("q").list(state)  # type: ignore[arg-type]
    assert (found.id, found.state, found.payload) == (ids[state], state, state)


async def test_counts_show_how_many_are_in_each_state(store: Store) -> None:
    await one_of_each(store)
    assert await store.queue("q").counts() == Counts(delayed=1, ready=1, leased=1, dead=1)


async def test_a_delayed_job_is_ready_from_its_moment_on(store: Store) -> None:
    await store.queue("q").enqueue(1, delay=10)
    await trio.sleep(9.999)
    assert await store.queue("q").counts() == Counts(delayed=1, ready=0, leased=0, dead=0)
    await trio.sleep(0.001)
    assert await store.queue("q").counts() == Counts(delayed=0, ready=1, leased=0, dead=0)


async def test_pages_by_id_show_every_job_once(store: Store) -> None:
    ids = await store.queue("q").enqueue_many(range(25))
    found: list[int] = []
    while page := await store.queue("q").list(after=found[-1] if found else 0, limit=10):
        found += [job.id for job in page]
    assert found == ids


async def test_pages_of_dead_letters_show_every_one_once(store: Store) -> None:
    ids = await kill(store.queue("q"), *range(7))
    found: list[int] = []
    while page := await store.queue("q").dead(after=found[-1] if found else 0, limit=3):
        found += [job.id for job in page]
    assert found == ids


async def test_a_page_is_not_disturbed_by_what_is_deleted_meanwhile(store: Store) -> None:
    ids = await kill(store.queue("q"), *range(6))
    first = await store.queue("q").dead(limit=3)
    assert await store.queue("q").redrive(ids[0])
    assert [job.id for job in [*first, *await store.queue("q").dead(after=first[-1].id, limit=3)]] == ids


# --------------------------------------------------------------------------------------------------------- redrive


async def test_a_redriven_job_is_due_now_with_no_attempts_used(store: Store) -> None:
    queue = store.queue("q", max_attempts=2, backoff=0)
    id = await queue.enqueue(1, key="k", headers={"a": "b"}, priority=3)
    for _ in range(2):
        fence = (await claim(queue)).fence
        await trio.sleep(300)
    await queue.claim("w")
    assert await queue.redrive(id)
    found = await job(queue, id)
    assert (found.state, found.attempt, found.run_at, found.fence) == ("ready", 0, now(store), fence)
    assert (found.reason, found.died_at, found.max_attempts) == (None, None, 2)
    assert (found.payload, found.key, found.headers, found.priority) == (1, "k", {"a": "b"}, 3)


async def test_a_redriven_job_does_not_expire(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, expires=10)
    await trio.sleep(10)
    assert await queue.sweep_expired() == 1
    assert await queue.redrive(id)
    assert (await job(queue, id)).expires_at is None
    assert (await claim(queue)).id == id


async def test_who_had_the_job_before_it_died_cannot_settle_its_new_life(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1)
    old = await claim(queue)
    await queue.cancel_job(old.id)
    await queue.redrive(old.id)
    new = await claim(queue)
    assert new.fence > old.fence
    assert not await old.ack()
    assert await new.ack()


async def test_only_a_dead_letter_of_this_queue_is_redriven(store: Store) -> None:
    ids = await one_of_each(store)
    for state in ("delayed", "ready", "leased"):
        assert not await store.queue("q").redrive(ids[state])
    assert not await store.queue("other").redrive(ids["dead"])
    assert not await store.queue("q").redrive(999_999)
    assert await store.queue("q").redrive(ids["dead"])


async def test_a_dead_letter_whose_key_is_taken_is_not_redriven(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, key="k")
    await (await claim(queue)).fail()
    await queue.enqueue(2, key="k")
    assert not await queue.redrive(id)
    assert await queue.redrive_all() == 0
    assert (await job(queue, id)).state == "dead"


async def test_all_are_redriven(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue_many(range(1_100), expires=0)  # more than one transaction takes
    assert await queue.sweep_expired() == 1_100
    assert await queue.redrive_all() == 1_100
    assert await queue.counts() == Counts(delayed=0, ready=1_100, leased=0, dead=0)


# ---------------------------------------------------------------------------------------------------- prune, sweep


async def test_dead_letters_of_an_age_are_pruned(store: Store) -> None:
    queue = store.queue("q")
    (old,) = await kill(queue, 1)
    await trio.sleep(60)
    (young,) = await kill(queue, 2)
    assert await queue.prune(60.001) == 0
    assert await queue.prune(timedelta(minutes=1)) == 1
    assert await queue.get_job(old) is None
    assert await queue.get_job(young) is not None


async def test_pruning_takes_only_dead_letters_of_this_queue(store: Store) -> None:
    ids = await one_of_each(store)
    await kill(store.queue("other"), 1)
    assert await store.queue("q").prune(0) == 1
    assert await store.queue("q").get_job(ids["dead"]) is None
    assert await store.queue("q").counts() == Counts(delayed=1, ready=1, leased=1, dead=0)
    assert (await store.queue("other").counts()).dead == 1


async def test_a_sweep_buries_what_has_expired_at_any_priority_and_delay(store: Store) -> None:
    queue = store.queue("q")
    for priority in (-100, 0, 100):
        await queue.enqueue(1, expires=10, priority=priority)
    await queue.enqueue(1, expires=10, delay=1)
    await queue.enqueue(1)
    await store.queue("other").enqueue(1, expires=10)
    await trio.sleep(10)
    assert await queue.sweep_expired() == 3
    await trio.sleep(1)
    assert await queue.sweep_expired() == 1
    assert await queue.sweep_expired() == 0
    assert {job.reason for job in await queue.dead()} == {"expired"}
    assert (await store.queue("other").counts()).dead == 0


async def test_a_sweep_leaves_a_job_that_is_being_worked_on_alone(store: Store) -> None:
    queue = store.queue("q")
    await queue.enqueue(1, expires=10)
    handle = await claim(queue)
    await trio.sleep(10)
    assert await queue.sweep_expired() == 0
    assert await handle.ack()


async def test_every_death_is_an_event_with_its_reason(store: Store) -> None:
    queue = store.queue("q", max_attempts=1)
    with store.events() as events:
        await kill(queue, 1)
        await queue.enqueue(2)
        await (await claim(queue)).retry()
        await queue.cancel_job(await queue.enqueue(3))
        await queue.enqueue(4, expires=1)
        await trio.sleep(1)
        await queue.sweep_expired()
        await queue.enqueue(5)
        await claim(queue, lease=1)
        await trio.sleep(1)
        await queue.claim("w")
        reasons = [event.details["reason"] for event in seen(events, "dead")]
    assert reasons == ["failed", "attempts exhausted", "cancelled", "expired", "lease expired"]


# -------------------------------------------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("state", ["delayed", "ready", "leased"])
async def test_a_live_job_can_be_cancelled_and_is_kept(store: Store, state: str) -> None:
    id = (await one_of_each(store))[state]
    assert await store.queue("q").cancel_job(id)
    found = await job(store.queue("q"), id)
    assert (found.state, found.reason, found.worker, found.lease_until) == ("dead", "cancelled", None, None)


async def test_a_handler_is_cancelled_at_once_also_through_another_store_of_this_process(
    open_shared_store: OpenStore,
) -> None:
    cancelled_at: list[float] = []

    async def handler(_: object) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled_at.append(trio.current_time())

    async with open_shared_store() as one, open_shared_store() as two:
        id = await one.queue("q").enqueue(1)
        async with running(one.queue("q").work, handler):
            await trio.sleep(5)
            asked_at = trio.current_time()
            assert await two.cancel_job(id)
            await trio.sleep(50)
            assert cancelled_at == [pytest.approx(asked_at, abs=0.5)]


async def test_only_a_live_job_of_this_queue_can_be_cancelled(store: Store) -> None:
    ids = await one_of_each(store)
    assert not await store.queue("q").cancel_job(ids["dead"])
    assert not await store.queue("other").cancel_job(ids["ready"])
    assert not await store.queue("q").cancel_job(999_999)
    assert await store.queue("q").cancel_job(ids["ready"])
    assert not await store.queue("q").cancel_job(ids["ready"])


async def test_a_cancelled_job_is_never_claimed(store: Store) -> None:
    queue = store.queue("q")
    await queue.cancel_job(await queue.enqueue(1))
    await queue.cancel_job(await queue.enqueue(2, delay=5))
    await trio.sleep(10)
    assert await queue.claim("w", 10) == []


async def test_a_running_handler_is_cancelled_at_once_in_this_process(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1)
    ended: list[float] = []

    async def handler(handle: JobHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())
            assert handle.cancelled

    async with running(queue.work, handler):
        await trio.sleep(5)
        cancelled_at = trio.current_time()
        assert await queue.cancel_job(id)
        await calm()
        assert ended == [cancelled_at]
    assert (await job(queue, id)).reason == "cancelled"


async def test_a_running_handler_of_another_process_is_cancelled_at_its_next_heartbeat(
    open_shared_store: OpenStore,
) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        b._context.hands = Hands()  # as in another process, it does not know of those here
        queue = a.queue("q", visibility=30)
        id = await queue.enqueue(1)
        ended: list[float] = []

        async def handler(_: object) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())

        async with running(queue.work, handler):
            await trio.sleep(5)
            cancelled_at = trio.current_time()
            assert await b.queue("q").cancel_job(id)
            await trio.sleep(20)
        assert 0 < ended[0] - cancelled_at <= 10
        assert (await job(queue, id)).reason == "cancelled"


async def test_a_worker_goes_on_after_a_job_was_cancelled(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue("stuck")
    done: list[object] = []

    async def handler(handle: JobHandle) -> None:
        if handle.payload == "stuck":
            await trio.sleep_forever()
        done.append(handle.payload)

    async with running(queue.work, handler):
        await calm()
        await queue.enqueue("next")
        await queue.cancel_job(id)
        await calm()
    assert done == ["next"]


async def test_a_job_that_was_cancelled_before_it_ran_does_not_run(store: Store) -> None:
    queue = store.queue("q")
    await queue.cancel_job(await queue.enqueue(1))
    done: list[object] = []

    async def handler(handle: JobHandle) -> None:
        done.append(handle.payload)

    async with running(queue.work, handler):
        await calm()
    assert done == []


async def test_the_age_of_the_oldest_claimable_job_shows_in_health(store: Store) -> None:
    await store.queue("q").enqueue(1)
    await store.queue("q").enqueue(2, delay=1_000)
    await trio.sleep(60)
    await store.queue("q").enqueue(3, priority=100)
    assert (await store.health()).oldest_claimable == {"q": 60}


async def test_what_cannot_be_claimed_any_more_is_not_the_oldest_claimable(store: Store) -> None:
    await store.queue("q").enqueue(1, expires=10)
    await trio.sleep(60)
    await store.queue("q").enqueue(2)
    await trio.sleep(5)
    assert (await store.health()).oldest_claimable == {"q": 5}


async def test_a_lease_that_ran_out_is_claimable_in_health(store: Store) -> None:
    await store.queue("q").enqueue(1)
    await claim(store.queue("q"), lease=10)
    await trio.sleep(30)
    assert (await store.health()).oldest_claimable == {"q": 20}
    assert after(store, 0) == (await store.health()).at


async def test_the_counts_of_every_queue_show_in_health(store: Store) -> None:
    await one_of_each(store)
    await store.queue("other").enqueue(1)
    assert (await store.health()).queues == {"q": Counts(1, 1, 1, 1), "other": Counts(0, 1, 0, 0)}
