"""A worker process: handles the jobs of a queue until it is told to end, then drains.

    python docs/examples/worker_process.py jobs.db

Start as many as you like on one file. SIGTERM and Ctrl-C: it takes nothing more, finishes what it has begun and ends;
a second one of the same kind interrupts it. `enqueue.py` gives it something to do.
"""

from __future__ import annotations

import sys
from functools import partial

import trio

from actors import StopToken, Supervisor
from alkstore import Discard, JobHandle, open_store


async def resize(job: JobHandle) -> None:
    if not job.payload["image"].endswith(".png"):
        raise Discard("not a PNG image")  # a dead letter at once: trying again would not help
    await trio.sleep(0.1)  # the work
    print(f"resized {job.payload['image']}", flush=True)


async def main(path: str) -> None:
    stop = StopToken()
    async with open_store(path) as store, Supervisor(stop) as supervisor:
        # The first to start is the last to be stopped: it still hears a second signal while the others drain.
        await supervisor.start("signals", stop.stop_on_signals)
        await supervisor.start("images", partial(store.queue("images").work, resize, concurrency=2, grace=10))
        print("working", flush=True)
    print("drained", flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "jobs.db")
