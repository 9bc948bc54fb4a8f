"""A database in memory has one connection: reads, groups and interactive transactions take turns on it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.alkstore.engines.enginekit import engine_of, marked_store, marks

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
COUNT = "SELECT count(*) FROM marks"


@INLINE
async def test_a_read_waits_for_an_interactive_transaction_and_sees_its_end(inline: bool) -> None:
    async with marked_store(":memory:", inline=inline) as store:
        counts: list[int] = []

        async def read() -> None:
            rows = await engine_of(store).read(lambda tx: tx.all(COUNT))
            counts.append(rows[0][0])

        async with trio.open_nursery() as nursery, store.transaction() as tx:
            nursery.start_soon(read)
            await tx.execute("INSERT INTO marks (name) VALUES ('a')")
            await trio.sleep(0.02)
            assert not counts
        assert counts == [1]


@INLINE
async def test_reads_and_transactions_that_begin_at_the_same_time(inline: bool) -> None:
    """A read that has asked for the connection before the transaction got it must not land inside of it."""
    async with marked_store(":memory:", inline=inline) as store:
        counts: list[int] = []

        async def read() -> None:
            rows = await engine_of(store).read(lambda tx: tx.all(COUNT))
            counts.append(rows[0][0])

        async def transaction() -> None:
            async with store.transaction() as tx:
                await tx.execute("INSERT INTO marks (name) VALUES ('a')")
                await tx.execute("INSERT INTO marks (name) VALUES ('b')")

        async def write() -> None:
            await engine_of(store).run_each([marks("c"), marks("d")])

        for _ in range(30):
            async with trio.open_nursery() as nursery:
                for task in (read, transaction, read, write, read, transaction, read):
                    nursery.start_soon(task)
        assert all(count % 2 == 0 for count in counts), "a read saw half of something"
        assert len(counts) == 30 * 4


@INLINE
async def test_a_read_that_is_cancelled_while_it_waits_for_a_transaction(inline: bool) -> None:
    async with marked_store(":memory:", inline=inline) as store:
        async with trio.open_nursery() as nursery, store.transaction() as tx:

            async def read() -> None:
                await engine_of(store).read(lambda tx: tx.all(COUNT))

            nursery.start_soon(read)
            await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await tx.execute("INSERT INTO marks (name) VALUES ('a')")
        assert await engine_of(store).read(lambda tx: tx.all(COUNT)) in ([(0,)], [(1,)])


@INLINE
async def test_a_read_inside_the_transaction_itself_is_refused(inline: bool) -> None:
    """It would wait for itself for ever."""
    async with marked_store(":memory:", inline=inline) as store, store.transaction():
        with trio.fail_after(5), pytest.raises(RuntimeError, match="tx"):
            await store.get_job(1)


@INLINE
async def test_each_store_in_memory_is_its_own(inline: bool) -> None:
    async with marked_store(":memory:", inline=inline) as a, marked_store(":memory:", inline=inline) as b:
        await engine_of(a).run(marks("a"))
        assert await engine_of(b).read(lambda tx: tx.all(COUNT)) == [(0,)]
        assert (await a.health()).feed == "none"
        assert (await a.health()).wal_bytes == 0
