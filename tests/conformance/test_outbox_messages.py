"""The outbox: what a message is, and how `run_once` delivers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from alkstore import (
    Discard,
    InvalidName,
    InvalidPayload,
    Job,
    JobHandle,
    ManualClock,
    Outbox,
    ReservedName,
    Snooze,
    Store,
)
from tests.conformance.helpers import OpenStore, after, claim, fails, now, refused, seen, sql


async def nothing(_: JobHandle) -> None:
    pass


async def fail(_: JobHandle) -> None:
    raise ValueError("the receiver is away")


async def message(outbox: Outbox, id: int) -> Job:
    found = await outbox.get_message(id)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------ messages


async def test_a_message_has_the_derived_set_60_5_5(store: Store) -> None:
    id = await store.outbox("o").enqueue({"n": 1})
    job = await store.get_job(id)
    assert job is not None
    assert (job.visibility, job.max_attempts, job.backoff, job.expires_at) == (60, 5, 5, None)
    assert (job.queue, job.payload, job.state, job.attempt) == ("__alkstore_outbox:o", {"n": 1}, "ready", 0)


async def test_a_message_takes_headers_delay_and_priority(store: Store) -> None:
    id = await store.outbox("o").enqueue(1, headers={"trace": "t"}, delay=7, priority=-3)
    job = await message(store.outbox("o"), id)
    assert (job.headers, job.run_at, job.priority) == ({"trace": "t"}, after(store, 7), -3)


async def test_a_message_without_a_key_gets_one_of_its_own(store: Store) -> None:
    outbox = store.outbox("o")
    keys = {(await message(outbox, await outbox.enqueue(1))).key for _ in range(10)}
    assert len(keys) == 10
    assert None not in keys


async def test_the_receiver_sees_the_same_key_at_every_attempt(store: Store) -> None:
    outbox = store.outbox("o")
    mine, made = await outbox.enqueue("mine", key="order-1"), await outbox.enqueue("made")
    keys: dict[str, set[str | None]] = {"mine": set(), "made": set()}

    async def delivery(handle: JobHandle) -> None:
        keys[handle.payload].add(handle.key)
        raise ValueError

    for _ in range(10):
        assert await outbox.run_once("w", delivery)
        await trio.sleep(50)
    assert keys["mine"] == {"order-1"}
    assert len(keys["made"]) == 1
    assert not await outbox.run_once("w", delivery)
    assert [job.id for job in await outbox.dead()] == [mine, made]


async def test_a_key_of_a_message_that_is_not_delivered_gives_its_id(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue("first", key="k")
    assert await outbox.enqueue("second", key="k") == id
    assert await store.outbox("other").enqueue("first", key="k") != id
    await outbox.run_once("w", nothing)
    assert await outbox.enqueue("third", key="k") != id


async def test_an_outbox_and_a_queue_of_the_same_name_do_not_meet(store: Store) -> None:
    await store.outbox("o").enqueue("message")
    await store.queue("o").enqueue("job")
    assert (await claim(store.queue("o"))).payload == "job"
    assert not await store.queue("o").claim("w")
    assert (await store.outbox("o").counts()).ready == 1


async def test_a_message_is_none_once_it_is_delivered(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)
    await outbox.run_once("w", nothing)
    assert await outbox.get_message(id) is None


async def test_get_message_does_not_find_the_jobs_of_others(store: Store) -> None:
    id = await store.queue("q").enqueue(1)
    assert await store.outbox("o").get_message(id) is None


NAMES = {
    "__alkstore_x": ReservedName,
    "__ALKSTORE_x": ReservedName,
    "__alkstore_outbox:o": ReservedName,
    "＿＿ａｌｋｓｔｏｒｅ＿x": ReservedName,
    "": InvalidName,
    " \t": InvalidName,
    "a\0b": InvalidName,
    "\ud800": InvalidName,
    "x" * 10_000: InvalidName,
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=[f"{name[:20]!a}" for name in NAMES])
async def test_a_name_that_may_not_be_is_refused_before_any_round_trip(
    store: Store, name: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="outbox"):
        store.outbox(name)


ENTRIES: dict[str, Callable[[Store], Any]] = {
    "queue": lambda store: store.queue("__alkstore_outbox:o"),
    "schedule": lambda store: store.schedule("s", "@every 1s", "__alkstore_outbox:o"),
    "lock": lambda store: store.lock("__alkstore_scheduler"),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
async def test_the_queue_behind_an_outbox_cannot_be_reached_by_its_name(
    store: Store, entry: Callable[[Store], Any]
) -> None:
    async def call() -> None:
        await entry(store)

    await refused(ReservedName, call)


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "payload": ({"payload": {1}}, InvalidPayload),
    "headers": ({"payload": 1, "headers": {"a": 1}}, InvalidPayload),
    "key": ({"payload": 1, "key": " "}, InvalidName),
    "delay": ({"payload": 1, "delay": -1}, ValueError),
    "priority": ({"payload": 1, "priority": 1000}, ValueError),
}


@pytest.mark.parametrize(("options", "kind"), WRONG.values(), ids=WRONG)
async def test_a_wrong_argument_is_refused_before_any_round_trip(
    store: Store, options: dict[str, Any], kind: type[Exception]
) -> None:
    await refused(kind, lambda: store.outbox("o").enqueue(**options))


# ------------------------------------------------------------------------------------------------------ run_once


async def test_run_once_with_nothing_to_do_is_false(store: Store) -> None:
    assert await store.outbox("o").run_once("w", fail) is False


async def test_run_once_does_not_wait_for_a_delayed_message(store: Store) -> None:
    outbox = store.outbox("o")
    await outbox.enqueue(1, delay=10)
    assert await outbox.run_once("w", fail) is False
    await trio.sleep(10)
    assert await outbox.run_once("w", nothing) is True


async def test_run_once_delivers_one_message_and_acknowledges_it(store: Store) -> None:
    outbox = store.outbox("o")
    for n in range(2):
        await outbox.enqueue(n)
    delivered = []

    async def delivery(handle: JobHandle) -> None:
        delivered.append(handle.payload)

    assert await outbox.run_once("w", delivery) is True
    assert (delivered, (await outbox.counts()).ready) == ([0], 1)


async def test_an_exception_is_retried_with_its_error_and_the_backoff(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)
    for attempt, wait in enumerate((5, 10, 20, 40), 1):
        assert await outbox.run_once("w", fail) is True
        job = await message(outbox, id)
        assert (job.attempt, job.state, job.run_at) == (attempt, "delayed", after(store, wait))
        assert "the receiver is away" in str(job.error)
        await trio.sleep(wait)
    assert await outbox.run_once("w", fail) is True
    job = await message(outbox, id)
    assert (job.state, job.reason, job.attempt) == ("dead", "attempts exhausted", 5)
    assert "the receiver is away" in str(job.error)
    assert await outbox.run_once("w", fail) is False


async def test_discard_and_snooze_mean_what_they_mean_in_a_queue(store: Store) -> None:
    outbox = store.outbox("o")

    async def delivery(handle: JobHandle) -> None:
        raise Discard if handle.payload == "discard" else Snooze(100)

    discarded, snoozed = await outbox.enqueue("discard"), await outbox.enqueue("snooze")
    while await outbox.run_once("w", delivery):
        pass
    assert (await message(outbox, discarded)).reason == "discarded"
    later = await message(outbox, snoozed)
    assert (later.attempt, later.run_at) == (0, after(store, 100))


async def test_every_leaf_of_a_group_is_named_in_the_error(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def delivery(_: JobHandle) -> None:
        raise ExceptionGroup("many", [ValueError("one"), KeyError("two")])

    await outbox.run_once("w", delivery)
    error = str((await message(outbox, id)).error)
    assert "one" in error
    assert "two" in error


async def test_run_once_takes_no_plain_function_and_claims_nothing(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)
    error = await refused(TypeError, lambda: outbox.run_once("w", print))  # type: ignore[arg-type]
    assert "delivery must be an async function" in str(error)
    assert (await message(outbox, id)).attempt == 0


async def test_a_delivery_that_settles_its_message_has_settled_it(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def delivery(handle: JobHandle) -> None:
        assert await handle.retry("later", 1000)

    assert await outbox.run_once("w", delivery)
    assert (await message(outbox, id)).run_at == after(store, 1000)


async def test_a_delivery_may_enqueue_another_message(store: Store) -> None:
    outbox = store.outbox("o")
    await outbox.enqueue(1)

    async def delivery(_: JobHandle) -> None:
        await store.outbox("next").enqueue(2)

    assert await outbox.run_once("w", delivery)
    assert (await store.outbox("next").counts()).ready == 1


async def test_run_once_is_not_bounded_by_the_lease(store: Store) -> None:
    outbox = store.outbox("o")
    await outbox.enqueue(1)
    ended = []

    async def delivery(handle: JobHandle) -> None:
        await trio.sleep(100)
        ended.append(handle.lease_remaining)

    assert await outbox.run_once("w", delivery) is True
    assert ended == [0]


async def test_run_once_is_true_although_the_lease_was_lost(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)
    with store.events() as events:

        async def delivery(_: JobHandle) -> None:
            await trio.sleep(61)
            assert await outbox.run_once("rival", fail)

        assert await outbox.run_once("w", delivery) is True
        assert [event.details["id"] for event in seen(events, "lost")] == [id]
    job = await message(outbox, id)
    assert (job.state, job.attempt, job.fence) == ("delayed", 2, 2)
    assert "the receiver is away" in str(job.error)


async def test_a_heartbeat_of_the_delivery_keeps_the_lease(store: Store) -> None:
    outbox = store.outbox("o")
    await outbox.enqueue(1)

    async def delivery(handle: JobHandle) -> None:
        for _ in range(5):
            await trio.sleep(50)
            assert not await outbox.run_once("rival", fail)
            assert await handle.heartbeat()

    assert await outbox.run_once("w", delivery)
    assert await outbox.run_once("w", delivery) is False


async def test_a_cancelled_run_once_gives_the_message_back_with_its_attempt(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def hang(_: JobHandle) -> None:
        await trio.sleep_forever()

    with trio.move_on_after(1):
        await outbox.run_once("w", hang)
    job = await message(outbox, id)
    assert (job.state, job.attempt, job.error) == ("ready", 0, "interrupted by cancellation")
    assert await outbox.run_once("w", nothing)


async def test_an_error_beside_a_cancellation_counts_as_the_deliverys(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def delivery(_: JobHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while cancelled")

    with trio.move_on_after(1):
        await outbox.run_once("w", delivery)
    job = await message(outbox, id)
    assert (job.attempt, "while cancelled" in str(job.error)) == (1, True)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_leaves_and_gives_the_message_back(store: Store, kind: type[BaseException]) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def delivery(_: JobHandle) -> None:
        raise kind

    await fails(kind, outbox.run_once, "w", delivery)
    assert (await message(outbox, id)).state == "ready"


async def test_a_delivery_whose_own_timeout_strikes_and_that_returns_has_succeeded(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue(1)

    async def delivery(_: JobHandle) -> None:
        with trio.move_on_after(1):
            await trio.sleep_forever()

    assert await outbox.run_once("w", delivery)
    assert await outbox.get_message(id) is None


# ------------------------------------------------------------------------------------- poison, and rows that are gone


async def test_poison_does_not_hold_up_what_comes_behind_it(store: Store) -> None:
    outbox = store.outbox("o")
    for _ in range(100):
        await outbox.enqueue("poison")
    await outbox.enqueue("good")
    delivered = []

    async def delivery(handle: JobHandle) -> None:
        if handle.payload == "poison":
            raise ValueError("poison")
        delivered.append(handle.payload)

    runs = 0
    while not delivered:
        assert await outbox.run_once("w", delivery)
        runs += 1
    assert runs == 101
    for _ in range(4):
        await trio.sleep(40)
        while await outbox.run_once("w", delivery):
            runs += 1
    assert runs == 501
    dead = await outbox.dead(limit=1000)
    assert len(dead) == 100
    assert all((job.attempt, job.reason) == (5, "attempts exhausted") for job in dead)


async def test_a_message_that_is_gone_does_not_touch_the_others(store: Store) -> None:
    outbox = store.outbox("o")
    ids = [await outbox.enqueue(n) for n in range(10)]
    delivered = []

    async def delivery(handle: JobHandle) -> None:
        delivered.append(handle.payload)
        if handle.payload == 5:
            await sql(store, "DELETE FROM __alkstore_jobs WHERE id = :id", id=handle.id)

    while await outbox.run_once("w", delivery):
        pass
    assert delivered == list(range(10))
    assert [await outbox.get_message(id) for id in ids] == [None] * 10


async def test_a_clock_that_goes_on_makes_retries_due(stepped: Store, clock: ManualClock) -> None:
    outbox = stepped.outbox("o")
    await outbox.enqueue(1)
    await outbox.run_once("w", fail)
    assert not await outbox.run_once("w", nothing)
    clock.advance(5)
    assert await outbox.run_once("w", nothing)


# ------------------------------------------------------------------------------------------------------ dead letters


async def test_a_dead_message_can_be_redriven_with_its_key(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue("again", key="k")
    await (await _taken(store, outbox)).fail("no")
    (dead,) = await outbox.dead()
    assert (dead.id, dead.key, dead.reason) == (id, "k", "failed")
    assert await outbox.redrive(id)
    job = await message(outbox, id)
    assert (job.state, job.key, job.attempt) == ("ready", "k", 0)
    assert await outbox.run_once("w", nothing)
    assert not await outbox.redrive(id)


async def test_a_dead_message_whose_key_is_taken_is_not_redriven(store: Store) -> None:
    outbox = store.outbox("o")
    id = await outbox.enqueue("old", key="k")
    await (await _taken(store, outbox)).fail("no")
    await outbox.enqueue("new", key="k")
    assert not await outbox.redrive(id)
    assert await outbox.redrive_all() == 0


async def test_all_dead_messages_can_be_listed_in_pages_redriven_and_pruned(store: Store) -> None:
    outbox = store.outbox("o")
    ids = []
    for n in range(5):
        ids.append(await outbox.enqueue(n))
        await (await _taken(store, outbox)).fail("no")
    page = await outbox.dead(limit=3)
    assert [job.id for job in page] == ids[:3]
    assert [job.id for job in await outbox.dead(after=page[-1].id)] == ids[3:]
    assert await outbox.redrive_all() == 5
    assert (await outbox.counts()).ready == 5
    for _ in range(5):
        await (await _taken(store, outbox)).fail("no")
    await trio.sleep(100)
    assert await outbox.prune(101) == 0
    assert await outbox.prune(100) == 5
    assert await outbox.dead() == []


async def test_the_dead_letters_of_an_outbox_are_its_own(store: Store) -> None:
    one, other = store.outbox("one"), store.outbox("other")
    id = await one.enqueue(1)
    await (await _taken(store, one)).fail("no")
    assert await other.dead() == []
    assert not await other.redrive(id)
    assert await other.redrive_all() == 0
    assert await other.prune(0) == 0
    assert [job.id for job in await one.dead()] == [id]


async def _taken(store: Store, outbox: Outbox) -> JobHandle:
    """A message in the middle of its delivery."""
    handles: list[JobHandle] = []

    async def keep(handle: JobHandle) -> None:
        handles.append(handle)
        raise Snooze(0)

    await outbox.run_once("w", keep)
    return await claim(outbox._queue)


# ------------------------------------------------------------------------------------------------------ two relays


async def test_two_relays_deliver_each_message_once(open_shared_store: OpenStore) -> None:
    delivered: list[int] = []

    async def delivery(handle: JobHandle) -> None:
        await trio.sleep(0.001)
        delivered.append(handle.payload)

    async def relay(outbox: Outbox, name: str) -> None:
        while await outbox.run_once(name, delivery):
            pass

    async with open_shared_store() as one, open_shared_store() as other:
        await one.transact(lambda tx: [tx.outbox_enqueue("o", n) for n in range(200)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay, one.outbox("o"), "one")
            nursery.start_soon(relay, other.outbox("o"), "other")
        assert sorted(delivered) == list(range(200))
        assert (await one.outbox("o").counts()).dead == 0


async def test_after_a_lease_that_ended_the_rivals_delivery_counts(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as slow, open_shared_store() as rival, trio.open_nursery() as nursery:
        id = await slow.outbox("o").enqueue(1)
        held = trio.Event()
        fences = []

        async def too_long(handle: JobHandle) -> None:
            held.set()
            await trio.sleep(70)
            fences.append(handle.fence)
            raise ValueError("the slow relay's own error")

        async def in_time(handle: JobHandle) -> None:
            await trio.sleep(20)
            fences.append(handle.fence)
            raise ValueError("the rival's error")

        nursery.start_soon(slow.outbox("o").run_once, "slow", too_long)
        await held.wait()
        assert not await rival.outbox("o").run_once("rival", in_time)
        await trio.sleep(60)
        assert await rival.outbox("o").run_once("rival", in_time)
        job = await message(rival.outbox("o"), id)
        assert fences == [1, 2]
        assert (job.attempt, "the rival's error" in str(job.error), job.run_at) == (2, True, after(rival, 10))
        assert job.run_at > now(rival)
