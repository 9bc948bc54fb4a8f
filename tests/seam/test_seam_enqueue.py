"""Enqueue through the embedder's own connection: it shares the fate of what he writes there."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import Any

import apsw
import pytest

from alkstore import InvalidName, InvalidPayload, Job, ManualClock, ReservedName, open_store, seam
from tests.seam.embedders import Embedder, Kind

NOW = 1_800_000_000_000


async def jobs(path: str, kind: Kind, queue: str = "q") -> list[Job]:
    async with open_store(path, inline=True, driver=kind.driver, clock=ManualClock(NOW)) as store:
        return [*await store.queue(queue).list(), *await store.queue(queue).list("delayed")]


# -------------------------------------------------------------------------------------------------- its transaction


async def test_it_is_committed_with_the_embedders_row(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    id = seam.enqueue(embedder.conn, "q", {"n": 1})
    embedder.commit()
    assert [(job.id, job.payload) for job in await jobs(path, kind)] == [(id, {"n": 1})]
    assert embedder.execute("SELECT total FROM orders") == [(42,)]


async def test_it_is_rolled_back_with_the_embedders_row(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    seam.enqueue(embedder.conn, "q", {"n": 1})
    embedder.rollback()
    assert await jobs(path, kind) == []
    assert embedder.execute("SELECT total FROM orders") == []


async def test_it_may_come_before_the_embedders_row(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    seam.enqueue(embedder.conn, "q", 1)
    embedder.order()
    embedder.rollback()
    assert await jobs(path, kind) == []
    assert embedder.execute("SELECT total FROM orders") == []


async def test_it_shares_the_fate_of_a_savepoint(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order(1)
    embedder.execute("SAVEPOINT s")
    seam.enqueue(embedder.conn, "q", "undone")
    embedder.execute("ROLLBACK TO s")
    seam.enqueue(embedder.conn, "q", "kept")
    embedder.execute("RELEASE s")
    embedder.commit()
    assert [job.payload for job in await jobs(path, kind)] == ["kept"]


async def test_nobody_sees_it_before_the_commit(embedder: Embedder, path: str, kind: Kind) -> None:
    async with open_store(path, inline=True, driver=kind.driver) as store:
        embedder.begin()
        embedder.order()
        id = seam.enqueue(embedder.conn, "q", 1)
        assert await store.get_job(id) is None
        embedder.commit()
        assert await store.get_job(id) is not None


async def test_without_a_transaction_it_is_committed_as_any_statement_of_the_connection(
    embedder: Embedder, path: str, kind: Kind
) -> None:
    seam.enqueue(embedder.conn, "q", 1)
    found = await jobs(path, kind) if kind.commits_alone else []
    assert len(found) == kind.commits_alone
    if not kind.commits_alone:
        embedder.commit()
        assert len(await jobs(path, kind)) == 1


async def test_the_connection_is_as_usable_as_before(embedder: Embedder, path: str, kind: Kind) -> None:
    for n in range(3):
        embedder.begin()
        embedder.order(n)
        seam.enqueue(embedder.conn, "q", n, key="same")
        embedder.execute("SELECT * FROM orders")
        embedder.commit()
    assert embedder.execute("SELECT total FROM orders") == [(0,), (1,), (2,)]
    embedder.close()
    assert [job.payload for job in await jobs(path, kind)] == [0]


# -------------------------------------------------------------------------------------------- as through the store


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {
        "visibility": 10,
        "max_attempts": 7,
        "backoff": 2,
        "priority": -5,
        "delay": 30,
        "expires": 60,
        "key": "k",
        "headers": {"trace": "t"},
    },
    "a moment": {"run_at": datetime(2027, 1, 16, tzinfo=UTC)},
    "lengths of time": {"delay": timedelta(minutes=1), "visibility": timedelta(hours=1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_the_job_is_the_one_that_the_store_would_have_made(
    embedder: Embedder, path: str, kind: Kind, options: dict[str, Any]
) -> None:
    payload = {"text": "grüße \U0001f600 \0", "big": 2**80, "list": [None, True, 1.5]}
    embedder.begin()
    embedder.order()
    seam.enqueue(embedder.conn, "seam", payload, now=NOW, **options)
    embedder.commit()
    async with open_store(path, inline=True, driver=kind.driver, clock=ManualClock(NOW)) as store:
        await store.transact(lambda tx: tx.enqueue("store", payload, **options))
        async with store.transaction() as tx:
            columns = [name for _, name, *_ in await tx.execute("SELECT * FROM pragma_table_info('__alkstore_jobs')")]
            compared = ", ".join(name for name in columns if name not in ("id", "queue"))
            row = f"SELECT {compared} FROM __alkstore_jobs WHERE queue = ?"
            by_seam, by_store = await tx.execute(row, ("seam",)), await tx.execute(row, ("store",))
    assert by_seam == by_store != []


@pytest.mark.parametrize("now", [NOW, datetime(2027, 1, 15, 8, tzinfo=UTC)], ids=["ms", "datetime"])
async def test_now_is_what_it_is_told(embedder: Embedder, path: str, kind: Kind, now: Any) -> None:
    embedder.begin()
    embedder.order()
    seam.enqueue(embedder.conn, "q", 1, now=now, delay=1)
    embedder.commit()
    (job,) = await jobs(path, kind)
    assert job.created_at == datetime(2027, 1, 15, 8, tzinfo=UTC)
    assert job.run_at == datetime(2027, 1, 15, 8, 0, 1, tzinfo=UTC)


async def test_now_is_the_machines_clock_if_it_is_not_told(embedder: Embedder, path: str, kind: Kind) -> None:
    before = datetime.now(UTC)
    embedder.begin()
    embedder.order()
    seam.enqueue(embedder.conn, "q", 1)
    embedder.commit()
    async with open_store(path, inline=True, driver=kind.driver) as store:
        (job,) = await store.queue("q").list()
    assert before - timedelta(seconds=1) <= job.created_at <= datetime.now(UTC)


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "the outbox's queue": ({"queue": "__alkstore_outbox:o"}, ReservedName, "queue"),
    "in capitals": ({"queue": "__ALKSTORE_x"}, ReservedName, "queue"),
    "a blank queue": ({"queue": " "}, InvalidName, "queue"),
    "NUL": ({"queue": "a\0"}, InvalidName, "queue"),
    "too long": ({"queue": "x" * 10_000}, InvalidName, "queue"),
    "payload": ({"payload": {"a": {1}}}, InvalidPayload, "a"),
    "headers": ({"headers": [1]}, InvalidPayload, "headers"),
    "key": ({"key": ""}, InvalidName, "key"),
    "priority": ({"priority": 101}, ValueError, "priority"),
    "delay": ({"delay": -1}, ValueError, "delay"),
    "delay and run_at": ({"delay": 1, "run_at": datetime.now(UTC)}, ValueError, "not both"),
    "naive run_at": ({"run_at": datetime(2027, 1, 1)}, ValueError, "run_at"),
    "visibility": ({"visibility": 0}, ValueError, "visibility"),
    "max_attempts": ({"max_attempts": True}, TypeError, "max_attempts"),
    "backoff": ({"backoff": 3_601}, ValueError, "backoff"),
    "expires": ({"expires": "1"}, TypeError, "expires"),
    "now": ({"now": -1}, ValueError, "now"),
    "naive now": ({"now": datetime(2027, 1, 1)}, ValueError, "now"),
}


@pytest.mark.parametrize(("arguments", "error", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    embedder: Embedder, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    embedder.begin()
    embedder.order()
    with pytest.raises(error, match=text):
        seam.enqueue(embedder.conn, **{"queue": "q", "payload": 1, **arguments})
    embedder.commit()
    assert embedder.execute("SELECT count(*) FROM __alkstore_jobs") == [(0,)]
    assert embedder.execute("SELECT total FROM orders") == [(42,)]


# ------------------------------------------------------------------------------------------------------------ keys


async def test_a_key_gives_the_id_of_the_live_job(embedder: Embedder, path: str, kind: Kind) -> None:
    async with open_store(path, inline=True, driver=kind.driver) as store:
        id = await store.queue("q").enqueue("first", key="k")
    embedder.begin()
    embedder.order()
    assert seam.enqueue(embedder.conn, "q", "second", key="k") == id
    assert seam.enqueue(embedder.conn, "other", "second", key="k") != id
    embedder.commit()
    assert [job.payload for job in await jobs(path, kind)] == ["first"]


async def test_a_key_is_free_again_once_its_job_is_acknowledged(embedder: Embedder, path: str, kind: Kind) -> None:
    async with open_store(path, inline=True, driver=kind.driver) as store:
        await store.queue("q").enqueue("first", key="k")
        (handle,) = await store.queue("q").claim("w")
        await handle.ack()
    embedder.begin()
    seam.enqueue(embedder.conn, "q", "second", key="k")
    embedder.commit()
    assert [job.payload for job in await jobs(path, kind)] == ["second"]


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_without_transactions_two_connections_that_race_for_a_key_get_one_job(path: str, driver: str) -> None:
    """A transaction has the lock from its first write on; single statements of two connections can alternate."""
    raced: list[int] = []

    def be_faster(sql: str) -> None:
        if sql.lstrip().startswith("INSERT INTO __alkstore_jobs") and not raced:  # it has looked for the key already
            raced.append(seam.enqueue(other, "q", "faster", key="k"))

    def traced(_: object, sql: str, __: object) -> bool:
        be_faster(sql)
        return True

    slow: Any
    other: Any
    if driver == "sqlite3":
        slow, other = sqlite3.connect(path, isolation_level=None), sqlite3.connect(path, isolation_level=None)
        slow.set_trace_callback(be_faster)
    else:
        slow, other = apsw.Connection(path), apsw.Connection(path)
        slow.exec_trace = traced
    assert seam.enqueue(slow, "q", "slower", key="k") == raced[0]
    assert list(other.execute("SELECT payload FROM __alkstore_jobs")) == [('"faster"',)]
    slow.close()
    other.close()
