"""Tasks and triggers: immutable revisions, heads that move by compare-and-set, and the schedule row of each trigger.

A change of one reads and writes several others: the triggers of a task, the task that a trigger is to move to. Changes
are rare, so one row lets them in one at a time, and what a change has read stays true until it has written.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from attrs import frozen

from alkstore.errors import Conflict
from alkstore.every import MAX_MS
from alkstore.payload import decode, describe
from alkstore.sql.text import escaped, raw, text
from alkstore.sql.tx import CRON, Row, Tx
from alkstore.values import RetryPolicy, Task, Trigger, at

__all__ = [
    "delete_task",
    "delete_trigger",
    "enable_task",
    "enable_trigger",
    "get_task",
    "get_trigger",
    "list_tasks",
    "list_triggers",
    "publish_task",
    "publish_trigger",
]


@frozen
class _Head:
    """Where a definition stands. A deleted one is a tombstone: its revisions go on if it is published again."""

    revision: int
    digest: str
    enabled: bool
    deleted: bool


ONE_AT_A_TIME = "SELECT value FROM __alkstore_meta WHERE key = 'schema_version' /*for update*/"


# ------------------------------------------------------------------------------------------------------- tasks

TASK_HEAD = "SELECT revision, digest, enabled, deleted_at IS NOT NULL FROM __alkstore_cron_tasks WHERE id = :id"

TASK_MOVE = """
INSERT INTO __alkstore_cron_tasks (id, revision, digest, enabled) VALUES (:id, :revision, :digest, :enabled)
ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, digest = excluded.digest, enabled = excluded.enabled,
  deleted_at = NULL
RETURNING id"""

TASK_ADD = """
INSERT INTO __alkstore_cron_task_revisions (id, revision, digest, definition, created_at)
VALUES (:id, :revision, :digest, :definition, :now)"""

TASK_ENABLE = "UPDATE __alkstore_cron_tasks SET enabled = :enabled WHERE id = :id AND enabled <> :enabled RETURNING id"

TASK_DELETE = """
UPDATE __alkstore_cron_tasks SET deleted_at = :now WHERE id = :id AND deleted_at IS NULL RETURNING id"""

_TASK_COLUMNS = """head.id, head.revision, head.digest, head.enabled, CAST(revision.definition AS BLOB),
  revision.created_at
FROM __alkstore_cron_tasks AS head
JOIN __alkstore_cron_task_revisions AS revision ON revision.id = head.id AND revision.revision = head.revision"""

TASK = f"SELECT {_TASK_COLUMNS} WHERE head.id = :id AND head.deleted_at IS NULL"

TASKS = f"""
SELECT {_TASK_COLUMNS} WHERE head.deleted_at IS NULL AND head.id > :after ORDER BY head.id LIMIT :limit"""


def publish_task(tx: Tx, id: str, definition: str, expected: int | None, enabled: bool | None) -> Task:
    """Make `definition` (JSON) the task's present revision, and pin its enabled triggers to it.

    Published again as it is it stays the revision that it is. `expected` is the revision that is to be replaced; None
    says that there is none. `enabled` None keeps what is; a new task is enabled.

    Raises:
        Conflict: the task has another definition, and `expected` is not its revision.
    """
    tx.lock(ONE_AT_A_TIME)
    head = _head(tx.one(TASK_HEAD, {"id": id}))
    digest = _digest("task", id, definition)
    if head is None or head.deleted or head.digest != digest:
        _check_expected("task", id, head, expected)
        revision = 1 if head is None else head.revision + 1
        keep = True if head is None or head.deleted else head.enabled
        params = {"id": id, "revision": revision, "digest": digest}
        tx.all(TASK_ADD, {**params, "definition": definition, "now": tx.now()})
        tx.all(TASK_MOVE, {**params, "enabled": int(keep)})
        for (trigger,) in tx.all(TRIGGERS_OF, {"task": id}):
            _pin(tx, trigger, revision, digest)
        tx.touch(CRON)
    if enabled is not None:
        _enable_task(tx, id, enabled)
    task = get_task(tx, id)
    assert task is not None
    return task


def enable_task(tx: Tx, id: str, enabled: bool) -> bool:
    """Enable or disable the task, and with it the schedules of its enabled triggers; False: nothing to change."""
    tx.lock(ONE_AT_A_TIME)
    return _enable_task(tx, id, enabled)


def _enable_task(tx: Tx, id: str, enabled: bool) -> bool:
    if get_task(tx, id) is None or not tx.all(TASK_ENABLE, {"id": id, "enabled": int(enabled)}):
        return False
    for (trigger,) in tx.all(TRIGGERS_OF, {"task": id}):
        tx.all(TRIGGER_FROM_NOW, {"id": trigger, "now": tx.now()})
        _restart(tx, trigger, active=enabled)
    return True


def delete_task(tx: Tx, id: str) -> bool:
    """Leave a tombstone, and one for each of its triggers; False: there is no such task. Its runs stay."""
    tx.lock(ONE_AT_A_TIME)
    if not tx.all(TASK_DELETE, {"id": id, "now": tx.now()}):
        return False
    for (trigger,) in tx.all(ALL_TRIGGERS_OF, {"task": id}):
        _delete_trigger(tx, trigger)
    return True


def get_task(tx: Tx, id: str) -> Task | None:
    """Return the task's present revision; None: there is none, or it was deleted."""
    row = tx.one(TASK, {"id": id})
    return None if row is None else _task(row)


def list_tasks(tx: Tx, after: str, limit: int) -> list[Task]:
    """Return a page of the tasks by id, beginning after the id `after`."""
    return [_task(row) for row in tx.all(TASKS, {"after": after, "limit": limit})]


# ---------------------------------------------------------------------------------------------------- triggers

TRIGGER_HEAD = "SELECT revision, digest, enabled, deleted_at IS NOT NULL FROM __alkstore_cron_triggers WHERE id = :id"

TRIGGER_MOVE = """
INSERT INTO __alkstore_cron_triggers (id, revision, digest, enabled, task, published_at)
VALUES (:id, :revision, :digest, :enabled, :task, :published_at)
ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, digest = excluded.digest, enabled = excluded.enabled,
  task = excluded.task, published_at = excluded.published_at, deleted_at = NULL
RETURNING id"""

TRIGGER_ADD = """
INSERT INTO __alkstore_cron_trigger_revisions (id, revision, digest, definition, task, task_revision, task_digest,
                                               created_at)
VALUES (:id, :revision, :digest, CAST(:definition AS TEXT), :task, :task_revision, :task_digest, :now)"""

TRIGGER_ENABLE = """
UPDATE __alkstore_cron_triggers SET enabled = :enabled, published_at = :now WHERE id = :id AND enabled <> :enabled
RETURNING id"""

TRIGGER_FROM_NOW = "UPDATE __alkstore_cron_triggers SET published_at = :now WHERE id = :id RETURNING id"

TRIGGER_DELETE = """
UPDATE __alkstore_cron_triggers SET deleted_at = :now WHERE id = :id AND deleted_at IS NULL RETURNING id"""

# ride on __alkstore_cron_triggers_task
TRIGGERS_OF = """
SELECT id FROM __alkstore_cron_triggers INDEXED BY __alkstore_cron_triggers_task
WHERE task = :task AND deleted_at IS NULL AND enabled = 1 ORDER BY id"""
ALL_TRIGGERS_OF = """
SELECT id FROM __alkstore_cron_triggers INDEXED BY __alkstore_cron_triggers_task
WHERE task = :task AND deleted_at IS NULL ORDER BY id"""

_TRIGGER_COLUMNS = """head.id, head.revision, head.digest, head.enabled, head.published_at,
  CAST(revision.definition AS BLOB), revision.task, revision.task_revision, revision.task_digest, revision.created_at,
  schedule.next_fire_at, schedule.last_scheduled_at, schedule.skipped_total, schedule.last_skipped_at,
  schedule.state_version, schedule.error
FROM __alkstore_cron_triggers AS head
JOIN __alkstore_cron_trigger_revisions AS revision ON revision.id = head.id AND revision.revision = head.revision
JOIN __alkstore_cron_schedules AS schedule ON schedule.trigger = head.id"""

TRIGGER = f"SELECT {_TRIGGER_COLUMNS} WHERE head.id = :id AND head.deleted_at IS NULL"

TRIGGERS = f"""
SELECT {_TRIGGER_COLUMNS} WHERE head.deleted_at IS NULL AND head.id > :after ORDER BY head.id LIMIT :limit"""

# The state version is a fence: it grows with every change, over deletions too.
SCHEDULE_RESTART = """
INSERT INTO __alkstore_cron_schedules (trigger, trigger_revision, active) VALUES (:trigger, :revision, :active)
ON CONFLICT (trigger) DO UPDATE SET trigger_revision = excluded.trigger_revision, active = excluded.active,
  next_fire_at = NULL, moved_at = 0, retry_at = 0, failures = 0, error = NULL,
  state_version = __alkstore_cron_schedules.state_version + 1
RETURNING trigger"""

SCHEDULE_PIN = """
UPDATE __alkstore_cron_schedules SET trigger_revision = :revision, retry_at = 0, failures = 0, error = NULL,
  state_version = state_version + 1
WHERE trigger = :trigger RETURNING trigger"""


def publish_trigger(tx: Tx, id: str, task: str, definition: str, expected: int | None, enabled: bool | None) -> Trigger:
    """Make `definition` (JSON) the trigger's present revision, pinned to the task's present one.

    Its occurrences count from now on: the cursor is NULL until the next cycle. Published again as it is it stays the
    revision that it is, and its cursor too. `expected` and `enabled` are as for a task.

    Raises:
        Conflict: there is no such task; or the trigger has another definition, and `expected` is not its revision.
    """
    tx.lock(ONE_AT_A_TIME)
    pinned = _head(tx.one(TASK_HEAD, {"id": task}))
    if pinned is None or pinned.deleted:
        raise Conflict(f"the trigger {id!r} starts the task {task!r}, which does not exist: publish the task first")
    head = _head(tx.one(TRIGGER_HEAD, {"id": id}))
    present = None if head is None or head.deleted else tx.one(TRIGGER, {"id": id})
    if present is None or (escaped(present[5]), present[6]) != (definition, task):
        _check_expected("trigger", id, head, expected)
        keep = True if head is None or head.deleted else head.enabled
        _add_revision(
            tx, id, definition, task, pinned.revision, pinned.digest, head, enabled=keep, published_at=tx.now()
        )
        _restart(tx, id, active=keep and pinned.enabled)
    if enabled is not None:
        _enable_trigger(tx, id, enabled)
    trigger = get_trigger(tx, id)
    assert trigger is not None
    return trigger


def enable_trigger(tx: Tx, id: str, enabled: bool) -> bool:
    """Enable the trigger, whose occurrences then count from now on, or disable it; False: nothing to change."""
    tx.lock(ONE_AT_A_TIME)
    return _enable_trigger(tx, id, enabled)


def _enable_trigger(tx: Tx, id: str, enabled: bool) -> bool:
    trigger = get_trigger(tx, id)
    if trigger is None or not tx.all(TRIGGER_ENABLE, {"id": id, "enabled": int(enabled), "now": tx.now()}):
        return False
    task = _head(tx.one(TASK_HEAD, {"id": trigger.task}))
    assert task is not None
    if enabled and task.revision != trigger.task_revision:  # while it was disabled it was not pinned
        _pin(tx, id, task.revision, task.digest)
    _restart(tx, id, active=enabled and task.enabled)
    return True


def delete_trigger(tx: Tx, id: str) -> bool:
    """Leave a tombstone; False: there is no such trigger. Its runs stay."""
    tx.lock(ONE_AT_A_TIME)
    return _delete_trigger(tx, id)


def _delete_trigger(tx: Tx, id: str) -> bool:
    if not tx.all(TRIGGER_DELETE, {"id": id, "now": tx.now()}):
        return False
    _restart(tx, id, active=False)
    return True


def get_trigger(tx: Tx, id: str) -> Trigger | None:
    """Return the trigger's present revision; None: there is none, or it was deleted."""
    row = tx.one(TRIGGER, {"id": id})
    return None if row is None else _trigger(row)


def list_triggers(tx: Tx, after: str, limit: int) -> list[Trigger]:
    """Return a page of the triggers by id, beginning after the id `after`."""
    return [_trigger(row) for row in tx.all(TRIGGERS, {"after": after, "limit": limit})]


def _pin(tx: Tx, id: str, task_revision: int, task_digest: str) -> None:
    """Let the trigger start another revision of its task. Its cursor stays: no occurrence is lost by an edit."""
    row = tx.one(TRIGGER, {"id": id})
    head = _head(tx.one(TRIGGER_HEAD, {"id": id}))
    assert row is not None
    assert head is not None
    published_at, definition, task = row[4], escaped(row[5]), row[6]
    revision = _add_revision(
        tx, id, definition, task, task_revision, task_digest, head, enabled=head.enabled, published_at=published_at
    )
    tx.all(SCHEDULE_PIN, {"trigger": id, "revision": revision})


def _add_revision(
    tx: Tx,
    id: str,
    definition: str,
    task: str,
    task_revision: int,
    task_digest: str,
    head: _Head | None,
    *,
    enabled: bool,
    published_at: int,
) -> int:
    revision = 1 if head is None else head.revision + 1
    params = {
        "id": id,
        "revision": revision,
        "digest": _digest("trigger", id, definition, task, task_revision, task_digest),
        "task": task,
    }
    tx.all(
        TRIGGER_ADD,
        {
            **params,
            "definition": raw(definition),  # pinned again it may be one that cannot be read
            "task_revision": task_revision,
            "task_digest": task_digest,
            "now": tx.now(),
        },
    )
    tx.all(TRIGGER_MOVE, {**params, "enabled": int(enabled), "published_at": published_at})
    return revision


def _restart(tx: Tx, id: str, *, active: bool) -> None:
    """Forget the cursor: the next cycle sets it by the time of publishing."""
    head = _head(tx.one(TRIGGER_HEAD, {"id": id}))
    assert head is not None
    tx.all(SCHEDULE_RESTART, {"trigger": id, "revision": head.revision, "active": int(active)})
    tx.touch(CRON)


# ------------------------------------------------------------------------------------------------------- shared


def _head(row: Row | None) -> _Head | None:
    return None if row is None else _Head(row[0], row[1], bool(row[2]), bool(row[3]))


def _check_expected(what: str, id: str, head: _Head | None, expected: int | None) -> None:
    if head is None or head.deleted:
        if expected is not None and (head is None or expected != head.revision):
            raise Conflict(
                f"there is no {what} {id!r} with revision {expected}: publish it with expected_revision=None"
            )
    elif expected is None:
        raise Conflict(
            f"the {what} {id!r} exists, with another definition: publish with expected_revision={head.revision} to "
            "replace it"
        )
    elif expected != head.revision:
        raise Conflict(f"the {what} {id!r} is at revision {head.revision}, not at {expected}: read it and decide anew")


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


_NO_TASK: dict[str, Any] = {
    "kind": "call",
    "call": None,
    "args": None,
    "command": None,
    "shell": False,
    "env": {},
    "cwd": None,
    "timeout": None,
    "retries": 0,
    "backoff": 0,
    "overlap": "allow",
}
"""What is shown of a task whose definition cannot be read: it calls nothing, and its runs fail."""

_NO_TRIGGER: dict[str, Any] = {"expression": "", "timezone": "", "misfire": "skip"}
"""What is shown of a trigger whose definition cannot be read, beside the error."""


def _fields(definition: bytes | str, none: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return what the definition says; of one that cannot be read `none`, and why."""
    try:
        fields = decode(text(definition))
        return {name: fields[name] for name in none}, None
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        return none, f"the definition cannot be read: {describe(error)}"


def _task(row: Row) -> Task:
    id, revision, digest, enabled, definition, created_at = row
    fields, _ = _fields(definition, _NO_TASK)
    command = fields["command"]
    return Task(
        id=id,
        revision=revision,
        digest=digest,
        kind=fields["kind"],
        call=fields["call"],
        args=fields["args"],
        command=tuple(command) if isinstance(command, list) else command,
        shell=fields["shell"],
        env=fields["env"],
        cwd=fields["cwd"],
        timeout=None if fields["timeout"] is None else fields["timeout"] / 1000,
        retry=RetryPolicy(fields["retries"], fields["backoff"] / 1000),
        overlap=fields["overlap"],
        enabled=bool(enabled),
        created_at=at(created_at),
    )


def _trigger(row: Row) -> Trigger:
    (id, revision, digest, enabled, published_at, definition, task, task_revision, task_digest, created_at,
     next_fire_at, last_scheduled_at, skipped_total, last_skipped_at, state_version, error) = row  # fmt: skip
    fields, flaw = _fields(definition, _NO_TRIGGER)
    return Trigger(
        id=id,
        revision=revision,
        digest=digest,
        task=task,
        task_revision=task_revision,
        task_digest=task_digest,
        expression=fields["expression"],
        timezone=fields["timezone"],
        misfire=fields["misfire"],
        enabled=bool(enabled),
        created_at=at(created_at),
        published_at=at(published_at),
        next_fire_at=None if next_fire_at in (None, MAX_MS) else at(next_fire_at),  # MAX_MS: never
        last_scheduled_at=None if last_scheduled_at is None else at(last_scheduled_at),
        skipped_total=skipped_total,
        last_skipped_at=None if last_skipped_at is None else at(last_skipped_at),
        state_version=state_version,
        error=error or flaw,
    )
