"""Locks: one owner at a time, leases that end, fencing tokens that only grow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alkstore.sql import locks
from alkstore.sql.locks import FORGET_AFTER_MS, Grant
from alkstore.sql.tx import Row
from tests.alkstore.sqltx import START, Database, opened

TTL = 1_000


def acquired(db: Database, name: str = "x", owner: str = "a", ttl: int = TTL) -> Grant:
    grant = db.run(locks.acquire, name, owner, ttl)
    assert grant is not None
    return grant


def rows(db: Database) -> list[Row]:
    return db.run(lambda tx: tx.all("SELECT * FROM __alkstore_locks ORDER BY name"))


# ------------------------------------------------------------------------------------------ acquire


def test_a_free_lock_is_granted(db: Database) -> None:
    assert acquired(db) == Grant("x", "a", 1, TTL, START + TTL)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_lock_that_is_held_is_granted_to_nobody(db: Database, owner: str) -> None:
    acquired(db)
    db.ms += TTL - 1
    before = rows(db)
    assert db.run(locks.acquire, "x", owner, TTL) is None
    assert rows(db) == before


def test_a_lock_is_free_at_the_end_of_its_lease(db: Database) -> None:
    acquired(db)
    db.ms += TTL
    assert acquired(db, owner="b").owner == "b"


def test_locks_of_other_names_are_independent(db: Database) -> None:
    acquired(db, "x")
    acquired(db, "X")


# ------------------------------------------------------------------------------------------- renew


def test_a_renewal_counts_from_now(db: Database) -> None:
    acquired(db)
    db.ms += TTL - 1
    assert db.run(locks.renew, "x", "a", 5_000) == (5_000, db.ms + 5_000)
    assert db.run(locks.expiry, "x") == db.ms + 5_000


@pytest.mark.parametrize("elapsed", [TTL, TTL + 1, 100 * TTL])
def test_an_expired_lease_is_not_revived_though_nobody_took_the_lock(db: Database, elapsed: int) -> None:
    acquired(db)
    db.ms += elapsed
    before = rows(db)
    assert db.run(locks.renew, "x", "a", TTL) is None
    assert rows(db) == before


def test_who_has_lost_the_lock_does_not_renew_the_next_holders(db: Database) -> None:
    acquired(db, owner="a")
    db.ms += TTL
    acquired(db, owner="b")
    before = rows(db)
    assert db.run(locks.renew, "x", "a", TTL) is None
    assert rows(db) == before


def test_a_lock_that_nobody_holds_cannot_be_renewed(db: Database) -> None:
    assert db.run(locks.renew, "x", "a", TTL) is None


# ----------------------------------------------------------------------------------------- release


def test_a_released_lock_is_free_and_its_row_is_gone(db: Database) -> None:
    acquired(db)
    assert db.run(locks.release, "x", "a")
    assert rows(db) == []
    assert db.run(locks.expiry, "x") is None


def test_releasing_wakes_who_waits_for_the_lock(db: Database) -> None:
    acquired(db)
    db.run(locks.release, "x", "a")
    assert db.topics == ["lock:x"]


def test_a_late_release_does_not_take_the_next_holders_lock(db: Database) -> None:
    acquired(db, owner="a")
    db.ms += TTL
    acquired(db, owner="b")
    assert not db.run(locks.release, "x", "a")
    assert db.run(locks.acquire, "x", "c", TTL) is None


def test_an_expired_lease_cannot_be_released(db: Database) -> None:
    acquired(db)
    db.ms += TTL
    before = rows(db)
    assert not db.run(locks.release, "x", "a")
    assert (rows(db), db.topics) == (before, [])


def test_a_lock_is_released_once(db: Database) -> None:
    acquired(db)
    assert [db.run(locks.release, "x", "a") for _ in range(2)] == [True, False]


# ------------------------------------------------------------------------------------------ tokens


def test_tokens_grow_over_all_locks(db: Database) -> None:
    assert [acquired(db, name).fence for name in "zyx"] == [1, 2, 3]


def test_a_token_never_comes_back_after_its_row_was_deleted(db: Database) -> None:
    seen: list[int] = []
    for _ in range(5):
        seen.append(acquired(db).fence)
        db.run(locks.release, "x", "a")
    assert seen == [1, 2, 3, 4, 5]


def test_a_renewal_keeps_the_token(db: Database) -> None:
    fence = acquired(db).fence
    db.run(locks.renew, "x", "a", TTL)
    assert [row[2] for row in rows(db)] == [fence]


# ------------------------------------------------------------------------------------------ forget


def test_a_row_that_expired_a_day_ago_is_forgotten_at_the_next_acquisition(db: Database) -> None:
    acquired(db, "old")
    db.ms += TTL + FORGET_AFTER_MS
    acquired(db, "new")
    assert [row[0] for row in rows(db)] == ["new"]


def test_a_row_that_expired_less_than_a_day_ago_is_kept(db: Database) -> None:
    acquired(db, "old")
    db.ms += TTL + FORGET_AFTER_MS - 1
    acquired(db, "new")
    assert [row[0] for row in rows(db)] == ["new", "old"]


def test_a_forgotten_lock_is_granted_with_a_new_token(db: Database) -> None:
    acquired(db)
    db.ms += TTL + FORGET_AFTER_MS
    assert acquired(db, owner="b").fence == 2


def test_a_hundred_rows_at_most_are_forgotten_at_once(db: Database) -> None:
    for n in range(150):
        acquired(db, f"old {n}")
    db.ms += TTL + FORGET_AFTER_MS
    acquired(db, "new")
    assert len(rows(db)) == 51


# -------------------------------------------------------------------------------------------- model

moves = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "renew", "release"]),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(100, 500),
        st.sampled_from([0, 1, 99, 100, 500, FORGET_AFTER_MS]),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(moves)
def test_locks_agree_with_a_naive_model(steps: list[tuple[str, str, str, int, int]]) -> None:
    for db in opened():
        held: dict[str, tuple[str, int]] = {}
        tokens: list[int] = []
        for action, name, owner, ttl, pause in steps:
            holder, end = held.get(name, ("", 0))
            mine = holder == owner and end > db.ms
            if action == "acquire":
                grant = db.run(locks.acquire, name, owner, ttl)
                assert (grant is not None) == (end <= db.ms)
                if grant is not None:
                    tokens.append(grant.fence)
                    held[name] = (owner, db.ms + ttl)
            elif action == "renew":
                assert db.run(locks.renew, name, owner, ttl) == ((ttl, db.ms + ttl) if mine else None)
                if mine:
                    held[name] = (owner, db.ms + ttl)
            else:
                assert db.run(locks.release, name, owner) == mine
                if mine:
                    del held[name]
            db.ms += pause
        assert tokens == sorted(set(tokens))
