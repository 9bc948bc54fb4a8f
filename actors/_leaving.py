"""Which exception leaves a supervisor, when several things went wrong: one, as itself, that hides none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import trio

from actors.unwinding import part, shown


def is_cancelled(error: BaseException) -> bool:
    return isinstance(error, trio.Cancelled)


def without(error: BaseException, unwanted: Callable[[BaseException], bool]) -> BaseException | None:
    """`error` less its unwanted leaves: itself if it has none of them, None if it has no others."""
    return part(error, lambda leaf: not unwanted(leaf))


def gravest(name: str, ranks: Iterable[Sequence[BaseException]]) -> BaseException | None:
    """The error of the first rank that has one, as itself; a group only for several of one rank.

    Those of the ranks below are named in its notes: a caller that waits for the first finds it unwrapped, and a reader
    of its traceback sees the rest.
    """
    first: Sequence[BaseException] = ()
    besides: list[BaseException] = []
    for rank in ranks:
        if first:
            besides.extend(rank)
        else:
            first = rank
    if not first:
        return None
    leaving = first[0] if len(first) == 1 else BaseExceptionGroup(f"errors in {name}", first)
    for error in besides:
        leaving.add_note(f"besides, in {name}: {shown(error)}")
    return leaving
