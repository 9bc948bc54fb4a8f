"""What may be written in a cron expression, and what the refusal says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alkstore.cron.expression import MAX_BYTES, next_after, parse, timetable
from alkstore.errors import InvalidSpec

REJECTED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "cron_reject.json").read_text(encoding="utf-8")
)


def refusal(expression: object) -> str:
    with pytest.raises(InvalidSpec) as caught:
        parse(expression)
    assert caught.value.spec is expression
    return str(caught.value)


# ---------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize(
    "expression",
    [
        "* * * * *",
        "* * * * * *",
        "05 04 * * *",
        "000000000000000005 4 * * *",
        "\t0  0\t* * * ",
        "0 0 ? * MON",
        "0 0 1 * ?",
        "0 0 ? * ?",
        "0 0 * jan-Mar mOn,FRI",
        "0 0 L * *",
        "0 0 l * *",
        "0 0 LW * *",
        "0 0 1,L * *",
        "0 0 * * 0L,5L",
        "0 0 * * MON#1,7#5",
        "*/60 */24 */31 */12 */7",
        "*/60 * * * * *",
        "0/15 8-18/2 * * 1-5",
        "0-59 0-23 1-31 1-12 0-7",
        "0 0 31 4,5 *",
        "0 0 29 2 *",
        "0 0 * 2 MON#5",
        "0 0 31 2 MON",
    ],
)
def test_an_expression_is_taken(expression: str) -> None:
    assert parse(expression).text == expression


def test_the_longest_expression_is_taken_and_one_byte_more_is_not() -> None:
    longest = "0 0 * * " + ",".join(["1"] * ((MAX_BYTES - 7) // 2))
    longest += " " * (MAX_BYTES - len(longest))
    assert len(longest) == MAX_BYTES
    assert parse(longest).text == longest
    assert "at most 768 bytes" in refusal(longest + " ")


def test_every_value_of_every_field_fits_into_one_expression() -> None:
    lists = [range(60), range(60), range(24), range(1, 32), range(1, 13), range(8)]
    assert parse(" ".join(",".join(map(str, values)) for values in lists)).fixed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("05 04 * * *", "5 4 * * *"),
        ("0 0 ? * MON", "0 0 * * MON"),
        ("0 0 15 * ?", "0 0 15 * *"),
        ("0 5 4 * * *", "5 4 * * *"),
        ("0 0 * * 7", "0 0 * * 0"),
        ("0 0 * * 5-7", "0 0 * * FRI,SAT,SUN"),
        ("0 0 * mar-may *", "0 0 * 3-5 *"),
        ("5-5/2 * * * *", "5 * * * *"),
        ("0 5-5/2 * * * *", "0 5 * * * *"),
        ("0 0 7-7/1 * *", "0 0 7 * *"),
        ("50/5 * * * *", "50,55 * * * *"),
        ("*/59 * * * *", "0,59 * * * *"),
        ("*/60 * * * *", "0-0 * * * *"),
    ],
)
def test_two_ways_of_writing_mean_the_same(one: str, other: str) -> None:
    moment = 1_800_000_000_000
    for _ in range(40):
        following = next_after(one, "UTC", moment)
        assert following is not None
        assert following == next_after(other, "UTC", moment)
        moment = following


@pytest.mark.parametrize(
    ("expression", "fixed"),
    [
        ("30 2 * * *", True),
        ("0 30 2 * * *", True),
        ("* 30 2 * * *", True),
        ("0/10 2,3 * * *", True),
        ("0-59 0-23 * * *", True),
        ("30 * * * *", False),
        ("* 2 * * *", False),
        ("*/5 2 * * *", False),
        ("30 */2 * * *", False),
        ("0 */5 2 * * *", False),
    ],
)
def test_a_star_in_front_of_the_minute_or_hour_makes_a_wildcard(expression: str, fixed: bool) -> None:
    assert parse(expression).fixed is fixed


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: repr(case["expr"]))
def test_what_the_vectors_refuse_is_refused(case: dict[str, Any]) -> None:
    assert ("never occurs" in refusal(case["expr"])) == (case["why"] == "no occurrence")


@pytest.mark.parametrize(
    "expression",
    [
        "+5 * * * *",
        "1_0 * * * *",
        "\u0663 * * * *",
        "\uff15 * * * *",
        "0x10 * * * *",
        "-1 * * * *",
        "5.0 * * * *",
        "1e1 * * * *",
        "999999999999 * * * *",
        "*/99999999999999999999 * * * *",
        "1" * 700 + " * * * *",
        "0 0 * * " + ",".join(["1"] * 20_000),
    ],
)
def test_only_plain_digits_within_the_range_are_a_number(expression: str) -> None:
    start = time.process_time()
    refusal(expression)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    "expression",
    [
        " ",
        "\n",
        "* * * * * * *",
        "0 0 * * *\n",
        "0 0\n* * *",
        "0 0\u00a0* * *",
        "0 0 * * *\x00",
        "0 0 * * *\x0b",
        "0 0 * * * # nightly",
        "\ud800 * * * *",
        "@daily",
        "@reboot",
        " @hourly",
        "TZ=UTC 0 0 * * *",
        "CRON_TZ=Europe/Berlin 0 0 * * *",
        "*/0 * * * *",
        "0/0 * * * *",
        "*/ * * * *",
        "*/-5 * * * *",
        "*/5/5 * * * *",
        "*-5 * * * *",
        "** * * * *",
        "1-2-3 * * * *",
        "-5 * * * *",
        "1,,2 * * * *",
        "1, * * * *",
        ", * * * *",
        "H * * * *",
        "JAN * * * *",
        "60 * * * *",
        "60 * * * * *",
        "0 0 0 * *",
        "0 0 * 13 *",
        "0 0 * * 8",
        "0 0 * JANUARY *",
        "0 0 * FEBR *",
        "0 0 * MON *",
        "0 0 * * JAN",
        "0 0 * NOV-FEB *",
        "0 0 * * FRI-SUN",
        "0 0 * * SAT-MON",
        "0 22-2 * * *",
        "*/61 * * * * *",
        "0 */25 * * *",
        "0 0 */32 * *",
        "0 0 * */13 *",
        "0 0 * * */8",
        "0 0 W * *",
        "0 0 1W * *",
        "0 0 WL * *",
        "0 0 L-1 * *",
        "0 0 L/2 * *",
        "0 0 1-L * *",
        "0 0 15#1 * *",
        "0 0 * L *",
        "L 0 * * *",
        "0 0 * * LW",
        "0 0 * * 5W",
        "0 0 * * 8L",
        "0 0 * * FRIL",
        "0 0 * * 5L/2",
        "0 0 * * 1#0",
        "0 0 * * 1#",
        "0 0 * * #1",
        "0 0 * * 1#1#1",
        "0 0 * * 1#1/2",
        "0 0 * * 1-2#1",
        "0 0 ?/2 * *",
        "0 0 1,? * *",
        "0 0 ?? * *",
        "0 0 * ? *",
        "0 ? * * *",
        "? 0 0 * * *",
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    refusal(expression)


@pytest.mark.parametrize("expression", [None, 5, b"* * * * *", ["*"] * 5, object()])
def test_what_is_no_text_is_refused(expression: object) -> None:
    assert "is a str, not" in refusal(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 30 2 *",
        "0 0 31 2 *",
        "0 0 31 4 *",
        "0 0 31 2,4,6 *",
        "0 0 30,31 FEB ?",
        "0 0 0 30 2 *",
        "0 0 31 9/2 *",
        "* * */20 * 1L",
        "0 0 */31 * MON#5",
        "0 0 */30 2 MON#5",
        "*/5 0-23 31 2 */2",
    ],
)
def test_a_day_that_never_comes_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    assert "never occurs" in refusal(expression)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("* 2 * 3 7L", "Europe/Berlin"),
        ("*/10 2 * 3 SUN#2", "America/New_York"),
        ("0 */10 2 * 3 SUN#2", "America/New_York"),
    ],
)
def test_times_that_the_clock_always_skips_are_refused_in_their_zone(expression: str, zone: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidSpec, match="never occurs in"):
        timetable(expression, zone)
    assert time.process_time() - start < 0.1
    timetable(expression, "UTC")


def test_the_same_times_as_fixed_times_do_occur_at_the_end_of_the_gap() -> None:
    assert next_after("0-59 2 * 3 7L", "Europe/Berlin", 1_767_225_600_000) == 1_774_746_000_000  # 2026-03-29 01:00 UTC


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("99 * * * *", ["minute field '99'", "'99' is not within 0 to 59"]),
        ("61 * * * * *", ["second field '61'", "0 to 59"]),
        ("0 24 * * *", ["hour field '24'", "0 to 23"]),
        ("0 0 32 * *", ["day-of-month field '32'", "1 to 31", "L for the last day"]),
        ("0 0 * 13 *", ["month field '13'", "1 to 12", "JAN to DEC"]),
        ("0 0 * * monday", ["day-of-week field 'monday'", "SUN to SAT"]),
        ("0 0 * * FRI-MON", ["the range 'FRI-MON' runs backwards"]),
        ("*/61 * * * *", ["'61' is not within 1 to 60", "a step */n"]),
        ("1,,2 * * * *", ["an item of its list is empty"]),
        ("1- * * * *", ["a value is missing"]),
        ("1/ * * * *", ["a step is missing"]),
        ("0 0 * * 1#6", ["'6' is not within 1 to 5"]),
        ("* * * *", ["has 4", "5 fields", "6 with seconds first"]),
        ("@daily", ["macros", "'0 0 * * *'"]),
        ("\u0663 * * * *", ["ASCII", "\\u0663", "position 0"]),
        ("0 0 30 2 *", ["day-of-month '30'", "month '2'"]),
    ],
)
def test_the_refusal_names_the_field_its_value_and_what_is_allowed(expression: str, words: list[str]) -> None:
    text = refusal(expression)
    assert [word for word in words if word not in text] == []


def test_a_refusal_stays_short() -> None:
    assert len(refusal("9" * 700 + " * * * *")) < 800
    assert len(refusal("\u0663" * 700)) < 800


@given(st.text(alphabet="0123456789*/,-?LW#@ \tMONJAFEB\n\u0663", max_size=40) | st.text(max_size=40))
@example("")
@example("* * * * * *")
def test_a_text_is_an_expression_or_an_invalid_spec(text: str) -> None:
    try:
        expression = parse(text)
    except InvalidSpec:
        return
    found = expression.first(0)
    assert found is not None
    assert found >= 0
