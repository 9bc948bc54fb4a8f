"""When an expression occurs: the rules for gaps and repeated hours, on the days on which schedulers go wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alkstore.cron.expression import next_after, timetable
from alkstore.errors import InvalidSpec
from alkstore.every import MAX_MS

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "cron_next.json").read_text(encoding="utf-8")
)
MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def ms(text: str) -> int:
    """Milliseconds of a moment written in ISO 8601, in UTC unless it says otherwise."""
    moment = datetime.fromisoformat(text)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def occurrences(expression: str, zone: str, after: str, count: int) -> list[str]:
    """The next `count` occurrences in UTC, as ISO 8601 without the zone."""
    found: list[str] = []
    moment = ms(after)
    for _ in range(count):
        following = next_after(expression, zone, moment)
        assert following is not None
        moment = following
        assert moment % 1000 == 0
        found.append(datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S").removesuffix(":00"))
    return found


def between(expression: str, zone: str, start: str, end: str) -> Iterator[int]:
    """Every occurrence from `start` on and before `end`, in milliseconds."""
    moment = next_after(expression, zone, ms(start) - 1)
    while moment is not None and moment < ms(end):
        yield moment
        moment = next_after(expression, zone, moment)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['expr']} {case['tz']} {case['after']}")
def test_the_vectors(case: dict[str, Any]) -> None:
    want = [text.removesuffix("Z").removesuffix(":00") for text in case["next"]]
    assert occurrences(case["expr"], case["tz"], case["after"].replace("Z", "+00:00"), len(want)) == want


@pytest.mark.parametrize("case", [case for case in CASES if len(case["expr"].split()) == 5], ids=lambda c: c["expr"])
def test_the_vectors_with_a_second_of_zero(case: dict[str, Any]) -> None:
    want = [text.removesuffix("Z").removesuffix(":00") for text in case["next"]]
    found = occurrences(f"0 {case['expr']}", case["tz"], case["after"].replace("Z", "+00:00"), len(want))
    assert found == want


# -------------------------------------------------------------------------------------------- gaps


@pytest.mark.parametrize(
    ("expression", "zone", "after", "want"),
    [
        # a fixed time inside the gap, at its first and its last minute
        ("0 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
        ("59 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:59"]),
        # several in one gap are one, also together with the time that lies just after it
        ("0,15,30 2 * * *", "Europe/Berlin", "2026-03-29T00:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
        ("30 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00", ["2026-03-29T01:00", "2026-03-29T01:30"]),
        ("0 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
        ("59 1,2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T00:59", "2026-03-29T01:00"]),
        # with seconds
        ("30 30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30:30"]),
        ("* 30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        # wildcards are not made up for
        ("*/15 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-30T00:00", "2026-03-30T00:15"]),
        ("30 */2 * * *", "Europe/Berlin", "2026-03-29T00:00", ["2026-03-29T02:30", "2026-03-29T04:30"]),
        ("*/15 * * * *", "Europe/Berlin", "2026-03-29T00:40", ["2026-03-29T00:45", "2026-03-29T01:00"]),
        # asked from the middle of the gap, which is a moment before or after it
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T00:59:59.999", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00", ["2026-03-30T00:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00:00.001", ["2026-03-30T00:30"]),
        # half an hour
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["2026-10-03T15:30", "2026-10-04T15:15"]),
        ("*/15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["2026-10-03T15:30", "2026-10-03T15:45"]),
        ("*/15 3 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["2026-10-03T16:00", "2026-10-03T16:15"]),
        # at midnight
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00", ["2018-11-04T03:00", "2018-11-05T02:00"]),
        ("0 1 4 11 *", "America/Sao_Paulo", "2018-11-04T02:00", ["2018-11-04T03:00", "2019-11-04T04:00"]),
        ("30 0 4 11 *", "America/Sao_Paulo", "2018-01-01T00:00", ["2018-11-04T03:00", "2019-11-04T03:30"]),
        ("*/30 0 4 11 *", "America/Sao_Paulo", "2018-01-01T00:00", ["2019-11-04T03:00", "2019-11-04T03:30"]),
        ("*/30 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00", ["2018-11-05T02:00", "2018-11-05T02:30"]),
        ("0 0 * * SUN", "America/Santiago", "2026-09-05T12:00", ["2026-09-06T04:00", "2026-09-13T03:00"]),
        ("0 0 * * *", "Asia/Beirut", "2026-03-28T12:00", ["2026-03-28T22:00", "2026-03-29T21:00"]),
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00", ["2026-04-23T22:00", "2026-04-24T21:00"]),
        # a whole day
        (
            "30 12 * * *",
            "Pacific/Apia",
            "2011-12-29T12:00",
            ["2011-12-29T22:30", "2011-12-30T10:00", "2011-12-30T22:30"],
        ),
        ("0 0 * * *", "Pacific/Apia", "2011-12-29T09:00", ["2011-12-29T10:00", "2011-12-30T10:00", "2011-12-31T10:00"]),
        ("0 9 30 12 *", "Pacific/Apia", "2011-12-01T00:00", ["2011-12-30T10:00", "2012-12-29T19:00"]),
        ("0 * * * *", "Pacific/Apia", "2011-12-30T08:30", ["2011-12-30T09:00", "2011-12-30T10:00", "2011-12-30T11:00"]),
        ("0 12 * * FRI", "Pacific/Apia", "2011-12-28T00:00", ["2011-12-30T10:00", "2012-01-05T22:00"]),
        ("0 12 21 8 *", "Pacific/Kwajalein", "1993-08-01T00:00", ["1993-08-21T12:00", "1994-08-21T00:00"]),
        # a gap that does not end on a minute: Monrovia was 44 min 30 s behind until 1972
        ("15 0 * * *", "Africa/Monrovia", "1972-01-06T12:00", ["1972-01-07T00:44:30", "1972-01-08T00:15"]),
        ("44 0 * * *", "Africa/Monrovia", "1972-01-06T12:00", ["1972-01-07T00:44:30", "1972-01-08T00:44"]),
        ("45 0 * * *", "Africa/Monrovia", "1972-01-06T12:00", ["1972-01-07T00:45", "1972-01-08T00:45"]),
        # winter time is the exception in Dublin's rules, and before 1970 times had odd offsets
        ("30 1 * * *", "Europe/Dublin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        ("0 12 * * *", "Europe/Berlin", "1880-01-01T12:00", ["1880-01-02T11:06:32"]),
        ("0 12 * * *", "Europe/Amsterdam", "1930-01-01T12:00", ["1930-01-02T11:40:28"]),
        # clocks of two hours, and of twenty minutes
        ("30 0,1,2 * * *", "Antarctica/Troll", "2026-03-29T00:00", ["2026-03-29T00:30", "2026-03-29T01:00"]),
        ("30 */3 * * *", "Antarctica/Troll", "2026-03-29T00:00", ["2026-03-29T00:30", "2026-03-29T01:30"]),
    ],
)
def test_a_clock_put_forward(expression: str, zone: str, after: str, want: list[str]) -> None:
    assert occurrences(expression, zone, after, len(want)) == want


# -------------------------------------------------------------------------------- repeated hours


@pytest.mark.parametrize(
    ("expression", "zone", "after", "want"),
    [
        ("30 1 * * *", "America/New_York", "2026-10-31T12:00", ["2026-11-01T05:30", "2026-11-02T06:30"]),
        # asked anywhere in the second pass
        ("30 1 * * *", "America/New_York", "2026-11-01T05:59:59.999", ["2026-11-02T06:30"]),
        ("30 1 * * *", "America/New_York", "2026-11-01T06:00", ["2026-11-02T06:30"]),
        ("30 1 * * *", "America/New_York", "2026-11-01T06:29", ["2026-11-02T06:30"]),
        ("30 1 * * *", "America/New_York", "2026-11-01T06:31", ["2026-11-02T06:30"]),
        # the first minute of the hour, and the first after it
        ("0 1 * * *", "America/New_York", "2026-11-01T04:00", ["2026-11-01T05:00", "2026-11-02T06:00"]),
        ("0 2 * * *", "America/New_York", "2026-11-01T04:00", ["2026-11-01T07:00", "2026-11-02T07:00"]),
        ("0-59 1,2 * * *", "America/New_York", "2026-11-01T05:58", ["2026-11-01T05:59", "2026-11-01T07:00"]),
        ("0 0-23 * * *", "America/New_York", "2026-11-01T04:30", ["2026-11-01T05:00", "2026-11-01T07:00"]),
        # with seconds
        ("15 30 1 * * *", "America/New_York", "2026-10-31T12:00", ["2026-11-01T05:30:15", "2026-11-02T06:30:15"]),
        ("*/30 59 1 * * *", "America/New_York", "2026-11-01T05:59", ["2026-11-01T05:59:30", "2026-11-02T06:59"]),
        # wildcards see both passes
        (
            "*/30 1 * * *",
            "America/New_York",
            "2026-11-01T05:00",
            ["2026-11-01T05:30", "2026-11-01T06:00", "2026-11-01T06:30", "2026-11-02T06:00"],
        ),
        (
            "30 */1 * * *",
            "America/New_York",
            "2026-11-01T05:00",
            ["2026-11-01T05:30", "2026-11-01T06:30", "2026-11-01T07:30"],
        ),
        ("30 * 1 11 *", "America/New_York", "2026-11-01T05:00", ["2026-11-01T05:30", "2026-11-01T06:30"]),
        # half an hour
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T00:00", ["2026-04-04T14:45", "2026-04-05T15:15"]),
        ("15 1 * * *", "Australia/Lord_Howe", "2026-04-04T00:00", ["2026-04-04T14:15", "2026-04-05T14:45"]),
        ("0 2 * * *", "Australia/Lord_Howe", "2026-04-04T00:00", ["2026-04-04T15:30", "2026-04-05T15:30"]),
        (
            "*/15 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-04T14:30",
            ["2026-04-04T14:45", "2026-04-04T15:00", "2026-04-04T15:15", "2026-04-05T14:30"],
        ),
        ("*/15 2 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["2026-04-04T15:30", "2026-04-04T15:45"]),
        # a midnight that comes twice
        ("0 0 * * *", "America/Sao_Paulo", "2018-02-17T12:00", ["2018-02-18T03:00", "2018-02-19T03:00"]),
        ("30 23 * * *", "America/Sao_Paulo", "2018-02-17T12:00", ["2018-02-18T01:30", "2018-02-19T02:30"]),
        (
            "*/30 23 * * *",
            "America/Sao_Paulo",
            "2018-02-18T01:00",
            ["2018-02-18T01:30", "2018-02-18T02:00", "2018-02-18T02:30", "2018-02-19T02:00"],
        ),
        ("30 23 17 2 *", "America/Sao_Paulo", "2018-02-18T01:30", ["2019-02-18T02:30"]),
        ("30 1 * * *", "Europe/Dublin", "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
        # a repeated day (Alaska, 1867) and one of 23 hours (Kwajalein, 1969)
        ("0 12 * * *", "America/Juneau", "1867-10-18T12:00", ["1867-10-18T20:57:41", "1867-10-20T20:57:41"]),
        ("0 12 * * *", "Pacific/Kwajalein", "1969-09-29T12:00", ["1969-09-30T01:00", "1969-10-02T00:00"]),
        # two hours
        (
            "30 1-3 * * *",
            "Antarctica/Troll",
            "2026-10-24T23:00",
            ["2026-10-24T23:30", "2026-10-25T00:30", "2026-10-25T03:30"],
        ),
    ],
)
def test_a_clock_put_back(expression: str, zone: str, after: str, want: list[str]) -> None:
    assert occurrences(expression, zone, after, len(want)) == want


def test_a_fixed_time_runs_once_however_often_one_asks_during_the_repeated_hour() -> None:
    seen = {
        following
        for minute in range(180)
        if (following := next_after("30 1 * * *", "America/New_York", ms("2026-11-01T04:58") + minute * MINUTE))
        and following <= ms("2026-11-01T04:58") + (minute + 1) * MINUTE
    }
    assert seen == {ms("2026-11-01T05:30")}


@pytest.mark.parametrize(
    ("start", "end", "hours"),
    [
        ("2026-10-24T21:59", "2026-10-25T23:00", 25),
        ("2026-03-28T22:59", "2026-03-29T22:00", 23),
        ("2026-06-30T21:59", "2026-07-01T22:00", 24),
    ],
)
def test_an_hourly_wildcard_runs_once_in_each_real_hour_of_the_day(start: str, end: str, hours: int) -> None:
    found = list(between("0 * * * *", "Europe/Berlin", start, end))
    assert len(found) == hours
    assert {later - earlier for earlier, later in pairwise(found)} == {HOUR}


@pytest.mark.parametrize(
    "zone",
    ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Europe/Dublin", "Asia/Gaza"],
)
@pytest.mark.parametrize("expression", ["30 2 * * *", "30 1 * * *", "0 0 * * *", "45 1 * * *", "59 23 * * *"])
def test_a_daily_time_runs_once_on_each_day_of_the_year(zone: str, expression: str) -> None:
    found = list(between(expression, zone, "2026-01-01T00:00", "2027-01-01T00:00"))
    assert len(found) == 365
    assert all(22 * HOUR <= later - earlier <= 26 * HOUR for earlier, later in pairwise(found))


# ------------------------------------------------------------------------------------ the calendar


@pytest.mark.parametrize(
    ("expression", "after", "want"),
    [
        ("0 0 29 2 *", "2026-01-01T00:00", ["2028-02-29T00:00", "2032-02-29T00:00"]),
        ("0 0 29 2 *", "2096-02-29T00:00", ["2104-02-29T00:00"]),
        ("0 0 * 2 MON#5", "2072-02-29T00:00", ["2112-02-29T00:00"]),
        ("0 0 31 4,5 *", "2029-03-26T09:22:30", ["2029-05-31T00:00"]),
        ("0 0 13 * FRI", "2026-01-30T00:00", ["2026-02-06T00:00", "2026-02-13T00:00", "2026-02-20T00:00"]),
        ("0 0 1 * MON", "2026-05-26T00:00", ["2026-06-01T00:00", "2026-06-08T00:00"]),
        ("0 0 ? * MON", "2026-05-26T00:00", ["2026-06-01T00:00", "2026-06-08T00:00"]),
        ("0 0 15 * ?", "2026-05-26T00:00", ["2026-06-15T00:00", "2026-07-15T00:00"]),
        ("0 0 */2 * MON", "2026-05-26T00:00", ["2026-06-01T00:00", "2026-06-15T00:00"]),
        ("0 0 LW * *", "2026-01-01T00:00", ["2026-01-30T00:00", "2026-02-27T00:00"]),
        ("0 0 * * 5L", "2026-01-01T00:00", ["2026-01-30T00:00", "2026-02-27T00:00"]),
        ("59 59 23 31 12 *", "2026-06-01T00:00", ["2026-12-31T23:59:59", "2027-12-31T23:59:59"]),
        ("* * * * *", "2099-12-31T23:59:59.999", ["2100-01-01T00:00"]),
        ("*/7 * * * * *", "2026-01-01T00:00:56", ["2026-01-01T00:01", "2026-01-01T00:01:07"]),
    ],
)
def test_days_of_the_calendar(expression: str, after: str, want: list[str]) -> None:
    assert occurrences(expression, "UTC", after, len(want)) == want


def test_summer_time_goes_on_after_the_end_of_the_tables() -> None:
    assert occurrences("30 2 * * *", "Europe/Berlin", "2199-03-30T12:00", 2) == ["2199-03-31T01:00", "2199-04-01T00:30"]


# ------------------------------------------------------------------------------- the ends of time


@pytest.mark.parametrize(
    ("after", "want"),
    [(0, 60_000), (1, 60_000), (59_999, 60_000), (60_000, 120_000), (60_001, 120_000), (-1, 0), (-60_001, -60_000)],
)
def test_an_occurrence_is_strictly_after_to_the_millisecond(after: int, want: int) -> None:
    assert next_after("* * * * *", "UTC", after) == want


@pytest.mark.parametrize(
    ("expression", "after", "want"),
    [
        ("* * * * * *", 1_000, 2_000),
        ("* * * * * *", 1_999, 2_000),
        ("* * * * * *", 999, 1_000),
        ("0 2 * * *", ms("2026-01-15T01:59:59.999"), ms("2026-01-15T02:00")),
        ("0 2 * * *", ms("2026-01-15T02:00"), ms("2026-01-16T02:00")),
    ],
)
def test_less_than_a_second_counts(expression: str, after: int, want: int) -> None:
    assert next_after(expression, "UTC", after) == want


@pytest.mark.parametrize("after", [MAX_MS, MAX_MS + 1, MAX_MS - 999, 10**18, 10**40])
def test_after_the_end_of_the_calendar_there_is_nothing(after: int) -> None:
    for expression in ("* * * * * *", "0 0 * * *", "30 2 29 2 *"):
        for zone in ("UTC", "Etc/GMT-14", "Etc/GMT+12", "Europe/Berlin"):
            assert next_after(expression, zone, after) is None


@pytest.mark.parametrize(
    ("expression", "zone", "last"),
    [
        ("* * * * * *", "UTC", "9999-12-31T23:59:59"),
        ("* * * * *", "UTC", "9999-12-31T23:59"),
        ("0 0 * * *", "UTC", "9999-12-31T00:00"),
        ("0 0 1 1 *", "Europe/Berlin", "9998-12-31T23:00"),
        ("59 23 31 12 *", "Etc/GMT-14", "9999-12-31T09:59"),
        ("* * * * *", "Etc/GMT-14", "9999-12-31T09:59"),
        ("0 11 31 12 *", "Etc/GMT+12", "9999-12-31T23:00"),
        ("0 12 31 12 *", "Etc/GMT+12", "9999-01-01T00:00"),
        ("* * * * *", "Etc/GMT+12", "9999-12-31T23:59"),
        ("0 0 29 2 *", "Asia/Tokyo", "9996-02-28T15:00"),
    ],
)
def test_the_last_occurrence_is_found_and_then_nothing(expression: str, zone: str, last: str) -> None:
    assert next_after(expression, zone, ms(last) - 1) == ms(last)
    assert next_after(expression, zone, ms(last)) is None


@pytest.mark.parametrize("after", [-(10**40), -(10**18), -62_135_596_800_000, ms("0001-01-01T00:00")])
@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT-14", "Etc/GMT+12", "Europe/Berlin", "Asia/Manila"])
def test_before_the_calendar_begins_is_no_error(after: int, zone: str) -> None:
    first = next_after("0 0 * * *", zone, after)
    assert first is not None
    assert -62_135_596_800_000 < first < -62_135_596_800_000 + 8 * DAY


# --------------------------------------------------------------------------------------- the cost


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("* * * * *", "Europe/Berlin"),
        ("0 0 * 2 MON#5", "Europe/Berlin"),
        ("*/5 0-23 */28 2 MON#5", "Australia/Lord_Howe"),
        ("59 59 23 29 2 ?", "Pacific/Apia"),
        (",".join(map(str, range(1, 60, 2))) + " * * * * *", "America/Santiago"),
    ],
)
def test_the_rarest_day_is_found_in_time(expression: str, zone: str) -> None:
    start = time.process_time()
    timetable(expression, zone).next_after(ms("2072-03-01T00:00"))
    assert time.process_time() - start < 0.1


def test_a_timetable_is_remembered() -> None:
    first = timetable("1 2 3 4 *", "Europe/Berlin")
    assert timetable("1 2 3 4 *", "Europe/Berlin") is first
    assert timetable("1 2 3 4 *", "UTC") is not first


@pytest.mark.parametrize(
    ("expression", "zone"), [("* * * *", "UTC"), ("* * * * *", "PST"), ("0 0 30 2 *", "UTC"), ("bad", "X/Y")]
)
def test_a_bad_row_is_told_each_time_it_is_read(expression: str, zone: str) -> None:
    for _ in range(3):
        with pytest.raises(InvalidSpec):
            next_after(expression, zone, 0)
