"""How a transaction ends: by its body's exception, a cancellation, its time limit, or a commit that fails."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from functools import partial

import pytest
import trio

from alkstore import Store, StoreError, SyncTransaction, TransactionTimeout
from tests.conformance.helpers import OpenStore, calm, cancelled_at, claim, elapsed, fails, no_group
from tests.conformance.transacting import (
    EVERYTHING,
    NOTHING,
    ONE_OF_EACH,
    ORDER,
    WRONG,
    clear,
    faces,
    make_orders,
    stored,
    together,
)


@pytest.fixture
async def orders(store: Store) -> Store:
    """A store with the embedder's table beside its own."""
    await make_orders(store)
    return store


async def usable(store: Store) -> bool:
    """Whether others can write."""
    with trio.fail_after(1):
        await store.queue("afterwards").enqueue(1)
    return True


# ---------------------------------------------------------------------------------------------------- exceptions


@faces
@pytest.mark.parametrize(
    "error",
    [
        ValueError("the body's own"),
        ExceptionGroup("the body's own", [ValueError(1), KeyError(2)]),
        ExceptionGroup("one", [ValueError(1)]),
        KeyboardInterrupt(),
        SystemExit(3),
        TransactionTimeout("somebody else's"),
        StopAsyncIteration(),
        GeneratorExit(),
    ],
    ids=repr,
)
async def test_what_the_body_raises_leaves_as_itself(orders: Store, face: str, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await together(orders, face, *EVERYTHING, then=fail)
    assert caught.value is error
    assert await stored(orders) == NOTHING


async def test_the_context_of_the_bodys_exception_is_its_own(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction():
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raise ValueError("outer") from inner

    error = await fails(ValueError, body)
    assert isinstance(error.__context__, KeyError)
    assert error.__context__.__context__ is None


async def test_the_body_may_open_a_nursery(orders: Store) -> None:
    results = []

    async def compute(n: int) -> None:
        await trio.sleep(0.1)
        results.append(n)

    async with orders.transaction() as tx:
        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(compute, n)
            await ORDER(tx)
        await tx.enqueue("q", sorted(results))
    assert (await claim(orders.queue("q"))).payload == [0, 1, 2]


async def test_the_failure_of_a_nursery_in_the_body_leaves_in_its_own_shape(orders: Store) -> None:
    async def fail() -> None:
        raise ValueError

    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)

    group = await fails(ExceptionGroup, body)
    assert [type(error) for error in group.exceptions] == [ValueError]
    assert await stored(orders) == NOTHING


@faces
async def test_others_can_write_after_a_rollback(orders: Store, face: str) -> None:
    for _ in range(3):
        with pytest.raises(StoreError):
            await together(orders, face, ORDER, WRONG)
        assert await usable(orders)


# -------------------------------------------------------------------------------------------------- cancellation


async def test_cancelled_at_any_await_it_happens_wholly_or_not_at_all(orders: Store) -> None:
    async def both() -> None:
        async with orders.transaction() as tx:
            for call in EVERYTHING:
                await call(tx)
            async with tx.savepoint():
                await tx.execute("UPDATE orders SET total = 43")

    outcomes = []
    step = 1
    while await cancelled_at(both, step):
        found = await stored(orders)
        outcomes.append(found)
        assert found in (NOTHING, ONE_OF_EACH)
        assert await usable(orders)
        await clear(orders)
        step += 1
    assert outcomes.count(NOTHING) >= len(EVERYTHING)


@faces
async def test_in_a_cancelled_scope_it_does_not_begin(orders: Store, face: str) -> None:
    called: list[object] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await together(orders, face, called.append)
    assert scope.cancelled_caught
    assert called == []
    assert await stored(orders) == NOTHING


async def test_a_cancellation_without_a_further_checkpoint_rolls_back(orders: Store) -> None:
    with trio.CancelScope() as scope:
        async with orders.transaction() as tx:
            await ORDER(tx)
            scope.cancel()
    assert scope.cancelled_caught
    assert await stored(orders) == NOTHING


async def test_a_cancellation_that_the_body_swallows_rolls_back(orders: Store) -> None:
    with trio.CancelScope() as scope:
        async with orders.transaction() as tx:
            await ORDER(tx)
            scope.cancel()
            with suppress(trio.Cancelled):
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert await stored(orders) == NOTHING


async def test_a_part_of_the_body_may_be_cancelled(orders: Store) -> None:
    async with orders.transaction() as tx:
        await ORDER(tx)
        with trio.move_on_after(1):
            await trio.sleep_forever()
        await tx.enqueue("q", 1)
    assert await stored(orders) == {**NOTHING, "orders": 1, "jobs": 1}


async def test_what_transact_has_committed_is_returned_although_it_was_cancelled_meanwhile(orders: Store) -> None:
    def cancel(tx: SyncTransaction) -> str:
        ORDER(tx)
        if trio.lowlevel.in_trio_run():
            scope.cancel()
        else:
            trio.from_thread.run_sync(scope.cancel)
        return "done"

    result = None
    with trio.CancelScope() as scope:
        result = await orders.transact(cancel)
    assert scope.cancel_called
    assert (result, await stored(orders)) == ("done", {**NOTHING, "orders": 1})


# ---------------------------------------------------------------------------------------------------- time limit


async def test_after_the_time_limit_the_body_is_cancelled_and_rolled_back(orders: Store) -> None:
    ended = []

    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            try:
                await trio.sleep(1000)
            finally:
                ended.append(trio.current_time())

    began = trio.current_time()
    error = await fails(TransactionTimeout, body)
    assert "open for longer than 5 s (transaction_timeout) and was rolled back" in str(error)
    assert ended == [pytest.approx(began + 5)]
    assert await stored(orders) == NOTHING
    assert await usable(orders)


async def test_the_time_limit_is_an_option_of_the_store(open_engine_store: OpenStore) -> None:
    async with open_engine_store(transaction_timeout=60) as store:

        async def work(seconds: float) -> None:
            async with store.transaction():
                await trio.sleep(seconds)

        await work(59)
        with pytest.raises(TransactionTimeout, match="60 s"):
            await work(61)


async def test_the_wait_for_a_turn_does_not_count_against_the_time_limit(store: Store) -> None:
    async def work() -> None:
        async with store.transaction():
            await trio.sleep(4)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(work)


async def test_the_time_limit_holds_for_a_body_that_swallows_its_cancellation(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            with suppress(trio.Cancelled):
                await trio.sleep_forever()

    await fails(TransactionTimeout, body)
    assert await stored(orders) == NOTHING


async def test_the_time_limit_holds_for_a_body_that_shields_itself(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            with trio.CancelScope(shield=True):
                await trio.sleep(6)

    await fails(TransactionTimeout, body)
    assert await stored(orders) == NOTHING


async def test_at_the_time_limit_others_can_write_although_the_body_goes_on(orders: Store) -> None:
    """It is rolled back then, and not only when a clean-up that shields itself has ended."""
    over = trio.Event()

    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
            assert repr(tx) == "Transaction(over)"
            with trio.CancelScope(shield=True):
                await fails(TransactionTimeout, ORDER, tx)
            over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(fails, TransactionTimeout, body))
        await trio.sleep(1)
        assert await elapsed(partial(orders.queue("q").enqueue, 1)) <= 4
        assert not over.is_set()
    assert over.is_set()
    assert (await orders.queue("q").counts()).ready == 1


async def test_the_time_limit_holds_for_a_body_that_was_cancelled_and_goes_on(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(100)

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1) as scope:
            nursery.start_soon(orders.queue("q").enqueue, 1)
            await body()
    assert scope.cancelled_caught
    assert trio.current_time() >= 100
    assert (await orders.queue("q").counts()).ready == 1


async def test_the_time_limit_holds_for_a_body_that_blocks_the_loop(
    open_engine_store: OpenStore, real_time: None
) -> None:
    async with open_engine_store(transaction_timeout=0.05) as store:

        async def body() -> None:
            async with store.transaction() as tx:
                await tx.enqueue("q", 1)
                time.sleep(0.1)  # noqa: ASYNC251 - that is the mistake

        await fails(TransactionTimeout, body)
        assert (await store.queue("q").counts()).ready == 0


async def test_what_the_body_raises_at_the_time_limit_leaves_as_itself(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("clean-up")

    error = await fails(ValueError, body)
    (note,) = error.__notes__
    assert note.startswith("meanwhile: TransactionTimeout('the transaction was open for longer than 5 s")
    assert await stored(orders) == NOTHING


async def test_at_the_time_limit_no_cancellation_leaks_out_beside_the_bodys_error(orders: Store) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError

    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(fail_when_cancelled)

    group = await fails(ExceptionGroup, body)  # with a Cancelled in it, it would be a BaseExceptionGroup
    assert [type(error) for error in group.exceptions] == [ValueError]
    assert await stored(orders) == NOTHING


async def test_the_time_limit_in_a_savepoint_rolls_back_everything(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            async with tx.savepoint():
                await tx.enqueue("q", 1)
                await trio.sleep_forever()

    await fails(TransactionTimeout, body)
    assert await stored(orders) == NOTHING


async def test_a_plain_function_has_the_time_limit_too(open_engine_store: OpenStore) -> None:
    def slow(tx: SyncTransaction) -> None:
        tx.enqueue("q", 1)
        time.sleep(0.1)

    async with open_engine_store(transaction_timeout=0.05) as store:
        with pytest.raises(TransactionTimeout, match=r"longer than 0.05 s"):
            await store.transact(slow)
        assert (await store.queue("q").counts()).ready == 0
        assert await usable(store)


async def test_a_plain_function_can_do_nothing_more_after_its_time(open_engine_store: OpenStore) -> None:
    def slow(tx: SyncTransaction) -> None:
        time.sleep(0.1)
        with pytest.raises(TransactionTimeout):
            tx.enqueue("q", 1)

    async with open_engine_store(transaction_timeout=0.05) as store:
        with pytest.raises(TransactionTimeout):
            await store.transact(slow)


# ------------------------------------------------------------------------------------------------------- commit


# ---------------------------------------------------------------------------------------------- before the commit


async def test_before_the_commit_nobody_sees_anything(orders: Store) -> None:
    got: list[object] = []

    async def wait() -> None:
        got.append((await claim(orders.queue("q"), wait=1000)).payload)

    with no_group():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await calm()
            async with orders.transaction() as tx:
                await tx.enqueue("q", "early?")
                await trio.sleep(4)
                assert got == []
            assert await elapsed(calm) == 0
            assert got == ["early?"]


async def test_reads_of_a_file_see_the_last_commit_meanwhile(open_shared_store: OpenStore) -> None:
    read = trio.Event()

    async def look(store: Store, id: int) -> None:
        assert await store.get_job(id) is None
        assert (await store.queue("q").counts()).ready == 0
        assert await store.queue("q").list() == []
        assert (await store.health()).queues == {}
        read.set()

    async with open_shared_store() as store, trio.open_nursery() as nursery, store.transaction() as tx:
        nursery.start_soon(look, store, await tx.enqueue("q", 1))
        await read.wait()


async def test_a_read_of_another_task_sees_a_commit_or_waits_for_it(store: Store) -> None:
    found: list[int] = []

    async def look() -> None:
        found.append((await store.queue("q").counts()).ready)

    async with trio.open_nursery() as nursery, store.transaction() as tx:
        await tx.enqueue("q", 1)
        nursery.start_soon(look)
        await trio.sleep(1)
        assert found in ([], [0])
    assert found in ([0], [1])


async def test_an_interrupt_signal_in_the_body_rolls_back(orders: Store) -> None:
    async def body() -> None:
        async with orders.transaction() as tx:
            await ORDER(tx)
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()

    await fails(KeyboardInterrupt, body)
    assert await stored(orders) == NOTHING
    assert await usable(orders)
