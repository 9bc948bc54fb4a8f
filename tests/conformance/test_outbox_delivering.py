"""The Deliverer: an outbox that is delivered until it is told to stop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from alkstore import Job, JobHandle, Outbox, Snooze, StopToken, Store
from tests.conformance.helpers import OpenStore, TaskSteps, after, calm, fails, now, running, seen


@pytest.fixture
async def outbox(store: Store) -> Outbox:
    return store.outbox("o")


async def message(outbox: Outbox, id: int) -> Job:
    found = await outbox.get_message(id)
    assert found is not None
    return found


class Receiver:
    """What is delivered to, and what it has got when."""

    def __init__(self, takes: float = 0, fails: Callable[[JobHandle], bool] = lambda handle: False) -> None:
        self.got: list[Any] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self._takes, self._fails = takes, fails

    async def __call__(self, handle: JobHandle) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.sleep(self._takes)
            if self._fails(handle):
                raise ValueError(f"refused {handle.payload}")
            self.got.append(handle.payload)
            self.times.append(trio.current_time())
        finally:
            self.at_once -= 1


# ------------------------------------------------------------------------------------------------- draining, waiting


async def test_it_delivers_what_is_there_and_what_comes(outbox: Outbox) -> None:
    receiver = Receiver()
    await outbox.enqueue(1)
    async with running(outbox.deliver, receiver):
        await calm()
        assert receiver.got == [1]
        await trio.sleep(1000)
        await outbox.enqueue(2)
        await calm()
        assert receiver.got == [1, 2]
    assert (await outbox.counts()).ready == 0


async def test_a_message_is_delivered_at_the_moment_of_its_commit(store: Store, outbox: Outbox) -> None:
    receiver = Receiver()
    async with running(outbox.deliver, receiver):
        await trio.sleep(100)
        async with store.transaction() as tx:
            await tx.outbox_enqueue("o", "early?")
            await trio.sleep(3)
            assert receiver.got == []
        moment = trio.current_time()
        await calm()
    assert receiver.times == [moment]


async def test_a_delayed_message_is_delivered_when_it_is_due(outbox: Outbox) -> None:
    receiver = Receiver()
    async with running(outbox.deliver, receiver):
        await outbox.enqueue(1, delay=77)
        due = trio.current_time() + 77
        await trio.sleep(100)
    assert receiver.times == [pytest.approx(due, abs=0.001)]


async def test_it_sees_the_commit_of_another_process_without_waiting_long(open_shared_store: OpenStore) -> None:
    receiver = Receiver()
    async with open_shared_store() as store, open_shared_store() as other, running(store.outbox("o").deliver, receiver):
        await trio.sleep(100)
        await other.outbox("o").enqueue(1)
        moment = trio.current_time()
        await trio.sleep(6)
    assert receiver.got == [1]
    assert receiver.times[0] <= moment + 5


async def test_a_lower_id_that_is_committed_later_is_delivered_too(store: Store, outbox: Outbox) -> None:
    receiver = Receiver()
    first = await outbox.enqueue("low", delay=10)
    async with running(outbox.deliver, receiver):
        assert await outbox.enqueue("high") > first
        await trio.sleep(20)
    assert receiver.got == ["high", "low"]


# ------------------------------------------------------------------------------------------------------------ order


async def test_with_concurrency_1_messages_leave_in_their_order(outbox: Outbox) -> None:
    receiver = Receiver(takes=0.01)
    async with running(outbox.deliver, receiver):
        for n in range(100):
            await outbox.enqueue(n)
        await trio.sleep(10)
    assert receiver.got == list(range(100))
    assert receiver.most_at_once == 1


async def test_with_concurrency_n_as_many_are_delivered_at_once(outbox: Outbox) -> None:
    receiver = Receiver(takes=1)
    for n in range(20):
        await outbox.enqueue(n)
    began = trio.current_time()
    async with running(outbox.deliver, receiver, concurrency=10):
        await trio.sleep(5)
    assert receiver.most_at_once == 10
    assert receiver.times[-1] == began + 2


async def test_only_the_message_that_failed_waits_for_its_retry(outbox: Outbox) -> None:
    receiver = Receiver(fails=lambda handle: handle.payload == 3 and handle.attempt <= 2)
    for n in range(6):
        await outbox.enqueue(n)
    began = trio.current_time()
    async with running(outbox.deliver, receiver):
        await trio.sleep(100)
    assert receiver.got == [0, 1, 2, 4, 5, 3]
    assert receiver.times[-1] == pytest.approx(began + 5 + 10, abs=0.001)


# ----------------------------------------------------------------------------------------------- errors of deliveries


async def test_it_survives_the_deliverys_errors_and_buries_after_five(outbox: Outbox) -> None:
    receiver = Receiver(fails=lambda handle: handle.payload == "poison")
    id = await outbox.enqueue("poison")
    began = now_of(outbox)
    async with running(outbox.deliver, receiver):
        await trio.sleep(200)
        await outbox.enqueue("good")
        await calm()
    dead = await message(outbox, id)
    assert (dead.state, dead.attempt, dead.error) == ("dead", 5, "ValueError: refused poison")
    assert dead.died_at is not None
    assert (dead.died_at - began).total_seconds() == pytest.approx(5 + 10 + 20 + 40, abs=0.01)
    assert receiver.got == ["good"]


def now_of(outbox: Outbox) -> Any:
    return now(Store("", outbox._context))


@pytest.mark.parametrize(
    "error", [ExceptionGroup("g", [ValueError()]), trio.TooSlowError(), TimeoutError(), StopAsyncIteration()], ids=repr
)
async def test_it_survives_any_exception(outbox: Outbox, error: Exception) -> None:
    async def delivery(handle: JobHandle) -> None:
        if handle.payload == "bad":
            raise error
        good.append(handle.payload)

    good: list[object] = []
    id = await outbox.enqueue("bad")
    await outbox.enqueue("good")
    async with running(outbox.deliver, delivery):
        await calm()
        assert good == ["good"]
        assert (await message(outbox, id)).attempt == 1


async def test_a_snooze_postpones_a_message_without_an_attempt(outbox: Outbox) -> None:
    async def delivery(handle: JobHandle) -> None:
        times.append(trio.current_time())
        if len(times) < 20:
            raise Snooze(30)

    times: list[float] = []
    await outbox.enqueue(1)
    async with running(outbox.deliver, delivery):
        await trio.sleep(1000)
    assert len(times) == 20
    assert await outbox.dead() == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_is_no_exception_leaves_it_alone_and_unwrapped(outbox: Outbox, kind: type[BaseException]) -> None:
    async def delivery(_: JobHandle) -> None:
        raise kind

    await outbox.enqueue(1)
    await fails(kind, partial(outbox.deliver, delivery, stop=StopToken()))


# ---------------------------------------------------------------------------------------------------- leases


async def test_a_delivery_is_cancelled_before_its_lease_ends(outbox: Outbox) -> None:
    async def hang(handle: JobHandle) -> None:
        began = trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time() - began)
            assert handle.lease_remaining > 0

    ended: list[float] = []
    id = await outbox.enqueue(1)
    async with running(outbox.deliver, hang):
        await trio.sleep(1000)
    assert ended == [pytest.approx(59)] * 5
    dead = await message(outbox, id)
    assert (dead.state, dead.reason) == ("dead", "lease expired")


async def test_a_delivery_that_hangs_lets_others_through(outbox: Outbox) -> None:
    async def delivery(handle: JobHandle) -> None:
        if handle.payload == "hang":
            await trio.sleep_forever()
        good.append(trio.current_time())

    good: list[float] = []
    await outbox.enqueue("hang")
    await outbox.enqueue("good")
    began = trio.current_time()
    async with running(outbox.deliver, delivery):
        await trio.sleep(100)
    assert good == [pytest.approx(began + 59)]


async def test_a_heartbeat_gives_the_delivery_another_lease(outbox: Outbox) -> None:
    async def delivery(handle: JobHandle) -> None:
        for _ in range(10):
            await trio.sleep(58.9)
            assert await handle.heartbeat()
        done.append(handle.attempt)

    done: list[int] = []
    id = await outbox.enqueue(1)
    async with running(outbox.deliver, delivery):
        await trio.sleep(700)
    assert done == [1]
    assert await outbox.get_message(id) is None


async def test_a_heartbeat_may_cut_the_lease_short(outbox: Outbox) -> None:
    async def delivery(handle: JobHandle) -> None:
        if handle.attempt > 1:
            return
        assert await handle.heartbeat(10)
        began = trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time() - began)

    ended: list[float] = []
    await outbox.enqueue(1)
    async with running(outbox.deliver, delivery):
        await trio.sleep(100)
    assert ended == [pytest.approx(9)]


async def test_no_lease_is_renewed_by_itself(outbox: Outbox, store: Store) -> None:
    async def delivery(handle: JobHandle) -> None:
        await trio.sleep(50)
        ends.append((await message(outbox, handle.id)).lease_until)

    ends: list[object] = []
    await outbox.enqueue(1)
    end = after(store, 60)
    async with running(outbox.deliver, delivery):
        await trio.sleep(55)
    assert ends == [end]


async def test_rivals_deliver_each_message_once(open_shared_store: OpenStore) -> None:
    receiver = Receiver(takes=0.001)
    async with (
        open_shared_store() as one,
        open_shared_store() as other,
        running(one.outbox("o").deliver, receiver, concurrency=5),
        running(other.outbox("o").deliver, receiver, concurrency=5),
    ):
        await one.transact(lambda tx: [tx.outbox_enqueue("o", n) for n in range(200)])
        await trio.sleep(20)
    assert sorted(receiver.got) == list(range(200))


# --------------------------------------------------------------------------------------------------------- stopping


async def test_a_stop_ends_it_when_there_is_nothing_to_do(outbox: Outbox) -> None:
    async with running(outbox.deliver, Receiver()) as stop:
        await trio.sleep(10)
        began = trio.current_time()
        stop.stop()
    assert trio.current_time() == began


async def test_after_a_stop_nothing_is_taken_and_what_was_begun_is_finished(outbox: Outbox) -> None:
    receiver = Receiver(takes=5)
    for n in range(3):
        await outbox.enqueue(n)
    async with running(outbox.deliver, receiver) as stop:
        await trio.sleep(1)
        stop.stop()
    assert receiver.got == [0]
    assert (await outbox.counts()).ready == 2


async def test_after_the_grace_a_message_goes_back_with_its_attempt(outbox: Outbox) -> None:
    receiver = Receiver(takes=50)
    id = await outbox.enqueue(1)
    async with running(outbox.deliver, receiver, grace=3) as stop:
        await trio.sleep(1)
        began = trio.current_time()
        stop.stop()
    assert trio.current_time() == began + 3
    job = await message(outbox, id)
    assert (job.state, job.attempt, job.error) == ("ready", 0, "interrupted by shutdown")


async def test_three_deploys_during_one_delivery_spend_no_attempt(outbox: Outbox) -> None:
    id = await outbox.enqueue(1)
    for _ in range(7):
        async with running(outbox.deliver, Receiver(takes=50), grace=0) as stop:
            await trio.sleep(1)
            stop.stop()
    assert (await message(outbox, id)).attempt == 0


async def test_cancelled_its_messages_go_back(outbox: Outbox) -> None:
    for n in range(3):
        await outbox.enqueue(n)
    with trio.move_on_after(1):
        await outbox.deliver(Receiver(takes=50), stop=StopToken(), concurrency=3)
    counts = await outbox.counts()
    assert (counts.ready, counts.leased) == (3, 0)


async def test_a_delivery_that_ends_in_the_moment_of_the_stop_is_settled_once(store: Store, outbox: Outbox) -> None:
    rounds = 100
    with store.events(10 * rounds) as events:
        for n in range(rounds):
            await outbox.enqueue(n)
            async with running(outbox.deliver, Receiver(takes=0.01), grace=0) as stop:
                await trio.sleep(0.01)
                stop.stop()
        settled = [event.details["outcome"] for event in seen(events, "settled")]
    assert set(settled) <= {"acked", "given back"}
    assert settled.count("acked") + (await outbox.counts()).ready == rounds
    assert (await outbox.counts()).leased == 0
    assert all(job.error == "interrupted by shutdown" for job in await _ready(outbox))


async def _ready(outbox: Outbox) -> list[Job]:
    return await outbox._queue.list("ready", limit=1000)


async def test_a_token_that_was_flipped_before_takes_nothing(outbox: Outbox) -> None:
    stop = StopToken()
    stop.stop()
    await outbox.enqueue(1)
    await outbox.deliver(Receiver(), stop=stop)
    assert (await outbox.counts()).ready == 1


async def test_a_kept_message_is_delivered_by_the_next_life(open_shared_store: OpenStore) -> None:
    receiver = Receiver()
    async with open_shared_store() as store:
        await store.outbox("o").enqueue("kept")
    async with open_shared_store() as store, running(store.outbox("o").deliver, receiver):
        await calm()
    assert receiver.got == ["kept"]


# ---------------------------------------------------------------------------------------------------------- options


async def test_it_takes_no_plain_function(outbox: Outbox) -> None:
    deliver: Callable[..., Awaitable[None]] = outbox.deliver
    error = await fails(TypeError, deliver, print, stop=StopToken())
    assert "delivery must be an async function" in str(error)


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("concurrency", 0, ValueError),
        ("concurrency", 1_001, ValueError),
        ("concurrency", "2", TypeError),
        ("grace", -1, ValueError),
        ("grace", None, TypeError),
    ],
)
async def test_an_option_out_of_its_range_is_named(
    outbox: Outbox, option: str, value: object, kind: type[Exception]
) -> None:
    deliver: Callable[..., Awaitable[None]] = outbox.deliver
    error = await fails(kind, deliver, Receiver(), stop=StopToken(), **{option: value})
    assert option in str(error)


@pytest.fixture
async def idle(store: Store) -> AsyncIterator[Outbox]:
    """An outbox that is being delivered and has nothing to do."""
    async with running(store.outbox("o").deliver, Receiver()):
        await calm()
        yield store.outbox("o")


async def test_an_outbox_with_nothing_to_do_sleeps(idle: Outbox) -> None:
    with TaskSteps() as steps:
        await trio.sleep(5)
    assert steps.count < 60
