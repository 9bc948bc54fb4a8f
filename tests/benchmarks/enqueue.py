"""What does the store add to an INSERT, and what does group commit save? `python -m tests.benchmarks.enqueue`.

The same rows go into the same tables by the standard library's sqlite3: one commit for each, and one for as many as
there are tasks, which is what group commit can reach at best.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from alkstore import open_store
from alkstore.payload import encode
from alkstore.queue import Queue
from alkstore.sql.jobs.enqueueing import INSERT
from tests.benchmarks import bare
from tests.benchmarks.measure import heading, ratio, take_turns

__all__ = ["main"]

TASKS = (1, 10, 100)
EACH_ROUND = 200
ROUNDS = 15
MANY = 10_000
MANY_ROUNDS = 9


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE").fetchall()
    yield
    connection.execute("COMMIT").fetchall()


async def _by_store(queue: Queue, tasks: int) -> float:
    async def some() -> None:
        for _ in range(EACH_ROUND // tasks):
            await queue.enqueue(bare.PAYLOAD)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(some)
    return time.perf_counter() - began


async def _by_hand(connection: sqlite3.Connection, together: int) -> float:
    began = time.perf_counter()
    for _ in range(EACH_ROUND // together):
        with _transaction(connection):
            for _ in range(together):
                connection.execute(INSERT, bare.row(encode(bare.PAYLOAD))).fetchall()
    return time.perf_counter() - began


async def _many_by_store(queue: Queue) -> float:
    payloads = [bare.PAYLOAD] * MANY
    began = time.perf_counter()
    await queue.enqueue_many(payloads)
    return time.perf_counter() - began


async def _many_by_hand(connection: sqlite3.Connection) -> float:
    payloads = [bare.PAYLOAD] * MANY
    began = time.perf_counter()
    with _transaction(connection):
        connection.executemany(INSERT.replace("RETURNING id", ""), [bare.row(encode(payload)) for payload in payloads])
    return time.perf_counter() - began


async def measure(folder: Path, synchronous: str) -> None:
    """Measure single enqueues from several tasks at once, and `enqueue_many`, in files in `folder`."""
    connection = bare.connect(folder / f"bare-{synchronous}.db", synchronous)
    async with open_store(folder / f"store-{synchronous}.db", synchronous=synchronous) as store:
        queue = store.queue("q")
        heading(f'enqueue, synchronous="{synchronous}": how long one takes, and how often that of sqlite3 by hand')
        for tasks in TASKS:
            times = await take_turns(
                ROUNDS,
                {
                    "store": partial(_by_store, queue, tasks),
                    "one commit each": partial(_by_hand, connection, 1),
                    "one commit per group": partial(_by_hand, connection, tasks),
                },
            )
            one = {case: taken.each(EACH_ROUND) for case, taken in times.items()}
            print(
                f"{tasks:4} tasks {one['store'].rate()} {one['store'].shown()}\n"
                f"      x {ratio(one['store'], one['one commit each'])[1]:22} one commit each  "
                f"{one['one commit each'].shown()}\n"
                f"      x {ratio(one['store'], one['one commit per group'])[1]:22} one per {tasks:3}      "
                f"{one['one commit per group'].shown()}"
            )
        times = await take_turns(
            MANY_ROUNDS,
            {"store": partial(_many_by_store, queue), "executemany": partial(_many_by_hand, connection)},
        )
        one = {case: taken.each(MANY) for case, taken in times.items()}
        print(
            f"enqueue_many({MANY:,}): {one['store'].shown()} a job\n"
            f"      x {ratio(one['store'], one['executemany'])[1]:22} executemany      {one['executemany'].shown()}"
        )
    connection.close()


def main() -> int:
    for synchronous in ("full", "normal"):
        with tempfile.TemporaryDirectory() as folder:
            trio.run(measure, Path(folder), synchronous)
    return 0


if __name__ == "__main__":
    sys.exit(main())
