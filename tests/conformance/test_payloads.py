"""Payloads and headers: what comes back equals what was given, and all else is refused before it is written."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alkstore import InvalidPayload, JobHandle, Store
from tests.conformance.helpers import OpenStore, calm, claim, fresh, job, kill, refused, running, virtually

texts = st.text(st.characters(exclude_categories=["Cs"]))
payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are three values of JSON."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(payloads, min_size=1, max_size=10))
def test_what_comes_back_equals_what_was_given(open_engine_store: OpenStore, values: list[Any]) -> None:
    async def main() -> None:
        async with open_engine_store() as store:
            queue = store.queue(fresh("q"))
            await queue.enqueue_many(values)
            handles = await queue.claim("w", 100)
            assert same([handle.payload for handle in handles], values)

    virtually(main)


SPECIAL: list[Any] = [
    None,
    True,
    0,
    -0.0,
    1.0,
    "",
    [],
    {},
    {"": {"": []}},
    "x\0y",
    {"a": "x\0y", "k\0": 1},
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    10**30,
    10**4000,
    5e-324,
    1.7976931348623157e308,
    0.1,
    "\u2028\ufeff\uffff\U0010ffff",
    "'; DROP TABLE jobs; --",
    "\\u0000",
    [[[[[[[[[[]]]]]]]]]],
    {"b": 1, "a": 2},
]


async def in_a_claim(store: Store, value: Any) -> Any:
    await store.queue("q").enqueue(value)
    handle = await claim(store.queue("q"))
    await handle.ack()
    return handle.payload


async def in_a_look(store: Store, value: Any) -> Any:
    id = await store.queue("q").enqueue(value)
    found = await store.get_job(id)
    return None if found is None else found.payload


async def in_a_list(store: Store, value: Any) -> Any:
    id = await store.queue("q").enqueue(value)
    (found,) = await store.queue("q").list(after=id - 1)
    return found.payload


async def in_a_dead_letter(store: Store, value: Any) -> Any:
    (id,) = await kill(store.queue("q"), value)
    (found,) = await store.queue("q").dead(after=id - 1)
    return found.payload


async def in_a_schedule(store: Store, value: Any) -> Any:
    return (await store.schedule("s", "@every 1m", "q", value)).payload


async def in_a_message(store: Store, value: Any) -> Any:
    delivered: list[Any] = []

    async def deliver(message: JobHandle) -> None:
        delivered.append(message.payload)

    await store.outbox("o").enqueue(value)
    assert await store.outbox("o").run_once("w", deliver)
    return delivered[0]


@pytest.mark.parametrize(
    "place", [in_a_claim, in_a_look, in_a_list, in_a_dead_letter, in_a_schedule, in_a_message], ids=lambda f: f.__name__
)
async def test_special_values_survive(store: Store, place: Callable[[Store, Any], Awaitable[Any]]) -> None:
    """P01, P04."""
    for value in SPECIAL:
        assert same(await place(store, value), value)


async def test_the_order_of_keys_is_kept(store: Store) -> None:
    await store.queue("q").enqueue({"b": 1, "a": 2})
    assert list((await claim(store.queue("q"))).payload) == ["b", "a"]


async def test_a_payload_is_taken_as_it_was_at_the_call(store: Store) -> None:
    value = {"n": 1}
    id = await store.queue("q").enqueue(value)
    value["n"] = 2
    assert (await job(store.queue("q"), id)).payload == {"n": 1}


async def test_a_hundred_levels_are_stored(store: Store) -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    await store.queue("q").enqueue(value)
    assert (await claim(store.queue("q"))).payload == value


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


INVALID: dict[str, tuple[Any, str]] = {
    "NaN": (math.nan, "payload"),
    "infinity in a list": ([1, math.inf], "payload[1]"),
    "minus infinity in a dict": ({"a": {"b": -math.inf}}, "payload['a']['b']"),
    "overflow": (1e400, "payload"),
    "a lone surrogate": ("\ud800", "payload"),
    "a lone surrogate in a key": ({"\udfff": 1}, "payload"),
    "a file name that is not UTF-8": ([os.fsdecode(b"\xff")], "payload[0]"),
    "a key that is an int": ({1: 2}, "payload"),
    "a key that is None": ({"a": {None: 2}}, "payload['a']"),
    "a tuple": ((1, 2), "payload"),
    "a tuple inside": ({"a": [(1,)]}, "payload['a'][0]"),
    "a set": ({1}, "payload"),
    "bytes": (b"x", "payload"),
    "an object": ([object()], "payload[0]"),
    "101 levels": (nested(101), "payload"),
    "100,000 levels": (nested(100_000), "payload"),
    "more than 16 MiB": ("x" * (16 * 1024 * 1024), "payload"),
    "an integer that nobody can read back": (10**5000, "payload"),
}

WRITERS: dict[str, Callable[[Store, Any], Awaitable[object]]] = {
    "enqueue": lambda store, value: store.queue("q").enqueue(value),
    "enqueue_many": lambda store, value: store.queue("q").enqueue_many([1, value]),
    "schedule": lambda store, value: store.schedule("s", "@every 1m", "q", value),
    "outbox": lambda store, value: store.outbox("o").enqueue(value),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
async def test_anything_else_is_refused_before_anything_is_written(
    one_store: Store, write: Callable[[Store, Any], Awaitable[object]]
) -> None:
    """P02, P03: the error names the path inside the value."""
    for value, path in INVALID.values():
        error = await refused(InvalidPayload, lambda value=value: write(one_store, value))  # type: ignore[misc]
        assert isinstance(error, ValueError)
        assert path in str(error)
    assert (await one_store.queue("q").counts()).ready == 0


async def test_sixteen_mebibytes_less_the_quotes_are_stored(open_engine_store: OpenStore) -> None:
    async with open_engine_store() as store:
        value = "x" * (16 * 1024 * 1024 - 2)
        await store.queue("q").enqueue(value)
        assert (await claim(store.queue("q"))).payload == value


# ------------------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-ab-cd-01"}, {"": ""}, {"k\0": "x\0y", "é": "日本"}])
async def test_headers_travel_beside_the_payload(store: Store, headers: dict[str, str]) -> None:
    await store.queue("q").enqueue(1, headers=headers)
    handle = await claim(store.queue("q"))
    assert (handle.payload, handle.headers) == (1, headers)


async def test_without_headers_there_are_none(store: Store) -> None:
    await store.queue("q").enqueue(1)
    assert (await claim(store.queue("q"))).headers == {}


async def test_headers_of_enqueue_many_are_on_every_job(store: Store) -> None:
    await store.queue("q").enqueue_many([1, 2], headers={"a": "b"})
    assert [handle.headers for handle in await store.queue("q").claim("w", 2)] == [{"a": "b"}, {"a": "b"}]


@pytest.mark.parametrize(
    "headers",
    [{"a": 1}, {1: "a"}, {"a": {"b": "c"}}, {"a": None}, [("a", "b")], "a=b", {"a": "\ud800"}, {"\ud800": "a"}],
)
async def test_headers_that_are_not_flat_text_are_refused(one_store: Store, headers: Any) -> None:
    await refused(InvalidPayload, lambda: one_store.queue("q").enqueue(1, headers=headers))
    await refused(InvalidPayload, lambda: one_store.outbox("o").enqueue(1, headers=headers))


# -------------------------------------------------------------------------------------------------- error texts

ERRORS = {
    "NUL": "bad \0 byte",
    "surrogate": "bad \ud800 text",
    "file name": os.fsdecode(b"\xff.txt"),
    "long": "x" * 100_000,
    "long, of wide characters": "日" * 10_000,
    "empty": "",
}


@pytest.mark.parametrize("text", ERRORS.values(), ids=ERRORS)
async def test_an_error_text_may_hold_anything(store: Store, text: str) -> None:
    """P01, P03: the failure path itself must not fail."""
    (id,) = await kill(store.queue("q"), 1, error=text)
    error = (await job(store.queue("q"), id)).error
    assert error is not None
    error.encode()
    assert "\0" not in error
    assert len(error.encode()) <= 8 * 1024


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")

    __repr__ = __str__


@pytest.mark.parametrize(
    "error", [ValueError("bad \0 byte"), ValueError("\udc80"), Unprintable(), ValueError("x" * 10**6)], ids=range(4)
)
async def test_a_handler_may_fail_with_any_text(store: Store, error: Exception) -> None:
    """P01: the job is dead in the end, and never stuck."""
    queue = store.queue("q", max_attempts=2, backoff=1)
    id = await queue.enqueue(1)

    async def handler(_: object) -> None:
        raise error

    async with running(queue.work, handler):
        await calm()
        assert (await job(queue, id)).state == "delayed"
        await trio.sleep(1.5)
    dead = await job(queue, id)
    assert (dead.state, dead.reason) == ("dead", "attempts exhausted")
    assert type(error).__name__ in (dead.error or "")
