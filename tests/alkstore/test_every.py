"""The grammar of a spec, and the arithmetic of its grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore.errors import InvalidSpec
from alkstore.every import CATCH_UP_LIMIT, catch_up, first_after, parse_every

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "catchup.json").read_text(encoding="utf-8")
)["cases"]

T = 1_800_000_000_000
moments = st.integers(0, 4_000_000_000_000)
intervals = st.integers(1, 10**12) | st.sampled_from([1_000, 60_000, 3_600_000, 86_400_000])


# ----------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("spec", "interval"),
    [
        ("@every 1s", 1_000),
        ("@every 15m", 900_000),
        ("@every 2h", 7_200_000),
        ("@every 1d", 86_400_000),
        ("@every 60s", 60_000),
        ("@every 007s", 7_000),
        ("@every 000000000001s", 1_000),
        ("@every 999999999999d", 999_999_999_999 * 86_400_000),
    ],
)
def test_a_spec_is_an_interval(spec: str, interval: int) -> None:
    assert parse_every(spec) == interval


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "@every",
        "@every ",
        "@every m",
        "@every 15",
        "@every15m",
        "every 15m",
        "@every  15m",
        "@every\t15m",
        "@every\u00a015m",
        " @every 15m",
        "@every 15m ",
        "@every 15m\n",
        "\n@every 15m",
        "@every 15 m",
        "@every 15M",
        "@Every 15m",
        "@EVERY 15m",
        "@every 15S",
        "@every 15w",
        "@every 15ms",
        "@every 15mm",
        "@every 1h30m",
        "@every 0s",
        "@every 000000000000d",
        "@every +1s",
        "@every -1s",
        "@every 1.5h",
        "@every 1e3s",
        "@every 1_000s",
        "@every 1,000s",
        "@every 0x10s",
        "@every 1000000000000s",
        "@every ١٥m",  # ARABIC-INDIC
        "@every １５m",  # full width
        "@every 1²s",
        "@every 15\0m",
        "@every 15m\0",
        "\ufeff@every 15m",
        "＠every 15m",
        "@every \ud800m",
        "@hourly",
        "*/5 * * * *",
        "@every 15m" * 1_000,
    ],
    ids=ascii,
)
def test_anything_else_is_refused_and_kept_in_the_error(spec: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_every(spec)
    assert caught.value.spec == spec
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("spec", [None, 15, 1.5, True, b"@every 15m", ["@every 15m"], 10**5_000], ids=range(7))
def test_what_is_not_a_str_is_refused(spec: object) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_every(spec)
    assert caught.value.spec is spec


@given(st.text(st.characters()) | st.from_regex(r"@every [0-9]{0,14}.", fullmatch=True))
def test_a_str_is_an_interval_of_at_least_a_second_or_an_invalid_spec(spec: str) -> None:
    try:
        interval = parse_every(spec)
    except InvalidSpec:
        return
    digits, unit = spec.removeprefix("@every ")[:-1], spec[-1]
    assert spec.isascii()
    assert interval == int(digits) * {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}[unit]
    assert interval >= 1_000


# -------------------------------------------------------------------------------------------- grid


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['interval_s']}s+{case['now'] - case['next_fire_at']}")
def test_catch_up_agrees_with_the_vector(case: dict[str, Any]) -> None:
    owed = catch_up(case["next_fire_at"] * 1000, case["interval_s"] * 1000, case["now"] * 1000)
    assert (len(owed.boundaries), owed.skipped) == (case["fired"], case["skipped"])
    assert owed.next_fire_at == case["next_after"] * 1000
    if case["fired"]:
        assert (owed.boundaries[0], owed.boundaries[-1]) == (case["first"] * 1000, case["last"] * 1000)


def test_a_boundary_that_equals_now_is_due() -> None:
    assert list(catch_up(T, 60_000, T).boundaries) == [T]


def test_a_boundary_one_millisecond_ahead_is_not_due() -> None:
    owed = catch_up(T, 60_000, T - 1)
    assert (list(owed.boundaries), owed.skipped, owed.next_fire_at) == ([], 0, T)


@given(moments, intervals, moments)
def test_the_next_boundary_is_on_the_grid_and_after_now(cursor: int, interval: int, now: int) -> None:
    owed = catch_up(cursor, interval, now)
    assert owed.next_fire_at > now
    assert (owed.next_fire_at - cursor) % interval == 0


@given(moments, intervals, moments)
def test_the_next_boundary_is_the_first_after_now_unless_none_was_due(cursor: int, interval: int, now: int) -> None:
    owed = catch_up(cursor, interval, now)
    assert owed.next_fire_at == (cursor if cursor > now else first_after(cursor, interval, now))


@given(moments, intervals, moments)
def test_every_due_boundary_is_fired_or_skipped_once(cursor: int, interval: int, now: int) -> None:
    owed = catch_up(cursor, interval, now)
    assert (len(owed.boundaries) + owed.skipped) * interval == owed.next_fire_at - cursor


@given(moments, intervals, moments)
def test_the_oldest_fire_and_never_more_than_the_limit(cursor: int, interval: int, now: int) -> None:
    owed = catch_up(cursor, interval, now)
    fired = list(owed.boundaries)
    assert fired == [cursor + n * interval for n in range(len(fired))]
    assert len(fired) <= CATCH_UP_LIMIT
    assert not owed.skipped or len(fired) == CATCH_UP_LIMIT
    assert all(boundary <= now for boundary in fired)


@given(moments, intervals, st.lists(st.integers(0, 10**12), max_size=8))
def test_two_ticks_owe_what_one_would_while_nothing_is_skipped(cursor: int, interval: int, steps: list[int]) -> None:
    at_once = catch_up(cursor, interval, cursor + sum(steps))
    if at_once.skipped:
        return
    fired: list[int] = []
    now, position = cursor, cursor
    for step in [0, *steps]:
        now += step
        owed = catch_up(position, interval, now)
        fired += owed.boundaries
        position = owed.next_fire_at
    assert (fired, position) == (list(at_once.boundaries), at_once.next_fire_at)


@given(moments, intervals, moments)
def test_a_second_tick_at_the_same_moment_owes_nothing(cursor: int, interval: int, now: int) -> None:
    after = catch_up(cursor, interval, now).next_fire_at
    again = catch_up(after, interval, now)
    assert (list(again.boundaries), again.skipped, again.next_fire_at) == ([], 0, after)


@given(moments, intervals, moments)
def test_the_first_after_is_within_one_interval(cursor: int, interval: int, now: int) -> None:
    boundary = first_after(cursor, interval, now)
    assert now < boundary <= now + interval
    assert (boundary - cursor) % interval == 0
