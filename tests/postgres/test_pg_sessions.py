"""What a statement of the user's own does to its session is undone with the end of its transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from alkstore import Store, StoreError
from alkstore.transaction import SyncTransaction
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place
from tests.postgres.pooler import open_pooler

SPOILING = [
    "SET ROLE {clerk}",
    "SET SESSION AUTHORIZATION {clerk}",
    "SET default_transaction_read_only = on",
    "SET default_transaction_isolation = 'serializable'",
    "SET search_path = nowhere",
    "SET statement_timeout = '10s'",
    "SET client_encoding = 'LATIN1'",
    "SET application_name = 'another'",
    "SELECT set_config('TimeZone', 'Asia/Tokyo', false)",
    "DO $$ BEGIN PERFORM set_config('TimeZone', 'Asia/Tokyo', false); END $$",
    "CREATE TEMP TABLE of_mine (n int)",
    "DECLARE mine CURSOR WITH HOLD FOR SELECT 1",
    "LISTEN somebody",
    "SELECT pg_advisory_lock(1)",
]
spoiling = pytest.mark.parametrize("sql", SPOILING)

SESSION = """
SELECT current_user, session_user, current_setting('search_path'), current_setting('statement_timeout'),
  current_setting('client_encoding'), current_setting('TimeZone'), current_setting('default_transaction_read_only'),
  current_setting('default_transaction_isolation'), current_setting('application_name'),
  to_regclass('pg_temp.of_mine'), (SELECT count(*) FROM pg_cursors WHERE name = 'mine'),
  (SELECT count(*) FROM pg_listening_channels()),
  (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"""


@pytest.fixture
def clerk(admin: Admin) -> Iterator[str]:
    name = f"clerk_{secrets.token_hex(4)}"
    admin.rows(f"CREATE ROLE {name}")
    yield name
    admin.rows(f"DROP ROLE {name}")


async def _session(store: Store) -> list[tuple[Any, ...]]:
    async with store.transaction() as tx:
        return await tx.execute(SESSION)


async def _commit(store: Store, sql: str) -> None:
    async with store.transaction() as tx:
        await tx.execute(sql)


async def _roll_back(store: Store, sql: str) -> None:
    with suppress(StoreError):
        async with store.transaction() as tx:
            await tx.execute(sql)
            await tx.execute("SELECT 1 / 0")


async def _transact(store: Store, sql: str) -> None:
    def plainly(tx: SyncTransaction) -> None:
        tx.execute(sql)

    await store.transact(plainly)


async def _fail_at_commit(store: Store, sql: str) -> None:
    async def body() -> None:
        async with store.transaction() as tx:
            await tx.execute("CREATE TEMP TABLE doubled (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            await tx.execute("INSERT INTO doubled VALUES (1), (1)")
            await tx.execute(sql)

    assert "doubled" in str(await fails(StoreError, body))


@spoiling
@pytest.mark.parametrize("spoil", [_commit, _roll_back, _transact, _fail_at_commit])
async def test_the_next_one_finds_the_session_as_it_was(place: Place, clerk: str, spoil: Any, sql: str) -> None:
    async with place.open(connections=1) as store:
        before = await _session(store)
        await spoil(store, sql.format(clerk=clerk))
        await store.queue("q").enqueue("日本")
        assert await _session(store) == before


@spoiling
@pytest.mark.parametrize("spoil", [_commit, _fail_at_commit])
async def test_through_a_pooler_the_same_session_is_meant(
    place: Place, clerk: str, short_folder: Path, spoil: Any, sql: str
) -> None:
    async with (
        open_pooler(short_folder, place.server, 2) as pooler,
        Place(pooler.url, place.schema).open(connections=1, listen=False) as store,
    ):
        before = [await _session(store) for _ in range(2)]
        await spoil(store, sql.format(clerk=clerk))
        assert [await _session(store) for _ in range(2)] == before


async def test_what_is_set_for_the_transaction_holds_to_its_end(place: Place, admin: Admin) -> None:
    """So does what a deferred trigger finds there."""
    async with place.open() as store:
        admin.rows(f"CREATE TABLE {place.schema}.seen (limit_then text)")
        admin.rows(
            f"CREATE FUNCTION {place.schema}.see() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO "
            f"{place.schema}.seen VALUES (current_setting(''work_mem'')); RETURN NULL; END'"
        )
        admin.rows(
            f"CREATE CONSTRAINT TRIGGER sees AFTER INSERT ON {place.table('jobs')} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW EXECUTE FUNCTION {place.schema}.see()"
        )
        async with store.transaction() as tx:
            await tx.execute("SET work_mem = '123kB'")
            await tx.enqueue("q", 1)
        assert admin.rows(f"SELECT * FROM {place.schema}.seen") == [("123kB",)]


async def test_a_commit_that_fails_is_told_as_it_is(place: Place) -> None:
    async with place.open(connections=1) as store:

        async def fail() -> None:
            async with store.transaction() as tx:
                await tx.execute("CREATE TEMP TABLE of_mine (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
                await tx.execute("INSERT INTO of_mine VALUES (1), (1)")
                await tx.enqueue("q", 1)

        error = await fails(StoreError, fail)
        assert type(error) is StoreError
        assert "of_mine" in str(error)
        assert (await store.queue("q").counts()).ready == 0
        await _commit(store, "SELECT 1")
