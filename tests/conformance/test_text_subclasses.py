"""A name that is an Enum's member, or another kind of str, is the text that it holds, wherever it is used."""

from __future__ import annotations

from enum import Enum

import trio

from alkstore import JobHandle, Store
from tests.conformance.helpers import calm


class Name(str, Enum):  # noqa: UP042 - a StrEnum is formatted as its text, this one is not
    EMAILS = "emails"


async def test_a_claim_that_waits_by_an_enum_is_woken_by_the_text(store: Store) -> None:
    async with trio.open_nursery() as nursery:
        claimed: list[JobHandle] = []

        async def claim() -> None:
            claimed.extend(await store.queue(Name.EMAILS).claim("w", wait=60))

        nursery.start_soon(claim)
        await calm()
        await store.queue("emails").enqueue(1)
        await calm()
        assert [handle.payload for handle in claimed] == [1]


async def test_an_outbox_by_an_enum_is_that_of_the_text(store: Store) -> None:
    await store.outbox(Name.EMAILS).enqueue(1)
    delivered: list[object] = []

    async def deliver(message: JobHandle) -> None:
        delivered.append(message.payload)

    assert await store.outbox("emails").run_once("w", deliver)
    assert delivered == [1]


async def test_a_lock_by_an_enum_is_that_of_the_text(store: Store) -> None:
    held = await store.lock(Name.EMAILS).acquire(60)
    assert held is not None
    assert await store.lock("emails").acquire(60) is None
    taken = trio.Event()

    async def take() -> None:
        async with store.lock(Name.EMAILS).hold(60):
            taken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await calm()
        assert not taken.is_set()
        await held.release()
        await calm()
        assert taken.is_set()


async def test_a_schedule_by_an_enum_is_that_of_the_text(store: Store) -> None:
    schedule = await store.schedule(Name.EMAILS, "@every 1h", Name.EMAILS)
    assert (type(schedule.name), type(schedule.queue)) == (str, str)
    assert await store.unschedule("emails")
