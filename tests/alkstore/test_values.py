"""Options are validated where they are built; times go in as seconds and come out as aware datetimes."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore.every import MAX_MS
from alkstore.values import (
    SEVEN_DAYS_S,
    TEN_YEARS_S,
    Counts,
    ScheduleOpts,
    at,
    integer,
    milliseconds,
    moment,
)

# ----------------------------------------------------------------------------------------- integer


@pytest.mark.parametrize("value", [-100, 0, 100])
def test_an_integer_within_its_range_is_returned(value: int) -> None:
    assert integer(value, "priority", -100, 100) == value


@pytest.mark.parametrize("value", [-101, 101, 2**31, 2**63, -(2**63), 10**400, 10**5_000], ids=range(7))
def test_an_integer_out_of_range_names_option_and_range(value: int) -> None:
    with pytest.raises(ValueError, match=r"^priority must be from -100 to 100, not ") as caught:
        integer(value, "priority", -100, 100)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("value", [True, False, 1.5, 1.0, "1", None, Fraction(1), [1]])
def test_what_is_not_an_int_names_option_value_and_range(value: object) -> None:
    with pytest.raises(TypeError) as caught:
        integer(value, "max_attempts", 1, 10_000)
    assert str(caught.value) == f"max_attempts must be an int from 1 to 10000, not {value!r}"


# ------------------------------------------------------------------------------------ milliseconds


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0.1, 100),
        (1, 1_000),
        (1.0005, 1_000),
        (2.5, 2_500),
        (timedelta(seconds=1.5), 1_500),
        (timedelta(days=7), 604_800_000),
        (SEVEN_DAYS_S, 604_800_000),
    ],
)
def test_seconds_become_whole_milliseconds(value: float | timedelta, ms: int) -> None:
    assert milliseconds(value, "lease", 0.1, SEVEN_DAYS_S) == ms


@pytest.mark.parametrize(
    "value",
    [
        0,
        0.0999,
        -1,
        -math.inf,
        math.inf,
        math.nan,
        2**62,
        10**400,
        1e308,
        SEVEN_DAYS_S + 0.001,
        timedelta(0),
        timedelta(days=7, milliseconds=1),
        timedelta.max,
        timedelta.min,
    ],
    ids=range(14),
)
def test_seconds_out_of_range_name_option_and_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"^lease must be from 0\.1 to 604800 seconds, not ") as caught:
        milliseconds(value, "lease", 0.1, SEVEN_DAYS_S)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("value", [True, None, "1", Fraction(1), datetime(2026, 1, 1, tzinfo=UTC)], ids=range(5))
def test_what_is_neither_a_number_nor_a_timedelta_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^delay must be seconds \(int, float or timedelta\) from 0 to 315360000"):
        milliseconds(value, "delay", 0, TEN_YEARS_S)


@given(st.integers(0, TEN_YEARS_S * 1_000))
def test_a_number_and_a_timedelta_of_the_same_length_agree(ms: int) -> None:
    assert milliseconds(ms / 1_000, "delay", 0, TEN_YEARS_S) == ms
    assert milliseconds(timedelta(milliseconds=ms), "delay", 0, TEN_YEARS_S) == ms


# ----------------------------------------------------------------------------------------- moments


@given(st.integers(0, MAX_MS))
def test_a_moment_survives_the_way_out_and_back(ms: int) -> None:
    assert moment(at(ms), "run_at") == ms


def test_moments_are_shown_in_utc() -> None:
    assert at(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert at(0).tzinfo is UTC


def test_the_last_moment_of_the_year_9999_can_be_shown() -> None:
    assert at(MAX_MS) == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


def test_a_moment_in_another_zone_is_the_same_moment() -> None:
    assert moment(datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), "run_at") == 0


def test_a_part_of_a_millisecond_is_dropped() -> None:
    assert moment(datetime(1970, 1, 1, 0, 0, 0, 1_999, tzinfo=UTC), "run_at") == 1


@pytest.mark.parametrize("hours", [-23, 23])
def test_the_last_moment_of_any_zone_is_a_number(hours: int) -> None:
    last = datetime.max.replace(tzinfo=timezone(timedelta(hours=hours)))
    assert moment(last, "run_at") == MAX_MS - hours * 3_600_000


def test_a_naive_moment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^run_at must be an aware datetime .* is naive$"):
        moment(datetime(2026, 1, 1), "run_at")


@pytest.mark.parametrize(
    "value", [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), datetime.min.replace(tzinfo=UTC)]
)
def test_a_moment_before_1970_is_refused(value: datetime) -> None:
    with pytest.raises(ValueError, match=r"^run_at must not be before 1970"):
        moment(value, "run_at")


@pytest.mark.parametrize("value", [0, 1.5, "2026-01-01", None, datetime(2026, 1, 1, tzinfo=UTC).date()])
def test_what_is_not_a_datetime_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^run_at must be an aware datetime"):
        moment(value, "run_at")


# ------------------------------------------------------------------------------------ ScheduleOpts


def test_no_options_leave_everything_to_the_queue() -> None:
    assert ScheduleOpts() == ScheduleOpts(priority=None, max_attempts=None, expires=None)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": -100},
        {"priority": 100},
        {"max_attempts": 1},
        {"max_attempts": 10_000},
        {"expires": 0},
        {"expires": TEN_YEARS_S},
        {"expires": timedelta(days=3650)},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_options(options: dict[str, Any]) -> None:
    ScheduleOpts(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": -101}, ValueError),
        ({"priority": 101}, ValueError),
        ({"priority": True}, TypeError),
        ({"priority": 1.0}, TypeError),
        ({"max_attempts": 0}, ValueError),
        ({"max_attempts": 10_001}, ValueError),
        ({"max_attempts": False}, TypeError),
        ({"expires": -0.001}, ValueError),
        ({"expires": TEN_YEARS_S + 1}, ValueError),
        ({"expires": math.nan}, ValueError),
        ({"expires": True}, TypeError),
        ({"expires": "60"}, TypeError),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_where_it_is_built(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{next(iter(options))} must be "):
        ScheduleOpts(**options)


@pytest.mark.parametrize("value", [ScheduleOpts, lambda: Counts(0, 0, 0, 0)])
def test_values_are_frozen(value: Callable[[], Any]) -> None:
    found = value()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(found, attrs.fields(type(found))[0].name, 1)
