"""Rows that other hands have spoiled, and clocks that were set back, as the whole store meets them."""

from __future__ import annotations

import pytest
import trio

from alkstore import ManualClock, Store
from alkstore.cron import STANDALONE
from tests.conformance.cronning import once, publish, run, trigger, until_over
from tests.conformance.helpers import START, OpenStore, running, sql

NO_UTF8 = "CAST(x'22ff22' AS TEXT)"


async def handled(store: Store, count: int) -> list[object]:
    """Work until `count` payloads of ``q`` have come."""
    seen: list[object] = []
    enough = trio.Event()

    async def handle(job: object) -> None:
        seen.append(job.payload)  # type: ignore[attr-defined]
        if len(seen) == count:
            enough.set()

    async with running(store.queue("q").work, handle):
        with trio.fail_after(60):
            await enough.wait()
    return seen


async def spoil_job(store: Store, id: int, text: str) -> None:
    await sql(store, f"UPDATE __alkstore_jobs SET payload = {text} WHERE id = :id", id=id)


async def test_a_worker_passes_by_a_job_that_is_no_json(store: Store) -> None:
    bad, *_ = await store.queue("q").enqueue_many(["bad", "good", "better"])
    await spoil_job(store, bad, "'no json'")
    assert await handled(store, 2) == ["good", "better"]
    found = await store.get_job(bad)
    assert found is not None
    assert (found.state, found.reason, found.payload) == ("dead", "failed", None)


@pytest.mark.parametrize("open_with", ["sqlite3", "apsw"])
async def test_a_worker_passes_by_a_job_that_is_no_utf8(open_embedded_store: OpenStore, open_with: str) -> None:
    if open_with == "apsw":
        pytest.importorskip("apsw")
    async with open_embedded_store(driver=open_with) as store:
        bad, *_ = await store.queue("q").enqueue_many(["bad", "good", "better"])
        await spoil_job(store, bad, NO_UTF8)
        assert await handled(store, 2) == ["good", "better"]
        assert [job.id for job in await store.queue("q").dead()] == [bad]


@pytest.mark.parametrize("column", ["name", "spec", "queue", "payload"])
async def test_a_schedule_that_is_no_utf8_stops_no_other(
    embedded_stepped: Store, clock: ManualClock, column: str
) -> None:
    for name in ("a", "bad", "c"):
        await embedded_stepped.schedule(name, "@every 60s", "q", name)
    await sql(embedded_stepped, f"UPDATE __alkstore_scheduler_tasks SET {column} = {NO_UTF8} WHERE name = 'bad'")
    clock.advance(60)
    async with running(embedded_stepped.run_schedules):
        assert sorted(map(str, await handled(embedded_stepped, 2))) == ["a", "c"]
    assert len((await embedded_stepped.health()).schedules.broken) == 1


async def test_a_trigger_that_is_no_utf8_stops_no_other(embedded_stepped: Store, clock: ManualClock) -> None:
    for name in ("a", "b", "c"):
        await publish(embedded_stepped, name)
    await once(embedded_stepped)
    await sql(embedded_stepped, f"UPDATE __alkstore_cron_trigger_revisions SET definition = {NO_UTF8} WHERE id = 'b'")
    clock.advance(60)
    assert await once(embedded_stepped) == {"admitted": 2, "failed": 1}
    assert "utf-8" in str((await trigger(embedded_stepped, "b")).error)


@pytest.mark.parametrize("definition", ["{", "{}", "null"])
async def test_a_run_that_cannot_be_read_fails_and_the_next_one_runs(store: Store, definition: str) -> None:
    for task in ("t", "u"):
        await store.cron.publish_task(task, call="h")
    bad, good = (await store.cron.run_now("t")).id, (await store.cron.run_now("u")).id
    spoil = "UPDATE __alkstore_cron_task_revisions SET definition = :spoiled WHERE id = 't'"
    await sql(store, spoil, spoiled=definition)

    async def handle(_: object) -> None:
        pass

    async with running(store.cron.run, {"h": handle}, STANDALONE):
        await until_over(store, good)
    assert [(await run(store, id)).state for id in (bad, good)] == ["failed", "succeeded"]


async def test_an_edit_and_a_clock_set_back_give_no_occurrence_a_second_run(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression="*/10 * * * *", misfire="fire_once")
    for _ in range(10):
        clock.advance(600)
        await once(stepped)
    await stepped.cron.publish_task("t", call="h", args=2, expected_revision=1)
    clock.advance(-3_600)
    for _ in range(15):
        await once(stepped)
        clock.advance(600)
    runs = [one.scheduled_for for one in await stepped.cron.runs()]
    assert len(runs) == len(set(runs))
    assert len(runs) > 10, "and it goes on where the clock had been"


# ------------------------------------------------------------------------------- one step, seen by many stores


@pytest.fixture
def clocks() -> list[ManualClock]:
    return [ManualClock(START), ManualClock(START)]


@pytest.mark.parametrize("how", ["delayed", "snoozed", "retried"])
async def test_what_waits_since_a_step_is_not_made_due_by_who_notices_it_later(
    open_embedded_file_store: OpenStore, clocks: list[ManualClock], how: str
) -> None:
    async with (
        open_embedded_file_store(clock=clocks[0]) as first,
        open_embedded_file_store(clock=clocks[1]) as second,
    ):
        queue = first.queue("q")
        id = await queue.enqueue("old")
        await second.queue("other").enqueue("warm")
        for clock in clocks:
            clock.advance(-3_600)
        (job,) = await queue.claim("w")
        if how == "delayed":
            await job.ack()
            id = await queue.enqueue("new", delay=600)
        elif how == "snoozed":
            await job.snooze(600)
        else:
            await job.retry(delay=600)
        await second.queue("other").enqueue("notices")
        assert await queue.claim("w") == []
        found = await first.get_job(id)
        assert found is not None
        assert found.state == "delayed"


async def test_each_of_two_steps_is_repaired_by_who_notices_it_first(
    open_embedded_file_store: OpenStore, clocks: list[ManualClock]
) -> None:
    async with (
        open_embedded_file_store(clock=clocks[0]) as first,
        open_embedded_file_store(clock=clocks[1]) as second,
    ):
        stores = [first, second]
        for store, other in (stores, stores[::-1]):
            await store.queue("q").enqueue("delayed", delay=60)
            for clock in clocks:
                clock.advance(61)
            await other.queue("other").enqueue("seen")
            await store.queue("other").enqueue("seen")
            for clock in clocks:
                clock.advance(-3_600)
            (job,) = await store.queue("q").claim("w")
            await job.ack()
            await other.queue("other").enqueue("notices")


async def test_what_was_snoozed_since_a_step_is_not_made_due_by_who_opens_the_store_later(
    open_embedded_file_store: OpenStore, clock: ManualClock
) -> None:
    async with open_embedded_file_store(clock=clock) as store:
        id = await store.queue("q").enqueue("old")
        clock.advance(-3_600)
        (job,) = await store.queue("q").claim("w")
        await job.snooze(600)
    async with open_embedded_file_store(clock=clock) as store:
        found = await store.get_job(id)
        assert found is not None
        assert found.state == "delayed"
