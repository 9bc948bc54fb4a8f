"""Any sequence of acquire, renew, release and time passing gives the answers of the model, which is a dict."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from alkstore import LockHandle, ManualClock, Store
from tests.conformance.helpers import OpenStore
from tests.conformance.models import MODELS, ms, play, sequences

ttls = st.sampled_from([0.1, 1, 5])
which = st.integers(0, 5)

calls = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from(["a", "b"]), ttls),
    st.tuples(st.just("renew"), which, st.one_of(st.none(), ttls)),
    st.tuples(st.just("release"), which),
    st.tuples(st.just("pass_time"), st.sampled_from([0.001, 1, 4, 2 * 86_400])),
    st.tuples(st.just("pass_until_end"), which, st.sampled_from([-0.001, 0, 0.001])),
)


@define(eq=False)
class LockGame:
    """Who holds which lock, and until when (ms)."""

    store: Store
    clock: ManualClock
    name: str
    holder: dict[str, LockHandle] = field(factory=dict)
    until: dict[LockHandle, int] = field(factory=dict)
    ttl: dict[LockHandle, int] = field(factory=dict)
    handles: list[LockHandle] = field(factory=list)
    highest_token: int = 0

    async def play(self, call: str, *given: Any) -> None:
        await getattr(self, call)(self.clock.now_ms(), *given)

    def holds(self, handle: LockHandle, now: int) -> bool:
        return self.holder.get(handle.name) is handle and self.until[handle] > now

    def handle(self, back: int) -> LockHandle | None:
        return self.handles[-1 - back % len(self.handles)] if self.handles else None

    async def acquire(self, now: int, lock: str, ttl: float) -> None:
        name = f"{lock}{self.name}"
        held = name in self.holder and self.holds(self.holder[name], now)
        handle = await self.store.lock(name).acquire(ttl)
        assert (handle is None) is held
        if handle is not None:
            assert handle.fencing_token > self.highest_token
            assert all(handle.owner != other.owner for other in self.handles)
            self.highest_token = handle.fencing_token
            self.holder[name] = handle
            self.ttl[handle] = round(ttl * 1000)
            self.until[handle] = now + self.ttl[handle]
            assert ms(handle.expires_at) == self.until[handle]
            self.handles.append(handle)

    async def renew(self, now: int, back: int, ttl: float | None) -> None:
        if handle := self.handle(back):
            mine = self.holds(handle, now)
            assert await handle.renew(ttl) is mine
            if mine:
                self.ttl[handle] = self.ttl[handle] if ttl is None else round(ttl * 1000)
                self.until[handle] = now + self.ttl[handle]
            assert ms(handle.expires_at) == self.until[handle]
            assert handle.remaining == max(self.until[handle] - now, 0) / 1000

    async def release(self, now: int, back: int) -> None:
        if handle := self.handle(back):
            mine = self.holds(handle, now)
            assert await handle.release() is mine
            if mine:
                del self.holder[handle.name]

    async def pass_until_end(self, now: int, back: int, edge: float) -> None:
        if handle := self.handle(back):
            self.clock.set(max(now, self.until[handle] + round(edge * 1000)))

    async def pass_time(self, now: int, seconds: float) -> None:
        self.clock.advance(seconds)


@MODELS
@given(sequences(calls))
def test_any_sequence_of_calls(open_engine_store: OpenStore, sequence: list[tuple[Any, ...]]) -> None:
    async def game(store: Store, clock: ManualClock, name: str) -> None:
        table = LockGame(store, clock, name)
        for call in sequence:
            await table.play(*call)

    play(open_engine_store, game)
