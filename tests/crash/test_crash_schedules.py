"""Schedules whose runners are killed, stopped, and raced by others: every boundary fires once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import trio

from actors import Supervisor
from alkstore import LeadershipLost, StopToken, Store, open_store
from alkstore.sql import schedules
from alkstore.sql.tx import Tx
from tests.crash.child import Talk, fork
from tests.crash.clocks import SharedClock
from tests.crash.harness import WITHIN_S, Child, Processes, execute, go, pause_between_writes, rows
from tests.crash.watching import Fault, watch

BOUNDARIES = "SELECT boundary FROM __alkstore_jobs WHERE schedule = :name ORDER BY boundary, id"
CURSOR = "SELECT next_fire_at, fired_total, skipped_total FROM __alkstore_scheduler_tasks WHERE name = :name"
MAKE_DUE = "UPDATE __alkstore_scheduler_tasks SET next_fire_at = :due WHERE name = :name"
NOBODY_LEADS = "DELETE FROM __alkstore_locks"

LOOK_S = 5.0
"""Nobody who waits for a moment looks at the clock more seldom than this."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# ------------------------------------------------------------------------------------------- two tickers at once


async def rogue_ticker(talk: Talk, path: str, rounds: int, seed: int) -> None:
    async with open_store(path, synchronous="normal") as store:
        engine = store._context.engine
        order = random.Random(seed)  # noqa: S311 - a test's dice
        talk.say("open")
        for _ in range(rounds):
            await talk.hear("look")
            names = (await engine.read(schedules.look)).names
            order.shuffle(names)
            await talk.barrier()
            # by what was seen before the barrier: half of it has been fired by the other one meanwhile
            fired: list[bool] = []
            for start in range(0, len(names), 10):
                units: list[Callable[[Tx], bool]] = [partial(fires, name=name) for name in names[start : start + 10]]
                fired += await engine.run_each(units, urgent=True)
            talk.say("round over", seen=len(names), fired=sum(fired))


def fires(tx: Tx, name: str) -> bool:
    """Tick without leadership; False: there was nothing to fire any more."""
    before = tx.one(CURSOR, {"name": name})
    schedules.fire(tx, name, None)
    return tx.one(CURSOR, {"name": name}) != before


async def test_two_tickers_without_a_leader_fire_each_boundary_once(processes: Processes, path: str) -> None:
    """S06: whoever comes second reads the cursor again under the lock, and finds nothing due."""
    rounds, names = 50, [f"s{n}" for n in range(100)]
    async with open_store(path) as store:
        for name in names:
            await store.schedule(name, "@every 1h", "q")
    tickers = [await processes.start(rogue_ticker, path=path, rounds=rounds, seed=n) for n in range(2)]
    for ticker in tickers:
        await ticker.hear("open")
    fired = [0, 0]
    for _ in range(rounds):
        execute(path, "UPDATE __alkstore_scheduler_tasks SET next_fire_at = :due", due=now_ms() - 1)
        for ticker in tickers:
            await ticker.say("look")
        await go(*tickers)
        overs = [await ticker.hear("round over") for ticker in tickers]
        assert [over["seen"] for over in overs] == [100, 100]
        assert sum(over["fired"] for over in overs) == 100
        fired = [before + over["fired"] for before, over in zip(fired, overs, strict=True)]
    assert min(fired) > 0, "one of them never fired: that was no race"
    assert rows(path, "SELECT schedule, boundary FROM __alkstore_jobs GROUP BY 1, 2 HAVING count(*) > 1") == []
    assert rows(path, "SELECT count(*) FROM __alkstore_jobs") == [(rounds * 100,)]
    assert rows(path, "SELECT DISTINCT fired_total FROM __alkstore_scheduler_tasks") == [(rounds,)]


# ------------------------------------------------------------------------------- killed at every point of a tick


def dies_while_ticking(talk: Talk, path: str) -> None:
    """For each ``tick <n>`` run the schedules in a process that is killed after its nth writing statement; 0: never."""

    async def tick(nth: int) -> None:
        fault = Fault(talk, nth)
        watch(fault)
        stop = StopToken()
        async with open_store(path) as store, trio.open_nursery() as nursery:
            events = store.events()
            fault.armed = nth > 0
            nursery.start_soon(store.run_schedules, stop)
            async for event in events:
                if event.kind == "fired" and event.subject == ("victim" if nth else "sentinel"):
                    break
            fault.armed = False
            stop.stop()

    while nth := talk.hear_blocking("tick"):
        talk.say("over", status=fork(partial(trio.run, tick, int(nth)))())


async def test_a_kill_at_any_point_of_a_tick_leaves_the_boundary_fired_once_or_to_be_fired(
    processes: Processes, path: str
) -> None:
    """S07: after the insert, after the advance, after COMMIT and at every other statement of a tick, one by one.

    Before the COMMIT is through there is no job, the cursor stands still, and the boundary fires once after a restart;
    afterwards there is one job, and no other comes.
    """
    async with open_store(path) as store:
        await store.schedule("victim", "@every 1h", "q")
        await store.schedule("sentinel", "@every 1h", "other")
    child = await processes.start(dies_while_ticking, path=path)
    points = []
    for nth in range(1, 60):
        due = now_ms() - 60_000
        execute(path, MAKE_DUE, NOBODY_LEADS, "DELETE FROM __alkstore_jobs", due=due, name="victim")
        await child.say(f"tick {nth}")
        status = (await child.hear("over"))["status"]
        if status == 0:
            break  # it fired before the nth statement
        assert status == -9
        dying = await child.hear("dying")
        points.append(dying["after"])
        committed = "UPDATE __alkstore_scheduler_tasks SET" in dying["committed"]
        (cursor, _, skipped), *_ = rows(path, CURSOR, name="victim")
        assert rows(path, BOUNDARIES, name="victim") == ([(due,)] if committed else []), dying
        assert (cursor, skipped) == (due + 3_600_000 if committed else due, 0), dying

        execute(path, MAKE_DUE, NOBODY_LEADS, due=due + 1, name="sentinel")  # a tick fires in the order of the cursors
        await child.say("tick 0")
        assert (await child.hear("over"))["status"] == 0
        assert rows(path, BOUNDARIES, name="victim") == [(due,)], dying
        assert rows(path, CURSOR, name="victim")[0][0] == due + 3_600_000, dying
    else:
        raise AssertionError("a tick has no such number of statements")
    print(points)
    assert {"INSERT INTO __alkstore_jobs", "UPDATE __alkstore_scheduler_tasks SET"} <= set(points)
    assert points[-1] == "COMMIT" or "COMMIT" in points[points.index("UPDATE __alkstore_scheduler_tasks SET") :]


# ----------------------------------------------------------------------------------------- leaders and standbys


async def runner(talk: Talk, path: str, ttl: float) -> None:
    """Run the schedules, telling every event, until ``stop`` or until leadership is lost."""
    stop = StopToken()
    async with open_store(path, leadership_ttl=ttl) as store, trio.open_nursery() as nursery:
        nursery.start_soon(tell_events, talk, store)

        async def stop_when_told() -> None:
            await talk.hear("stop")
            stop.stop()

        nursery.start_soon(stop_when_told)
        await nursery.start(hold_the_line, talk, store, stop)
        talk.say("standing by")
        await stop.wait()
        nursery.cancel_scope.cancel()


async def hold_the_line(
    talk: Talk, store: Store, stop: StopToken, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    try:
        await store.run_schedules(stop, task_status=task_status)
    except LeadershipLost:
        talk.say("LeadershipLost")


async def supervised_runner(talk: Talk, path: str, ttl: float, clock: str | None = None) -> None:
    stop = StopToken()
    shared = None if clock is None else SharedClock(clock)
    async with open_store(path, clock=shared, leadership_ttl=ttl) as store, trio.open_nursery() as nursery:
        nursery.start_soon(tell_events, talk, store)
        async with Supervisor(stop, on_event=lambda _: None) as supervisor:
            await supervisor.start("schedules", store.run_schedules)
            talk.say("standing by")
            await talk.hear("stop")
            stop.stop()
        nursery.cancel_scope.cancel()


async def tell_events(talk: Talk, store: Store) -> None:
    async for event in store.events():
        details = event.details
        if event.kind == "fired":
            first, last = (round(details[key].timestamp() * 1000) for key in ("first", "last"))
            talk.say("fired", schedule=event.subject, first=first, last=last, count=details["count"])
        elif event.kind == "leader":
            talk.say("leader", token=details["fencing_token"])
        else:
            talk.say(event.kind, subject=event.subject)


async def start_leader(processes: Processes, path: str, ttl: float) -> tuple[Child, int]:
    leader = await processes.start(runner, path=path, ttl=ttl)
    return leader, int((await leader.hear("leader"))["token"])


async def stop(runner: Child) -> None:
    await runner.say("stop")
    assert await runner.ended() == 0


def assert_whole_grid(path: str, name: str, interval: int) -> None:
    """Every boundary from the first to the last has fired once, and the row agrees."""
    fired = [boundary for (boundary,) in rows(path, BOUNDARIES, name=name)]
    assert fired == list(range(fired[0], fired[-1] + 1, interval))
    assert rows(path, CURSOR, name=name) == [(fired[-1] + interval, len(fired), 0)]


async def test_a_standby_leads_after_the_ttl_and_fires_what_a_killed_leader_missed(
    processes: Processes, path: str
) -> None:
    """S16: killed just before a boundary; nothing is lost around the election, and nothing fires twice."""
    ttl = 2.0
    async with open_store(path) as store:
        await store.schedule("tick", "@every 1s", "q")
    leader, token = await start_leader(processes, path, ttl)
    standby = await processes.start(runner, path=path, ttl=ttl)
    await standby.hear("standing by")
    boundary = (await leader.hear("fired"))["last"] + 1_000
    await trio.sleep(max(boundary - 10 - now_ms(), 0) / 1000)
    await leader.kill()
    killed = time.monotonic()
    ((missed, _, _),) = rows(path, CURSOR, name="tick")
    leads = await standby.hear("leader")
    print(f"the standby leads {leads['at'] - killed:.2f} s after the kill, with a ttl of {ttl:g} s")
    assert leads["at"] - killed <= ttl + LOOK_S
    assert leads["token"] > token
    assert (await standby.hear("fired"))["first"] == missed
    await standby.hear("fired")
    await stop(standby)
    assert_whole_grid(path, "tick", 1_000)


async def test_a_leader_that_was_stopped_for_longer_than_its_lease_fires_nothing_when_it_wakes(
    processes: Processes, path: str
) -> None:
    """S17: stopped for three times its ttl in its sleep; it raises LeadershipLost before any tick."""
    ttl = 1.0
    async with open_store(path) as store:
        await store.schedule("tick", "@every 1s", "q")
        await store.schedule("bait", "@every 1h", "q")
    old, old_token = await start_leader(processes, path, ttl)
    new = await processes.start(runner, path=path, ttl=600)
    await new.hear("standing by")
    await old.hear("fired")
    await pause_between_writes(old, path)
    stopped = time.monotonic()
    assert (await new.hear("leader"))["token"] > old_token
    await new.hear("fired")
    # The new leader sleeps, its lease alive, and something is due: whoever is awake and believes to lead would fire.
    await pause_between_writes(new, path)
    bait = now_ms() - 1
    execute(path, MAKE_DUE, due=bait, name="bait")
    await trio.sleep(max(stopped + 3 * ttl - time.monotonic(), 0))
    resumed = time.monotonic()
    old.resume()
    await old.hear("LeadershipLost")
    assert rows(path, BOUNDARIES, name="bait") == []
    new.resume()
    while (await new.hear("fired"))["schedule"] != "bait":
        pass
    await stop(new)
    await stop(old)
    assert [fired for fired in await old.hear_rest("fired") if fired["at"] >= resumed] == []
    assert rows(path, BOUNDARIES, name="bait") == [(bait,)]
    assert_whole_grid(path, "tick", 1_000)


async def test_a_supervised_runner_that_was_stopped_for_longer_than_its_lease_catches_up(
    processes: Processes, path: str
) -> None:
    """S17, and then the supervisor starts it again."""
    async with open_store(path) as store:
        await store.schedule("tick", "@every 1s", "q")
    runner = await processes.start(supervised_runner, path=path, ttl=1.0)
    await runner.hear("leader")
    await runner.hear("fired")
    await pause_between_writes(runner, path)
    await trio.sleep(3.0)
    ((missed, _, _),) = rows(path, CURSOR, name="tick")
    resumed = now_ms()
    runner.resume()
    await runner.hear("lost")
    await runner.hear("leader")
    while (fired := await runner.hear("fired"))["first"] != missed:
        pass
    assert fired["last"] > resumed - 1_000
    await runner.hear("fired")
    await stop(runner)
    assert_whole_grid(path, "tick", 1_000)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_runner_that_was_away_for_twenty_minutes_fires_64_boundaries_and_skips_the_rest(
    processes: Processes, path: str, how: str
) -> None:
    """S03: suspended, or killed and started again, it makes no difference, and there is no burst."""
    every, away = 10_000, 20 * 60
    file = f"{path}.clock"
    clock = SharedClock(file)
    async with open_store(path) as store:
        await store.schedule("tick", "@every 10s", "q")
    runner = await processes.start(supervised_runner, path=path, ttl=0.5, clock=file)
    await runner.hear("leader")
    await pause_between_writes(runner, path)
    if how == "killed":
        await runner.kill()
    ((missed, fired_before, _),) = rows(path, CURSOR, name="tick")
    clock.advance(away)
    if how == "killed":
        runner = await processes.start(supervised_runner, path=path, ttl=0.5, clock=file)
    else:
        runner.resume()
    while (fired := await runner.hear("fired"))["first"] != missed:
        pass
    assert fired["count"] == 64
    assert (await runner.hear("skipped"))["subject"] == "tick"
    ((cursor, fired_total, skipped_total),) = rows(path, CURSOR, name="tick")
    await stop(runner)
    first = missed - fired_before * every
    assert fired_total + skipped_total >= away * 1000 // every
    assert cursor == first + (fired_total + skipped_total) * every, "not on the grid any more"
    assert clock.now_ms() - cursor < every + WITHIN_S * 1000
    caught_up = [boundary for (boundary,) in rows(path, BOUNDARIES, name="tick") if boundary >= missed][:65]
    assert caught_up[:64] == [missed + n * every for n in range(64)]
    assert caught_up[64:] in ([], [missed + (64 + skipped_total) * every])
