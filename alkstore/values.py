"""The values that cross the API: frozen, compared by value, validated where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from attrs import Attribute, field, frozen

__all__ = [
    "Counts",
    "CronHealth",
    "Event",
    "Health",
    "Job",
    "JobState",
    "Misfire",
    "Overlap",
    "RetryPolicy",
    "Run",
    "RunEvent",
    "RunState",
    "Schedule",
    "ScheduleHealth",
    "ScheduleOpts",
    "Seconds",
    "Task",
    "TaskKind",
    "Trigger",
    "at",
    "integer",
    "milliseconds",
    "moment",
]

Seconds: TypeAlias = int | float | timedelta
"""A length of time in arguments: seconds, or a timedelta. The store keeps whole milliseconds."""

JobState: TypeAlias = Literal["delayed", "ready", "leased", "dead"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

MAX_ID = 2**63 - 1
TEN_YEARS_S = 10 * 365 * 86_400
SEVEN_DAYS_S = 7 * 86_400


def integer(value: object, option: str, low: int, high: int) -> int:
    """Return `value` if it is an int within `low` … `high`.

    Raises:
        TypeError: not an int (a bool is not one here).
        ValueError: out of range. Both name the option, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} must be an int from {low} to {high}, not {value!r:.80}")
    if not low <= value <= high:
        raise ValueError(f"{option} must be from {low} to {high}, not {_shown(value)}")
    return value


def milliseconds(value: object, option: str, low: float, high: float) -> int:
    """Return `value` (seconds, or a timedelta) in whole milliseconds if it is within `low` … `high` seconds.

    Raises:
        TypeError: neither a number nor a timedelta.
        ValueError: out of range or not finite. Both name the option, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise TypeError(f"{option} must be seconds (int, float or timedelta) from {low} to {high}, not {value!r:.80}")
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not low <= value <= high:  # false for NaN too
        raise ValueError(f"{option} must be from {low} to {high} seconds, not {_shown(value)}")
    return round(value * 1000)


def moment(value: object, option: str) -> int:
    """Return the aware datetime `value` in milliseconds since the epoch.

    Raises:
        TypeError: not a datetime.
        ValueError: naive, or before 1970. Both name the option.
    """
    if not isinstance(value, datetime):
        raise TypeError(f"{option} must be an aware datetime, not {value!r:.80}")
    if value.utcoffset() is None:
        raise ValueError(f"{option} must be an aware datetime (with a tzinfo); {value!r} is naive")
    ms = (value - _EPOCH) // timedelta(milliseconds=1)
    if ms < 0:
        raise ValueError(f"{option} must not be before 1970, not {value.isoformat()}")
    return ms


def at(ms: int) -> datetime:
    """Return milliseconds since the epoch as an aware datetime in UTC."""
    return _EPOCH + timedelta(milliseconds=ms)


def _shown(number: float) -> str:
    if isinstance(number, int) and abs(number) >= 10**20:
        return f"a number of about 2**{number.bit_length()}"
    return str(number)


@frozen
class Job:
    """A job as it stood in the store at one moment."""

    id: int
    """Grows with every enqueue of the store and is never used again."""
    queue: str
    state: JobState
    """``delayed`` (its `run_at` has not come), ``ready``, ``leased`` (a worker has it), or ``dead`` (a dead letter)."""
    payload: Any
    headers: Mapping[str, str]
    priority: int
    """-100 to 100, higher first."""
    key: str | None
    """At most one live job of a queue has this key."""
    attempt: int
    """How many attempts count against `max_attempts`, the present one included while it is leased."""
    max_attempts: int
    fence: int
    """Grows by one with each claim of this job: the fencing token of its handler."""
    run_at: datetime
    """Not claimed before this moment."""
    expires_at: datetime | None
    """From this moment on it is not claimed any more; None: never expires."""
    visibility: float
    """Seconds of lease that a claim gives unless it says otherwise."""
    backoff: float
    """Seconds before the first retry; doubled for each further one, up to 3,600."""
    worker: str | None
    """Who has it; None unless leased."""
    lease_until: datetime | None
    """When its lease ends; None unless leased."""
    error: str | None
    """What the last failed attempt said."""
    reason: str | None
    """Why it is a dead letter: ``failed``, ``discarded``, ``attempts exhausted``, ``lease expired``, ``expired`` or
    ``cancelled``; None while it lives."""
    died_at: datetime | None
    schedule: str | None
    """The schedule that fired it, if one did."""
    boundary: datetime | None
    """The boundary of that schedule for which it was fired."""
    created_at: datetime


@frozen
class Counts:
    """How many jobs of a queue are in each state."""

    delayed: int
    ready: int
    leased: int
    dead: int


def _optional_priority(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        integer(value, "priority", -100, 100)


def _optional_attempts(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        integer(value, "max_attempts", 1, 10_000)


def _optional_expiry(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        milliseconds(value, "expires", 0, TEN_YEARS_S)


@frozen
class ScheduleOpts:
    """What a schedule stamps on the jobs it fires; None leaves the queue's own default (0, 3 attempts, no expiry)."""

    priority: int | None = field(default=None, validator=_optional_priority)
    """-100 to 100."""
    max_attempts: int | None = field(default=None, validator=_optional_attempts)
    """1 to 10,000."""
    expires: Seconds | None = field(default=None, validator=_optional_expiry)
    """Seconds until an unclaimed job expires, from its boundary or, if it fires late, from then; 0 to ten years."""


@frozen
class Schedule:
    """A schedule as it stands in the store: a value to read, not a handle to act through."""

    name: str
    spec: str
    queue: str
    payload: Any
    opts: ScheduleOpts
    next_fire_at: datetime
    """The cursor: the oldest boundary that has neither fired nor been skipped."""
    fired_total: int
    skipped_total: int
    """Boundaries given up because more than 64 were due at once, or because the clock had been wrong."""
    last_fired_at: datetime | None
    """The newest boundary that fired."""
    last_skipped_at: datetime | None
    """When boundaries were last skipped."""
    error: str | None
    """Why the schedule does not fire any more; registering it again clears this."""


@frozen
class Event:
    """Something that happened in this process; see `Store.events` for the kinds."""

    kind: str
    at: datetime
    subject: str
    """The name of the queue, lock or schedule it is about; for the engine's own events, ``store``."""
    details: Mapping[str, Any] = field(factory=dict)


@frozen
class ScheduleHealth:
    """The schedules and who runs them."""

    total: int
    overdue: int
    """Schedules whose next boundary passed more than a few seconds ago."""
    broken: tuple[str, ...]
    """Names of schedules that are marked with an error."""
    leader: str | None
    """The identity of the runner that leads; None: nobody does, so nothing fires."""
    leading_since: datetime | None
    unattended: bool
    """True if a boundary is overdue and nobody leads: somebody has to call `run_schedules`."""


@frozen
class CronHealth:
    """The cron triggers and runs."""

    triggers: int
    """Triggers that are enabled, and whose task is."""
    overdue: int
    """Those whose next occurrence passed more than a few seconds ago, and those that nobody has looked at in the minute
    after their publishing: somebody has to call `Cron.run`."""
    failing: tuple[str, ...]
    """Names of triggers about which nothing can be decided; `Trigger.error` says why."""
    waiting: Mapping[str, int]
    """For each handler that no `Cron.run` of this process has, how many runs are queued for it; ``""`` is for commands
    where nothing runs here."""


@frozen
class Health:
    """What `Store.health` found."""

    at: datetime
    queues: Mapping[str, Counts]
    """The counts of every queue that has jobs."""
    oldest_claimable: Mapping[str, float]
    """For each queue with claimable jobs, for how many seconds the oldest of them has been waiting."""
    paused: tuple[str, ...]
    """Names of paused queues."""
    schedules: ScheduleHealth
    cron: CronHealth
    clock_steps: int
    """How often this store saw the clock step by more than a second since it was opened."""
    wal_bytes: int
    """Size of the write-ahead log; 0 for ``:memory:``."""
    checkpoint_blocked: bool
    """True if the last checkpoint could not finish because somebody holds an old snapshot."""
    feed: str
    """How changes of other processes are seen: ``inotify``, ``polling``, ``none`` (a store in memory)."""
    pending_writes: int
    """Units of work that wait for the writer."""


# --------------------------------------------------------------------------------------------------------- cron

TaskKind: TypeAlias = Literal["call", "command"]
Overlap: TypeAlias = Literal["allow", "skip"]
Misfire: TypeAlias = Literal["skip", "fire_once"]
RunState: TypeAlias = Literal[
    "queued", "dispatching", "running", "succeeded", "failed", "timed_out", "cancelled", "lost"
]


def _retries(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    integer(value, "retries", 0, 100)


def _retry_backoff(_instance: object, _attribute: Attribute[Any], value: object) -> None:
    milliseconds(value, "backoff", 0, 3_600)


@frozen
class RetryPolicy:
    """When a run that failed, timed out, was lost or interrupted gets another attempt."""

    retries: int = field(default=0, validator=_retries)
    """Attempts after the first, 0 to 100. 0, the default: none."""
    backoff: Seconds = field(default=5, validator=_retry_backoff)
    """Seconds before the first of them, doubled for each further one up to an hour; 0 to 3,600."""


@frozen
class Task:
    """What a run does: one immutable revision, and whether it is enabled."""

    id: str
    revision: int
    """1 for the first; grows by one with each different definition, also across a deletion."""
    digest: str
    """SHA-256 of the definition, in hex."""
    kind: TaskKind
    """``call``: a registered async handler; ``command``: a program."""
    call: str | None
    """The name of the handler."""
    args: Any
    """The JSON value that the handler gets."""
    command: tuple[str, ...] | str | None
    """The program and its arguments; a text for the shell if `shell`."""
    shell: bool
    env: Mapping[str, str]
    """Set over the environment of the process that runs it."""
    cwd: str | None
    timeout: float | None
    """Seconds that one attempt may run; None: no limit."""
    retry: RetryPolicy
    overlap: Overlap
    """``skip``: an occurrence that comes while a run of the task is not over gets none, and is counted."""
    enabled: bool
    created_at: datetime
    """When this revision was published."""


@frozen
class Trigger:
    """When a task runs: one immutable revision, and how its schedule stands."""

    id: str
    revision: int
    digest: str
    task: str
    task_revision: int
    """The revision of the task that it starts."""
    task_digest: str
    expression: str
    timezone: str
    """An IANA zone; `expression` is read in it."""
    misfire: Misfire
    """``skip`` gives up what is late by more than the profile's grace; ``fire_once`` runs the oldest of it."""
    enabled: bool
    created_at: datetime
    published_at: datetime
    """From when on its occurrences count."""
    next_fire_at: datetime | None
    """The occurrence that is next to be decided on; None: not known before the next cycle, or none is left."""
    last_scheduled_at: datetime | None
    """The last occurrence that got a run."""
    skipped_total: int
    """Decisions that gave up what was due."""
    last_skipped_at: datetime | None
    state_version: int
    """Grows with every change of the schedule."""
    error: str | None
    """Why the last cycle could not decide about it; it is looked at again after 1, 2, 4 … 60 minutes."""

    def in_zone(self, moment: datetime) -> datetime:
        """Return `moment` in this trigger's zone."""
        return moment.astimezone(ZoneInfo(self.timezone))


@frozen
class Run:
    """One execution of a task, as it stood at one moment."""

    id: int
    task: str
    task_revision: int
    task_digest: str
    trigger: str | None
    """None: it was started by hand."""
    trigger_revision: int | None
    trigger_digest: str | None
    scheduled_for: datetime | None
    """The occurrence for which it was admitted."""
    timezone: str | None
    """The zone of its trigger."""
    key: str | None
    """``ql3:cron:v1:<trigger>:<revision>:<scheduled_for_ms>``: no two runs have the same."""
    state: RunState
    attempt: int
    """The number of its latest attempt, 1 for the first."""
    created_at: datetime
    started_at: datetime | None
    """When its latest attempt began to run."""
    ended_at: datetime | None
    exit_code: int | None
    """Of a command: what it returned, or minus the number of the signal that ended it."""
    error: str | None
    output: str | None
    """Of a command: the end of what its latest attempt wrote to its standard output and error, up to 64 KiB."""

    def in_zone(self, moment: datetime) -> datetime:
        """Return `moment` in the zone of the trigger; of a run that was started by hand, in UTC."""
        return moment.astimezone(ZoneInfo(self.timezone or "UTC"))


@frozen
class RunEvent:
    """One thing that happened to a run."""

    id: int
    run: int
    attempt: int
    kind: str
    """``run.created``, ``run.queued``, ``run.dispatching``, ``run.running``, and one for each way to end."""
    at: datetime
    details: Mapping[str, Any]
