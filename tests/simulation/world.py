"""What the program under simulation was told, and whether it was true; which handlers run, and whether they may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random

import trio
from attrs import define, field

from actors import ChildEvent, RestartsExceeded
from alkstore import (
    Discard,
    JobHandle,
    LeadershipLost,
    LockLost,
    OutcomeUnknown,
    Snooze,
    StoreError,
    TransactionTimeout,
)
from alkstore.testing import Simulation
from alkstore.testing.processes import Life, present_life
from tests.simulation.plan import Plan
from tests.simulation.recorder import Recorder, Row, Violation

__all__ = ["EXPECTED", "Handling", "World", "is_expected"]

EXPECTED = (StoreError, LeadershipLost, LockLost, TransactionTimeout, trio.TooSlowError, RestartsExceeded)
"""What a program may meet on a bad day; everything else is a bug."""

TOLERANCE_MS = 1_000
"""A smaller step of the clock is not noticed."""


@define(eq=False)
class Handling:
    """A handler that is running."""

    handle: JobHandle
    life: Life
    kept: bool
    """A worker keeps its lease, and cancels it when that ends."""
    settled_itself: bool = False

    @property
    def runs(self) -> bool:
        return not self.life.killed


@define(eq=False)
class World:
    """Everything that the checks have to know of what the program was told."""

    sim: Simulation
    plan: Plan
    recorder: Recorder
    over: trio.Event = field(factory=trio.Event)
    """Clients begin nothing new."""
    drained: trio.Event = field(factory=trio.Event)
    """The processes stop by themselves."""
    tokens: int = 0
    handling: list[Handling] = field(factory=list)
    finished: set[tuple[int, int]] = field(factory=set)
    """Which claims (id, fence) somebody has said are done, or was about to say so."""
    message_keys: dict[int, set[str | None]] = field(factory=lambda: defaultdict(set))
    cancelled: set[int] = field(factory=set)
    """Jobs that somebody has tried to cancel. A handler elsewhere goes on until its next heartbeat."""
    holding: dict[str, list[tuple[str, Life]]] = field(factory=lambda: defaultdict(list))
    promises: list[Callable[[], None]] = field(factory=list)
    """What has to hold at the end, of what callers were told."""
    broken: list[BaseException] = field(factory=list)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    stepped_s: float = 0.0
    commits: int = 0
    """Since the clock was last stepped."""

    @property
    def random(self) -> Random:
        return self.sim.random

    def token(self) -> str:
        self.tokens += 1
        return f"t{self.tokens}"

    def committed(self, _who: str) -> None:
        """Judge a commit. The second one after a step of the clock has surely begun after it."""
        if self.sim.stepped.stepped_s != self.stepped_s:
            self.stepped_s, self.commits = self.sim.stepped.stepped_s, 0
        self.commits += 1
        self.look()
        if self.commits == 2:
            self.judge(lambda: self.recorder.check_lengths(self.sim.stepped.now_ms() + TOLERANCE_MS))

    def look(self) -> None:
        """Judge what was committed. A violation ends the day."""
        self.judge(self.recorder.read)

    def judge(self, rules: Callable[[], None]) -> None:
        """Apply rules, unless one is broken already."""
        if self.broken:
            return
        try:
            rules()
        except Violation as error:
            self.broken.append(error)
            self.scope.cancel()

    def violated(self, text: str) -> None:
        self.broken.append(Violation(text))
        self.scope.cancel()

    def heard(self, event: ChildEvent) -> None:
        """A supervisor restarts what fails; what should never fail is not to be hidden by that."""
        self.sim.note(f"{event.child} {event.kind} {event.error!r:.100}")
        if event.error is not None and not is_expected(event.error) and not present_life().killed:
            self.broken.append(event.error)
            self.scope.cancel()

    # ---------------------------------------------------------------------------------------------- handlers, leases

    @contextmanager
    def inside(self, handle: JobHandle, *, kept: bool) -> Iterator[Handling]:
        """A handler is running; check that it may."""
        me = Handling(handle, present_life(), kept)
        for other in self.handling:
            if other.handle.id == handle.id and other.runs and not other.settled_itself:
                if other.handle.fence == handle.fence:
                    self.violated(f"two handlers of job {handle.id} with the fence {handle.fence}")
                elif (
                    self.plan.timely
                    and handle.id not in self.cancelled
                    and min(me, other, key=lambda one: one.handle.fence).kept
                ):
                    self.violated(f"two handlers of job {handle.id} at once")
        if handle.id in self.recorder.gone and self.recorder.gone[handle.id]["fence"] < handle.fence:
            self.violated(f"job {handle.id} runs again after it was acknowledged")
        self.handling.append(me)
        self.sim.note(f"begins {handle.id} fence {handle.fence} attempt {handle.attempt}")
        try:
            yield me
        finally:
            self.handling.remove(me)
            self.sim.note(f"ends {handle.id} fence {handle.fence}")

    def taken_away(self, id: int, old: Row, who: str) -> None:
        """A lease ended before its time: by its owner, whose handler is over, or because the job was cancelled."""
        for one in self.handling:
            mine = one.handle.id == id and one.handle.fence == old["fence"] and id not in self.cancelled
            if mine and one.runs and not one.settled_itself:
                self.violated(f"job {id} was settled by {who} while its handler was running")

    async def handle(self, job: JobHandle) -> None:
        """What every worker does."""
        with self.inside(job, kept=not job.queue.startswith("__")) as me:
            self.check_message(job)
            await trio.sleep(self.random.choice((0, 0.01, 1, 2)) * self.plan.visibility * self.random.random())
            match self.random.randrange(20):
                case 0 | 1 | 2:
                    raise ValueError("a handler's failure \0")
                case 3:
                    raise Discard
                case 4:
                    raise Snooze(self.random.choice((0, 3)))
                case 5:
                    me.settled_itself = True
                    self.finished.add((job.id, job.fence))
                    await job.ack()
                case 6:
                    await job.heartbeat()
                    await trio.sleep(self.random.random())
                case 7:
                    me.settled_itself = True
                    await job.retry("by itself", delay=self.random.choice((None, 0, 5)))
            if not me.settled_itself:
                self.finished.add((job.id, job.fence))

    def check_message(self, job: JobHandle) -> None:
        if job.queue.startswith("__alkstore_outbox"):
            keys = self.message_keys[job.id]
            keys.add(job.key)
            if len(keys) != 1 or job.key is None:
                self.violated(f"message {job.id} has changed its idempotency key: {keys}")

    # --------------------------------------------------------------------------------------------------------- checks

    def stored(self, tokens: list[str], *, unless_there: int | None = None) -> None:
        """Promise: these jobs were stored."""
        self.look()
        missing = [token for token in tokens if not self.recorder.by_token[token]]
        if missing and unless_there is None:
            self.violated(f"the caller was told that {missing} are stored, and they are not")
        if missing and unless_there not in self.recorder.jobs and unless_there not in self.recorder.gone:
            self.violated(f"the id {unless_there} was given for {missing}, and there is no such job")

    def not_stored(self, tokens: list[str], why: BaseException) -> None:
        """Promise: whatever happens, these are never stored."""

        def check() -> None:
            if there := [token for token in tokens if self.recorder.by_token[token]]:
                self.violated(f"the caller got {why!r}, and yet {there} are stored")

        check()
        self.promises.append(check)

    def all_or_none(self, tokens: list[str]) -> None:
        def check() -> None:
            there = [bool(self.recorder.by_token[token]) for token in tokens]
            if len(set(there)) > 1:
                self.violated(f"some of {tokens} are stored, and some are not: {there}")

        self.promises.append(check)

    @contextmanager
    def told(self, tokens: list[str]) -> Iterator[None]:
        """Around a call that stores `tokens` all or not at all: what it raises must be the truth."""
        self.all_or_none(tokens)
        try:
            yield
        except OutcomeUnknown:
            raise
        except (trio.Cancelled, StoreError, TransactionTimeout) as error:
            if not present_life().killed:
                self.look()
                self.not_stored(tokens, error)
            raise

    async def settled(self, handle: JobHandle, what: str, call: Callable[[], Awaitable[bool]]) -> None:
        """Settle by hand, and compare the answer with what is recorded."""
        mine = (handle.id, handle.fence)
        if what == "ack":
            self.finished.add(mine)
        try:
            done = await call()
        except OutcomeUnknown:
            return
        except (trio.Cancelled, StoreError) as error:
            if not present_life().killed:
                self.look()
                if not self._is_mine(handle) and self._lease_left(handle):
                    self.violated(f"{what} of {mine} raised {error!r}, and yet it took effect")
            raise
        self.look()
        self.sim.note(f"{what} {mine}: {done}")
        if done and self._is_mine(handle):
            self.violated(f"{what} of {mine} said True, and the job is still leased")
        if not done and self._is_mine(handle) and self._lease_left(handle):
            self.violated(f"{what} of {mine} said False in an unexpired lease")

    def _is_mine(self, handle: JobHandle) -> bool:
        job = self.recorder.jobs.get(handle.id)
        return job is not None and job["state"] == 1 and job["fence"] == handle.fence

    def _lease_left(self, handle: JobHandle) -> bool:
        end = self.recorder.claims[handle.id].get(handle.fence, 0)
        return end > self.sim.stepped.now_ms() and handle.id not in self.cancelled


def is_expected(error: BaseException) -> bool:
    return all(isinstance(leaf, (*EXPECTED, trio.Cancelled)) for leaf in _leaves(error))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
