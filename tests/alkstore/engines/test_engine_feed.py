"""The feed: who takes its position before looking, and then waits, misses nothing; who waits for else is left alone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from alkstore import ManualClock, TrioClock
from alkstore.clock import WallClock
from alkstore.engines import feed as feed_module
from alkstore.engines.feed import CLOCK, COMMITS, Feed
from tests.alkstore.engines.enginekit import START


@pytest.fixture
def feed(autojump_clock: trio.testing.MockClock) -> Feed:
    return Feed(TrioClock(datetime(2026, 1, 1, tzinfo=UTC)))


async def returned_at(feed: Feed, topic: str, seen: int, until: int | None = None) -> float | None:
    """The time at which the wait ended; None: it had not ended after 100 s."""
    with trio.move_on_after(100):
        await feed.moved_past(topic, seen, until)
        return trio.current_time()
    return None


async def test_a_change_before_the_wait_is_seen(feed: Feed, autojump_clock: object) -> None:
    seen = feed.position()
    feed.touch(["a"])
    assert await returned_at(feed, "a", seen) == 0


async def test_a_change_during_the_wait_is_seen(feed: Feed, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:

        async def touch_later() -> None:
            await trio.sleep(5)
            feed.touch(["a"])

        nursery.start_soon(touch_later)
        assert await returned_at(feed, "a", feed.position()) == 5


async def test_a_change_before_the_position_was_taken_is_not_waited_for_again(
    feed: Feed, autojump_clock: object
) -> None:
    feed.touch(["a"])
    assert await returned_at(feed, "a", feed.position()) is None


async def test_what_is_touched_wakes_only_who_waits_for_it(feed: Feed, autojump_clock: object) -> None:
    seen = feed.position()
    feed.touch(["b", COMMITS])
    assert await returned_at(feed, "a", seen) is None
    assert await returned_at(feed, "b", seen) == 100
    assert await returned_at(feed, COMMITS, seen) == 100


async def test_all_who_wait_for_a_topic_are_woken(feed: Feed, autojump_clock: object) -> None:
    woken: list[str] = []

    async def wait(name: str, topic: str) -> None:
        await feed.moved_past(topic, feed.position(), None)
        woken.append(name)

    async with trio.open_nursery() as nursery:
        for name, topic in (("1", "a"), ("2", "a"), ("3", "b"), ("4", CLOCK)):
            nursery.start_soon(wait, name, topic)
        await trio.testing.wait_all_tasks_blocked()
        feed.touch(["a"])
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(woken) == ["1", "2"]
        feed.touch_all()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(woken) == ["1", "2", "3"]
        feed.touch_clock()
    assert sorted(woken) == ["1", "2", "3", "4"]


async def test_a_commit_of_others_is_a_change_of_every_topic_but_the_clock(feed: Feed, autojump_clock: object) -> None:
    seen = feed.position()
    feed.touch_all()
    assert await returned_at(feed, "never heard of", seen) == 0
    assert await returned_at(feed, COMMITS, seen) == 0


async def test_a_step_of_the_clock_is_a_change_of_every_topic(feed: Feed, autojump_clock: object) -> None:
    seen = feed.position()
    feed.touch_clock()
    for topic in ("a", COMMITS, CLOCK):
        assert await returned_at(feed, topic, seen) == 0


async def test_the_wait_ends_at_its_moment(feed: Feed, autojump_clock: object) -> None:
    moment = feed.clock.now_ms() + 7_000
    assert await returned_at(feed, "a", feed.position(), moment) == 7
    assert await returned_at(feed, "a", feed.position(), moment) == 7  # it has passed


async def test_a_clock_that_is_moved_by_hand_ends_the_wait_when_it_says_so(autojump_clock: object) -> None:
    clock = ManualClock(START)
    feed = Feed(clock)
    clock.on_set(feed.touch_clock)
    ended: list[int] = []

    async def wait() -> None:
        while clock.now_ms() < START + 1_000:
            await feed.moved_past("a", feed.position(), START + 1_000)
        ended.append(clock.now_ms())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(1_000)
        assert not ended
        clock.advance(0.999)
        await trio.sleep(1_000)
        assert not ended
        clock.advance(0.001)
    assert ended == [START + 1_000]


async def test_a_wall_clock_is_looked_at_every_five_seconds_at_least(autojump_clock: object) -> None:
    """It may be stepped, and nobody tells."""
    clock = WallClock()
    feed = Feed(clock)
    assert await returned_at(feed, "a", feed.position(), clock.now_ms() + 3_600_000) == 5


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("until", [None, 0])
async def test_every_wait_is_a_checkpoint(feed: Feed, autojump_clock: object, moved: bool, until: int | None) -> None:
    seen = feed.position()
    if moved:
        feed.touch(["a"])
    with trio.testing.assert_checkpoints(), trio.move_on_after(1):
        await feed.moved_past("a", seen, until)
    with trio.CancelScope() as scope:
        scope.cancel()
        await feed.moved_past("a", seen, until)
    assert scope.cancelled_caught


async def test_a_cancelled_wait_leaves_nothing_behind_and_may_be_repeated(feed: Feed, autojump_clock: object) -> None:
    seen = feed.position()
    with trio.move_on_after(1):
        await feed.moved_past("a", seen, None)
    assert not feed._waiters
    feed.touch(["a"])
    assert await returned_at(feed, "a", seen) == 1


async def test_one_of_two_who_wait_may_give_up(feed: Feed, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        patient: list[float | None] = []

        async def wait() -> None:
            patient.append(await returned_at(feed, "a", feed.position()))

        nursery.start_soon(wait)
        with trio.move_on_after(1):
            await feed.moved_past("a", feed.position(), None)
        await trio.sleep(1)
        feed.touch(["a"])
    assert patient == [2]
    assert not feed._waiters


async def test_waiting_again_right_after_being_woken_needs_a_new_change(feed: Feed, autojump_clock: object) -> None:
    times: list[float] = []

    async def consumer() -> None:
        for _ in range(3):
            seen = feed.position()
            await feed.moved_past("a", seen, None)
            times.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consumer)
        for _ in range(3):
            await trio.sleep(1)
            feed.touch(["a"])
    assert times == [1, 2, 3]


async def test_many_topics_do_not_make_it_forget_a_change(feed: Feed, autojump_clock: object) -> None:
    """It remembers a bounded number one by one; of older ones it only knows that they may have changed."""
    seen = feed.position()
    feed.touch(["old"])
    later = feed.position()
    feed.touch(f"topic {n}" for n in range(feed_module.REMEMBERED_TOPICS + 10))
    assert len(feed._moved) == feed_module.REMEMBERED_TOPICS
    assert await returned_at(feed, "old", seen) == 0
    assert await returned_at(feed, f"topic {feed_module.REMEMBERED_TOPICS}", later) == 0
    assert await returned_at(feed, "untouched", feed.position()) is None


async def test_a_pause_ends_early_only_when_the_clock_is_stepped(feed: Feed, autojump_clock: object) -> None:
    feed.touch(["a", CLOCK])
    feed.touch_all()
    await feed.pause(3)
    assert trio.current_time() == 3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.pause, 50)
        await trio.testing.wait_all_tasks_blocked()
        feed.touch_all()
        await trio.sleep(1)
        feed.touch_clock()
    assert trio.current_time() == 4


STEPS = st.lists(
    st.sampled_from(["touch a", "touch b", "touch all", "touch clock", "look a", "look b", "look clock"]), max_size=40
)


@given(steps=STEPS)
def test_a_look_finds_moved_exactly_what_moved_since_the_position(steps: list[str]) -> None:
    """Any order of touches and looks: no wake-up is lost and, below the bound on memory, none is made up."""
    feed = Feed(WallClock())
    moved = {"a": True, "b": True, "clock": True}
    seen = dict.fromkeys(moved, -1)
    for step in steps:
        verb, what = step.split()
        if verb == "look":
            topic = CLOCK if what == "clock" else what
            if moved[what]:
                assert feed._has_moved(topic, seen[what])
            elif what != "clock":  # a commit of others counts for the clock too, which only wakes somebody early
                assert not feed._has_moved(topic, seen[what])
            seen[what], moved[what] = feed.position(), False
        elif what in ("all", "clock"):
            feed.touch_all() if what == "all" else feed.touch_clock()
            moved.update(a=True, b=True, clock=moved["clock"] or what == "clock")
        else:
            feed.touch([what])
            moved[what] = True
