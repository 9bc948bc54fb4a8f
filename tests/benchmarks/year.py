"""How long does a year take? `python -m tests.benchmarks.year [--profile]`.

A schedule of ``@every 1h`` and a worker under a Supervisor, in virtual time, in memory, against the least that could do
it: sleep an hour, insert a job, claim it, delete it. Fails if the year takes more than 5 seconds of processor time.
"""

from __future__ import annotations

import cProfile
import pstats
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio
import trio.testing

from actors import Supervisor
from alkstore import StopToken, open_store
from alkstore.clock import TrioClock
from alkstore.job import JobHandle
from alkstore.payload import encode
from alkstore.sql.jobs.enqueueing import INSERT
from alkstore.sql.schema import SQLITE_MIGRATIONS
from tests.benchmarks import bare
from tests.benchmarks.measure import Times, heading, ratio
from tests.benchmarks.worker import CLAIM, DELETE

__all__ = ["main"]

HOUR_S = 3_600
YEAR_H = 365 * 24
ROUNDS = 3
BOUND_S = 5.0


async def by_store() -> int:
    """Live through the year; return how many jobs were done."""
    done = 0

    async def handler(job: JobHandle) -> None:
        nonlocal done
        done += 1

    async with open_store(":memory:", inline=True, clock=TrioClock(), leadership_ttl=86_400) as store:
        await store.schedule("hourly", "@every 1h", "q", bare.PAYLOAD)
        stop = StopToken()
        async with Supervisor(stop) as supervisor:
            await supervisor.start("schedules", store.run_schedules)
            await supervisor.start("worker", partial(store.queue("q").work, handler))
            await trio.sleep(YEAR_H * HOUR_S + 1)
            stop.stop()
    return done


async def by_hand() -> int:
    """The same year without a store."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for version in sorted(SQLITE_MIGRATIONS):
        connection.executescript(SQLITE_MIGRATIONS[version])
    done = 0
    for _ in range(YEAR_H):
        await trio.sleep(HOUR_S)
        connection.execute(INSERT, bare.row(encode(bare.PAYLOAD))).fetchall()
        ((id, fence, _),) = connection.execute(CLAIM, {"now": bare.START}).fetchall()
        done += len(connection.execute(DELETE, {"id": id, "fence": fence, "now": bare.START}).fetchall())
    connection.close()
    return done


def _seconds(life: Callable[[], Awaitable[int]]) -> float:
    began = time.process_time()  # one thread that never waits: what other programs take is not its own
    done = trio.run(life, clock=trio.testing.MockClock(autojump_threshold=0))
    took = time.process_time() - began
    assert done == YEAR_H, done
    return took


def _profile() -> None:
    profile = cProfile.Profile()
    profile.enable()
    trio.run(by_store, clock=trio.testing.MockClock(autojump_threshold=0))
    profile.disable()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(40)


def main() -> int:
    if "--profile" in sys.argv:
        _profile()
        return 0
    heading("a year of @every 1h with a worker, in virtual time")
    taken = [(_seconds(by_store), _seconds(by_hand)) for _ in range(ROUNDS)]
    store, hand = (Times(seconds) for seconds in zip(*taken, strict=True))
    best = min(store.rounds)
    rounds = ", ".join(f"{seconds:.2f}" for seconds in store.rounds)
    print(f"{best:.2f} s of processor time at best ({rounds}); by hand {hand.median:.2f} s")
    print(f"{store.each(YEAR_H).shown()} a boundary, x {ratio(store, hand)[1]}")
    print("PASS" if best <= BOUND_S else f"FAIL: more than {BOUND_S:g} s")
    return 0 if best <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
