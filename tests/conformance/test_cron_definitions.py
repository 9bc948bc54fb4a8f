"""Tasks and triggers: immutable revisions whose heads move by compare-and-set."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from alkstore import Conflict, InvalidName, InvalidPayload, InvalidSpec, ManualClock, ReservedName, Store
from alkstore.cron import RetryPolicy
from tests.conformance.cronning import once, publish, task, trigger
from tests.conformance.helpers import START, OpenStore, at, fails, refused

# --------------------------------------------------------------------------------------------------------- tasks


async def test_a_task_comes_back_as_it_was_published(stepped: Store) -> None:
    published = await stepped.cron.publish_task(
        "report",
        call="make_report",
        args={"kind": "daily", "n": 2**70, "z": [None, "\0"]},
        timeout=1.5,
        retry=RetryPolicy(2, 7.5),
        overlap="skip",
        enabled=False,
    )
    assert published == await stepped.cron.get_task("report")
    assert (published.id, published.revision, published.kind) == ("report", 1, "call")
    assert (published.call, published.args) == ("make_report", {"kind": "daily", "n": 2**70, "z": [None, "\0"]})
    assert (published.timeout, published.retry) == (1.5, RetryPolicy(2, 7.5))
    assert (published.overlap, published.enabled, published.created_at) == ("skip", False, at(START))
    assert (published.command, published.shell, published.env, published.cwd) == (None, False, {}, None)


async def test_a_command_comes_back_as_it_was_published(store: Store) -> None:
    published = await store.cron.publish_task("c", command=["ls", "-l"], env={"A": "b=c"}, cwd="/")
    assert published == await store.cron.get_task("c")
    assert (published.kind, published.call, published.args) == ("command", None, None)
    assert (published.command, published.shell) == (("ls", "-l"), False)
    assert (published.env, published.cwd) == ({"A": "b=c"}, "/")


async def test_a_shell_command_is_one_text(store: Store) -> None:
    published = await store.cron.publish_task("c", command="ls | wc -l", shell=True)  # noqa: S604 - a test
    assert (published.command, published.shell) == ("ls | wc -l", True)


async def test_the_defaults_of_a_task(store: Store) -> None:
    published = await store.cron.publish_task("t", call="h")
    assert (published.args, published.timeout, published.retry) == (None, None, RetryPolicy(0, 5))
    assert (published.overlap, published.enabled) == ("allow", True)


async def test_publishing_the_same_task_again_is_the_same_revision(store: Store) -> None:
    first = await store.cron.publish_task("t", call="h", args={"a": 1, "b": 2})
    again = await store.cron.publish_task("t", call="h", args={"b": 2, "a": 1})
    assert again == first


@pytest.mark.parametrize("expected", [None, 0, 1, 7])
async def test_for_the_same_definition_no_expected_revision_is_wrong(store: Store, expected: int | None) -> None:
    """A program publishes at each start, and a repeated request is no conflict."""
    first = await store.cron.publish_task("t", call="h")
    assert await store.cron.publish_task("t", call="h", expected_revision=expected) == first


async def test_another_definition_is_another_revision_for_who_knows_the_present_one(store: Store) -> None:
    first = await store.cron.publish_task("t", call="h")
    second = await store.cron.publish_task("t", call="g", expected_revision=1)
    assert (second.revision, second.call) == (2, "g")
    assert second.digest != first.digest
    assert await store.cron.get_task("t") == second


async def test_arguments_may_be_nested_as_deeply_as_a_payload(store: Store) -> None:
    args: Any = 1
    for _ in range(100):
        args = [args]
    assert (await store.cron.publish_task("t", call="h", args=args)).args == args
    assert (
        (await fails(InvalidPayload, store.cron.publish_task, "u", call="h", args=[args])).args[0].startswith("args[")
    )
    assert (await fails(InvalidPayload, store.cron.run_now, "t", args=[args])).args[0].startswith("args[")


async def test_going_back_to_an_old_definition_is_a_new_revision_with_the_old_digest(store: Store) -> None:
    first = await store.cron.publish_task("t", call="h")
    await store.cron.publish_task("t", call="g", expected_revision=1)
    third = await store.cron.publish_task("t", call="h", expected_revision=2)
    assert (third.revision, third.digest) == (3, first.digest)


async def test_another_definition_without_an_expected_revision_is_a_conflict(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    error = await fails(Conflict, store.cron.publish_task, "t", call="g")
    assert "the task 't' exists, with another definition" in str(error)
    assert "expected_revision=1" in str(error)
    assert (await task(store)).call == "h"


async def test_of_two_who_replace_the_same_revision_the_second_is_told(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.publish_task("t", call="g", expected_revision=1)
    error = await fails(Conflict, store.cron.publish_task, "t", call="f", expected_revision=1)
    assert str(error) == "the task 't' is at revision 2, not at 1: read it and decide anew"
    assert (await task(store)).call == "g"


async def test_a_revision_to_replace_that_is_not_there_is_a_conflict(store: Store) -> None:
    error = await fails(Conflict, store.cron.publish_task, "t", call="h", expected_revision=3)
    assert "there is no task 't' with revision 3" in str(error)
    assert await store.cron.get_task("t") is None


@pytest.mark.parametrize(
    "change",
    [
        {"call": "g"},
        {"args": {"a": 2}},
        {"timeout": 2},
        {"retry": RetryPolicy(1)},
        {"retry": RetryPolicy(0, 6)},
        {"overlap": "skip"},
    ],
    ids="-".join,
)
async def test_everything_that_a_task_does_is_in_its_digest(store: Store, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"call": "h", "args": {"a": 1}}
    digests = {(await store.cron.publish_task("t", **given)).digest}
    digests.add((await store.cron.publish_task("t", **given | change, expected_revision=1)).digest)
    assert len(digests) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


async def test_the_same_definition_under_another_name_has_another_digest(store: Store) -> None:
    one, other = await store.cron.publish_task("a", call="h"), await store.cron.publish_task("b", call="h")
    assert one.digest != other.digest


async def test_whether_a_task_is_enabled_is_not_part_of_its_revision(store: Store) -> None:
    first = await store.cron.publish_task("t", call="h")
    disabled = await store.cron.publish_task("t", call="h", enabled=False)
    assert (disabled.revision, disabled.digest, disabled.enabled) == (1, first.digest, False)


async def test_a_new_revision_leaves_a_disabled_task_disabled(store: Store) -> None:
    await store.cron.publish_task("t", call="h", enabled=False)
    assert not (await store.cron.publish_task("t", call="g", expected_revision=1)).enabled


async def test_disabling_and_enabling_say_whether_there_was_anything_to_change(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    assert [await store.cron.disable_task("t") for _ in range(2)] == [True, False]
    assert not (await task(store)).enabled
    assert [await store.cron.enable_task("t") for _ in range(2)] == [True, False]
    assert (await task(store)).enabled


async def test_what_is_not_there_cannot_be_enabled_disabled_or_deleted(store: Store) -> None:
    cron = store.cron
    assert not await cron.enable_task("t")
    assert not await cron.disable_task("t")
    assert not await cron.delete_task("t")
    assert not await cron.enable_trigger("g")
    assert not await cron.disable_trigger("g")
    assert not await cron.delete_trigger("g")
    assert (await cron.get_task("t"), await cron.get_trigger("g")) == (None, None)


async def test_a_deleted_task_is_not_there_any_more(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    assert [await store.cron.delete_task("t") for _ in range(2)] == [True, False]
    assert await store.cron.get_task("t") is None
    assert await store.cron.tasks() == []
    assert not await store.cron.enable_task("t")
    await fails(Conflict, store.cron.run_now, "t")


@pytest.mark.parametrize("expected", [None, 2])
async def test_the_revisions_of_a_task_go_on_after_it_was_deleted(store: Store, expected: int | None) -> None:
    await store.cron.publish_task("t", call="h", enabled=False)
    await store.cron.publish_task("t", call="g", expected_revision=1)
    await store.cron.delete_task("t")
    revived = await store.cron.publish_task("t", call="g", expected_revision=expected)
    assert (revived.revision, revived.enabled) == (3, True)


async def test_a_deleted_task_cannot_be_replaced_at_another_revision_than_its_last(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.delete_task("t")
    await fails(Conflict, store.cron.publish_task, "t", call="g", expected_revision=2)


async def test_tasks_are_listed_by_id_a_page_at_a_time(store: Store) -> None:
    for name in ("c", "a", "d", "b"):
        await store.cron.publish_task(name, call="h")
    first = await store.cron.tasks(limit=3)
    assert [found.id for found in first] == ["a", "b", "c"]
    assert [found.id for found in await store.cron.tasks(after="c")] == ["d"]


# ------------------------------------------------------------------------------------------------------ triggers


async def test_a_trigger_comes_back_as_it_was_published(stepped: Store) -> None:
    pinned = await stepped.cron.publish_task("t", call="h")
    published = await stepped.cron.publish_trigger(
        "nightly", task="t", expression="0 2 * * *", timezone="Europe/Berlin", misfire="fire_once"
    )
    assert published == await stepped.cron.get_trigger("nightly")
    assert (published.id, published.revision, published.enabled) == ("nightly", 1, True)
    assert (published.task, published.task_revision, published.task_digest) == ("t", 1, pinned.digest)
    assert (published.expression, published.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert (published.misfire, published.created_at, published.published_at) == ("fire_once", at(START), at(START))
    assert (published.next_fire_at, published.last_scheduled_at, published.error) == (None, None, None)
    assert (published.skipped_total, published.last_skipped_at) == (0, None)


async def test_misfires_are_skipped_unless_said_otherwise(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    published = await store.cron.publish_trigger("g", task="t", expression="* * * * *", timezone="UTC")
    assert (published.misfire, published.enabled) == ("skip", True)


async def test_a_trigger_of_no_task_is_a_conflict(store: Store) -> None:
    error = await fails(Conflict, store.cron.publish_trigger, "g", task="t", expression="* * * * *", timezone="UTC")
    assert "publish the task first" in str(error)


async def test_a_trigger_of_a_deleted_task_is_a_conflict(store: Store) -> None:
    await store.cron.publish_task("t", call="h")
    await store.cron.delete_task("t")
    await fails(Conflict, store.cron.publish_trigger, "g", task="t", expression="* * * * *", timezone="UTC")


async def test_publishing_the_same_trigger_again_changes_nothing_and_keeps_its_cursor(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, expression="30 * * * *")
    await once(stepped)
    before = await trigger(stepped)
    clock.advance(60)
    assert await publish(stepped, expression="30 * * * *") == before
    assert before.next_fire_at == at(START + 1_800_000)


@pytest.mark.parametrize(
    "change", [{"expression": "1 * * * *"}, {"timezone": "Europe/Berlin"}, {"misfire": "fire_once"}, {"task": "u"}]
)
async def test_another_trigger_under_the_same_name_needs_the_revision_that_it_replaces(
    store: Store, change: dict[str, Any]
) -> None:
    first = await publish(store)
    await store.cron.publish_task("u", call="h")
    fields: dict[str, Any] = {"task": "t", "expression": "* * * * *", "timezone": "UTC", "misfire": "skip", **change}
    error = await fails(Conflict, store.cron.publish_trigger, "g", **fields)
    assert "the trigger 'g' exists, with another definition" in str(error)
    second = await store.cron.publish_trigger("g", **fields, expected_revision=1)
    assert (second.revision, second.digest != first.digest) == (2, True)
    stale = await fails(Conflict, store.cron.publish_trigger, "g", **fields | {"expression": "5 * * * *"})
    assert "expected_revision=2" in str(stale)


async def test_a_new_revision_of_a_trigger_counts_from_its_publishing(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression="30 * * * *")
    await once(stepped)
    clock.advance(600)
    replaced = await stepped.cron.publish_trigger(
        "g", task="t", expression="20 * * * *", timezone="UTC", expected_revision=1
    )
    assert (replaced.next_fire_at, replaced.published_at) == (None, at(START + 600_000))
    await once(stepped)
    assert (await trigger(stepped)).next_fire_at == at(START + 1_200_000)


async def test_a_disabled_trigger_has_nothing_to_decide(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    assert [await stepped.cron.disable_trigger("g") for _ in range(2)] == [True, False]
    clock.advance(3_600)
    assert await once(stepped) == {}
    assert not (await trigger(stepped)).enabled


async def test_an_enabled_trigger_goes_on_from_now_and_makes_up_for_nothing(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, expression="30 * * * *", misfire="fire_once")
    await stepped.cron.disable_trigger("g")
    clock.advance(86_400)
    assert [await stepped.cron.enable_trigger("g") for _ in range(2)] == [True, False]
    assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + 86_400_000 + 1_800_000)


async def test_disabling_a_task_silences_its_triggers_and_enabling_lets_them_go_on_from_now(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, expression="30 * * * *", misfire="fire_once")
    await stepped.cron.disable_task("t")
    clock.advance(86_400)
    assert await once(stepped) == {}
    assert (await trigger(stepped)).enabled
    await stepped.cron.enable_task("t")
    assert await once(stepped) == {"initialized": 1}
    assert (await trigger(stepped)).next_fire_at == at(START + 86_400_000 + 1_800_000)


async def test_enabling_a_task_leaves_its_disabled_triggers_alone(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    await stepped.cron.disable_trigger("g")
    await stepped.cron.disable_task("t")
    await stepped.cron.enable_task("t")
    clock.advance(3_600)
    assert await once(stepped) == {}


async def test_a_trigger_that_is_enabled_while_its_task_is_not_stays_silent(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    await stepped.cron.disable_task("t")
    await stepped.cron.disable_trigger("g")
    await stepped.cron.enable_trigger("g")
    clock.advance(3_600)
    assert await once(stepped) == {}


async def test_a_trigger_can_be_published_disabled_and_of_a_disabled_task(store: Store) -> None:
    await store.cron.publish_task("t", call="h", enabled=False)
    given: dict[str, Any] = {"task": "t", "expression": "* * * * *", "timezone": "UTC"}
    await store.cron.publish_trigger("one", **given)
    assert not (await store.cron.publish_trigger("other", **given, enabled=False)).enabled
    assert await once(store) == {}


async def test_deleting_a_trigger_leaves_its_task(store: Store) -> None:
    await publish(store)
    assert [await store.cron.delete_trigger("g") for _ in range(2)] == [True, False]
    assert await store.cron.get_trigger("g") is None
    assert await store.cron.triggers() == []
    assert await once(store) == {}
    assert (await task(store)).enabled


async def test_deleting_a_task_deletes_its_triggers(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped, "one")
    await publish(stepped, "other")
    await stepped.cron.disable_trigger("other")
    await stepped.cron.delete_task("t")
    clock.advance(3_600)
    assert await stepped.cron.triggers() == []
    assert await once(stepped) == {}


async def test_a_task_that_is_published_again_has_no_triggers(stepped: Store, clock: ManualClock) -> None:
    await publish(stepped)
    await stepped.cron.delete_task("t")
    await stepped.cron.publish_task("t", call="h")
    clock.advance(3_600)
    assert await once(stepped) == {}


async def test_the_revisions_of_a_trigger_go_on_after_it_was_deleted_and_so_does_its_state_version(
    store: Store,
) -> None:
    await publish(store)
    version = (await trigger(store)).state_version
    await store.cron.delete_trigger("g")
    revived = await publish(store)
    assert (revived.revision, revived.enabled) == (2, True)
    assert revived.state_version > version


async def test_triggers_are_listed_by_id_a_page_at_a_time(store: Store) -> None:
    for name in ("c", "a", "d", "b"):
        await publish(store, name)
    assert [found.id for found in await store.cron.triggers(limit=3)] == ["a", "b", "c"]
    assert [found.id for found in await store.cron.triggers(after="c")] == ["d"]


# ------------------------------------------------------------------------------------------------------- pinning


async def test_a_new_revision_of_a_task_is_what_its_enabled_triggers_start(store: Store) -> None:
    first = await publish(store)
    second = await store.cron.publish_task("t", call="g", expected_revision=1)
    pinned = await trigger(store)
    assert (pinned.task_revision, pinned.task_digest, pinned.revision) == (2, second.digest, 2)
    assert (pinned.expression, pinned.published_at) == (first.expression, first.published_at)
    assert pinned.digest != first.digest


async def test_a_pinned_trigger_keeps_its_cursor(stepped: Store, clock: ManualClock) -> None:
    """Editing a task never silently stops it, and costs no occurrence."""
    await publish(stepped, expression="30 * * * *")
    await once(stepped)
    clock.advance(1_800)
    await stepped.cron.publish_task("t", call="g", expected_revision=1)
    assert (await trigger(stepped)).next_fire_at == at(START + 1_800_000)
    assert await once(stepped) == {"admitted": 1}
    (run,) = await stepped.cron.runs()
    assert (run.task_revision, run.trigger_revision) == (2, 2)


async def test_a_trigger_that_is_pinned_before_its_first_cycle_counts_from_its_own_publishing(
    stepped: Store, clock: ManualClock
) -> None:
    await publish(stepped, expression="30 * * * *")
    clock.advance(1_800)
    await stepped.cron.publish_task("t", call="g", expected_revision=1)
    assert await once(stepped) == {"admitted": 1}


async def test_a_disabled_trigger_is_pinned_when_it_is_enabled(store: Store) -> None:
    await publish(store)
    await store.cron.disable_trigger("g")
    await store.cron.publish_task("t", call="g", expected_revision=1)
    assert (await trigger(store)).task_revision == 1
    await store.cron.enable_trigger("g")
    pinned = await trigger(store)
    assert (pinned.task_revision, pinned.revision) == (2, 2)


async def test_triggers_of_a_disabled_task_are_pinned_too(store: Store) -> None:
    await publish(store)
    await store.cron.disable_task("t")
    await store.cron.publish_task("t", call="g", expected_revision=1)
    assert (await trigger(store)).task_revision == 2


async def test_publishing_the_same_task_again_pins_nothing_anew(store: Store) -> None:
    before = await publish(store)
    await store.cron.publish_task("t", call="h")
    assert await trigger(store) == before


async def test_a_pinned_trigger_is_the_same_definition_when_it_is_published_again(store: Store) -> None:
    await publish(store)
    await store.cron.publish_task("t", call="g", expected_revision=1)
    assert (await publish(store)).revision == 2


async def test_a_trigger_that_moves_to_another_task_is_pinned_to_that_one_only(store: Store) -> None:
    await publish(store)
    await store.cron.publish_task("u", call="h")
    await store.cron.publish_trigger("g", task="u", expression="* * * * *", timezone="UTC", expected_revision=1)
    await store.cron.publish_task("t", call="g", expected_revision=1)
    assert (await trigger(store)).task == "u"
    assert (await trigger(store)).task_revision == 1


async def test_definitions_outlive_the_store(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as store:
        published = await publish(store)
        of = await task(store)
    async with open_shared_store() as store:
        assert (await trigger(store), await task(store)) == (published, of)


# ------------------------------------------------------------------------------------------------------- refused

TASKS: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {}, "either call="),
    (ValueError, {"call": "h", "command": ["ls"]}, "not both"),
    (TypeError, {"command": "ls"}, "a text needs shell=True"),
    (TypeError, {"command": []}, "the program and its arguments"),
    (TypeError, {"command": ["ls", 1]}, r"command\[1\]"),
    (ValueError, {"command": ["ls", "a\0b"]}, "NUL"),
    (TypeError, {"command": ["ls"], "shell": True}, "one text for the shell"),
    (TypeError, {"command": ["ls"], "shell": 1}, "shell must be True or False"),
    (ValueError, {"command": ["ls"], "args": {}}, "args are for a handler"),
    (ValueError, {"call": "h", "env": {}}, "are for a command"),
    (ValueError, {"call": "h", "cwd": "/"}, "are for a command"),
    (ValueError, {"call": "h", "shell": True}, "are for a command"),
    (TypeError, {"command": ["ls"], "env": "A=b"}, "env must be a mapping"),
    (ValueError, {"command": ["ls"], "env": {"A=": "b"}}, "without '='"),
    (ValueError, {"command": ["ls"], "env": {"": "b"}}, "without '='"),
    (TypeError, {"command": ["ls"], "env": {"A": 1}}, r"env\['A'\]"),
    (TypeError, {"command": ["ls"], "cwd": 1}, "cwd must be a str"),
    (InvalidPayload, {"command": ["ls", "\ud800"]}, "surrogate"),
    (InvalidPayload, {"call": "h", "args": {1: 2}}, "key"),
    (InvalidName, {"call": " "}, "handler name"),
    (ReservedName, {"call": "__alkstore_h"}, "handler name"),
    (ValueError, {"call": "h", "timeout": 0}, "timeout must be"),
    (ValueError, {"call": "h", "timeout": 7 * 86_400 + 1}, "timeout must be"),
    (TypeError, {"call": "h", "retry": 3}, "RetryPolicy"),
    (ValueError, {"call": "h", "overlap": "queue"}, "overlap must be"),
    (TypeError, {"call": "h", "enabled": 1}, "enabled must be"),
    (TypeError, {"call": "h", "expected_revision": "1"}, "expected_revision must be"),
    (ValueError, {"call": "h", "expected_revision": -1}, "expected_revision must be"),
]


@pytest.mark.parametrize(("kind", "options", "text"), TASKS, ids=range(len(TASKS)))
async def test_a_wrong_task_is_refused_before_anything_is_sent(
    one_store: Store, kind: type[Exception], options: dict[str, Any], text: str
) -> None:
    error = await refused(kind, lambda: one_store.cron.publish_task("t", **options))
    assert re.search(text, str(error)), str(error)


TRIGGERS: list[tuple[type[Exception], dict[str, Any], str]] = [
    (InvalidSpec, {"expression": "@daily"}, "@daily"),
    (InvalidSpec, {"expression": "60 * * * *"}, "minute"),
    (InvalidSpec, {"expression": "0 0 30 2 *"}, ""),
    (InvalidSpec, {"timezone": "localtime"}, "localtime"),
    (InvalidSpec, {"timezone": "Mars/Olympus"}, "Mars"),
    (InvalidSpec, {"timezone": None}, "the time zone is missing"),
    (InvalidSpec, {"expression": "0 2 * * *\n"}, "has '\\n' at position 9"),
    (ValueError, {"misfire": "fire_all"}, "misfire must be"),
    (InvalidName, {"task": ""}, "task name"),
    (TypeError, {"enabled": "yes"}, "enabled must be"),
]


@pytest.mark.parametrize(("kind", "options", "text"), TRIGGERS, ids=range(len(TRIGGERS)))
async def test_a_wrong_trigger_is_refused_before_anything_is_sent(
    one_store: Store, kind: type[Exception], options: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"task": "t", "expression": "* * * * *", "timezone": "UTC", **options}
    error = await refused(kind, lambda: one_store.cron.publish_trigger("g", **given))
    assert text in str(error)


@pytest.mark.parametrize("method", ["enable_task", "disable_task", "delete_task", "get_task", "run_now", "runs"])
@pytest.mark.parametrize(("name", "kind"), [("a\nb", InvalidName), ("__alkstore_x", ReservedName)])
async def test_a_wrong_name_of_a_task_is_refused_everywhere(
    one_store: Store, method: str, name: str, kind: type[Exception]
) -> None:
    await refused(kind, lambda: getattr(one_store.cron, method)(name))


@pytest.mark.parametrize("method", ["enable_trigger", "disable_trigger", "delete_trigger", "get_trigger"])
@pytest.mark.parametrize(("name", "kind"), [("a\nb", InvalidName), ("__alkstore_x", ReservedName)])
async def test_a_wrong_name_of_a_trigger_is_refused_everywhere(
    one_store: Store, method: str, name: str, kind: type[Exception]
) -> None:
    await refused(kind, lambda: getattr(one_store.cron, method)(name))


async def test_a_wrong_page_is_refused(one_store: Store) -> None:
    cron = one_store.cron
    for call in (cron.tasks, cron.triggers, cron.runs, lambda limit: cron.events(1, limit=limit)):
        await refused(ValueError, lambda call=call: call(limit=1001))  # type: ignore[misc]
        await refused(ValueError, lambda call=call: call(limit=0))  # type: ignore[misc]
    for listing in (cron.tasks, cron.triggers):
        await refused(InvalidName, lambda listing=listing: listing(after="\ud800"))  # type: ignore[misc]


@pytest.mark.parametrize("id", [-1, 2**63])
async def test_an_id_that_no_run_can_have_is_refused(one_store: Store, id: int) -> None:
    cron = one_store.cron
    for call in (cron.get_run, cron.events, cron.cancel_run, lambda id: cron.runs(after=id)):
        await refused(ValueError, lambda call=call: call(id))  # type: ignore[misc]


async def test_a_policy_of_retries_is_checked_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="retries must be"):
        RetryPolicy(101)
    with pytest.raises(ValueError, match="backoff must be"):
        RetryPolicy(1, timedelta(hours=1).total_seconds() + 1)
    with pytest.raises(TypeError, match="retries must be"):
        RetryPolicy("1")  # type: ignore[arg-type]
