"""A child process that takes none of the program's threads: neither to be started nor to be waited for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import trio
from attrs import define, field

__all__ = ["Process", "start_process"]


@define(eq=False)
class Process:
    """Leads a process group (session) of its own. To be closed, which does not end it."""

    _popen: subprocess.Popen[bytes]
    output: trio.lowlevel.FdStream
    """What it writes, on its standard output and its standard error."""
    _ends: int | None = field(init=False)
    """A descriptor that is readable once it has ended; None: this system has none."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """What it returned, or minus the number of the signal that ended it; None: `wait` has not seen its end."""
        return self._popen.returncode

    async def wait(self) -> None:
        """Return when it has ended. Cancelled: it can be waited for again. One task at a time."""
        if self._popen.poll() is not None:
            await trio.lowlevel.checkpoint()
        elif self._ends is not None:
            await trio.lowlevel.wait_readable(self._ends)
            self._popen.wait()
        else:
            await trio.to_thread.run_sync(self._popen.wait, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)

    async def aclose(self) -> None:
        if self._ends is not None:
            trio.lowlevel.notify_closing(self._ends)
            os.close(self._ends)
            self._ends = None
        await trio.aclose_forcefully(self.output)

    @_ends.default
    def _open_ends(self) -> int | None:
        with suppress(AttributeError, OSError):  # Linux from 5.3 on, and not in every sandbox
            return os.pidfd_open(self.pid)
        return None


async def start_process(
    command: str | Sequence[str],
    *,
    shell: bool,
    env: Mapping[str, str],
    cwd: str | None,
    starting: trio.CapacityLimiter,
) -> Process:
    """Start a command with nothing on its standard input. `starting` is for the threads in which that is done.

    Cancelled while it waits for one of them: it was not started.

    Raises:
        OSError: it could not be started.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - running it is what was asked for
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            shell=shell,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )

    popen = await trio.to_thread.run_sync(start, limiter=starting)
    assert popen.stdout is not None
    with popen.stdout as output:
        return Process(popen, trio.lowlevel.FdStream(os.dup(output.fileno())))
