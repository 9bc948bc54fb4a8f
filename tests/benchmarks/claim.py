"""Is a claim as cheap beside 200,000 other jobs as it is alone? Fails if one takes more than 1.5 times as long.

`python -m tests.benchmarks.claim` measures a claim of one job

- as the function `alkstore.sql.jobs.claim` in an open transaction that is rolled back,
- through `Queue.claim` on a file, in the trio thread (``inline``) and through the store's own thread,

with ``synchronous="normal"``, so that the disk's flush does not hide what the claim costs.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import trio

from alkstore import open_store
from alkstore.engines.driver import Connection, StdlibDriver
from alkstore.engines.units import SQLiteTx
from alkstore.queue import Queue
from alkstore.sql import jobs
from alkstore.sql.jobs import claiming
from tests.benchmarks import bare
from tests.benchmarks.measure import Times, heading, ratio, take_turns

__all__ = ["main"]

OTHERS = 200_000
OURS = 2_000
"""Jobs there are to be claimed, at the lowest priority: all others come first in the order."""
ROUNDS = 300
BOUND = 1.5

INSERT = """
INSERT INTO __alkstore_jobs (queue, state, priority, run_at, parked, expires_at, attempt, max_attempts, visibility,
  backoff, payload, created_at, worker, lease, lease_end, reason, died_at)
VALUES (?, ?, ?, ?, ?, ?, ?, 3, 300000, 5000, '{"to":"alice@example.com","n":1}', ?, ?, ?, ?, ?, ?)"""

HOUR = 3_600_000

ALONE = "alone"
EXPIRED = "expired, at a higher priority"
ARRIVED = "delayed, and due by now"

Other = tuple[object, ...]


def _ready(now: int, priority: int, run_at: int, expires_at: int | None = None, queue: str = "q") -> Other:
    return (queue, 0, priority, run_at, int(run_at > now), expires_at, 0, now, None, None, None, None, None)


def _others(kind: str, now: int) -> Iterator[Other]:
    for i in range(OTHERS):
        match kind:
            case "pending":
                yield _ready(now, -100, now - 1_000 + i % 7)
            case "pending in another queue":
                yield _ready(now, 0, now - 1_000, queue="r")
            case "delayed, at a higher priority":
                yield _ready(now, 10, now + HOUR + i)
            case "delayed, over 200 priorities":
                yield _ready(now, -99 + i % 200, now + HOUR + i)
            case "leased":
                yield ("q", 1, 0, now - 5, 0, None, 1, now, "somebody", HOUR, now + HOUR + i, None, None)
            case "dead":
                yield ("q", 2, 0, now - 5, 0, None, 3, now, None, None, None, "failed", now)
            case _ if kind == EXPIRED:
                yield _ready(now, 10, now - HOUR, now - 1_000)
            case _ if kind == ARRIVED:
                yield ("q", 0, -100, now - HOUR + i % 7, 1, None, 0, now, None, None, None, None, None)


KINDS = (
    "pending",
    "pending in another queue",
    "delayed, at a higher priority",
    "delayed, over 200 priorities",
    "leased",
    "dead",
    EXPIRED,
    ARRIVED,
)
"""What the others are. A claim beside them may take at most `BOUND` times as long as one beside nothing."""


def _fill(path: Path, kind: str) -> None:
    connection = bare.connect(path, "off")
    now = time.time_ns() // 1_000_000
    connection.execute("BEGIN").fetchall()
    connection.executemany(INSERT, _others(kind, now))
    connection.executemany(INSERT, (_ready(now, -100, now - HOUR) for _ in range(OURS)))
    connection.execute("COMMIT").fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


async def _in_a_transaction(connection: Connection) -> float:
    connection.all("BEGIN IMMEDIATE")
    tx = SQLiteTx(connection, time.time_ns() // 1_000_000)
    began = time.perf_counter()
    claimed = jobs.claim(tx, "q", "w", 1, None)
    took = time.perf_counter() - began
    connection.all("ROLLBACK")
    assert len(claimed.jobs) == 1
    return took


async def _end_to_end(queue: Queue) -> float:
    began = time.perf_counter()
    claimed = await queue.claim("w")
    took = time.perf_counter() - began
    assert len(claimed) == 1
    return took


def _work_off(connection: Connection, what: str) -> None:
    """Claim until no row is left for which `what` is true, and print what these claims took."""
    took = []
    while connection.all(f"SELECT 1 FROM __alkstore_jobs WHERE state = 0 AND {what} LIMIT 1"):
        connection.all("BEGIN IMMEDIATE")
        tx = SQLiteTx(connection, time.time_ns() // 1_000_000)
        began = time.perf_counter()
        jobs.claim(tx, "q", "w", 1, None)
        took.append(time.perf_counter() - began)
        connection.all("COMMIT")
    print(f"{len(took)} claims; median {Times(took).median * 1e3:.1f} ms, worst {max(took) * 1e3:.1f} ms")


def _judge(title: str, times: dict[str, Times]) -> bool:
    heading(title)
    print(f"{ALONE:31} {times[ALONE].shown()}")
    passed = True
    for kind in KINDS:
        found, shown = ratio(times[kind], times[ALONE])
        verdict = "PASS" if found <= BOUND else f"FAIL: more than {BOUND}"
        print(f"{kind:31} {times[kind].shown():36} x {shown:22} {verdict}")
        passed &= found <= BOUND
    return passed


async def measure(folder: Path) -> bool:
    """Measure everything in files below `folder`; return whether all ratios are within the bound."""
    paths = {kind: folder / f"{number}.db" for number, kind in enumerate((ALONE, *KINDS))}
    for kind, path in paths.items():
        _fill(path, kind)

    connections = {kind: StdlibDriver().connect(str(path)) for kind, path in paths.items()}
    for connection in connections.values():
        connection.all("PRAGMA synchronous = normal")
    heading(f"claims that bury {OTHERS:,} expired jobs on their way (at most {claiming.BURIED_PER_CLAIM:,} each)")
    _work_off(connections[EXPIRED], "expires_at IS NOT NULL")
    heading(f"claims that find {OTHERS:,} delayed jobs due at once (at most {claiming.UNPARKED_PER_CLAIM:,} each)")
    _work_off(connections[ARRIVED], "parked = 1")

    cases: dict[str, Callable[[], Awaitable[float]]]
    cases = {kind: partial(_in_a_transaction, connection) for kind, connection in connections.items()}
    passed = _judge("claim in a transaction", await take_turns(ROUNDS, cases))
    for connection in connections.values():
        connection.close()

    for inline in (True, False):
        async with AsyncExitStack() as stack:
            cases = {}
            for kind, path in paths.items():
                store = await stack.enter_async_context(open_store(path, inline=inline, synchronous="normal"))
                cases[kind] = partial(_end_to_end, store.queue("q"))
            times = await take_turns(ROUNDS, cases)
        passed &= _judge(f"Queue.claim on a file, {'inline' if inline else 'in the store’s thread'}", times)
    return passed


def main() -> int:
    print(f"SQLite {sqlite3.sqlite_version}; {OTHERS:,} other jobs; medians of {ROUNDS} rounds (and 10 % … 90 %)")
    with tempfile.TemporaryDirectory() as folder:
        return 0 if trio.run(measure, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
