"""A year of cron triggers in Europe/Berlin, over both changes of the clock, and a week in which nothing ran.

    python -m pytest docs/examples/test_cron_year.py

The fixture `alkstore_store` comes with alkstore, and needs pytest-trio. Time is virtual, from 2026-01-01 00:00 UTC on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

from actors import StopToken, Supervisor
from alkstore import Store
from alkstore.cron import STANDALONE, RunHandle
from alkstore.testing import pass_time

DAY, WEEK, YEAR = timedelta(days=1), timedelta(weeks=1), timedelta(days=365)


@asynccontextmanager
async def running(store: Store, ran: Counter[str]) -> AsyncIterator[None]:
    """Run cron beside the body, and count for each trigger how often its task ran."""

    async def report(run: RunHandle) -> None:
        assert run.run.trigger is not None
        ran[run.run.trigger] += 1

    stop = StopToken()
    async with Supervisor(stop) as supervisor:
        await supervisor.start("cron", partial(store.cron.run, {"report": report}, STANDALONE))
        yield
        stop.stop()


async def test_a_year_in_berlin(alkstore_store: Store) -> None:
    cron = alkstore_store.cron
    await cron.publish_task("report", call="report")
    for trigger, expression in {
        "nightly": "30 2 * * *",  # on 29 March this time does not exist, on 25 October it comes twice
        "the short day": "15 * 29 3 *",
        "the long day": "15 * 25 10 *",
    }.items():
        await cron.publish_trigger(trigger, task="report", expression=expression, timezone="Europe/Berlin")

    ran: Counter[str] = Counter()
    async with running(alkstore_store, ran):
        await pass_time(YEAR.total_seconds())

    assert ran == {"nightly": 365, "the short day": 23, "the long day": 25}
    nightly = [run for run in await cron.runs(limit=1_000) if run.trigger == "nightly"]
    shown = [f"{run.in_zone(run.scheduled_for):%d.%m. %H:%M %Z}" for run in nightly if run.scheduled_for]
    assert [moment for moment in shown if "02:30" not in moment] == ["29.03. 03:00 CEST"]  # the end of the gap
    assert [moment for moment in shown if moment.startswith("25.10.")] == ["25.10. 02:30 CEST"]  # once, the first time


async def test_a_week_in_which_nothing_ran(alkstore_store: Store) -> None:
    cron = alkstore_store.cron
    await cron.publish_task("report", call="report")
    every_hour = partial(cron.publish_trigger, task="report", expression="30 * * * *", timezone="Europe/Berlin")
    await every_hour("gives up", misfire="skip")
    await every_hour("makes up", misfire="fire_once")

    ran: Counter[str] = Counter()
    async with running(alkstore_store, ran):
        await pass_time(DAY.total_seconds())
    assert ran == {"gives up": 24, "makes up": 24}

    await pass_time(WEEK.total_seconds())
    async with running(alkstore_store, ran):
        await pass_time(0)
        assert ran == {"gives up": 24, "makes up": 25}  # of 168 missed occurrences none, and one: the oldest
        await pass_time(DAY.total_seconds())
    assert ran == {"gives up": 48, "makes up": 49}

    gives_up, makes_up = await cron.triggers()
    assert (gives_up.skipped_total, makes_up.skipped_total) == (1, 0)  # one decision, however many were missed
