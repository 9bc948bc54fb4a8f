"""What was enqueued: to be looked at, and asserted, by the tests of programs that enqueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alkstore.outbox import Outbox
from alkstore.payload import JSON
from alkstore.queue import Queue
from alkstore.store import Store
from alkstore.values import Job, JobState

__all__ = ["assert_enqueued", "enqueued"]

_LIVE: tuple[JobState, ...] = ("delayed", "ready", "leased")
_PAGE = 1_000
_SHOWN = 10

_ANY: Any = object()


async def enqueued(store: Store, queue: str | Queue | Outbox, *, dead: bool = False) -> list[Job]:
    """Return the jobs of `queue` (its name, a `Queue` or an `Outbox`) that are not done yet, by id.

    Delayed, ready and leased ones; with `dead` the dead letters too. An acknowledged job is gone. Reads one state after
    the other, so nobody should be writing meanwhile. A checkpoint.
    """
    if isinstance(queue, Outbox):
        queue = queue._queue  # noqa: SLF001 - one mechanism
    elif isinstance(queue, str):
        queue = store.queue(queue)
    jobs: list[Job] = []
    for state in (*_LIVE, "dead") if dead else _LIVE:
        after = 0
        while page := await queue.list(state, after=after, limit=_PAGE):
            jobs += page
            after = page[-1].id
    return sorted(jobs, key=lambda job: job.id)


async def assert_enqueued(
    store: Store,
    queue: str | Queue | Outbox,
    *,
    payload: JSON = _ANY,
    headers: Mapping[str, str] = _ANY,
    key: str | None = _ANY,
    priority: int = _ANY,
    times: int | None = None,
) -> Job:
    """Assert that a job with these properties is enqueued and not done yet, and return the oldest such one.

    Each property that is named must be equal; `headers` are all of them. `times`: exactly so many jobs are like that
    (0 is better asserted on `enqueued`); None: one or more.

    Raises:
        AssertionError: its text shows what is enqueued instead.
    """
    wanted = {
        name: value
        for name, value in (("payload", payload), ("headers", headers), ("key", key), ("priority", priority))
        if value is not _ANY
    }
    jobs = await enqueued(store, queue)
    found = [job for job in jobs if all(getattr(job, name) == value for name, value in wanted.items())]
    if not found or (times is not None and len(found) != times):
        name = queue if isinstance(queue, str) else queue.name
        shown = "\n".join(f"  {job.id}: {job.payload!r:.200} {dict(job.headers)} {job.state}" for job in jobs[:_SHOWN])
        number = "a job" if times is None else f"{times} jobs"
        raise AssertionError(
            f"{name!r} should have {number} with {wanted or 'anything'}; {len(found)} of its {len(jobs)} are so"
            + (f", it has\n{shown}" if jobs else "")
        )
    return found[0]
