"""`Store.cron`: publish tasks and triggers, decide which are due, execute runs, and look at what has happened."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import trio
from attrs import define, field

from actors.coordinator import Coordinator
from actors.handlers import check_takes_one, is_async
from actors.stop import StopToken
from actors.unwinding import Alone
from actors.worker import Worker
from alkstore.context import Context, checked_stop, insist
from alkstore.cron.decide import Admit, Initialize, Skip, decide
from alkstore.cron.expression import timetable
from alkstore.cron.profile import CycleSummary, Profile
from alkstore.cron.running import Handlers, run_source
from alkstore.errors import AlkstoreError, Conflict, StoreError
from alkstore.names import check_name
from alkstore.payload import JSON, decode, describe, encode
from alkstore.sql.cron import admission, definitions, runs
from alkstore.sql.tx import CRON, Tx
from alkstore.values import (
    MAX_ID,
    SEVEN_DAYS_S,
    TEN_YEARS_S,
    Misfire,
    Overlap,
    RetryPolicy,
    Run,
    RunEvent,
    Seconds,
    Task,
    Trigger,
    at,
    integer,
    milliseconds,
)

__all__ = ["Cron"]

PAGE_LIMIT = 1_000
CONCURRENCY = 100
"""Runs of one process at one time, unless its caller says otherwise."""


@define(eq=False)
class Cron:
    """Wall-clock schedules whose occurrences become durable runs. Get it from `Store.cron`."""

    _context: Context = field(repr=False)

    # ---------------------------------------------------------------------------------------------- definitions

    async def publish_task(
        self,
        id: str,
        *,
        call: str | None = None,
        args: JSON = None,
        command: Sequence[str] | str | None = None,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: Seconds | None = None,
        retry: RetryPolicy | None = None,
        overlap: Overlap = "allow",
        enabled: bool | None = None,
        expected_revision: int | None = None,
    ) -> Task:
        """Publish what a run does, and return it as it is stored.

        Args:
            id: its name.
            call: the name of an async handler, one of those that `run` is given; or instead
            command: a program with its arguments; with ``shell=True`` a text for the shell. It runs in a process group
                of its own, with `env` set over the environment and in the folder `cwd`.
            args: a JSON value for the handler.
            timeout: seconds that one attempt may run, 0.1 to 7 days; None: no limit.
            retry: when a run that did not succeed gets another attempt; None: never.
            overlap: ``allow``, or ``skip``: an occurrence that comes while a run is not over gets none.
            enabled: None leaves it as it is; a new task is enabled.
            expected_revision: the revision that this one replaces; None or 0: there is none.

        A definition is immutable: a different one is a new revision, and the task's enabled triggers start that one
        from then on. Publishing the same one again changes nothing, so a program may publish at each start.

        A checkpoint. Cancelled while it waits: nothing is published.

        Raises:
            Conflict: the task has another definition, and `expected_revision` is not its revision.
            InvalidName, ReservedName, InvalidPayload, TypeError, ValueError: before anything is sent to the store.
        """
        check_name(id, "task")
        if (call is None) == (command is None):
            raise ValueError("a task has either call= (the name of a handler) or command= (a program), and not both")
        if not isinstance(shell, bool):
            raise TypeError(f"shell must be True or False, not {shell!r:.80}")
        if overlap not in ("allow", "skip"):
            raise ValueError(f"overlap must be 'allow' or 'skip', not {overlap!r:.80}")
        retry = RetryPolicy() if retry is None else retry
        if not isinstance(retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, not {retry!r:.80}")
        if call is None:
            if args is not None:
                raise ValueError("args are for a handler; a command has its arguments in command=")
        elif shell or env is not None or cwd is not None:
            raise ValueError("shell, env and cwd are for a command, not for a handler")
        definition = _json(
            kind="call" if call is not None else "command",
            call=None if call is None else check_name(call, "handler"),
            args=args,
            command=None if command is None else _checked_command(command, shell=shell),
            shell=shell,
            env=_checked_env(env),
            cwd=None if cwd is None else _checked_text(cwd, "cwd"),
            timeout=None if timeout is None else milliseconds(timeout, "timeout", 0.1, SEVEN_DAYS_S),
            retries=retry.retries,
            backoff=milliseconds(retry.backoff, "backoff", 0, 3_600),
            overlap=overlap,
        )
        expected = _checked_revision(expected_revision)
        _check_enabled(enabled)
        return await self._context.engine.run(
            lambda tx: definitions.publish_task(tx, id, definition, expected, enabled)
        )

    async def publish_trigger(
        self,
        id: str,
        *,
        task: str,
        expression: str,
        timezone: str,
        misfire: Misfire = "skip",
        enabled: bool | None = None,
        expected_revision: int | None = None,
    ) -> Trigger:
        """Publish when a task runs, and return it as it is stored. **Nothing runs until somebody calls `run`.**

        Args:
            id: its name.
            task: the id of a task that is published already.
            expression: five cron fields (minute, hour, day of month, month, day of week), or six with seconds first;
                see `preview`.
            timezone: the IANA zone in which it is read, such as ``Europe/Berlin``.
            misfire: what becomes of an occurrence that is late by more than the profile's grace: ``skip``, or
                ``fire_once``, which runs the oldest of all that are due.
            enabled, expected_revision: as for a task.

        Its occurrences count from the moment of publishing. Publishing the same one again changes nothing.

        Raises:
            InvalidSpec: the expression or the zone; the text says which field and what is allowed.
            Conflict: there is no such task; or the trigger has another definition, and `expected_revision` is not its
                revision.
            InvalidName, ReservedName, TypeError, ValueError: before anything is sent to the store.
        """
        check_name(id, "trigger")
        check_name(task, "task")
        timetable(expression, timezone)
        if misfire not in ("skip", "fire_once"):
            raise ValueError(f"misfire must be 'skip' or 'fire_once', not {misfire!r:.80}")
        definition = _json(expression=expression, timezone=timezone, misfire=misfire)
        expected = _checked_revision(expected_revision)
        _check_enabled(enabled)
        return await self._context.engine.run(
            lambda tx: definitions.publish_trigger(tx, id, task, definition, expected, enabled)
        )

    async def enable_task(self, id: str) -> bool:
        """Let the task's enabled triggers go on, from now; False: there is no such task, or it is enabled already."""
        check_name(id, "task")
        return await self._context.engine.run(lambda tx: definitions.enable_task(tx, id, True))

    async def disable_task(self, id: str) -> bool:
        """Let no trigger of the task make a run any more; False: there is no such task, or it is disabled already."""
        check_name(id, "task")
        return await self._context.engine.run(lambda tx: definitions.enable_task(tx, id, False))

    async def delete_task(self, id: str) -> bool:
        """Delete the task and its triggers, leaving tombstones; False: there is no such task. Its runs stay."""
        check_name(id, "task")
        return await self._context.engine.run(lambda tx: definitions.delete_task(tx, id))

    async def enable_trigger(self, id: str) -> bool:
        """Let the trigger go on, from now; False: there is no such trigger, or it is enabled already."""
        check_name(id, "trigger")
        return await self._context.engine.run(lambda tx: definitions.enable_trigger(tx, id, True))

    async def disable_trigger(self, id: str) -> bool:
        """Let the trigger make no run any more; False: there is no such trigger, or it is disabled already."""
        check_name(id, "trigger")
        return await self._context.engine.run(lambda tx: definitions.enable_trigger(tx, id, False))

    async def delete_trigger(self, id: str) -> bool:
        """Delete the trigger, leaving a tombstone; False: there is no such trigger. Its runs stay."""
        check_name(id, "trigger")
        return await self._context.engine.run(lambda tx: definitions.delete_trigger(tx, id))

    async def get_task(self, id: str) -> Task | None:
        """Return the task's present revision; None: there is none, or it was deleted."""
        check_name(id, "task")
        return await self._context.engine.read(lambda tx: definitions.get_task(tx, id))

    async def get_trigger(self, id: str) -> Trigger | None:
        """Return the trigger's present revision and how its schedule stands; None: there is none."""
        check_name(id, "trigger")
        return await self._context.engine.read(lambda tx: definitions.get_trigger(tx, id))

    async def tasks(self, *, after: str = "", limit: int = 100) -> list[Task]:
        """Return up to `limit` (1 to 1,000) tasks by id; `after` is the last id of the page before."""
        if after:
            check_name(after, "task")
        integer(limit, "limit", 1, PAGE_LIMIT)
        return await self._context.engine.read(lambda tx: definitions.list_tasks(tx, after, limit))

    async def triggers(self, *, after: str = "", limit: int = 100) -> list[Trigger]:
        """Return up to `limit` (1 to 1,000) triggers by id; `after` is the last id of the page before."""
        if after:
            check_name(after, "trigger")
        integer(limit, "limit", 1, PAGE_LIMIT)
        return await self._context.engine.read(lambda tx: definitions.list_triggers(tx, after, limit))

    # ----------------------------------------------------------------------------------------------------- runs

    async def run_now(self, task: str, *, args: JSON = None) -> Run:
        """Make a run of the task at once, whatever its triggers; `args` (None: the task's own) are for the handler.

        Also of a task that is disabled. It waits for a runner as any other.

        Raises:
            Conflict: there is no such task.
        """
        check_name(task, "task")
        text = None if args is None else encode(args, "args")
        return await self._context.engine.run(lambda tx: _run_now(tx, task, text))

    async def get_run(self, id: int) -> Run | None:
        """Return a run, or None: there is none, or it was pruned."""
        integer(id, "id", 0, MAX_ID)
        return await self._context.engine.read(lambda tx: runs.get(tx, id))

    async def runs(self, task: str | None = None, *, after: int = 0, limit: int = 100) -> list[Run]:
        """Return up to `limit` (1 to 1,000) runs by id, of one task or of all; `after` is the last id before."""
        integer(limit, "limit", 1, PAGE_LIMIT)
        integer(after, "after", 0, MAX_ID)
        if task is not None:
            check_name(task, "task")
        return await self._context.engine.read(lambda tx: runs.list_runs(tx, task, after, limit))

    async def events(self, run: int, *, after: int = 0, limit: int = 1_000) -> list[RunEvent]:
        """Return up to `limit` (1 to 1,000) events of a run, oldest first; `after` is the last event's id before."""
        integer(limit, "limit", 1, PAGE_LIMIT)
        integer(run, "run", 0, MAX_ID)
        integer(after, "after", 0, MAX_ID)
        return await self._context.engine.read(lambda tx: runs.events(tx, run, after, limit))

    async def cancel_run(self, id: int) -> bool:
        """End a run as cancelled; False: there is no such run, or it is over.

        Its handler is cancelled, or its command's process group ended, at once in this process, and at its next
        heartbeat (within 10 s) in another.
        """
        integer(id, "id", 0, MAX_ID)
        done, job = await self._context.engine.run(lambda tx: runs.cancel(tx, id), urgent=True)
        if job is not None and (running := self._context.hands.jobs.get(job)) is not None:
            running.cancel_handler("the run was cancelled")
        return done

    async def prune_runs(self, older_than: Seconds) -> int:
        """Delete the runs that ended at least `older_than` seconds ago, with their events, and return how many."""
        age = milliseconds(older_than, "older_than", 0, TEN_YEARS_S)
        done = 0
        while count := await self._context.engine.run(lambda tx: runs.prune(tx, age)):
            done += count
        return done

    # --------------------------------------------------------------------------------------- deciding, executing

    async def schedule_once(self, profile: Profile) -> CycleSummary:
        """Decide about one page of triggers that are due or new, each in a transaction of its own.

        It starts no timer and executes nothing: `run` does both. Cancelled: what is decided stays decided.
        """
        return await Cycles(self._context, _checked_profile(profile)).once()

    async def run(
        self,
        handlers: Handlers,
        profile: Profile,
        *,
        stop: StopToken,
        concurrency: int = CONCURRENCY,
        grace: Seconds = 30,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> Literal["stopped", "timed_out"]:
        """Decide which triggers are due, and execute runs, until `stop` is flipped.

        Args:
            handlers: for each name that tasks call here an async function of one `RunHandle`. A run whose handler is
                not among them stays queued, for another process; `Store.health` names it.
            profile: how much a cycle does, and how often: `EDGE`, `STANDALONE`, or your own.
            stop: flipped, nothing more is admitted, the cycle in flight has the profile's `stop_within`, and what runs
                has `grace` seconds; then it is cancelled.
            concurrency: runs at one time in this process, 1 to 1,000.
            grace: seconds, 0 to 7 days.

        Ready (`task_status.started`) when what a crash has left behind is recovered and one cycle has ended; errors of
        these two come before that. Any number of processes may call it: each occurrence gets one run.

        Returns ``stopped``, or ``timed_out`` if the cycle in flight had to be cancelled. Cancelled: so is what runs.
        """
        _checked_profile(profile)
        checked_stop(stop)
        if not isinstance(handlers, Mapping):
            raise TypeError(f"handlers must be a mapping from names to async functions, not {handlers!r:.80}")
        for name, handler in handlers.items():
            check_name(name, "handler")
            if not is_async(handler):
                raise TypeError(f"the handler {name!r} must be an async function, not {handler!r:.80}")
            check_takes_one(handler, f"the handler {name!r}")
        source = run_source(self._context, dict(handlers), profile.starts, f"cron-{secrets.token_hex(8)}")
        worker = Worker(
            source,
            source.execute,
            concurrency=concurrency,
            grace=milliseconds(grace, "grace", 0, SEVEN_DAYS_S) / 1000,
        )
        coordinator = Coordinator(
            Cycles(self._context, profile, source.holds_any),
            period=milliseconds(profile.period, "period", 0, 3_600) / 1000,
            stop_within=milliseconds(profile.stop_within, "stop_within", 0, 3_600) / 1000,
        )
        in_time = False
        with self._registered(handlers), Alone(KeyboardInterrupt, StoreError):
            async with trio.open_nursery(strict_exception_groups=True) as nursery:

                async def coordinate(*, task_status: trio.TaskStatus[None]) -> None:
                    nonlocal in_time
                    in_time = await coordinator.run(stop, task_status=task_status)

                await nursery.start(coordinate)
                task_status.started()
                await worker.run(stop)
        return "stopped" if in_time else "timed_out"

    @contextmanager
    def _registered(self, handlers: Handlers) -> Iterator[None]:
        names = ("", *handlers)
        self._context.handlers.update(names)
        try:
            yield
        finally:
            self._context.handlers.subtract(names)


@define(eq=False)
class Cycles:
    """The port of a `Coordinator`, and one cycle by itself."""

    _context: Context
    _profile: Profile
    _at_stake: Callable[[], bool] = lambda: False
    """Whether there are runs in hand that an error would interrupt."""
    _seen: int = field(default=0, init=False)
    _next_at: int | None = field(default=None, init=False)

    async def recover(self) -> None:
        while await self._context.engine.run(runs.recover, urgent=True):
            pass

    async def once(self) -> CycleSummary:
        """Read a page, decide about each of its rows, and carry the decisions out."""
        engine = self._context.engine
        page = await engine.read(lambda tx: admission.page(tx, self._profile.page))
        outcomes = await engine.run_each([self._decision(page.now, seen) for seen in page.candidates])
        return CycleSummary(
            observed_at=at(page.now),
            scanned=len(outcomes),
            initialized=outcomes.count("initialized"),
            skipped=outcomes.count("skipped"),
            admitted=outcomes.count("admitted"),
            raced=outcomes.count("raced"),
            failed=outcomes.count("failed"),
            truncated=page.truncated,
        )

    async def cycle(self) -> float | None:
        """Decide; again if the store was busy or away: each decision is guarded by what it rests on."""
        return await insist(self._cycle, self._at_stake)

    async def _cycle(self) -> float | None:
        engine = self._context.engine
        summary = await self.once()
        if summary.scanned:
            self._context.publish("cron_cycle", "cron", summary=summary)
        self._seen = engine.feed.position()  # after the cycle: its own changes are none to wake for
        self._next_at = await engine.read(admission.soonest)
        return None if self._next_at is None else max(self._next_at - engine.clock.now_ms(), 0) / 1000

    async def changed(self, within: float | None) -> None:
        await self._context.engine.feed.moved_past(CRON, self._seen, None if within is None else self._next_at)

    def _decision(self, now: int, seen: admission.Candidate) -> admission.Deciding:
        """Decide, and return what carries the decision out."""
        try:
            fields, needs = decode(seen.definition), seen.needs()
            decision = decide(
                cursor=seen.cursor,
                published_at=seen.published_at,
                now=now,
                grace=milliseconds(self._profile.grace, "grace", 0, 300),
                misfire=fields["misfire"],
                next_after=timetable(fields["expression"], fields["timezone"]).next_after,
            )
        except (AlkstoreError, LookupError, TypeError, ValueError, OverflowError) as error:  # a row made by other hands
            text = describe(error)
            return lambda tx: admission.fail(tx, seen, text)
        match decision:
            case Initialize(next_at, abandoned):
                return lambda tx: admission.advance(tx, seen, next_at, skipped=False, abandoned=abandoned)
            case Skip(next_at):
                return lambda tx: admission.advance(tx, seen, next_at, skipped=True)
            case Admit(scheduled_for, next_at):
                return lambda tx: admission.admit(tx, seen, needs, scheduled_for, next_at)


def _run_now(tx: Tx, id: str, args: str | None) -> Run:
    task = definitions.get_task(tx, id)
    if task is None:
        raise Conflict(f"there is no task {id!r}: publish it first")
    if task.kind == "command" and args is not None:
        raise ValueError(f"args are for a handler; the task {id!r} is a command")
    run = runs.create(tx, runs.NewRun(id, task.revision, task.digest, task.call or "", args))
    created = runs.get(tx, run)
    assert created is not None
    return created


def _json(**fields: object) -> str:
    """Canonical: the same definition is the same text, and so has the same digest."""
    for name, value in fields.items():
        encode(value, name)
    return json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _checked_command(command: object, *, shell: bool) -> str | list[str]:
    if shell:
        if not isinstance(command, str):
            raise TypeError(f"with shell=True command must be one text for the shell, not {command!r:.80}")
        return _checked_text(command, "command")
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise TypeError(
            f"command must be a list with the program and its arguments, not {command!r:.80}; a text needs shell=True"
        )
    return [_checked_text(part, f"command[{index}]") for index, part in enumerate(command)]


def _checked_env(env: object) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping from str to str, not {env!r:.80}")
    for key, value in env.items():
        if not isinstance(key, str) or not key or "=" in key:
            raise ValueError(f"env: a name must be a text without '=', not {key!r:.80}")
        _checked_text(key, "env")
        _checked_text(value, f"env[{key!r:.80}]")
    return dict(env)


def _checked_text(text: object, option: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{option} must be a str, not {text!r:.80}")
    if "\0" in text:
        raise ValueError(f"{option} must not hold NUL: {text!r:.80}")
    return text


def _check_enabled(enabled: object) -> None:
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True, False or None, not {enabled!r:.80}")


def _checked_revision(revision: object) -> int | None:
    return None if revision is None else integer(revision, "expected_revision", 0, 2**53) or None


def _checked_profile(profile: object) -> Profile:
    if not isinstance(profile, Profile):
        raise TypeError(f"profile must be EDGE, STANDALONE or a Profile of your own, not {profile!r:.80}")
    return profile
