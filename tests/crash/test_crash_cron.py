"""Cron runs whose schedulers race, are killed at every point of an admission, and whose runners die."""

from __future__ import annotations

import time
from functools import partial

import pytest
import trio
from attrs import evolve

from alkstore import StopToken, open_store
from alkstore.cron import STANDALONE, Profile, RetryPolicy, RunHandle
from alkstore.sql.cron import runs
from tests.crash.child import Talk, fork
from tests.crash.clocks import SharedClock
from tests.crash.harness import WITHIN_S, Processes, execute, go, pause_between_writes, rows, until_rows
from tests.crash.watching import Fault, watch

WIDE = Profile(page=256, period=0.1, grace=300, stop_within=10, starts=4)

EVERY_YEAR = "0 0 1 1 *"
"""Due when a test says so, and not again before the year is over."""

MAKE_DUE = "UPDATE __alkstore_cron_schedules SET next_fire_at = :due, moved_at = :due"
CURSORS = "SELECT trigger, next_fire_at, last_scheduled_at, state_version FROM __alkstore_cron_schedules"
STATES = "SELECT state FROM __alkstore_cron_runs"
KINDS = "SELECT kind FROM __alkstore_cron_events ORDER BY id"

NOTHING_TWICE = """
SELECT run.id,
  (SELECT count(*) FROM __alkstore_cron_attempts WHERE run = run.id) AS attempts,
  (SELECT count(*) FROM __alkstore_cron_events WHERE run = run.id) AS events,
  (SELECT count(*) FROM __alkstore_jobs WHERE id = run.job) AS jobs
FROM __alkstore_cron_runs AS run WHERE attempts <> 1 OR events <> 2 OR jobs <> 1"""
"""Runs that were admitted, and not exactly once."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def publish(path: str, *triggers: str, misfire: str = "fire_once", retry: RetryPolicy | None = None) -> None:
    """Publish a task that calls ``h``, and triggers of it whose cursor is set."""
    async with open_store(path) as store:
        await store.cron.publish_task("t", call="h", retry=retry)
        for trigger in triggers:
            await store.cron.publish_trigger(
                trigger,
                task="t",
                expression=EVERY_YEAR,
                timezone="UTC",
                misfire=misfire,  # type: ignore[arg-type]
            )
        await store.cron.schedule_once(WIDE)


# ------------------------------------------------------------------------------------------------ two schedulers


async def scheduler(talk: Talk, path: str, page: int) -> None:
    async with open_store(path, synchronous="normal") as store:
        talk.say("open")
        await talk.hear("look")
        await talk.barrier()
        scanned = admitted = raced = 0
        while (summary := await store.cron.schedule_once(evolve(WIDE, page=page))).scanned:
            scanned += summary.scanned
            admitted += summary.admitted
            raced += summary.raced
        talk.say("over", scanned=scanned, admitted=admitted, raced=raced)


@pytest.mark.parametrize("page", [256, 10])
async def test_two_processes_admit_200_due_triggers_once_each(processes: Processes, path: str, page: int) -> None:
    triggers = [f"g{n:03}" for n in range(200)]
    await publish(path, *triggers)
    schedulers = [await processes.start(scheduler, path=path, page=page) for _ in range(2)]
    for child in schedulers:
        await child.hear("open")
    due = now_ms() - 1_000
    execute(path, MAKE_DUE, due=due)
    for child in schedulers:
        await child.say("look")
    await go(*schedulers)
    overs = [await child.hear("over") for child in schedulers]
    assert sum(over["admitted"] for over in overs) == 200
    assert all(over["admitted"] + over["raced"] == over["scanned"] for over in overs)
    made = rows(path, "SELECT trigger, scheduled_for FROM __alkstore_cron_runs ORDER BY trigger")
    assert made == [(trigger, due) for trigger in triggers]
    assert rows(path, NOTHING_TWICE) == []
    assert rows(path, f"SELECT count(*) FROM ({CURSORS}) WHERE last_scheduled_at = :due", due=due) == [(200,)]
    print(overs)


# ------------------------------------------------------------------------------ killed at every point of an admission


def dies_while_admitting(talk: Talk, path: str) -> None:
    """For each ``cycle <n>`` run one in a process that is killed after its nth writing statement; 0: never."""

    async def cycle(nth: int) -> None:
        fault = Fault(talk, nth)
        watch(fault)
        async with open_store(path) as store:
            fault.armed = nth > 0
            await store.cron.schedule_once(STANDALONE)
            fault.armed = False

    while nth := talk.hear_blocking("cycle"):
        talk.say("over", status=fork(partial(trio.run, cycle, int(nth)))())


async def test_a_kill_at_any_point_of_an_admission_leaves_nothing_or_all_of_it(processes: Processes, path: str) -> None:
    """Run, Attempt, both events, the job and the cursor are there together, and a restart adds what is missing."""
    await publish(path, "g")
    child = await processes.start(dies_while_admitting, path=path)
    points = []
    for nth in range(1, 60):
        due = now_ms() - 60_000 + nth
        execute(path, MAKE_DUE, due=due)
        ((_, _, _, version),) = rows(path, CURSORS)
        ((count,),) = rows(path, "SELECT count(*) FROM __alkstore_cron_runs")
        await child.say(f"cycle {nth}")
        status = (await child.hear("over"))["status"]
        if status == 0:
            break  # it was over before the nth statement
        assert status == -9
        dying = await child.hear("dying")
        points.append(dying["after"])
        committed = "INSERT INTO __alkstore_cron_runs" in dying["committed"]
        ((_, cursor, last, now_at),) = rows(path, CURSORS)
        assert (cursor != due, last == due, now_at - version) == (committed, committed, int(committed)), dying
        assert rows(path, "SELECT count(*) FROM __alkstore_cron_runs") == [(count + committed,)], dying
        assert_consistent(path)

        await child.say("cycle 0")
        assert (await child.hear("over"))["status"] == 0
        assert rows(path, "SELECT count(*) FROM __alkstore_cron_runs") == [(count + 1,)], dying
        assert rows(path, "SELECT count(*) FROM __alkstore_cron_runs WHERE scheduled_for = :due", due=due) == [(1,)]
        assert_consistent(path)
    else:
        raise AssertionError("an admission has no such number of statements")
    print(points)
    assert {
        "INSERT INTO __alkstore_cron_runs",
        "INSERT INTO __alkstore_cron_attempts",
        "INSERT INTO __alkstore_cron_events",
        "INSERT INTO __alkstore_jobs",
        "UPDATE __alkstore_cron_schedules SET",
        "COMMIT",
    } <= set(points)


def assert_consistent(path: str) -> None:
    """No part of an admission is there without the others."""
    assert rows(path, NOTHING_TWICE) == []
    for table, column in (("__alkstore_cron_attempts", "run"), ("__alkstore_cron_events", "run")):
        orphans = f"SELECT 1 FROM {table} WHERE {column} NOT IN (SELECT id FROM __alkstore_cron_runs)"
        assert rows(path, orphans) == []
    assert rows(path, "SELECT 1 FROM __alkstore_jobs WHERE id NOT IN (SELECT job FROM __alkstore_cron_runs)") == []


# -------------------------------------------------------------------------------------------------- killed runners


async def runner(talk: Talk, path: str, clock: str, does: str) -> None:
    async def handler(handle: RunHandle) -> None:
        talk.say("begun", attempt=handle.attempt, fence=handle.fence)
        if does == "sleeps":
            await trio.sleep_forever()

    stop = StopToken()
    async with open_store(path, clock=SharedClock(clock)) as store, trio.open_nursery() as nursery:
        nursery.start_soon(partial(store.cron.run, {"h": handler}, WIDE, stop=stop))
        talk.say("running")
        await talk.hear("stop")
        stop.stop()


@pytest.mark.parametrize(
    ("retries", "kinds", "state"),
    [
        (0, ["lost", "failed"], "failed"),
        (1, ["lost", "queued", "dispatching", "running", "succeeded"], "succeeded"),
    ],
)
async def test_a_run_whose_runner_is_killed_is_lost_and_then_failed_or_tried_again(
    processes: Processes, path: str, retries: int, kinds: list[str], state: str
) -> None:
    clock = SharedClock(f"{path}.clock")
    await publish(path, retry=RetryPolicy(retries, 0))
    async with open_store(path) as store:
        await store.cron.run_now("t")
    dead = await processes.start(runner, path=path, clock=clock.path, does="sleeps")
    assert (await dead.hear("begun"))["attempt"] == 1
    await dead.kill()
    heir = await processes.start(runner, path=path, clock=clock.path, does="nothing")
    await heir.hear("running")
    assert rows(path, STATES) == [("running",)]  # its lease has not ended

    clock.advance(runs.LEASE_MS / 1000)
    await until_rows(path, f"{STATES} WHERE state = :state", state=state)
    if retries:
        assert (await heir.hear("begun"))["attempt"] == 2
    await heir.say("stop")
    assert await heir.ended() == 0
    begun = ["run.created", "run.queued", "run.dispatching", "run.running"]
    assert [kind for (kind,) in rows(path, KINDS)] == begun + [f"run.{kind}" for kind in kinds]
    assert rows(path, "SELECT state FROM __alkstore_cron_attempts WHERE number = 1") == [("lost",)]
    assert rows(path, "SELECT count(*) FROM __alkstore_jobs") == [(0,)]


async def test_a_runner_that_comes_back_from_a_stop_finds_its_run_lost_and_changes_nothing(
    processes: Processes, path: str
) -> None:
    """S03, for cron: SIGSTOP, the lease ends, another process takes over, SIGCONT."""
    clock = SharedClock(f"{path}.clock")
    await publish(path, retry=RetryPolicy(1, 0))
    async with open_store(path) as store:
        await store.cron.run_now("t")
    stopped = await processes.start(runner, path=path, clock=clock.path, does="sleeps")
    first = await stopped.hear("begun")
    await pause_between_writes(stopped, path)
    clock.advance(runs.LEASE_MS / 1000)
    heir = await processes.start(runner, path=path, clock=clock.path, does="nothing")
    second = await heir.hear("begun")
    assert (second["attempt"], second["fence"]) == (2, first["fence"] + 1)
    await until_rows(path, f"{STATES} WHERE state = 'succeeded'")
    stopped.resume()
    for child in (stopped, heir):
        await child.say("stop")
    for child in (stopped, heir):
        assert await child.ended(WITHIN_S) == 0
    assert rows(path, STATES) == [("succeeded",)]
    assert rows(path, "SELECT state FROM __alkstore_cron_attempts ORDER BY number") == [("lost",), ("succeeded",)]


@pytest.mark.parametrize(("misfire", "made"), [("skip", 0), ("fire_once", 1)])
async def test_a_scheduler_that_is_away_for_a_week_makes_up_for_it_as_its_triggers_say(
    processes: Processes, path: str, misfire: str, made: int
) -> None:
    """S03: killed or stopped, it takes the same path, and there is no burst."""
    clock = SharedClock(f"{path}.clock")
    await publish(path)
    async with open_store(path) as store:
        await store.cron.publish_trigger(
            "g",
            task="t",
            expression="0 * * * *",
            timezone="UTC",
            misfire=misfire,  # type: ignore[arg-type]
        )
        await store.cron.schedule_once(WIDE)
    stopped = await processes.start(runner, path=path, clock=clock.path, does="nothing")
    await stopped.hear("running")
    stopped.pause()
    clock.advance(7 * 86_400 + 1_800)
    stopped.resume()
    after_the_week = "SELECT next_fire_at FROM __alkstore_cron_schedules WHERE trigger = 'g' AND next_fire_at > :now"
    await until_rows(path, after_the_week, now=clock.now_ms())
    await stopped.say("stop")
    assert await stopped.ended() == 0
    assert rows(path, "SELECT count(*) FROM __alkstore_cron_runs") == [(made,)]
    skipped = rows(path, "SELECT skipped_total FROM __alkstore_cron_schedules WHERE trigger = 'g'")
    assert skipped == [(1 - made,)]
