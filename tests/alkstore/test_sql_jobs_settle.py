"""Ack, retry, fail, heartbeat, give back and cancel, and the guard that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alkstore.every import MAX_MS
from alkstore.sql import jobs
from alkstore.sql.tx import Row
from alkstore.values import Job, at
from tests.alkstore.sqltx import START, Database, add, claim, ids, opened

LEASE = 1_000


def claimed(db: Database, **options: Any) -> Job:
    """Enqueue a job and claim it for a second."""
    add(db, **options)
    (job,) = claim(db, "q", "w", 1, LEASE)
    return job


def row(db: Database, job_id: int) -> list[Row]:
    return db.run(lambda tx: tx.all("SELECT * FROM __alkstore_jobs WHERE id = :id", {"id": job_id}))


def stored(db: Database, job_id: int) -> Job:
    job = db.run(jobs.get, job_id)
    assert job is not None
    return job


# ----------------------------------------------------------------------------------------- the guard

Settle = Callable[[Database, int, int], object]

settles = pytest.mark.parametrize(
    "settle",
    [
        pytest.param(lambda db, job_id, fence: db.run(jobs.ack, job_id, fence), id="ack"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.retry, job_id, fence, "e", None), id="retry"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.retry, job_id, fence, "e", 5), id="retry later"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.fail, job_id, fence, "e", "failed"), id="fail"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.give_back, job_id, fence, None, None), id="give back"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.give_back, job_id, fence, None, 5), id="snooze"),
        pytest.param(lambda db, job_id, fence: db.run(jobs.heartbeat, job_id, fence, None), id="heartbeat"),
    ],
)


@settles
def test_a_lease_is_live_until_the_millisecond_before_its_end(db: Database, settle: Settle) -> None:
    job = claimed(db)
    db.ms += LEASE - 1
    assert settle(db, job.id, job.fence)


@settles
@pytest.mark.parametrize("elapsed", [LEASE, LEASE + 1, 10 * LEASE])
def test_from_its_end_on_a_lease_is_over_though_nobody_took_the_job(db: Database, settle: Settle, elapsed: int) -> None:
    job = claimed(db)
    db.ms += elapsed
    before = row(db, job.id)
    assert not settle(db, job.id, job.fence)
    assert row(db, job.id) == before


@settles
def test_who_lost_the_job_to_another_worker_changes_nothing(db: Database, settle: Settle) -> None:
    job = claimed(db)
    db.ms += LEASE
    (again,) = claim(db, "q", "w2", 1, LEASE)
    before = row(db, job.id)
    assert not settle(db, job.id, job.fence)
    assert row(db, job.id) == before
    assert db.run(jobs.ack, again.id, again.fence)


@settles
def test_the_same_worker_in_a_later_claim_is_another_one(db: Database, settle: Settle) -> None:
    job = claimed(db)
    db.ms += LEASE
    claim(db, "q", "w", 1, LEASE)
    assert not settle(db, job.id, job.fence)


@settles
def test_a_job_that_was_given_back_and_claimed_again_is_not_the_first_claimers(db: Database, settle: Settle) -> None:
    job = claimed(db)
    db.run(jobs.give_back, job.id, job.fence, None, None)
    (again,) = claim(db, "q", "w", 1, LEASE)
    assert again.attempt == job.attempt
    assert not settle(db, job.id, job.fence)


@settles
def test_a_job_that_was_taken_back_is_not_its_first_claimers(db: Database, settle: Settle) -> None:
    first = claimed(db, priority=-1)
    db.ms += LEASE
    claimed(db)  # takes back the first, claims the second
    before = row(db, first.id)
    assert not settle(db, first.id, first.fence)
    assert row(db, first.id) == before


@settles
@pytest.mark.parametrize("first", ["ack", "retry", "fail", "give back", "cancel"])
def test_a_job_is_settled_once(db: Database, settle: Settle, first: str) -> None:
    job = claimed(db)
    assert {
        "ack": lambda: db.run(jobs.ack, job.id, job.fence),
        "retry": lambda: db.run(jobs.retry, job.id, job.fence, None, None),
        "fail": lambda: db.run(jobs.fail, job.id, job.fence, None, "failed"),
        "give back": lambda: db.run(jobs.give_back, job.id, job.fence, None, None),
        "cancel": lambda: db.run(jobs.cancel, "q", job.id),
    }[first]()
    before = row(db, job.id)
    assert not settle(db, job.id, job.fence)
    assert row(db, job.id) == before


@settles
def test_a_ready_job_has_no_claim_to_settle(db: Database, settle: Settle) -> None:
    job_id = add(db)
    assert not settle(db, job_id, 0)


@settles
def test_a_refused_settlement_reports_and_wakes_nothing(db: Database, settle: Settle) -> None:
    job = claimed(db)
    db.ms += LEASE
    before = len(db.events), len(db.topics)
    settle(db, job.id, job.fence)
    assert (len(db.events), len(db.topics)) == before


# ------------------------------------------------------------------------------------ ack, heartbeat


def test_an_acknowledged_job_is_gone(db: Database) -> None:
    job = claimed(db)
    assert db.run(jobs.ack, job.id, job.fence)
    assert db.run(jobs.get, job.id) is None


def test_an_ack_is_reported(db: Database) -> None:
    job = claimed(db)
    db.run(jobs.ack, job.id, job.fence)
    assert db.kinds("settled") == [("q", {"id": job.id, "outcome": "acked", "attempt": 1})]


def test_a_heartbeat_extends_the_lease_by_the_claims_own_length(db: Database) -> None:
    job = claimed(db)
    db.ms += 600
    assert db.run(jobs.heartbeat, job.id, job.fence, None) == (LEASE, START + 600 + LEASE)


def test_a_heartbeat_may_ask_for_another_length_which_stays(db: Database) -> None:
    job = claimed(db)
    assert db.run(jobs.heartbeat, job.id, job.fence, 5_000) == (5_000, START + 5_000)
    db.ms += 1
    assert db.run(jobs.heartbeat, job.id, job.fence, None) == (5_000, START + 5_001)


# --------------------------------------------------------------------------------------------- retry


@pytest.mark.parametrize(("attempt", "delay"), [(1, 5_000), (2, 10_000), (3, 20_000), (10, 2_560_000), (11, 3_600_000)])
def test_a_retry_waits_for_its_backoff_doubled_with_each_attempt(db: Database, attempt: int, delay: int) -> None:
    job = claimed(db, max_attempts=10_000)
    db.connection.execute("UPDATE __alkstore_jobs SET attempt = ?", (attempt,))
    assert db.run(jobs.retry, job.id, job.fence, None, None)
    assert stored(db, job.id).run_at == at(START + delay)


def test_the_backoff_is_capped_at_every_attempt_and_never_overflows(db: Database) -> None:
    job = claimed(db, max_attempts=10_000)
    for attempt in [*range(1, 2_001), 9_999]:
        db.connection.execute("UPDATE __alkstore_jobs SET attempt = ?", (attempt,))
        assert db.run(jobs.retry, job.id, job.fence, None, None)
        delay = (stored(db, job.id).run_at - at(START)).total_seconds()
        assert delay == min(5 * 2 ** (attempt - 1), 3_600)
        db.connection.execute(
            "UPDATE __alkstore_jobs SET state = 1, worker = 'w', lease = 1, lease_end = ?", (START + 1,)
        )


@pytest.mark.parametrize("backoff", [0, 1])
def test_a_backoff_of_next_to_nothing_stays_within_the_cap(db: Database, backoff: int) -> None:
    job = claimed(db, max_attempts=10_000, backoff=backoff)
    db.connection.execute("UPDATE __alkstore_jobs SET attempt = 9999")
    db.run(jobs.retry, job.id, job.fence, None, None)
    assert stored(db, job.id).run_at == at(START + (3_600_000 if backoff else 0))


@pytest.mark.parametrize("delay", [0, 1, 7_200_000])
def test_a_retry_with_a_delay_of_its_own_waits_for_that(db: Database, delay: int) -> None:
    job = claimed(db)
    db.run(jobs.retry, job.id, job.fence, None, delay)
    assert stored(db, job.id).run_at == at(START + delay)


def test_no_retry_lies_past_the_year_9999(db: Database) -> None:
    job = claimed(db)
    db.run(jobs.retry, job.id, job.fence, None, MAX_MS)
    assert stored(db, job.id).run_at == at(MAX_MS)


def test_the_last_error_of_a_live_job_is_visible(db: Database) -> None:
    job = claimed(db)
    db.run(jobs.retry, job.id, job.fence, "ValueError: a", 0)
    assert (stored(db, job.id).state, stored(db, job.id).error) == ("ready", "ValueError: a")


def test_a_retry_without_an_error_keeps_the_one_before(db: Database) -> None:
    job = claimed(db)
    db.run(jobs.retry, job.id, job.fence, "ValueError: a", 0)
    (job,) = claim(db, "q", "w", 1, LEASE)
    db.run(jobs.retry, job.id, job.fence, None, 0)
    assert stored(db, job.id).error == "ValueError: a"


def test_a_retry_with_the_attempts_used_up_is_a_dead_letter_with_the_error(db: Database) -> None:
    job = claimed(db, max_attempts=1)
    assert db.run(jobs.retry, job.id, job.fence, "ValueError: a", None)
    dead = stored(db, job.id)
    assert (dead.state, dead.reason, dead.error, dead.died_at) == (
        "dead",
        "attempts exhausted",
        "ValueError: a",
        at(START),
    )


def test_a_retry_wakes_who_waits_for_the_queue(db: Database) -> None:
    job = claimed(db)
    db.topics.clear()
    db.run(jobs.retry, job.id, job.fence, None, 0)
    assert db.topics == ["queue:q"]


@given(st.integers(1, 20), st.integers(1, 20))
def test_a_job_is_delivered_as_often_as_its_attempts_allow(max_attempts: int, tries: int) -> None:
    for db in opened():
        add(db, max_attempts=max_attempts)
        deliveries = 0
        for _ in range(tries):
            for job in claim(db, "q", "w", 1, LEASE):
                deliveries += 1
                db.run(jobs.retry, job.id, job.fence, None, 0)
        assert deliveries == min(max_attempts, tries)


# ----------------------------------------------------------------------------------------- give back


@pytest.mark.parametrize("delay", [None, 0, 500])
def test_giving_back_returns_the_attempt_and_never_the_fence(db: Database, delay: int | None) -> None:
    job = claimed(db)
    assert db.run(jobs.give_back, job.id, job.fence, None, delay)
    assert (stored(db, job.id).attempt, stored(db, job.id).fence) == (0, 1)


def test_a_job_given_back_stands_at_its_old_place(db: Database) -> None:
    job = claimed(db)
    second = add(db)
    db.ms += 500
    db.run(jobs.give_back, job.id, job.fence, None, None)
    assert ids(claim(db, "q", "w", 2, LEASE)) == [job.id, second]


def test_a_snoozed_job_waits(db: Database) -> None:
    job = claimed(db)
    db.run(jobs.give_back, job.id, job.fence, None, 500)
    assert (stored(db, job.id).state, stored(db, job.id).run_at) == ("delayed", at(START + 500))


def test_a_job_can_be_snoozed_more_often_than_it_has_attempts(db: Database) -> None:
    job = claimed(db, max_attempts=1)
    for _ in range(10):
        db.run(jobs.give_back, job.id, job.fence, None, 0)
        (job,) = claim(db, "q", "w", 1, LEASE)
    assert (job.attempt, job.fence) == (1, 11)


def test_a_job_given_back_wakes_who_waits_for_the_queue(db: Database) -> None:
    job = claimed(db)
    db.topics.clear()
    db.run(jobs.give_back, job.id, job.fence, None, None)
    assert db.topics == ["queue:q"]
