"""The verdict on a campaign: what the ledger says was done, against what the store has kept."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from attrs import define, field, frozen

from tests.crash.harness import rows
from tests.crash.ledger import Entry

__all__ = ["Facts", "Grid", "Left", "facts_of", "judge"]


@frozen
class Left:
    """A job that is still in the store."""

    state: int
    reason: str | None
    token: str
    schedule: str | None = None
    boundary: int | None = None


@frozen
class Grid:
    """A schedule: where it began, and how it stands. In ms."""

    name: str
    first: int
    interval: int
    cursor: int
    fired: int
    skipped: int


@frozen
class Facts:
    """How the store stands at the end, when nothing is to be done any more."""

    now: int
    """When the runners were told to stop, by the store's clock."""
    last_id: int
    """Ids are given without a gap, and never twice: every one up to this was a job."""
    left: dict[int, Left]
    grids: list[Grid]
    orders: set[str]
    """The tokens of the rows that were committed together with a message."""
    integrity: str


def facts_of(path: str, now: int, first_boundaries: dict[str, int]) -> Facts:
    """Read behind the store's back."""
    left = rows(
        path, "SELECT id, state, reason, json_extract(payload, '$.token'), schedule, boundary FROM __alkstore_jobs"
    )
    grids = rows(
        path,
        "SELECT name, interval, next_fire_at, fired_total, skipped_total FROM __alkstore_scheduler_tasks",
    )
    return Facts(
        now=now,
        last_id=rows(path, "SELECT seq FROM sqlite_sequence WHERE name = '__alkstore_jobs'")[0][0],
        left={id: Left(*about) for id, *about in left},
        grids=[Grid(name, first_boundaries[name], *numbers) for name, *numbers in grids],
        orders={token for (token,) in rows(path, "SELECT token FROM orders")},
        integrity=rows(path, "PRAGMA integrity_check")[0][0],
    )


@define(eq=False)
class Lives:
    """The ledger, sorted by job."""

    claimed: defaultdict[int, list[Entry]] = field(factory=lambda: defaultdict(list))
    started: defaultdict[int, list[Entry]] = field(factory=lambda: defaultdict(list))
    ended: set[tuple[int, int]] = field(factory=set)
    acking: set[tuple[int, int]] = field(factory=set)
    won: list[tuple[int, int]] = field(factory=list)
    """The claims whose finaliser, of whatever kind, was answered True."""
    refused: set[tuple[int, int]] = field(factory=set)
    """The claims of which some finaliser was answered False."""
    asked_at: dict[tuple[int, int], int] = field(factory=dict)
    """When the last finaliser of a claim began, by the store's clock."""
    acked: list[tuple[int, int]] = field(factory=list)
    settling: defaultdict[tuple[int, int], list[Entry]] = field(factory=lambda: defaultdict(list))
    lease_end: dict[tuple[int, int], int] = field(factory=dict)
    tokens: defaultdict[int, set[str]] = field(factory=lambda: defaultdict(set))
    answered: list[int] = field(factory=list)
    leading: list[int] = field(factory=list)

    def given_up(self, claim: tuple[int, int], by: float = math.inf, kind: str = "") -> bool:
        """Whether this claim was settled by then, otherwise than by an ack, as far as one can know."""
        return claim not in self.refused and any(
            entry["at"] <= by and entry["kind"].endswith(kind) for entry in self.settling[claim]
        )

    def take(self, entry: Entry) -> None:
        what = entry["what"]
        claim = (entry.get("id", 0), entry.get("fence", 0))
        if what == "answered":
            for id, token in zip(entry["ids"], entry["tokens"], strict=True):
                self.answered.append(id)
                self.tokens[id].add(token)
        elif what == "claimed":
            self.claimed[entry["id"]].append(entry)
            self.lease_end[claim] = entry["lease_end"]
        elif what == "started":
            self.started[entry["id"]].append(entry)
            self.tokens[entry["id"]].add(entry["token"])
        elif what == "beat":
            self.lease_end[claim] = max(self.lease_end[claim], entry["lease_end"])
        elif what == "ended":
            self.ended.add(claim)
        elif what == "acking":
            self.acking.add(claim)
            self.asked_at[claim] = entry["now"]
        elif what == "settling":
            self.settling[claim].append(entry)
            self.asked_at[claim] = entry["now"]
        elif what in ("acked", "settled"):
            if not entry["answer"]:
                self.refused.add(claim)
                return
            self.won.append(claim)
            if what == "acked":
                self.acked.append(claim)
        elif what == "leads":
            self.leading.append(entry["token"])


def judge(ledger: Iterable[Entry], facts: Facts) -> list[str]:
    """Return every promise that was broken, in words; an empty list: none."""
    lives = Lives()
    for entry in ledger:
        lives.take(entry)
    for id, left in facts.left.items():
        lives.tokens[id].add(left.token)
    checks = (_integrity, _lost, _repeated, _late, _overlapping, _over_budget, _boundaries, _orders, _identity)
    return [broken for check in checks for broken in check(lives, facts)]


def _integrity(lives: Lives, facts: Facts) -> Iterator[str]:
    if facts.integrity != "ok":
        yield f"integrity_check: {facts.integrity}"


def _lost(lives: Lives, facts: Facts) -> Iterator[str]:
    """Every job that was stored has been handled to its end and acknowledged, or is a dead letter with a reason."""
    for id in lives.answered:
        if not 1 <= id <= facts.last_id:
            yield f"job {id} was answered, and the store never had it"
    for id in range(1, facts.last_id + 1):
        left = facts.left.get(id)
        if left is not None:
            if left.state != 2:
                yield f"job {id} is still in state {left.state} when nothing is to be done any more"
            elif not left.reason:
                yield f"job {id} is a dead letter without a reason"
        elif not _is_done(lives, id):
            yield f"job {id} is lost: it is not in the store, and nobody has handled and acknowledged it"


def _is_done(lives: Lives, id: int) -> bool:
    claims = {(id, entry["fence"]) for entry in lives.started[id]}
    return bool(claims & lives.ended & lives.acking)


def _repeated(lives: Lives, facts: Facts) -> Iterator[str]:
    """A claim runs once, an acknowledged job never again, and one finaliser wins, once."""
    for id, entries in lives.started.items():
        for fence, count in Counter(entry["fence"] for entry in entries).items():
            if count > 1:
                yield f"job {id} was started {count} times with fence {fence}"
    for id, fence in lives.acked:
        if any(entry["fence"] > fence for entry in lives.started[id]):
            yield f"job {id} was acknowledged with fence {fence}, and started again"
        if id in facts.left:
            yield f"job {id} was acknowledged with fence {fence}, and is in the store"
    for (id, fence), count in Counter(lives.won).items():
        if count > 1:
            yield f"job {id} with fence {fence} was settled {count} times"
    for id, count in Counter(id for id, _ in lives.acked).items():
        if count > 1:
            yield f"job {id} was acknowledged {count} times"


def _late(lives: Lives, facts: Facts) -> Iterator[str]:
    """A lease that is over is over for everyone, whether somebody else has taken the job or not."""
    for id, fence in lives.won:
        late = lives.asked_at[id, fence] - lives.lease_end[id, fence]
        if late >= 0:
            yield f"job {id} was settled with fence {fence} {late} ms after the end of its lease"


def _overlapping(lives: Lives, facts: Facts) -> Iterator[str]:
    """No claim is given while another one's lease runs, unless that one was settled."""
    for id, entries in lives.claimed.items():
        by_fence = sorted(entries, key=lambda entry: int(entry["fence"]))
        for before, after in pairwise(by_fence):
            if before["fence"] == after["fence"]:
                yield f"job {id} was claimed twice with fence {after['fence']}"
                continue
            claim = (id, before["fence"])
            if not lives.given_up(claim, by=after["at"]) and after["claimed_at"] < lives.lease_end[claim]:
                yield (
                    f"job {id} was claimed with fence {after['fence']} {lives.lease_end[claim] - after['claimed_at']} "
                    f"ms before the end of the lease of fence {before['fence']}"
                )


def _over_budget(lives: Lives, facts: Facts) -> Iterator[str]:
    """A handler starts at most as often as its job has attempts, not counting those that were given back."""
    for id, entries in lives.started.items():
        given_back = sum(lives.given_up((id, entry["fence"]), kind="_give_back") for entry in entries)
        budget = entries[0]["max_attempts"]
        if len(entries) - given_back > budget:
            yield f"job {id} was started {len(entries)} times, given back {given_back} times, with {budget} attempts"
        if any(not 1 <= entry["attempt"] <= budget for entry in entries):
            yield f"job {id} was started with an attempt out of 1 to {budget}"


def _boundaries(lives: Lives, facts: Facts) -> Iterator[str]:
    """Each elapsed boundary has fired one job, or is counted as skipped."""
    fired: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for id, about in _fired(lives, facts):
        fired[about].add(id)
    for (name, boundary), ids in fired.items():
        if len(ids) > 1:
            yield f"boundary {boundary} of {name} has fired the jobs {sorted(ids)}"
    for grid in facts.grids:
        boundaries = {boundary for name, boundary in fired if name == grid.name}
        elapsed = range(grid.first, grid.cursor, grid.interval)
        if stray := boundaries - set(elapsed):
            yield f"{grid.name} has fired {sorted(stray)}, which is not on its grid"
        if (grid.cursor - grid.first) % grid.interval:
            yield f"the cursor of {grid.name} has left its grid"
        if grid.cursor <= facts.now:
            yield f"{grid.name} has not fired its boundary {grid.cursor}, and it is {facts.now}"
        if len(boundaries) != grid.fired:
            yield f"{grid.name} counts {grid.fired} boundaries as fired, and {len(boundaries)} have come"
        if grid.fired + grid.skipped != len(elapsed):
            yield f"{grid.name}: {len(elapsed)} have elapsed, {grid.fired} were fired and {grid.skipped} skipped"


def _fired(lives: Lives, facts: Facts) -> Iterator[tuple[int, tuple[str, int]]]:
    for id, entries in lives.started.items():
        for entry in entries:
            if entry["schedule"] is not None:
                yield id, (entry["schedule"], entry["boundary"])
    for id, left in facts.left.items():
        if left.schedule is not None and left.boundary is not None:
            yield id, (left.schedule, left.boundary)


def _orders(lives: Lives, facts: Facts) -> Iterator[str]:
    """A row of the user's and its message are both there, or neither."""
    told = {token for tokens in lives.tokens.values() for token in tokens if token.startswith("order ")}
    for token in sorted(facts.orders - told):
        yield f"{token} was committed without its message"
    for token in sorted(told - facts.orders):
        yield f"the message of {token} was committed without it"


def _identity(lives: Lives, facts: Facts) -> Iterator[str]:
    """An id is one job for ever, a message has one idempotency key, and a fencing token one leader."""
    for id, tokens in lives.tokens.items():
        if len(tokens) > 1:
            yield f"job {id} was {sorted(tokens)}"
    for id, entries in lives.started.items():
        keys: set[Any] = {entry["key"] for entry in entries}
        if len(keys) > 1:
            yield f"job {id} has had the keys {sorted(map(str, keys))}"
    for token, count in Counter(lives.leading).items():
        if count > 1:
            yield f"{count} leaders have had the fencing token {token}"
