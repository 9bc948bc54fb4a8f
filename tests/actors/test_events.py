"""Broadcast: never blocks, loses the oldest and says how many, forgets who has gone."""

from __future__ import annotations

import gc

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from actors import Broadcast, Subscription


async def rest_of(subscription: Subscription[int]) -> list[int]:
    return [event async for event in subscription]


async def test_every_subscription_gets_every_event_in_order() -> None:
    stream: Broadcast[int] = Broadcast()
    one, two = stream.subscribe(), stream.subscribe()
    for event in (1, 2, 3):
        stream.publish(event)
    stream.close()
    assert await rest_of(one) == [1, 2, 3]
    assert await rest_of(two) == [1, 2, 3]


async def test_a_subscription_counts_from_the_call_not_from_the_first_read() -> None:
    stream: Broadcast[int] = Broadcast()
    stream.publish(1)
    subscription = stream.subscribe()
    stream.publish(2)
    stream.close()
    assert await rest_of(subscription) == [2]


async def test_a_reader_waits_for_the_next_event() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    read: list[int] = []

    async def reader() -> None:
        read.append(await anext(subscription))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await wait_all_tasks_blocked()
        assert read == []
        stream.publish(7)
    assert read == [7]


async def test_two_readers_of_one_subscription_share_its_events() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    read: list[int] = []

    async def reader() -> None:
        read.append(await anext(subscription))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        nursery.start_soon(reader)
        await wait_all_tasks_blocked()
        stream.publish(1)
        stream.publish(2)
    assert sorted(read) == [1, 2]


@given(buffer=st.integers(1, 20), published=st.integers(0, 60))
def test_a_full_buffer_drops_the_oldest_and_counts_them(buffer: int, published: int) -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe(buffer)
    for event in range(published):
        stream.publish(event)
    stream.close()
    read = trio.run(rest_of, subscription)
    assert read == list(range(published))[-buffer:]
    assert subscription.missed == published - len(read)


async def test_a_slow_reader_costs_the_others_nothing() -> None:
    stream: Broadcast[int] = Broadcast()
    slow, quick = stream.subscribe(1), stream.subscribe()
    for event in range(10):
        stream.publish(event)
    stream.close()
    assert await rest_of(quick) == list(range(10))
    assert (slow.missed, quick.missed) == (9, 0)


async def test_leaving_a_subscription_ends_it_and_its_readers() -> None:
    stream: Broadcast[int] = Broadcast()
    read: list[list[int]] = []

    async def reader() -> None:
        read.append(await rest_of(subscription))

    async with trio.open_nursery() as nursery:
        with stream.subscribe() as subscription:
            nursery.start_soon(reader)
            await wait_all_tasks_blocked()
        stream.publish(1)
    assert read == [[]]


async def test_a_closed_subscription_forgets_what_was_not_read() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    stream.publish(1)
    subscription.close()
    subscription.close()
    assert await rest_of(subscription) == []


async def test_a_dropped_subscription_is_unregistered() -> None:
    stream: Broadcast[int] = Broadcast()
    kept, dropped = stream.subscribe(), stream.subscribe()
    del dropped
    gc.collect()
    assert list(stream._subscriptions) == [kept]


async def test_closing_the_stream_lets_readers_finish_their_buffer() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    stream.publish(1)
    stream.close()
    stream.publish(2)
    assert await rest_of(subscription) == [1]


async def test_a_subscription_to_a_closed_stream_has_ended() -> None:
    stream: Broadcast[int] = Broadcast()
    stream.close()
    assert await rest_of(stream.subscribe()) == []


async def test_a_cancelled_read_takes_no_event() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    stream.publish(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(subscription)
    assert scope.cancelled_caught
    assert await anext(subscription) == 1


async def test_every_read_is_a_checkpoint() -> None:
    stream: Broadcast[int] = Broadcast()
    subscription = stream.subscribe()
    stream.publish(1)
    with assert_checkpoints():
        await anext(subscription)


def test_a_buffer_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="buffer must be 1 or more events, not 0"):
        Broadcast[int]().subscribe(0)
