"""The runner of cron: how it starts, how often it looks, and how it stops."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio

from actors import Supervisor
from alkstore import StopToken, Store, StoreError
from alkstore.cron import EDGE, STANDALONE, RetryPolicy, RunHandle
from alkstore.cron.handle import Cycles
from alkstore.sql.cron import admission, runs
from tests.conformance.cronning import Handler, kinds, later, only_run, publish, run, runs_here, states, two_stores
from tests.conformance.helpers import OpenStore, TaskSteps, calm, fails, no_group


async def nothing(_: RunHandle) -> None:
    pass


async def forever(_: RunHandle) -> None:
    await trio.sleep_forever()


async def stopped_after(
    store: Store, seconds: float, handler: Handler = nothing, profile: Any = STANDALONE, **options: Any
) -> tuple[str, float]:
    """Run cron, stop it after so many seconds; return what it has returned, and how long the stop took."""
    stop = StopToken()
    results: list[str] = []

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        results.append(await store.cron.run({"h": handler}, profile, stop=stop, task_status=task_status, **options))

    with no_group():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nursery.start, serve)
            await trio.sleep(seconds)
            stop.stop()
            began = trio.current_time()
    return results[0], trio.current_time() - began


def slow_cycles(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[float, float]]:
    """Let every cycle take so long; return the list of when each began and ended."""
    once, taken = Cycles.once, []

    async def slow(self: Cycles) -> Any:
        began = trio.current_time()
        await trio.sleep(seconds)
        summary = await once(self)
        taken.append((began, trio.current_time()))
        return summary

    monkeypatch.setattr(Cycles, "once", slow)
    return taken


# ---------------------------------------------------------------------------------------------------------- start


async def test_when_it_is_ready_one_cycle_has_ended(store: Store) -> None:
    await publish(store)
    async with runs_here(store):
        assert await states(store) == ["queued"]


async def test_an_error_of_the_recovery_comes_before_it_is_ready(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise StoreError("no recovery today")

    monkeypatch.setattr(runs, "recover", broken)
    await publish(store)
    with pytest.raises(StoreError, match="no recovery today"):
        async with runs_here(store):
            raise AssertionError("it was ready")
    assert await store.cron.runs() == []


async def test_an_error_of_the_first_cycle_comes_before_it_is_ready(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise StoreError("no page today")

    monkeypatch.setattr(admission, "page", broken)
    with pytest.raises(StoreError, match="no page today"):
        async with runs_here(store):
            raise AssertionError("it was ready")


async def test_an_error_of_a_later_cycle_leaves_alone_and_gives_back_what_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise StoreError("no page today")

    await publish(store)

    async def run_until_it_breaks() -> None:
        async with runs_here(store, forever):
            await calm()
            monkeypatch.setattr(admission, "page", broken)
            await trio.sleep(3_600)

    await fails(StoreError, run_until_it_breaks)
    over = await only_run(store)
    assert (over.state, over.error) == ("cancelled", "interrupted by cancellation")


async def test_it_can_be_run_again(store: Store) -> None:
    await publish(store, expression="* * * * * *")
    for n in range(1, 4):
        async with runs_here(store, nothing):
            await calm()
            assert await states(store) == ["succeeded"] * n
        await trio.sleep(1)


async def test_a_supervisor_runs_it(store: Store) -> None:
    await publish(store)
    stop = StopToken()
    async with Supervisor(stop) as supervisor:
        await supervisor.start("cron", partial(store.cron.run, {"h": nothing}, STANDALONE))
        await trio.sleep(120)
        await calm()
        stop.stop()
    assert await states(store) == ["succeeded"] * 3


# ------------------------------------------------------------------------------------------------------- how often


async def test_cycles_never_overlap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = slow_cycles(monkeypatch, 3)
    await publish(store, expression="* * * * * *")
    async with runs_here(store, nothing):
        await trio.sleep(60)
    assert len(taken) >= 15
    assert all(begin >= end for (_, end), (begin, _) in pairwise(taken))


@pytest.mark.parametrize(("profile", "page", "period"), [(EDGE, 4, 5), (STANDALONE, 16, 1)])
async def test_a_profile_looks_at_one_page_a_period(store: Store, profile: Any, page: int, period: int) -> None:
    await store.cron.publish_task("t", call="h")
    for n in range(2 * page + 1):
        await publish(store, f"g{n}", misfire="fire_once")
    async with runs_here(store, None, profile):
        for expected in (page, 2 * page, 2 * page + 1):
            assert len(await store.cron.runs()) == expected
            await trio.sleep(period)
            await calm()


async def test_with_nothing_due_it_sleeps(store: Store) -> None:
    """A day of silence costs no look at the store."""
    await publish(store, expression="0 0 29 2 *")
    async with runs_here(store, nothing):
        await trio.sleep(10)
        with TaskSteps() as steps:
            await trio.sleep(86_400)
        assert steps.count < 50


async def test_it_wakes_for_the_soonest_occurrence(store: Store) -> None:
    await publish(store, expression="0 0 * * *")
    await publish(store, "soon", expression="30 0 * * *")
    async with runs_here(store, nothing):
        await trio.sleep(3_600)
    assert {made.trigger: (made.created_at - made.scheduled_for) for made in await store.cron.runs()} == {  # type: ignore[operator]
        "g": timedelta(0),
        "soon": timedelta(0),
    }


async def test_a_cycle_that_has_done_something_is_told(store: Store) -> None:
    events = store.events()
    await publish(store)
    async with runs_here(store, nothing):
        await trio.sleep(30)
    (summary,) = [event.details["summary"] for event in events._buffer if event.kind == "cron_cycle"]
    assert (summary.scanned, summary.admitted) == (1, 1)


async def test_a_reader_of_events_that_fails_or_never_reads_stops_nothing(store: Store) -> None:
    """A diagnostic sink is none of the runner's business."""
    store.events(buffer=1)
    raised = []

    async def sink() -> None:
        try:
            async for event in store.events():
                raise LookupError(event.kind)
        except LookupError as error:
            raised.append(error)

    await publish(store, expression="* * * * * *")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink)
        await calm()
        async with runs_here(store, nothing):
            await trio.sleep(10)
            await calm()
    assert len(raised) == 1
    assert await states(store) == ["succeeded"] * 11


# ----------------------------------------------------------------------------------------------------------- stop


async def test_with_nothing_in_hand_it_stops_at_once(store: Store) -> None:
    await publish(store)
    assert await stopped_after(store, 100) == ("stopped", 0)


async def test_stopped_before_it_begins_it_admits_nothing(store: Store) -> None:
    await publish(store)
    stop = StopToken()
    stop.stop()
    assert await store.cron.run({"h": nothing}, STANDALONE, stop=stop) == "stopped"
    assert await store.cron.runs() == []


async def test_after_a_stop_nothing_is_admitted_and_nothing_is_started(store: Store) -> None:
    await publish(store, expression="* * * * * *")
    async with runs_here(store, partial(_sleep, 20), concurrency=1) as stop:
        await calm()
        stop.stop()
        await store.cron.run_now("t")
        await trio.sleep(30)
    assert await states(store) == ["succeeded", "queued"]


async def _sleep(seconds: float, _: RunHandle) -> None:
    await trio.sleep(seconds)


async def test_the_cycle_in_flight_is_awaited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_cycles(monkeypatch, 4)
    await publish(store)
    assert await stopped_after(store, 1) == ("stopped", 3)
    assert await states(store) == ["queued"]


@pytest.mark.parametrize(("profile", "bound"), [(EDGE, 5), (STANDALONE, 10), (later(stop_within=0), 0)])
async def test_a_cycle_that_does_not_end_is_given_up_within_the_bound_of_the_profile(
    store: Store, monkeypatch: pytest.MonkeyPatch, profile: Any, bound: float
) -> None:
    slow_cycles(monkeypatch, 1_000)
    assert await stopped_after(store, 1, profile=profile) == ("timed_out", bound)


async def test_a_run_may_end_within_the_grace(store: Store) -> None:
    await publish(store, expression="0 0 1 1 *")
    assert await stopped_after(store, 1, partial(_sleep, 25)) == ("stopped", 24)
    assert await states(store) == ["succeeded"]


async def test_a_run_that_does_not_is_cancelled_and_says_by_what(store: Store) -> None:
    await publish(store, expression="0 0 1 1 *")
    assert await stopped_after(store, 1, forever) == ("stopped", 30)
    over = await only_run(store)
    assert (over.state, over.error) == ("cancelled", "interrupted by shutdown")
    assert (await kinds(store, over))[-1] == "cancelled"


async def test_the_grace_may_be_another(store: Store) -> None:
    await publish(store, expression="0 0 1 1 *")
    assert await stopped_after(store, 1, forever, grace=3) == ("stopped", 3)


async def test_an_interrupted_run_gets_another_attempt_if_its_policy_says_so(store: Store) -> None:
    await publish(store, expression="0 0 1 1 *", retry=RetryPolicy(1, 0))
    assert await stopped_after(store, 1, forever, grace=0) == ("stopped", 0)
    made = await only_run(store)
    assert (await kinds(store, made))[-2:] == ["cancelled", "queued"]
    async with runs_here(store, nothing):
        await calm()
    assert ((await run(store, made.id)).state, (await run(store, made.id)).attempt) == ("succeeded", 2)


async def test_an_outer_cancellation_interrupts_what_runs(store: Store) -> None:
    await publish(store, expression="0 0 1 1 *")
    with trio.move_on_after(5):
        await store.cron.run({"h": forever}, STANDALONE, stop=StopToken())
    assert trio.current_time() == 5
    over = await only_run(store)
    assert (over.state, over.error) == ("cancelled", "interrupted by cancellation")


async def test_a_run_that_was_taken_and_not_begun_goes_back_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has run nothing, so it has lost nothing: the next runner takes it with the same attempt."""
    await publish(store, expression="0 0 1 1 *")
    stop = StopToken()
    dispatch = runs.dispatch

    def stopping(*args: Any) -> Any:
        taken = dispatch(*args)
        if taken:
            trio.from_thread.run_sync(stop.stop) if not trio.lowlevel.in_trio_run() else stop.stop()
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(runs, "dispatch", stopping)
        assert await store.cron.run({"h": nothing}, STANDALONE, stop=stop) == "stopped"
    made = await only_run(store)
    assert (made.state, made.attempt, made.error) == ("queued", 1, None)
    assert await kinds(store, made) == ["created", "queued", "dispatching", "queued"]
    async with runs_here(store, nothing):
        await calm()
    assert await states(store) == ["succeeded"]


async def test_while_one_drains_another_goes_on(open_shared_store: OpenStore) -> None:
    """A rolling deployment."""
    async with two_stores(open_shared_store) as (one, other):
        await publish(one)
        async with runs_here(one, partial(_sleep, 20)) as stop:
            await calm()
            stop.stop()
            async with runs_here(other, nothing):
                await trio.sleep(120)
                await calm()
        assert await states(one) == ["succeeded"] * 3
