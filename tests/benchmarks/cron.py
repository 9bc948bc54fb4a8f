"""Is a cycle as cheap beside 200,000 other triggers as beside 1,000? Fails if it takes more than 1.5 times as long.

`python -m tests.benchmarks.cron` measures one `schedule_once` that admits a page of 16 due triggers, on a file, in the
trio thread, with ``synchronous="normal"``; the others are half of them waiting and half disabled and long due. And it
measures the look of an idle runner, which finds nothing due.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import trio

from alkstore import open_store
from alkstore.cron import STANDALONE
from alkstore.sql.cron import admission
from alkstore.store import Store
from tests.benchmarks import bare
from tests.benchmarks.measure import heading, ratio, take_turns

__all__ = ["main"]

FEW, MANY = 1_000, 200_000
ROUNDS = 100
BOUND = 1.5
HOUR = 3_600_000

COPIES = (
    """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_triggers (id, revision, digest, enabled, task, published_at)
SELECT printf('%s%07d', :kind, i), revision, digest, :active, task, published_at
FROM n, __alkstore_cron_triggers WHERE id = 'one'""",
    """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_trigger_revisions
SELECT printf('%s%07d', :kind, i), revision, digest, definition, task, task_revision, task_digest, created_at
FROM n, __alkstore_cron_trigger_revisions WHERE id = 'one'""",
    """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
INSERT INTO __alkstore_cron_schedules (trigger, trigger_revision, next_fire_at, active)
SELECT printf('%s%07d', :kind, i), 1, :next_fire_at, :active FROM n""",
)


async def _fill(path: Path, others: int) -> None:
    async with open_store(path) as store:
        await store.cron.publish_task("t", call="h")
        await store.cron.publish_trigger("one", task="t", expression="* * * * *", timezone="UTC", enabled=False)
    connection = bare.connect(path, "off")
    now = time.time_ns() // 1_000_000
    connection.execute("BEGIN").fetchall()
    for kind, count, active, next_fire_at in (
        ("waiting", others // 2, 1, now + HOUR),
        ("disabled", others // 2, 0, now - HOUR),
        ("due", ROUNDS * STANDALONE.page, 1, now),
    ):
        params = {"kind": kind, "count": count, "active": active, "next_fire_at": next_fire_at}
        for sql in COPIES:
            connection.execute(sql, params).fetchall()
    connection.execute("COMMIT").fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


async def _cycle(store: Store) -> float:
    began = time.perf_counter()
    summary = await store.cron.schedule_once(STANDALONE)
    took = time.perf_counter() - began
    assert summary.admitted == STANDALONE.page, summary
    return took


async def _idle(store: Store) -> float:
    engine = store._context.engine
    began = time.perf_counter()
    page = await engine.read(lambda tx: admission.page(tx, STANDALONE.page))
    await engine.read(admission.soonest)
    took = time.perf_counter() - began
    assert page.candidates == []
    return took


async def measure(folder: Path) -> bool:
    """Measure in files below `folder`; return whether both ratios are within the bound."""
    passed = True
    async with AsyncExitStack() as stack:
        stores = {}
        for others in (FEW, MANY):
            path = folder / f"{others}.db"
            await _fill(path, others)
            stores[others] = await stack.enter_async_context(open_store(path, inline=True, synchronous="normal"))
        for title, case in (
            (f"a cycle that admits {STANDALONE.page} runs", _cycle),
            ("a look that finds nothing", _idle),
        ):
            cases: dict[str, Callable[[], Awaitable[float]]]
            cases = {str(others): partial(case, store) for others, store in stores.items()}
            times = await take_turns(ROUNDS, cases)
            found, shown = ratio(times[str(MANY)], times[str(FEW)])
            heading(title)
            for others in (FEW, MANY):
                print(f"beside {others:7,} others {times[str(others)].shown()}")
            print(f"x {shown:22} {'PASS' if found <= BOUND else f'FAIL: more than {BOUND}'}")
            passed &= found <= BOUND
    return passed


def main() -> int:
    print(f"SQLite {sqlite3.sqlite_version}; medians of {ROUNDS} rounds (and 10 % … 90 %)")
    with tempfile.TemporaryDirectory() as folder:
        return 0 if trio.run(measure, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
