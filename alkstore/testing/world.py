"""Makes a trio run repeatable: the order of tasks, all randomness and every clock follow from a seed."""

# ruff: noqa: SLF001 - trio and random have no public way to this

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import trio
import trio._core._run
import trio.testing

import alkstore.cron.command
import alkstore.store
from alkstore.clock import Clock
from alkstore.engines import driver, sqlite
from alkstore.engines.driver import Driver
from alkstore.testing.wires import InlineCalls, QueuedCalls, Wires

__all__ = ["repeatable", "wired"]


@contextmanager
def repeatable(seed: int, clock: trio.testing.MockClock, lag: Callable[[], float]) -> Iterator[None]:
    """In the body a trio run under `clock` does the same each time.

    Tasks run in an order drawn from `seed`; so is what `random`, `secrets`, `uuid4` and every ``Random()`` without a
    seed give. `time.time`, `time.monotonic` and `time.perf_counter` show virtual time plus `lag()` seconds. What
    `trio.to_thread.run_sync` is given, as plain handlers are, runs in place, and a command is refused. Not repeatable:
    threads that are made otherwise, the network, and finalisers that do more than free memory.
    """
    source = random.Random(f"{seed} chance")  # noqa: S311 - it has to be guessed
    order = trio._core._run._r
    of_order, of_module = order.getstate(), random.getstate()
    seeded = random.Random.seed

    def seed_it(self: random.Random, a: float | str | bytes | bytearray | None = None, version: int = 2) -> None:
        seeded(self, source.getrandbits(64) if a is None else a, version)

    def now() -> float:
        return clock.current_time() + lag()

    with ExitStack() as changed:
        for owner, name, value in (
            (trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            (os, "urandom", source.randbytes),
            (random, "_urandom", source.randbytes),
            (random.Random, "seed", seed_it),
            (time, "time", now),
            (time, "time_ns", lambda: round(now() * 1e9)),
            (time, "monotonic", now),
            (time, "perf_counter", now),
            (trio.to_thread, "run_sync", _run_in_place),
            (alkstore.cron.command, "start_process", _refuse_process),
        ):
            changed.enter_context(mock.patch.object(owner, name, value))
        order.seed(f"{seed} order")
        random.seed(f"{seed} module")
        try:
            yield
        finally:
            order.setstate(of_order)
            random.setstate(of_module)


async def _run_in_place(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """A thread ends when it likes: in its place the function runs here and now, and virtual time stands still."""
    await trio.lowlevel.checkpoint()
    return function(*args)


async def _refuse_process(*_: Any, **__: Any) -> Any:
    await trio.lowlevel.checkpoint()
    raise RuntimeError("a simulation runs no commands: they end when they like, and its history has to be repeatable")


@contextmanager
def wired(wires: Wires, clock: Clock) -> Iterator[None]:
    """In the body every store is opened through `wires`, without a thread, and (unless it has its own) on `clock`."""

    def load(name: str) -> Driver:
        wires.driver = driver.load_driver(name)
        return wires

    with (
        mock.patch.object(sqlite, "load_driver", load),
        mock.patch.object(sqlite, "InlineBridge", partial(InlineCalls, wires.plan)),
        mock.patch.object(sqlite, "ThreadBridge", partial(QueuedCalls, wires.plan)),
        mock.patch.object(alkstore.store, "TrioClock", return_value=clock),
    ):
        yield
