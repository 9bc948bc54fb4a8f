"""A year of an hourly schedule, tested in seconds: trio's clock jumps whenever everybody is waiting for it.

    python -m pytest docs/examples/test_year.py

The fixture `alkstore_store` comes with alkstore, and needs pytest-trio.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial

import trio

from actors import StopToken, Supervisor
from alkstore import JobHandle, Store
from alkstore.testing import drain

HOUR, YEAR = timedelta(hours=1), timedelta(days=365)


async def test_a_year_of_hours(alkstore_store: Store) -> None:
    handled: Counter[str] = Counter()

    async def tidy_up(job: JobHandle) -> None:
        assert job.boundary is not None
        handled[job.boundary.isoformat()] += 1

    tidying = alkstore_store.queue("tidying")
    first = (await alkstore_store.schedule("tidy", "@every 1h", "tidying")).next_fire_at
    stop = StopToken()
    async with Supervisor(stop) as supervisor:
        await supervisor.start("worker", partial(tidying.work, tidy_up))
        await supervisor.start("schedules", alkstore_store.run_schedules)
        await trio.sleep(YEAR.total_seconds())
        await drain(alkstore_store)  # the last boundary is at this very moment: let it fire, and be handled
        stop.stop()

    schedule = await alkstore_store.schedule("tidy", "@every 1h", "tidying")  # registered again, it says how it stands
    assert (schedule.fired_total, schedule.skipped_total) == (8_760, 0)
    assert len(handled) == 8_760
    assert set(handled.values()) == {1}  # no boundary twice
    assert max(handled) == (first - HOUR + YEAR).isoformat()
