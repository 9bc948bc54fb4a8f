"""Calling a user's handler: whether it is async, and if not, a call in a thread that can be abandoned."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress

import trio


class HandlerTimeout(TimeoutError):
    """The handler ran longer than its worker allows. Counts as a failed attempt."""


def is_async(handler: Callable[..., object], option: str = "handler") -> bool:
    """Whether calling `handler` makes a coroutine; sees through partials and objects with ``__call__``.

    Raises TypeError, naming the `option`, for what cannot be called at all.
    """
    inner: object = handler
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not callable(inner):
        raise TypeError(f"{option} must be a function or another callable, not {handler!r}")
    for candidate in (inner, getattr(type(inner), "__call__", None)):  # noqa: B004  asks of what kind, not whether
        if inspect.isasyncgenfunction(candidate) or inspect.isgeneratorfunction(candidate):
            raise TypeError(
                f"{option} must not be a generator: {handler!r} has a yield in it, so calling it runs nothing of it"
            )
        if inspect.iscoroutinefunction(candidate):
            return True
    return False


def check_takes_one(handler: Callable[..., object], what: str = "handler") -> None:
    """Raise TypeError, which calls it `what`, if `handler` cannot be called with one positional argument, the work.

    It would else fail for each work, and use up all of its attempts. What does not tell its parameters is believed.
    """
    try:
        signature = inspect.signature(handler, follow_wrapped=False)  # what a decorator takes may be another number
    except ValueError:
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(f"{what} is called with one argument, which {handler!r} does not take: {error}") from None


class PlainCall:
    """One call of a plain function, in a thread that can be abandoned.

    A thread cannot be stopped, but it can be kept from beginning: the thread and the cancelled task race for one
    lock, and the winner knows for certain whether the function runs.
    """

    def __init__(self, function: Callable[[], object], ended_late: Callable[[BaseException | None], object]) -> None:
        """`ended_late` is called in the trio thread when an abandoned function has ended after all, with its error."""
        self.abandoned = False
        self._function = function
        self._ended_late = ended_late
        self._trio = trio.lowlevel.current_trio_token()
        self._begun = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None

    async def run(self, limiter: trio.CapacityLimiter) -> None:
        """Wait for the function in a thread of `limiter`, and raise what it raises.

        Cancelled before it began: it never will. Cancelled while it runs: it is `abandoned`, and goes on.
        """
        try:
            await trio.to_thread.run_sync(self._in_thread, abandon_on_cancel=True, limiter=limiter)
        except trio.Cancelled:
            never_begun = self._begun.acquire(blocking=False)
            if never_begun or not self._ended:
                self.abandoned = not never_begun
                raise
            # It ended in the moment of the cancellation. As with any operation that was completed, its
            # result counts, and the cancellation is met at the next checkpoint.
            if self._error is not None:
                raise self._error from None
        finally:
            self._error = None  # its traceback holds this object

    def _in_thread(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            _refuse_unfinished_call(self._function, self._function())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ended = True
            with suppress(trio.RunFinishedError):  # abandoned, and trio has ended since
                self._trio.run_sync_soon(self._after)

    def _after(self) -> None:
        if self.abandoned:
            error, self._error = self._error, None
            self._ended_late(error)


def refuse_unfinished(result: object) -> None:
    """Raise if a handler's result says that the work is not done: an error, or what nobody has awaited or iterated."""
    _refuse_error(result)
    if is_unfinished(result):
        raise TypeError(
            f"the handler has returned {result!r:.200}, of which nothing has run: await it, or the work would count as "
            "done"
        )


def is_unfinished(result: object) -> bool:
    """Whether a function has returned something that has yet to be awaited or iterated. A coroutine is closed."""
    if inspect.iscoroutine(result):
        result.close()  # else Python warns about it, far from the cause
        return True
    return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def _refuse_error(result: object) -> None:
    if isinstance(result, BaseException):
        raise TypeError(f"the handler has returned {result!r:.200}: raise it, or the work would count as done")


def _refuse_unfinished_call(function: Callable[..., object], result: object) -> None:
    _refuse_error(result)
    if not is_unfinished(result):
        return
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"the plain function {name} returned an awaitable or a generator, of which nothing runs in its thread: declare "
        "the handler with `async def` (and await the result in it), or return something else"
    )
