"""Errors keep their shape, and a last write is shielded and bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors.unwinding import (
    LAST_WRITE_WITHIN,
    TOLD_BEFORE,
    Alone,
    last_write,
    leaves,
    may_repeat,
    part,
    shown,
    write_within,
)

Group = BaseExceptionGroup


class Lost(Exception):
    pass


def cancelled() -> trio.Cancelled:
    return trio.Cancelled._create(source="explicit")


def leave(error: BaseException, *kinds: type[BaseException]) -> BaseException:
    """What leaves `Alone` when `error` arrives in it."""
    with pytest.raises(BaseException) as caught, Alone(*kinds):  # noqa: PT011  any
        raise error
    return caught.value


first, second = ValueError("first"), ValueError("second")
lost, lost_too = Lost(), Lost()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (first, first),
        (Group("", [first]), first),
        (Group("", [Group("", [first])]), first),
        (Group("", [Group("", [first]), cancelled()]), first),
        (Group("", [Group("", [lost]), lost_too, cancelled()]), lost),
        (inner := Group("", [first, second]), inner),
        (Group("", [inner]), inner),
        (both := Group("", [lost, first]), both),
        (only := cancelled(), only),
        (Group("", [only]), only),
        (two := Group("", [cancelled(), cancelled()]), two),
        (interrupted := Group("", [lost, KeyboardInterrupt()]), interrupted),
    ],
)
def test_what_is_alone_leaves_alone(error: BaseException, expected: BaseException) -> None:
    assert leave(error, Lost) is expected


def test_of_several_kinds_the_earliest_leaves_and_the_others_are_noted_on_it() -> None:
    busy, away = OSError("busy"), OSError("away")
    left = leave(Group("", [busy, Group("", [Lost(), away]), OSError("busy")]), Lost, OSError)
    assert isinstance(left, Lost)
    assert left.__notes__ == ["besides: OSError('busy')", "besides: OSError('away')"]
    assert not hasattr(leave(Group("", [lost, lost_too]), Lost), "__notes__")


def test_an_error_is_not_chained_to_the_group_it_came_in() -> None:
    error = ValueError()
    error.__cause__ = cause = KeyError()
    error.__context__ = context = OSError()
    left = leave(Group("", [error]))
    assert left.__cause__ is cause
    assert left.__context__ is context


@pytest.mark.parametrize(("seconds", "within"), [(-100, 15), (0, 15), (5, 20)])
async def test_a_write_has_its_time_and_a_little_more(autojump_clock: MockClock, seconds: float, within: float) -> None:
    """Although its time may have been over for long, as that of a lease when the machine was suspended."""
    await write_within(seconds, "writing", partial(trio.sleep, within - 1))
    with pytest.raises(trio.TooSlowError, match=f"^writing took more than {within:g} s$"):
        await write_within(seconds, "writing", trio.sleep_forever)
    assert trio.current_time() == 2 * within - 1


async def test_a_write_that_is_repeated_ends_before_its_time_is_over(autojump_clock: MockClock) -> None:
    async def write() -> None:
        while may_repeat():  # noqa: ASYNC110 - nobody else is here
            await trio.sleep(1)
        raise OSError("busy")

    with trio.move_on_after(0), pytest.raises(BaseExceptionGroup) as caught:
        await write_within(100, "writing", write, trio.Cancelled._create(source="explicit"))
    assert [type(error) for error in caught.value.exceptions] == [trio.Cancelled, OSError]
    assert trio.current_time() == LAST_WRITE_WITHIN - TOLD_BEFORE
    assert may_repeat()


async def test_a_last_write_is_not_cancelled_but_cannot_hang(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1) as outer:
        with last_write("writing"):
            await trio.sleep(LAST_WRITE_WITHIN - 1)
        with pytest.raises(trio.TooSlowError, match=r"^writing took more than 15 s$"), last_write("writing"):
            await trio.sleep(math.inf)
        await trio.lowlevel.checkpoint()
    assert outer.cancelled_caught


@pytest.mark.parametrize("leaving", [KeyboardInterrupt(), ValueError()])
def test_a_last_write_raises_what_the_actor_leaves_with(leaving: BaseException) -> None:
    async def main() -> None:
        with last_write("writing", leaving):
            await trio.lowlevel.checkpoint()

    with pytest.raises(type(leaving)) as caught:
        trio.run(main)
    assert caught.value is leaving


def test_a_last_write_that_fails_hides_nothing() -> None:
    leaving, error = KeyboardInterrupt(), OSError()

    async def main() -> None:
        with last_write("writing", leaving):
            raise error

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert caught.value.exceptions == (leaving, error)


# Groups may be nested more deeply than the interpreter's stack, and their classes may have code of their own.


class Underivable(ExceptionGroup[Exception]):
    def derive(self, _: object) -> Any:
        raise OSError


class Lying(ExceptionGroup[Exception]):
    def subgroup(self, _: object) -> Any:
        raise OSError


class Unshown(Exception):
    def __repr__(self) -> str:
        raise OSError


def deep(*errors: BaseException) -> BaseException:
    group = Group("", errors)
    for _ in range(5_000):
        group = Group("", [group])
    return group


def is_first(error: BaseException) -> bool:
    return error is first


@pytest.mark.parametrize("make", [lambda *errors: Group("", errors), deep, lambda *errors: Underivable("", errors)])
def test_the_parts_of_a_group_are_found_whatever_it_is(make: Callable[..., BaseException]) -> None:
    error = make(first, second)
    assert list(leaves(error)) == [first, second]
    found = part(error, is_first)
    assert isinstance(found, ExceptionGroup)
    assert list(leaves(found)) == [first]
    assert part(error, lambda _: True) is error
    assert part(error, lambda _: False) is None


def test_a_group_that_cannot_be_divided_is_taken_apart() -> None:
    found = part(Lying("", [first, second]), is_first)
    assert found is not None
    assert list(leaves(found)) == [first]


def test_parts_keep_the_shape_that_they_had() -> None:
    found = part(Group("outer", [Group("inner", [first]), second]), is_first)
    assert isinstance(found, Group)
    assert isinstance(found.exceptions[0], Group)


def test_what_is_deep_and_alone_leaves_alone() -> None:
    assert leave(deep(first)) is first


def test_an_error_is_shown_whatever_it_does() -> None:
    assert shown(first) == "ValueError('first')"
    assert "Unshown" in shown(Unshown())
    assert "Group" in shown(deep(first))
