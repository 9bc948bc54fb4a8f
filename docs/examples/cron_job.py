"""A task and two triggers on one file, run for some seconds: every occurrence becomes a run that the file remembers.

    python docs/examples/cron_job.py [file] [seconds]

Run it again: what was published is still there, and the runs are numbered on. Ctrl-C ends it earlier, in order.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import trio

from actors import StopToken, Supervisor
from alkstore import open_store
from alkstore.cron import STANDALONE, RetryPolicy, RunHandle, preview


async def make_report(run: RunHandle) -> None:
    print(f"run {run.run.id}: {run.args['kind']} report for {run.scheduled_for:%H:%M:%S} UTC, attempt {run.attempt}")
    if run.attempt == 1 and run.scheduled_for is not None and run.scheduled_for.second % 4 == 0:
        raise RuntimeError("no database today")


async def main(path: str, seconds: float) -> None:
    logging.getLogger("alkstore.worker").setLevel(logging.ERROR)  # the failure above is meant: no traceback of it
    stop = StopToken()
    async with open_store(path) as store:
        cron = store.cron
        # Publishing the same definition again changes nothing: a program publishes at each start.
        await cron.publish_task("report", call="make_report", args={"kind": "short"}, retry=RetryPolicy(1, backoff=0.1))
        await cron.publish_task("disk", command=["df", "-h", "/"], timeout=60)
        await cron.publish_trigger("report", task="report", expression="*/2 * * * * *", timezone="Europe/Berlin")
        await cron.publish_trigger("disk", task="disk", expression="0 6 * * MON-FRI", timezone="Europe/Berlin")
        print(f"the next disk report: {preview('0 6 * * MON-FRI', 'Europe/Berlin', count=1)[0]:%A at %H:%M %Z}")
        disk = await cron.run_now("disk")  # made now, and run as soon as somebody runs cron

        # Nothing is decided or run by itself: `cron.run` does both, and here a supervisor runs it.
        async with Supervisor(stop) as supervisor:
            await supervisor.start("signals", stop.stop_on_signals)
            await supervisor.start("cron", partial(cron.run, {"make_report": make_report}, STANDALONE, grace=5))
            with stop.intake():  # sleeps, unless a signal comes first
                await trio.sleep(seconds)
            stop.stop()

        for run in await cron.runs("report", after=disk.id):
            kinds = [event.kind.removeprefix("run.") for event in await cron.events(run.id)]
            print(f"run {run.id}: {', '.join(kinds)}")
        if (over := await cron.get_run(disk.id)) is not None:
            print(f"run {over.id}: {over.state}, exit code {over.exit_code}\n{over.output}", end="")


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "cron_job.db"
    trio.run(main, path, float(sys.argv[2]) if len(sys.argv) > 2 else 6.5)
