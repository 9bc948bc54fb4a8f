"""How an actor leaves: errors keep their shape, and the last write is shielded but never endless."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

import trio

# A last write may have to wait for the store's write lock, which a store gives up after about 10 s with an
# error that says more than ours. Longer than that, and shorter than the patience of whoever stops processes.
LAST_WRITE_WITHIN = 15.0

TOLD_BEFORE = 5.0
"""A write that is repeated ends this long before its time is over, so that it says itself why it has failed."""

_last_write_ends: ContextVar[float] = ContextVar("last_write_ends", default=math.inf)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, in order, however deeply it is nested; an error that is no group is its own leaf."""
    left = [error]  # a stack of our own: groups may be nested deeper than the interpreter's
    while left:
        inner = left.pop()
        if isinstance(inner, BaseExceptionGroup):
            left.extend(reversed(inner.exceptions))
        else:
            yield inner


def part(error: BaseException, wanted: Callable[[BaseException], bool]) -> BaseException | None:
    """The leaves of `error` that are wanted, in the shape that they have in it. None: there are none.

    `error` itself if all of them are. Without their shape if that cannot be had: groups may be nested too deeply for
    `BaseExceptionGroup.subgroup`, and their class may fail in its own `derive`.
    """
    every = list(leaves(error))
    kept = [leaf for leaf in every if wanted(leaf)]
    if len(kept) == len(every) or not isinstance(error, BaseExceptionGroup):
        return error if kept else None
    if not kept:
        return None
    ids = {id(leaf) for leaf in kept}
    try:
        return error.subgroup(lambda inner: id(inner) in ids)
    except Exception:  # noqa: BLE001  the errors matter more than their shape
        return BaseExceptionGroup("parts of a group whose shape is lost", kept)


def shown(error: BaseException) -> str:
    """`error` as its repr, or the name of its class if that fails, as it does for a group that is nested too deeply."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  an error's own code may raise anything
        return type.__repr__(type(error))


@contextmanager
def last_write(what: str, leaving: BaseException | None = None) -> Iterator[None]:
    """Shield the body from every cancellation, for LAST_WRITE_WITHIN seconds at most.

    `what` names the write in the trio.TooSlowError that is raised when the time is over: nobody can hang in it, and
    nobody overlooks it. `leaving` is the exception that the actor leaves with: raised after the body, and together
    with the body's own error, in a group, if there is one; so neither hides the other.
    """
    try:
        ends = trio.current_time() + LAST_WRITE_WITHIN
        token = _last_write_ends.set(ends)
        try:
            with trio.CancelScope(shield=True, deadline=ends) as scope:
                yield
        finally:
            _last_write_ends.reset(token)
        if scope.cancelled_caught:
            raise trio.TooSlowError(f"{what} took more than {LAST_WRITE_WITHIN:g} s")
    except BaseException as error:
        if leaving is None:
            raise
        raise BaseExceptionGroup(f"{what} failed on the way out", [leaving, error]) from None
    if leaving is not None:
        raise leaving


def may_repeat() -> bool:
    """Whether there is time to try again what has failed; always, but near the end of a `last_write`."""
    return trio.current_time() < _last_write_ends.get() - TOLD_BEFORE


async def write_within(
    seconds: float, what: str, write: Callable[[], Awaitable[object]], leaving: BaseException | None = None
) -> None:
    """Await `write`, for `seconds` and LAST_WRITE_WITHIN at most: trio.TooSlowError, which says `what`.

    Cancelled meanwhile it has had no effect, and is written once more, as a `last_write`; so it is at once where that
    has happened before, or an exception is `leaving`.
    """
    if leaving is not None or trio.current_effective_deadline() == -math.inf:
        with last_write(what, leaving):
            await write()
        return
    within = max(seconds, 0.0) + LAST_WRITE_WITHIN  # a lease may have been over for long
    try:
        with trio.move_on_after(within) as waiting:
            await write()
    except trio.Cancelled:
        with last_write(what):
            await write()
        raise
    if waiting.cancelled_caught:
        raise trio.TooSlowError(f"{what} took more than {within:g} s")


class Alone:
    """Take away the groups that nurseries put around an error: what is alone leaves alone.

    When, `trio.Cancelled` aside, there is one error in the group, it leaves: a cancellation is on its way anyway.
    When each is one of `kinds`, the first of the earliest kind leaves, and what the others say becomes notes on it.
    Any other group leaves as it is, without the shells that hold nothing but another group.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, BaseExceptionGroup):
            return
        alone = self._alone(error)
        if alone is error:
            return
        context = alone.__context__
        try:
            raise alone
        finally:
            alone.__context__ = context  # else Python would chain the error to the group that it came in
            del alone, context

    def _alone(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        errors = [leaf for leaf in leaves(group) if not isinstance(leaf, trio.Cancelled)]
        if len(errors) == 1:
            return errors[0]
        if errors and all(isinstance(leaf, self._kinds) for leaf in errors):
            return self._first_of(errors)
        inner: BaseException = group
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        return inner

    def _first_of(self, errors: list[BaseException]) -> BaseException:
        chosen = next(error for kind in self._kinds for error in errors if isinstance(error, kind))
        for other in dict.fromkeys(map(shown, errors)):
            if other != shown(chosen):
                chosen.add_note(f"besides: {other}")
        return chosen
