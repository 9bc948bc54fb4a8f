"""`preview`: the next occurrences as aware datetimes, without a store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from alkstore.cron import preview
from alkstore.errors import InvalidSpec

AFTER = datetime(2026, 3, 28, 12, tzinfo=UTC)


def test_the_occurrences_are_shown_on_the_wall_clock_of_the_zone() -> None:
    found = preview("30 2 * * *", "Europe/Berlin", after=AFTER, count=3)
    assert [moment.isoformat() for moment in found] == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
        "2026-03-31T02:30:00+02:00",
    ]
    assert {moment.tzinfo for moment in found} == {ZoneInfo("Europe/Berlin")}


def test_both_passes_of_a_repeated_hour_can_be_told_apart() -> None:
    found = preview("0 1 * * *", "America/New_York", after=datetime(2026, 11, 1, tzinfo=UTC), count=1)
    assert [moment.isoformat() for moment in found] == ["2026-11-01T01:00:00-04:00"]
    found = preview("0 * * * *", "America/New_York", after=datetime(2026, 11, 1, 4, 30, tzinfo=UTC), count=2)
    assert [moment.isoformat() for moment in found] == ["2026-11-01T01:00:00-04:00", "2026-11-01T01:00:00-05:00"]


def test_after_may_be_in_any_zone_and_is_not_included() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    assert preview("0 7 * * *", "UTC", after=noon, count=1) == [datetime(2026, 1, 2, 7, tzinfo=UTC)]
    assert preview("0 7 * * *", "UTC", after=noon - timedelta(microseconds=1), count=1) == [noon]


def test_after_in_the_second_pass_of_a_repeated_hour() -> None:
    after = datetime(2026, 11, 1, 1, 10, fold=1, tzinfo=ZoneInfo("America/New_York"))
    found = preview("30 1,3 * * *", "America/New_York", after=after, count=1)
    assert [moment.isoformat() for moment in found] == ["2026-11-01T03:30:00-05:00"]


def test_without_after_it_begins_now() -> None:
    before = datetime.now(UTC)
    (first,) = preview("* * * * * *", "UTC", count=1)
    assert before < first <= datetime.now(UTC) + timedelta(seconds=1)


def test_ten_are_shown_unless_asked_for_more_or_fewer() -> None:
    assert len(preview("* * * * *", "UTC")) == 10
    assert len(preview("* * * * *", "UTC", count=1_000)) == 1_000


def test_where_the_calendar_ends_there_are_fewer() -> None:
    after = datetime(9999, 12, 29, tzinfo=UTC)
    assert [moment.day for moment in preview("0 0 * * *", "UTC", after=after)] == [30, 31]
    assert preview("0 0 1 1 *", "UTC", after=after) == []
    found = preview("0 0 * * *", "Etc/GMT-14", after=after)
    assert found[-1].isoformat() == "9999-12-31T00:00:00+14:00"


@pytest.mark.parametrize(
    ("expression", "zone", "words"),
    [
        ("0 0 30 2 *", "UTC", "never occurs"),
        ("0 0 * * *", "PST", "PST"),
        ("0 0 * * *", None, "missing"),
        (None, "UTC", "str"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_with_the_reason(expression: Any, zone: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        preview(expression, zone, after=AFTER)


@pytest.mark.parametrize("count", [0, -1, 1_001, 10**30])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count must be from 1 to 1000"):
        preview("* * * * *", "UTC", count=count)


@pytest.mark.parametrize("count", [True, 1.0, "3", None])
def test_a_count_that_is_no_int_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match="count"):
        preview("* * * * *", "UTC", count=count)


def test_after_must_be_aware_and_not_before_1970() -> None:
    with pytest.raises(ValueError, match="naive"):
        preview("* * * * *", "UTC", after=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="1970"):
        preview("* * * * *", "UTC", after=datetime(1969, 12, 31, tzinfo=UTC))
    with pytest.raises(TypeError, match="after"):
        preview("* * * * *", "UTC", after="2026-01-01")  # type: ignore[arg-type]
