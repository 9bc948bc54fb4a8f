"""The grammar ``@every <n><unit>`` and the arithmetic of its grid: no clock, no storage."""

from __future__ import annotations

import re

from attrs import frozen

from alkstore.errors import InvalidSpec

__all__ = ["CATCH_UP_LIMIT", "MAX_MS", "CatchUp", "catch_up", "first_after", "parse_every"]

CATCH_UP_LIMIT = 64
"""Missed boundaries fired per schedule and tick; what is older than a backlog of that size is of no use to a sweep."""

MAX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, beyond which `datetime` cannot show a moment."""

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPEC = re.compile(r"@every ([0-9]{1,12})([smhd])")


def parse_every(spec: object) -> int:
    """Return the interval of `spec` in milliseconds.

    The whole text is ``@every ``, 1 to 12 ASCII digits with a value of at least 1, and one of ``s``, ``m``, ``h``,
    ``d``.

    Raises:
        InvalidSpec: anything else.
    """
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None or int(match[1]) == 0:
        shown = f"{spec!r:.200}" if isinstance(spec, str) else f"a value of type {type(spec).__name__}"
        raise InvalidSpec(
            spec,
            f"a schedule's spec is '@every <n><unit>' with n at least 1 (up to 12 digits) and a unit of s, m, h or d, "
            f"such as '@every 15m' (cron expressions are for store.cron); got {shown}",
        )
    return int(match[1]) * _UNIT_MS[match[2]]


def first_after(cursor: int, interval: int, now: int) -> int:
    """Return the first boundary after `now` of the grid on which `cursor` lies. All in milliseconds."""
    return cursor + ((now - cursor) // interval + 1) * interval


@frozen
class CatchUp:
    """What one tick owes one schedule."""

    boundaries: range
    """The boundaries to fire, oldest first; empty when none is due."""
    skipped: int
    """How many due boundaries are given up."""
    next_fire_at: int
    """The cursor afterwards."""


def catch_up(cursor: int, interval: int, now: int) -> CatchUp:
    """Return which boundaries a tick at `now` fires when the cursor stands at `cursor`. All in milliseconds.

    A boundary equal to `now` is due. The oldest `CATCH_UP_LIMIT` fire, the rest is skipped, and the cursor goes to
    the first boundary after the last due one.
    """
    if cursor > now:
        return CatchUp(range(0), 0, cursor)
    due = (now - cursor) // interval + 1
    fired = min(due, CATCH_UP_LIMIT)
    return CatchUp(range(cursor, cursor + fired * interval, interval), due - fired, cursor + due * interval)
