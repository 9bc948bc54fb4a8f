"""How soon does an idle worker start on a job? `python -m tests.benchmarks.wake`.

From the moment at which `enqueue` has returned, so that the job is committed, to the first line of the handler: with
the worker in the same process, and in another one.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from alkstore import StopToken, open_store
from alkstore.job import JobHandle
from alkstore.queue import Queue
from tests.benchmarks.measure import heading, quantile

__all__ = ["main"]

JOBS = 200
QUIET_S = (0.020, 0.060)
"""The worker has been idle for this long, at random, when the next job comes."""


async def _enqueue_now_and_then(queue: Queue) -> list[int]:
    """When each of the jobs was committed, by the clock that all processes of a machine share."""
    committed = []
    for number in range(JOBS):
        await trio.sleep(random.uniform(*QUIET_S))  # noqa: S311 - nobody is to be kept from guessing it
        await queue.enqueue(number)
        committed.append(time.monotonic_ns())
    return committed


async def in_one_process(path: Path) -> list[float]:
    """Return the latencies in seconds with the worker in this process."""
    started = [0] * JOBS
    stop = StopToken()

    async def handler(job: JobHandle) -> None:
        started[job.payload] = time.monotonic_ns()
        if job.payload == JOBS - 1:
            stop.stop()

    async with open_store(path) as store, trio.open_nursery() as nursery:

        async def work() -> None:
            await store.queue("q").work(handler, stop=stop)

        nursery.start_soon(work)
        committed = await _enqueue_now_and_then(store.queue("q"))
    return [(start - end) / 1e9 for start, end in zip(started, committed, strict=True)]


async def across_processes(path: Path) -> list[float]:
    """Return the latencies in seconds with the worker in a process of its own."""
    async with open_store(path) as store, trio.open_nursery() as nursery:
        command = [sys.executable, "-m", "tests.benchmarks.wake", str(path)]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        worker: trio.Process = await nursery.start(partial(trio.run_process, command, **options))
        assert worker.stdout is not None
        output = bytearray()
        while b"\n" not in output:  # it says when it is ready
            output += await worker.stdout.receive_some()
        committed = await _enqueue_now_and_then(store.queue("q"))
        async for part in worker.stdout:
            output += part
    lines = [line.split() for line in output.decode().splitlines()[1:]]
    started = {int(number): int(moment) for number, moment in lines}
    return [(started[number] - end) / 1e9 for number, end in enumerate(committed)]


async def _work_alone(path: str) -> None:
    """The other process: print when each handler starts."""
    stop = StopToken()
    lines: list[str] = []

    async def handler(job: JobHandle) -> None:
        lines.append(f"{job.payload} {time.monotonic_ns()}")
        if job.payload == JOBS - 1:
            stop.stop()

    async with open_store(path) as store:
        print("ready", flush=True)
        await store.queue("q").work(handler, stop=stop)
    print("\n".join(lines), flush=True)


def main() -> int:
    heading(f"from the commit of an enqueue to the handler of an idle worker, {JOBS} jobs")
    for title, measured in (("same process", in_one_process), ("across processes", across_processes)):
        with tempfile.TemporaryDirectory() as folder:
            latencies = trio.run(measured, Path(folder) / "wake.db")
        shown = (f"p{share:g} {quantile(latencies, share / 100) * 1e3:6.2f} ms" for share in (10, 50, 90, 99))
        print(f"{title:17} {'  '.join(shown)}  worst {max(latencies) * 1e3:.2f} ms")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(_work_alone, sys.argv[1])
        sys.exit()
    sys.exit(main())
