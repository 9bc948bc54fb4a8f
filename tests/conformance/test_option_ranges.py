"""Options: validated where they are built, before any round trip; the error names option, value and range."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from alkstore import JobHandle, ScheduleOpts, Snooze, StopToken, Store, open_store
from tests.conformance.helpers import OpenStore, claim, refused

TEN_YEARS = 10 * 365 * 86_400
SEVEN_DAYS = 7 * 86_400

Call = Callable[[Store, Any], Awaitable[object]]


async def _handle(store: Store) -> JobHandle:
    await store.queue("q").enqueue(1)
    return await claim(store.queue("q"))


async def _nothing(_: object) -> None:
    pass


async def _snooze(value: Any) -> None:
    Snooze(value)


async def _opts(**options: Any) -> None:
    ScheduleOpts(**options)


INTEGERS: dict[str, tuple[Call, str, int, int]] = {
    "priority": (lambda store, v: store.queue("q").enqueue(1, priority=v), "priority", -100, 100),
    "priority of many": (lambda store, v: store.queue("q").enqueue_many([1], priority=v), "priority", -100, 100),
    "priority of a message": (lambda store, v: store.outbox("o").enqueue(1, priority=v), "priority", -100, 100),
    "priority of a schedule": (lambda store, v: _opts(priority=v), "priority", -100, 100),
    "max_attempts": (lambda store, v: store.queue("q").enqueue(1, max_attempts=v), "max_attempts", 1, 10_000),
    "max_attempts of a handle": (
        lambda store, v: store.queue("q", max_attempts=v).enqueue(1), "max_attempts", 1, 10_000),
    "max_attempts of a schedule": (lambda store, v: _opts(max_attempts=v), "max_attempts", 1, 10_000),
    "limit of a claim": (lambda store, v: store.queue("q").claim("w", v), "limit", 1, 1_000),
    "limit of a list": (lambda store, v: store.queue("q").list(limit=v), "limit", 1, 1_000),
    "limit of dead letters": (lambda store, v: store.queue("q").dead(limit=v), "limit", 1, 1_000),
    "after of a list": (lambda store, v: store.queue("q").list(after=v), "after", 0, 2**63 - 1),
    "after of dead letters": (lambda store, v: store.queue("q").dead(after=v), "after", 0, 2**63 - 1),
    "id of get_job": (lambda store, v: store.queue("q").get_job(v), "id", 0, 2**63 - 1),
    "id of the store's get_job": (lambda store, v: store.get_job(v), "id", 0, 2**63 - 1),
    "id of cancel_job": (lambda store, v: store.queue("q").cancel_job(v), "id", 0, 2**63 - 1),
    "id of redrive": (lambda store, v: store.queue("q").redrive(v), "id", 0, 2**63 - 1),
    "concurrency": (
        lambda store, v: store.queue("q").work(_nothing, stop=_stopped(), concurrency=v), "concurrency", 1, 1_000),
}  # fmt: skip

SECONDS: dict[str, tuple[Call, str, float, float]] = {
    "delay": (lambda store, v: store.queue("q").enqueue(1, delay=v), "delay", 0, TEN_YEARS),
    "delay of a message": (lambda store, v: store.outbox("o").enqueue(1, delay=v), "delay", 0, TEN_YEARS),
    "delay of a snooze": (lambda store, v: _snooze(v), "delay", 0, TEN_YEARS),
    "expires": (lambda store, v: store.queue("q").enqueue(1, expires=v), "expires", 0, TEN_YEARS),
    "expires of a handle": (lambda store, v: store.queue("q", expires=v).enqueue(1), "expires", 0, TEN_YEARS),
    "expires of a schedule": (lambda store, v: _opts(expires=v), "expires", 0, TEN_YEARS),
    "visibility": (lambda store, v: store.queue("q", visibility=v).enqueue(1), "visibility", 0.1, SEVEN_DAYS),
    "backoff": (lambda store, v: store.queue("q", backoff=v).enqueue(1), "backoff", 0, 3_600),
    "lease of a claim": (lambda store, v: store.queue("q").claim("w", lease=v), "lease", 0.1, SEVEN_DAYS),
    "ttl": (lambda store, v: store.lock("l").acquire(v), "ttl", 0.1, SEVEN_DAYS),
    "age": (lambda store, v: store.queue("q").prune(v), "older_than", 0, TEN_YEARS),
    "timeout": (
        lambda store, v: store.queue("q").work(_nothing, stop=_stopped(), timeout=v), "timeout", 0.001, SEVEN_DAYS),
    "grace": (lambda store, v: store.queue("q").work(_nothing, stop=_stopped(), grace=v), "grace", 0, SEVEN_DAYS),
    "leadership_ttl": (lambda _, v: _open(leadership_ttl=v), "leadership_ttl", 0.1, SEVEN_DAYS),
    "busy_timeout": (lambda _, v: _open(busy_timeout=v), "busy_timeout", 0, 3_600),
    "transaction_timeout": (lambda _, v: _open(transaction_timeout=v), "transaction_timeout", 0.001, 3_600),
}  # fmt: skip

WAIT: tuple[Call, str, float, float] = (
    lambda store, v: store.queue("q").claim("w", wait=v), "wait", 0, SEVEN_DAYS)  # fmt: skip

OPTIONAL = {"delay", "delay of a message", "expires", "expires of a handle", "lease of a claim", "timeout"}
"""Where None has a meaning of its own."""


def _stopped() -> StopToken:
    stop = StopToken()
    stop.stop()
    return stop


async def _open(**options: Any) -> None:
    async with open_store(":memory:", inline=True, **options):
        pass


@pytest.mark.parametrize(("call", "option", "low", "high"), INTEGERS.values(), ids=INTEGERS)
async def test_an_integer_out_of_its_range_names_option_value_and_range(
    one_store: Store, call: Call, option: str, low: int, high: int
) -> None:
    """P04: a typed error at the call, not an overflow in the driver."""
    for value in (low - 1, high + 1, 2**63, -(2**63) - 1, 10**400):
        error = str(await refused(ValueError, lambda value=value: call(one_store, value)))  # type: ignore[misc]
        assert option in error
        assert str(low) in error
        assert str(high) in error.replace(",", "")
        assert (str(value) if abs(value) < 10**20 else "2**") in error.replace(",", "")


@pytest.mark.parametrize(("call", "option", "low", "high"), INTEGERS.values(), ids=INTEGERS)
async def test_what_is_not_an_integer_is_a_type_error(
    one_store: Store, call: Call, option: str, low: int, high: int
) -> None:
    """P04: True is none, and neither is 1.0."""
    for value in (True, 1.5, 1.0, "1", b"1", [1]):
        error = await refused(TypeError, lambda value=value: call(one_store, value))  # type: ignore[misc]
        assert option in str(error)
        assert repr(value) in str(error)


@pytest.mark.parametrize(("call", "option", "low", "high"), INTEGERS.values(), ids=INTEGERS)
async def test_the_ends_of_a_range_of_integers_are_in_it(
    one_store: Store, call: Call, option: str, low: int, high: int
) -> None:
    for value in (low, high):
        await call(one_store, value)


@pytest.mark.parametrize(("call", "option", "low", "high"), [*SECONDS.values(), WAIT], ids=[*SECONDS, "wait"])
async def test_seconds_out_of_their_range_name_option_value_and_range(
    one_store: Store, call: Call, option: str, low: float, high: float
) -> None:
    """P04."""
    too_low, too_high = low - 0.001, high + 0.001
    values: list[Any] = [too_low, too_high, 2**62, -(2**62), 10**400, math.inf, -math.inf, math.nan, timedelta.max]
    for value in values:
        error = str(await refused(ValueError, lambda value=value: call(one_store, value)))  # type: ignore[misc]
        assert option in error
        assert f"{low:g}" in error
        assert str(high) in error.replace(",", "")
        if value in (too_low, too_high):
            assert str(value) in error


@pytest.mark.parametrize(("call", "option", "low", "high"), [*SECONDS.values(), WAIT], ids=[*SECONDS, "wait"])
async def test_what_is_no_length_of_time_is_a_type_error(
    one_store: Store, call: Call, option: str, low: float, high: float
) -> None:
    for value in (True, "1", b"1", [1], 1j):
        error = await refused(TypeError, lambda value=value: call(one_store, value))  # type: ignore[misc]
        assert option in str(error)
        assert repr(value) in str(error)


@pytest.mark.parametrize(("call", "option", "low", "high"), SECONDS.values(), ids=SECONDS)
async def test_the_ends_of_a_range_of_seconds_are_in_it(
    one_store: Store, call: Call, option: str, low: float, high: float
) -> None:
    for value in (low, high, timedelta(seconds=low), timedelta(seconds=high)):
        await call(one_store, value)


async def test_a_claim_may_wait_for_seven_days(one_store: Store) -> None:
    assert await one_store.queue("q").claim("w", wait=SEVEN_DAYS) == []


@pytest.mark.parametrize("method", ["heartbeat", "retry", "snooze", "renew"])
async def test_what_extends_or_delays_a_lease_has_the_same_ranges(store: Store, method: str) -> None:
    held = await store.lock("l").acquire(10)
    assert held is not None
    handle = await _handle(store)
    call: Any = {
        "heartbeat": handle.heartbeat,
        "retry": lambda v: handle.retry(None, v),
        "snooze": handle.snooze,
        "renew": held.renew,
    }[method]
    low, high = (0, TEN_YEARS) if method in ("retry", "snooze") else (0.1, SEVEN_DAYS)
    for value in (low - 0.001, high + 0.001, math.nan):
        await refused(ValueError, lambda value=value: call(value))  # type: ignore[misc]
    await refused(TypeError, lambda: call("1"))
    assert await call(high)


async def test_a_state_to_list_is_one_of_four(one_store: Store) -> None:
    for state in ("running", "READY", "", None, 0):
        error = await refused(ValueError, lambda state=state: one_store.queue("q").list(state))  # type: ignore[misc]
        assert "'delayed', 'ready', 'leased' or 'dead'" in str(error)


@pytest.mark.parametrize("handler", [None, 1, "handler"])
async def test_a_handler_must_be_callable(one_store: Store, handler: Any) -> None:
    await refused(TypeError, lambda: one_store.queue("q").work(handler, stop=StopToken()))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"synchronous": "off"}, ValueError, "'full' or 'normal'"),
        ({"synchronous": None}, ValueError, "'full' or 'normal'"),
        ({"driver": "sqlite4"}, ValueError, "driver"),
        ({"clock": 1}, TypeError, "clock"),
    ],
)
async def test_an_option_of_the_store_is_refused_where_it_is_opened(
    open_engine_store: OpenStore, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        async with open_engine_store(**options):
            pass


@pytest.mark.parametrize(
    ("target", "kind"),
    [(None, TypeError), (7, TypeError), (b"app.db", TypeError), ("", ValueError), ("a\0b", ValueError)],
)
async def test_a_target_is_a_path(target: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="target"):
        async with open_store(target):
            pass
