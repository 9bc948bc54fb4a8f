"""Restarting: which ends are followed by another life, after what wait, how often, and what then."""

from __future__ import annotations

import logging
from random import Random

import pytest
import trio
from trio.testing import MockClock

from actors import (
    Backoff,
    Child,
    ChildEvent,
    Intensity,
    RestartsExceeded,
    StopToken,
    Supervisor,
)
from tests.actors.children import AT_ONCE, Diary, story


class LeadershipLost(Exception):
    """As a library would define it."""


@pytest.mark.parametrize(
    ("restart", "error", "lives"),
    [
        ("permanent", OSError(), 2),
        ("permanent", None, 2),
        ("transient", OSError(), 2),
        ("transient", None, 1),
        ("temporary", OSError(), 1),
        ("temporary", None, 1),
    ],
)
async def test_a_child_is_restarted_as_its_kind_says(
    autojump_clock: MockClock, restart: str, error: Exception | None, lives: int
) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        child = Child("a", diary.failing("a", (1, error)), restart=restart, backoff=AT_ONCE)  # type: ignore[arg-type]
        await sup.start(child)
        await trio.sleep(10)
        sup.stop()
    assert diary.count("a starts") == lives


async def test_an_error_reaches_the_events_as_itself(autojump_clock: MockClock) -> None:
    lost = LeadershipLost("somebody else leads")
    diary, events = Diary(), list[ChildEvent]()
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("schedules", diary.failing("schedules", (1, lost)))
        await trio.sleep(10)
        sup.stop()
    assert [event.error for event in events if event.error is not None] == [lost]
    assert diary.count("schedules ready") == 2


async def test_a_group_that_a_child_raises_keeps_its_shape(autojump_clock: MockClock) -> None:
    group = ExceptionGroup("mine", [OSError(), LookupError()])
    diary, events = Diary(), list[ChildEvent]()
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", diary.failing("a", (1, group)))
        await trio.sleep(10)
        sup.stop()
    assert [event.error for event in events if event.kind == "failed"] == [group]


async def test_the_events_tell_a_childs_life_in_order(autojump_clock: MockClock) -> None:
    diary, events = Diary(), list[ChildEvent]()
    async with Supervisor(on_event=events.append, name="sup") as sup:
        await sup.start("a", diary.failing("a", (1, OSError()), (1, None)), backoff=Backoff(2, 2))
        await trio.sleep(20)
        sup.stop()
    assert [(event.kind, event.restarts) for event in events] == [
        ("starting", 0),
        ("started", 0),
        ("failed", 0),
        ("restarting", 1),
        ("starting", 1),
        ("started", 1),
        ("ended", 1),
        ("restarting", 2),
        ("starting", 2),
        ("started", 2),
        ("stopping", 2),
        ("stopped", 2),
    ]
    assert {event.supervisor for event in events} == {"sup"}
    announced = [event for event in events if event.kind == "restarting"]
    began_again = [event.at for event in events if event.kind == "starting"][1:]
    assert began_again == pytest.approx([event.at + (event.delay or 0) for event in announced])


async def test_subscriptions_see_what_on_event_sees_and_end_with_the_supervisor(
    autojump_clock: MockClock,
) -> None:
    diary, events = Diary(), list[ChildEvent]()
    sup = Supervisor(on_event=events.append)
    subscription = sup.events()
    async with sup:
        await sup.start("a", diary.steady("a"))
        sup.stop()
    assert [event async for event in subscription] == events
    assert len(events) == 4


async def test_a_broken_listener_changes_nothing_and_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: ChildEvent) -> None:
        raise ZeroDivisionError

    diary = Diary()
    async with Supervisor(on_event=broken) as sup:
        await sup.start("a", diary.failing("a", (1, OSError())))
        await trio.sleep(10)
        sup.stop()
    assert diary.count("a ready") == 2
    assert {record.exc_info[0] for record in caplog.records if record.exc_info} == {ZeroDivisionError}


async def test_without_a_listener_failures_are_logged_with_their_traceback(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    async with Supervisor(name="mail") as sup:
        await sup.start("a", diary.failing("a", (1, OSError("down"))), backoff=Backoff(2, 2), restart="temporary")
    (record,) = caplog.records
    assert record.getMessage() == "mail: child 'a' failed"
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert str(record.exc_info[1]) == "down"


async def test_the_wait_before_a_restart_grows_and_is_repeatable_with_a_seed(
    autojump_clock: MockClock,
) -> None:
    async def delays(seed: int) -> list[float]:
        random = Random(seed)  # noqa: S311  jitter, not a secret
        diary, events = Diary(), list[ChildEvent]()
        lives = [(0.0, OSError())] * 5
        async with Supervisor(on_event=events.append, random=random) as sup:
            await sup.start("a", diary.failing("a", *lives), backoff=Backoff(1, 4))
            await trio.sleep(100)
            sup.stop()
        return [event.delay for event in events if event.delay is not None]

    first = await delays(1)
    assert await delays(1) == first
    assert await delays(2) != first
    for delay, longest in zip(first, [1, 2, 4, 4, 4], strict=True):
        assert longest / 2 <= delay <= longest


async def test_the_backoff_starts_anew_after_a_life_longer_than_the_window(autojump_clock: MockClock) -> None:
    diary, events = Diary(), list[ChildEvent]()
    lives = [(0.0, OSError()), (0.0, OSError()), (61.0, OSError()), (0.0, OSError())]
    async with Supervisor(on_event=events.append) as sup:
        await sup.start("a", diary.failing("a", *lives), backoff=Backoff(1, 100))
        await trio.sleep(1000)
        sup.stop()
    grown = [event.delay for event in events if event.delay is not None]
    assert [0.5 * 2**n <= delay <= 2**n for n, delay in zip([0, 1, 0, 1], grown, strict=True)] == [True] * 4


async def test_one_restart_too_many_escalates_with_the_last_error_as_its_cause(
    autojump_clock: MockClock,
) -> None:
    diary, events = Diary(), list[ChildEvent]()
    errors = [OSError(n) for n in range(9)]

    async def main() -> None:
        async with Supervisor(on_event=events.append) as sup:
            await sup.start("a", diary.steady("a"))
            await sup.start(
                "b", diary.failing("b", *((1.0, e) for e in errors)), intensity=Intensity(3, 60), backoff=AT_ONCE
            )
            await sup.start("c", diary.steady("c", drain=5))

    with pytest.raises(RestartsExceeded, match="child 'b' needed more than 3 restarts within 60 s") as raised:
        await main()
    exceeded = raised.value
    assert (exceeded.child, exceeded.restarts, exceeded.within) == ("b", 3, 60)
    assert exceeded.__cause__ is errors[3]
    assert story(events)[-6:] == [
        "b failed",
        "b escalated",
        "c stopping",
        "c stopped",
        "a stopping",
        "a stopped",
    ]


async def test_escalation_cancels_the_body_and_a_sibling_that_will_not_end(autojump_clock: MockClock) -> None:
    async def deaf(stop: StopToken) -> None:
        await trio.sleep_forever()

    diary = Diary()
    began = trio.current_time()

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("deaf", deaf)
            await sup.start("a", diary.failing("a", (1, OSError())), intensity=Intensity(0, 60))
            await trio.sleep_forever()

    with pytest.raises(RestartsExceeded):
        await main()
    assert trio.current_time() == pytest.approx(began + 1 + 60)


async def test_escalation_while_the_body_starts_a_child_is_the_only_error(autojump_clock: MockClock) -> None:
    diary = Diary()

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", diary.failing("a", (1, OSError())), intensity=Intensity(0, 60))
            await sup.start("b", diary.steady("b", ready_after=5))

    with pytest.raises(RestartsExceeded):
        await main()
    assert "b ready" not in diary


async def test_a_permanent_child_that_keeps_returning_escalates_without_a_cause(
    autojump_clock: MockClock,
) -> None:
    async def run() -> None:
        await trio.sleep(1)

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", run, backoff=AT_ONCE)

    with pytest.raises(RestartsExceeded) as raised:
        await main()
    assert raised.value.__cause__ is None


async def test_failures_further_apart_than_the_window_never_escalate(autojump_clock: MockClock) -> None:
    diary = Diary()
    lives = [(31.0, OSError())] * 20
    async with Supervisor() as sup:
        await sup.start("a", diary.failing("a", *lives), intensity=Intensity(2, 60), backoff=AT_ONCE)
        await trio.sleep(1000)
        assert [info.restarts for info in sup.children()] == [20]
        sup.stop()


async def test_one_bad_child_does_not_spend_the_others_budget(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        for name in "abcd":
            lives = [(1.0, OSError())] * 3
            await sup.start(name, diary.failing(name, *lives), intensity=Intensity(3, 60), backoff=AT_ONCE)
        await trio.sleep(30)
        assert [(info.state, info.restarts) for info in sup.children()] == [("running", 3)] * 4
        sup.stop()


async def test_one_childs_backoff_does_not_hold_up_anothers_restart(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor() as sup:
        await sup.start("slow", diary.failing("slow", (1, OSError())), backoff=Backoff(500, 500))
        await sup.start("quick", diary.failing("quick", (2, OSError())), backoff=AT_ONCE)
        await trio.sleep(10)
        assert [info.state for info in sup.children()] == ["restarting", "running"]
        sup.stop()


async def test_a_restart_that_fails_before_it_is_ready_counts_like_any_failure(
    autojump_clock: MockClock,
) -> None:
    lives = 0

    async def run(stop: StopToken, task_status: trio.TaskStatus[None]) -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            task_status.started()
        raise OSError

    async def main() -> None:
        async with Supervisor() as sup:
            await sup.start("a", run, intensity=Intensity(4, 60))

    with pytest.raises(RestartsExceeded):
        await main()
    assert lives == 5


async def test_a_temporary_childs_failure_takes_nobody_down_and_stays_visible(
    autojump_clock: MockClock,
) -> None:
    diary, error, events = Diary(), OSError(), list[ChildEvent]()
    async with Supervisor(strategy="one_for_all", on_event=events.append) as sup:
        await sup.start("a", diary.steady("a"))
        await sup.start("b", diary.failing("b", (1, error)), restart="temporary")
        await sup.start("c", diary.failing("c", (1, None)), restart="temporary")
        await trio.sleep(10)
        assert [(info.name, info.state, info.last_error) for info in sup.children()] == [
            ("a", "running", None),
            ("b", "failed", error),
        ]
        sup.stop()
    assert [event.error for event in events if event.kind == "failed"] == [error]


async def test_failed_temporary_children_are_remembered_up_to_a_limit(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with Supervisor(on_event=lambda event: None) as sup:
        for n in range(105):
            await sup.start(f"t{n}", diary.failing("t", (0, OSError())), restart="temporary")
        await trio.sleep(1)
        assert [info.name for info in sup.children()] == [f"t{n}" for n in range(5, 105)]
