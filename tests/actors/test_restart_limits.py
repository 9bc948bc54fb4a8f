"""The arithmetic of restarts: intensity window and backoff. And the values that set them."""

# ruff: noqa: S311  jitter, not a secret

from __future__ import annotations

import math
from functools import partial
from random import Random
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from actors import Backoff, Child, Intensity
from actors.child import RestartLog

# Whole seconds as floats: the law is about the window, not about rounding.
gaps = st.lists(st.integers(0, 40).map(float), max_size=60)


@given(gaps=gaps, restarts=st.integers(0, 6), within=st.integers(1, 60).map(float))
def test_a_restart_is_allowed_exactly_when_the_window_has_room(gaps: list[float], restarts: int, within: float) -> None:
    log = RestartLog(Intensity(restarts, within), Backoff())
    now = 0.0
    allowed: list[float] = []
    for gap in gaps:
        now += gap
        in_window = [at for at in allowed if now - at < within]
        permitted = log.next_delay(now, 0, Random(1)) is not None
        assert permitted == (len(in_window) < restarts)
        if permitted:
            allowed.append(now)


@given(failures=st.integers(1, 10_000), seed=st.integers())
def test_a_delay_is_at_least_half_of_what_has_doubled_and_never_above_the_cap(failures: int, seed: int) -> None:
    longest = min(30.0, 0.1 * 2 ** min(failures - 1, 20))
    assert longest / 2 <= Backoff().delay(failures, Random(seed)) <= longest


def test_the_same_seed_gives_the_same_delays() -> None:
    backoff = Backoff()
    one, two = Random(7), Random(7)
    delays = [backoff.delay(n, one) for n in range(1, 10)]
    assert delays == [backoff.delay(n, two) for n in range(1, 10)]
    assert len(set(delays)) == 9


def test_the_backoff_doubles_while_failures_follow_each_other_and_starts_anew_after_health() -> None:
    log = RestartLog(Intensity(100, 60), Backoff(1, 1000))
    healthy = [0, 0, 60, 60.1, 0]
    delays = [log.next_delay(now, ran, Random(1)) for now, ran in enumerate(healthy)]
    unit = delays[0]
    assert unit is not None
    assert delays == pytest.approx([unit, 2 * unit, 4 * unit, unit, 2 * unit])


async def keyed(stop: int) -> None: ...


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Intensity(-1, 60), "restarts must be a whole number, 0 or more, not -1"),
        (lambda: Intensity(cast(int, 1.5), 60), "restarts must be a whole number, 0 or more, not 1.5"),
        (lambda: Intensity(1, 0), "within must be more than 0 seconds and finite, not 0"),
        (lambda: Intensity(1, math.inf), "within must be more than 0 seconds and finite, not inf"),
        (lambda: Backoff(-1), r"base must be 0 to cap \(30\) seconds, not -1"),
        (lambda: Backoff(2, 1), r"base must be 0 to cap \(1\) seconds, not 2"),
        (lambda: Backoff(0, math.nan), "cap must be 0 or more seconds and finite, not nan"),
        (lambda: Child("", trio.sleep_forever), "name must be a str that is not blank, not ''"),
        (lambda: Child("a", trio.sleep_forever, restart=cast(Any, "always")), "restart must be one of permanent, tra"),
        (lambda: Child("a", trio.sleep_forever, stop_timeout=-1), "stop_timeout must be 0 or more sec"),
        (
            lambda: Child("a", partial(keyed, stop=1)),
            "fn must leave stop to the supervisor",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_child_is_a_value() -> None:
    assert Child("a", trio.sleep_forever) == Child("a", trio.sleep_forever)
    assert Child("a", trio.sleep_forever) != Child("a", trio.sleep_forever, restart="temporary")
