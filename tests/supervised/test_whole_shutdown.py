"""How a whole program ends, from the outside in: schedules, claims, handlers, heartbeats, writer, connection."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.conformance.helpers import locks
from tests.supervised.program import CHILDREN, Program, open_program


def after_the_stop(program: Program) -> list[str]:
    return program.log[program.log.index("stop") :]


async def stopped_in_the_middle(program: Program, *, takes: float, orders: int = 8) -> None:
    """Flip the token when all workers have something in hand, and more is waiting."""
    program.takes = takes
    for number in range(orders):
        await program.order(number)
    await trio.sleep(10.5)  # a report is in hand too
    program.log.append("stop")
    program.stop.stop()


async def test_children_stop_one_after_the_other_in_reverse(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await stopped_in_the_middle(program, takes=15)
    ends = [entry for entry in after_the_stop(program) if entry.endswith((" stopping", " stopped"))]
    assert ends == [f"{child} {kind}" for child in reversed(CHILDREN) for kind in ("stopping", "stopped")]


async def test_the_schedules_lease_is_released_before_anything_else(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await stopped_in_the_middle(program, takes=15)
    assert after_the_stop(program)[:4] == ["stop", "schedules stopping", "lease released", "schedules stopped"]


async def test_nothing_is_claimed_by_a_child_that_stops(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await stopped_in_the_middle(program, takes=15)
    log = after_the_stop(program)
    assert "claim" not in log[log.index("emails stopping") :]


async def test_handlers_end_and_leases_are_renewed_until_the_last_ack(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await stopped_in_the_middle(program, takes=15, orders=4)
    log = after_the_stop(program)
    of_emails = log[log.index("emails stopping") : log.index("emails stopped")]
    assert of_emails.count("handled") == of_emails.count("ack") <= 4
    everything = [entry for entry in log if entry in ("heartbeat", "handled", "delivered", "ack", "give back")]
    assert everything[-1] == "ack"
    assert "heartbeat" in everything
    assert "give back" not in everything
    assert sorted(program.delivered) == [0]
    assert {0, 1, 2, 3} <= set(program.handled)


async def test_the_connection_is_closed_last(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await stopped_in_the_middle(program, takes=15)
    log = after_the_stop(program)
    assert log[log.index("supervisor has ended") :] == ["supervisor has ended", "checkpoint", "connection closed"]


async def test_the_writer_still_writes_when_the_supervisor_has_ended(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        program.stop.stop()
        await program.over.wait()
        await program.order(1)
        assert (await program.store.queue("emails").counts()).ready == 1


async def test_after_the_grace_handlers_are_cancelled_and_their_jobs_go_back(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        store = program.store
        await stopped_in_the_middle(program, takes=10_000, orders=4)
        await program.over.wait()
        counts = await store.queue("emails").counts()
        messages = await store.outbox("webhooks").counts()
        assert (counts.ready, counts.leased, counts.dead) == (4, 0, 0)
        assert (messages.ready, messages.leased, messages.dead) == (4, 0, 0)
        assert [job.error for job in await store.queue("emails").list()] == ["interrupted by shutdown"] * 4
        assert {job.attempt for job in await store.queue("emails").list()} == {0}
    assert "ack" not in after_the_stop(program)


async def test_a_stop_with_nothing_in_hand_takes_no_time(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        await trio.sleep(5)
        began = trio.current_time()
        program.stop.stop()
    assert trio.current_time() == began


async def test_a_cancellation_from_outside_gives_everything_back_at_once(autojump_clock: MockClock) -> None:
    async with open_program() as program:
        program.takes = 10_000
        for number in range(4):
            await program.order(number)
        await trio.sleep(10.5)
        began = trio.current_time()
        program.scope.cancel()
        await program.over.wait()
        store = program.store
        assert trio.current_time() == began
        assert (await store.queue("emails").counts()).leased == 0
        assert (await store.outbox("webhooks").counts()).leased == 0
        assert await locks(store) == {}
