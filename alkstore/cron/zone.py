"""Time zones of the IANA database: which names are taken, and when a zone's offset from UTC changes."""

from __future__ import annotations

import os
import re
import struct
import zoneinfo
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import resources
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from attrs import frozen

from alkstore.errors import InvalidSpec

__all__ = ["DAY", "Span", "load_zone", "spans"]

DAY = 86_400
"""Seconds. No zone is further than this from UTC (`datetime.tzinfo.utcoffset`), and none was ever set back by more."""

_NAME = re.compile(r"[A-Za-z0-9_+-]{1,64}(/[A-Za-z0-9_+-]{1,64}){0,3}")
_HOST_DEPENDENT = frozenset({"localtime", "posixrules", "Factory"})
_VARIANTS = ("posix/", "right/")

_LOOK_S = DAY
"""How far apart a zone is looked at for changes; no two changes of one zone were ever less than three days apart."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_FIRST = (datetime(1, 1, 2, tzinfo=UTC) - _EPOCH) // _SECOND
_LAST = (datetime(9999, 12, 30, tzinfo=UTC) - _EPOCH) // _SECOND


@frozen
class Span:
    """A stretch of time in which a zone's offset stays the same."""

    start: int
    """Seconds since the epoch, inclusive."""
    end: int
    """Seconds since the epoch, exclusive."""
    offset: int
    """Seconds that the wall clock is ahead of UTC; negative in the west."""


def load_zone(name: object) -> ZoneInfo:
    """Return the zone that the IANA database has under exactly this name, upper and lower case included.

    The database is the system's, or else the one of the package `tzdata` (`zoneinfo`). Nothing falls back to UTC or
    to the host's own zone. What was found is kept for as long as the process runs.

    Raises:
        InvalidSpec: not a str; a name that is not in the database, such as an offset (``UTC+2``), an abbreviation
            (``PST``), a path or a name in another case; or one that means something else on each host:
            ``localtime``, ``posixrules``, ``Factory``, ``posix/…`` and ``right/…`` (which counts leap seconds).
    """
    if not isinstance(name, str):
        what = "the time zone is missing" if name is None else f"a time zone is a str, not {type(name).__name__}"
        raise _refused(name, what)
    return _load(name)


@lru_cache(maxsize=1024)
def _load(name: str) -> ZoneInfo:
    if name in _HOST_DEPENDENT or name.startswith(_VARIANTS):
        raise _refused(name, f"the time zone {name!r:.80} does not mean the same on every host")
    unknown = f"there is no time zone {name!r:.80}"
    if not _NAME.fullmatch(name):
        raise _refused(name, unknown)
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, struct.error):  # a folder, a file of another kind, a cut one
        raise _refused(name, unknown + _without_database()) from None
    if not _listed(name):
        raise _refused(name, f"{unknown}; upper and lower case count")
    return zone


def spans(zone: ZoneInfo, start: int, end: int) -> Iterator[Span]:
    """Yield, in order, the stretches of equal offset that fill `start` to `end` (seconds since the epoch).

    In the first and the last day that `datetime` knows (years 1 and 9999) the offset is taken not to change.
    """
    begin, offset = start, _offset(zone, start)
    for look in range(start, end, _LOOK_S):
        until = min(look + _LOOK_S, end)
        if (after := _offset(zone, until)) != offset:
            change = _change(zone, look, until, offset)
            yield Span(begin, change, offset)
            begin, offset = change, after
    if begin < end:
        yield Span(begin, end, offset)


def _offset(zone: ZoneInfo, second: int) -> int:
    moment = _EPOCH + timedelta(seconds=min(max(second, _FIRST), _LAST))
    return (moment.astimezone(zone).replace(tzinfo=UTC) - moment) // _SECOND


def _change(zone: ZoneInfo, low: int, high: int, before: int) -> int:
    """Return the second in `low` … `high` from which on the offset is not `before` any more."""
    return low + bisect_left(range(low, high), True, key=lambda second: _offset(zone, second) != before)


def _listed(name: str) -> bool:
    """Whether a database has the name in this case; a file system that ignores case opens others too."""
    return any(_listed_below(root, name) for root in zoneinfo.TZPATH) or name in _packaged()


def _listed_below(root: str, name: str) -> bool:
    folder = Path(root)
    for part in name.split("/"):
        try:
            if part not in os.listdir(folder):
                return False
        except OSError:
            return False
        folder /= part
    return True


def _packaged() -> list[str]:
    try:
        return resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8").split()
    except (ImportError, OSError):
        return []


def _without_database() -> str:
    try:
        ZoneInfo("UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError, struct.error):
        return ", because this machine has no database of them (the package tzdata brings one)"
    return ""


def _refused(name: object, what: str) -> InvalidSpec:
    return InvalidSpec(name, f"{what}; write a full name of the IANA database, such as 'Europe/Berlin' or 'UTC'")
