"""PG04: no state of a session, so that a pooler may give each transaction another connection.

Two stores work through a pooler in transaction mode that has a single connection to the server, or a few; and, where
there is a pgbouncer (Debian: ``apt-get install pgbouncer``; or ALKSTORE_TEST_PGBOUNCER, its path), through that too.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from alkstore import Store, StoreError
from alkstore.engines.postgres import connection as connections
from tests.conformance.helpers import fails, fresh, running
from tests.postgres.kit import Place, eventually
from tests.postgres.pooler import open_pooler

PGBOUNCER = os.environ.get("ALKSTORE_TEST_PGBOUNCER") or shutil.which(
    "pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin"
)

INI = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 100
ignore_startup_parameters = application_name,extra_float_digits
logfile = {folder}/log
pidfile = {folder}/pid
"""


POOLERS = [("pooler", 1), ("pooler", 3), *([("pgbouncer", 1), ("pgbouncer", 3)] if PGBOUNCER else [])]


@pytest.fixture(params=POOLERS, ids=lambda param: f"{param[0]} of {param[1]}")
async def pooled(
    request: pytest.FixtureRequest, place: Place, tmp_path: Path, short_folder: Path
) -> AsyncIterator[Place]:
    """The server through a pooler, which has one connection to it for all, or a few."""
    kind, size = request.param
    if kind == "pooler":
        async with open_pooler(short_folder, place.server, size) as pooler:
            yield Place(pooler.url, place.schema)
            assert len(pooler.used) == size
    else:
        with _pgbouncer(place.server, size, tmp_path) as server:
            yield Place(f"{server}?sslmode=prefer", place.schema)


@contextmanager
def _pgbouncer(of_server: str, size: int, folder: Path) -> Iterator[str]:
    info = psycopg.conninfo.conninfo_to_dict(of_server)
    with socket.create_server(("127.0.0.1", 0)) as found:
        listen = found.getsockname()[1]
    folder.chmod(0o777)
    for parent in list(folder.parents)[:-2]:
        parent.chmod(0o755)
    ini = folder / "pgbouncer.ini"
    user = {"user": Path(str(info["host"])).owner()} if os.geteuid() == 0 else {}
    ini.write_text(
        INI.format(
            host=info["host"], port=info.get("port", 5432), user=info["user"], listen=listen, size=size, folder=folder
        )
    )
    process = subprocess.Popen([str(PGBOUNCER), "-q", str(ini)], stderr=subprocess.DEVNULL, **user)  # type: ignore[call-overload]
    server = f"postgresql://{info['user']}@127.0.0.1:{listen}/{info['dbname']}"
    try:
        _wait_for(server)
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait_for(url: str) -> None:
    for _ in range(100):
        with suppress(psycopg.OperationalError):
            psycopg.connect(url, connect_timeout=2).close()
            return
        time.sleep(0.05)
    pytest.fail("pgbouncer does not answer")


async def test_the_pooler_of_these_tests_keeps_no_session(place: Place, short_folder: Path) -> None:
    def talk(url: str) -> list[Any]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 1234")
            found = [connection.execute("SHOW statement_timeout").fetchone() for _ in range(2)]
            with connection.transaction():
                processes = {connection.execute("SELECT pg_backend_pid()").fetchone() for _ in range(5)}
            assert len(processes) == 1
            return found

    async with open_pooler(short_folder, place.server, 2) as pooler:
        other, same = await trio.to_thread.run_sync(talk, pooler.url)
    assert (other, same) == (("0",), ("1234ms",))


async def _use(store: Store) -> None:
    """Everything, more often than psycopg would look at without preparing it."""
    queue = store.queue("q")
    for n in range(12):
        await queue.enqueue(n, key=f"k{n}")
    await queue.enqueue_many(range(30))
    for _ in range(12):
        for handle in await queue.claim("w", 3):
            assert await handle.heartbeat()
            await handle.ack()
    await store.schedule("s", "@every 1h", "q")
    held = await store.lock(fresh("l")).acquire(10)
    assert held is not None
    assert await held.renew()
    assert await held.release()
    for n in range(12):
        async with store.transaction() as tx:
            await tx.execute("SELECT %s::int", (n,))
            await tx.outbox_enqueue("o", n)
    for _ in range(3):
        await store.health()


async def test_two_stores_work_through_a_pooler(pooled: Place) -> None:
    async with pooled.open(listen=False) as a, pooled.open(listen=False) as b, trio.open_nursery() as nursery:
        for store in (a, b, a, b):
            nursery.start_soon(_use, store)


async def test_after_a_failed_transaction_the_connections_are_clean(pooled: Place) -> None:
    async with pooled.open(listen=False) as store:

        async def fail() -> None:
            async with store.transaction() as tx:
                await tx.execute("SELECT 1 / 0")

        for _ in range(20):
            await fails(StoreError, fail)
        await _use(store)


async def test_a_worker_and_its_wake_up_go_through_a_pooler(pooled: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    async def note(handle: Any) -> None:
        done.append(handle.payload)

    async with pooled.open(listen=False) as store, running(store.queue("q").work, note):
        await store.queue("q").enqueue(1)
        await eventually(lambda: done)


async def test_every_setting_is_one_of_the_transaction(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is prepared, declared, locked or listened to for a session; but for who listens, where told to."""
    sent: list[str] = []
    real = connections.connect

    class Watched(psycopg.Connection[Any]):
        def execute(self, query: Any, *args: Any, **options: Any) -> Any:
            sent.append(query.decode() if isinstance(query, bytes) else query)
            return super().execute(query, *args, **options)

    monkeypatch.setattr(psycopg, "Connection", Watched)
    async with place.open(listen=False) as store:
        await _use(store)
        slots = store._context.engine.pool.slots  # type: ignore[attr-defined]
        opened = [slot.connection for slot in slots if slot.connection is not None]
        assert opened
        assert all(connection.prepare_threshold is None for connection in opened)
    assert real is connections.connect
    assert len(sent) > 100
    sent = [message.removeprefix(connections.CHECK) for message in sent]  # it holds to the end of the transaction
    sent = [
        message.removesuffix(connections.RESET) for message in sent if message.startswith(("COMMIT", "ROLLBACK"))
    ] + [message for message in sent if not message.startswith(("COMMIT", "ROLLBACK"))]
    for statement in "; ".join(sent).split(";"):
        text = statement.strip().upper()
        assert not text.startswith(("PREPARE", "DECLARE", "LISTEN", "DISCARD", "CREATE TEMP")), statement
        assert not re.search(r"PG_(TRY_)?ADVISORY_LOCK|SET_CONFIG", text), statement
        if text.startswith(("SET ", "RESET ")):
            assert text.startswith("SET LOCAL "), statement
