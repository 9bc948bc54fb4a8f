"""Simulated processes are frozen, killed and cancelled as real ones are, and started anew."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from alkstore import StopToken, Store, StoreError, open_store
from alkstore.testing import Faults, Simulation, simulate


def test_a_frozen_process_does_nothing_until_it_goes_on() -> None:
    ticks: list[float] = []

    async def clock() -> None:
        while True:
            ticks.append(trio.current_time())
            await trio.sleep(1)

    async def program(sim: Simulation) -> None:
        process = sim.process("clock", clock)
        await trio.sleep(2.5)
        process.life.stop()
        await trio.sleep(5)
        process.life.go_on()
        await trio.sleep(1.6)

    simulate(0, program)
    assert ticks == [0, 1, 2, 7.5, 8.5]


def test_a_killed_process_leaves_no_trace_of_what_it_had_not_committed() -> None:
    seen: list[list[tuple[object, ...]]] = []

    async def program(sim: Simulation) -> None:
        async def writer() -> None:
            async with open_store(sim.path("app.db"), transaction_timeout=60) as store:
                await store.queue("q").enqueue("committed", key="once")
                async with store.transaction() as tx:
                    await tx.enqueue("q", "not committed")
                    await trio.sleep_forever()

        process = sim.process("writer", writer)
        await trio.sleep(1)
        process.life.kill()
        async with open_store(sim.path("app.db"), busy_timeout=0.1) as store:
            seen.append([(job.payload,) for job in await store.queue("q").list()])
            await store.queue("q").enqueue("the lock is free")

    simulate(0, program)
    assert seen == [[("committed",)]]


def test_a_killed_process_is_started_anew() -> None:
    lives: list[float] = []

    async def server() -> None:
        lives.append(trio.current_time())
        await trio.sleep_forever()

    async def program(sim: Simulation) -> None:
        sim.process("server", server)
        await trio.sleep(1_000)

    simulate(0, program, faults=Faults(kill_every=100))
    assert len(lives) > 3


def test_a_cancelled_process_unwinds_and_is_started_anew() -> None:
    unwound = 0

    async def server() -> None:
        nonlocal unwound
        try:
            for _ in range(10_000):
                await trio.sleep(1)
        finally:
            unwound += 1

    async def program(sim: Simulation) -> None:
        process = sim.process("server", server)
        await trio.sleep(1_000)
        assert process.lives > 3

    simulate(0, program, faults=Faults(cancel=0.01))
    assert unwound > 3


def test_a_program_may_fail_while_processes_are_frozen_or_dead() -> None:
    async def server(sim: Simulation, name: str) -> None:
        async with open_store(sim.path("app.db")) as store:
            await store.queue("q").work(lambda job: None, stop=StopToken())

    async def program(sim: Simulation) -> None:
        frozen, dead, _ = (sim.process(name, partial(server, sim, name)) for name in ("frozen", "dead", "running"))
        await trio.sleep(1)
        frozen.life.stop()
        dead.life.kill()
        await trio.sleep(1)
        raise LookupError("failed")

    with pytest.raises(LookupError, match="failed"):
        simulate(0, program)


def test_an_error_of_a_process_ends_the_simulation() -> None:
    async def server() -> None:
        await trio.sleep(1)
        raise LookupError("nobody caught it")

    async def program(sim: Simulation) -> None:
        sim.process("server", server)
        await trio.sleep_forever()

    with pytest.raises(LookupError, match="nobody caught it"):
        simulate(0, program)


def test_who_only_watches_is_spared() -> None:
    async def program(sim: Simulation) -> None:
        with sim.spared():
            async with open_store(sim.path("app.db")) as store:
                await store.queue("q").enqueue_many(range(100))
                await trio.sleep(1_000)

    simulate(0, program, faults=Faults(full=1, busy=0.5, before_commit=1, stall=1))


@pytest.mark.parametrize(
    ("faults", "stored"),
    [
        (Faults(full=1), 0),
        (Faults(before_commit=1), 0),
        (Faults(after_commit=1), 1),
        (Faults(busy=1), 0),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_fault_reaches_the_caller(faults: Faults, stored: int) -> None:
    async def once(store: Store) -> None:
        with pytest.raises(StoreError):
            await store.queue("q").enqueue(1)

    async def program(sim: Simulation) -> None:
        with sim.spared():
            async with open_store(sim.path("app.db")) as watched:

                async def client() -> None:
                    sim.plan.active = False
                    async with open_store(sim.path("app.db"), busy_timeout=0.5) as store:
                        sim.plan.active = True
                        await once(store)
                        sim.plan.active = False

                process = sim.process("client", client)
                await trio.lowlevel.checkpoint()
                await process.life.over.wait()
                assert (await watched.queue("q").counts()).ready == stored

    simulate(0, program, faults=faults)


@pytest.mark.parametrize(
    "wrong", [{"busy": 2}, {"full": -0.1}, {"cancel": True}, {"stall_up_to": -1}, {"kill_every": -1}]
)
def test_faults_are_checked_where_they_are_made(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Faults(**wrong)
