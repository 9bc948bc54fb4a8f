"""Enqueueing: what is stored, keys, ids, and the ways to look at a job."""

from __future__ import annotations

import sqlite3

import pytest

from alkstore.every import MAX_MS
from alkstore.payload import encode, encode_headers
from alkstore.sql import jobs
from alkstore.values import Counts, JobState, at
from tests.alkstore.sqltx import START, Database, add, claim, ids, new_job


def delete(db: Database, job_id: int) -> None:
    db.run(lambda tx: tx.all("DELETE FROM __alkstore_jobs WHERE id = :id", {"id": job_id}))


# ---------------------------------------------------------------------------- what is stored


def test_a_job_is_stored_as_it_was_given(db: Database) -> None:
    headers = {"traceparent": "00-1"}
    job_id = add(db, "q", encode({"a": ["ü\0", 10**30]}), priority=7, headers=encode_headers(headers), key="k")
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.queue, job.payload, job.headers, job.priority, job.key) == (
        "q",
        {"a": ["ü\0", 10**30]},
        headers,
        7,
        "k",
    )
    assert (job.visibility, job.max_attempts, job.backoff, job.expires_at) == (300.0, 3, 5.0, None)
    assert (job.state, job.attempt, job.fence, job.worker, job.lease_until) == ("ready", 0, 0, None, None)
    assert (job.error, job.reason, job.died_at, job.schedule, job.boundary) == (None, None, None, None, None)
    assert (job.run_at, job.created_at) == (at(START), at(START))


def test_a_job_without_headers_shows_none(db: Database) -> None:
    job = db.run(jobs.get, add(db))
    assert job is not None
    assert job.headers == {}


def test_an_unknown_id_is_no_job(db: Database) -> None:
    assert db.run(jobs.get, 1) is None


def test_a_delay_counts_from_now(db: Database) -> None:
    job = db.run(jobs.get, add(db, delay=1))
    assert job is not None
    assert (job.run_at, job.state) == (at(START + 1), "delayed")


@pytest.mark.parametrize("run_at", [0, START - 1, START, START + 1])
def test_a_moment_to_run_at_is_kept_even_in_the_past(db: Database, run_at: int) -> None:
    job = db.run(jobs.get, add(db, run_at=run_at))
    assert job is not None
    assert job.run_at == at(run_at)


@pytest.mark.parametrize(("run_at", "expires_at"), [(START - 500, START + 100), (START + 500, START + 600)])
def test_expiry_counts_from_now_or_from_when_it_may_run_whichever_is_later(
    db: Database, run_at: int, expires_at: int
) -> None:
    job = db.run(jobs.get, add(db, run_at=run_at, expires=100))
    assert job is not None
    assert job.expires_at == at(expires_at)


def test_no_moment_lies_past_the_year_9999(db: Database) -> None:
    job = db.run(jobs.get, add(db, run_at=MAX_MS + 10**9, expires=10**9))
    assert job is not None
    assert (job.run_at, job.expires_at) == (at(MAX_MS), at(MAX_MS))


def test_enqueueing_wakes_who_waits_for_the_queue(db: Database) -> None:
    add(db, "a")
    assert db.topics == ["queue:a"]


# --------------------------------------------------------------------------------------- ids


def test_ids_grow_within_one_transaction(db: Database) -> None:
    given = db.run(lambda tx: [jobs.enqueue(tx, new_job()) for _ in range(500)])
    assert given == sorted(set(given))


def test_an_id_is_never_used_again_after_the_newest_row_was_deleted(db: Database) -> None:
    seen: set[int] = set()
    for _ in range(50):
        job_id = add(db)
        assert job_id not in seen
        seen.add(job_id)
        (job,) = claim(db, "q", "w", 1, None)
        assert db.run(jobs.ack, job.id, job.fence)


def test_jobs_enqueued_between_deletions_are_claimed_in_the_order_of_enqueueing(db: Database) -> None:
    order: list[int] = []
    for n in range(100):
        order.append(add(db))
        if n % 3 == 0:
            delete(db, order.pop())
    assert [ids(claim(db, "q", "w", 1, None))[0] for _ in order] == order


# -------------------------------------------------------------------------------------- keys


def test_a_key_that_is_live_returns_the_job_that_has_it(db: Database) -> None:
    first = add(db, key="k", payload="1")
    assert add(db, key="k", payload="2") == first
    job = db.run(jobs.get, first)
    assert job is not None
    assert job.payload == 1


@pytest.mark.parametrize("state", ["ready", "delayed", "leased", "lapsed"])
def test_a_key_is_taken_in_every_state_of_a_live_job(db: Database, state: str) -> None:
    first = add(db, key="k", delay=1_000 if state == "delayed" else 0)
    if state in ("leased", "lapsed"):
        claim(db, "q", "w", 1, 1_000)
    if state == "lapsed":
        db.ms += 1_000
    assert add(db, key="k") == first


def test_a_key_is_free_again_after_the_ack(db: Database) -> None:
    first = add(db, key="k")
    (job,) = claim(db, "q", "w", 1, None)
    db.run(jobs.ack, job.id, job.fence)
    assert add(db, key="k") > first


def test_a_dead_letter_does_not_hold_its_key(db: Database) -> None:
    first = add(db, key="k")
    db.run(jobs.cancel, "q", first)
    assert add(db, key="k") > first


def test_an_expired_job_does_not_hold_its_key(db: Database) -> None:
    first = add(db, key="k", expires=1_000)
    db.ms += 1_000
    second = add(db, key="k")
    assert second > first
    assert ids(claim(db, "q", "w", 1, None)) == [second]


def test_an_expired_job_whose_key_is_wanted_becomes_a_dead_letter(db: Database) -> None:
    first = add(db, key="k", expires=1_000)
    db.ms += 1_000
    add(db, key="k")
    (dead,) = db.run(jobs.list_jobs, "q", "dead", 0, 10)
    assert (dead.id, dead.reason) == (first, "expired")


def test_a_lapsed_job_without_an_attempt_left_does_not_hold_its_key(db: Database) -> None:
    first = add(db, key="k", max_attempts=1)
    claim(db, "q", "w", 1, 1_000)
    db.ms += 1_000
    second = add(db, key="k")
    assert second > first
    (dead,) = db.run(jobs.list_jobs, "q", "dead", 0, 10)
    assert (dead.id, dead.reason) == (first, "lease expired")


def test_a_lapsed_job_that_has_expired_too_does_not_hold_its_key(db: Database) -> None:
    first = add(db, key="k", expires=1_000)
    claim(db, "q", "w", 1, 2_000)
    db.ms += 2_000
    assert add(db, key="k") > first


def test_an_expired_job_that_is_being_worked_on_holds_its_key(db: Database) -> None:
    first = add(db, key="k", expires=1_000)
    claim(db, "q", "w", 1, 2_000)
    db.ms += 1_500
    assert add(db, key="k") == first


def test_the_same_key_is_free_in_another_queue(db: Database) -> None:
    assert add(db, "a", key="k") != add(db, "b", key="k")


@pytest.mark.parametrize("other", ["K", "k ", "ｋ", "k\0", ""])
def test_keys_are_compared_byte_by_byte(db: Database, other: str) -> None:
    assert add(db, key="k") != add(db, key=other)


def test_jobs_without_a_key_never_collide(db: Database) -> None:
    assert add(db) != add(db)


def test_the_table_itself_refuses_a_second_live_job_with_a_key(db: Database) -> None:
    add(db, key="k")
    second = add(db)
    with pytest.raises(sqlite3.IntegrityError):
        db.run(lambda tx: tx.all("UPDATE __alkstore_jobs SET key = 'k' WHERE id = :id", {"id": second}))


# -------------------------------------------------------------------------- pages and counts


@pytest.fixture
def one_of_each(db: Database) -> dict[JobState, int]:
    dead = add(db)
    db.run(jobs.cancel, "q", dead)
    leased = add(db)
    claim(db, "q", "w", 1, None)
    return {"dead": dead, "leased": leased, "ready": add(db), "delayed": add(db, delay=1)}


@pytest.mark.parametrize("state", ["delayed", "ready", "leased", "dead"])
def test_a_list_shows_the_jobs_of_one_state(db: Database, one_of_each: dict[JobState, int], state: JobState) -> None:
    (job,) = db.run(jobs.list_jobs, "q", state, 0, 10)
    assert (job.id, job.state) == (one_of_each[state], state)


@pytest.mark.usefixtures("one_of_each")
def test_counts_show_how_many_are_in_each_state(db: Database) -> None:
    add(db, "other")
    add(db)
    assert db.run(jobs.counts, "q") == Counts(delayed=1, ready=2, leased=1, dead=1)


def test_an_empty_queue_counts_nothing(db: Database) -> None:
    assert db.run(jobs.counts, "q") == Counts(0, 0, 0, 0)


@pytest.mark.parametrize("state", ["delayed", "ready", "leased", "dead"])
def test_pages_by_id_show_every_job_once(db: Database, state: JobState) -> None:
    all_ids = [add(db, priority=n % 3, delay=1_000 if state == "delayed" else 0) for n in range(7)]
    add(db, "other")
    if state == "leased":
        claim(db, "q", "w", 7, None)
    if state == "dead":
        for job_id in all_ids:
            db.run(jobs.cancel, "q", job_id)
    pages: list[list[int]] = []
    after = 0
    while page := ids(db.run(jobs.list_jobs, "q", state, after, 3)):
        pages.append(page)
        after = page[-1]
    assert pages == [all_ids[:3], all_ids[3:6], all_ids[6:]]
