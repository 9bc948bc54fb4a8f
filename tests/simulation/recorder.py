"""A flight recorder in the database itself: triggers write down every change of a row, and rules judge each of them.

The rules are the contract's, written a second time and without the library: a change that breaks one is a `Violation`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from attrs import define, field

__all__ = ["Fired", "Recorder", "Violation"]

Row: TypeAlias = dict[str, Any]

CATCH_UP = 64
DAY_MS = 86_400_000

_RECORDED = {
    "jobs": (
        "__alkstore_jobs",
        "id",
        """queue state fence attempt max_attempts run_at expires_at lease lease_end worker reason schedule boundary
        payload""",
    ),
    "locks": ("__alkstore_locks", "name", "owner fence ttl expires_at"),
    "schedules": (
        "__alkstore_scheduler_tasks",
        "name",
        "interval next_fire_at fired_total skipped_total realigned_total error",
    ),
}

TABLE = """
CREATE TABLE recorder (seq INTEGER PRIMARY KEY, now INTEGER NOT NULL, who TEXT NOT NULL, subject TEXT NOT NULL,
                       id NOT NULL, old TEXT, new TEXT)"""


def _triggers() -> list[str]:
    made = []
    for subject, (table, key, columns) in _RECORDED.items():
        for event, old, new in (("INSERT", False, True), ("UPDATE", True, True), ("DELETE", True, False)):
            before = _image("OLD", columns) if old else "NULL"
            after = _image("NEW", columns) if new else "NULL"
            row = "NEW" if new else "OLD"
            made.append(
                f"CREATE TRIGGER record_{subject}_{event} AFTER {event} ON {table} BEGIN "
                "INSERT INTO recorder (now, who, subject, id, old, new) "
                f"VALUES (sim_now(), sim_who(), '{subject}', {row}.{key}, {before}, {after}); END"
            )
    return made


def _image(row: str, columns: str) -> str:
    pairs = ", ".join(f"'{name}', {row}.{name}" for name in columns.split())
    return f"json_object({pairs})"


class Violation(AssertionError):
    """A change that the contract forbids."""


@define(eq=False)
class Fired:
    """The boundaries of one schedule, from its registration on one grid."""

    interval: int
    first: int
    fired: list[int] = field(factory=list)
    skipped: int = 0
    cursor: int = 0


def _ignore(_id: int, _old: Row, _who: str) -> None:
    pass


@define(eq=False)
class Recorder:
    """Reads what the triggers wrote, change by change, and knows the state of every row from that alone.

    `on_taken_away` is told of each lease that ended before its time.
    """

    path: str
    on_taken_away: Callable[[int, Row, str], None] = _ignore
    on_change: Callable[[str], None] = field(default=lambda _: None)
    jobs: dict[int, Row] = field(factory=dict, init=False)
    """Those that are in the table."""
    gone: dict[int, Row] = field(factory=dict, init=False)
    """The last state of those that were deleted."""
    died: set[int] = field(factory=set, init=False)
    """Those that were a dead letter once."""
    claims: dict[int, dict[int, int]] = field(factory=lambda: defaultdict(dict), init=False)
    """For each job, the lease's end as it stood last, by fence."""
    by_token: dict[object, list[int]] = field(factory=lambda: defaultdict(list), init=False)
    """Jobs by the ``token`` in their payload."""
    locks: dict[str, Row] = field(factory=dict, init=False)
    grids: dict[str, list[Fired]] = field(factory=lambda: defaultdict(list), init=False)
    schedules: dict[str, Row] = field(factory=dict, init=False)
    changes: int = field(default=0, init=False)
    highest_id: int = field(default=0, init=False)
    highest_fence: int = field(default=0, init=False)
    _connection: sqlite3.Connection = field(init=False)
    _closed: bool = field(default=False, init=False)
    _pending: dict[str, list[int]] = field(factory=lambda: defaultdict(list), init=False)

    def install(self) -> None:
        """Create the table and its triggers in a file that has the store's tables."""
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous = OFF")
        for statement in (TABLE, *_triggers()):
            self._connection.execute(statement)

    def close(self) -> None:
        """From here on nothing is read or judged any more."""
        self._closed = True
        self._connection.close()

    def read(self) -> None:
        """Judge every change that was committed since the last time. Raises Violation."""
        if self._closed:
            return
        rows = self._connection.execute(
            "SELECT seq, now, who, subject, id, old, new FROM recorder WHERE seq > ? ORDER BY seq", (self.changes,)
        ).fetchall()
        for seq, now, who, subject, id, old, new in rows:
            self.changes = seq
            before = None if old is None else json.loads(old)
            after = None if new is None else json.loads(new)
            try:
                getattr(self, f"_{subject}")(now, who, id, before, after)
            except Violation as error:
                error.add_note(f"change {seq} at {now} by {who} of {subject} {id!r}: {old} -> {new}")
                raise
        for name, boundaries in self._pending.items():
            _rule(not boundaries, f"{name} fired {boundaries} without advancing its cursor")

    def check_lengths(self, now: int) -> None:
        """After a step of the clock the first commit leaves no lease that ends later than its own length from now."""
        for id, job in self.jobs.items():
            _rule(job["state"] != 1 or job["lease_end"] <= now + job["lease"], f"job {id} is leased beyond its lease")
        for name, lock in self.locks.items():
            _rule(lock["expires_at"] <= now + lock["ttl"], f"lock {name} is held beyond its ttl")

    def compare(self) -> None:
        """What was recorded is what there is, and the file is sound."""
        (verdict,) = self._connection.execute("PRAGMA integrity_check").fetchall()
        _rule(verdict == ("ok",), f"the file is damaged: {verdict}")
        rows = self._connection.execute("SELECT id, state, fence FROM __alkstore_jobs").fetchall()
        _rule({(id, job["state"], job["fence"]) for id, job in self.jobs.items()} == set(rows), "unrecorded changes")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    # ------------------------------------------------------------------------------------------------------- rules

    def _jobs(self, now: int, who: str, id: int, old: Row | None, new: Row | None) -> None:
        if old is None:
            assert new is not None
            self._inserted(now, id, new)
        elif new is None:
            _rule(self.jobs.pop(id, None) == old, "the row was not as it was left")
            _rule(old["state"] != 0, "a job that nobody had was deleted")
            if old["state"] == 1:
                self._released(now, who, id, old)
            self.gone[id] = old
        else:
            _rule(self.jobs.get(id) == old, "the row was not as it was left")
            self._updated(now, who, id, old, new)
        if new is not None:
            self.jobs[id] = new

    def _inserted(self, now: int, id: int, new: Row) -> None:
        _rule(id > self.highest_id, f"an id was used again, or out of order: {self.highest_id} was there")
        self.highest_id = id
        _rule(new["state"] == 0 and new["fence"] == 0 and new["attempt"] == 0, "a new job is not new")
        if new["schedule"] is not None:
            _rule(new["run_at"] == new["boundary"] <= now, "a boundary was fired early, or at another moment")
            self._pending[new["schedule"]].append(new["boundary"])
        payload = json.loads(new["payload"])
        if isinstance(payload, dict) and "token" in payload:
            self.by_token[payload["token"]].append(id)

    def _updated(self, now: int, who: str, id: int, old: Row, new: Row) -> None:
        for column in ("queue", "max_attempts", "schedule", "boundary", "payload"):
            _rule(old[column] == new[column], f"{column} of a job changed")
        _rule(new["attempt"] <= new["max_attempts"], "more attempts than the budget allows")
        match old["state"], new["state"]:
            case 0, 1:
                _rule(new["fence"] == old["fence"] + 1, "a claim that does not raise the fence by one")
                _rule(new["attempt"] == old["attempt"] + 1, "a claim that does not count")
                _rule(old["run_at"] <= now, "claimed before its time")
                _rule(old["expires_at"] is None or old["expires_at"] > now, "claimed although it has expired")
                _rule(new["lease_end"] > now, "a lease that is over at its beginning")
                self.claims[id][new["fence"]] = new["lease_end"]
                return
            case 1, 1:
                _rule(old["lease_end"] > now, "a lease that had ended was changed")
                _rule(new["attempt"] == old["attempt"], "a renewal that counts")
                self.claims[id][new["fence"]] = new["lease_end"]
            case 1, 0:
                self._released(now, who, id, old)
                _rule(new["attempt"] in (old["attempt"], old["attempt"] - 1), "attempts out of nothing")
                if old["lease_end"] <= now:
                    _rule(new["attempt"] == old["attempt"], "a lease that ran out gave its attempt back")
            case 1, 2:
                self._released(now, who, id, old)
                if new["reason"] == "lease expired":
                    _rule(old["lease_end"] <= now, "buried as lapsed in an unexpired lease")
                    _rule(old["attempt"] >= old["max_attempts"], "buried with attempts left")
            case 0, 2:
                _rule(new["reason"] in ("expired", "cancelled"), f"a job that nobody had is dead: {new['reason']}")
                if new["reason"] == "expired":
                    _rule(old["expires_at"] is not None and old["expires_at"] <= now, "expired before its time")
            case 2, 0:
                _rule(new["attempt"] == 0 and new["expires_at"] is None, "a redriven job is not fresh")
            case 0, 0:
                _rule(new["attempt"] == old["attempt"], "attempts out of nothing")
            case states:
                raise Violation(f"a job went from state {states[0]} to {states[1]}")
        _rule(new["fence"] == old["fence"], "a fence changed without a claim")
        if new["state"] == 2:
            self.died.add(id)

    def _released(self, now: int, who: str, id: int, old: Row) -> None:
        if old["lease_end"] > now:
            self.on_taken_away(id, old, who)

    def _locks(self, now: int, who: str, name: str, old: Row | None, new: Row | None) -> None:
        if old is not None:
            _rule(self.locks.pop(name, None) == old, "the row was not as it was left")
        if new is None:
            assert old is not None
            _rule(old["expires_at"] > now or old["expires_at"] <= now - DAY_MS, "an expired lock was released")
            return
        if old is None or old["owner"] != new["owner"]:
            _rule(old is None or old["expires_at"] <= now, "a lock was taken in an unexpired lease")
            _rule(new["fence"] > self.highest_fence, f"a fencing token that is not greater than {self.highest_fence}")
            self.highest_fence = new["fence"]
            self.on_change(f"lock {name} is {new['owner'][:6]}'s, {new['fence']}")
        else:
            _rule(old["expires_at"] > now, "a lock that had expired was renewed")
            _rule(old["fence"] == new["fence"], "a renewal changed the fencing token")
        self.locks[name] = new

    def _schedules(self, now: int, who: str, name: str, old: Row | None, new: Row | None) -> None:
        if old is not None:
            _rule(self.schedules.pop(name, None) == old, "the row was not as it was left")
        if new is None:
            return
        self.schedules[name] = new
        if old is None or old["interval"] != new["interval"]:
            _rule(new["next_fire_at"] == now + new["interval"], "the first boundary is not one interval from now")
            grid = Fired(new["interval"], new["next_fire_at"], cursor=new["next_fire_at"])
            self.grids[name].append(grid)
            return
        _rule(new["realigned_total"] == old["realigned_total"], "a cursor was moved that no clock had set wrongly")
        grid = self.grids[name][-1]
        fired, skipped = new["fired_total"] - old["fired_total"], new["skipped_total"] - old["skipped_total"]
        owed = [old["next_fire_at"] + n * grid.interval for n in range(fired)]
        _rule(self._pending.pop(name, []) == owed, f"not the boundaries that were due: {owed}")
        _rule(
            new["next_fire_at"] == old["next_fire_at"] + (fired + skipped) * grid.interval,
            "the cursor does not account for what fired and what was skipped",
        )
        _rule(fired <= CATCH_UP, "more than 64 boundaries in one tick")
        _rule(skipped == 0 or fired == CATCH_UP, "boundaries were skipped although fewer than 64 fired")
        _rule(not fired or new["next_fire_at"] > now, "a tick left a boundary behind")
        grid.fired += owed
        grid.skipped += skipped
        grid.cursor = new["next_fire_at"]
        if fired:
            self.on_change(f"schedule {name} fired {fired}, skipped {skipped}")


def _rule(kept: object, broken: str) -> None:
    if not kept:
        raise Violation(broken)
