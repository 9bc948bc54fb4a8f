"""The failure path never fails: any error becomes a text that both engines can store."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alkstore.payload import MAX_ERROR_BYTES, describe, storable


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class EndlessTextError(Exception):
    def __str__(self) -> str:
        return str(self)


class NotATextError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307


def test_an_error_is_named_with_its_text() -> None:
    assert describe(ValueError("no such address")) == "ValueError: no such address"


def test_an_error_without_text_is_its_name() -> None:
    assert describe(TimeoutError()) == "TimeoutError"


def test_every_leaf_of_nested_groups_is_named_in_order() -> None:
    group = ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError("b"), OSError("c")]), TypeError("d")])
    assert describe(group) == "ValueError: a; KeyError: 'b'; OSError: c; TypeError: d"


def test_a_base_exception_in_a_group_is_named_too() -> None:
    assert (
        describe(BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("a")])) == "KeyboardInterrupt; ValueError: a"
    )


def test_groups_nested_deeper_than_the_stack_are_described() -> None:
    error: Exception = ValueError("leaf")
    for _ in range(5_000):
        error = ExceptionGroup("g", [error])
    assert describe(error) == "ValueError: leaf"


@pytest.mark.parametrize("error", [BrokenTextError(), EndlessTextError(), NotATextError()])
def test_an_error_whose_text_fails_is_named_all_the_same(error: Exception) -> None:
    assert describe(error).startswith(f"{type(error).__name__} (its text cannot be shown: ")


def test_a_broken_leaf_does_not_hide_the_others() -> None:
    text = describe(ExceptionGroup("g", [BrokenTextError(), ValueError("a")]))
    assert text == "BrokenTextError (its text cannot be shown: ZeroDivisionError); ValueError: a"


@pytest.mark.parametrize("character", [chr(0), chr(0xD800), chr(0xDCFF)], ids=ascii)
def test_what_cannot_be_stored_in_an_error_is_replaced(character: str) -> None:
    text = describe(ValueError(f"bad {character} byte"))
    assert character not in text
    assert text.startswith("ValueError: bad ")
    assert text.endswith(" byte")


def test_a_long_text_is_cut_and_shows_it() -> None:
    text = storable("x" * 10_000)
    assert len(text.encode()) == MAX_ERROR_BYTES
    assert text.endswith("x…")


def test_a_text_of_the_greatest_size_is_kept() -> None:
    assert storable("x" * MAX_ERROR_BYTES) == "x" * MAX_ERROR_BYTES


@pytest.mark.parametrize("shift", range(4))
def test_a_cut_never_splits_a_character(shift: int) -> None:
    text = storable("x" * shift + "🦉" * 5_000)
    assert set(text) == {"🦉", "…"} | ({"x"} if shift else set())
    assert MAX_ERROR_BYTES - 4 < len(text.encode()) <= MAX_ERROR_BYTES


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (None, "None"), (ValueError("a"), "ValueError: a")])
def test_what_is_not_a_str_is_shown_as_one(value: object, text: str) -> None:
    assert storable(value) == text


@given(st.text(st.characters()) | st.text(st.sampled_from("a\0\ud800🦉"), max_size=4).map(lambda part: part * 4_000))
@example("\ud83e\udd89")
def test_any_str_becomes_storable(text: str) -> None:
    stored = storable(text)
    assert "\0" not in stored
    assert len(stored.encode()) <= MAX_ERROR_BYTES


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=2_000))
def test_a_text_that_can_be_stored_is_kept_as_it_is(text: str) -> None:
    assert storable(text) == text
