"""Workers that are killed, stopped, told to end, starved or asleep: what becomes of their jobs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import trio

from alkstore import JobHandle, LockHandle, StopToken, Store, open_store
from tests.crash.child import Talk
from tests.crash.harness import Child, Processes, pause_between_writes, rows, until_rows, was_closed

JOB = "SELECT state, attempt, fence, error, reason FROM __alkstore_jobs WHERE id = :id"

GRACE_S = 0.5

AT_ONCE_S = 5.0
"""What happens at once happens within milliseconds, and otherwise at the end of a lease of minutes; the rest is for a
loaded machine."""

# ------------------------------------------------------------------------------------------------------- programs


async def worker(talk: Talk, path: str, grace: float = 30.0, until: str = "for ever") -> None:
    """Until a signal. Each handler tells when it begins, lasts `until` "told", "at once" or "for ever", and tells."""

    async def handler(job: JobHandle) -> None:
        talk.say("started", id=job.id, attempt=job.attempt, fence=job.fence, error=job.job.error)
        try:
            if until == "told":
                await talk.hear("finish")
            elif until == "for ever":
                await trio.sleep_forever()
        except trio.Cancelled:
            talk.say("cancelled", id=job.id)
            raise
        talk.say("done", id=job.id)

    stop = StopToken()
    async with open_store(path) as store, trio.open_nursery() as nursery:
        nursery.start_soon(tell_lost, talk, store)
        nursery.start_soon(tell_stop, talk, stop)
        await nursery.start(stop.stop_on_signals)
        talk.say("working")
        await store.queue("q").work(handler, stop=stop, grace=grace)
        nursery.cancel_scope.cancel()


async def tell_lost(talk: Talk, store: Store) -> None:
    async for event in store.events():
        if event.kind in ("lost", "dead"):
            talk.say(event.kind, **event.details)


async def tell_stop(talk: Talk, stop: StopToken) -> None:
    await stop.wait()
    talk.say("stopping")


async def deadly_worker(talk: Talk, path: str) -> None:
    async def handler(job: JobHandle) -> None:
        talk.say("delivered", attempt=job.attempt, fence=job.fence)
        os._exit(9)

    async def stop_at_the_dead_letter() -> None:
        async for event in events:
            if event.kind == "dead":
                talk.say("dead", reason=event.details["reason"])
                stop.stop()

    stop = StopToken()
    async with open_store(path) as store, trio.open_nursery() as nursery:
        events = store.events()
        nursery.start_soon(stop_at_the_dead_letter)
        await store.queue("q").work(handler, stop=stop)
        nursery.cancel_scope.cancel()


async def by_hand(talk: Talk, path: str, lease: float) -> None:
    """Claim one job, and acknowledge it when told to."""
    async with open_store(path) as store:
        (handle,) = await store.queue("q").claim("w", lease=lease)
        talk.say("claimed", fence=handle.fence)
        await talk.hear("heartbeat")
        talk.say("heartbeat", answer=await handle.heartbeat())
        await talk.hear("ack")
        talk.say("ack", answer=await handle.ack())


# ------------------------------------------------------------------------------------------------ killed, stopped


async def test_a_job_that_kills_its_worker_is_a_dead_letter_after_its_attempts(processes: Processes, path: str) -> None:
    """Q07: attempts are counted at the claim, so a handler that calls os._exit is not delivered without end."""
    async with open_store(path) as store:
        queue = store.queue("q", visibility=1, max_attempts=3)
        id = await queue.enqueue("poison")
    delivered = []
    for _ in range(3):
        child = await processes.start(deadly_worker, path=path)
        delivered.append(await child.hear("delivered"))
        assert await child.ended() == 9
    assert [one["attempt"] for one in delivered] == [1, 2, 3]
    assert [one["fence"] for one in delivered] == [1, 2, 3]
    last = await processes.start(deadly_worker, path=path)
    assert (await last.hear("dead"))["reason"] == "lease expired"
    assert await last.ended() == 0
    assert await last.hear_rest("delivered") == []
    async with open_store(path) as store:
        (dead,) = await store.queue("q").dead()
        assert (dead.id, dead.attempt, dead.reason) == (id, 3, "lease expired")
        assert dead.error is not None
        assert "attempts exhausted" in dead.error
        assert await store.queue("q").claim("w") == []


async def test_the_job_of_a_killed_worker_is_claimed_by_another_after_its_lease(
    processes: Processes, path: str
) -> None:
    async with open_store(path) as store:
        id = await store.queue("q", visibility=1).enqueue(1)
    first = await processes.start(worker, path=path)
    assert (await first.hear("started"))["fence"] == 1
    second = await processes.start(worker, path=path, until="at once")
    await second.hear("working")
    await first.kill()
    killed = time.monotonic()
    started = await second.hear("started")
    print(f"claimed by another {started['at'] - killed:.2f} s after the kill, with a lease of 1 s")
    assert (started["id"], started["attempt"], started["fence"]) == (id, 2, 2)
    assert started["error"] == "lease expired"
    assert started["at"] - killed < 1.0 + AT_ONCE_S
    await second.hear("done")
    second.terminate()
    assert await second.ended() == 0
    assert rows(path, JOB, id=id) == []


async def test_what_a_worker_says_after_its_lease_has_ended_is_refused(processes: Processes, path: str) -> None:
    """Q01, Q10: neither a late ack nor a late heartbeat changes anything."""
    async with open_store(path) as store:
        queue = store.queue("q")
        id = await queue.enqueue(1)
        late = await processes.start(by_hand, path=path, lease=0.7)
        assert (await late.hear("claimed"))["fence"] == 1
        await pause_between_writes(late, path)
        (handle,) = await queue.claim("other", wait=30)
        assert handle.fence == 2
        before = rows(path, JOB, id=id)
        late.resume()
        for word in ("heartbeat", "ack"):
            await late.say(word)
            assert (await late.hear(word))["answer"] is False
        assert await late.ended() == 0
        assert rows(path, JOB, id=id) == before
        assert await handle.ack()


async def test_a_handler_that_wakes_after_its_lease_has_ended_is_cancelled_and_settles_nothing(
    processes: Processes, path: str
) -> None:
    async with open_store(path) as store:
        queue = store.queue("q", visibility=0.8)
        id = await queue.enqueue(1)
        late = await processes.start(worker, path=path)
        await late.hear("started")
        await pause_between_writes(late, path)
        (handle,) = await queue.claim("other", lease=600, wait=30)
        before = rows(path, JOB, id=id)
        late.resume()
        await late.hear("cancelled")
        await late.hear("lost")
        assert rows(path, JOB, id=id) == before
        late.terminate()
        assert await late.ended() == 0
        assert rows(path, JOB, id=id) == before
        assert await handle.ack()


# --------------------------------------------------------------------------------------------------- told to end


async def test_a_lease_is_renewed_while_a_worker_that_was_told_to_end_drains(processes: Processes, path: str) -> None:
    """H01: the heartbeat is the last to stop, so nobody steals what still runs."""
    lease_s = 2
    async with open_store(path) as store:
        id = await store.queue("q", visibility=lease_s).enqueue(1)
    draining = await processes.start(worker, path=path, until="told")
    assert (await draining.hear("started"))["attempt"] == 1
    rival = await processes.start(worker, path=path, until="at once")
    await rival.hear("working")
    ((first_end,),) = rows(path, "SELECT lease_end FROM __alkstore_jobs")
    draining.terminate()
    renewed_for = "SELECT 1 FROM __alkstore_jobs WHERE lease_end > :end"
    await until_rows(path, renewed_for, end=first_end + 2 * lease_s * 1000)  # twice as long as the claim gave it
    await draining.say("finish")
    await draining.hear("done")
    assert await draining.ended() == 0
    rival.terminate()
    assert await rival.ended() == 0
    assert await rival.hear_rest("started") == []
    assert rows(path, JOB, id=id) == []


async def test_a_job_that_outlasts_the_grace_goes_back_at_once(processes: Processes, path: str) -> None:
    """H02: not only at the end of a lease of five minutes."""
    async with open_store(path) as store:
        id = await store.queue("q", visibility=300).enqueue(1)
    leaving = await processes.start(worker, path=path, grace=GRACE_S)
    await leaving.hear("started")
    other = await processes.start(worker, path=path, grace=0)
    await other.hear("working")
    leaving.terminate()
    told = time.monotonic()
    cancelled = await leaving.hear("cancelled")
    assert GRACE_S <= cancelled["at"] - told < GRACE_S + AT_ONCE_S
    started = await other.hear("started")
    print(f"claimed by another {started['at'] - cancelled['at']:.3f} s after its handler was cancelled")
    assert started["at"] - cancelled["at"] < AT_ONCE_S
    assert (started["id"], started["attempt"], started["fence"]) == (id, 1, 2)
    assert started["error"] == "interrupted by shutdown"
    assert await leaving.ended() == 0
    other.terminate()
    assert await other.ended() == 0


async def test_deploys_cost_no_attempts_and_a_kill_costs_one(processes: Processes, path: str) -> None:
    """H04: interrupted by us is not failed."""
    async with open_store(path) as store:
        id = await store.queue("q", visibility=3, max_attempts=2).enqueue(1)
    for n in range(3):
        deployed = await processes.start(worker, path=path, grace=0.1)
        started = await deployed.hear("started")
        assert (started["attempt"], started["fence"]) == (1, n + 1)
        deployed.terminate()
        assert await deployed.ended() == 0
        assert rows(path, JOB, id=id) == [(0, 0, n + 1, "interrupted by shutdown", None)]
    killed = await processes.start(worker, path=path)
    assert (await killed.hear("started"))["attempt"] == 1
    await killed.kill()
    last = await processes.start(worker, path=path, grace=0.1)
    assert (await last.hear("started"))["attempt"] == 2
    last.terminate()
    assert await last.ended() == 0


async def test_a_second_signal_ends_a_worker_that_drains_and_its_job_goes_back(processes: Processes, path: str) -> None:
    async with open_store(path) as store:
        id = await store.queue("q", visibility=300).enqueue(1)
    child = await processes.start(worker, path=path, grace=300)
    await child.hear("started")
    child.terminate()
    await child.hear("stopping")
    child.terminate()
    await child.hear("cancelled")
    assert await child.ended() != 0
    assert "KeyboardInterrupt" in child.errors()
    ((state, attempt, fence, error, _),) = rows(path, JOB, id=id)
    assert (state, attempt, fence) == (0, 0, 1)
    assert error is not None
    assert error.startswith("interrupted by")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_that_the_program_has_asked_for_ends_it_when_it_has_drained(
    processes: Processes, path: str, number: signal.Signals
) -> None:
    async with open_store(path) as store:
        id = await store.queue("q").enqueue(1)
    child = await processes.start(worker, path=path, until="told")
    await child.hear("started")
    child.terminate(number)
    await child.hear("stopping")
    await child.say("finish")
    assert await child.ended() == 0
    assert was_closed(path)
    assert rows(path, JOB, id=id) == []


async def unprepared(talk: Talk, path: str) -> None:
    """Work and run the schedules, with no thought of signals."""

    async def handler(job: JobHandle) -> None:
        talk.say("started")
        await trio.sleep_forever()

    async with open_store(path) as store, trio.open_nursery() as nursery:
        events = store.events()
        await nursery.start(store.run_schedules, StopToken())
        async for event in events:
            if event.kind == "leader":
                break
        async with store.lock("l").hold(ttl=600):
            await store.queue("q").work(handler, stop=StopToken())


async def test_a_keyboard_interrupt_gives_back_jobs_locks_and_leadership_and_closes_the_store(
    processes: Processes, path: str
) -> None:
    async with open_store(path) as store:
        id = await store.queue("q", visibility=600).enqueue(1)
    child = await processes.start(unprepared, path=path)
    await child.hear("started")
    assert len(rows(path, "SELECT * FROM __alkstore_locks")) == 2
    child.terminate(signal.SIGINT)
    assert await child.ended() != 0
    assert "KeyboardInterrupt" in child.errors()
    assert was_closed(path)
    assert rows(path, "SELECT name FROM __alkstore_locks") == []
    ((state, attempt, fence, error, _),) = rows(path, JOB, id=id)
    assert (state, attempt, fence) == (0, 0, 1)
    assert error is not None
    assert error.startswith("interrupted by")


# ------------------------------------------------------------------------------------------- woken, not starved


async def test_an_idle_worker_is_woken_by_an_enqueue_in_another_process(processes: Processes, path: str) -> None:
    latencies = []
    async with open_store(path) as store:
        idle = await processes.start(worker, path=path, until="at once")
        await idle.hear("working")
        for n in range(20):
            await trio.sleep(0.05 + n % 5 * 0.01)  # so that it is asleep again
            before = time.monotonic()
            await store.queue("q").enqueue(n)
            latencies.append((await idle.hear("started"))["at"] - before)
            await idle.hear("done")
        idle.terminate()
        assert await idle.ended() == 0
    latencies.sort()
    print(f"woken after {latencies[10] * 1000:.1f} ms (median), {latencies[-1] * 1000:.1f} ms at worst")
    assert latencies[10] < 0.5, "woken by no more than the look once a second"


async def flooder(talk: Talk, path: str, batch: int, tasks: int) -> None:
    count = 0

    async def flood(store: Store) -> None:
        nonlocal count
        while True:
            count += len(await store.queue("flood").enqueue_many([{"n": n} for n in range(batch)]))
            flooding.set()

    flooding = trio.Event()
    async with open_store(path) as store, trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(flood, store)
        await flooding.wait()
        talk.say("flooding")
        await talk.hear("end")
        nursery.cancel_scope.cancel()
    talk.say("flooded", count=count)


async def lease_keeper(talk: Talk, path: str, seconds: float) -> None:
    """Keep a job and a lock, each with a lease of three seconds, and tell every refusal and the longest wait."""
    waits: list[float] = []
    refused: list[str] = []

    async def beat(handle: JobHandle | LockHandle) -> None:
        while True:
            began = time.monotonic()
            alive = await (handle.heartbeat() if isinstance(handle, JobHandle) else handle.renew())
            waits.append(time.monotonic() - began)
            if not alive:
                refused.append(type(handle).__name__)
            await trio.sleep(0.25)

    async with open_store(path) as store:
        (job,) = await store.queue("q").claim("w", lease=3)
        lock = await store.lock("l").acquire(3)
        assert lock is not None
        talk.say("keeping")
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(beat, job)
                nursery.start_soon(beat, lock)
    talk.say("kept", refused=refused, beats=len(waits), longest=max(waits))


async def keep_beside_a_flood(processes: Processes, path: str, batch: int, tasks: int) -> tuple[Child, Child]:
    async with open_store(path) as store:
        await store.queue("q").enqueue(1)
    keeper = await processes.start(lease_keeper, path=path, seconds=4.0)
    flood = await processes.start(flooder, path=path, batch=batch, tasks=tasks)
    await keeper.hear("keeping")
    await flood.hear("flooding")
    return keeper, flood


async def test_leases_are_kept_beside_a_process_that_floods_the_store(processes: Processes, path: str) -> None:
    keeper, flood = await keep_beside_a_flood(processes, path, batch=1_000, tasks=4)
    kept = await keeper.hear("kept")
    await flood.say("end")
    count = (await flood.hear("flooded"))["count"]
    print(f"{kept['beats']} renewals, the slowest took {kept['longest']:.2f} s, beside {count} jobs enqueued")
    assert kept["refused"] == []
    assert kept["beats"] >= 6
    assert await keeper.ended() == 0
    assert await flood.ended() == 0
