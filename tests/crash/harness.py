"""Real processes for tests: started from a function of the test's module, spoken to, stopped, killed, always reaped."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeAlias

import trio
from attrs import define, field

__all__ = [
    "Child",
    "Processes",
    "Said",
    "execute",
    "go",
    "open_processes",
    "pause_between_writes",
    "rows",
    "until_rows",
]

ROOT = Path(__file__).parents[2]

WITHIN_S = 30.0
"""No wait for what must come is longer than this: a loaded machine needs seconds to start Python."""

Said: TypeAlias = dict[str, Any]
"""What a child said: its ``word``, the monotonic time ``at`` which it did, and the facts."""


@define(eq=False)
class Child:
    """One process that runs a program, and what it has said so far."""

    name: str
    process: trio.Process
    _stderr: Path
    _said: defaultdict[str, deque[Said]] = field(factory=lambda: defaultdict(deque), init=False)
    _unread: bytes = field(default=b"", init=False)
    _errors_expected: bool = field(default=False, init=False)

    async def hear(self, word: str, within: float = WITHIN_S) -> Said:
        """Return the next thing said with this `word`; AssertionError if it does not come `within` so many seconds."""
        with trio.move_on_after(within):
            while not self._said[word]:
                if not await self._listen():
                    raise AssertionError(f"{self.name} ended without saying {word!r}{self._trouble()}")
        if not self._said[word]:
            raise AssertionError(f"{self.name} did not say {word!r} within {within:g} s{self._trouble()}")
        return self._said[word].popleft()

    async def hear_rest(self, word: str) -> list[Said]:
        """Return all that was said with this `word` and not heard yet, after the process has ended."""
        with trio.fail_after(WITHIN_S):
            await self.listen_to_the_end()
        return list(self._said.pop(word, ()))

    async def listen_to_the_end(self) -> None:
        """Take in all that the process says, until it says no more since it has ended."""
        while await self._listen():
            pass

    def has_said(self, word: str) -> bool:
        """Whether a `word` was taken in that nobody has heard yet."""
        return bool(self._said[word])

    async def say(self, word: str) -> None:
        """Say a line to the child."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(f"{word}\n".encode())

    def pause(self) -> None:
        """SIGSTOP: not one instruction more, until `resume`."""
        self.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_all(signal.SIGCONT)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to those that it has started."""
        os.killpg(self.process.pid, number)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell it to end."""
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is no more."""
        self.signal_all(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def ended(self, within: float = WITHIN_S) -> int:
        """Wait for the end of the process and return its exit status."""
        with trio.move_on_after(within):
            return await self.process.wait()
        raise AssertionError(f"{self.name} did not end within {within:g} s{self._trouble()}")

    def errors(self) -> str:
        """Return what it wrote to stderr, which is then no failure any more."""
        self._errors_expected = True
        return self._stderr.read_text()

    async def _listen(self) -> bool:
        assert self.process.stdout is not None
        some = await self.process.stdout.receive_some()
        *lines, self._unread = (self._unread + some).split(b"\n")
        for line in lines:
            said: Said = json.loads(line)
            self._said[said["word"]].append(said)
        return bool(some)

    def _trouble(self) -> str:
        heard = {word: len(said) for word, said in self._said.items() if said}
        return f"; exit status {self.process.returncode}; also said {heard}; stderr:\n{self._stderr.read_text()}"

    async def reap(self) -> None:
        if self.process.returncode is None:
            self.signal_all(signal.SIGKILL)
            await self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        await trio.aclose_forcefully(self.process.stdin)
        await trio.aclose_forcefully(self.process.stdout)

    def unexpected_errors(self) -> str:
        return "" if self._errors_expected else self._stderr.read_text()


@define(eq=False)
class Processes:
    """Starts children. Whatever happens to the test, none outlives it."""

    _folder: Path
    _children: list[Child] = field(factory=list, init=False)

    async def start(
        self, program: Callable[..., object], *, environment: Mapping[str, str] | None = None, **arguments: object
    ) -> Child:
        """Run `program(talk, **arguments)`, a function of a module of this folder, in a process of its own."""
        name = f"{program.__name__}-{len(self._children)}"
        stderr = self._folder / f"{name}.stderr"
        module = f"tests.crash.{Path(inspect.getfile(program)).stem}"
        command = [sys.executable, "-W", "default", "-m", "tests.crash.child", module, program.__name__]
        with stderr.open("wb") as errors:
            process = await trio.lowlevel.open_process(
                [*command, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        child = Child(name, process, stderr)
        self._children.append(child)
        return child

    async def reap(self) -> None:
        for child in self._children:
            await child.reap()

    def check(self) -> None:
        """What a child wrote to stderr is a failure, unless the test has read it."""
        for child in self._children:
            assert not (errors := child.unexpected_errors()), f"{child.name} wrote to stderr:\n{errors}"


@asynccontextmanager
async def open_processes(folder: Path) -> AsyncIterator[Processes]:
    processes = Processes(folder)
    try:
        yield processes
    finally:
        with trio.move_on_after(WITHIN_S, shield=True):
            await processes.reap()
    processes.check()


async def go(*children: Child) -> None:
    """Let the children that are at the barrier, or come to it, go on at the same moment."""
    for child in children:
        await child.hear("ready")
    at = time.monotonic() + 0.010
    for child in children:
        await child.say(f"go {at}")


def rows(path: str, sql: str, **params: object) -> list[tuple[Any, ...]]:
    """Read behind the store's back."""
    with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
        return connection.execute(sql, params).fetchall()


async def until_rows(path: str, sql: str, **params: object) -> list[tuple[Any, ...]]:
    """Read behind the store's back again and again, until there is something to read."""
    with trio.move_on_after(WITHIN_S):
        while not (found := rows(path, sql, **params)):  # noqa: ASYNC110 - it is written by another process
            await trio.sleep(0.05)
        return found
    raise AssertionError(f"{sql} has found nothing within {WITHIN_S:g} s")


def was_closed(path: str) -> bool:
    """Whether the last store on this file was closed, not just dropped: then there is no log. Look before reading."""
    return not Path(f"{path}-wal").exists()


def execute(path: str, *statements: str, timeout: float = 10, **params: object) -> None:
    """Write behind the store's back, in one transaction."""
    with closing(sqlite3.connect(path, timeout=timeout, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement, params).fetchall()
        connection.execute("COMMIT")


async def pause_between_writes(child: Child, path: str) -> None:
    """SIGSTOP the child at a moment when it does not hold the database's write lock."""
    for _ in range(100):
        child.pause()
        try:
            execute(path, timeout=0)
        except sqlite3.OperationalError:
            child.resume()
            await trio.sleep(0.01)
        else:
            return
    raise AssertionError(f"{child.name} holds the write lock whenever one looks")
