"""Whatever happens to the server and to the way there: work goes on by itself, and nothing promised is lost or redone.

Each test prints how long it took until a job was done again: ``pytest tests/postgres/test_pg_faults.py -s``.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import psycopg
import pytest
import trio

from alkstore import OutcomeUnknown, StoreBusy, StoreError, StoreUnavailable
from alkstore.engines.postgres.connection import mapped
from alkstore.sql.tx import Tx
from alkstore.transaction import Transaction
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place, engine_of, eventually
from tests.postgres.load import Load, working
from tests.postgres.server import Server, run_server


@pytest.fixture
def own() -> Iterator[Server]:
    """A server of the test's own, with few connections."""
    with run_server(max_connections="20", superuser_reserved_connections="3") as server:
        yield server


async def _recovered(load: Load, since: float) -> float:
    """Wait until a job is done that was begun after `since`."""
    await eventually(lambda: load.last > since + 0.05, within=30)
    return load.last - since


def _show(what: str, seconds: float, load: Load) -> None:
    print(f"\n{what}: {seconds:.2f} s until a job was done again")
    print(f"{len(load.acked)} jobs done, {load.doubtful} of unknown outcome, refused: {dict(load.refused)}")


async def test_connections_may_be_killed_at_any_time(place: Place, admin: Admin) -> None:
    chance = random.Random(7)  # noqa: S311 - it has to be repeatable
    async with place.open(connections=4, busy_timeout=2) as store, working(store) as load:
        killed, until = 0, time.monotonic() + 5
        while time.monotonic() < until:
            await trio.sleep(chance.uniform(0, 0.15))
            if pids := admin.backends():
                admin.rows("SELECT pg_terminate_backend(%s)", chance.choice(pids))
                killed += 1
        load.rest()
        await load.settled()
        assert killed > 20
        assert len(load.acked) > 50
        _show(f"{killed} connections killed", await _recovered_alone(load), load)


async def _recovered_alone(load: Load) -> float:
    load.go_on()
    return await _recovered(load, time.monotonic())


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_server_may_restart_under_load(own: Server, mode: str) -> None:
    """Within the patience of the store nobody sees more than a pause, but for commits whose answer was lost."""
    async with Place(own.url(), "alkstore").open(connections=4) as store, working(store) as load:
        await eventually(lambda: len(load.acked) > 30)
        await trio.to_thread.run_sync(own.stop, mode)
        await trio.to_thread.run_sync(own.start)
        up = time.monotonic()
        recovered = await _recovered(load, up)
        load.rest()
        await load.settled()
        _show(f"restarted ({mode})", recovered, load)
        assert recovered < 10


async def test_a_server_may_be_away_for_longer_than_the_patience(own: Server) -> None:
    place = Place(own.url(), "alkstore")
    async with place.open(connections=4, busy_timeout=0.5) as store, working(store) as load:
        await eventually(lambda: len(load.acked) > 30)
        await trio.to_thread.run_sync(own.stop)
        await trio.sleep(3)
        assert load.refused["StoreUnavailable"] > 0
        assert engine_of(store).feed_state == "polling"
        await trio.to_thread.run_sync(own.start)
        up = time.monotonic()
        recovered = await _recovered(load, up)
        load.rest()
        await load.settled()
        await eventually(lambda: engine_of(store).feed_state == "listening")
        _show("away for 3 s with a patience of 0.5 s", recovered, load)


async def test_a_server_without_a_connection_to_spare_is_waited_for(own: Server) -> None:
    place = Place(own.url(), "alkstore")
    others: list[psycopg.Connection[object]] = []
    async with place.open(connections=4, busy_timeout=1) as store, working(store) as load:
        await eventually(lambda: len(load.acked) > 30)
        with psycopg.connect(own.url(), autocommit=True) as admin:
            with suppress(psycopg.OperationalError):
                while len(others) < 30:
                    others.append(psycopg.connect(own.url(), connect_timeout=2))
            assert 3 < len(others) < 30
            watcher = Admin(place, admin)
            watcher.kill()
            with suppress(psycopg.OperationalError):
                while len(others) < 60:
                    others.append(psycopg.connect(own.url(), connect_timeout=2))
            await trio.sleep(1.5)
            for other in others:
                other.close()
        free = time.monotonic()
        recovered = await _recovered(load, free)
        load.rest()
        await load.settled()
        _show("no connection to spare", recovered, load)


async def test_calls_share_the_connections_that_the_server_gives(place: Place, admin: Admin) -> None:
    user = f"few_{secrets.token_hex(4)}"
    async with place.open() as store:
        await store.queue("q").enqueue(0)
    admin.rows(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 2; GRANT USAGE ON SCHEMA {place.schema} TO {user}")
    admin.rows(f"GRANT ALL ON ALL TABLES IN SCHEMA {place.schema} TO {user}")
    info = psycopg.conninfo.conninfo_to_dict(place.server)
    port = f"&port={info['port']}" if "port" in info else ""
    few = Place(f"postgresql://{user}@/{info['dbname']}?host={info['host']}{port}", place.schema)
    try:
        async with few.open(connections=8, busy_timeout=5, listen=False) as store:
            queue = store.queue("q")
            (handle,) = await queue.claim("w", lease=60)
            async with trio.open_nursery() as nursery:
                for n in range(1, 41):
                    nursery.start_soon(queue.enqueue, n)
                    nursery.start_soon(handle.heartbeat)
                    nursery.start_soon(queue.counts)
            assert (await queue.counts()).ready == 40
            release = trio.Event()

            async def keep_one() -> None:
                async with store.transaction():
                    await release.wait()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_one)
                await trio.sleep(0.1)
                async with trio.open_nursery() as others:
                    for n in range(10):
                        others.start_soon(queue.enqueue, n)
                assert await handle.heartbeat()
                release.set()
    finally:
        admin.rows(f"DROP OWNED BY {user}; DROP ROLE {user}")


async def test_a_full_pool_is_busy_and_leases_go_first(place: Place, admin: Admin) -> None:
    async with place.open(connections=2, busy_timeout=0.5) as store, trio.open_nursery() as nursery:
        queue = store.queue("q")
        await queue.enqueue(1)
        (handle,) = await queue.claim("w", lease=30)
        release = trio.Event()

        async def hold() -> None:
            async with store.transaction():
                await release.wait()

        nursery.start_soon(hold)
        await trio.sleep(0.1)
        await fails(StoreBusy, queue.enqueue, 2)  # the other slot is kept for leases
        assert await handle.heartbeat()
        release.set()
        await queue.enqueue(3)


async def test_an_old_snapshot_of_somebody_elses_stops_nothing(place: Place, admin: Admin) -> None:
    with psycopg.connect(place.server) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM pg_class").fetchall()
        async with place.open(connections=4) as store, working(store) as load:
            await eventually(lambda: len(load.acked) > 300)
            load.rest()
            await load.settled()


# -------------------------------------------------------------------------------------------- one call, one connection


async def test_a_connection_that_was_lost_while_it_lay_idle_is_not_noticed(place: Place, admin: Admin) -> None:
    async with place.open() as store:
        for n in range(5):
            await store.queue("q").enqueue(n)
            admin.kill()
            assert (await store.queue("q").counts()).ready == n + 1
            admin.kill()
            async with store.transaction() as tx:
                await tx.execute("SELECT 1")
            admin.kill()
            assert await store.transact(lambda tx: tx.execute("SELECT 1")) == [(1,)]
            admin.kill()


async def test_a_transaction_whose_connection_is_lost_has_not_happened(place: Place, admin: Admin) -> None:
    async with place.open() as store:

        async def lose() -> None:
            async with store.transaction() as tx:
                await tx.enqueue("q", 1)
                admin.kill()
                await tx.enqueue("q", 2)

        await fails(StoreUnavailable, lose)

        async def lose_at_the_end() -> None:
            async with store.transaction() as tx:
                await tx.enqueue("q", 1)
                admin.kill()

        error = await fails(StoreError, lose_at_the_end)
        assert isinstance(error, OutcomeUnknown | StoreUnavailable)
        calls = 0

        def plainly(tx: object) -> None:
            nonlocal calls
            calls += 1
            tx.enqueue("q", 1)  # type: ignore[attr-defined]
            admin.kill()
            tx.enqueue("q", 2)  # type: ignore[attr-defined]

        await fails(StoreUnavailable, store.transact, plainly)
        assert calls == 1  # a user's function never runs twice
        assert (await store.queue("q").counts()).ready == 0


REPEATABLE = [
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.AdminShutdown,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
    psycopg.errors.IdleSessionTimeout,
]


@pytest.mark.parametrize("kind", REPEATABLE)
async def test_a_unit_that_has_come_to_nothing_is_run_again(place: Place, kind: type[psycopg.Error]) -> None:
    async with place.open() as store:
        runs = 0

        def work(tx: object) -> int:
            nonlocal runs
            runs += 1
            if runs < 3:
                raise mapped(kind("as if")) from kind("as if")
            return runs

        assert await engine_of(store).run(work) == 3


@pytest.mark.parametrize("kind", REPEATABLE)
async def test_an_error_that_stays_has_a_public_name(place: Place, kind: type[psycopg.Error]) -> None:
    async with place.open() as store:

        def work(tx: object) -> None:
            raise mapped(kind("as if")) from kind("as if")

        error = await fails(StoreError, engine_of(store).run, work)
        assert type(error) in (StoreBusy, StoreUnavailable)
        assert isinstance(error.__cause__, kind)


SETTINGS = ["idle_in_transaction_session_timeout", "transaction_timeout"]


@pytest.mark.parametrize("setting", SETTINGS)
async def test_the_servers_own_time_limits_are_lost_connections(place: Place, admin: Admin, setting: str) -> None:
    """A unit of the store's is run again, a transaction of the user's is rolled back and told so."""
    if not admin.rows("SELECT 1 FROM pg_settings WHERE name = %s", setting):
        pytest.skip("this server does not know it")
    limited = Place(f"{place.server}&options=-c{setting}%3D200ms", place.schema)
    await _settle(place)
    async with limited.open() as store:
        for after in (lambda tx: tx.enqueue("q", 2), lambda tx: tx.execute("SELECT 1"), _nothing_more):

            async def linger(after: Callable[[Transaction], Awaitable[object]] = after) -> None:
                async with store.transaction() as tx:
                    await tx.enqueue("q", 1)
                    await trio.sleep(0.5)
                    await after(tx)

            expected = (StoreUnavailable, OutcomeUnknown) if setting == "transaction_timeout" else StoreUnavailable
            await fails(expected, linger)  # type: ignore[arg-type]
        runs = 0

        def pause(tx: Tx) -> int:
            nonlocal runs
            runs += 1
            tx.all("SELECT 1")
            if runs == 1:
                time.sleep(0.5)  # the whole process, as when a machine is suspended
            return len(tx.all("SELECT 1"))

        assert await engine_of(store).run(pause) == 1
        assert runs == 2
        assert (await store.queue("q").counts()).ready == 0


async def _nothing_more(_: Transaction) -> None:
    await trio.lowlevel.checkpoint()


async def _settle(place: Place) -> None:
    async with place.open():
        pass


async def test_a_row_that_stays_locked_is_busy(place: Place, admin: Admin) -> None:
    async with place.open(busy_timeout=0.3) as store:
        id = await store.queue("q").enqueue(1)
        (handle,) = await store.queue("q").claim("w")
        with admin.holding(f"SELECT 1 FROM {place.table('jobs')} WHERE id = %s FOR UPDATE", id):
            await fails(StoreBusy, handle.ack)
        assert await handle.ack()


async def test_the_store_closes_soon_though_a_statement_is_long(place: Place, admin: Admin) -> None:
    async def use() -> None:
        async with place.open(transaction_timeout=60) as store, trio.open_nursery() as nursery:

            async def long() -> None:
                async with store.transaction() as tx:
                    await tx.execute("SELECT pg_sleep(60)")

            nursery.start_soon(long)
            await eventually(lambda: admin.backends("%pg_sleep%"))
            nursery.cancel_scope.cancel()

    began = time.monotonic()
    await use()
    assert time.monotonic() - began < 5
    await eventually(lambda: not admin.backends("%pg_sleep%"))
