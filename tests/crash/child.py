"""The child's side of the harness: runs one program in this process and talks through pipes.

Run as ``python -m tests.crash.child <module> <function> <JSON of the arguments>``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

__all__ = ["Talk", "fork"]

IDLE_S = 60.0
"""A child that nobody speaks to for this long ends by itself."""


class Talk:
    """Says words with facts to the test, and hears words from it."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)  # what is printed by anybody else must not look like a signal
        self._unread = b""

    def say(self, word: str, **facts: object) -> None:
        """Tell the test, with the time by the machine's monotonic clock as ``at``. Never buffered."""
        line = json.dumps({"word": word, "at": time.monotonic(), **facts}).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    async def hear(self, word: str) -> str:
        """Wait until the test says `word` and return what it said after it."""
        while (line := self._line()) is None:
            with trio.fail_after(IDLE_S):
                await trio.lowlevel.wait_readable(0)
            self._read()
        return _after(word, line)

    def hear_blocking(self, word: str) -> str:
        """`hear` for a program that is not async, or in the middle of a transaction."""
        while (line := self._line()) is None:
            self._read()
        return _after(word, line)

    async def barrier(self) -> None:
        """Say ``ready``, and go on at the moment that the test gives to all of its children."""
        self.say("ready")
        time.sleep(max(float(await self.hear("go")) - time.monotonic(), 0))  # noqa: ASYNC251 - all wake at once

    def _read(self) -> None:
        if not (some := os.read(0, 4096)):
            sys.exit("the test is gone")
        self._unread += some

    def _line(self) -> str | None:
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return line.decode()


def _after(word: str, line: str) -> str:
    heard, _, rest = line.partition(" ")
    if heard != word:
        raise ValueError(f"waited for {word!r}, heard {line!r}")
    return rest


def fork(program: Callable[[], object]) -> Callable[[], int]:
    """Run `program` in a process of its own, which costs no start-up. Call the result to wait for its exit status.

    Only before this process has run trio, so that it has one thread.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            program()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # noqa: BLE001 - the forked process must not return into its parent's program
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(module: str, function: str, arguments: str) -> None:
    program: Callable[..., Any] = getattr(importlib.import_module(module), function)
    call = partial(program, Talk(), **json.loads(arguments))
    if inspect.iscoroutinefunction(program):
        trio.run(call)
    else:
        call()


if __name__ == "__main__":
    from tests.crash import child  # so that the program and this module share one Talk type

    child.main(*sys.argv[1:])
