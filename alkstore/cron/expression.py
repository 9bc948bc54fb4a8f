"""Cron expressions: what may be written, and when it occurs in a time zone.

cronsim (Debian's rules) says which wall-clock times match. Which moments these are is decided here, because its own
walk through a zone can miss times after a change by half an hour, return one that does not exist where midnight is
skipped, go back inside a repeated hour, and follow other rules as soon as there is a field for seconds.
"""

from __future__ import annotations

import calendar
import re
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from attrs import frozen
from cronsim import CronSim, CronSimError

from alkstore.cron.zone import DAY, load_zone, spans
from alkstore.errors import InvalidSpec
from alkstore.every import MAX_MS
from alkstore.values import at, integer, moment

__all__ = ["MAX_BYTES", "Expression", "Timetable", "next_after", "parse", "preview", "timetable"]

MAX_BYTES = 768
"""Room for a list of every minute, hour and day; a longer text would only cost time."""

_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
_FIRST_SECOND = (datetime(1, 1, 5) - _EPOCH) // _SECOND
_LAST_SECOND = MAX_MS // 1000
_WINDOW_S = 2 * DAY

_HORIZON_S = 50 * 366 * DAY
"""How far ahead is looked: the rarest days (29 February on a given weekday) are up to 40 years apart."""

_SETTLED_MS = 4_102_444_800_000
"""2100-01-01: by then every zone follows its last rule, so what does not occur from here on has no future."""


# ----------------------------------------------------------------------------------------- grammar


@frozen
class _Field:
    """One field of an expression: its range, and what else it takes."""

    name: str
    low: int
    high: int
    size: int
    """How many different values it has, which is the widest step."""
    names: tuple[str, ...] = ()
    """Three-letter names, of the values from `low` on."""
    special: str = ""
    """What only this field takes, in words."""

    def checked(self, text: str) -> str:
        """Return the field as cronsim shall read it, or raise a ValueError that says what is wrong."""
        return ",".join(self._item(item) for item in text.split(","))

    def allowed(self) -> str:
        names = f" or {self.names[0]} to {self.names[-1]}" if self.names else ""
        return (
            f"allowed are *, {self.low} to {self.high}{names}, a range a-b, a step */n, a/n or a-b/n "
            f"with n from 1 to {self.size}{self.special}, and a list of these with commas"
        )

    def _item(self, item: str) -> str:
        if not item:
            raise ValueError("an item of its list is empty")
        values, slash, step = item.partition("/")
        if slash:
            self._within(step, 1, self.size, "a step")
        if values == "*":
            return item
        first, dash, last = values.partition("-")
        low = self._value(first)
        if not dash:
            return item
        if (high := self._value(last)) < low:
            raise ValueError(f"the range {_quoted(values)} runs backwards")
        return item if low < high else first  # cronsim would read a-a/n as a/n

    def _value(self, text: str) -> int:
        if text in self.names:
            return self.low + self.names.index(text)
        return self._within(text, self.low, self.high, "a value")

    def _within(self, text: str, low: int, high: int, what: str) -> int:
        if not text:
            raise ValueError(f"{what} is missing")
        if not re.fullmatch("[0-9]+", text):
            raise ValueError(f"{_quoted(text)} is not {what}")
        if not low <= int(text) <= high:
            raise ValueError(f"{_quoted(text)} is not within {low} to {high}")
        return int(text)


@frozen
class _DayOfMonth(_Field):
    def _item(self, item: str) -> str:
        return item if item in ("L", "LW") else super()._item(item)


@frozen
class _DayOfWeek(_Field):
    def _item(self, item: str) -> str:
        if match := re.fullmatch("([0-9]+)L", item):
            self._value(match[1])
            return item
        day, hash_, nth = item.partition("#")
        if hash_:
            self._value(day)
            self._within(nth, 1, 5, "a week of the month")
            return item
        return super()._item(item)


_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")

_SECONDS = _Field("second", 0, 59, 60)
_MINUTES = _Field("minute", 0, 59, 60)
_HOURS = _Field("hour", 0, 23, 24)
_DAYS = _DayOfMonth("day-of-month", 1, 31, 31, special=", L for the last day, LW for the last Monday to Friday")
_MONTHS = _Field("month", 1, 12, 12, names=_MONTH_NAMES)
_WEEKDAYS = _DayOfWeek(
    "day-of-week",
    0,
    7,
    7,
    names=_DAY_NAMES,
    special=", d#k for the k-th such day of the month (1 to 5), dL for the last one (0L to 7L; 0 and 7 are Sunday)",
)
_FIELDS = (_SECONDS, _MINUTES, _HOURS, _DAYS, _MONTHS, _WEEKDAYS)


def parse(expression: object) -> Expression:
    """Return what `expression` means, or say why it means nothing.

    It is 5 fields (minute, hour, day-of-month, month, day-of-week), or 6 with seconds first, apart by spaces or tabs.
    A field is ``*``, a value, a range, one of these with a step, or a list of them; the day fields also know ``L``,
    ``LW``, ``5L``, ``MON#1``, and ``?`` for ``*``. Names have three letters, in either case. If both day fields are
    restricted, a day that matches either of them will do; a field that begins with ``*`` is not restricted (Debian's
    crontab(5)).

    Raises:
        InvalidSpec: not a str, more than 768 bytes or not ASCII; a macro such as ``@daily``; a field that breaks these
            rules, a range that runs backwards, a step wider than its field; or no day can ever match. The text
            names the field, its value and what is allowed.
    """
    if not isinstance(expression, str):
        raise InvalidSpec(expression, f"a cron expression is a str, not {type(expression).__name__}")
    return _parse(expression)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Expression:
    if len(text) > MAX_BYTES:
        raise InvalidSpec(text, f"a cron expression has at most {MAX_BYTES} bytes; {_quoted(text)} has {len(text)}")
    if not text.isascii():
        place = next(position for position, character in enumerate(text) if not character.isascii())
        raise InvalidSpec(text, f"a cron expression is ASCII; {_quoted(text)} has {text[place]!a} at position {place}")
    odd = next((character for character in text if not character.isprintable() and character != "\t"), None)
    if odd is not None:
        raise InvalidSpec(
            text,
            f"the fields of a cron expression are apart by spaces or tabs; {_quoted(text)} has {odd!r} at position "
            f"{text.index(odd)}",
        )
    parts = re.findall(r"[^ \t]+", text)
    if text.lstrip(" \t").startswith("@"):
        raise InvalidSpec(
            text,
            f"macros are not cron expressions here; write {_quoted(text)} in fields, like '0 0 * * *'; intervals are "
            "for store.schedule",
        )
    if len(parts) not in (5, 6):
        raise InvalidSpec(
            text,
            f"a cron expression has 5 fields (minute, hour, day-of-month, month, day-of-week) or 6 with seconds first; "
            f"{_quoted(text)} has {len(parts)}",
        )
    fields = _FIELDS[-len(parts) :]
    checked = [_checked(text, field, part) for field, part in zip(fields, parts, strict=True)]
    result = Expression(text, " ".join(checked), fixed=not any(part.startswith("*") for part in checked[-5:-3]))
    if not result.occurs():
        raise InvalidSpec(
            text,
            f"the cron expression {_quoted(text)} never occurs: no day matches its day-of-month {_quoted(parts[-3])}, "
            f"month {_quoted(parts[-2])} and day-of-week {_quoted(parts[-1])}",
        )
    return result


def _checked(text: str, field: _Field, part: str) -> str:
    if part == "?" and field in (_DAYS, _WEEKDAYS):
        return "*"
    try:
        return field.checked(part.upper())
    except ValueError as error:
        raise InvalidSpec(
            text,
            f"the {field.name} field {_quoted(part)} of the cron expression {_quoted(text)} is not valid: {error}; "
            f"{field.allowed()}",
        ) from None


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"


# ------------------------------------------------------------------------------- wall-clock times


@frozen
class Expression:
    """A valid expression: the wall-clock times that it matches, in no zone yet."""

    text: str
    """As it was given."""
    _canonical: str
    fixed: bool
    """True if neither the minute nor the hour field begins with ``*``: Debian's cron runs such a job once for each
    of its times, whatever happens to the clock; the others run by elapsed time."""

    def occurs(self) -> bool:
        """Whether any day matches. The 28 years in question hold every calendar that there is."""
        try:
            cron = CronSim(self._canonical, _EPOCH)
        except CronSimError:  # what cronsim itself sees to be impossible, such as 30 February
            return False
        return any(
            cron.match_day(date(year, month, day))
            for year in range(2001, 2029)
            for month in cron.months
            for day in range(1, calendar.monthrange(year, month)[1] + 1)
        )

    def first(self, wall: int) -> int | None:
        """Return the first matching wall-clock time from `wall` on; None: there is none up to the year 9999.

        Both are seconds since 1970-01-01 00:00 on the same wall clock.
        """
        try:
            found = next(CronSim(self._canonical, _EPOCH + timedelta(seconds=wall - 1)), None)
        except OverflowError:
            return None
        return None if found is None else (found - _EPOCH) // _SECOND


# ---------------------------------------------------------------------------------------- moments


@frozen
class Timetable:
    """An expression in a zone: the moments at which it occurs."""

    expression: Expression
    zone: ZoneInfo

    def next_after(self, after_ms: int) -> int | None:
        """Return the first occurrence strictly after `after_ms`, both in milliseconds since the epoch, UTC.

        None: there is none within fifty years, or before the wall clock or UTC reach the year 10000.

        A fixed time (`Expression.fixed`) occurs when the wall clock first reaches or passes it. So where the clock is
        put forward it occurs at the end of the gap, once, however many of its times are in there; and of an hour that
        is repeated it sees the first pass only. Anything else occurs at each moment whose wall-clock time matches, so
        it runs by elapsed time. These are the rules of Debian's cron(8), for changes of any length.
        """
        after = max(after_ms // 1000, _FIRST_SECOND)
        last = min(after + _HORIZON_S, _LAST_SECOND)
        while after < last:
            end = min(after + _WINDOW_S, last + 1)
            if (found := self._within(after, end)) is not None:
                return found * 1000
            # wall clocks are less than a day from UTC, so this is not after the next occurrence
            if (wall := self.expression.first(end - DAY)) is None:
                return None
            after = max(end - 1, wall - DAY - 1)
        return None

    def _within(self, after: int, end: int) -> int | None:
        """Return the first occurrence after `after` and before `end`. All in seconds."""
        reached: int | None = None  # the wall-clock time up to which fixed times have had their turn
        for span in spans(self.zone, after - DAY, end):
            low = max(span.start, after + 1) + span.offset
            high = span.end + span.offset
            if self.expression.fixed and reached is not None:
                low = reached if span.start > after else max(reached, low)
            if low < high and (wall := self.expression.first(low)) is not None and wall < high:
                return max(wall - span.offset, span.start)
            reached = high if reached is None else max(reached, high)
        return None


def timetable(expression: object, zone: object) -> Timetable:
    """Return the moments of `expression` in the IANA zone `zone`. They are remembered: asking again costs nothing.

    Raises:
        InvalidSpec: what `parse` and `load_zone` refuse; or, in this zone, all times of the expression are such that
            the clock skips them every year.
    """
    return _timetable(parse(expression), load_zone(zone))


@lru_cache(maxsize=1024)
def _timetable(expression: Expression, zone: ZoneInfo) -> Timetable:
    times = Timetable(expression, zone)
    if times.next_after(_SETTLED_MS) is None:
        raise InvalidSpec(
            expression.text,
            f"the cron expression {_quoted(expression.text)} never occurs in {zone.key}: its times are those that are "
            f"skipped there when the clock is put forward, and a minute or hour field with * does not make up for them",
        )
    return times


def next_after(expression: str, zone: str, after_ms: int) -> int | None:
    """Return `Timetable.next_after` of `expression` in `zone`.

    Raises:
        InvalidSpec: what `timetable` refuses.
    """
    return timetable(expression, zone).next_after(after_ms)


def preview(expression: str, timezone: str, *, after: datetime | None = None, count: int = 10) -> list[datetime]:
    """Return the next `count` occurrences (1 to 1,000) after `after`, oldest first, as aware datetimes in the zone.

    `after` is an aware datetime not before 1970; None means now. There are fewer only where the calendar ends, with
    the year 9999. A plain function that needs no store; the first use of a zone reads its file.

    Raises:
        InvalidSpec: the expression or the zone is refused; the text says why and what is allowed.
        TypeError, ValueError: `after` is no aware datetime or before 1970; `count` is no int or out of range.
    """
    times = timetable(expression, timezone)
    integer(count, "count", 1, 1_000)
    cursor = moment(datetime.now(UTC) if after is None else after, "after")
    found: list[datetime] = []
    while len(found) < count and (occurrence := times.next_after(cursor)) is not None:
        found.append(at(occurrence).astimezone(times.zone))
        cursor = occurrence
    return found
