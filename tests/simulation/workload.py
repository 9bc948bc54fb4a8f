"""A fixed piece of work on one store, which keeps what each caller was told; and whether that was the truth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import apsw
import trio
from attrs import define, field

from alkstore import JobHandle, ManualClock, OutcomeUnknown, Store, StoreError, open_store

__all__ = ["START", "Answers", "settle_accounts", "work"]

START = 1_800_000_000_000
BIG = "x" * 5_000
"""A payload of some pages, which do not fit into the cache: so a unit of work writes before its group commits."""

GROUP = 4

Call: TypeAlias = Callable[[], Awaitable[Any]]


@define(eq=False)
class Answers:
    """What callers were told."""

    there: list[str] = field(factory=list)
    """Tokens that are stored, they were told."""
    not_there: list[str] = field(factory=list)
    gone: list[str] = field(factory=list)
    """Tokens of jobs that are done."""
    not_gone: list[str] = field(factory=list)
    unknown: list[str] = field(factory=list)
    """OutcomeUnknown."""
    ids: list[int] = field(factory=list)
    fences: list[int] = field(factory=list)
    """Fencing tokens of locks, in the order in which they were given."""
    errors: list[StoreError] = field(factory=list)
    given: list[tuple[str, str]] = field(factory=list)
    """Each (token, "stored" or "gone") in the order in which callers were told."""

    def as_of(self, count: int) -> Answers:
        """The first so many answers, and nothing said of all that came later."""
        gone = [token for token, what in self.given[:count] if what == "gone"]
        under_way = {token for token, what in self.given[count:] if what == "gone"}
        stored = [token for token, what in self.given[:count] if what == "stored"]
        return Answers(there=[token for token in stored if token not in {*gone, *under_way}], gone=gone)

    async def stores(self, tokens: list[str], call: Call) -> None:
        """Make a call that stores all of `tokens`, or none."""
        try:
            result = await call()
        except OutcomeUnknown as error:
            self.errors.append(error)
            self.unknown += tokens
        except StoreError as error:
            self.errors.append(error)
            self.not_there += tokens
        else:
            self.there += tokens
            self.given += [(token, "stored") for token in tokens]
            if isinstance(result, int):
                self.ids.append(result)

    async def ends(self, handle: JobHandle, call: Callable[[], Awaitable[bool]], *, gone: bool) -> None:
        """Settle a job."""
        token = handle.payload["token"]
        try:
            assert await call()
        except OutcomeUnknown as error:
            self.errors.append(error)
            if token in self.there:
                self.there.remove(token)
            self.unknown.append(token)
        except StoreError as error:
            self.errors.append(error)
            self.not_gone.append(token)
        else:
            if gone:
                self.gone.append(token)
                self.given.append((token, "gone"))
                if token in self.there:
                    self.there.remove(token)

    async def tries(self, call: Call) -> Any:
        """Make any other call; None: it failed."""
        try:
            return await call()
        except StoreError as error:
            self.errors.append(error)
            return None


async def work(path: Path, answers: Answers, *, heal: Callable[[], None] = lambda: None) -> None:
    """Do the work. `heal` is called when it is nearly done: from there on the disk is sound, and the store goes on."""
    clock = ManualClock(START)
    async with open_store(path, driver="apsw", inline=True, clock=clock, busy_timeout=1) as store:
        await _together(
            [
                lambda n=n: answers.stores([f"first{n}"], lambda: _enqueue(store, f"first{n}"))  # type: ignore[misc]
                for n in range(GROUP)
            ]
        )
        handles = await answers.tries(lambda: store.queue("q").claim("w", GROUP)) or []
        settling: list[Call] = [lambda: answers.stores(["between"], lambda: _enqueue(store, "between"))]
        for n, handle in enumerate(handles):
            how: list[tuple[Callable[[], Awaitable[bool]], bool]] = [
                (handle.ack, True),
                (lambda handle=handle: handle.retry("e" * 5_000, 0), False),  # type: ignore[misc]
                (lambda handle=handle: handle.fail("f" * 5_000), False),  # type: ignore[misc]
            ]
            call, gone = how[n % 3]
            settling.append(
                lambda handle=handle, call=call, gone=gone: answers.ends(handle, call, gone=gone)  # type: ignore[misc]
            )
        await _together(settling)
        for name in ("a", "b"):
            lock = await answers.tries(lambda name=name: store.lock(name).acquire(30))  # type: ignore[misc]
            if lock is not None:
                answers.fences.append(lock.fencing_token)
                await answers.tries(lock.renew)
                await answers.tries(lock.release)
        await answers.stores(["own/1", "own/2", "own/3"], lambda: _transaction(store))
        await answers.tries(lambda: store.schedule("s", "@every 1m", "q", {"token": "fired"}))
        await answers.stores(
            [f"many{n}" for n in range(GROUP)],
            lambda: store.queue("q").enqueue_many({"token": f"many{n}", "big": BIG} for n in range(GROUP)),
        )
        heal()
        await trio.sleep(2)
        failed = len(answers.errors)
        await answers.stores(["last"], lambda: _enqueue(store, "last"))
        if len(answers.errors) > failed:  # the failure before has left something to be mended; once is enough
            await answers.stores(["very last"], lambda: _enqueue(store, "very last"))
        await answers.stores(["end"], lambda: _enqueue(store, "end"))


async def _enqueue(store: Store, token: str) -> int:
    return await store.queue("q").enqueue({"token": token, "big": BIG}, key=token)


async def _transaction(store: Store) -> None:
    async with store.transaction() as tx:
        await tx.execute("CREATE TABLE IF NOT EXISTS own (token TEXT NOT NULL)")
        await tx.execute("INSERT INTO own VALUES ('own/1')")
        await tx.enqueue("q", {"token": "own/2", "big": BIG})
        await tx.outbox_enqueue("mail", {"token": "own/3", "big": BIG})


async def _together(calls: list[Call]) -> None:
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)


def settle_accounts(path: Path, answers: Answers) -> None:
    """What callers were told is what is there, and the file is sound."""
    connection = apsw.Connection(str(path))
    try:
        assert list(connection.execute("PRAGMA integrity_check")) == [("ok",)]
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        stored = set[str]()
        if "__alkstore_jobs" in tables:
            rows = list(connection.execute("SELECT payload ->> 'token' FROM __alkstore_jobs"))
            stored = {token for (token,) in rows}
            assert len(stored) == len(rows), "one enqueue has stored two jobs"
        if "own" in tables:
            stored |= {token for (token,) in connection.execute("SELECT token FROM own")}
    finally:
        connection.close()
    assert {token for token in answers.there if token not in stored} == set(), "told that they are stored"
    assert {token for token in answers.not_there if token in stored} == set(), "told that they are not stored"
    assert {token for token in answers.gone if token in stored} == set(), "told that they are done"
    assert {token for token in answers.not_gone if token not in stored} == set(), "told that they are not done"
    own = [token in stored for token in ("own/1", "own/2", "own/3")]
    assert len(set(own)) == 1, "a transaction was split"
    many = [f"many{n}" in stored for n in range(GROUP)]
    assert len(set(many)) == 1, "enqueue_many was split"
    assert len(answers.ids) == len(set(answers.ids)), "an id was given twice"
    assert answers.fences == sorted(set(answers.fences)), "a fencing token was given twice"
