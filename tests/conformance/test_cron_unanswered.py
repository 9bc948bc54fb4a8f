"""A store that is busy, or whose answer is lost, for a moment: `cron.run` goes on, and no run is the worse for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio

from alkstore import OutcomeUnknown, Store, StoreBusy, StoreUnavailable
from alkstore.cron import RunHandle
from alkstore.sql import jobs
from alkstore.sql.cron import admission, runs
from tests.conformance.cronning import kinds, publish, run, runs_here, states
from tests.conformance.helpers import calm, seen

STEPS = {
    "renewal": (jobs, "heartbeat"),
    "recovery": (runs, "recover"),
    "take": (runs, "dispatch"),
    "start": (runs, "started"),
    "end": (runs, "end"),
    "look": (runs, "look"),
    "decision": (admission, "admit"),
    "next look": (admission, "soonest"),
}
"""What `cron.run` asks of the store."""

FAULTS = {
    "busy": (StoreBusy, False),
    "away": (StoreUnavailable, False),
    "not committed": (OutcomeUnknown, False),
    "committed": (OutcomeUnknown, True),
}
"""What becomes of it: an error, and whether it is done all the same."""


class Faulty:
    """Lets the next transactions fail in which a function of `alkstore.sql` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store, step: str, fault: str) -> None:
        self.left = self.met = 0
        self.then: Callable[[], object] = lambda: None
        """Called as it fails."""
        self.error, done = FAULTS[fault]
        self._done: list[object] = []
        module, name = STEPS[step]
        engine = type(store._context.engine)
        function, run, run_each = getattr(module, name), engine.run, engine.run_each

        def faulty(tx: Any, *args: Any) -> Any:
            if self.left and not done:
                self._fail()
            result = function(tx, *args)
            if self.left:
                self._done.append(result)
            return result

        async def run_or_fail(engine: Any, *args: Any, **options: Any) -> Any:
            result = await run(engine, *args, **options)
            self._lose_the_answer()
            return result

        async def run_each_or_fail(engine: Any, *args: Any, **options: Any) -> Any:
            result = await run_each(engine, *args, **options)
            self._lose_the_answer()
            return result

        monkeypatch.setattr(module, name, faulty)
        monkeypatch.setattr(engine, "run", run_or_fail)
        monkeypatch.setattr(engine, "run_each", run_each_or_fail)

    def _lose_the_answer(self) -> None:
        if self._done:
            self._done.clear()
            self._fail()

    def _fail(self) -> None:
        self.left -= 1
        self.met += 1
        self.then()
        raise self.error("for a moment")


LOOKS = ("look", "next look")
CASES = [(step, fault) for step in STEPS for fault in FAULTS if fault != "committed" or step not in LOOKS]


@pytest.mark.parametrize(("step", "fault"), CASES)
async def test_a_fault_of_a_moment_costs_no_run_anything(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, fault: str
) -> None:
    calls: Counter[int] = Counter()

    async def handler(handle: RunHandle) -> None:
        calls[handle.run.id] += 1
        await trio.sleep(100)

    faulty = Faulty(monkeypatch, store, step, fault)
    await publish(store, expression="*/3 * * * *", call="h")
    with store.events() as events:
        async with runs_here(store, handler, concurrency=3):
            await calm()
            faulty.left = 3
            made = await store.cron.run_now("t")
            await trio.sleep(300)
        assert faulty.met == 3 or (fault == "committed" and faulty.met)  # what is done may not be asked for again
        assert seen(events, "lost") == []
    assert set(await states(store)) == {"succeeded"}
    assert set(calls.values()) == {1}
    assert await kinds(store, made) == ["created", "queued", "dispatching", "running", "succeeded"]
    assert (await run(store, made.id)).attempt == 1


async def test_what_was_taken_as_the_stop_came_goes_back_although_the_store_did_not_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_: RunHandle) -> None:
        raise AssertionError("it was stopped before")

    faulty = Faulty(monkeypatch, store, "take", "committed")
    await store.cron.publish_task("t", call="h")
    async with runs_here(store, handler) as stop:
        await calm()
        faulty.then, faulty.left = stop.stop, 1
        made = await store.cron.run_now("t")
        await calm()
    assert faulty.met == 1
    assert await kinds(store, made) == ["created", "queued", "dispatching", "queued"]
    assert (await run(store, made.id)).attempt == 1
