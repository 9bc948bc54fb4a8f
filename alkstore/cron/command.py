"""Running a command as a process group: its output bounded and kept, and nothing of it left behind."""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio
from attrs import define, field

from alkstore.cron.process import Process, start_process

__all__ = ["OUTPUT_BYTES", "CommandFailed", "Output", "run_command"]

OUTPUT_BYTES = 64 * 1024
"""How much of the end of a command's output is kept."""

TERMINATE_S = 5.0
"""How long a process group has between being asked to end and being killed."""

KILLED_S = 0.2
"""How long before its time is over a process group is killed: it has to be gone by then."""

LOOK_S = 0.02
"""How often a process group is looked at, once its leader has ended: nobody tells of the others' ends."""

LEFT_BEHIND = b"\n[it could not be killed, and was left behind]\n"
"""Of a command that is another user's by now, such as after sudo, or that hangs in the kernel."""

LINGER_S = 0.5
"""How long the output of a command that has ended is read on: whoever inherited its pipe may keep it open."""


class CommandFailed(Exception):
    """The command returned something else than 0, or a signal ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}" if code >= 0 else f"ended by {_signal_name(-code)}")


@define(eq=False)
class Output:
    """The end of what a command wrote, and how it ended."""

    exit_code: int | None = field(default=None, init=False)
    """What it returned, or minus the number of the signal that ended it; None: it was not started, or goes on."""
    _parts: deque[bytes] = field(factory=deque, init=False)
    _size: int = field(default=0, init=False)
    _dropped: int = field(default=0, init=False)

    def add(self, part: bytes) -> None:
        """Take a part, and forget the oldest ones that are not needed any more."""
        self._parts.append(part)
        self._size += len(part)
        while self._size - len(self._parts[0]) >= OUTPUT_BYTES:
            gone = len(self._parts.popleft())
            self._size -= gone
            self._dropped += gone

    def text(self) -> str:
        """Return the end of it as text that both engines can store; what was cut off is said in the first line."""
        kept = b"".join(self._parts)[-OUTPUT_BYTES:]
        dropped = self._dropped + self._size - len(kept)
        text = kept.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return f"[{dropped} bytes before this were dropped]\n{text}" if dropped else text


async def run_command(
    command: str | Sequence[str],
    *,
    shell: bool,
    env: Mapping[str, str],
    cwd: str | None,
    output: Output,
    starting: trio.CapacityLimiter,
    time_left: Callable[[], float] = lambda: math.inf,
) -> None:
    """Run a command to its end, in a process group (session) of its own, with nothing on its standard input.

    `env` is set over this process's environment. What it writes goes into `output`. `starting` limits how many are
    being started at one time. Cancelled: the whole group is asked to end (SIGTERM), and what is left of it is killed
    after 5 s, or earlier: before `time_left`, in seconds, is over. Whatever of the group is left when the command has
    ended by itself is killed too.

    One that cannot be killed is left behind, and its output says so.

    Raises:
        CommandFailed: it did not return 0.
        OSError: it could not be started.
        RuntimeError: this process ignores SIGCHLD.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RuntimeError(
            "this process ignores SIGCHLD, or has inherited that: then nobody can tell how a command ends, so none is "
            "started; signal.signal(signal.SIGCHLD, signal.SIG_DFL) mends it"
        )
    process = await start_process(command, shell=shell, env={**os.environ, **env}, cwd=cwd, starting=starting)
    reading = trio.CancelScope(shield=True)  # what it says while it is being ended is worth reading too
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            nursery.start_soon(_read, process, output, reading)
            try:
                await process.wait()
            finally:
                with trio.CancelScope(shield=True):
                    await _end(process, time_left)
                if process.returncode is None:
                    output.add(LEFT_BEHIND)
                output.exit_code = process.returncode
                reading.deadline = trio.current_time() + LINGER_S
    finally:
        await process.aclose()
    if process.returncode:
        raise CommandFailed(process.returncode)


async def _read(process: Process, output: Output, scope: trio.CancelScope) -> None:
    with scope:
        async for part in process.output:
            output.add(bytes(part))


async def _end(process: Process, time_left: Callable[[], float]) -> None:
    """Ask the group to end, if its leader still runs, and kill what is left of it. Bounded, whatever it is made of."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with trio.move_on_after(max(min(TERMINATE_S, time_left() - KILLED_S), 0)):
            await process.wait()
            while _is_there(process.pid):  # noqa: ASYNC110 - see LOOK_S
                await trio.sleep(LOOK_S)
    _signal_group(process.pid, signal.SIGKILL)
    with trio.move_on_after(max(min(TERMINATE_S, time_left()), KILLED_S)):
        await process.wait()


def _is_there(group: int) -> bool:
    """Whether anything is left of a group whose leader has ended and was waited for."""
    with suppress(ChildProcessError):  # orphans become children of process 1, which may be this one
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # what is left is somebody else's
        return True
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all of it has ended; or what is left is somebody else's
        os.killpg(group, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
