"""A transaction: the embedder's statements and the store's calls happen together, or not at all."""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import trio

from alkstore import ScheduleOpts, StopToken, Store
from tests.conformance.helpers import OpenStore, after, calm, claim, job, no_group, now
from tests.conformance.transacting import (
    EVERYTHING,
    NOTHING,
    ONE_OF_EACH,
    ORDER,
    faces,
    make_orders,
    stored,
    together,
    totals,
)

pytestmark = faces


class Boom(Exception):
    pass


def boom() -> None:
    raise Boom


async def test_all_of_it_is_committed_together(store: Store, face: str) -> None:
    await make_orders(store)
    await together(store, face, *EVERYTHING)
    assert await stored(store) == ONE_OF_EACH


async def test_nothing_of_it_is_there_after_an_exception(store: Store, face: str) -> None:
    await make_orders(store)
    with pytest.raises(Boom):
        await together(store, face, *EVERYTHING, then=boom)
    assert await stored(store) == NOTHING


async def test_an_unschedule_is_undone_by_an_exception(store: Store, face: str) -> None:
    await store.schedule("s", "@every 1h", "q")
    with pytest.raises(Boom):
        await together(store, face, methodcaller("unschedule", "s"), then=boom)
    assert (await store.health()).schedules.total == 1
    assert await together(store, face, methodcaller("unschedule", "s"), methodcaller("unschedule", "s")) == [
        True,
        False,
    ]
    assert (await store.health()).schedules.total == 0


async def test_execute_returns_all_rows_as_tuples(store: Store, face: str) -> None:
    insert = "INSERT INTO orders (total) VALUES (1), (2) RETURNING total"
    select = "SELECT total, 'x' FROM orders ORDER BY total"
    await make_orders(store)
    got = await together(store, face, methodcaller("execute", insert), methodcaller("execute", select), ORDER)
    assert got == [[(1,), (2,)], [(1, "x"), (2, "x")], []]
    assert await totals(store) == [1, 2, 42]


async def test_the_ids_are_those_under_which_the_jobs_are_found(store: Store, face: str) -> None:
    first, second = await together(
        store, face, methodcaller("enqueue", "q", "one"), methodcaller("outbox_enqueue", "o", "two")
    )
    assert [found.payload for id in (first, second) if (found := await store.get_job(id))] == ["one", "two"]


async def test_get_job_sees_what_the_transaction_has_done(store: Store, face: str) -> None:
    id, seen, unknown = await together(
        store, face, methodcaller("enqueue", "q", 7), methodcaller("get_job", 1), methodcaller("get_job", 99)
    )
    assert (seen.id, seen.payload, seen.state, unknown) == (id, 7, "ready", None)


async def test_an_enqueue_takes_the_options_of_a_queue(store: Store, face: str) -> None:
    options: dict[str, Any] = {
        "visibility": 10,
        "max_attempts": 7,
        "backoff": 2,
        "priority": 5,
        "delay": 3,
        "expires": 60,
        "key": "k",
        "headers": {"trace": "t"},
    }
    (id,) = await together(store, face, methodcaller("enqueue", "q", None, **options))
    found = await job(store.queue("q"), id)
    assert (found.visibility, found.max_attempts, found.backoff, found.priority) == (10, 7, 2, 5)
    assert (found.run_at, found.expires_at) == (after(store, 3), after(store, 63))
    assert (found.key, found.headers) == ("k", {"trace": "t"})


async def test_an_enqueue_has_the_defaults_of_a_queue(store: Store, face: str) -> None:
    (id,) = await together(store, face, methodcaller("enqueue", "q", None))
    found = await job(store.queue("q"), id)
    assert (found.visibility, found.max_attempts, found.backoff, found.expires_at) == (300, 3, 5, None)


async def test_an_enqueue_takes_a_moment(store: Store, face: str) -> None:
    due = after(store, 77)
    (id,) = await together(store, face, methodcaller("enqueue", "q", None, run_at=due))
    assert (await job(store.queue("q"), id)).run_at == due


async def test_a_schedule_is_returned_as_it_is_stored(store: Store, face: str) -> None:
    (schedule,) = await together(
        store, face, methodcaller("schedule", "s", "@every 60s", "q", [1], ScheduleOpts(priority=3))
    )
    assert (schedule.name, schedule.queue, schedule.payload, schedule.opts.priority) == ("s", "q", [1], 3)
    assert schedule.next_fire_at == after(store, 60)


async def test_a_key_gives_one_job_inside_and_outside(store: Store, face: str) -> None:
    outside = await store.queue("q").enqueue(1, key="k")
    one, other = await together(
        store, face, methodcaller("enqueue", "q", 2, key="k"), methodcaller("enqueue", "q", 3, key="new")
    )
    assert (one, await store.queue("q").enqueue(4, key="new")) == (outside, other)


async def test_an_id_that_was_rolled_back_may_come_again_but_never_beside_another(store: Store, face: str) -> None:
    with pytest.raises(Boom):
        await together(store, face, methodcaller("enqueue", "q", 1), then=boom)
    await together(store, face, methodcaller("enqueue", "q", 2))
    assert [found.payload for found in await store.queue("q").list()] == [2]


async def test_other_writes_wait_for_the_end_and_then_go_on(store: Store, face: str) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(partial(together, store, face, methodcaller("enqueue", "q", 1)))
            nursery.start_soon(store.queue("q").enqueue, 2)
            nursery.start_soon(store.lock("l").acquire, 1)
    assert (await store.queue("q").counts()).ready == 6


# ------------------------------------------------------------------------------------------------------ waking


async def test_a_waiting_claim_is_woken_by_the_commit_at_once(store: Store, face: str) -> None:
    got: list[object] = []

    async def wait() -> None:
        got.append((await claim(store.queue("q"), wait=1000)).payload)
        assert now(store) == moment

    with no_group():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(100)
            moment = now(store)
            await together(store, face, methodcaller("enqueue", "q", "job"))
    assert got == ["job"]


async def test_a_waiting_claim_of_another_store_is_woken_by_the_commit_at_once(
    open_shared_store: OpenStore, face: str
) -> None:
    async with open_shared_store() as store, open_shared_store() as other, trio.open_nursery() as nursery:
        got: list[object] = []

        async def wait() -> None:
            got.append((await claim(other.queue("q"), wait=1000)).payload)
            assert now(store) == moment

        nursery.start_soon(wait)
        await trio.sleep(100)
        moment = now(store)
        await together(store, face, methodcaller("enqueue", "q", "job"))
        await trio.sleep(1)
        assert got == ["job"]


async def test_a_rollback_wakes_nobody(store: Store, face: str) -> None:
    async def wait() -> None:
        assert await store.queue("q").claim("w", wait=50) == []
        assert trio.current_time() - began >= 50

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(10)
        with pytest.raises(Boom):
            await together(store, face, methodcaller("enqueue", "q", 1), then=boom)
        await calm()


async def test_a_schedule_registered_in_it_fires_in_time(store: Store, face: str) -> None:
    async with trio.open_nursery() as nursery:
        stop = StopToken()
        nursery.start_soon(store.run_schedules, stop)
        await trio.sleep(100)
        await together(store, face, methodcaller("schedule", "s", "@every 2s", "q"))
        due = after(store, 2)
        await claim(store.queue("q"), wait=1000)
        assert now(store) == due
        stop.stop()
