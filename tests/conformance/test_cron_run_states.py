"""The state machine of runs and attempts: every transition is guarded, and illegal ones are impossible."""

from __future__ import annotations

from typing import Any

import pytest

from alkstore import Store
from alkstore.sql.cron import runs
from tests.conformance.cronning import (
    SUCCEEDED,
    kinds,
    run,
)

NO_STEPS = [
    (was, state)
    for was in ("queued", "dispatching", "running", "succeeded", "failed", "timed_out", "cancelled", "lost")
    for state in ("dispatching", "running", "succeeded", "lost")
    if state not in runs._STEPS.get(was, ())
]


def test_what_is_over_has_not_even_begun_again_without_having_been_queued() -> None:
    assert len(NO_STEPS) == 27
    assert {was for was, state in NO_STEPS if state == "running"} == set(runs._STEPS) - {"dispatching"} | {"succeeded"}


@pytest.mark.parametrize(("was", "state"), NO_STEPS)
async def test_what_is_not_a_step_cannot_be_taken(store: Store, was: Any, state: Any) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    with pytest.raises(AssertionError, match="a run cannot go from"):
        await store._context.engine.run(lambda tx: runs._move(tx, made.id, 1, was, state))
    assert await kinds(store, made) == ["created", "queued"]


@pytest.mark.parametrize("state", ["running", "succeeded", "cancelled"])
async def test_a_step_from_a_state_that_the_run_is_not_in_changes_nothing(store: Store, state: Any) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    was: Any = "running" if state == "succeeded" else "dispatching"
    assert not await store._context.engine.run(lambda tx: runs._move(tx, made.id, 1, was, state))
    assert not await store._context.engine.run(lambda tx: runs._move(tx, made.id, 2, "queued", "cancelled"))
    assert (await run(store, made.id)).state == "queued"
    assert await kinds(store, made) == ["created", "queued"]


async def test_the_first_end_of_an_attempt_wins_once(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    engine = store._context.engine
    (taken,) = await engine.run(lambda tx: runs.dispatch(tx, ("h",), "w", 1))
    job, fence = taken.job.id, taken.job.fence
    assert await engine.run(lambda tx: runs.started(tx, made.id, 1, job, fence))
    endings = [runs.Ending("succeeded"), runs.Ending("failed", "no"), runs.Ending("cancelled")]
    done = [await engine.run(lambda tx, e=e: runs.end(tx, made.id, 1, job, fence, e)) for e in endings]  # type: ignore[misc]
    assert done == [True, False, False]
    assert await kinds(store, made) == SUCCEEDED


async def test_an_attempt_that_is_not_the_present_one_ends_nothing(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    made = await store.cron.run_now("t")
    engine = store._context.engine
    (taken,) = await engine.run(lambda tx: runs.dispatch(tx, ("h",), "w", 1))
    job, fence = taken.job.id, taken.job.fence
    for attempt, its_fence in ((2, fence), (1, fence + 1)):
        assert not await engine.run(
            lambda tx, a=attempt, f=its_fence: runs.end(tx, made.id, a, job, f, runs.Ending("succeeded"))  # type: ignore[misc]
        )
    assert (await run(store, made.id)).state == "dispatching"
