"""Profiles: how much one cycle does, how often, and how long a stop may take."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from attrs import Attribute, field, frozen

from alkstore.values import Seconds, integer, milliseconds

__all__ = ["EDGE", "STANDALONE", "CycleSummary", "Profile"]


def _whole(low: int, high: int) -> Any:
    def check(_instance: object, attribute: Attribute[Any], value: object) -> None:
        integer(value, attribute.name, low, high)

    return check


def _length(low: float, high: float) -> Any:
    def check(_instance: object, attribute: Attribute[Any], value: object) -> None:
        milliseconds(value, attribute.name, low, high)

    return check


@frozen
class Profile:
    """The bounds of a cycle. TypeError or ValueError names the option, the value and the range."""

    page: int = field(validator=_whole(1, 256))
    """Triggers looked at in one cycle, 1 to 256."""
    period: Seconds = field(validator=_length(0.1, 3_600))
    """Seconds from the beginning of a cycle to the next one at the earliest, 0.1 to 3,600."""
    grace: Seconds = field(validator=_length(0, 300))
    """Seconds that an occurrence may be late before it is a misfire, 0 to 300."""
    stop_within: Seconds = field(validator=_length(0, 3_600))
    """Seconds that a stop leaves to the cycle in flight, 0 to 3,600."""
    starts: int = field(validator=_whole(1, 256))
    """Runs that are being started at one time, 1 to 256."""


EDGE = Profile(page=4, period=5, grace=30, stop_within=5, starts=1)
"""For a small machine: a router, a board."""

STANDALONE = Profile(page=16, period=1, grace=300, stop_within=10, starts=4)
"""For a server."""


@frozen
class CycleSummary:
    """What one cycle has done."""

    observed_at: datetime
    """The store's clock, as the page was read."""
    scanned: int
    """Triggers looked at; the sum of the next five."""
    initialized: int
    """Cursors that were set."""
    skipped: int
    """Triggers whose due occurrences were given up: misfires, or an overlap that is not allowed."""
    admitted: int
    """Runs made."""
    raced: int
    """Triggers about which somebody else was faster, or that changed meanwhile."""
    failed: int
    """Triggers about which nothing could be decided; `Trigger.error` says why."""
    truncated: bool
    """There was more than one page."""
