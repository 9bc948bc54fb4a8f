"""Schedules, two queues and an outbox under one Supervisor: all is handled, whatever child crashes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import trio
from trio.testing import MockClock

from alkstore import LeadershipLost
from alkstore.testing import drain, settle
from tests.conformance.helpers import now, rob_leader
from tests.supervised.program import CHILDREN, Boom, Program, open_program

LIFE = ["starting", "started"]


async def nothing_is_left(program: Program, orders: int) -> None:
    """Every order's email was sent and its webhook delivered, and nothing was given up."""
    store = program.store
    assert sorted(number for number in program.handled if isinstance(number, int)) == list(range(orders))
    assert sorted(program.delivered) == list(range(orders))
    for counts in (await store.queue("emails").counts(), await store.outbox("webhooks").counts()):
        assert (counts.ready, counts.delayed, counts.leased, counts.dead) == (0, 0, 0, 0)
    assert (await store.queue("reports").counts()).dead == 0


def reports(program: Program) -> list[float]:
    """The boundaries that were reported, in seconds after the first."""
    boundaries = sorted({moment for moment in program.handled if not isinstance(moment, int)})
    return [(moment - boundaries[0]) / timedelta(seconds=1) for moment in boundaries]


async def test_everything_is_handled(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        began = now(program.store)
        for number in range(20):
            await program.order(number)
        await trio.sleep(100.1)
        await drain(program.store)
        await nothing_is_left(program, 20)
        boundaries = [moment for moment in program.handled if not isinstance(moment, int)]
        assert boundaries == [began + timedelta(seconds=10 * n) for n in range(1, 11)]
        program.stop.stop()
    assert [program.story(child) for child in CHILDREN] == [[*LIFE, "stopping", "stopped"]] * len(CHILDREN)


async def test_an_order_is_handled_as_soon_as_it_is_stored(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await trio.sleep(1000)
        moment = trio.current_time()
        await program.order(0)
        await drain(program.store)
        assert trio.current_time() == moment + program.takes
        await nothing_is_left(program, 1)
        program.stop.stop()


@pytest.mark.parametrize("child", CHILDREN)
async def test_a_child_that_crashes_is_restarted_and_nothing_is_lost(autojump_clock: MockClock, child: str) -> None:
    async with open_program() as program:
        for number in range(20):
            await program.order(number)
        await trio.sleep(0.7)  # in the middle of the second handlers
        program.crash(child)
        await trio.sleep(60)
        await drain(program.store)
        await nothing_is_left(program, 20)
        assert reports(program) == [0, 10, 20, 30, 40, 50]
        assert program.story(child) == [*LIFE, "failed", "restarting", *LIFE]
        for other in set(CHILDREN) - {child}:
            assert program.story(other) == LIFE
        (failed,) = [event for event in program.events if event.kind == "failed"]
        assert isinstance(failed.error, Boom)
        program.stop.stop()


@pytest.mark.parametrize("child", CHILDREN)
async def test_a_crash_spends_no_attempt_of_what_was_in_hand(autojump_clock: MockClock, child: str) -> None:
    async with open_program() as program:
        program.takes = 5
        for number in range(4):
            await program.order(number)
        for _ in range(4):  # more often than there are attempts
            await trio.sleep(1)
            program.crash(child)
            await settle()
        await trio.sleep(60)
        await drain(program.store)
        await nothing_is_left(program, 4)
        assert program.story(child).count("failed") == 4
        program.stop.stop()


async def test_all_children_may_crash_at_once(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        for number in range(20):
            await program.order(number)
        await trio.sleep(0.7)
        for child in CHILDREN:
            program.crash(child)
        await trio.sleep(60)
        await drain(program.store)
        await nothing_is_left(program, 20)
        assert reports(program) == [0, 10, 20, 30, 40, 50]
        program.stop.stop()


async def test_lost_leadership_restarts_the_schedules_and_no_boundary_is_lost(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await trio.sleep(25)
        await rob_leader(program.store)
        await trio.sleep(100.1)
        await drain(program.store)
        failed = [event for event in program.events if event.kind == "failed"]
        assert [(event.child, type(event.error)) for event in failed] == [("schedules", LeadershipLost)]
        assert program.story("schedules") == [*LIFE, "failed", "restarting", *LIFE]
        assert reports(program) == [10 * n for n in range(12)]
        health = (await program.store.health()).schedules
        assert (health.leader is not None, health.overdue) == (True, 0)
        program.stop.stop()


async def test_what_is_left_at_a_stop_is_handled_by_the_next_life(
    autojump_clock: MockClock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("whole") / "app.db")
    handled: list[object] = []
    delivered: list[object] = []
    for _ in range(10):
        async with open_program(path) as program:
            if not handled:
                for number in range(20):
                    await program.order(number)
            await trio.sleep(2.6)
            program.stop.stop()
        handled += [number for number in program.handled if isinstance(number, int)]
        delivered += program.delivered
    assert sorted(handled) == delivered == list(range(20))  # type: ignore[type-var]
