"""Moving house: everything that is in a SQLite file is in the copy, and goes on there as if nothing had happened."""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from alkstore import (
    InvalidName,
    SchemaMissing,
    SchemaTooNew,
    Store,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreReadOnly,
    StoreUnavailable,
    open_store,
)
from alkstore.moving import Copied, Progress, copy_store
from alkstore.sql.schema import TABLES
from tests.conformance.helpers import fails
from tests.postgres.kit import Admin, Place, as_user


async def _furnish(store: Store) -> dict[str, int]:
    """Something of each kind, and ids that are gone already; return some ids."""
    queue = store.queue("q", visibility=3_600)
    ids = {}
    for name, options in {
        "ready": {"priority": 7, "headers": {"a": "ü\0"}, "key": "k"},
        "delayed": {"delay": 3_600},
        "expiring": {"expires": 3_600},
    }.items():
        ids[name] = await queue.enqueue({"name": name, "text": "NUL \0, ’ and \t\n\\N"}, **options)  # type: ignore[arg-type]
    for name in ("leased", "dead", "gone"):
        ids[name] = await store.queue(name, visibility=3_600).enqueue(2**70)
        (handle,) = await store.queue(name).claim("w")
        if name == "dead":
            assert await handle.fail("an error\twith\\ everything")
        elif name == "gone":
            assert await handle.ack()
    await store.queue("paused").pause()
    assert await store.lock("l").acquire(3_600) is not None
    await store.schedule("s", "@every 1h", "q", {"n": None})
    await store.outbox("o").enqueue(1)
    await store.cron.publish_task("t", call="h", args={"x": 1})
    await store.cron.publish_trigger("g", task="t", expression="0 3 * * *", timezone="Europe/Berlin")
    await store.cron.publish_trigger("d", task="t", expression="0 4 * * *", timezone="UTC")
    await store.cron.delete_trigger("d")
    ids["run"] = (await store.cron.run_now("t")).id
    cancelled = await store.cron.run_now("t")
    assert await store.cron.cancel_run(cancelled.id)
    return ids


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a #house? 100%.db")


async def _copy(path: str, place: Place) -> Copied:
    return await copy_store(path, place.url, schema=place.schema)


async def test_everything_is_in_the_copy_and_goes_on_there(path: str, place: Place, admin: Admin) -> None:
    async with open_store(path) as store:
        ids = await _furnish(store)
        old = {name: await store.get_job(id) for name, id in ids.items()}
        old_health = await store.health()
        old_tasks, old_triggers = await store.cron.tasks(), await store.cron.triggers()
        old_runs = await store.cron.runs()
        token = await store.lock("m").acquire(1)
        assert token is not None
        assert await token.release()
        last = await store.queue("q").enqueue("the last one")
        await store.queue("q").cancel_job(last)
        await store.queue("q").prune(older_than=0)
    seen: list[Progress] = []
    copied = await copy_store(path, place.url, schema=place.schema, progress=seen.append)
    assert copied.rows.keys() == copied.checksums.keys() == TABLES.keys()
    for table, count in copied.rows.items():
        assert admin.value(f"SELECT count(*) FROM {place.schema}.{table}") == count
        assert [one for one in seen if one.table == table][-1] == Progress(table, count, count)
    async with place.open(create=False, migrate=False) as store:
        assert {name: await store.get_job(id) for name, id in ids.items()} == old
        health = await store.health()
        assert (health.queues, health.paused, health.schedules) == (
            {**old_health.queues, "q": health.queues["q"]},
            old_health.paused,
            old_health.schedules,
        )
        assert (await store.cron.tasks(), await store.cron.triggers()) == (old_tasks, old_triggers)
        assert await store.cron.runs() == old_runs
        # nothing is given twice
        assert await store.queue("q").enqueue("new") > last
        assert await store.queue("q").enqueue("again", key="k") == ids["ready"]
        assert (await store.cron.run_now("t")).id > max(run.id for run in old_runs)
        assert await store.lock("l").acquire(1) is None
        held = await store.lock("m").acquire(1)
        assert held is not None
        assert held.fencing_token > token.fencing_token
        (handle,) = await store.queue("q").claim("w")
        assert handle.id == ids["ready"]
        assert await handle.ack()


async def test_an_empty_store_can_be_copied_and_used(path: str, place: Place) -> None:
    async with open_store(path):
        pass
    await _copy(path, place)
    async with place.open(create=False) as store:
        assert await store.queue("q").enqueue(1) == 1


async def test_a_large_store_is_copied(path: str, place: Place, admin: Admin) -> None:
    async with open_store(path, synchronous="normal") as store:
        await store.queue("q").enqueue_many({"n": n, "text": "x" * 100} for n in range(20_000))
    seen: list[Progress] = []
    await copy_store(path, place.url, schema=place.schema, progress=seen.append)
    assert [one.rows for one in seen if one.table == "__alkstore_jobs"] == [*range(1_000, 20_001, 1_000), 20_000]


async def test_a_store_that_is_open_is_copied_as_it_is_now(path: str, place: Place) -> None:
    async with open_store(path) as store:
        id = await store.queue("q").enqueue(1)
        await _copy(path, place)
    async with place.open() as store:
        assert await store.get_job(id) is not None


async def test_what_is_not_empty_is_not_touched(path: str, place: Place, admin: Admin) -> None:
    async with open_store(path) as store:
        await store.queue("q").enqueue(1)
    async with place.open() as store:
        await store.schedule("s", "@every 1h", "q")
    error = await fails(StoreError, _copy, path, place)
    assert "not empty" in str(error)
    assert admin.value(f"SELECT count(*) FROM {place.table('jobs')}") == 0
    await fails(StoreError, _copy, path, place)


async def test_a_copy_that_was_cancelled_is_none(path: str, place: Place, admin: Admin) -> None:
    async with open_store(path, synchronous="normal") as store:
        await store.queue("q").enqueue_many(range(5_000))
    with trio.CancelScope() as scope:
        await copy_store(path, place.url, schema=place.schema, progress=lambda _: scope.cancel())
    assert scope.cancelled_caught
    assert admin.value(f"SELECT count(*) FROM {place.table('jobs')}") == 0
    await _copy(path, place)
    assert admin.value(f"SELECT count(*) FROM {place.table('jobs')}") == 5_000


async def test_the_rights_that_an_administrator_is_told_to_give_are_enough(
    path: str, place: Place, admin: Admin, clerk: str
) -> None:
    async with open_store(path) as store:
        await store.queue("q").enqueue(1)
    clerks = Place(as_user(place.server, clerk), place.schema)
    told = await fails(StoreReadOnly, _copy, path, clerks)
    admin.rows(str(told).partition(":\n")[2].replace("USER_OF_THE_STORE", clerk))
    assert (await _copy(path, clerks)).rows["__alkstore_jobs"] == 1
    async with clerks.open() as store:
        assert await store.queue("q").enqueue(2) == 2


# ------------------------------------------------------------------------------------------------ what is no store


async def test_what_is_no_store_is_refused(path: str, place: Place, tmp_path: Path) -> None:
    error = await fails(StoreUnavailable, _copy, str(tmp_path / "not there.db"), place)
    assert "not there.db does not exist" in str(error)
    error = await fails(StoreUnavailable, _copy, str(tmp_path), place)
    assert "is a folder" in str(error)
    text = tmp_path / "text.db"
    text.write_text("no database " * 100)
    damaged = await fails(StoreCorrupt, _copy, str(text), place)
    assert "text.db" in str(damaged)
    assert isinstance(damaged.__cause__, sqlite3.Error)
    await fails(InvalidName, copy_store, path, place.url, schema="")
    await fails(InvalidName, copy_store, path, place.url, schema="x" * 55)
    async with open_store(path):
        pass
    await fails(StoreUnavailable, copy_store, path, "postgresql://nobody@/db?host=/nowhere", schema="s")


OTHERS: dict[str, tuple[type[StoreError], str]] = {
    "": (SchemaMissing, "no tables of alkstore"),
    "CREATE TABLE __alkstore_meta (a)": (StoreForeign, "another program"),
    "CREATE TABLE __alkstore_jobs (a)": (StoreForeign, "another program"),
    "CREATE TABLE __alkstore_meta (key, value); INSERT INTO __alkstore_meta VALUES ('schema_version', 1)": (
        SchemaMissing,
        "open_store first",
    ),
    "CREATE TABLE __alkstore_meta (key, value); INSERT INTO __alkstore_meta VALUES ('schema_version', 99)": (
        SchemaTooNew,
        "upgrade alkstore",
    ),
}


@pytest.mark.parametrize(("script", "expected"), OTHERS.items())
async def test_a_database_without_the_present_tables_is_refused_as_when_it_is_opened(
    path: str, place: Place, script: str, expected: tuple[type[StoreError], str]
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{script}; CREATE TABLE other (a)")
    error = await fails(expected[0], _copy, path, place)
    assert expected[1] in str(error)
    assert path in str(error)


@pytest.mark.parametrize("spoilt", ["CAST(x'ff41' AS TEXT)", "'a' || char(0)"], ids=["no UTF-8", "NUL"])
async def test_a_row_that_cannot_be_stored_is_named(path: str, place: Place, admin: Admin, spoilt: str) -> None:
    async with open_store(path) as store:
        ids = await store.queue("q").enqueue_many([1, 2, 3])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE __alkstore_jobs SET error = {spoilt} WHERE id = {ids[1]}")
        connection.commit()
    error = await fails(StoreCorrupt, _copy, path, place)
    assert f"__alkstore_jobs with id = {ids[1]}" in str(error)
    assert admin.value(f"SELECT count(*) FROM {place.table('jobs')}") == 0


@pytest.fixture
def latin(place: Place, admin: Admin) -> Iterator[Place]:
    """A place in a database that has no room for most of Unicode."""
    name = f"latin_{place.schema}"
    admin.rows(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    yield Place(f"{place.url}&dbname={name}", place.schema)
    admin.rows(f"DROP DATABASE {name} WITH (FORCE)")


async def test_text_that_the_server_cannot_store_is_a_stores_error(path: str, latin: Place) -> None:
    async with open_store(path) as store:
        await store.queue("q").enqueue("日本")
    await fails(StoreError, _copy, path, latin)


async def test_a_damaged_file_is_corrupt_with_the_drivers_error_as_cause(path: str, place: Place) -> None:
    async with open_store(path, synchronous="normal") as store:
        await store.queue("q").enqueue_many("x" * 500 for _ in range(1_000))
    with open(path, "r+b") as file:  # noqa: ASYNC230 - a test
        file.seek(100_000)
        file.write(b"\xee" * 200_000)
    error = await fails(StoreCorrupt, _copy, path, place)
    assert path in str(error)
    assert isinstance(error.__cause__, sqlite3.Error)


# ------------------------------------------------------------------------------------------------------- arguments

SECRET = "s3cr3t"  # noqa: S105 - nobody's

WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "swapped": (f"postgresql://u:{SECRET}@h/d", "app.db", ValueError, "source must be the path of a SQLite file"),
    "no path": (None, "postgresql://h/d", TypeError, "source must be the path of a SQLite file, not NoneType"),
    "bytes": (b"app.db", "postgresql://h/d", TypeError, "source must be the path of a SQLite file, not bytes"),
    "memory": (":memory:", "postgresql://h/d", ValueError, "source must be the path of a SQLite file"),
    "empty": ("", "postgresql://h/d", ValueError, "source must be the path of a SQLite file"),
    "a file's URL": ("file:app.db", "postgresql://h/d", ValueError, "source must be the path of a SQLite file"),
    "no URL": ("app.db", None, TypeError, "url must be the postgresql:// URL of a server, not NoneType"),
    "a second path": ("app.db", Path("b.db"), TypeError, "url must be the postgresql:// URL of a server"),
    "a path as URL": ("app.db", "b.db", ValueError, "url must be the URL of a server"),
    "SQLAlchemy's": ("app.db", f"postgresql+psycopg://u:{SECRET}@h/d", ValueError, "begins with postgresql://"),
    "a DSN": ("app.db", f"host=h password={SECRET}", ValueError, "begins with postgresql://"),
}


@pytest.mark.parametrize(("source", "url", "kind", "text"), WRONG.values(), ids=WRONG)
async def test_a_wrong_argument_is_named_and_no_password_is_shown(
    source: Any, url: Any, kind: type[Exception], text: str
) -> None:
    error = await fails(kind, copy_store, source, url)
    assert text in str(error)
    assert SECRET not in "".join(traceback.format_exception(error))


async def test_progress_is_a_function(path: str) -> None:
    await fails(TypeError, copy_store, path, "postgresql://h/d", progress=1)
