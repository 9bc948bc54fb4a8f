"""Enqueueing: what a job carries, keys, ids, moments and expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
import trio
import trio.testing

from alkstore import Store
from tests.conformance.helpers import OpenStore, after, claim, job, kill, now


async def test_a_job_carries_what_its_handle_stamps(store: Store) -> None:
    queue = store.queue("q", visibility=10, max_attempts=7, backoff=2, expires=60)
    found = await job(queue, await queue.enqueue(1))
    assert (found.visibility, found.max_attempts, found.backoff) == (10, 7, 2)
    assert found.expires_at == after(store, 60)


async def test_a_handle_stamps_300_3_5_none_by_itself(store: Store) -> None:
    found = await job(store.queue("q"), await store.queue("q").enqueue(1))
    assert (found.visibility, found.max_attempts, found.backoff, found.expires_at) == (300, 3, 5, None)


async def test_a_job_carries_its_own_values_whatever_other_handles_stamp(store: Store) -> None:
    strict, lenient = store.queue("q", max_attempts=1), store.queue("q", max_attempts=9, visibility=1)
    id = await strict.enqueue(1)
    handle = await claim(lenient)
    assert (handle.id, handle.max_attempts, handle.lease_remaining) == (id, 1, 300)


async def test_an_enqueue_may_differ_from_the_stamp(store: Store) -> None:
    queue = store.queue("q", max_attempts=7, expires=60)
    found = await job(queue, await queue.enqueue(1, max_attempts=2, expires=5, priority=-3))
    assert (found.max_attempts, found.expires_at, found.priority) == (2, after(store, 5), -3)


async def test_a_job_shows_when_it_was_created_and_in_which_queue(store: Store) -> None:
    found = await job(store.queue("q"), await store.queue("q").enqueue(1))
    assert (found.created_at, found.queue, found.attempt, found.fence) == (now(store), "q", 0, 0)
    assert (found.worker, found.lease_until, found.error, found.reason, found.died_at) == (None,) * 5


async def test_a_queue_is_a_name_and_needs_no_creating(store: Store) -> None:
    assert await store.queue("never seen").claim("w") == []
    assert (await store.queue("never seen").counts()).ready == 0


async def test_a_job_is_found_only_through_its_queue_or_the_store(store: Store) -> None:
    id = await store.queue("q").enqueue(1)
    assert await store.queue("other").get_job(id) is None
    found = await store.get_job(id)
    assert found is not None
    assert found.queue == "q"


# ------------------------------------------------------------------------------------------------- delay, run_at


async def test_a_delayed_job_is_not_claimed_before_its_moment(store: Store) -> None:
    await store.queue("q").enqueue(1, delay=10)
    await trio.sleep(9.999)
    assert await store.queue("q").claim("w") == []
    await trio.sleep(0.001)
    assert len(await store.queue("q").claim("w")) == 1


@pytest.mark.parametrize("delay", [10, 10.0, timedelta(seconds=10)])
async def test_a_delay_is_seconds_or_a_timedelta(store: Store, delay: float) -> None:
    id = await store.queue("q").enqueue(1, delay=delay)
    assert (await job(store.queue("q"), id)).run_at == after(store, 10)


async def test_a_job_may_be_meant_for_a_moment(store: Store) -> None:
    moment = after(store, 60)
    id = await store.queue("q").enqueue(1, run_at=moment.astimezone(timezone(timedelta(hours=-7))))
    found = await job(store.queue("q"), id)
    assert (found.run_at, found.state) == (moment, "delayed")


async def test_a_moment_in_the_past_is_kept_and_due(store: Store) -> None:
    moment = after(store, -60)
    await store.queue("q").enqueue(1, run_at=moment)
    assert (await claim(store.queue("q"))).job.run_at == moment


async def test_delay_and_run_at_exclude_each_other(one_store: Store) -> None:
    with pytest.raises(ValueError, match="either delay or run_at"):
        await one_store.queue("q").enqueue(1, delay=1, run_at=now(one_store))


@pytest.mark.parametrize("moment", [datetime(2030, 1, 1), datetime(1969, 12, 31, tzinfo=UTC)])
async def test_a_moment_that_is_naive_or_before_1970_is_refused(one_store: Store, moment: datetime) -> None:
    with pytest.raises(ValueError, match="run_at"):
        await one_store.queue("q").enqueue(1, run_at=moment)


async def test_the_last_moment_of_all_can_be_asked_for(store: Store) -> None:
    id = await store.queue("q").enqueue(1, run_at=datetime.max.replace(tzinfo=UTC), expires=86_400)
    assert (await job(store.queue("q"), id)).run_at.year == 9999


# ------------------------------------------------------------------------------------------------------- expiry


@pytest.mark.parametrize(
    ("options", "expires_after"),
    [({}, 60), ({"delay": 100}, 160), ({"run_at": -1000}, 60), ({"run_at": 1000}, 1060)],
)
async def test_expiry_counts_from_now_or_from_run_at_whichever_is_later(
    store: Store, options: dict[str, float], expires_after: int
) -> None:
    given = {name: after(store, value) if name == "run_at" else value for name, value in options.items()}
    id = await store.queue("q").enqueue(1, expires=60, **given)  # type: ignore[arg-type]
    assert (await job(store.queue("q"), id)).expires_at == after(store, expires_after)


async def test_a_job_that_expires_at_once_is_never_claimed(store: Store) -> None:
    id = await store.queue("q").enqueue(1, expires=0)
    assert await store.queue("q").claim("w") == []
    assert (await job(store.queue("q"), id)).reason == "expired"


# --------------------------------------------------------------------------------------------------------- keys


async def test_a_live_key_returns_the_id_that_is_there(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue("first", key="k")
    assert await queue.enqueue("second", key="k") == id
    assert (await job(queue, id)).payload == "first"
    assert (await queue.counts()).ready == 1


async def test_a_key_is_taken_while_its_job_is_delayed_or_leased(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, key="k", delay=10)
    assert await queue.enqueue(2, key="k") == id
    await trio.sleep(10)
    await claim(queue)
    assert await queue.enqueue(2, key="k") == id


async def test_a_key_is_free_after_the_ack(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, key="k")
    await (await claim(queue)).ack()
    assert await queue.enqueue(2, key="k") > id


async def test_a_dead_letter_does_not_hold_its_key(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, key="k")
    await (await claim(queue)).fail()
    assert await queue.enqueue(2, key="k") > id


async def test_an_expired_job_does_not_hold_its_key(store: Store) -> None:
    queue = store.queue("q")
    id = await queue.enqueue(1, key="k", expires=10)
    await trio.sleep(10)
    assert await queue.enqueue(2, key="k") > id


async def test_a_job_whose_last_lease_ran_out_does_not_hold_its_key(store: Store) -> None:
    queue = store.queue("q", max_attempts=1)
    id = await queue.enqueue(1, key="k")
    await claim(queue, lease=10)
    await trio.sleep(10)
    assert await queue.enqueue(2, key="k") > id


async def test_the_same_key_is_free_in_another_queue(store: Store) -> None:
    assert await store.queue("a").enqueue(1, key="k") != await store.queue("b").enqueue(1, key="k")


async def test_of_many_enqueues_of_one_key_at_once_one_wins(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        ids: set[int] = set()

        async def enqueue(store: Store) -> None:
            ids.add(await store.queue("q").enqueue(1, key="k"))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(enqueue, a)
                nursery.start_soon(enqueue, b)
        assert len(ids) == 1
        assert (await a.queue("q").counts()).ready == 1


# ---------------------------------------------------------------------------------------------------------- ids


async def test_ids_only_grow_and_are_never_used_again(store: Store) -> None:
    """Q16: the newest row is deleted between enqueues."""
    queue, ids = store.queue("q"), []
    for n in range(20):
        ids.append(await queue.enqueue(n))
        await (await claim(queue)).ack()
    ids += await kill(queue, "dead")
    await queue.prune(0)
    ids.append(await queue.enqueue("last"))
    assert ids == sorted(set(ids))


async def test_ids_grow_over_a_close(open_shared_store: OpenStore) -> None:
    ids = []
    for _ in range(3):
        async with open_shared_store() as store:
            ids.append(await store.queue("q").enqueue(1))
            await (await claim(store.queue("q"))).ack()
    assert ids == sorted(set(ids))


async def test_ids_grow_over_all_queues(store: Store) -> None:
    ids = [await store.queue(f"q{n % 3}").enqueue(n) for n in range(9)]
    assert ids == sorted(set(ids))


# ------------------------------------------------------------------------------------------------- enqueue_many


async def test_many_are_enqueued_in_order_with_the_options_of_all(store: Store) -> None:
    queue = store.queue("q")
    ids = await queue.enqueue_many([3, 1, 2], priority=4, max_attempts=2, expires=60)
    handles = await queue.claim("w", 10)
    assert [handle.id for handle in handles] == ids == sorted(ids)
    assert [handle.payload for handle in handles] == [3, 1, 2]
    assert {(h.job.priority, h.max_attempts, h.job.expires_at) for h in handles} == {(4, 2, after(store, 60))}


async def test_nothing_at_all_may_be_enqueued(store: Store) -> None:
    assert await store.queue("q").enqueue_many([]) == []


async def test_any_iterable_of_payloads_will_do(store: Store) -> None:
    assert len(await store.queue("q").enqueue_many({"n": n} for n in range(5))) == 5


async def test_many_are_enqueued_all_or_none(store: Store) -> None:
    with pytest.raises(ValueError, match=r"payload"):
        await store.queue("q").enqueue_many([*range(100), object()])
    assert (await store.queue("q").counts()).ready == 0


async def test_up_to_a_hundred_thousand_may_be_enqueued_at_once(one_store: Store) -> None:
    with pytest.raises(ValueError, match="100,000"):
        await one_store.queue("q").enqueue_many(None for _ in range(100_001))
    assert (await one_store.queue("q").counts()).ready == 0


@pytest.mark.parametrize("character", ["x", "é", "日", "\U0001f40c"])
async def test_up_to_64_mebibytes_may_be_enqueued_at_once(one_store: Store, character: str) -> None:
    """Bytes, not characters."""
    payload = character * -(-8 * 1024 * 1024 // len(character.encode()))
    with pytest.raises(ValueError, match="bytes"):
        await one_store.queue("q").enqueue_many([payload] * 8)
    assert (await one_store.queue("q").counts()).ready == 0


@pytest.fixture
async def waiting(store: Store) -> AsyncIterator[list[object]]:
    """The payloads that somebody who waits on the queue is given."""
    got: list[object] = []

    async def wait() -> None:
        while handles := await store.queue("q").claim("w", 10, wait=60):
            got.extend(handle.payload for handle in handles)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        yield got
        nursery.cancel_scope.cancel()


async def test_an_enqueue_wakes_who_waits(store: Store, waiting: list[object]) -> None:
    await store.queue("q").enqueue(1)
    await trio.sleep(0.001)
    assert waiting == [1]


async def test_many_wake_who_waits(store: Store, waiting: list[object]) -> None:
    await store.queue("q").enqueue_many([1, 2])
    await trio.sleep(0.001)
    assert waiting == [1, 2]
