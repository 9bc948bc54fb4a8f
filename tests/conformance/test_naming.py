"""Names: the same rules at every entry point that takes one, before any round trip."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from alkstore import InvalidName, ReservedName, Store
from tests.conformance.helpers import claim, refused


async def _never(_: object) -> None:
    raise AssertionError


ENTRANCES: dict[str, Callable[[Store, str], Awaitable[object]]] = {
    "queue": lambda store, name: store.queue(name).enqueue(1),
    "lock": lambda store, name: store.lock(name).acquire(1),
    "outbox": lambda store, name: store.outbox(name).enqueue(1),
    "schedule": lambda store, name: store.schedule(name, "@every 1m", "q"),
    "queue of a schedule": lambda store, name: store.schedule("s", "@every 1m", name),
    "unschedule": lambda store, name: store.unschedule(name),
    "worker of a claim": lambda store, name: store.queue("q").claim(name),
    "worker of an iteration": lambda store, name: anext(store.queue("q").jobs(name)),
    "worker of an outbox": lambda store, name: store.outbox("o").run_once(name, _never),
    "key": lambda store, name: store.queue("q").enqueue(1, key=name),
    "key of a message": lambda store, name: store.outbox("o").enqueue(1, key=name),
}

INVALID = {
    "not a str": 7,
    "bytes": b"q",
    "empty": "",
    "blank": " \t",
    "wide blank": "\u3000",
    "NUL": "a\0b",
    "newline": "a\nb",
    "delete": "a\x7fb",
    "C1 control": "a\x85b",
    "high surrogate": "a\ud800",
    "low surrogate": "\udfffa",
    "256 bytes": "a" * 256,
    "256 bytes in fewer characters": "é" * 128,
    "ten kilobytes": "x" * 10_240,
}

RESERVED = {
    "an outbox": "__alkstore_outbox:mail",
    "the leader's lock": "__alkstore_scheduler",
    "the runs": "__alkstore_runs",
    "the bare prefix": "__alkstore_",
    "other case": "__ALKSTORE_x",
    "mixed case": "__AlkStore_x",
    "full width": "\uff3f\uff3f\uff41\uff4c\uff4b\uff53\uff54\uff4f\uff52\uff45\uff3f",
    "long s": "__alk\u017ftore_x",
    "Kelvin sign": "__al\u212astore_x",
    "mathematical capitals": "__\U0001d400\U0001d40b\U0001d40a\U0001d412\U0001d413\U0001d40e\U0001d411\U0001d404_x",
    "mathematical": "__\U0001d41a\U0001d425\U0001d424\U0001d42c\U0001d42d\U0001d428\U0001d42b\U0001d41e_x",
}


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
async def test_an_invalid_name_is_refused_at_every_entrance(
    one_store: Store, entrance: Callable[[Store, str], Awaitable[object]]
) -> None:
    """O10, P01: before any round trip. It is also a ValueError."""
    for name in INVALID.values():
        error = await refused(InvalidName, lambda name=name: entrance(one_store, name))  # type: ignore[misc]
        assert isinstance(error, ValueError)


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
async def test_a_reserved_name_is_refused_at_every_entrance(
    one_store: Store, entrance: Callable[[Store, str], Awaitable[object]]
) -> None:
    """O10: a second way into a backing queue would break its guarantee."""
    for name in RESERVED.values():
        await refused(ReservedName, lambda name=name: entrance(one_store, name))  # type: ignore[misc]


@pytest.mark.parametrize("name", [INVALID["NUL"], RESERVED["an outbox"]], ids=["invalid", "reserved"])
async def test_a_transaction_refuses_names_as_the_store_does(store: Store, name: str) -> None:
    """O10."""
    async with store.transaction() as tx:
        for call in (
            lambda: tx.enqueue(name, 1),
            lambda: tx.outbox_enqueue(name, 1),
            lambda: tx.schedule(name, "@every 1m", "q"),
            lambda: tx.schedule("s", "@every 1m", name),
            lambda: tx.unschedule(name),
        ):
            with pytest.raises((InvalidName, ReservedName)):
                await call()


@pytest.mark.parametrize(
    "name",
    ["q", " q ", "a/b:c", "é" * 127 + "x", "x" * 255, "日本", "\u202eq", "alkstore_x", "_alkstore_x", "a__alkstore_"],
)
async def test_a_name_is_kept_as_it_was_given(store: Store, name: str) -> None:
    queue = store.queue(name)
    await queue.enqueue(1, key=name)
    handle = await claim(queue, name)
    assert (queue.name, handle.queue, handle.key, handle.job.worker) == (name, name, name, name)
    held = await store.lock(name).acquire(10)
    assert held is not None
    assert held.name == name
    assert (await store.schedule(name, "@every 1m", name)).name == name


@pytest.mark.parametrize(
    ("one", "other"), [("q", "Q"), ("q", "q "), ("\u00e9", "e\u0301"), ("\u2126", "\u03a9"), ("1", "\u0661")]
)
async def test_names_are_compared_byte_by_byte(store: Store, one: str, other: str) -> None:
    first = await store.queue(one).enqueue(1, key=one)
    assert await store.queue(other).claim("w") == []
    assert await store.queue(one).enqueue(1, key=other) != first
    assert await store.lock(one).acquire(10)
    assert await store.lock(other).acquire(10)
    await store.schedule(one, "@every 1m", "q")
    assert not await store.unschedule(other)


async def test_the_error_says_whose_name_it_is(one_store: Store) -> None:
    with pytest.raises(InvalidName, match="lock"):
        one_store.lock("")
    with pytest.raises(ReservedName, match="queue"):
        await one_store.schedule("s", "@every 1m", "__alkstore_runs")
