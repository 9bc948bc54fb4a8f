"""Opening: each thing that can be wrong with a file has its own error, and a refused file stays as it is."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio

from alkstore import open_store
from alkstore.engines import migrate as migrate_module
from alkstore.engines import sqlite as engine_module
from alkstore.engines.driver import load_driver
from alkstore.errors import (
    MixedSQLite,
    SchemaMissing,
    SchemaTooNew,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from alkstore.sql.schema import INDEXES, SQLITE_MIGRATIONS, TABLES, VERSION
from tests.alkstore.engines.enginekit import (
    Spied,
    engine_of,
    file_bytes,
    open_files,
)

pytestmark = pytest.mark.parametrize("driver", ["sqlite3", "apsw"])


async def opens(path: Path | str, **options: Any) -> None:
    """Open the store, use it, and close it."""
    async with open_store(path, **options) as store:
        id = await store.queue("q").enqueue("hello")
        job = await store.get_job(id)
        assert job is not None
        assert job.payload == "hello"


async def refused(path: Path, kind: type[StoreError], match: str, **options: Any) -> StoreError:
    """Opening fails with `kind`, and nothing in the folder has changed or is left open."""
    before = file_bytes(path) if path.parent.is_dir() else None
    with pytest.raises(kind, match=match) as caught:
        async with open_store(path, **options):
            pass
    assert type(caught.value) is kind
    assert open_files(path) == []
    if before is not None:
        assert file_bytes(path) == before
    return caught.value


def sqlite_file(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in statements:
            connection.execute(statement)


# ------------------------------------------------------------------------------------------- what can be opened


@pytest.mark.parametrize("inline", [False, True])
async def test_a_new_file_an_empty_one_and_the_same_again(tmp_path: Path, driver: str, inline: bool) -> None:
    new, empty = tmp_path / "new.db", tmp_path / "empty.db"
    empty.touch()
    for path in (new, empty, new, empty):
        await opens(path, driver=driver, inline=inline)
    for path in (new, empty):
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT count(*) FROM __alkstore_jobs").fetchone() == (2,)


@pytest.mark.parametrize("name", ["with space.db", "umläut ☃.db", "per%20cent?mode=ro#.db", "no suffix", "file:a.db"])
async def test_a_name_is_a_name(tmp_path: Path, driver: str, name: str) -> None:
    await opens(tmp_path / name, driver=driver)
    assert name in os.listdir(tmp_path)


async def test_a_relative_path_and_one_through_a_link(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await opens("a.db", driver=driver)
    (tmp_path / "link.db").symlink_to("a.db")
    await opens("link.db", driver=driver)
    with closing(sqlite3.connect("a.db")) as other:
        assert other.execute("SELECT count(*) FROM __alkstore_jobs").fetchone() == (2,)


async def test_the_log_of_a_file_behind_a_link_is_watched(tmp_path: Path, driver: str) -> None:
    """SQLite keeps it beside the file, not beside the link."""
    (tmp_path / "link.db").symlink_to("a.db")
    async with open_store(tmp_path / "link.db", driver=driver) as store:
        await store.queue("q").enqueue(1)
        health = await store.health()
        assert health.wal_bytes > 0
        assert health.feed == ("inotify" if sys.platform.startswith("linux") else "polling")
        os.unlink(tmp_path / "a.db-wal")
        with pytest.raises(MixedSQLite):
            await store.queue("q").enqueue(1)


async def test_the_working_directory_may_change(tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is where it was when it was opened, also when the connection is made anew."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    async with open_store("a.db", driver=driver) as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        await store.queue("q").enqueue(1)
        engine_of(store).writer._reopen = True
        await store.queue("q").enqueue(2)
        assert (await store.queue("q").counts()).ready == 2
        assert (await store.health()).wal_bytes > 0
    assert os.listdir(tmp_path / "elsewhere") == []


async def test_the_database_of_an_embedder_keeps_what_is_its_own(tmp_path: Path, driver: str) -> None:
    """Its tables, its rows, its user_version and its application_id."""
    path = tmp_path / "app.db"
    sqlite_file(
        path,
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)",
        "CREATE INDEX orders_total ON orders (total)",
        "CREATE TABLE alkstore_jobs (mine TEXT)",
        "CREATE VIEW big AS SELECT * FROM orders WHERE total > 10",
        "INSERT INTO orders (total) VALUES (5), (42)",
        "PRAGMA user_version = 77",
        "PRAGMA application_id = 1234567",
    )
    own = "name NOT LIKE 'sqlite%' AND name NOT GLOB '__alkstore_*'"
    schema = f"SELECT type, name, sql FROM sqlite_master WHERE {own}"
    with closing(sqlite3.connect(path)) as other:
        before = other.execute(schema).fetchall()
    for _ in range(2):
        await opens(path, driver=driver)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute(schema).fetchall() == before
        assert other.execute("SELECT total FROM orders").fetchall() == [(5,), (42,)]
        assert other.execute("PRAGMA user_version").fetchone() == (77,)
        assert other.execute("PRAGMA application_id").fetchone() == (1234567,)


async def test_wal_mode_is_set_and_stays(tmp_path: Path, driver: str) -> None:
    path = tmp_path / "a.db"
    sqlite_file(path, "CREATE TABLE t (x)")
    await opens(path, driver=driver)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await opens(path, driver=driver)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(("synchronous", "number"), [("full", 2), ("normal", 1)])
async def test_commits_are_as_durable_as_was_asked(tmp_path: Path, driver: str, synchronous: str, number: int) -> None:
    async with open_store(tmp_path / "a.db", driver=driver, synchronous=synchronous) as store:
        assert engine_of(store).writer.connection.all("PRAGMA synchronous") == [(number,)]


async def test_only_one_connection_can_write(tmp_path: Path, driver: str) -> None:
    async with open_store(tmp_path / "a.db", driver=driver) as store:
        engine = engine_of(store)
        assert engine._watcher is not None
        for connection in (engine._reader, engine._watcher):
            with pytest.raises(StoreReadOnly):
                connection.all("DELETE FROM __alkstore_jobs")


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
async def test_a_database_in_another_encoding(tmp_path: Path, driver: str, encoding: str) -> None:
    path = tmp_path / "a.db"
    sqlite_file(path, f"PRAGMA encoding = '{encoding}'", "CREATE TABLE t (x)")
    await opens(path, driver=driver)


async def test_stores_that_open_a_new_file_at_once_all_open_it(tmp_path: Path, driver: str) -> None:
    """D02, within one process; the schema is made once."""
    for n in range(5):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(lambda n=n: opens(tmp_path / f"{n}.db", driver=driver))  # type: ignore[misc]


async def test_opening_waits_for_who_writes_and_gives_up_in_time(tmp_path: Path, driver: str) -> None:
    path = tmp_path / "a.db"
    await opens(path, driver=driver)
    holder = load_driver(driver).connect(str(path))
    try:
        holder.all("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy) as caught:
            await opens(path, driver=driver, busy_timeout=0.1)
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError if driver == "sqlite3" else apsw.BusyError)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: opens(path, driver=driver))
            await trio.sleep(0.1)
            holder.all("COMMIT")
    finally:
        holder.close()


# -------------------------------------------------------------------------------------------- what is not SQLite


@pytest.mark.parametrize(
    "content",
    [
        b"Dear diary,\n" * 1000,
        b"\0" * 4096,
        b"xy",
        b"SQLite format 3\0" + b"\xff" * 4080,
        b"PK\x03\x04" + bytes(2000),
        random.Random(1).randbytes(100_000),  # noqa: S311
    ],
    ids=["text", "zeros", "two bytes", "header only", "zip", "random"],
)
@pytest.mark.parametrize("create", [True, False])
async def test_what_is_not_a_database_is_corrupt(tmp_path: Path, driver: str, content: bytes, create: bool) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(content)
    failure = await refused(path, StoreCorrupt, "damaged, or not a SQLite database", driver=driver, create=create)
    assert isinstance(failure.__cause__, sqlite3.DatabaseError if driver == "sqlite3" else apsw.Error)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good store."""
    path = tmp_path_factory.mktemp("whole") / "a.db"

    async def main() -> None:
        async with open_store(path) as store:
            await store.queue("q").enqueue_many([{"n": n, "pad": "x" * 500} for n in range(200)])
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    trio.run(main)
    return path.read_bytes()


async def opens_and_reads_all(path: Path, driver: str) -> None:
    async with open_store(path, driver=driver) as store:
        await store.queue("q").counts()
        await store.queue("q").claim("w", 200)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
async def test_a_truncated_file_is_corrupt(tmp_path: Path, driver: str, whole: bytes, kept: float) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(StoreCorrupt, match="damaged"):
        await opens_and_reads_all(path, driver)
    assert open_files(path) == []


async def test_damage_is_told_as_damage_and_never_as_anything_else(tmp_path: Path, driver: str, whole: bytes) -> None:
    """Bytes are overwritten at random: a store that opens and works is fine, one that does not says StoreCorrupt."""
    rng = random.Random(7)  # noqa: S311
    outcomes = set()
    for n in range(25):
        path = tmp_path / f"{n}.db"
        damaged = bytearray(whole)
        start = rng.choice([0, 0, rng.randrange(len(damaged) - 600)])
        damaged[start : start + 512] = rng.randbytes(512)
        path.write_bytes(damaged)
        try:
            async with open_store(path, driver=driver) as store:
                await store.queue("q").counts()
                for job in await store.queue("q").claim("w", 5):
                    assert await job.ack()
            outcomes.add("works")
        except StoreCorrupt:
            outcomes.add("corrupt")
        except (StoreForeign, SchemaMissing, SchemaTooNew):
            outcomes.add("other tables")  # the damage has hit the names
        assert open_files(path) == []
    assert "corrupt" in outcomes


# --------------------------------------------------------------------------------------------- whose tables


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE __alkstore_jobs (id INTEGER PRIMARY KEY, mine TEXT)"],
        ["CREATE TABLE __alkstore_meta (k TEXT, v TEXT)"],
        ["CREATE TABLE __alkstore_meta (key TEXT PRIMARY KEY, value)"],
        ["CREATE TABLE __alkstore_meta (key, value)", "INSERT INTO __alkstore_meta VALUES ('schema_version', 'new')"],
        ["CREATE TABLE __alkstore_meta (key, value)", "INSERT INTO __alkstore_meta VALUES ('schema_version', NULL)"],
        ["CREATE TABLE __alkstore_meta (key, value)", "INSERT INTO __alkstore_meta VALUES ('schema_version', 0)"],
        ["CREATE TABLE __alkstore_meta (key, value)", "INSERT INTO __alkstore_meta VALUES ('schema_version', -3)"],
        ["CREATE TABLE __alkstore_meta (key, value)", "INSERT INTO __alkstore_meta VALUES ('schema_version', 1.5)"],
        ["CREATE VIEW __alkstore_meta AS SELECT 'schema_version' AS key, 1 AS value"],
        ["CREATE TABLE __ALKSTORE_Jobs (x)"],
        ["CREATE TABLE t (x)", "CREATE INDEX __alkstore_jobs_ready ON t (x)"],
    ],
)
async def test_tables_of_another_program_are_foreign_and_stay_as_they_are(
    tmp_path: Path, driver: str, statements: list[str]
) -> None:
    path = tmp_path / "a.db"
    sqlite_file(path, "CREATE TABLE orders (x)", *statements)
    await refused(path, StoreForeign, "another program", driver=driver)
    await refused(path, StoreForeign, "another program", driver=driver, create=False, migrate=False)


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_one_table_with_other_columns_is_foreign(tmp_path: Path, driver: str, table: str, mode: str) -> None:
    """In a file that is not in WAL mode, that stays as it is too."""
    path = tmp_path / "a.db"
    made(path, mode)
    sqlite_file(path, f"ALTER TABLE {table} ADD COLUMN theirs TEXT")
    await refused(path, StoreForeign, "another program|another program's", driver=driver)


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_newer_schema_is_left_alone(tmp_path: Path, driver: str, mode: str) -> None:
    path = tmp_path / "a.db"
    made(path, mode)
    sqlite_file(path, f"UPDATE __alkstore_meta SET value = {VERSION + 1} WHERE key = 'schema_version'")
    await refused(path, SchemaTooNew, f"version {VERSION + 1}.*upgrade alkstore", driver=driver)
    sqlite_file(path, "DROP TABLE __alkstore_jobs")
    await refused(path, SchemaTooNew, "upgrade", driver=driver)


@pytest.mark.parametrize("index", sorted(INDEXES))
async def test_a_missing_index_is_named(tmp_path: Path, driver: str, index: str) -> None:
    path = tmp_path / "a.db"
    made(path, "delete")
    sqlite_file(path, f"DROP INDEX {index}")
    await refused(path, SchemaMissing, f"it lacks {index}", driver=driver)


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"__alkstore_meta"}))
async def test_a_missing_table_is_named(tmp_path: Path, driver: str, table: str) -> None:
    path = tmp_path / "a.db"
    made(path, "delete")
    sqlite_file(path, "PRAGMA foreign_keys = OFF", f"DROP TABLE {table}")
    await refused(path, SchemaMissing, f"lacks .*{table}", driver=driver)


def made(path: Path, mode: str, *, permissions: tuple[int, int] | None = None) -> None:
    """A store's file, closed, in this journal mode; with the `permissions` of the file and its folder."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = OFF")
        for version in sorted(SQLITE_MIGRATIONS):
            connection.executescript(f"BEGIN; {SQLITE_MIGRATIONS[version]}; COMMIT;")
        connection.execute("INSERT INTO __alkstore_meta (key, value) VALUES ('schema_version', ?)", (VERSION,))
    assert not Path(f"{path}-wal").exists()
    if permissions is not None:
        path.chmod(permissions[0])
        path.parent.chmod(permissions[1])


# ---------------------------------------------------------------------------------------------- what is forbidden


async def test_create_false_makes_nothing(tmp_path: Path, driver: str) -> None:
    path = tmp_path / "a.db"
    await refused(path, SchemaMissing, "does not exist, and create=False", driver=driver, create=False)
    path.touch()
    await refused(path, SchemaMissing, "has no tables of alkstore, and create=False", driver=driver, create=False)
    sqlite_file(path, "CREATE TABLE orders (x)")
    await refused(path, SchemaMissing, "has no tables of alkstore", driver=driver, create=False, migrate=True)
    await opens(path, driver=driver)
    await opens(path, driver=driver, create=False, migrate=False)


async def test_migrate_false_leaves_an_old_schema(tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    made(path, "delete")
    newer = VERSION + 1
    monkeypatch.setattr(migrate_module, "VERSION", newer)
    monkeypatch.setattr(engine_module, "VERSION", newer)
    monkeypatch.setitem(SQLITE_MIGRATIONS, newer, "CREATE TABLE __alkstore_new (x INTEGER) STRICT;")
    what = f"has schema version {VERSION}, and migrate=False forbids making version {newer}"
    await refused(path, SchemaMissing, what, driver=driver, migrate=False)
    await refused(path, SchemaMissing, what, driver=driver, create=False, migrate=False)
    await opens(path, driver=driver, create=False)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM __alkstore_new").fetchone() == (0,)
        assert other.execute("SELECT value FROM __alkstore_meta WHERE key = 'schema_version'").fetchone() == (newer,)


async def test_a_migration_that_fails_leaves_the_old_schema(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    made(path, "wal")
    newer = VERSION + 1
    with monkeypatch.context() as patched:
        patched.setattr(migrate_module, "VERSION", newer)
        patched.setattr(engine_module, "VERSION", newer)
        patched.setitem(SQLITE_MIGRATIONS, newer, "CREATE TABLE __alkstore_new (x); CREATE TABLE __alkstore_jobs (x);")
        with pytest.raises(StoreError, match="already exists"):
            async with open_store(path, driver=driver):
                pass
    assert open_files(path) == []
    await opens(path, driver=driver)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM sqlite_master WHERE name = '__alkstore_new'").fetchone() == (0,)


# ---------------------------------------------------------------------------------------------- where it lies


async def test_a_folder_is_not_a_store(tmp_path: Path, driver: str) -> None:
    folder = tmp_path / "folder.db"
    folder.mkdir()
    with pytest.raises(StoreUnavailable, match="is a folder"):
        async with open_store(folder, driver=driver):
            pass
    assert os.listdir(folder) == []


@pytest.mark.parametrize("below", ["missing/a.db", "file/a.db", "missing/deeper/a.db"])
async def test_a_folder_that_is_not_there_is_named(tmp_path: Path, driver: str, below: str) -> None:
    (tmp_path / "file").touch()
    await refused(tmp_path / below, StoreUnavailable, "the folder .* does not exist", driver=driver)
    await refused(tmp_path / below, StoreUnavailable, "the folder .* does not exist", driver=driver, create=False)
    assert os.listdir(tmp_path) == ["file"]


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be a user whom permissions bind; root is not bound by any."""
    if os.geteuid() != 0:
        yield
        return
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


@pytest.mark.parametrize("inline", [False, True])
async def test_a_file_that_this_user_cannot_write_is_read_only(public_folder: Path, driver: str, inline: bool) -> None:
    path = public_folder / "a.db"
    made(path, "delete", permissions=(0o444, 0o777))
    with unprivileged():
        await refused(path, StoreReadOnly, "is not writable", driver=driver, inline=inline)
    assert os.listdir(public_folder) == ["a.db"]


@pytest.mark.parametrize("inline", [False, True])
async def test_a_folder_that_this_user_cannot_write_is_read_only(
    public_folder: Path, driver: str, inline: bool
) -> None:
    """SQLite keeps its log beside the file."""
    path = public_folder / "a.db"
    made(path, "delete", permissions=(0o666, 0o555))
    with unprivileged():
        await refused(path, StoreReadOnly, "is not writable", driver=driver, inline=inline)
        new = public_folder / "new.db"
        await refused(new, StoreReadOnly, "cannot be made: the folder .* is not writable", driver=driver, inline=inline)
    assert os.listdir(public_folder) == ["a.db"]


async def test_what_access_does_not_tell_the_driver_does(
    public_folder: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that answers wrongly: then it is SQLite that finds out, and the error is the same."""
    path = public_folder / "a.db"
    made(path, "delete", permissions=(0o444, 0o777))
    monkeypatch.setattr(os, "access", lambda *_: True)
    with unprivileged():
        failure = await refused(path, StoreReadOnly, "cannot be written", driver=driver)
    assert isinstance(failure.__cause__, sqlite3.OperationalError if driver == "sqlite3" else apsw.ReadOnlyError)


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", str(path)], check=False, capture_output=True).returncode:
        pytest.skip("this file system or this user cannot make a file immutable")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


async def test_an_immutable_file_is_read_only_for_root_too(public_folder: Path, driver: str) -> None:
    path = public_folder / "a.db"
    made(path, "delete")
    with immutable(path):
        await refused(path, StoreReadOnly, "is not writable", driver=driver)


async def test_a_file_that_cannot_be_read_is_an_error_of_ours(public_folder: Path, driver: str) -> None:
    path = public_folder / "a.db"
    made(path, "delete", permissions=(0o000, 0o777))
    with unprivileged(), pytest.raises((StoreReadOnly, StoreUnavailable)):
        async with open_store(path, driver=driver):
            pass
    assert stat.S_IMODE(path.stat().st_mode) == 0


# ---------------------------------------------------------------------------------------------- where is no room


async def test_a_disk_that_is_full_while_the_tables_are_made(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is left without tables, and can be opened when there is room."""
    path = tmp_path / "a.db"
    sqlite_file(path, "CREATE TABLE orders (x)", "INSERT INTO orders VALUES (1)")
    connect = engine_module.SQLiteEngine._connect

    def limited(self: Any, connections: Any) -> Any:
        connection = connect(self, connections)
        connection.all("PRAGMA max_page_count = 6")
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(engine_module.SQLiteEngine, "_connect", limited)
        with pytest.raises(StoreFull, match="full") as caught:
            async with open_store(path, driver=driver):
                pass
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError if driver == "sqlite3" else apsw.FullError)
    assert open_files(path) == []
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("orders",)]
    await opens(path, driver=driver)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT x FROM orders").fetchall() == [(1,)]


# ---------------------------------------------------------------------------------------- at any point, any failure


async def test_whichever_statement_of_opening_fails_nothing_is_left_open_and_the_next_opening_works(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = engine_module.SQLiteEngine._connect
    descriptors = len(os.listdir("/proc/self/fd"))
    ended = False
    at = 0
    while not ended:
        at += 1
        path = tmp_path / f"{at}.db"
        seen = 0

        def counting(sql: str) -> None:
            nonlocal seen
            seen += 1
            if seen == at:  # noqa: B023 - called in this round only
                raise StoreFull("the disk is full")

        def spied(self: Any, connections: Any) -> Any:
            connection = Spied(connect(self, connections), counting)
            connections[-1] = connection
            return connection

        with monkeypatch.context() as patched:
            patched.setattr(engine_module.SQLiteEngine, "_connect", spied)
            try:
                async with open_store(path, driver=driver):
                    ended = seen < at
                    seen = at
            except StoreFull:
                pass
        assert open_files(path) == []
        assert len(os.listdir("/proc/self/fd")) == descriptors
        if at % 5 == 0 or ended:
            await opens(path, driver=driver)
    assert at > 10
