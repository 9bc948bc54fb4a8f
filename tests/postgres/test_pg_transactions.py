"""Transactions of the store on a server: nothing in them ends them but the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from alkstore import Store, StoreError
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    async with place.open() as store:
        yield store


ENDING = {
    "a procedure that commits": "CALL {schema}.ends()",
    "a block that commits": "DO $$ BEGIN COMMIT; END $$",
    "a block that rolls back": "DO $$ BEGIN ROLLBACK; END $$",
    "a second statement": "SELECT 1; COMMIT",
    "a second statement behind a parameter": "SELECT %s::int; COMMIT",
}


@pytest.mark.parametrize("sql", ENDING.values(), ids=ENDING)
async def test_no_statement_ends_the_transaction(store: Store, admin: Admin, sql: str) -> None:
    schema = admin.place.schema
    admin.rows(f"CREATE PROCEDURE {schema}.ends() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$")
    params: tuple[Any, ...] = (1,) if "%s" in sql else ()

    async def body() -> None:
        async with store.transaction() as tx:
            await tx.enqueue("q", 1)
            await tx.execute(sql.format(schema=schema), params)

    await fails(StoreError, body)
    assert (await store.queue("q").counts()).ready == 0


@pytest.mark.parametrize("sql", ["COPY (SELECT 1) TO STDOUT", "COPY mine FROM STDIN"])
async def test_copy_is_refused_by_its_name_and_takes_only_the_transaction(store: Store, sql: str) -> None:
    async def body() -> None:
        async with store.transaction() as tx:
            await tx.execute("CREATE TEMP TABLE mine (n int)")
            await tx.enqueue("q", 1)
            await tx.execute(sql)

    error = await fails(StoreError, body)
    assert type(error) is StoreError
    assert "take SELECT or INSERT instead" in str(error)
    async with store.transaction() as tx:
        assert await tx.execute("SELECT 1") == [(1,)]
    assert (await store.queue("q").counts()).ready == 0
