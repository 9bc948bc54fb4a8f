"""How many jobs a second does `Queue.work` do when they cost nothing? `python -m tests.benchmarks.worker`.

Against a loop over sqlite3 by hand that claims a job and deletes it, a commit each: no leases to renew, no dead
letters, no other process to watch for.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from alkstore import StopToken, open_store
from alkstore.job import JobHandle
from alkstore.payload import decode, encode
from alkstore.queue import Queue
from alkstore.sql.jobs.enqueueing import INSERT
from tests.benchmarks import bare
from tests.benchmarks.measure import heading, ratio, take_turns

__all__ = ["main"]

CONCURRENCY = (1, 10, 100)
EACH_ROUND = 300
ROUNDS = 15

CLAIM = """
UPDATE __alkstore_jobs SET state = 1, attempt = attempt + 1, fence = fence + 1, worker = 'w', lease = visibility,
  lease_end = :now + visibility
WHERE id = (SELECT id FROM __alkstore_jobs WHERE queue = 'q' AND state = 0 AND run_at <= :now
            ORDER BY priority DESC, run_at, id LIMIT 1)
RETURNING id, fence, payload"""

DELETE = "DELETE FROM __alkstore_jobs WHERE id = :id AND fence = :fence AND state = 1 AND lease_end > :now RETURNING id"


async def _by_worker(queue: Queue, concurrency: int) -> float:
    await queue.enqueue_many([bare.PAYLOAD] * EACH_ROUND)
    stop, left = StopToken(), EACH_ROUND

    async def handler(job: JobHandle) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            stop.stop()

    began = time.perf_counter()
    await queue.work(handler, concurrency=concurrency, stop=stop)
    took = time.perf_counter() - began
    assert left == 0
    return took


async def _by_hand(connection: sqlite3.Connection) -> float:
    connection.execute("BEGIN IMMEDIATE").fetchall()
    connection.executemany(INSERT.replace("RETURNING id", ""), [bare.row(encode(bare.PAYLOAD))] * EACH_ROUND)
    connection.execute("COMMIT").fetchall()
    done = 0
    began = time.perf_counter()
    while True:  # outside of BEGIN each statement is a transaction
        claimed = connection.execute(CLAIM, {"now": time.time_ns() // 1_000_000}).fetchall()
        if not claimed:
            break
        ((id, fence, payload),) = claimed
        decode(payload)
        now = time.time_ns() // 1_000_000
        done += len(connection.execute(DELETE, {"id": id, "fence": fence, "now": now}).fetchall())
    took = time.perf_counter() - began
    assert done == EACH_ROUND
    return took


async def measure(folder: Path, synchronous: str) -> None:
    """Measure in files in `folder`."""
    connection = bare.connect(folder / f"bare-{synchronous}.db", synchronous)
    async with open_store(folder / f"store-{synchronous}.db", synchronous=synchronous) as store:
        times = await take_turns(
            ROUNDS,
            {
                **{str(slots): partial(_by_worker, store.queue("q"), slots) for slots in CONCURRENCY},
                "by hand": partial(_by_hand, connection),
            },
        )
    connection.close()
    one = {case: taken.each(EACH_ROUND) for case, taken in times.items()}
    heading(f'a job from claim to ack, synchronous="{synchronous}"')
    print(f"sqlite3 by hand {one['by hand'].rate()} {one['by hand'].shown()}")
    for slots in CONCURRENCY:
        taken = one[str(slots)]
        print(f"concurrency {slots:3} {taken.rate()} {taken.shown():36} x {ratio(taken, one['by hand'])[1]}")


def main() -> int:
    for synchronous in ("full", "normal"):
        with tempfile.TemporaryDirectory() as folder:
            trio.run(measure, Path(folder), synchronous)
    return 0


if __name__ == "__main__":
    sys.exit(main())
