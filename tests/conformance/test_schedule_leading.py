"""Who runs the schedules: one leader, standbys, and how a runner ends."""

from __future__ import annotations

from datetime import timedelta

import pytest
import trio

from actors import Supervisor
from alkstore import LeadershipLost, StopToken, Store, StoreError
from tests.conformance.helpers import (
    LEADER,
    OpenStore,
    boundaries,
    break_ticks,
    calm,
    elapsed,
    fails,
    locks,
    now,
    plant_leader,
    rob_leader,
    running,
    seen,
)


async def test_a_stop_returns_none_and_releases_the_lease(store: Store) -> None:
    stop = StopToken()
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            result = await store.run_schedules(stop)  # type: ignore[func-returns-value]
            assert result is None

        nursery.start_soon(run)
        await calm()
        assert (await store.health()).schedules.leader is not None
        stop.stop()
    assert await locks(store) == {}


async def test_a_runner_whose_stop_is_flipped_before_it_begins_returns(store: Store) -> None:
    stop = StopToken()
    stop.stop()
    await store.run_schedules(stop)
    assert (await store.health()).schedules.leader is None


async def test_a_runner_is_ready_as_a_standby(store: Store) -> None:
    async with running(store.run_schedules):
        await calm()
        async with running(store.run_schedules):  # waits for its `started`
            pass


async def test_of_two_runners_one_leads(store: Store) -> None:
    await store.schedule("s", "@every 1s", "q")
    with store.events() as events:
        async with running(store.run_schedules), running(store.run_schedules):
            await trio.sleep(10.5)
            assert len(seen(events, "leader")) == 1
    assert len(await boundaries(store)) == 10


async def test_a_standby_takes_over_at_once_after_a_stop(store: Store) -> None:
    with store.events() as events:
        async with running(store.run_schedules) as stop:
            await calm()
            async with running(store.run_schedules):
                stop.stop()
                assert await elapsed(calm) == 0
                assert len(seen(events, "leader")) == 2


async def test_a_standby_of_another_store_takes_over_at_once_after_a_stop(open_shared_store: OpenStore) -> None:
    async with open_shared_store() as a, open_shared_store() as b:
        with b.events() as events:
            async with running(a.run_schedules) as stop:
                await calm()
                async with running(b.run_schedules):
                    await calm()
                    stopped_at = now(b)
                    stop.stop()
                    with trio.move_on_after(29):
                        async for event in events:
                            if event.kind == "leader":
                                break
                    assert now(b) == stopped_at


async def test_a_standby_takes_over_when_the_lease_of_a_dead_leader_ends(open_engine_store: OpenStore) -> None:
    """S16: and fires what was missed meanwhile, none lost and none doubled."""
    async with open_engine_store(leadership_ttl=5) as store:
        began = now(store)
        await store.schedule("s", "@every 1s", "q")
        await plant_leader(store, 5)
        async with running(store.run_schedules):
            await trio.sleep(4.999)
            assert await boundaries(store) == []
            await trio.sleep(0.001)
            await calm()
            assert await boundaries(store) == [began + timedelta(seconds=n) for n in range(1, 6)]


async def test_each_term_has_an_identity_of_its_own(store: Store) -> None:
    with store.events() as events:
        for _ in range(2):
            async with running(store.run_schedules):
                await calm()
        owners = {event.details["owner"] for event in seen(events, "leader")}
        tokens = [event.details["fencing_token"] for event in seen(events, "leader")]
    assert len(owners) == 2
    assert tokens[0] < tokens[1]


async def test_who_leads_and_since_when_shows_in_health(store: Store) -> None:
    began = now(store)
    with store.events() as events:
        async with running(store.run_schedules):
            await trio.sleep(100)
            health = await store.health()
        (leader,) = seen(events, "leader")
    assert (health.schedules.leader, health.schedules.leading_since) == (leader.details["owner"], began)


async def test_a_leader_keeps_leading_for_longer_than_its_ttl(store: Store) -> None:
    with store.events() as events:
        async with running(store.run_schedules), running(store.run_schedules):
            await trio.sleep(300)
            assert len(seen(events, "leader")) == 1


async def test_the_ttl_is_an_option_of_the_store(open_engine_store: OpenStore) -> None:
    async with open_engine_store(leadership_ttl=0.5) as store:
        with store.events() as events:
            async with running(store.run_schedules):
                await trio.sleep(10)
                assert len(seen(events, "leader")) == 1


# -------------------------------------------------------------------------------------------------- a lost lease


async def test_a_stolen_lease_raises_leadership_lost_alone(store: Store) -> None:
    """L03."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, LeadershipLost, store.run_schedules, StopToken())
        await calm()
        await rob_leader(store)


async def test_who_lost_the_lease_does_not_touch_the_winners(store: Store) -> None:
    """L03: a renewal goes by the owner, not by the name."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, LeadershipLost, store.run_schedules, StopToken())
        await calm()
        await rob_leader(store)
        await trio.sleep(12)
    assert await locks(store) == {LEADER: "thief"}


async def test_a_tick_on_a_stolen_lease_fires_nothing(store: Store) -> None:
    await store.schedule("s", "@every 5s", "q")  # before the next renewal
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, LeadershipLost, store.run_schedules, StopToken())
        await calm()
        await rob_leader(store)
        await trio.sleep(20)
    assert await boundaries(store) == []


async def test_a_lost_lease_is_an_event_and_the_winner_shows_in_health(store: Store) -> None:
    with store.events() as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, LeadershipLost, store.run_schedules, StopToken())
            await calm()
            await rob_leader(store)
        (lost,) = seen(events, "lost")
    assert lost.subject == "schedules"
    assert (await store.health()).schedules.leader == "thief"


async def test_under_a_supervisor_a_lost_lease_is_an_event_and_the_runner_stands_by_again(store: Store) -> None:
    await store.schedule("s", "@every 1m", "q")
    async with Supervisor() as sup:
        await sup.start("schedules", store.run_schedules)
        with sup.events() as events:
            await calm()
            await rob_leader(store)
            await trio.sleep(119)  # the thief's lease of 30 s ends, and it leads again
            (failed,) = [event for event in events._buffer if event.kind == "failed"]
        await trio.sleep(2)
        sup.stop()
    assert type(failed.error) is LeadershipLost
    assert len(await boundaries(store)) == 2


async def test_in_a_bare_nursery_a_lost_lease_ends_the_nursery(store: Store) -> None:
    with pytest.RaisesGroup(LeadershipLost):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run_schedules, StopToken())
            await calm()
            await rob_leader(store)
            await trio.sleep_forever()


async def test_a_stop_in_the_moment_of_the_loss_does_not_hide_it_or_hang(store: Store) -> None:
    stop = StopToken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ends, store, stop)
        await calm()
        await rob_leader(store)
        stop.stop()
    assert await locks(store) == {LEADER: "thief"}


async def _ends(store: Store, stop: StopToken) -> None:
    try:
        await store.run_schedules(stop)
    except LeadershipLost:
        return


# ------------------------------------------------------------------------------------------------- other endings


async def test_a_cancelled_runner_releases_the_lease(store: Store) -> None:
    """T02."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run_schedules, StopToken())
        await calm()
        nursery.cancel_scope.cancel()
    assert await locks(store) == {}


async def test_a_cancelled_standby_leaves_the_leader_alone(store: Store) -> None:
    async with running(store.run_schedules):
        await calm()
        leader = (await store.health()).schedules.leader
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.run_schedules, StopToken())
            await calm()
            nursery.cancel_scope.cancel()
        assert (await store.health()).schedules.leader == leader


async def test_an_error_of_the_store_leaves_the_runner_as_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        break_ticks(broken, StoreError("broken"))
        error = await fails(StoreError, store.run_schedules, StopToken())
    assert str(error) == "broken"
    assert await locks(store) == {}
