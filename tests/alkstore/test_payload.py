"""What a payload and its headers may be, and that what comes back equals what was given."""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alkstore.errors import InvalidPayload
from alkstore.payload import JSON, MAX_PAYLOAD_BYTES, decode, encode, encode_headers

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=30,
)


def typed(value: JSON) -> Any:
    """The value with every leaf's type beside it: 1, 1.0 and True differ then, and so do 0.0 and -0.0."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return type(value), repr(value)


def nested(depth: int) -> JSON:
    value: JSON = 0
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# -------------------------------------------------------------------------------------- round trip


@given(json_values)
@example({"": {"\0": "a\0b", "\x1f\x7f\u2028": "🦉"}})
@example([True, 1, 1.0, False, 0, 0.0, -0.0, None, "", [], {}])
@example([2**53 + 1, 2**63, -(2**63) - 1, 10**30, 5e-324, 1.7976931348623157e308])
def test_what_comes_back_is_what_was_given(value: JSON) -> None:
    assert typed(decode(encode(value))) == typed(value)


@given(json_values)
def test_the_text_can_be_stored_by_both_engines(value: JSON) -> None:
    text = encode(value)
    assert "\0" not in text
    assert text.encode().decode() == text


def test_an_integer_of_4300_digits_survives() -> None:
    assert decode(encode([10**4300 - 1, 1 - 10**4300])) == [10**4300 - 1, 1 - 10**4300]


def test_the_order_of_keys_is_kept() -> None:
    assert list(decode(encode({"b": 1, "a": 2, "c": 3}))) == ["b", "a", "c"]


def test_a_subclass_of_dict_comes_back_equal() -> None:
    assert decode(encode(OrderedDict(a=1))) == OrderedDict(a=1)


def test_the_text_is_compact_and_keeps_characters() -> None:
    assert encode({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'


# --------------------------------------------------------------------------------------- rejection


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "payload must be a finite number, not nan"),
        ({"a": [0, math.inf]}, "payload['a'][1] must be a finite number, not inf"),
        ([-math.inf], "payload[0] must be a finite number, not -inf"),
        ([float("1e400")], "payload[0] must be a finite number, not inf"),
        ("\ud800", "payload holds a lone surrogate at position 0"),
        ({"a": {"b": "xy\udfff"}}, "payload['a']['b'] holds a lone surrogate at position 2"),
        ([os.fsdecode(b"\xff")], "payload[0] holds a lone surrogate at position 0"),
        ({"\udfff": 1}, "payload: the key '\\udfff' holds a lone surrogate at position 0"),
        ({"a": {1: 2}}, "payload['a']: a key must be a str, not int: 1"),
        ({None: 2}, "payload: a key must be a str, not NoneType: None"),
        ({True: 2}, "payload: a key must be a str, not bool: True"),
        ((1, 2), "payload must be a JSON value, not tuple; use a list"),
        ({"a": [(1,)]}, "payload['a'][0] must be a JSON value, not tuple; use a list"),
        ({"a": {1}}, "payload['a'] must be a JSON value, not set; use a list"),
        ([frozenset()], "payload[0] must be a JSON value, not frozenset; use a list"),
        (b"x", "payload must be a JSON value, not bytes"),
        ([datetime(2026, 1, 1, tzinfo=UTC)], "payload[0] must be a JSON value, not datetime"),
        ({"a": Decimal(1)}, "payload['a'] must be a JSON value, not Decimal"),
        (object(), "payload must be a JSON value, not object"),
        ([0, True, None, 10**4300], "payload[3] is an integer of more than 4300 digits"),
        ({"a": {"b": -(10**4300)}}, "payload['a']['b'] is an integer of more than 4300 digits"),
        (10**5000, "payload is an integer of more than 4300 digits"),
        ({10**5000: 1}, "payload: a key must be a str, not int"),
        ({Unshowable(): 1}, "payload: a key must be a str, not Unshowable"),
    ],
    ids=range(24),
)
def test_what_is_not_json_is_refused_with_its_path(value: object, text: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert str(caught.value).startswith(text)


def test_a_long_key_is_cut_in_the_path() -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode({"k" * 10_000: math.nan})
    assert len(str(caught.value)) < 200


def test_a_hundred_levels_are_stored() -> None:
    assert decode(encode(nested(100))) == nested(100)


def test_a_hundred_and_one_levels_are_refused() -> None:
    with pytest.raises(InvalidPayload, match="deeper than 100 levels"):
        encode(nested(101))


def test_an_empty_container_counts_as_a_level() -> None:
    deepest: JSON = []
    for _ in range(100):
        deepest = [deepest]
    with pytest.raises(InvalidPayload, match="deeper than 100 levels"):
        encode(deepest)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidPayload, match="deeper than 100 levels"):
        encode(loop)


def test_sixteen_mebibytes_are_stored() -> None:
    assert len(encode("a" * (MAX_PAYLOAD_BYTES - 2))) == MAX_PAYLOAD_BYTES


def test_a_byte_more_than_sixteen_mebibytes_is_refused() -> None:
    with pytest.raises(InvalidPayload, match=f"at most {MAX_PAYLOAD_BYTES} bytes of JSON, not {MAX_PAYLOAD_BYTES + 1}"):
        encode("a" * (MAX_PAYLOAD_BYTES - 1))


def test_the_size_is_counted_in_bytes_not_characters() -> None:
    with pytest.raises(InvalidPayload, match="at most"):
        encode("ü" * (MAX_PAYLOAD_BYTES // 2))


@pytest.fixture
def no_digit_limit() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("no_digit_limit")
def test_an_integer_that_another_process_could_not_read_is_refused() -> None:
    with pytest.raises(InvalidPayload, match=r"payload\[0\] is an integer of more than 4300 digits"):
        encode([10**4300])


def test_a_bad_payload_is_a_value_error_too() -> None:
    assert issubclass(InvalidPayload, ValueError)


# ----------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("headers", [None, {}])
def test_no_headers_are_stored_as_nothing(headers: object) -> None:
    assert encode_headers(headers) is None


@given(st.dictionaries(texts, texts, min_size=1))
def test_headers_come_back_equal(headers: dict[str, str]) -> None:
    text = encode_headers(headers)
    assert text is not None
    assert decode(text) == headers


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([("a", "b")], "headers must be a mapping from str to str, not list"),
        ("a=b", "headers must be a mapping from str to str, not str"),
        ({1: "b"}, "headers: a key must be a str, not int"),
        ({10**5000: "b"}, "headers: a key must be a str, not int"),
        ({"a": 1}, "headers['a'] must be a str, not int"),
        ({"a": None}, "headers['a'] must be a str, not NoneType"),
        ({"a": {"b": "c"}}, "headers['a'] must be a str, not dict"),
        ({"a": "\ud800"}, "headers['a'] holds a lone surrogate at position 0"),
        ({"\ud800": "a"}, "headers: the key '\\ud800' holds a lone surrogate at position 0"),
    ],
    ids=range(9),
)
def test_headers_that_are_not_flat_text_are_refused(headers: object, text: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode_headers(headers)
    assert str(caught.value).startswith(text)
