"""Group commit: all units that wait run in one transaction, each in its savepoint, and are answered after COMMIT."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import cast

import outcome
import trio
from attrs import define, field

from alkstore.clock import Clock
from alkstore.engines.bridge import Bridge
from alkstore.engines.driver import Connection, DiskError
from alkstore.engines.steps import TOLERANCE_MS, ClockSteps
from alkstore.engines.turn import Turn
from alkstore.engines.units import Lanes, SQLiteTx, Unit, Work
from alkstore.errors import OutcomeUnknown, StoreBusy, StoreClosed, StoreError
from alkstore.sql import clock_repair
from alkstore.values import Event, at

__all__ = ["Committed", "Writer"]

GROUP_UNITS = 512
GROUP_S = 0.020
"""A group ends at this many units or this long: a lease that waits behind it never waits longer."""

LOCK_DELAYS_S = (0.001, 0.002, 0.005, 0.010, 0.025, 0.050)
"""Pauses between attempts to get the database's lock; the last one repeats."""

COUNT_REOPENING = """
INSERT INTO __alkstore_meta (key, value) VALUES ('reopened', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1"""
"""Whatever else it is good for: it changes a row, so that its commit writes to the log."""

COURTESY_S = 0.002
"""Pause after a full group while other processes write too: SQLite's lock is not fair, so somebody has to be."""

COURTESY_FOR_S = 1.0
"""For how long another process counts as writing after it was last noticed."""


@define(eq=False)
class Committed:
    """What one hop into the writer's thread has brought about."""

    answers: list[tuple[Unit, outcome.Outcome[object]]] = field(factory=list)
    topics: set[str] = field(factory=set)
    events: list[Event] = field(factory=list)
    foreign: bool = False
    """Somebody else has committed since the last look."""
    stepped: bool = False
    """The clock was stepped."""
    busy: StoreBusy | None = None
    """The lock was somebody else's, as this says; nothing was done."""
    committed: bool = False
    """Something was committed."""
    failure: StoreError | None = None
    """Why the commit failed."""
    full: bool = False
    """The group ended at its bound: more is waiting."""


@define(eq=False)
class Writer:
    """Owns the only connection that writes.

    `connect` opens it anew after a disk failure, `intact` raises if the files were taken away, `publish` is called in
    the trio thread after each hop, before anybody is answered. When nobody waits and the log is `untidy`, `tidy` is
    called in the writer's thread, and again after the seconds that it returns.
    """

    bridge: Bridge
    inline: bool
    clock: Clock
    steps: ClockSteps
    connect: Callable[[], Connection]
    intact: Callable[[], None]
    publish: Callable[[Committed], None]
    untidy: Callable[[], bool]
    tidy: Callable[[], float]
    busy_timeout: float
    connection: Connection
    alone: bool
    """Nobody else can write to this database: it is in memory."""
    data_version: int
    """What the connection's ``data_version`` was last: it moves when anybody else commits."""
    lanes: Lanes = field(factory=Lanes, init=False)
    commits: int = field(default=0, init=False)
    """Twice the commits of this writer so far, odd while one is under way; the feed tells those of others by this."""
    turn: Turn | None = field(default=None, init=False)
    """The interactive transaction that has the connection now."""
    _repairs: int = field(init=False)
    """How many steps of the clock are repaired in the database, by anybody."""
    _repairs_accepted: int = field(init=False)
    """How many were when this writer last committed: it has not noticed a step before that."""
    _repairing: bool = field(default=False, init=False)
    """The transaction that is open counts a repair."""
    _attempts: int = field(default=0, init=False)
    """How often in a row the database's lock was somebody else's."""
    _busy_since: float = field(default=0.0, init=False)
    """When that began, on the bridge's clock."""
    _reopen: bool = field(default=False, init=False)
    _probe: bool = field(default=False, init=False)
    _closed: StoreError | None = field(default=None, init=False)
    _failed: Exception | None = field(default=None, init=False)
    """What broke a group that ran in a caller's task."""
    _draining: bool = field(default=False, init=False)
    _wake: trio.Event = field(factory=trio.Event, init=False)
    _others_until: float = field(default=0.0, init=False)
    _random: random.Random = field(factory=random.Random, init=False)

    def __attrs_post_init__(self) -> None:
        self._repairs = self._repairs_accepted = self._counted_repairs()

    # -------------------------------------------------------------------------------------- in the trio thread

    async def run(self, work: Work, *, urgent: bool) -> object:
        """Run `work` in a transaction and return its result once that is committed.

        Cancelled while it waits: it has had no effect. Once it has begun it runs to its end, and the result is
        returned even if a cancellation is pending.
        """
        (answer,) = await self._answers([self._unit(work, urgent=urgent)])
        return answer.unwrap()

    async def run_alone(self, work: Work) -> object:
        """As `run`, for a user's function: it shares its transaction with nobody, and is never run twice."""
        unit = self._unit(work, urgent=False)
        unit.alone = True
        (answer,) = await self._answers([unit])
        return answer.unwrap()

    async def run_each(self, works: list[Work], *, urgent: bool) -> list[object]:
        """Run each of `works` as a unit of its own, in as few commits as possible.

        All run, whatever becomes of the others; then the first error is raised. Cancelled while they wait: those that
        have not begun have no effect.
        """
        return [a.unwrap() for a in await self._answers([self._unit(work, urgent=urgent) for work in works])]

    async def begin(self) -> Turn:
        """Wait for the connection and its lock, and return an open transaction of which the caller has to take care.

        While it is open nobody else writes, in any process. Cancelled while it waits: nothing is open.
        """
        unit = self._unit(_nothing, urgent=False)
        unit.turn = True
        (answer,) = await self._answers([unit])
        return cast(Turn, answer.unwrap())

    async def end(self, turn: Turn, *, commit: bool) -> None:
        """Commit or roll back what `begin` has opened, and let the others write. Not cancelled half-way."""
        try:
            with trio.CancelScope(shield=True):
                done = await self.bridge.call(lambda: self._end_turn(turn, commit))
            self.publish(done)
            if done.failure is not None:
                raise done.failure
        finally:
            turn.over.set()

    def _unit(self, work: Work, *, urgent: bool) -> Unit:
        return Unit(work, urgent, self.bridge.time())

    @trio.lowlevel.enable_ki_protection  # it could strike when units are queued and nobody waits for them yet
    async def _answers(self, units: list[Unit]) -> list[outcome.Outcome[object]]:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed is not None:
            raise StoreClosed(str(self._closed)) from self._closed.__cause__
        for unit in units:
            self.lanes.put(unit)
        if self.inline:
            await trio.lowlevel.cancel_shielded_checkpoint()
            if units[-1].answer is None and self.turn is None and self.lanes.has_units:
                self._group_in_place()
        try:
            for unit in units:
                if unit.answer is None:
                    self._wake.set()
                    await self._answered(unit)
        except BaseException:
            for unit in units:
                self.lanes.discard(unit)
            raise
        return [unit.answer for unit in units if unit.answer is not None]

    @trio.lowlevel.enable_ki_protection
    def _group_in_place(self) -> None:
        """Commit a group in the task of a caller; if that fails, nobody is left waiting, and `serve` raises."""
        try:
            self._settle(self._group())
        except Exception as error:  # noqa: BLE001 - `serve` raises it
            self._failed = error
            self.refuse(f"the store's writer failed: {error!r}", cause=error)
            self._wake.set()

    async def _answered(self, unit: Unit) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            if self.lanes.discard(unit):
                return trio.lowlevel.Abort.SUCCEEDED
            return trio.lowlevel.Abort.FAILED

        unit.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def probe(self) -> None:
        """Find out soon whether somebody else has committed."""
        self._probe = True
        self._wake.set()

    @trio.lowlevel.enable_ki_protection  # it could strike when a group is committed and not all are answered yet
    async def serve(self) -> None:
        """Commit group after group until `drain`. Whatever ends this, nobody is left waiting for an answer."""
        try:
            while True:
                if self._failed is not None:
                    raise self._failed
                if self.lanes.has_units or self._probe:
                    await self._serve_group()
                elif self.lanes.next_turn is None:
                    if self._draining:
                        return
                    self._wake = trio.Event()
                    # not always: whoever comes next would have to wait for this hop into the thread as well
                    pause = await self.bridge.call(self.tidy) if self.untidy() else math.inf
                    with trio.move_on_after(pause):
                        await self._wake.wait()
                if self.lanes.next_turn is not None:  # at the latest after one group, so that leases cannot starve it
                    await self._serve_turn()
        except Exception as error:
            self.refuse(f"the store's writer failed: {error!r}", cause=error)
            raise
        finally:
            self.refuse("the store is closed")

    async def _serve_group(self) -> None:
        done = await self.bridge.call(self._group)
        self._settle(done)
        if done.busy is not None:
            await self._wait_for_lock(done.busy)
        else:
            if done.full and self.bridge.time() < self._others_until:
                await self.bridge.sleep(COURTESY_S)

    async def _serve_turn(self) -> None:
        """Give the connection away for one interactive transaction, and wait until it comes back."""
        done = await self.bridge.call(self._open_turn)
        self._settle(done)
        if done.busy is not None:
            await self._wait_for_lock(done.busy)
            return
        if self.turn is not None:
            await self.turn.over.wait()
            self.turn = None

    async def _wait_for_lock(self, busy: StoreBusy) -> None:
        given_up = self.bridge.time() - self.busy_timeout
        for unit in self.lanes.take_waiting_since(given_up) if self._busy_since <= given_up else ():
            late = StoreBusy(
                f"somebody else held the database's write lock for {self.busy_timeout:g} s (busy_timeout); "
                "nothing was done"
            )
            late.__cause__ = busy.__cause__
            unit.answered(outcome.Error(late))
        delay = LOCK_DELAYS_S[min(self._attempts, len(LOCK_DELAYS_S) - 1)]
        self._attempts += 1
        await self.bridge.sleep(delay * self._random.uniform(0.5, 1.0))

    def drain(self) -> None:
        """Take no more units; `serve` returns when those that wait are answered."""
        self._closed = self._closed or StoreClosed("the store is closed")
        self._draining = True
        self._wake.set()

    def refuse(self, why: str, *, begun: bool = True, cause: Exception | None = None) -> None:
        """Answer every waiting unit, and all that come later, with StoreClosed.

        Those that a group has `begun` may still be committed, as long as a hop is under way: then leave them out.
        """
        if self._closed is None:
            self._closed = StoreClosed(why)
            self._closed.__cause__ = cause
        for unit in self.lanes.take_all(begun=begun):
            unit.answered(outcome.Error(_copy(self._closed)))

    def _settle(self, done: Committed) -> None:
        if done.foreign or done.busy is not None:
            self._others_until = self.bridge.time() + COURTESY_FOR_S
        if done.busy is None:
            self._attempts = 0
        elif self._attempts == 0:
            self._busy_since = self.bridge.time()
        try:
            self.publish(done)
        finally:  # it is committed: nobody may be told that it is not
            for unit, answer in done.answers:
                unit.answered(answer)
            self.lanes.settled()

    # ------------------------------------------------------------------------------------ in the writer's thread

    @trio.lowlevel.enable_ki_protection
    def _group(self) -> Committed:
        done = Committed()
        self._probe = False
        try:
            moment = self._begin(done, lock=self.lanes.has_units)
        except StoreBusy as error:
            self._roll_back()
            done.busy = error
            return done
        except StoreError as error:
            self._roll_back()
            done.answers = [(unit, outcome.Error(_copy(error))) for unit in self.lanes.take_all(begun=False)]
            return done
        if moment is not None:
            self._run_units(moment, done)
            if self.connection.in_transaction:
                self._commit(moment, done)
        if (failure := done.failure) is not None:
            done.answers = [
                (unit, outcome.Error(_copy(failure)) if isinstance(answer, outcome.Value) else answer)
                for unit, answer in done.answers
            ]
        return done

    @trio.lowlevel.enable_ki_protection
    def _open_turn(self) -> Committed:
        done = Committed()
        unit = self.lanes.next_turn
        if unit is None:
            return done
        answer: outcome.Outcome[object]
        try:
            moment = self._begin(done, lock=True)
            assert moment is not None
            tx = SQLiteTx(self.connection, moment)
            tx.events += done.events  # the repair after a step is part of this transaction
            answer = outcome.Value(Turn(tx, done.stepped))
            done = Committed(foreign=done.foreign)
        except StoreBusy as error:
            self._roll_back()
            done.busy = error
            return done
        except StoreError as error:
            self._roll_back()
            answer = outcome.Error(_copy(error))
        if not self.lanes.take_turn(unit):  # it was withdrawn meanwhile
            self._roll_back()
        else:
            done.answers.append((unit, answer))
            self.turn = answer.value if isinstance(answer, outcome.Value) else None
        return done

    @trio.lowlevel.enable_ki_protection
    def _end_turn(self, turn: Turn, commit: bool) -> Committed:
        done = Committed(topics=turn.tx.topics, events=turn.tx.events, stepped=turn.stepped)
        if not commit:
            self._roll_back()
            return Committed()
        self._commit(turn.tx.moment, done)
        return done

    def _begin(self, done: Committed, *, lock: bool) -> int | None:
        """Begin a transaction if `lock`, and return its reading of the clock; look what others have done meanwhile."""
        self.intact()
        if self._reopen:
            fresh = self.connect()
            self.connection.close()
            self.connection = fresh
            self.data_version = -1  # another connection counts otherwise: what was committed meanwhile is not known
            # The commit whose sync failed may still lie in the log, to be found by a recovery: a new one covers it.
            self.connection.all("BEGIN IMMEDIATE")
            self.connection.all(COUNT_REOPENING)
            self.connection.all("COMMIT")
            self._reopen = False
        if lock:
            self.connection.all("BEGIN IMMEDIATE")
        if not self.alone:
            version = self.connection.all("PRAGMA data_version")[0][0]
            done.foreign = version != self.data_version
            self.data_version = version
            if done.foreign:
                self._repairs = self._counted_repairs()
        self._repairing = False
        if not lock:
            return None
        moment = self.clock.now_ms()
        self._repair_after_step(moment, done)
        return moment

    def _repair_after_step(self, moment: int, done: Committed) -> None:
        step = self.steps.step(moment)
        if step == 0:
            return
        done.stepped = True
        if step > 0:
            done.events.append(Event("clock_set_forward", at(moment), "store", {"seconds": step / 1000}))
            return
        tx = SQLiteTx(self.connection, moment)
        self._repairing = self._repairs == self._repairs_accepted
        before, since = moment - step, self.steps.accepted + step - TOLERANCE_MS
        repaired = clock_repair.repair(tx, before, since, again=not self._repairing)
        details = {
            "seconds": -step / 1000,
            "leases": repaired.leases,
            "locks": repaired.locks,
            "jobs": repaired.jobs,
        }
        done.events.append(Event("clock_set_back", at(moment), "store", details))

    def _counted_repairs(self) -> int:
        return clock_repair.counted(SQLiteTx(self.connection, 0))

    def _run_units(self, moment: int, done: Committed) -> None:
        began = time.perf_counter()
        while len(done.answers) < GROUP_UNITS and (not done.answers or time.perf_counter() - began < GROUP_S):
            unit = self.lanes.take(first=not done.answers)
            if unit is None:
                return
            tx = SQLiteTx(self.connection, moment)
            answer = self._run_unit(unit, tx, solo=self.inline and not done.answers and not len(self.lanes))
            done.answers.append((unit, answer))
            if not self.connection.in_transaction:
                self._run_again(done)
                return
            if isinstance(answer, outcome.Value):
                done.topics |= tx.topics
                done.events += tx.events
            if unit.alone:
                break
        done.full = len(self.lanes) > 0

    def _run_unit(self, unit: Unit, tx: SQLiteTx, *, solo: bool) -> outcome.Outcome[object]:
        """Run a unit in a savepoint; `solo`: nobody else can join its transaction, so that will do."""
        try:
            if solo:
                return outcome.Value(unit.work(tx))
            self.connection.all("SAVEPOINT alkstore_unit")
            value = unit.work(tx)
            self.connection.all("RELEASE alkstore_unit")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is this unit's answer; the caller sees it
            if solo:
                self._roll_back()
            elif self.connection.in_transaction:
                try:
                    self.connection.all("ROLLBACK TO alkstore_unit")
                    self.connection.all("RELEASE alkstore_unit")
                except StoreError:
                    self._roll_back()
            return outcome.Error(error)
        return outcome.Value(value)

    def _run_again(self, done: Committed) -> None:
        """The last unit's failure has rolled back the whole group, as FULL and IOERR do.

        That unit has its error. Those before it have had no effect: they run again, each alone. Those that still wait
        will be another group; nobody was answered.
        """
        again = [unit for unit, answer in done.answers[:-1] if isinstance(answer, outcome.Value)]
        for unit in again:
            unit.alone = True
        self.lanes.put_back(again)
        done.answers = [(unit, answer) for unit, answer in done.answers if unit not in again]
        done.topics.clear()
        done.events.clear()

    def _commit(self, moment: int, done: Committed) -> None:
        """COMMIT, or roll back and leave the reason in `done`."""
        self.commits += 1  # before anybody can see it
        try:
            self.connection.all("COMMIT")
        except StoreError as error:
            self._roll_back()
            done.failure = error
            if isinstance(error, DiskError):
                self._reopen = True
                done.failure = OutcomeUnknown(
                    f"the disk failed at COMMIT, so what was committed is not known: {error}; look whether it is "
                    "there, or repeat it with the same key"
                )
                done.failure.__cause__ = error.__cause__
            done.topics.clear()
            done.events.clear()
        else:
            done.committed = True
            self.steps.accept(moment, stepped=done.stepped)
            self._repairs += self._repairing
            self._repairs_accepted = self._repairs
        finally:
            self.commits += 1

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            try:
                self.connection.all("ROLLBACK")
            except StoreError:
                self._reopen = True


def _nothing(_: object) -> None:
    pass


def _copy(error: StoreError) -> StoreError:
    """An exception object belongs to one task: its traceback and context grow as it travels."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
