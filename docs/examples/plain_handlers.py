"""A handler that is a plain function: it runs in a thread of its worker, and looks whether it should stop.

    python docs/examples/plain_handlers.py [file]

A thread cannot be cancelled. One that does not look is left behind after the grace, and its job to its lease.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import trio

from actors import StopToken
from alkstore import JobHandle, Snooze, open_store


def count_slowly(job: JobHandle) -> None:
    for _ in range(job.payload["steps"]):
        if job.cancelled:  # the worker is stopping, or the job is not ours any more
            print("interrupted: the job goes back, with its attempt")
            raise Snooze(0)
        time.sleep(0.05)
    print(f"counted to {job.payload['steps']}")


async def main(path: str) -> None:
    stop = StopToken()
    async with open_store(path) as store:
        queue = store.queue("counting")
        short = await queue.enqueue({"steps": 3}, priority=1)
        long = await queue.enqueue({"steps": 1_000_000})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(queue.work, count_slowly, stop=stop, grace=10))
            await trio.sleep(0.5)
            stop.stop()

        print(f"the short one: {await queue.get_job(short)}")  # None: done, and so deleted
        job = await queue.get_job(long)
        assert job is not None
        print(f"the long one: {job.state}, attempts used: {job.attempt}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else ":memory:")
