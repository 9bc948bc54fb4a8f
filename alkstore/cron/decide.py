"""What one look at a trigger decides: initialize its cursor, skip what is late, or admit one occurrence. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import frozen

from alkstore.every import MAX_MS

__all__ = ["NEVER", "Admit", "Decision", "Initialize", "Misfire", "Skip", "decide"]

Misfire: TypeAlias = Literal["skip", "fire_once"]
"""What becomes of an occurrence that is late by more than the grace: ``skip`` gives it up, ``fire_once`` runs it."""

NEVER = MAX_MS
"""The cursor of a trigger without a further occurrence: the last millisecond of the year 9999, when none can be.

NULL would not do: it means that the cursor is to be set from the time of publishing, so old occurrences would return.
"""


@frozen
class Initialize:
    """Set the cursor; no Run."""

    next_fire_at: int
    """The cursor, in milliseconds since the epoch."""
    abandoned: int | None = None
    """The cursor that was given up because the clock had once been far ahead, to be reported; None: there was none."""


@frozen
class Skip:
    """Give up everything that is due, and move the cursor on; no Run."""

    next_fire_at: int
    """The first occurrence after now, in milliseconds since the epoch; `NEVER` if there is none."""


@frozen
class Admit:
    """Make the Run for one occurrence, and move the cursor on. Later occurrences that are due too get none."""

    scheduled_for: int
    """The oldest due occurrence, in milliseconds since the epoch."""
    next_fire_at: int
    """The first occurrence after now, in milliseconds since the epoch; `NEVER` if there is none."""


Decision: TypeAlias = Initialize | Skip | Admit


def decide(
    *,
    cursor: int | None,
    published_at: int,
    now: int,
    grace: int,
    misfire: Misfire,
    next_after: Callable[[int], int | None],
) -> Decision:
    """Return what is to be done about a trigger. All times are milliseconds since the epoch, `grace` milliseconds.

    `cursor` is the occurrence that is next to be decided on; None: not known yet, so it is the first one at or after
    `published_at`. `next_after` returns the first occurrence strictly after its argument, None where there is none.

    An occurrence equal to `now` is due, and one that is late by exactly `grace` is still in time. A cursor later than
    the second occurrence after `now` comes from a clock that was once far ahead: it is put on the first one after
    `now`, and the decision says so. Whether that occurrence already had its Run, the idempotency key knows.
    """
    due = cursor if cursor is not None else _or_never(next_after(max(0, published_at - 1)))
    if due > now:
        first = None if cursor is None else _ahead(due, now, next_after)
        return Initialize(due) if first is None else Initialize(first, abandoned=due)
    following = _or_never(next_after(now))
    if now - due > grace and misfire == "skip":
        return Skip(following)
    return Admit(due, following)


def _ahead(cursor: int, now: int, next_after: Callable[[int], int | None]) -> int | None:
    """Return the first occurrence after `now` if `cursor` is later than the second, else None."""
    first = next_after(now)
    second = None if first is None else next_after(first)
    return first if second is not None and second < cursor else None


def _or_never(occurrence: int | None) -> int:
    return NEVER if occurrence is None else occurrence
