"""Transactions that hold the user's own statements together with an enqueue: both happen, or neither."""

# ruff: noqa: SLF001 - the two faces of a transaction are one mechanism

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import outcome
import trio
from attrs import define, field

from actors.handlers import is_async, is_unfinished
from alkstore.context import Context, open_helpers
from alkstore.engines.engine import EngineTx, Turn
from alkstore.engines.turn import inside
from alkstore.entering import async_with
from alkstore.errors import StoreError, TransactionTimeout
from alkstore.job import Stamp
from alkstore.names import check_name
from alkstore.outbox import OUTBOX_STAMP, outbox_key, outbox_queue
from alkstore.payload import JSON
from alkstore.schedule import new_schedule
from alkstore.sql import jobs, schedules
from alkstore.values import MAX_ID, Job, Schedule, ScheduleOpts, Seconds, integer

__all__ = ["Parameters", "SyncTransaction", "Transaction", "open_transaction", "transact"]

T = TypeVar("T")

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Values for the ``?`` or the ``:name`` placeholders of a statement."""

_OF_TRANSACTIONS = ("BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "SAVEPOINT", "RELEASE")
_REFUSED = frozenset((*_OF_TRANSACTIONS, "ATTACH", "DETACH", "VACUUM", "PRAGMA"))
# What stands before the first word: a byte order mark too, as SQLite has it. PostgreSQL's comments hold comments, and
# end with a carriage return too.
_BLANK = re.compile(r"(?:[\s;\ufeff]|--[^\n]*)*+")
_BLANK_OF_POSTGRES = re.compile(r"(?:[\s;\ufeff]|--[^\n\r]*)*+")
_EDGE_OF_COMMENT = re.compile(r"/\*|\*/")
_WORD = re.compile(r"[A-Z]*", re.IGNORECASE)

INTERRUPTED_AFTER_S = 0.5
"""A call that is cancelled by a scope within the body has this long to end: then the transaction can go on."""

INTERRUPT_AGAIN_S = 0.010
"""An interrupt that comes just before a statement begins has no effect: so it is repeated until the call is over."""


@define(eq=False, repr=False)
class SyncTransaction:
    """An open transaction in plain functions: what `Store.transact` gives to its function.

    It works only while that function runs. After a statement has failed it can only be rolled back, wholly (by
    letting the exception out) or to a savepoint.
    """

    _tx: EngineTx
    _deadline: float
    """On time.monotonic's clock."""
    _timeout: float
    _open: bool = field(default=True, init=False)
    _rolled_back: bool = field(default=False, init=False)
    """At its time limit, while its body went on."""
    _failed: Exception | None = field(default=None, init=False)
    _depth: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._state()})"

    def execute(self, sql: str, params: Parameters = ()) -> list[tuple[Any, ...]]:
        """Run one statement of your own and return all its rows.

        Raises:
            ValueError: BEGIN, COMMIT, ROLLBACK, SAVEPOINT, PREPARE TRANSACTION, ATTACH, VACUUM or PRAGMA, and their
                like: the transaction is the store's, see `savepoint`.
            StoreError: the statement failed; the driver's exception is the ``__cause__``.
            TransactionTimeout: the transaction has been open for too long.
        """
        if not isinstance(sql, str):
            raise TypeError(f"sql must be a str, not {sql!r:.80}")
        if word := _refused(sql):
            raise ValueError(
                f"{word} is not allowed inside a transaction of the store, which begins, commits and rolls back by "
                "itself; for a part that may be undone use tx.savepoint()"
            )
        if isinstance(params, str | bytes) or not isinstance(params, Sequence | Mapping):
            raise TypeError(f"params must be a sequence such as (42,), or a mapping, not {params!r:.80}")
        return self._run(lambda: self._user(sql, params))

    def enqueue(
        self,
        queue: str,
        payload: JSON,
        *,
        visibility: Seconds = 300,
        max_attempts: int = 3,
        backoff: Seconds = 5,
        priority: int = 0,
        delay: Seconds | None = None,
        run_at: datetime | None = None,
        expires: Seconds | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Enqueue a job in this transaction and return its id; the options are those of `Queue` and `Queue.enqueue`.

        Nobody sees the job, and no worker is woken, before the transaction has committed.
        """
        job = Stamp.of(visibility, max_attempts, backoff, None).job(
            check_name(queue, "queue"),
            payload,
            priority=priority,
            delay=delay,
            run_at=run_at,
            expires=expires,
            key=key,
            headers=headers,
        )
        return self._run(lambda: jobs.enqueue(self._tx, job))

    def outbox_enqueue(
        self,
        name: str,
        payload: JSON,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
    ) -> int:
        """Put a message into the outbox `name` in this transaction and return its id; see `Outbox.enqueue`."""
        job = OUTBOX_STAMP.job(
            outbox_queue(name), payload, key=outbox_key(key), headers=headers, delay=delay, priority=priority
        )
        return self._run(lambda: jobs.enqueue(self._tx, job))

    def schedule(
        self, name: str, spec: str, queue: str, payload: JSON = None, opts: ScheduleOpts | None = None
    ) -> Schedule:
        """Register a schedule in this transaction; see `Store.schedule`."""
        new = new_schedule(self._tx.now(), name, spec, queue, payload, opts)
        return self._run(lambda: schedules.register(self._tx, new))

    def unschedule(self, name: str) -> bool:
        """Delete a schedule in this transaction; see `Store.unschedule`."""
        check_name(name, "schedule")
        return self._run(lambda: schedules.unregister(self._tx, name))

    def get_job(self, id: int) -> Job | None:
        """Return a job as this transaction sees it, its own changes included; see `Store.get_job`."""
        integer(id, "id", 0, MAX_ID)
        return self._run(lambda: jobs.get(self._tx, id))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo everything in the body if it raises; the exception goes on, and the transaction can too.

        So is a body that ends well although a statement in it has failed: then RuntimeError says so.
        """
        before = self._enter()
        try:
            yield
            self._leave()
        except BaseException:
            self._undo(before)
            raise

    def _user(self, sql: str, params: Parameters) -> list[tuple[Any, ...]]:
        rows = self._tx.user(sql, params)
        if not self._tx.is_open:
            raise StoreError(
                "this statement has ended the transaction, which is the store's to end: nothing more is done"
            )
        return rows

    def _run(self, work: Callable[[], T]) -> T:
        if self._rolled_back:
            raise self._too_late()
        if not self._open:
            raise RuntimeError("this transaction is over: it works only inside its own block or function")
        if self._failed is not None:
            raise RuntimeError(
                f"a statement of this transaction has failed ({self._failed}): let its exception out, to roll back "
                "everything, or what is inside the savepoint around it"
            ) from self._failed
        if self._is_late():
            raise self._too_late()
        try:
            return work()
        except StoreError as error:
            self._failed = error
            if not self._is_late():
                raise
            self._failed = self._too_late()  # most likely the statement has not failed, but was interrupted
            raise self._failed from error
        except Exception as error:  # what the driver makes of a parameter that it cannot store
            self._failed = error
            raise

    def _enter(self) -> tuple[int, set[str], int]:
        self._run(lambda: self._tx.all(f"SAVEPOINT alkstore_{self._depth}"))
        self._depth += 1
        return self._depth - 1, set(self._tx.topics), len(self._tx.events)

    def _leave(self) -> None:
        self._depth -= 1
        self._run(lambda: self._tx.all(f"RELEASE alkstore_{self._depth}"))

    def _undo(self, before: tuple[int, set[str], int]) -> None:
        self._depth, topics, events = before
        if not self._open or not self._tx.is_open:  # FULL and IOERR have undone everything already
            return
        self._tx.all(f"ROLLBACK TO alkstore_{self._depth}")
        self._tx.all(f"RELEASE alkstore_{self._depth}")
        self._tx.topics.clear()
        self._tx.topics.update(topics)
        del self._tx.events[events:]
        self._failed = None

    def _before_commit(self) -> None:
        """Raise if this must not be committed."""
        if self._is_late():
            raise self._too_late()
        if self._failed is not None:
            raise StoreError(f"nothing was committed, since a statement failed: {self._failed}") from self._failed

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _close(self) -> None:
        self._open = False

    def _is_open(self) -> bool:
        return self._open

    def _state(self) -> str:
        if not self._open:
            return "over"
        return "open" if self._failed is None else "failed"

    def _too_late(self) -> TransactionTimeout:
        return TransactionTimeout(
            f"the transaction was open for longer than {self._timeout:g} s (transaction_timeout) and was rolled back: "
            "others wait for what it has locked, on SQLite the whole database: keep waiting and computing outside of it"
        )


@define(eq=False, repr=False)
class Transaction:
    """An open transaction; see `Store.transaction`. It works only in the task that opened it, inside its block."""

    _sync: SyncTransaction
    _turn: Turn
    _context: Context
    _task: trio.lowlevel.Task = field(factory=trio.lowlevel.current_task, init=False)
    _nurseries_around: int = field(init=False)
    _root: trio.lowlevel.Task = field(init=False)
    _call_over: trio.Event | None = field(default=None, init=False)
    """Of the call that is under way, if one is."""
    _body_over: trio.Event = field(factory=trio.Event, init=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sync._state()})"

    async def execute(self, sql: str, params: Parameters = ()) -> list[tuple[Any, ...]]:
        """Run one statement of your own and return all its rows; see `SyncTransaction.execute`.

        A checkpoint. Cancelled, it is interrupted, and the whole transaction rolled back; where a scope within the body
        has cancelled it, that is told at the end of the body, and a statement that ends within half a second is let be.
        """
        return await self._call(lambda: self._sync.execute(sql, params))

    async def enqueue(
        self,
        queue: str,
        payload: JSON,
        *,
        visibility: Seconds = 300,
        max_attempts: int = 3,
        backoff: Seconds = 5,
        priority: int = 0,
        delay: Seconds | None = None,
        run_at: datetime | None = None,
        expires: Seconds | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Enqueue a job in this transaction and return its id; see `SyncTransaction.enqueue` for the options."""
        return await self._call(
            lambda: self._sync.enqueue(
                queue,
                payload,
                visibility=visibility,
                max_attempts=max_attempts,
                backoff=backoff,
                priority=priority,
                delay=delay,
                run_at=run_at,
                expires=expires,
                key=key,
                headers=headers,
            )
        )

    async def outbox_enqueue(
        self,
        name: str,
        payload: JSON,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
    ) -> int:
        """Put a message into the outbox `name` in this transaction and return its id; see `Outbox.enqueue`."""
        return await self._call(
            lambda: self._sync.outbox_enqueue(name, payload, key=key, headers=headers, delay=delay, priority=priority)
        )

    async def schedule(
        self, name: str, spec: str, queue: str, payload: JSON = None, opts: ScheduleOpts | None = None
    ) -> Schedule:
        """Register a schedule in this transaction; see `Store.schedule`."""
        return await self._call(lambda: self._sync.schedule(name, spec, queue, payload, opts))

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule in this transaction; see `Store.unschedule`."""
        return await self._call(lambda: self._sync.unschedule(name))

    async def get_job(self, id: int) -> Job | None:
        """Return a job as this transaction sees it, its own changes included."""
        return await self._call(lambda: self._sync.get_job(id))

    @async_with("async with tx.savepoint():")
    async def savepoint(self) -> AsyncIterator[None]:
        """Undo everything in the body if it raises; see `SyncTransaction.savepoint`."""
        before = await self._call(self._sync._enter)
        try:
            yield
            await self._call(self._sync._leave)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._context.engine.in_turn(self._turn, lambda: self._sync._undo(before))
            raise

    @_nurseries_around.default
    def _count_nurseries(self) -> int:
        return len(self._task.child_nurseries)

    def _awaits_this_task(self) -> bool:
        """Whether the running task is that of the transaction, or one that its body waits for while it is open.

        A task of a nursery that was there before may wait for the end of the transaction. One that has grown on another
        root is what a thread of the body has started with `trio.from_thread.run`: the body waits for that thread.
        """
        task: trio.lowlevel.Task = trio.lowlevel.current_task()
        if _root_of(task) is not self._root:
            return self._sync._is_open()
        while self._sync._is_open() and task is not self._task:
            nursery = task.parent_nursery
            if nursery is None:
                return False
            if nursery.parent_task is self._task:
                return nursery in self._task.child_nurseries[self._nurseries_around :]
            task = nursery.parent_task
        return self._sync._is_open()

    @trio.lowlevel.enable_ki_protection  # or it would leave in the group of a nursery that nobody has asked for
    async def _call(self, work: Callable[[], T]) -> T:
        if trio.lowlevel.current_task() is not self._task:
            raise RuntimeError(
                "a transaction works only in the task that opened it, one call after the other: make this call there"
            )
        self._call_over = over = trio.Event()

        async def interrupt_if_cancelled() -> None:
            try:
                await over.wait()
            except trio.Cancelled:  # the caller meets it at the next checkpoint, if nothing has come of the call
                with trio.CancelScope(shield=True):
                    with trio.move_on_after(INTERRUPTED_AFTER_S):
                        await over.wait()
                    await self._interrupt_until(over)

        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                nursery.start_soon(interrupt_if_cancelled)
                answer = await outcome.acapture(self._context.engine.in_turn, self._turn, work)
                over.set()
            return answer.unwrap()
        except StoreError:
            await trio.lowlevel.checkpoint_if_cancelled()  # then it is our own interruption that made it fail
            raise
        finally:
            over.set()
            self._call_over = None

    @_root.default
    def _root_of_its_task(self) -> trio.lowlevel.Task:
        return _root_of(self._task)

    async def _keep_the_limit(self, deadline: float) -> None:
        """Stop a long statement when the body is cancelled, and roll back at the `deadline` if the body still goes on.

        It may shield itself; others wait for what is locked all the same.
        """
        try:
            await self._body_over.wait()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                if self._call_over is not None:
                    await self._interrupt_until(self._call_over)
                with trio.move_on_at(deadline):
                    await self._body_over.wait()
                if not self._body_over.is_set():
                    await self._roll_back()
            raise

    async def _roll_back(self) -> None:
        self._sync._close()
        self._sync._rolled_back = True
        if self._call_over is not None:
            await self._interrupt_until(self._call_over)
        await self._context.engine.end(self._turn, commit=False)

    async def _interrupt_until(self, over: trio.Event) -> None:
        while not over.is_set():
            self._context.engine.interrupt(self._sync._tx)
            with trio.move_on_after(INTERRUPT_AGAIN_S):
                await over.wait()


def _root_of(task: trio.lowlevel.Task) -> trio.lowlevel.Task:
    """The main task or the system task from which `task` has grown."""
    while (nursery := task.parent_nursery) is not None and nursery.parent_task.parent_nursery is not None:
        task = nursery.parent_task
    return task


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # not of the body: nothing must fall between the beginning and the end of a turn
async def open_transaction(context: Context, timeout: float) -> AsyncIterator[Transaction]:
    """Open a transaction for the body; see `Store.transaction`."""
    engine = context.engine
    engine.refuse_inside("tx.savepoint()")
    turn = await engine.begin()
    sync = SyncTransaction(turn.tx, math.inf, timeout)  # the deadline is the cancel scope's
    late = False
    try:
        async with open_helpers() as helpers:
            helpers.cancel_scope.deadline = deadline = trio.current_time() + timeout
            tx = Transaction(sync, turn, context)
            helpers.start_soon(tx._keep_the_limit, deadline)
            try:
                with inside(engine.database, tx._awaits_this_task):
                    yield tx
            finally:
                late = helpers.cancel_scope.cancel_called  # a body may shield itself, or swallow a Cancelled
                tx._body_over.set()
        if late:
            raise sync._too_late()
        sync._before_commit()
    except BaseException as error:
        if late and not isinstance(error, trio.Cancelled | TransactionTimeout):
            error.add_note(f"meanwhile: {sync._too_late()!r}")
        sync._close()
        if not sync._rolled_back:
            await engine.end(turn, commit=False)
        raise
    else:
        sync._close()
        await engine.end(turn, commit=True)


async def transact(context: Context, function: Callable[[SyncTransaction], T], timeout: float) -> T:
    """Run `function` in one transaction; see `Store.transact`."""
    if is_async(function, "function"):
        raise TypeError(f"transact takes a plain function, not the async {function!r}: use store.transaction() for it")
    engine = context.engine
    running: EngineTx | None = None
    begun = trio.Event()
    in_trio = trio.lowlevel.current_trio_token()
    # shielded: the result of what has been committed is returned, whatever is cancelled meanwhile
    watching = trio.CancelScope(shield=True)

    def work(tx: EngineTx) -> T:
        nonlocal running
        sync = SyncTransaction(tx, time.monotonic() + timeout, timeout)
        running = tx
        in_trio.run_sync_soon(begun.set)
        try:
            with inside(engine.database, sync._is_open):
                result = function(sync)
            _refuse_unfinished(result)
            sync._before_commit()
        finally:
            sync._close()
            running = None
        return result

    async def interrupt_at_the_deadline() -> None:
        with watching:
            await begun.wait()
            await trio.sleep(timeout)
            while running is not None:
                engine.interrupt(running)
                await trio.sleep(INTERRUPT_AGAIN_S)

    async with open_helpers() as helpers:
        helpers.start_soon(interrupt_at_the_deadline)
        try:
            return await engine.run_alone(work)
        finally:
            watching.cancel()


def _refuse_unfinished(result: object) -> None:
    if is_unfinished(result):
        raise TypeError(
            "the function of transact returned an awaitable or a generator, which nobody would run: rolled back"
        )


def _refused(sql: str) -> str:
    """The command that this statement must not be, by SQLite's comments or by PostgreSQL's; "": it is none."""
    for nested in (False, True):
        words = (word for word in _words(sql, nested) if word not in ("EXPLAIN", "QUERY", "PLAN"))
        first = next(words, "")
        if first in _REFUSED:
            return first
        if first == "PREPARE" and next(words, "") == "TRANSACTION":
            return "PREPARE TRANSACTION"
    return ""


def _words(sql: str, nested: bool) -> Iterator[str]:
    """The words with which a statement begins, in capitals; `nested`: its comments are PostgreSQL's."""
    at = 0
    blank = _BLANK_OF_POSTGRES if nested else _BLANK
    while True:
        at = _end(blank, sql, at)
        if sql.startswith("/*", at):
            at = _end_of_comment(sql, at, nested)
            continue
        end = _end(_WORD, sql, at)
        if end == at:
            return
        yield sql[at:end].upper()
        at = end


def _end(pattern: re.Pattern[str], sql: str, at: int) -> int:
    found = pattern.match(sql, at)
    return at if found is None else found.end()


def _end_of_comment(sql: str, at: int, nested: bool) -> int:
    depth = 1
    for edge in _EDGE_OF_COMMENT.finditer(sql, at + 2):
        if edge[0] == "*/":
            depth -= 1
        elif nested:
            depth += 1
        if depth == 0:
            return edge.end()
    return len(sql)
