"""How a program tells its actors to finish: one flag, flipped once, that ends every wait linked to it.

trio has cancellation, which ends work now, and nothing for "take no new work, finish what you have". A
`StopToken` adds it with two cancel scopes. What waits for new work stands in an intake scope, which the
token cancels at once. What has begun stands in a work scope around it, which the token gives a grace::

    async def run(stop: StopToken) -> None:
        with stop.work(grace=30):
            async with trio.open_nursery() as nursery:
                with stop.intake():
                    async for item in source:
                        nursery.start_soon(handle, item)
"""

# ruff: noqa: SLF001  a token reaches into its children, which are tokens

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import trio


class StopToken:
    """A flag that is flipped once and for ever, and the scopes and child tokens that follow it.

    May be made anywhere, also before `trio.run`. Belongs to one trio thread from the moment that something is
    linked to it: another thread flips it with ``trio.from_thread.run_sync(stop.stop)``.
    """

    __slots__ = ("__weakref__", "_children", "_flag", "_links", "_parent")

    def __init__(self) -> None:
        self._flag = trio.Event()
        # A child holds its parent, not the other way round: a child that nobody uses is forgotten, and one
        # that is in use cannot be cut off from its grandparent.
        self._parent: StopToken | None = None
        self._children: weakref.WeakSet[StopToken] = weakref.WeakSet()
        self._links: dict[trio.CancelScope, float | None] = {}

    def __repr__(self) -> str:
        return f"<StopToken {'stopped' if self.stopped else 'running'} at {id(self):#x}>"

    @property
    def stopped(self) -> bool:
        """Whether the token, or one above it, was flipped. Never goes back to False."""
        return self._flag.is_set()

    def stop(self) -> None:
        """Flip the token and all its descendants: cancel every intake scope, start every work scope's grace.

        Returns at once, waits for nobody. Flipping again changes nothing; no grace starts anew. Raises
        RuntimeError, having changed nothing, when somebody follows it and this is not their trio thread.
        """
        if self.stopped:
            return
        family = list(self._family())
        followed = any(token._links or token._flag.statistics().tasks_waiting for token in family)
        if followed and not trio.lowlevel.in_trio_run():
            raise RuntimeError("stop() outside of the trio thread: use trio.from_thread.run_sync(stop.stop)")
        for token in family:  # every flag is up before anything that looks at one can run
            token._flag.set()
        for token in family:
            for scope, grace in token._links.items():
                _reach(scope, grace)

    def _family(self) -> Iterator[StopToken]:
        yield self
        for child in list(self._children):
            yield from child._family()

    async def wait(self) -> None:
        """Wait until the token is flipped. A checkpoint; cancellation leaves nothing behind."""
        await self._flag.wait()

    def child(self) -> StopToken:
        """A token that is stopped with this one, and can be stopped alone. Needs no closing."""
        child = StopToken()
        child._parent = self
        self._children.add(child)
        if self.stopped:
            child._flag.set()
        return child

    def intake(self) -> AbstractContextManager[trio.CancelScope, bool]:
        """A scope for what waits for or takes new work: cancelled once the token is flipped, or at once."""
        return _Linked(self, None)

    def work(self, grace: float) -> AbstractContextManager[trio.CancelScope, bool]:
        """A scope for what has begun: cancelled `grace` seconds after the token is flipped, or after now.

        `grace`: 0 or more seconds of trio's clock; `math.inf` lets the work take all the time it wants. A
        deadline that the body set on the scope itself is only ever made earlier.
        """
        if isinstance(grace, bool) or not isinstance(grace, (int, float)):
            raise TypeError(f"grace must be a number of seconds, 0 or more, not {grace!r}")
        if not grace >= 0:  # NaN fails this too
            raise ValueError(f"grace must be 0 or more seconds, not {grace!r}")
        return _Linked(self, grace)

    async def stop_on_signals(
        self,
        *signals: signal.Signals,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Flip the token when the process is told to end. Runs until it is cancelled.

        `signals`: SIGTERM and SIGINT if none are named. The second signal of a kind raises
        KeyboardInterrupt, so that an impatient operator gets out. Ready (`task_status.started`) once the
        signals are caught. Cancellation puts the former handlers back. Only in Python's main thread.

        Under a Supervisor it is the first child: the last to be stopped, it still hears the second signal
        while the others drain. Raises TypeError for what is no signal.
        """
        for one in signals:
            if not isinstance(one, signal.Signals):
                raise TypeError(f"signals must be of signal.Signals, such as signal.SIGTERM, not {one!r}")
        with trio.open_signal_receiver(*(signals or (signal.SIGTERM, signal.SIGINT))) as arriving:
            task_status.started()
            seen: set[int] = set()
            async for number in arriving:
                if number in seen:
                    raise KeyboardInterrupt
                seen.add(number)
                self.stop()


class _Linked:
    """A cancel scope that a token knows of while it is entered. Without a grace it is an intake."""

    __slots__ = ("_grace", "_scope", "_token")

    def __init__(self, token: StopToken, grace: float | None) -> None:
        self._token = token
        self._grace = grace
        self._scope = trio.CancelScope()

    def __enter__(self) -> trio.CancelScope:
        self._scope.__enter__()
        self._token._links[self._scope] = self._grace
        if self._token.stopped:
            _reach(self._scope, self._grace)
        return self._scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        del self._token._links[self._scope]
        return self._scope.__exit__(kind, error, traceback)


def _reach(scope: trio.CancelScope, grace: float | None) -> None:
    if grace is None:
        scope.cancel(reason="stop token")
    else:
        scope.deadline = min(scope.deadline, trio.current_time() + grace)
