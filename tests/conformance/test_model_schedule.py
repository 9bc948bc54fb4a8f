"""Any sequence of schedule, unschedule and ticks, with the clock going forward and back, fires what the model fires."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from alkstore import ManualClock, Schedule, ScheduleOpts, Store
from alkstore.testing import enqueued, settle
from tests.conformance.helpers import OpenStore, running
from tests.conformance.models import MODELS, ms, play, sequences

CATCH_UP = 64
HOUR_MS = 3_600_000
INTERVALS = {"10s": 10_000, "60s": 60_000, "1m": 60_000, "1h": 3_600_000, "1d": 86_400_000}

calls = st.one_of(
    st.tuples(
        st.just("schedule"),
        st.sampled_from(["x", "y"]),
        st.sampled_from(list(INTERVALS)),
        st.sampled_from([None, {"a": 1}]),
        st.fixed_dictionaries(
            {}, optional={"priority": st.just(7), "max_attempts": st.just(1), "expires": st.sampled_from([0, 5])}
        ),
    ),
    st.tuples(st.just("unschedule"), st.sampled_from(["x", "y"])),
    st.tuples(st.just("tick")),
    st.tuples(
        st.just("pass_time"),
        st.sampled_from([0.001, 9.999, 10, 60, 63 * 10, 64 * 10, 65 * 10, 3600, 64 * 60, 86_400, 30 * 86_400]),
    ),
    st.tuples(st.just("pass_until"), st.sampled_from(["x", "y"]), st.integers(0, 70), st.sampled_from([-0.001, 0])),
    st.tuples(st.just("pass_time"), st.sampled_from([-0.001, -10, -3600, -3601, -7200, -30 * 86_400])),
)


@define(eq=False)
class ModelSchedule:
    """A schedule as it stands; times in ms."""

    interval: int
    payload: Any
    opts: ScheduleOpts
    cursor: int
    fired: int = 0
    skipped: int = 0
    last_fired_at: int | None = None
    last_skipped_at: int | None = None

    def realign(self, now: int) -> bool:
        """A cursor that no honest clock has set goes to the first boundary of its grid after now."""
        ahead = self.cursor > now + self.interval + HOUR_MS
        if ahead:
            self.cursor -= (self.cursor - now - 1) // self.interval * self.interval
        return ahead

    def tick(self, now: int) -> list[int]:
        """Fire the oldest 64 that are due, skip the rest."""
        if self.realign(now) or self.cursor > now:
            return []
        due = range(self.cursor, now + 1, self.interval)
        boundaries = list(due[:CATCH_UP])
        self.fired += len(boundaries)
        self.last_fired_at = boundaries[-1]
        if len(due) > CATCH_UP:
            self.skipped += len(due) - CATCH_UP
            self.last_skipped_at = now
        self.cursor = due[-1] + self.interval
        return boundaries


@define(eq=False)
class ScheduleGame:
    """Plays every call against the store's schedules and their models, and compares what was fired."""

    store: Store
    clock: ManualClock
    name: str
    models: dict[str, ModelSchedule] = field(factory=dict)
    fired: list[tuple[object, ...]] = field(factory=list)

    @property
    def queue(self) -> str:
        return f"model{self.name}"

    async def play(self, call: str, *given: Any) -> None:
        await getattr(self, call)(self.clock.now_ms(), *given)

    async def schedule(self, now: int, name: str, spec: str, payload: Any, options: dict[str, Any]) -> None:
        opts = ScheduleOpts(**options)
        model = self.models.get(name)
        if model is None or model.interval != INTERVALS[spec]:
            fresh = ModelSchedule(INTERVALS[spec], payload, opts, now + INTERVALS[spec])
            if model is not None:  # the grid is new, the numbers stay
                fresh.fired, fresh.skipped = model.fired, model.skipped
                fresh.last_fired_at, fresh.last_skipped_at = model.last_fired_at, model.last_skipped_at
            model = self.models[name] = fresh
        else:
            model.payload, model.opts = payload, opts
            model.realign(now)
        stored = await self.store.schedule(f"{name}{self.name}", f"@every {spec}", self.queue, payload, opts)
        assert seen(stored) == (
            *(f"{name}{self.name}", f"@every {spec}", self.queue, payload, opts),
            *(model.cursor, model.fired, model.skipped, model.last_fired_at, model.last_skipped_at, None),
        )

    async def unschedule(self, now: int, name: str) -> None:
        assert await self.store.unschedule(f"{name}{self.name}") is (self.models.pop(name, None) is not None)

    async def pass_time(self, now: int, seconds: float) -> None:
        self.clock.advance(seconds)

    async def pass_until(self, now: int, name: str, boundaries: int, edge: float) -> None:
        if model := self.models.get(name):
            self.clock.set(max(now, model.cursor + boundaries * model.interval + round(edge * 1000)))

    async def tick(self, now: int) -> None:
        for name, model in self.models.items():
            for boundary in model.tick(now):
                expires = model.opts.expires
                self.fired.append(
                    (
                        *(f"{name}{self.name}", boundary, model.payload, model.opts.priority or 0),
                        model.opts.max_attempts or 3,
                        None if expires is None else max(now, boundary) + int(expires) * 1000,  # type: ignore[arg-type]
                    )
                )
        async with running(self.store.run_schedules):
            await settle()
        jobs = await enqueued(self.store, self.queue)
        assert sorted(
            (
                (
                    *(job.schedule, ms(job.boundary), job.payload, job.priority, job.max_attempts),
                    ms(job.expires_at),
                )
                for job in jobs
            ),
            key=repr,
        ) == sorted(self.fired, key=repr)
        # a clock that was set back makes due at once what was due before it
        assert all(job.boundary is not None and job.run_at <= job.boundary for job in jobs)


def seen(schedule: Schedule) -> tuple[object, ...]:
    return (
        *(schedule.name, schedule.spec, schedule.queue, schedule.payload, schedule.opts),
        *(ms(schedule.next_fire_at), schedule.fired_total, schedule.skipped_total),
        *(ms(schedule.last_fired_at), ms(schedule.last_skipped_at), schedule.error),
    )


@MODELS
@given(sequences(calls))
def test_any_sequence_of_calls(open_engine_store: OpenStore, sequence: list[tuple[Any, ...]]) -> None:
    async def game(store: Store, clock: ManualClock, name: str) -> None:
        table = ScheduleGame(store, clock, name)
        began = clock.now_ms()
        try:
            for call in sequence:
                await table.play(*call)
        finally:  # the next game's ticks would fire them too
            for schedule in list(table.models):
                await store.unschedule(f"{schedule}{name}")
            clock.set(max(began, clock.now_ms()))

    play(open_engine_store, game)
