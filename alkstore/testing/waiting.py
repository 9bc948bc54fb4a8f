"""Waiting in virtual time for what follows from what was done, and letting time itself pass."""

from __future__ import annotations

import trio
import trio.testing

from alkstore.cron.expression import timetable
from alkstore.engines.bridge import no_call_in_flight
from alkstore.engines.feed import COMMITS
from alkstore.errors import AlkstoreError
from alkstore.payload import decode
from alkstore.sql import health
from alkstore.sql.cron import admission
from alkstore.store import Store
from alkstore.values import Seconds, milliseconds

__all__ = ["drain", "pass_time", "settle"]

_TRIGGERS = 10_000
"""How many cron triggers are looked at."""


async def settle() -> None:
    """Return when every task of this trio run is blocked, no store call is in flight and no plain handler runs.

    Virtual time stands still meanwhile: what is due later does not happen. A plain handler that itself waits for
    something later, or for the test, is waited for in vain. For inline stores, and for any store under
    a `trio.testing.MockClock`. A checkpoint; cancellable at any time.
    """
    await trio.testing.wait_all_tasks_blocked()
    while await no_call_in_flight():
        await trio.testing.wait_all_tasks_blocked()


async def pass_time(seconds: Seconds) -> None:
    """Let `seconds` of virtual time pass, and everything happen that is due by then, the last moment included.

    For a trio run under a `trio.testing.MockClock` with an ``autojump_threshold``: a test with the fixture
    `alkstore_store` or ``autojump_clock``, or a simulation. A checkpoint; cancellable at any time.
    """
    await trio.sleep(milliseconds(seconds, "seconds", 0, 100 * 365 * 86_400) / 1000)
    await settle()


async def drain(store: Store, *, within: Seconds = 86_400) -> None:
    """Let the store's workers and runners go on until nothing is due: no job ready or leased, no boundary passed.

    Nor an occurrence of an enabled cron trigger. Time passes only as far as the handlers and their leases need. Jobs
    of a paused queue are not due.

    Raises:
        TimeoutError: something is still due after `within` seconds (of trio's clock); the text names it.
    """
    limit = milliseconds(within, "within", 0, 10 * 365 * 86_400) / 1000
    feed = store._context.engine.feed  # noqa: SLF001 - the store's own testing help
    with trio.move_on_after(limit):
        while True:
            await settle()
            seen = feed.position()
            if not await _due(store):
                return
            await feed.moved_past(COMMITS, seen, None)
    raise TimeoutError(
        f"still due after {limit:g} s: {'; '.join(await _due(store))} - "
        "is a worker, or a runner of the schedules or of cron, running?"
    )


async def _due(store: Store) -> list[str]:
    (counts, _, paused), schedules, page = await store._context.engine.read(  # noqa: SLF001
        lambda tx: (health.queue_counts(tx), health.schedule_health(tx, late=0), admission.page(tx, _TRIGGERS))
    )
    due = [
        f"queue {queue!r} has {count.ready} ready and {count.leased} leased"
        for queue, count in counts.items()
        if count.leased or (count.ready and queue not in paused)
    ]
    if schedules.overdue:
        due.append(f"{schedules.overdue} schedules have a boundary to fire")
    if triggers := sum(_occurs(candidate, page.now) for candidate in page.candidates):
        due.append(f"{triggers} cron triggers have an occurrence to run")
    return due


def _occurs(seen: admission.Candidate, now: int) -> bool:
    """Whether the occurrence has come that is next for the trigger."""
    if seen.cursor is not None:
        return seen.cursor <= now
    try:
        fields = decode(seen.definition)
        first = timetable(fields["expression"], fields["timezone"]).next_after(max(0, seen.published_at - 1))
    except (AlkstoreError, LookupError, TypeError, ValueError):  # made by other hands: it never will
        return False
    return first is not None and first <= now
