"""The smallest whole program: a queue, a schedule and a supervisor. Ctrl-C or SIGTERM ends it in good order.

    python docs/examples/first.py

Everything it does is in ``app.db``; what was not done when it ended is done when it starts again.
"""

from __future__ import annotations

from functools import partial

import trio

from actors import StopToken, Supervisor
from alkstore import JobHandle, open_store


async def send_email(job: JobHandle) -> None:
    print(f"to {job.payload['to']}: attempt {job.attempt} of {job.max_attempts}", flush=True)


async def main() -> None:
    stop = StopToken()
    async with open_store("app.db") as store:
        emails = store.queue("emails")
        await emails.enqueue({"to": "alice@example.com"})
        await store.schedule("digest", "@every 15m", "emails", {"to": "everybody@example.com"})

        async with Supervisor(stop) as supervisor:
            await supervisor.start("signals", stop.stop_on_signals)
            await supervisor.start("emails", partial(emails.work, send_email, concurrency=20))
            await supervisor.start("schedules", store.run_schedules)  # without it nothing would fire


if __name__ == "__main__":
    trio.run(main)
