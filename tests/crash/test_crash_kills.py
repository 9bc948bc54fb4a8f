"""A short campaign of kills; that each kill point is reached; and that the judge sees every broken promise."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from alkstore import open_store
from tests.crash import programs
from tests.crash.clocks import SharedClock
from tests.crash.harness import Processes, execute, rows
from tests.crash.judge import Facts, Grid, Left, judge
from tests.crash.killing import run_campaign
from tests.crash.ledger import Entry, read
from tests.crash.points import KILL_POINT, POINTS


async def test_a_short_campaign_of_kills_breaks_no_promise(tmp_path: Path, long: bool) -> None:
    """S07, S16, S17, Q01, Q07, O09 and the rest, all at once; ``python -m tests.crash`` has more of it."""
    report = await run_campaign(tmp_path, kills=100 if long else 10, seed=20_260_101)
    print(report)
    assert report.broken == []
    assert report.counts["of them answered"] > 0
    assert report.counts["acks True"] > 0
    assert report.counts["boundaries skipped"] > 0


async def test_each_kill_point_is_reached(processes: Processes, tmp_path: Path, path: str) -> None:
    ledger, clock = str(tmp_path / "ledger"), SharedClock(str(tmp_path / "clock"))
    async with open_store(path, clock=clock) as store:
        await store.schedule("often", "@every 1s", programs.QUEUE, {"token": "often", "do": "ok"})
    execute(path, "CREATE TABLE orders (token TEXT PRIMARY KEY)")
    about: dict[str, Any] = {"path": path, "clock": clock.path, "ledger": ledger}
    feeder = await processes.start(programs.client, **about, name="feeder", seed=0)
    doomed = {
        (program, point): await processes.start(
            getattr(programs, program), environment={KILL_POINT: point}, **about, name=f"{program} {point}", seed=1
        )
        for program, points in POINTS.items()
        for point in points
    }
    for (program, point), child in doomed.items():
        with trio.fail_after(30):
            assert await child.ended() == -signal.SIGKILL, (program, point)
    feeder.terminate()
    assert await feeder.ended() == 0
    died = {entry["by"]: entry["point"] for entry in read(ledger) if entry["what"] == "died"}
    assert died == {f"{program} {point}": point for program, point in doomed}
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


# ------------------------------------------------------------------------------------------------------- the judge


def line(what: str, id: int, fence: int, at: int, **more: object) -> Entry:
    return {"what": what, "at": at / 1000, "now": at, "id": id, "fence": fence, **more}


def claimed(id: int, fence: int, at: int) -> Entry:
    return line("claimed", id, fence, at, claimed_at=at, lease_end=at + 1_000)


def started(id: int, fence: int, at: int, **more: object) -> Entry:
    about = {"attempt": fence, "max_attempts": 2, "token": f"t{id}", "key": None, "schedule": None, "boundary": None}
    return line("started", id, fence, at, **about | more)


ORDER = "order 1"

LEDGER: list[Entry] = [
    {"what": "answered", "at": 0.0, "ids": [1, 2], "tokens": ["t1", "t2"]},
    # the first attempt's worker is killed, the second one succeeds
    claimed(1, 1, 1_000),
    started(1, 1, 1_000),
    line("beat", 1, 1, 1_500, lease_end=2_500),
    claimed(1, 2, 2_500),
    started(1, 2, 2_500),
    line("ended", 1, 2, 2_600),
    line("acking", 1, 2, 2_610),
    line("acked", 1, 2, 2_620, answer=True),
    # fails at once, and then for good
    claimed(2, 1, 1_000),
    started(2, 1, 1_000),
    line("settling", 2, 1, 1_100, kind="retry"),
    line("settled", 2, 1, 1_110, kind="retry", answer=True),
    claimed(2, 2, 1_200),
    started(2, 2, 1_200),
    line("settling", 2, 2, 1_300, kind="retry"),
    line("settled", 2, 2, 1_310, kind="retry", answer=True),
    # a boundary, given back by a worker that was told to stop before its handler has begun
    claimed(3, 1, 3_000),
    line("settling", 3, 1, 3_100, kind="_give_back"),
    line("settled", 3, 1, 3_110, kind="_give_back", answer=True),
    claimed(3, 2, 5_000),
    started(3, 2, 5_000, attempt=1, schedule="s", boundary=4_000),
    line("ended", 3, 2, 5_100),
    line("acking", 3, 2, 5_110),
    line("acked", 3, 2, 5_120, answer=True),
    # a message, acknowledged by one that was killed before it could say so
    claimed(4, 1, 5_000),
    started(4, 1, 5_000, token=ORDER, key="k"),
    line("ended", 4, 1, 5_100),
    line("acking", 4, 1, 5_110),
    {"what": "leads", "at": 0.0, "token": 1},
]

FACTS = Facts(
    now=5_500,
    last_id=4,
    left={2: Left(2, "attempts exhausted", "t2")},
    grids=[Grid("s", first=4_000, interval=1_000, cursor=6_000, fired=1, skipped=1)],
    orders={ORDER},
    integrity="ok",
)


def without(what: str, id: int) -> list[Entry]:
    return [entry for entry in LEDGER if (entry["what"], entry.get("id")) != (what, id)]


def grid(**changes: Any) -> Facts:
    return evolve(FACTS, grids=[evolve(FACTS.grids[0], **changes)])


BROKEN: dict[str, Callable[[], tuple[list[Entry], Facts]]] = {
    "integrity_check": lambda: (LEDGER, evolve(FACTS, integrity="row 7 is missing from its index")),
    "job 5 was answered, and the store never": lambda: (
        [*LEDGER, {"what": "answered", "at": 0.0, "ids": [5], "tokens": ["t5"]}],
        FACTS,
    ),
    "job 1 is lost": lambda: (without("ended", 1), FACTS),
    "job 4 is lost": lambda: (without("acking", 4), FACTS),
    "job 2 is lost": lambda: (LEDGER, evolve(FACTS, left={})),
    "job 2 is still in state 1": lambda: (LEDGER, evolve(FACTS, left={2: Left(1, None, "t2")})),
    "job 2 is a dead letter without": lambda: (LEDGER, evolve(FACTS, left={2: Left(2, None, "t2")})),
    "job 3 was acknowledged with fence 2, and started again": lambda: ([*LEDGER, started(3, 3, 9_000)], FACTS),
    "job 1 was acknowledged with fence 2, and is in": lambda: (
        LEDGER,
        evolve(FACTS, left={**FACTS.left, 1: Left(2, "lease expired", "t1")}),
    ),
    "job 2 with fence 2 was settled 2 times": lambda: (
        [*LEDGER, line("settled", 2, 2, 1_400, kind="_fail", answer=True)],
        FACTS,
    ),
    "job 1 was acknowledged 2 times": lambda: (
        [*LEDGER, line("acking", 1, 1, 1_900), line("acked", 1, 1, 1_910, answer=True)],
        FACTS,
    ),
    "job 3 was settled with fence 2 0 ms after": lambda: ([*LEDGER, line("acking", 3, 2, 6_000)], FACTS),
    "job 1 was claimed with fence 2 100 ms before": lambda: (
        [*LEDGER, line("beat", 1, 1, 1_600, lease_end=2_600)],
        FACTS,
    ),
    "job 2 was claimed with fence 2 800 ms before": lambda: (
        [entry | {"answer": False} if entry["what"] == "settled" else entry for entry in LEDGER],
        FACTS,
    ),
    "job 4 was claimed twice with fence 1": lambda: ([*LEDGER, claimed(4, 1, 7_000)], FACTS),
    "job 4 was started 2 times with fence 1": lambda: ([*LEDGER, started(4, 1, 7_000, token=ORDER, key="k")], FACTS),
    "job 2 was started 3 times": lambda: ([*LEDGER, started(2, 3, 9_000, attempt=2)], FACTS),
    "job 2 was started with an attempt out of": lambda: ([*LEDGER, started(2, 3, 9_000)], FACTS),
    "boundary 4000 of s has fired the jobs [2, 3]": lambda: (
        LEDGER,
        evolve(FACTS, left={2: Left(2, "expired", "t2", "s", 4_000)}),
    ),
    "s has fired [4001], which is not on": lambda: (
        [entry | {"boundary": 4_001} if entry.get("schedule") else entry for entry in LEDGER],
        FACTS,
    ),
    "the cursor of s has left": lambda: (LEDGER, grid(cursor=6_001)),
    "s has not fired its boundary 5000": lambda: (LEDGER, grid(cursor=5_000, skipped=0)),
    "s counts 2 boundaries as fired, and 1": lambda: (LEDGER, grid(fired=2, skipped=0)),
    "s: 2 have elapsed, 1 were fired and 0": lambda: (LEDGER, grid(skipped=0)),
    "order 2 was committed without its message": lambda: (LEDGER, evolve(FACTS, orders={"order 1", "order 2"})),
    "the message of order 1 was committed without": lambda: (LEDGER, evolve(FACTS, orders=set())),
    "job 1 was ['t1', 't9']": lambda: (
        [*LEDGER, {"what": "answered", "at": 0.0, "ids": [1], "tokens": ["t9"]}],
        FACTS,
    ),
    "job 4 has had the keys": lambda: ([*LEDGER, started(4, 2, 9_000, token=ORDER, key="other")], FACTS),
    "2 leaders have had the fencing token 1": lambda: ([*LEDGER, LEDGER[-1]], FACTS),
}


def test_the_judge_finds_nothing_where_nothing_is_broken() -> None:
    assert judge(LEDGER, FACTS) == []


@pytest.mark.parametrize("words", BROKEN)
def test_the_judge_sees_a_broken_promise(words: str) -> None:
    entries, facts = BROKEN[words]()
    assert any(broken.startswith(words) for broken in judge(entries, facts)), judge(entries, facts)
