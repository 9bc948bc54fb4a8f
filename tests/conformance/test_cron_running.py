"""The life of a run in the hands of a handler: its states, its events, its attempts, and how it is cancelled."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio

from alkstore import InvalidName, StopToken, Store, StoreBusy
from alkstore.context import Hands
from alkstore.cron import EDGE, STANDALONE, RetryPolicy, RunHandle
from alkstore.sql.cron import runs
from tests.conformance.cronning import (
    SUCCEEDED,
    broken,
    cursor,
    forever,
    kinds,
    nothing,
    only_run,
    publish,
    run,
    runs_here,
    sleep_for,
    states,
    trigger,
    two_stores,
)
from tests.conformance.helpers import START, OpenStore, at, calm, fails, now, refused, sql

# -------------------------------------------------------------------------------------------------------- success


async def test_a_run_goes_from_queued_to_succeeded_and_each_step_is_an_event(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, nothing):
        await calm()
    assert await kinds(store, made) == SUCCEEDED
    over = await run(store, made.id)
    assert (over.state, over.attempt, over.error, over.output, over.exit_code) == ("succeeded", 1, None, None, None)
    assert over.started_at == over.ended_at == now(store)
    assert (await store.health()).queues == {}  # its job is gone


async def test_events_have_their_moment_and_their_attempt(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, partial(sleep_for, 7)):
        await trio.sleep(10)
    events = await store.cron.events(made.id)
    assert [event.attempt for event in events] == [1] * 5
    assert [(event.at - made.created_at).total_seconds() for event in events] == [0, 0, 0, 0, 7]
    assert sorted(event.id for event in events) == [event.id for event in events]


async def test_the_handler_knows_its_run(store: Store) -> None:
    handled: list[dict[str, Any]] = []

    async def handler(handle: RunHandle) -> None:
        handled.append(
            {
                name: getattr(handle, name)
                for name in ("task", "args", "attempt", "max_attempts", "scheduled_for", "fence", "cancelled")
            }
            | {"run": handle.run.id, "state": handle.run.state, "trigger": handle.run.trigger}
        )

    await publish(store, args={"kind": "daily"}, retry=RetryPolicy(2))
    async with runs_here(store, handler):
        await calm()
    made = await only_run(store)
    assert handled == [
        {
            "task": "t",
            "args": {"kind": "daily"},
            "attempt": 1,
            "max_attempts": 3,
            "scheduled_for": made.scheduled_for,
            "fence": 1,
            "cancelled": False,
            "run": made.id,
            "state": "dispatching",
            "trigger": "g",
        }
    ]


async def test_a_run_by_hand_may_have_arguments_of_its_own(store: Store) -> None:
    handled: list[object] = []

    async def handler(handle: RunHandle) -> None:
        handled.append((handle.args, handle.scheduled_for))

    await store.cron.publish_task("t", call="h", args=1)
    made = await store.cron.run_now("t", args=[2])
    await store.cron.run_now("t")
    assert (made.trigger, made.key, made.scheduled_for, made.timezone) == (None, None, None, None)
    async with runs_here(store, handler, concurrency=1):
        await calm()
    assert handled == [([2], None), (1, None)]


async def test_a_disabled_task_can_be_run_by_hand(store: Store) -> None:
    await store.cron.publish_task("t", call="h", enabled=False)
    await store.cron.run_now("t")
    async with runs_here(store, nothing):
        await calm()
    assert await states(store) == ["succeeded"]


async def test_a_command_takes_no_arguments_by_hand(store: Store) -> None:
    await store.cron.publish_task("t", command=["true"])
    await fails(ValueError, partial(store.cron.run_now, "t", args=1))
    assert await store.cron.runs() == []


async def test_a_run_keeps_the_revision_with_which_it_was_made(store: Store) -> None:
    handled: list[object] = []

    async def handler(handle: RunHandle) -> None:
        handled.append(handle.args)

    await store.cron.publish_task("t", call="h", args="old")
    await store.cron.run_now("t")
    await store.cron.publish_task("t", call="h", args="new", expected_revision=1)
    async with runs_here(store, handler):
        await calm()
    assert handled == ["old"]


async def test_the_run_of_a_task_that_was_deleted_meanwhile_is_run(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.run_now("t")
    await store.cron.delete_task("t")
    async with runs_here(store, nothing):
        await calm()
    assert await states(store) == ["succeeded"]


async def test_every_occurrence_of_a_day_has_its_run_in_time(store: Store) -> None:
    handled = []

    async def handler(handle: RunHandle) -> None:
        assert handle.scheduled_for == now(store)
        handled.append(handle.scheduled_for)

    await publish(store, expression="0 * * * *")
    began = now(store)
    async with runs_here(store, handler):
        await trio.sleep(86_400)
        await calm()
    assert handled == [began + timedelta(hours=hour) for hour in range(24 + 1)]


async def test_a_trigger_that_is_published_while_cron_runs_is_seen_at_once(store: Store) -> None:
    async with runs_here(store, nothing):
        await trio.sleep(3_600)
        await publish(store)
        await trio.sleep(1)  # the period
        await calm()
        assert await states(store) == ["succeeded"]


async def test_a_trigger_that_another_process_publishes_is_seen(open_shared_store: OpenStore) -> None:
    async with two_stores(open_shared_store) as (one, other), runs_here(one, nothing):
        await trio.sleep(3_600)
        await publish(other)
        with trio.fail_after(60):
            while await states(one) != ["succeeded"]:  # noqa: ASYNC110 - how soon is told by another test
                await trio.sleep(1)


async def test_a_run_by_hand_starts_at_once(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    async with runs_here(store, nothing, EDGE):
        await trio.sleep(3_600)
        await store.cron.run_now("t")
        await calm()
        assert await states(store) == ["succeeded"]


# -------------------------------------------------------------------------------------------------------- failure


async def test_a_handler_that_raises_has_failed(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, broken):
        await calm()
    over = await run(store, made.id)
    assert (over.state, over.error, over.ended_at) == ("failed", "ValueError: no", now(store))
    events = await store.cron.events(made.id)
    assert (events[-1].kind, events[-1].details) == ("run.failed", {"error": "ValueError: no"})
    assert (await store.health()).queues == {}


async def test_an_error_text_may_hold_anything(store: Store) -> None:
    async def handler(_: RunHandle) -> None:
        raise ValueError("a\0b\ud800" + "x" * 10_000)

    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await calm()
    error = (await run(store, made.id)).error
    assert error is not None
    assert error.startswith("ValueError: a\N{REPLACEMENT CHARACTER}b?x")
    assert len(error.encode()) <= 8192


@pytest.mark.parametrize("method", ["ack", "retry", "fail"])
async def test_a_run_is_settled_by_how_its_handler_ends(store: Store, method: str) -> None:
    async def handler(handle: RunHandle) -> None:
        with pytest.raises(RuntimeError, match="how its handler ends"):
            await getattr(handle, method)()
        with pytest.raises(RuntimeError, match="how its handler ends"):
            await handle.snooze(1)

    await store.cron.publish_task("t", call="h")
    await store.cron.run_now("t")
    async with runs_here(store, handler):
        await calm()
    assert await states(store) == ["succeeded"]


async def test_a_failure_stops_no_other_run(store: Store) -> None:
    async def handler(handle: RunHandle) -> None:
        if handle.args:
            raise ValueError

    await store.cron.publish_task("t", call="h")
    for bad in (True, False, True, False):
        await store.cron.run_now("t", args=bad)
    async with runs_here(store, handler):
        await calm()
    assert await states(store) == ["failed", "succeeded"] * 2


async def test_system_exit_in_a_handler_fails_its_run_and_ends_the_runner(store: Store) -> None:
    async def handler(_: RunHandle) -> None:
        raise SystemExit(7)

    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    error = await fails(SystemExit, partial(store.cron.run, {"h": handler}, STANDALONE, stop=StopToken()))
    assert error.code == 7
    assert (await run(store, made.id)).state == "failed"


async def test_a_store_that_is_busy_for_long_before_a_handler_begins_costs_the_run_no_attempt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = runs.started
    free_at = store._context.engine.clock.now_ms() + 15_000

    def busy(tx: Any, *args: Any) -> Any:
        if tx.now() < free_at:
            raise StoreBusy("somebody else writes")
        return started(tx, *args)

    monkeypatch.setattr(runs, "started", busy)
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, nothing):
        await trio.sleep(20)
    assert await kinds(store, made) == ["created", "queued", "dispatching", "queued", *SUCCEEDED[2:]]
    events = await store.cron.events(made.id)
    assert events[3].details == {"error": "StoreBusy: somebody else writes"}
    assert (await run(store, made.id)).attempt == 1


# -------------------------------------------------------------------------------------------------------- retries


async def test_a_failed_attempt_is_followed_by_others_with_a_pause_that_doubles(store: Store) -> None:
    began: list[float] = []

    async def handler(handle: RunHandle) -> None:
        assert handle.attempt == len(began) + 1
        began.append(trio.current_time())
        raise ValueError(handle.attempt)

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(3, 10))
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await trio.sleep(1_000)
    assert [moment - began[0] for moment in began] == [0, 10, 30, 70]
    assert await kinds(store, made) == [
        "created",
        *["queued", "dispatching", "running", "failed"] * 4,
    ]
    over = await run(store, made.id)
    assert (over.state, over.attempt, over.error) == ("failed", 4, "ValueError: 4")
    attempts = await sql(store, "SELECT number, state, error FROM __alkstore_cron_attempts ORDER BY number")
    assert attempts == [(n, "failed", f"ValueError: {n}") for n in range(1, 5)]


async def test_an_event_belongs_to_the_attempt_that_it_is_about(store: Store) -> None:
    await store.cron.publish_task("t", call="h", retry=RetryPolicy(1, 0))
    made = await store.cron.run_now("t")
    async with runs_here(store, broken):
        await trio.sleep(1)
    events = [(event.kind.removeprefix("run."), event.attempt) for event in await store.cron.events(made.id)]
    assert events[4:7] == [("failed", 1), ("queued", 2), ("dispatching", 2)]


async def test_a_run_that_waits_for_its_next_attempt_is_queued_with_its_last_error(store: Store) -> None:
    await store.cron.publish_task("t", call="h", retry=RetryPolicy(1, 60))
    made = await store.cron.run_now("t")
    async with runs_here(store, broken):
        await calm()
        waiting = await run(store, made.id)
        assert (waiting.state, waiting.attempt, waiting.error) == ("queued", 2, "ValueError: no")
        assert (waiting.started_at, waiting.ended_at) == (None, None)


async def test_an_attempt_that_succeeds_ends_the_run_without_an_error(store: Store) -> None:
    async def handler(handle: RunHandle) -> None:
        if handle.attempt < 3:
            raise ValueError

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(5, 1))
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await trio.sleep(60)
    over = await run(store, made.id)
    assert (over.state, over.attempt, over.error) == ("succeeded", 3, None)


async def test_the_pause_before_an_attempt_is_at_most_an_hour(store: Store) -> None:
    began: list[float] = []

    async def handler(_: RunHandle) -> None:
        began.append(trio.current_time())
        raise ValueError

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(100, 1_000))
    await store.cron.run_now("t")
    async with runs_here(store, handler):
        await trio.sleep(4 * 3_600)
    assert [after - before for before, after in pairwise(began)] == [1_000, 2_000, 3_600, 3_600, 3_600]


async def test_a_waiting_attempt_can_be_cancelled(store: Store) -> None:
    await store.cron.publish_task("t", call="h", retry=RetryPolicy(5, 60))
    made = await store.cron.run_now("t")
    async with runs_here(store, broken):
        await calm()
        assert await store.cron.cancel_run(made.id)
        await trio.sleep(1_000)
    assert (await run(store, made.id)).state == "cancelled"
    assert (await kinds(store, made))[-2:] == ["queued", "cancelled"]


# -------------------------------------------------------------------------------------------------------- timeouts


async def test_a_handler_that_runs_too_long_is_cancelled_and_its_run_timed_out(store: Store) -> None:
    await store.cron.publish_task("t", call="h", timeout=60)
    made = await store.cron.run_now("t")
    async with runs_here(store, forever):
        await trio.sleep(100)
    over = await run(store, made.id)
    assert (over.state, over.ended_at) == ("timed_out", made.created_at + timedelta(seconds=60))
    assert over.error == "RunTimedOut: ran longer than its timeout of 60 s"
    assert (await kinds(store, made))[-1] == "timed_out"


async def test_a_handler_that_ends_in_time_is_not(store: Store) -> None:
    await store.cron.publish_task("t", call="h", timeout=60)
    await store.cron.run_now("t")
    async with runs_here(store, partial(sleep_for, 59.9)):
        await trio.sleep(100)
    assert await states(store) == ["succeeded"]


async def test_what_a_handler_raises_on_its_way_out_of_a_timeout_is_told_too(store: Store) -> None:
    async def handler(_: RunHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("half done")

    await store.cron.publish_task("t", call="h", timeout=60)
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await trio.sleep(100)
    over = await run(store, made.id)
    assert over.state == "timed_out"
    assert over.error == "RunTimedOut: ran longer than its timeout of 60 s, then raised ValueError: half done"


async def test_a_timeout_uses_up_an_attempt_as_a_failure_does(store: Store) -> None:
    await store.cron.publish_task("t", call="h", timeout=60, retry=RetryPolicy(1, 0))
    made = await store.cron.run_now("t")
    async with runs_here(store, forever):
        await trio.sleep(200)
    assert (await kinds(store, made))[3:] == ["running", "timed_out", "queued", "dispatching", "running", "timed_out"]


async def test_without_a_timeout_a_handler_may_run_for_days(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.run_now("t")
    async with runs_here(store, partial(sleep_for, 7_200)):
        await trio.sleep(7_300)
    assert await states(store) == ["succeeded"]


# ------------------------------------------------------------------------------------------------------ cancelling


async def test_a_queued_run_can_be_cancelled(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    assert [await store.cron.cancel_run(made.id) for _ in range(2)] == [True, False]
    async with runs_here(store, nothing):
        await calm()
    assert await kinds(store, made) == ["created", "queued", "cancelled"]
    over = await run(store, made.id)
    assert (over.state, over.ended_at, over.started_at) == ("cancelled", now(store), None)


async def test_a_running_run_is_cancelled_at_once_in_its_own_process(store: Store) -> None:
    ended: list[float] = []

    async def handler(handle: RunHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            assert handle.cancelled
            ended.append(trio.current_time())

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(5, 0))
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await trio.sleep(7)
        assert await store.cron.cancel_run(made.id)
        await calm()
        assert ended == [trio.current_time()]
        await trio.sleep(60)
    assert await kinds(store, made) == ["created", "queued", "dispatching", "running", "cancelled"]
    over = await run(store, made.id)
    assert (over.state, over.error) == ("cancelled", "cancelled")


async def test_what_a_cancelled_handler_does_on_its_way_out_changes_nothing(store: Store) -> None:
    async def handler(_: RunHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError

    await store.cron.publish_task("t", call="h", retry=RetryPolicy(5, 0))
    made = await store.cron.run_now("t")
    async with runs_here(store, handler):
        await calm()
        assert await store.cron.cancel_run(made.id)
        await trio.sleep(60)
    assert (await kinds(store, made))[-1] == "cancelled"


async def test_a_run_that_another_process_runs_is_cancelled_at_its_next_heartbeat(
    open_shared_store: OpenStore,
) -> None:
    ended: list[float] = []

    async def handler(_: RunHandle) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async with two_stores(open_shared_store) as (one, other):
        await one.cron.publish_task("t", call="h")
        made = await one.cron.run_now("t")
        async with runs_here(one, handler):
            await trio.sleep(5)
            other._context.hands = Hands()  # those of another process
            assert await other.cron.cancel_run(made.id)
            assert (await run(one, made.id)).state == "cancelled"
            cancelled = trio.current_time()
            await trio.sleep(20)
        assert 0 < ended[0] - cancelled <= runs.LEASE_MS / 3_000
        assert (await kinds(one, made))[-1] == "cancelled"


async def test_a_run_that_is_over_cannot_be_cancelled(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    async with runs_here(store, nothing):
        await calm()
    assert not await store.cron.cancel_run(made.id)
    assert (await run(store, made.id)).state == "succeeded"


async def test_a_cancelled_run_frees_its_place(store: Store) -> None:
    async def handler(handle: RunHandle) -> None:
        if handle.args:
            await trio.sleep_forever()

    await store.cron.publish_task("t", call="h")
    stuck = await store.cron.run_now("t", args=True)
    await store.cron.run_now("t")
    async with runs_here(store, handler, concurrency=1):
        await calm()
        assert await states(store) == ["running", "queued"]
        await store.cron.cancel_run(stuck.id)
        await calm()
        assert await states(store) == ["cancelled", "succeeded"]


# ---------------------------------------------------------------------------------------------------------- refused


async def test_wrong_handlers_are_refused_before_anything_is_sent(one_store: Store) -> None:
    def plain(_: object) -> None:
        pass

    start = partial(one_store.cron.run, stop=StopToken())
    assert "must be an async function" in str(
        await refused(TypeError, lambda: start({"h": plain}, STANDALONE))  # type: ignore[dict-item]
    )
    await refused(TypeError, lambda: start([nothing], STANDALONE))  # type: ignore[arg-type]
    await refused(InvalidName, lambda: start({"": nothing}, STANDALONE))
    await refused(TypeError, lambda: start({"h": nothing}, "EDGE"))  # type: ignore[arg-type]
    await refused(ValueError, lambda: start({"h": nothing}, EDGE, concurrency=0))
    await refused(ValueError, lambda: start({"h": nothing}, EDGE, grace=-1))


async def test_a_cursor_moves_before_its_run_is_started(store: Store) -> None:
    """Whatever becomes of the run, the next occurrence is another one."""
    await publish(store)
    at_start: list[int | None] = []

    async def handler(_: RunHandle) -> None:
        at_start.append(await cursor(store))

    async with runs_here(store, handler):
        await calm()
    made = await only_run(store)
    assert made.scheduled_for is not None
    assert at_start == [round(made.scheduled_for.timestamp() * 1000) + 60_000]


async def test_a_clock_set_back_keeps_no_run_waiting(stepped: Store, clock: Any) -> None:
    await stepped.cron.publish_task("t", call="h")
    await stepped.cron.run_now("t")
    clock.advance(-3_600)
    async with runs_here(stepped, nothing):
        await calm()
        assert await states(stepped) == ["succeeded"]


async def test_a_clock_set_back_by_years_is_met_by_the_runner(stepped: Store, clock: Any) -> None:
    clock.advance(70 * 365 * 86_400)
    await publish(stepped, expression="30 * * * *")
    async with runs_here(stepped, nothing):
        await calm()
        clock.set(START)
        await trio.sleep(2)
        assert (await trigger(stepped)).next_fire_at == at(START + 1_800_000)
        clock.advance(1_800)
        await trio.sleep(2)
        assert await states(stepped) == ["succeeded"]
