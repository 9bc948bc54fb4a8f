"""The laws of occurrences, against two oracles: a walk through every minute, and cronsim where no clock changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from attrs import frozen
from cronsim import CronSim
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from alkstore.cron.expression import next_after

BEFORE_S = 36 * 3600
AFTER_S = 36 * 3600

CHANGES = [
    ("Europe/Berlin", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-10-25T01:00"),
    ("America/New_York", "2026-03-08T07:00"),
    ("America/New_York", "2026-11-01T06:00"),
    ("Europe/Dublin", "2026-03-29T01:00"),
    ("Europe/Dublin", "2026-10-25T01:00"),
    ("Australia/Lord_Howe", "2026-04-04T15:00"),
    ("Australia/Lord_Howe", "2026-10-03T15:30"),
    ("America/Sao_Paulo", "2018-02-18T02:00"),
    ("America/Sao_Paulo", "2018-11-04T03:00"),
    ("America/Santiago", "2026-04-05T03:00"),
    ("America/Santiago", "2026-09-06T04:00"),
    ("America/Havana", "2026-03-08T05:00"),
    ("America/Havana", "2026-11-01T05:00"),
    ("Antarctica/Troll", "2026-03-29T01:00"),
    ("Antarctica/Troll", "2026-10-25T01:00"),
    ("Africa/Casablanca", "2026-02-15T02:00"),
    ("Africa/Casablanca", "2026-03-22T02:00"),
    ("Asia/Pyongyang", "2015-08-14T15:00"),
    ("Asia/Pyongyang", "2018-05-04T15:00"),
    ("America/Caracas", "2016-05-01T07:00"),
    ("Antarctica/Casey", "2020-10-03T16:01"),
    ("Pacific/Apia", "2011-12-30T10:00"),
    ("Pacific/Kwajalein", "1969-09-30T13:00"),
    ("Pacific/Kwajalein", "1993-08-21T12:00"),
    ("Africa/Monrovia", "1972-01-07T00:44:30"),
    ("Africa/Freetown", "1939-09-01T01:00"),
    ("Asia/Kathmandu", "1985-12-31T18:30"),
]


@frozen
class Written:
    """An expression and, apart from the code under test, the wall-clock times that it means."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    day: Callable[[date], bool]
    wildcard: bool

    def matches(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and self.day(wall.date())


def field(low: int, high: int, widest: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """A field that is not all values, and the values that it means."""
    value = st.integers(low, high)
    span = st.tuples(value, value).map(sorted)
    step = st.integers(1, widest)
    item = st.one_of(
        value.map(lambda v: (str(v), {v})),
        span.map(lambda s: (f"{s[0]}-{s[1]}", set(range(s[0], s[1] + 1)))),
        st.tuples(span, step).map(lambda t: (f"{t[0][0]}-{t[0][1]}/{t[1]}", set(range(t[0][0], t[0][1] + 1, t[1])))),
        st.tuples(value, step).map(lambda t: (f"{t[0]}/{t[1]}", set(range(t[0], high + 1, t[1])))),
    )
    return st.lists(item, min_size=1, max_size=3).map(
        lambda items: (",".join(text for text, _ in items), frozenset().union(*(values for _, values in items)))
    )


def starred(low: int, high: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    step = st.integers(1, high - low + 1).map(lambda n: (f"*/{n}", frozenset(range(low, high + 1, n))))
    return st.just(("*", frozenset(range(low, high + 1)))) | step


@st.composite
def days(draw: st.DrawFn) -> tuple[str, Callable[[date], bool]]:
    dom, dom_values = draw(st.just(("*", frozenset(range(1, 32)))) | field(1, 31, 31))
    dow, dow_values = draw(st.just(("*", frozenset(range(8)))) | field(0, 7, 7))
    weekdays = {value % 7 for value in dow_values}
    if dom != "*" and dow != "*":
        return f"{dom} * {dow}", lambda d: d.day in dom_values or d.isoweekday() % 7 in weekdays
    return f"{dom} * {dow}", lambda d: d.day in dom_values and d.isoweekday() % 7 in weekdays


@st.composite
def expressions(draw: st.DrawFn) -> Written:
    minute, minutes = draw(field(0, 59, 60) | starred(0, 59))
    hour, hours = draw(field(0, 23, 24) | starred(0, 23) | st.just(("0-4", frozenset(range(5)))))
    day, matches = draw(st.just(("* * *", lambda _: True)) | days())
    wildcard = minute.startswith("*") or hour.startswith("*")
    return Written(f"{minute} {hour} {day}", minutes, hours, matches, wildcard)


@frozen
class Step:
    """A moment at which the wall clock begins a minute or is set."""

    second: int
    wall: datetime
    reached: tuple[datetime, ...]
    """The minutes that the wall clock reaches or passes here for the first time."""


@cache
def walk(zone: str, change: int) -> list[Step]:
    """Look at the wall clock all the time, from two and a half days before the change until a day and a half after."""
    tz = ZoneInfo(zone)
    steps = []
    before: datetime | None = None
    latest: datetime | None = None
    for second in range(change - BEFORE_S - 24 * 3600, change + AFTER_S, 30):  # all changes are at whole half minutes
        wall = datetime.fromtimestamp(second, tz).replace(tzinfo=None)
        if wall.second == 0 or (before is not None and wall - before != timedelta(seconds=30)):
            latest = latest or wall.replace(second=0) - timedelta(minutes=1)
            passed = range(max((wall - latest) // timedelta(minutes=1), 0))
            reached = tuple(latest + timedelta(minutes=number + 1) for number in passed)
            latest = reached[-1] if reached else latest
            steps.append(Step(second, wall, reached))
        before = wall
    return steps


def walked(written: Written, zone: str, change: int) -> list[int]:
    """Every occurrence that somebody finds who looks at the wall clock; not in the first day of the walk."""
    steps = [step for step in walk(zone, change) if step.second >= change - BEFORE_S]
    if written.wildcard:
        return [step.second * 1000 for step in steps if step.wall.second == 0 and written.matches(step.wall)]
    return [step.second * 1000 for step in steps if any(map(written.matches, step.reached))]


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def following(text: str, zone: str, after: int) -> int:
    found = next_after(text, zone, after)
    assert found is not None
    return found


def test_the_walk_sees_each_of_the_changes() -> None:
    for zone, change in CHANGES:
        at = seconds(change)
        before, after = (datetime.fromtimestamp(second, ZoneInfo(zone)).utcoffset() for second in (at - 1, at))
        assert before != after, (zone, change)


@settings(deadline=None)  # the first look at a change takes its time
@given(written=expressions(), change=st.sampled_from(CHANGES), data=st.data())
def test_the_next_occurrence_is_what_the_walk_finds(
    written: Written, change: tuple[str, str], data: st.DataObject
) -> None:
    zone, at = change[0], seconds(change[1])
    found = walked(written, zone, at)
    near = [occurrence + step for occurrence in found for step in (-1, 0, 1)]
    whenever = st.integers((at - BEFORE_S) * 1000 - 1, (at + AFTER_S) * 1000 - 1)
    soon = st.integers((at - 7200) * 1000, (at + 7200) * 1000)
    after = data.draw(whenever | soon | st.sampled_from(near) if near else whenever | soon)
    want = next((occurrence for occurrence in found if occurrence > after), None)
    if want is None:
        assert following(written.text, zone, after) >= (at + AFTER_S) * 1000
    else:
        assert following(written.text, zone, after) == want


@settings(deadline=None)  # the first look at a change takes its time
@given(written=expressions(), change=st.sampled_from(CHANGES))
def test_going_from_each_occurrence_to_the_next_leaves_none_out(written: Written, change: tuple[str, str]) -> None:
    zone, at = change[0], seconds(change[1])
    reached = (at - 3 * 3600) * 1000
    end = (at + 3 * 3600) * 1000
    want = [occurrence for occurrence in walked(written, zone, at) if reached < occurrence <= end]
    found = []
    while (reached := following(written.text, zone, reached)) <= end:
        found.append(reached)
    assert found == want


@given(
    written=expressions(),
    zone=st.sampled_from([zone for zone, _ in CHANGES]),
    after=st.integers(0, 4_000_000_000_000),
    part=st.floats(0, 1, exclude_max=True),
)
def test_between_two_occurrences_the_next_one_is_the_same(written: Written, zone: str, after: int, part: float) -> None:
    first = following(written.text, zone, after)
    second = following(written.text, zone, first)
    assert after < first < second
    assert following(written.text, zone, first - 1) == first
    assert following(written.text, zone, first + int((second - first) * part)) == second
    assert following(written.text, zone, second - 1) == second


@given(written=expressions(), zone=st.sampled_from([zone for zone, _ in CHANGES]), after=st.integers(0, 10**14))
def test_the_wall_clock_shows_a_time_of_the_expression_unless_it_was_just_put_forward(
    written: Written, zone: str, after: int
) -> None:
    second = following(written.text, zone, after) // 1000
    tz = ZoneInfo(zone)
    wall = datetime.fromtimestamp(second, tz).replace(tzinfo=None)
    just_before = datetime.fromtimestamp(second - 1, tz).replace(tzinfo=None)
    if written.wildcard or wall - just_before == timedelta(seconds=1):
        assert wall.second == 0
        assert written.matches(wall)
    else:
        assert wall - just_before > timedelta(seconds=1)


@given(written=expressions(), after=st.integers(0, 4_000_000_000_000))
@example(Written("0 0 29-31 2 *", frozenset([0]), frozenset([0]), lambda d: d.day > 28, False), 0)
def test_in_utc_it_is_what_cronsim_says(written: Written, after: int) -> None:
    assume(not re.search(r"\b(\d+)-\1/", written.text))  # a-a/n is the one thing that cronsim reads in another way
    want = CronSim(written.text, datetime.fromtimestamp(after / 1000, UTC))
    for _ in range(5):
        after = following(written.text, "UTC", after)
        assert after == round(next(want).timestamp() * 1000)


@given(written=expressions(), second=st.integers(0, 59), after=st.integers(0, 4_000_000_000_000))
def test_a_field_for_seconds_moves_the_occurrences_within_their_minute(
    written: Written, second: int, after: int
) -> None:
    plain = following(written.text, "UTC", after)
    assert following(f"{second} {written.text}", "UTC", after + second * 1000) == plain + second * 1000


@pytest.mark.parametrize("zone", sorted({zone for zone, _ in CHANGES}))
@settings(max_examples=20)
@given(written=expressions(), after=st.integers(1_767_225_600_000, 1_798_761_600_000))
def test_a_field_for_seconds_of_zero_changes_nothing(zone: str, written: Written, after: int) -> None:
    assert next_after(f"0 {written.text}", zone, after) == next_after(written.text, zone, after)
