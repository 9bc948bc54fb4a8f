"""The smallest thing that the functions of `alkstore.sql` can run on: a stdlib connection, no engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from alkstore.every import parse_every
from alkstore.sql import jobs, schedules
from alkstore.sql.jobs import NewJob, enqueue
from alkstore.sql.schema import SQLITE_MIGRATIONS
from alkstore.sql.tx import Params, Row, Tx
from alkstore.values import Job, Schedule

P = ParamSpec("P")
R = TypeVar("R")

START = 1_800_000_000_000
"""Where the clock of a new database stands, in ms."""

MINUTE = 60_000
HOUR = 60 * MINUTE

TASK = (
    '{"args":null,"backoff":5000,"call":"handler","command":null,"cwd":null,"env":{},"kind":"call","overlap":"allow",'
    '"retries":0,"shell":false,"timeout":null}'
)
"""The definition of a task."""

TRIGGER = '{"expression":"0 * * * *","misfire":"skip","timezone":"UTC"}'
"""The definition of a trigger."""


class Database:
    """A store's tables on a connection of its own. `ms` is its clock; it moves only when a test sets it."""

    def __init__(self, path: Path | str = ":memory:", *, create: bool = True) -> None:
        self.connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        self.ms = START
        self.topics: list[str] = []
        self.events: list[tuple[str, str, dict[str, object]]] = []
        if create:
            for version in sorted(SQLITE_MIGRATIONS):
                self.connection.executescript(SQLITE_MIGRATIONS[version])

    def run(self, function: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` as one unit; an error rolls back, and takes its topics and events with it."""
        self.connection.execute("BEGIN IMMEDIATE").fetchall()
        seen = len(self.topics), len(self.events)
        try:
            result = function(self, *args, **kwargs)
        except BaseException:
            self.connection.execute("ROLLBACK").fetchall()
            del self.topics[seen[0] :], self.events[seen[1] :]
            raise
        self.connection.execute("COMMIT").fetchall()
        return result

    def kinds(self, kind: str) -> list[tuple[str, dict[str, object]]]:
        """Subject and details of the events of `kind`, oldest first."""
        return [(subject, details) for found, subject, details in self.events if found == kind]

    # the protocol Tx

    def all(self, sql: str, params: Params = {}) -> list[Row]:  # noqa: B006 - never written to
        return self.connection.execute(sql, params).fetchall()

    def one(self, sql: str, params: Params = {}) -> Row | None:  # noqa: B006 - never written to
        rows = self.all(sql, params)
        return rows[0] if rows else None

    def each(self, sql: str, params: Sequence[Params]) -> list[list[Row]]:
        return [self.all(sql, one) for one in params]

    def lock(self, sql: str, params: Params = {}) -> None:  # noqa: B006 - never changed
        """The write lock is held."""

    def now(self) -> int:
        return self.ms

    def touch(self, topic: str) -> None:
        self.topics.append(topic)

    def report(self, kind: str, subject: str, **details: object) -> None:
        self.events.append((kind, subject, details))


def opened() -> Iterator[Database]:
    """Yield a database in memory and close it: the body of a fixture."""
    db = Database()
    yield db
    db.connection.close()


def new_job(queue: str = "q", payload: str = "null", **options: Any) -> NewJob:
    """A job with the queue's own defaults, 300/3/5/none, and `options` over them."""
    return NewJob(
        **{"visibility": 300_000, "max_attempts": 3, "backoff": 5_000, **options},
        queue=queue,
        payload=payload,
    )


def add(db: Database, queue: str = "q", payload: str = "null", **options: Any) -> int:
    """Enqueue a job made by `new_job`; return its id."""
    return db.run(enqueue, new_job(queue, payload, **options))


def ids(found: list[Job]) -> list[int]:
    return [job.id for job in found]


def claim(db: Database, queue: str = "q", worker: str = "w", limit: int = 1, lease: int | None = None) -> list[Job]:
    """Claim as one unit; return the jobs."""
    return db.run(jobs.claim, queue, worker, limit, lease).jobs


def register(db: Database, name: str = "s", spec: str = "@every 60s", **changes: Any) -> Schedule:
    """Register a schedule for the queue ``q`` with `changes` to its fields."""
    fields = {"queue": "q", "payload": "null", "priority": None, "max_attempts": None, "expires": None, **changes}
    return db.run(schedules.register, schedules.NewSchedule(name=name, spec=spec, interval=parse_every(spec), **fields))


def task(tx: Tx) -> Row:
    """The row of the only schedule."""
    row = tx.one(
        "SELECT next_fire_at, fired_total, skipped_total, realigned_total, last_fired_at, last_skipped_at, error "
        "FROM __alkstore_scheduler_tasks"
    )
    assert row is not None
    return row


def fire(db: Database, name: str = "s", owner: str | None = None) -> bool:
    """Fire one schedule as one unit; return whether `owner` leads."""
    return db.run(schedules.fire, name, owner).led


def tick(db: Database, owner: str | None = None) -> list[int]:
    """Do what a tick does, look and fire one unit each; return the ids of the fired jobs, in order."""
    seen = len(db.events)
    for name in db.run(schedules.look).names:
        assert fire(db, name, owner)
    return [
        job_id
        for kind, _, details in db.events[seen:]
        if kind == "fired"
        for job_id in cast("list[int]", details["ids"])
    ]


def fired_at(db: Database, queue: str = "q") -> list[int]:
    """The boundaries of the queue's jobs in ms, by id."""
    rows = db.all("SELECT boundary FROM __alkstore_jobs WHERE queue = :queue ORDER BY id", {"queue": queue})
    return [row[0] for row in rows]
