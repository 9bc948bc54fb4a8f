"""A schedule, a worker and a supervisor on one file: the whole life of a store in some seconds.

    python docs/examples/main_job.py [file] [seconds]

Run it again and it goes on where it was: the file remembers. Ctrl-C ends it earlier, in the same orderly way.
"""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial

import trio

from actors import StopToken, Subscription, Supervisor
from alkstore import Event, JobHandle, open_store


async def main(path: str, seconds: float) -> None:
    stop = StopToken()
    fired = skipped = handled = 0

    async def tell(events: Subscription[Event]) -> None:
        nonlocal fired, skipped
        async for event in events:
            if event.kind == "fired":
                fired += event.details["count"]
                print(f"fired: {event.details['count']} x {event.subject!r}, up to {clock(event.details['last'])}")
            elif event.kind == "skipped":
                skipped += event.details["count"]
                print(f"skipped: {event.details['count']} boundaries, more than is caught up with")

    async def greet(job: JobHandle) -> None:
        nonlocal handled
        handled += 1
        assert job.boundary is not None
        print(f"handled: job {job.id}, {job.payload['text']!r} of {clock(job.boundary)}")

    async with trio.open_nursery() as nursery, open_store(path) as store:
        print(f"opened: {path}")
        nursery.start_soon(tell, store.events())  # ends by itself, when the store has closed

        greetings = store.queue("greetings")
        schedule = await store.schedule("greet", "@every 1s", "greetings", {"text": "hello"})
        print(f"registered: schedule {schedule.name!r}, {schedule.spec}, next at {clock(schedule.next_fire_at)}")
        if schedule.fired_total:
            print(f"continuing: {schedule.fired_total} fired before, {schedule.skipped_total} skipped")

        # Nothing fires by itself: `store.run_schedules` fires, and here a supervisor runs it.
        async with Supervisor(stop) as supervisor:
            await supervisor.start("signals", stop.stop_on_signals)
            await supervisor.start("worker", partial(greetings.work, greet, concurrency=4))
            await supervisor.start("schedules", store.run_schedules)
            with stop.intake():  # sleeps, unless a signal comes first
                await trio.sleep(seconds)
            print("stopping: told to by a signal" if stop.stopped else "stopping: the time is over")
            stop.stop()

        left = await greetings.counts()
    print(f"totals: {fired} boundaries fired, {skipped} skipped, {handled} jobs handled, {left.ready} left for later")
    print(f"stopped: cleanly; start it again on {path}, and it continues")


def clock(moment: datetime) -> str:
    return f"{moment:%H:%M:%S} UTC"


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "main_job.db"
    trio.run(main, path, float(sys.argv[2]) if len(sys.argv) > 2 else 6.5)
