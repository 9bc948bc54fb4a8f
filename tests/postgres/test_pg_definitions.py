"""Definitions of cron that are changed from several connections at once end as if one change had followed the other."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any, TypeAlias

import trio

from alkstore import Conflict, Store, open_store
from alkstore.cron import STANDALONE
from tests.conformance.helpers import sql
from tests.postgres.kit import Place

ROUNDS = 150
TASKS, TRIGGERS = ("t", "u"), ("g", "h")

Change: TypeAlias = Callable[[Store, str], Awaitable[object]]
"""Of a store's definitions, whose names end with a text: so that each round has its own."""


async def changed(call: Awaitable[object]) -> object:
    """What came of a change, without what is different in every store."""
    try:
        result = await call
    except Conflict:
        return "conflict"
    return result if isinstance(result, bool) else "published"


def publish_task(id: str, call: str, expected: int | None, enabled: bool | None = None) -> Change:
    return lambda store, end: changed(
        store.cron.publish_task(id + end, call=call, expected_revision=expected, enabled=enabled)
    )


def publish_trigger(id: str, task: str, expected: int | None, enabled: bool | None = None) -> Change:
    return lambda store, end: changed(
        store.cron.publish_trigger(
            id + end,
            task=task + end,
            expression="* * * * * *",
            timezone="UTC",
            expected_revision=expected,
            enabled=enabled,
        )
    )


def call(method: str, id: str) -> Change:
    return lambda store, end: changed(getattr(store.cron, method)(id + end))


def some_change(chance: random.Random) -> Change:
    task, trigger, expected = chance.choice(TASKS), chance.choice(TRIGGERS), chance.choice([None, 1, 1, 1, 2])
    return chance.choice(
        [
            publish_task(task, chance.choice(["one", "two"]), expected),
            publish_task(task, "two", expected, enabled=chance.choice([True, False])),
            publish_trigger(trigger, task, expected),
            publish_trigger(trigger, task, expected, enabled=chance.choice([True, False])),
            call(chance.choice(["enable_task", "disable_task", "delete_task"]), task),
            call(chance.choice(["enable_trigger", "disable_trigger", "delete_trigger"]), trigger),
        ]
    )


def some_beginning(chance: random.Random) -> list[Change]:
    begun = [publish_task(id, "one", None) for id in TASKS]
    begun += [publish_trigger(id, chance.choice(TASKS), None) for id in TRIGGERS]
    for method, ids in (("disable_task", TASKS), ("disable_trigger", TRIGGERS), ("delete_trigger", TRIGGERS)):
        begun += [call(method, id) for id in ids if chance.random() < 0.2]
    return begun


async def standing(store: Store, end: str) -> list[object]:
    """How the definitions stand; what has to be true of them in any case is asserted."""
    cron = store.cron
    tasks = {id: await cron.get_task(id + end) for id in TASKS}
    triggers = {id: await cron.get_trigger(id + end) for id in TRIGGERS}
    actives = "SELECT trigger, trigger_revision, active FROM __alkstore_cron_schedules"
    schedules = {id: (revision, bool(active)) for id, revision, active in await sql(store, actives)}
    stand: list[object] = [task and (task.revision, task.call, task.enabled) for task in tasks.values()]
    for id, trigger in triggers.items():
        if trigger is None:
            assert not schedules[id + end][1]
            stand.append(schedules[id + end])
            continue
        task = tasks[trigger.task.removesuffix(end)]
        assert task is not None
        assert schedules[id + end] == (trigger.revision, trigger.enabled and task.enabled)
        if trigger.enabled:
            assert (trigger.task_revision, trigger.task_digest) == (task.revision, task.digest)
        stand.append((trigger.revision, trigger.task.removesuffix(end), trigger.task_revision, trigger.enabled))
    return stand


async def one_after_the_other(
    store: Store, end: str, begun: Sequence[Change], order: Sequence[tuple[int, Change]]
) -> tuple[dict[int, object], list[object]]:
    for change in begun:
        await change(store, end)
    results = {number: await change(store, end) for number, change in order}
    return results, await standing(store, end)


async def test_changes_at_once_end_as_if_one_had_followed_the_other(place: Place) -> None:
    chance = random.Random(7)  # noqa: S311 - it has to be repeatable
    async with place.open(connections=4) as store, open_store(":memory:", inline=True) as model:
        for turn in range(ROUNDS):
            begun = some_beginning(chance)
            changes = list(enumerate(some_change(chance) for _ in range(chance.choice([2, 2, 3]))))
            expected = [
                await one_after_the_other(model, f"{turn}-{number}", begun, order)
                for number, order in enumerate(permutations(changes))
            ]
            end = str(turn)
            for change in begun:
                await change(store, end)
            results: dict[int, Any] = {}

            async def make(number: int, change: Change, end: str, results: dict[int, Any]) -> None:
                results[number] = await change(store, end)

            async with trio.open_nursery() as nursery:
                for number, change in changes:
                    nursery.start_soon(make, number, change, end, results)
                nursery.start_soon(partial(store.cron.schedule_once, STANDALONE))
            assert (results, await standing(store, end)) in expected, turn
