"""An interactive transaction: it has the writer's connection for itself, for as long as its body runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio
from attrs import define, field, frozen

from alkstore.engines.units import SQLiteTx

__all__ = ["OF_A_READ", "Turn", "inside", "refuse_elsewhere", "refuse_inside"]


OF_A_READ = "tx.get_job(id) or tx.execute(sql)"
"""What reads inside a transaction, and so sees what it has done."""


@frozen
class _Inside:
    database: Hashable
    is_open: Callable[[], bool]


_inside: ContextVar[tuple[_Inside, ...]] = ContextVar("inside_transactions", default=())
"""The transactions around this task or thread, whose databases differ. Child tasks and threads inherit it."""


@contextmanager
def inside(database: Hashable, is_open: Callable[[], bool]) -> Iterator[None]:
    """Let `refuse_inside` know, in the body and in all that the body starts, of a transaction on `database`."""
    token = _inside.set((*_inside.get(), _Inside(database, is_open)))
    try:
        yield
    finally:
        _inside.reset(token)


def refuse_inside(database: Hashable, instead: str | None) -> None:
    """Raise if the caller stands in an open transaction on `database`.

    It would wait for itself, wherever there is one connection; and a read would not see what the transaction has done.
    `instead` names the method of the transaction that does the same; None: there is none.
    """
    if any(one.database == database and one.is_open() for one in _inside.get()):
        hint = f"use {instead} instead" if instead else "do it before or after the transaction"
        raise RuntimeError(f"this call of the store is not part of the open transaction around it: {hint}")


def refuse_elsewhere(home: trio.lowlevel.TrioToken) -> None:
    """Raise if the caller is not in the trio run that opened the store: nobody there would ever be answered."""
    if trio.lowlevel.current_trio_token() is not home:
        raise RuntimeError(
            "this store was opened in another trio run: from a thread of that one call it by trio.from_thread.run(…), "
            "for example trio.from_thread.run(queue.enqueue, payload); a run of its own opens a store of its own"
        )


@define(eq=False)
class Turn:
    """One open transaction. Whoever got it from `Writer.begin` must give it to `Writer.end`."""

    tx: SQLiteTx
    stepped: bool
    """Its beginning has found that the clock was stepped."""
    over: trio.Event = field(factory=trio.Event, init=False)
