"""What a supervisor knows of a child: how to run it, how often to restart it, and what has become of it."""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Literal, get_args

import attrs

Restart = Literal["permanent", "transient", "temporary"]
ChildState = Literal["starting", "running", "restarting", "stopping", "ended", "failed", "stopped"]
EventKind = Literal[
    "starting", "started", "ended", "failed", "restarting", "stopping", "cancelled", "stopped", "escalated"
]

STOP_TIMEOUT = 60.0
"""Seconds a child has to end when it is told to. Twice the grace that workers give by default, so that only
a child that overlooks its token is cut off."""

logger = logging.getLogger("actors.supervisor")


def _number(option: str, value: object, allowed: Callable[[float], bool], range_: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise ValueError(f"{option} must be {range_}, not {value!r}")


def _function(fn: object) -> None:
    """Raise a TypeError that says what to give instead, if `fn` cannot be a child's function."""
    if fn is None:
        raise TypeError('a child needs a name and a function: start("emails", function)')
    if inspect.isawaitable(fn):
        if inspect.iscoroutine(fn):
            fn.close()  # else Python warns about it, far from the cause
        raise TypeError(
            f"fn must be the async function itself, not the result of calling it: {fn!r}; to bind arguments use "
            "functools.partial"
        )
    inner = fn
    while isinstance(inner, partial):
        inner = inner.func
    if not callable(inner):
        raise TypeError(f"fn must be an async function, not {fn!r}")


@attrs.frozen
class Intensity:
    """How many restarts of a child are normal: up to `restarts` in any `within` seconds. One more escalates.

    OTP counts per supervisor. Here each child has its own budget: one bad child does not spend the others'.
    """

    restarts: int = 5
    """0 or more; with 0 the first failure escalates."""
    within: float = 60.0
    """The window: more than 0 seconds, finite. A restart has left it once `within` seconds have passed."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.restarts, int) or self.restarts < 0:
            raise ValueError(f"restarts must be a whole number, 0 or more, not {self.restarts!r}")
        _number("within", self.within, lambda within: 0 < within < math.inf, "more than 0 seconds and finite")


@attrs.frozen
class Backoff:
    """How long to wait before a restart: doubled at each failure in a row, half of it left to chance.

    The chance keeps processes that fell over together from coming back together; the half that is certain
    keeps a child from being restarted at once, again and again.
    """

    base: float = 0.1
    """Seconds, 0 to `cap`: the most to wait after the first failure."""
    cap: float = 30.0
    """Seconds, 0 or more, finite: the most to wait after any number of failures."""

    def __attrs_post_init__(self) -> None:
        _number("cap", self.cap, lambda cap: 0 <= cap < math.inf, "0 or more seconds and finite")
        _number("base", self.base, lambda base: 0 <= base <= self.cap, f"0 to cap ({self.cap:g}) seconds")

    def delay(self, failures: int, random: Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row, 1 or more."""
        longest = min(self.cap, self.base * 2.0 ** min(failures - 1, 64))
        return random.uniform(longest / 2, longest)


@attrs.define
class RestartLog:
    """The restarts of one child, measured against its intensity and backoff."""

    intensity: Intensity
    backoff: Backoff
    _recent: deque[float] = attrs.field(factory=deque, init=False)
    _in_a_row: int = attrs.field(default=0, init=False)

    def next_delay(self, now: float, healthy: float, random: Random) -> float | None:
        """Seconds to wait before the child is restarted, or None when that would be one restart too many.

        `now`: on trio's clock, never earlier than last time. `healthy`: how long it ran since it was ready,
        in seconds; more than the window, and the backoff starts anew.
        """
        while self._recent and now - self._recent[0] >= self.intensity.within:
            self._recent.popleft()
        if len(self._recent) >= self.intensity.restarts:
            return None
        self._recent.append(now)
        self._in_a_row = 1 if healthy > self.intensity.within else self._in_a_row + 1
        return self.backoff.delay(self._in_a_row, random)


def _accepts(fn: Callable[..., object], keyword: str) -> bool:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(fn).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or (p.name == keyword and p.kind in named) for p in parameters)


@attrs.frozen
class Child:
    """How one child is run, restarted and stopped. A value: it may be started in many supervisors."""

    name: str
    """Names it in events, errors and `children()`; not empty, unique among the living of a supervisor."""
    fn: Callable[..., Awaitable[object]]
    """Called for each life as ``fn(stop=StopToken, task_status=trio.TaskStatus)``, less what it does not
    accept (functools.partial is looked into, ``**kwargs`` accepts both). Without `stop` it is stopped by
    cancelling it; without `task_status` it counts as ready at once."""
    restart: Restart = attrs.field(default="permanent", kw_only=True)
    """"permanent": restarted however it ended. "transient": only after an error. "temporary": never."""
    intensity: Intensity = attrs.field(factory=Intensity, kw_only=True)
    """How often it may be restarted."""
    backoff: Backoff = attrs.field(factory=Backoff, kw_only=True)
    """How long to wait before."""
    stop_timeout: float | None = attrs.field(default=STOP_TIMEOUT, kw_only=True)
    """Seconds from being told to stop until it is cancelled, 0 or more; None waits as long as it takes.
    Make it longer than the child's own grace."""
    takes_stop: bool = attrs.field(init=False, repr=False, eq=False)
    takes_task_status: bool = attrs.field(init=False, repr=False, eq=False)

    @takes_stop.default
    def _takes_stop(self) -> bool:
        _function(self.fn)
        return _accepts(self.fn, "stop")

    @takes_task_status.default
    def _takes_task_status(self) -> bool:
        return _accepts(self.fn, "task_status")

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name must be a str that is not blank, not {self.name!r}")
        for option, value, kind in (("intensity", self.intensity, Intensity), ("backoff", self.backoff, Backoff)):
            if not isinstance(value, kind):
                raise TypeError(f"{option} must be an actors.{kind.__name__}, such as {kind()}, not {value!r}")
        if self.restart not in get_args(Restart):
            raise ValueError(f"restart must be one of {', '.join(get_args(Restart))}, not {self.restart!r}")
        if self.stop_timeout is not None:
            _number("stop_timeout", self.stop_timeout, lambda seconds: seconds >= 0, "0 or more seconds, or None")
        # The supervisor's token would take the place of the one bound here, and nobody would notice.
        bound = self.fn.keywords.keys() & {"stop", "task_status"} if isinstance(self.fn, partial) else ()
        if bound:
            raise ValueError(f"fn must leave {' and '.join(sorted(bound))} to the supervisor: {self.fn!r}")

    def run(self, stop: object, task_status: object) -> Awaitable[object]:
        """Call `fn` with those of the two that it accepts."""
        arguments = {}
        if self.takes_stop:
            arguments["stop"] = stop
        if self.takes_task_status:
            arguments["task_status"] = task_status
        life = self.fn(**arguments)
        if not inspect.isawaitable(life):
            raise TypeError(
                f"fn must be an async function: {self.fn!r} has returned {life!r:.80}, which is not awaitable"
            )
        return life


@attrs.frozen
class ChildEvent:
    """One step in a child's life, told in the order in which it happened.

    A life: starting, started, then one of ended (returned by itself), failed (raised) or stopped (ended
    because it was told to, or cancelled). "restarting" promises another one; "stopping" means that it was
    told to end, "cancelled" that it overran its stop_timeout; "escalated" that the supervisor gives up.
    """

    kind: EventKind
    supervisor: str
    child: str
    at: float
    """When, on trio's clock, in seconds."""
    restarts: int
    """How often the child was restarted so far, the one that is announced included."""
    error: BaseException | None = None
    """What it raised, as itself ("failed"), or the RestartsExceeded ("escalated")."""
    delay: float | None = None
    """Seconds until the restart ("restarting")."""


@attrs.frozen
class ChildInfo:
    """How a child is doing now."""

    name: str
    state: ChildState
    restarts: int
    """How often it was restarted so far, also because of a sibling."""
    last_error: BaseException | None
    """What the last of its lives that failed raised; None if none did."""


class RestartsExceeded(Exception):
    """A child needed more restarts than its intensity allows. `__cause__` is its last error, as itself.

    None if it raised nothing (a permanent child that keeps returning).
    """

    def __init__(self, child: str, restarts: int, within: float) -> None:
        super().__init__(f"child {child!r} needed more than {restarts} restarts within {within:g} s")
        self.child = child
        self.restarts = restarts
        self.within = within


_LEVELS = {
    "failed": logging.ERROR,
    "escalated": logging.ERROR,
    "restarting": logging.WARNING,
    "cancelled": logging.WARNING,
}


def log_event(event: ChildEvent) -> None:
    """Write `event` to the logger "actors.supervisor". What a supervisor does that is given no `on_event`."""
    level = _LEVELS.get(event.kind, logging.DEBUG)
    delay = "" if event.delay is None else f" in {event.delay:.3g} s"
    what = ("%s: child %r %s%s", event.supervisor, event.child, event.kind, delay)
    try:
        logger.log(level, *what, exc_info=event.error)
    except RecursionError:  # it is nested too deeply for a traceback
        logger.log(level, *what)
