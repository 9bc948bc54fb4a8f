"""The same seed gives the same history, to the last event: in one process, and in two."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from actors import StopToken
from alkstore import JobHandle, open_store
from alkstore.cron import STANDALONE
from alkstore.testing import ROUGH, Deadlock, Simulation, drain, pass_time, simulate
from tests.simulation.plan import Plan
from tests.simulation.scenario import live

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)


def digests(hash_seed: str) -> str:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.simulation",
            "--seeds",
            f"{SEEDS[0]}:{SEEDS[-1] + 1}",
            "--length",
            "15",
            "--digests",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


def test_two_processes_with_other_hash_seeds_live_through_the_same() -> None:
    first = digests("1")
    assert len(first.splitlines()) == len(SEEDS)
    assert digests("2") == first


def test_one_process_lives_through_the_same_twice() -> None:
    def lived(seed: int) -> str:
        plan = evolve(Plan.of(seed), length=10)
        return simulate(seed, partial(live, plan=plan), faults=plan.faults).digest

    first = [lived(seed) for seed in SEEDS]
    assert [lived(seed) for seed in SEEDS] == first
    assert len(set(first)) == len(SEEDS)


def drawn(seed: int) -> list[object]:
    """Everything that is random or a clock, as a simulated program sees it."""
    seen: list[object] = []

    async def program(sim: Simulation) -> None:
        async def child(number: int) -> None:
            await trio.lowlevel.checkpoint()
            seen.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(child, number)
        await trio.sleep(1.5)
        seen.extend([time.time(), time.monotonic(), sim.random.random()])
        seen.extend([random.random(), random.Random().random()])  # noqa: S311
        seen.extend([secrets.token_hex(4), uuid.uuid4(), os.urandom(4)])
        async with open_store(":memory:") as store:
            handle = await store.lock("x").acquire(5)
            assert handle is not None
            seen.extend([handle.owner, handle.expires_at])

    simulate(seed, program)
    return seen


def test_order_chance_and_clocks_follow_from_the_seed() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_world_is_put_back_as_it_was() -> None:
    before = random.getstate()
    here = time.time()
    drawn(1)
    assert random.getstate() == before
    assert time.time() >= here
    assert secrets.token_hex(8) != secrets.token_hex(8)


def test_a_deadlock_is_told() -> None:
    async def program(sim: Simulation) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.Event().wait()

    with pytest.raises(Deadlock):
        simulate(0, program)


def test_a_failure_tells_its_seed_and_what_happened_last() -> None:
    async def program(sim: Simulation) -> None:
        sim.note("the last straw")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        simulate(42, program, faults=ROUGH)
    told = "\n".join(caught.value.__notes__)
    assert "seed 42" in told
    assert "the last straw" in told


def test_plain_handlers_run_in_place_and_are_repeatable() -> None:
    threads: set[int] = set()

    def handler(job: JobHandle) -> None:
        threads.add(threading.get_ident())
        if job.attempt == 1:
            raise ValueError

    async def program(sim: Simulation) -> None:
        async with open_store(sim.path("a.db")) as store, trio.open_nursery() as nursery:
            queue, stop = store.queue("q"), StopToken()
            await queue.enqueue_many(range(20))
            nursery.start_soon(partial(queue.work, handler, concurrency=3, stop=stop))
            await drain(store)
            stop.stop()
            sim.note(f"{await queue.counts()} at {trio.current_time()}")

    assert len({simulate(3, program).digest for _ in range(3)}) == 1
    assert threads == {threading.get_ident()}


def test_a_command_is_refused_and_its_run_says_why() -> None:
    async def program(sim: Simulation) -> None:
        async with open_store(sim.path("a.db")) as store, trio.open_nursery() as nursery:
            await store.cron.publish_task("t", command=["true"])
            run, stop = await store.cron.run_now("t"), StopToken()
            nursery.start_soon(partial(store.cron.run, {}, STANDALONE, stop=stop))
            await pass_time(60)
            stop.stop()
            found = await store.cron.get_run(run.id)
            assert found is not None
            sim.note(f"{found.state}: {found.error}")

    histories = [simulate(3, program) for _ in range(2)]
    assert "failed: RuntimeError: a simulation runs no commands" in histories[0].trace(1)
    assert histories[0].digest == histories[1].digest


def test_after_a_simulation_threads_are_threads_again() -> None:
    simulate(0, _nothing)
    assert trio.run(trio.to_thread.run_sync, threading.get_ident) != threading.get_ident()


async def _nothing(_: Simulation) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("args", "options", "named"),
    [
        ((_nothing, 1), {}, "seed must be"),
        ((True, _nothing), {}, "seed must be"),
        ((1, print), {}, "program must be an async"),
        ((1, None), {}, "program must be"),
        ((1, _nothing), {"faults": 0.5}, "faults must be"),
    ],
)
def test_a_wrong_argument_is_named(args: Any, options: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"^{named}"):
        simulate(*args, **options)
