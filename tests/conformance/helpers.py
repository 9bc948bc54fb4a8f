"""What the conformance tests share, on any engine. What is not the public API, and all SQL, is here."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, Self, TypeVar

import pytest
import trio
from trio.testing import MockClock

import alkstore.store
from actors.events import Subscription
from alkstore import Event, Job, JobHandle, LeadershipLost, Queue, StopToken, Store
from alkstore.clock import LONGEST_LOOK_AWAY_S, TrioClock
from alkstore.sql import schedules
from alkstore.testing import settle
from alkstore.values import JobState

START = 1_800_000_000_000
"""Where a clock that is moved by hand begins, in ms."""

LEADER = "__alkstore_scheduler"
YEAR_S = 365 * 86_400

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class OpenStore(Protocol):
    def __call__(self, **options: Any) -> AbstractAsyncContextManager[Store]: ...


# ------------------------------------------------------------------------------------------------------- time


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def now(store: Store) -> datetime:
    """What the store's clock reads."""
    return at(store._context.engine.clock.now_ms())


def after(store: Store, seconds: float) -> datetime:
    return now(store) + timedelta(seconds=seconds)


async def elapsed(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds of trio's clock that `call` takes."""
    began = trio.current_time()
    await call()
    return trio.current_time() - began


async def calm() -> None:
    """Let everything happen that happens at this moment of virtual time."""
    await settle()


class WallLikeClock(TrioClock):
    """As the machine's clock, in virtual time: it goes by itself, can be stepped, and tells nobody when it is."""

    def __init__(self) -> None:
        super().__init__()
        self._offset = START
        self._trio = trio.lowlevel.current_clock()

    def step(self, seconds: float) -> None:
        self._offset += round(seconds * 1000)

    def now_ms(self) -> int:
        return self._offset + round(self._trio.current_time() * 1000)

    def wait_s(self, until_ms: int) -> float:
        return min(max(until_ms - self.now_ms(), 0) / 1000, LONGEST_LOOK_AWAY_S)

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


# ----------------------------------------------------------------------------------------------- looking at a store


async def claim(queue: Queue, worker: str = "w", **options: Any) -> JobHandle:
    """Claim the one job that there is."""
    (handle,) = await queue.claim(worker, **options)
    return handle


async def job(queue: Queue, id: int) -> Job:
    found = await queue.get_job(id)
    assert found is not None
    return found


def seen(events: Subscription[Event], *kinds: str) -> list[Event]:
    """The events so far, oldest first; of these `kinds` only, if any are named."""
    return [event for event in events._buffer if not kinds or event.kind in kinds]


async def kill(queue: Queue, *payloads: object, error: str | None = None) -> list[int]:
    """Make dead letters with these payloads and return their ids."""
    ids = []
    for payload in payloads:
        await queue.enqueue(payload, priority=100)
        handle = await claim(queue)
        assert await handle.fail(error)
        ids.append(handle.id)
    return ids


# ------------------------------------------------------------------------------ what others may do to a store, in SQL


async def sql(store: Store, text: str, **params: object) -> list[tuple[Any, ...]]:
    """Run one statement as a unit of work."""
    return await store._context.engine.run(lambda tx: tx.all(text, params))


async def rob_leader(store: Store) -> None:
    """Let somebody else lead, as after a lease that ended while its holder was suspended."""
    await sql(store, "UPDATE __alkstore_locks SET owner = 'thief' WHERE name = :name", name=LEADER)


async def rob_lock(store: Store, name: str) -> None:
    await sql(store, "UPDATE __alkstore_locks SET owner = 'thief' WHERE name = :name", name=name)


async def plant_leader(store: Store, seconds: float) -> None:
    """Leave behind the lease of a leader that is dead."""
    ms = round(now(store).timestamp() * 1000)
    await sql(
        store,
        "INSERT INTO __alkstore_locks (name, owner, fence, ttl, expires_at, acquired_at) "
        "VALUES (:name, 'dead', 1, :ttl, :end, :now)",
        name=LEADER,
        ttl=round(seconds * 1000),
        end=ms + round(seconds * 1000),
        now=ms,
    )


async def locks(store: Store) -> dict[str, str]:
    """The rows of all locks: who owned them last."""
    rows = await sql(store, "SELECT name, owner FROM __alkstore_locks")
    return {row[0]: row[1] for row in rows}


async def spoil_schedule(store: Store, name: str, spec: str = "nonsense") -> None:
    """Give a schedule a spec that does not parse."""
    await sql(store, "UPDATE __alkstore_scheduler_tasks SET spec = :spec WHERE name = :name", spec=spec, name=name)


async def move_cursor(store: Store, name: str, seconds: float) -> None:
    await sql(
        store,
        "UPDATE __alkstore_scheduler_tasks SET next_fire_at = next_fire_at + :ms WHERE name = :name",
        ms=round(seconds * 1000),
        name=name,
    )


async def copy_schedule(store: Store, name: str, copies: int) -> None:
    """Make as many more schedules that are like `name`."""
    await sql(
        store,
        "INSERT INTO __alkstore_scheduler_tasks (name, spec, interval, queue, payload, next_fire_at, created_at, "
        "updated_at) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :last) "
        "SELECT name || i, spec, interval, queue, payload, next_fire_at, created_at, updated_at "
        "FROM n, __alkstore_scheduler_tasks WHERE name = :name",
        last=copies,
        name=name,
    )


async def rogue_tick(store: Store, name: str) -> None:
    """Fire what is due of a schedule without leading."""
    await store._context.engine.run(lambda tx: schedules.fire(tx, name, None))


def break_ticks(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let every tick of the schedules fail."""

    def broken(*_: object) -> object:
        raise error

    monkeypatch.setattr(schedules, "look", broken)


def mortal_engine(monkeypatch: pytest.MonkeyPatch, error: Exception) -> trio.Event:
    """Let the background task of the store that is opened next die of `error`, once the event is set."""
    serve: Callable[..., Awaitable[None]] = alkstore.store._serve
    death = trio.Event()

    async def served(engine: object, serving: trio.CancelScope) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, engine, serving)
            await death.wait()
            serving.cancel()
        raise error

    monkeypatch.setattr(alkstore.store, "_serve", served)
    return death


async def boundaries(store: Store, queue: str = "q") -> list[datetime]:
    """For which boundaries jobs were fired, in the order of firing."""
    found: list[datetime] = []
    states: list[JobState] = ["ready", "delayed"]
    for state in states:
        jobs = await store.queue(queue).list(state, limit=1000)
        found += [job.boundary for job in jobs if job.boundary is not None]
    return found


# ------------------------------------------------------------------------------------------------------ running


@asynccontextmanager
async def running(serve: Callable[..., Awaitable[object]], *args: Any, **options: Any) -> AsyncIterator[StopToken]:
    """Run what takes a stop token and a task_status beside the body; then stop it and wait for its end."""
    stop = StopToken()
    with no_group():
        async with trio.open_nursery() as nursery:
            await nursery.start(_Serving(serve, stop, args, options))
            yield stop
            stop.stop()


class _Serving:
    def __init__(
        self, serve: Callable[..., Awaitable[object]], stop: StopToken, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._serve, self._stop, self._args, self._options = serve, stop, args, options

    async def __call__(self, task_status: trio.TaskStatus[None]) -> None:
        await self._serve(*self._args, stop=self._stop, task_status=task_status, **self._options)


class no_group:  # noqa: N801 - reads as a statement
    """Let the only error of a test's own nursery leave as itself."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            raise error.exceptions[0]


async def retrying(
    store: Store, stop: StopToken, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run the schedules as a supervisor would."""
    task_status.started()
    while not stop.stopped:
        try:
            await store.run_schedules(stop)
        except LeadershipLost:
            continue


_numbers = itertools.count()


def fresh(name: str) -> str:
    """Return a name of its own for each example of a property: they share the test's database."""
    return f"{name}{next(_numbers)}"


def virtually(main: Callable[[], Awaitable[T]]) -> T:
    """Run an async function in virtual time: for what Hypothesis calls many times."""
    return trio.run(main, clock=MockClock(autojump_threshold=0))


async def fails(kind: type[E], serve: Callable[..., Awaitable[object]], *args: Any, **options: Any) -> E:
    """Run what must end with `kind`, alone and unwrapped; return the error."""
    with pytest.raises(kind) as caught:
        await serve(*args, **options)
    return caught.value


async def refused(kind: type[E], call: Callable[[], Awaitable[object]]) -> E:
    """Return the error with which `call` refuses before any round trip: every checkpoint here is cancelled."""
    with trio.CancelScope() as scope:
        scope.cancel()
        return await fails(kind, call)
    raise AssertionError("it had begun to wait for the store")


async def cancelled_at(call: Callable[[], Awaitable[T]], steps: int) -> bool:
    """Run `call` in a task and cancel it when it has been scheduled `steps` times; True: that was before its end."""
    scope = trio.CancelScope()
    counter = _Steps(steps, scope.cancel)
    trio.lowlevel.add_instrument(counter)
    try:
        async with trio.open_nursery() as nursery:

            async def watched() -> None:
                counter.task = trio.lowlevel.current_task()
                with scope:
                    await call()
                counter.task = None

            nursery.start_soon(watched)
    finally:
        trio.lowlevel.remove_instrument(counter)
    return scope.cancel_called


class _Steps(trio.abc.Instrument):
    def __init__(self, limit: int, reached: Callable[[], object]) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.count = 0
        self._limit, self._reached = limit, reached

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.count += 1
            if self.count == self._limit:
                self._reached()


class TaskSteps(trio.abc.Instrument):
    """Counts how often any task was run: what polls shows here."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1

    def __enter__(self) -> Self:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_: object) -> None:
        trio.lowlevel.remove_instrument(self)
