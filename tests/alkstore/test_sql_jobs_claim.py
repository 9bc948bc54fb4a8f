"""A claim: leases, limits, lapsed leases, expired jobs, and when to look again."""

from __future__ import annotations

from pathlib import Path

import pytest

from alkstore.sql import jobs
from alkstore.sql.jobs import claiming
from alkstore.values import at
from tests.alkstore.sqltx import START, Database, add, claim, ids, new_job

# ------------------------------------------------------------------------- what a claim does


def test_a_claimed_job_is_leased_to_the_worker_for_its_own_visibility(db: Database) -> None:
    add(db, visibility=2_000)
    (job,) = claim(db, "q", "w", 1, None)
    assert (job.state, job.worker, job.lease_until) == ("leased", "w", at(START + 2_000))


def test_a_claim_may_ask_for_a_lease_of_its_own(db: Database) -> None:
    add(db, visibility=2_000)
    (job,) = claim(db, "q", "w", 1, 100)
    assert job.lease_until == at(START + 100)


def test_attempts_and_fences_are_counted_at_the_claim(db: Database) -> None:
    add(db)
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        (job,) = claim(db, "q", "w", 1, 1_000)
        seen.append((job.attempt, job.fence))
        db.ms += 1_000
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_a_claim_of_one_leases_one_of_many(db: Database) -> None:
    for _ in range(21):
        add(db)
    assert len(claim(db, "q", "w", 1, None)) == 1
    assert db.run(jobs.counts, "q").leased == 1


@pytest.mark.parametrize("limit", [1, 2, 20, 21, 1_000])
def test_as_many_are_leased_as_are_returned(db: Database, limit: int) -> None:
    for n in range(21):
        add(db, priority=n % 5)
    assert len(claim(db, "q", "w", limit, None)) == db.run(jobs.counts, "q").leased == min(limit, 21)


def test_a_job_is_due_at_the_very_millisecond(db: Database) -> None:
    job_id = add(db, delay=1_000)
    db.ms += 999
    assert claim(db, "q", "w", 1, None) == []
    db.ms += 1
    assert ids(claim(db, "q", "w", 1, None)) == [job_id]


def test_a_delayed_job_of_high_priority_does_not_hide_a_due_one_of_low_priority(db: Database) -> None:
    add(db, priority=100, delay=1)
    low = add(db, priority=-100)
    assert ids(claim(db, "q", "w", 1, None)) == [low]


def test_an_empty_queue_gives_nothing(db: Database) -> None:
    assert claim(db, "q", "w", 1_000, None) == []


def test_a_claim_is_reported_with_its_jobs(db: Database) -> None:
    wanted = [add(db), add(db)]
    claim(db, "q", "w", 10, None)
    assert db.kinds("claimed") == [("q", {"worker": "w", "ids": wanted})]


def test_an_empty_claim_reports_nothing(db: Database) -> None:
    claim(db, "q", "w", 10, None)
    assert db.events == []


# ----------------------------------------------------------------------------- lapsed leases


def test_a_live_lease_is_not_claimed(db: Database) -> None:
    add(db)
    claim(db, "q", "w1", 1, 1_000)
    db.ms += 999
    assert claim(db, "q", "w2", 1, None) == []


def test_a_lease_is_over_at_its_end_for_the_next_claimer(db: Database) -> None:
    job_id = add(db)
    claim(db, "q", "w1", 1, 1_000)
    db.ms += 1_000
    (job,) = claim(db, "q", "w2", 1, None)
    assert (job.id, job.worker, job.attempt, job.error) == (job_id, "w2", 2, "lease expired")


def test_a_lapsed_job_keeps_its_place_in_the_order(db: Database) -> None:
    first, second = add(db), add(db)
    claim(db, "q", "w1", 1, 1_000)
    db.ms += 1_000
    assert ids(claim(db, "q", "w2", 2, None)) == [first, second]


def test_a_job_that_kills_its_workers_is_delivered_as_often_as_it_may_be_and_no_more(db: Database) -> None:
    job_id = add(db, max_attempts=3)
    deliveries = 0
    for _ in range(10):
        deliveries += len(claim(db, "q", "w", 1, 1_000))
        db.ms += 1_000
    job = db.run(jobs.get, job_id)
    assert deliveries == 3
    assert job is not None
    assert (job.state, job.reason, job.died_at) == ("dead", "lease expired", at(START + 3_000))
    assert job.error == "lease expired on attempt 3 of 3; attempts exhausted"


def test_a_dead_letter_made_by_a_claim_is_reported(db: Database) -> None:
    job_id = add(db, max_attempts=1)
    claim(db, "q", "w", 1, 1_000)
    db.ms += 1_000
    claim(db, "q", "w", 1, None)
    assert db.kinds("dead") == [("q", {"id": job_id, "reason": "lease expired"})]


# ------------------------------------------------------------------------------ expired jobs


@pytest.mark.parametrize(("elapsed", "claimed"), [(999, 1), (1_000, 0), (1_001, 0)])
def test_a_job_is_expired_from_the_very_millisecond(db: Database, elapsed: int, claimed: int) -> None:
    add(db, expires=1_000)
    db.ms += elapsed
    assert len(claim(db, "q", "w", 1, None)) == claimed


def test_an_expired_job_met_by_a_claim_is_a_dead_letter(db: Database) -> None:
    job_id = add(db, expires=1_000)
    db.ms += 2_000
    claim(db, "q", "w", 1, None)
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.state, job.reason, job.died_at, job.attempt) == ("dead", "expired", at(START + 2_000), 0)


def test_a_lapsed_job_that_expired_while_it_was_leased_is_a_dead_letter(db: Database) -> None:
    job_id = add(db, expires=1_000)
    claim(db, "q", "w", 1, 2_000)
    db.ms += 2_000
    assert claim(db, "q", "w", 1, None) == []
    job = db.run(jobs.get, job_id)
    assert job is not None
    assert (job.state, job.reason) == ("dead", "expired")


def test_a_claim_finds_the_live_job_behind_many_expired_ones(db: Database) -> None:
    db.run(lambda tx: [jobs.enqueue(tx, new_job(expires=1_000, priority=n % 7)) for n in range(1_000)])
    live = add(db, priority=-1)
    db.ms += 1_000
    assert ids(claim(db, "q", "w", 1, None)) == [live]
    assert db.run(jobs.counts, "q").dead == 1_000


@pytest.mark.parametrize("limit", [1, 10, 1_000])
def test_a_claim_buries_1024_expired_jobs_at_most(db: Database, limit: int) -> None:
    db.run(lambda tx: [jobs.enqueue(tx, new_job(expires=1_000)) for _ in range(3_000)])
    db.ms += 1_000
    assert claim(db, "q", "w", limit, None) == []
    assert db.run(jobs.counts, "q").dead == 1_024


def test_after_a_claim_that_had_to_stop_there_is_more_to_find_at_once(db: Database) -> None:
    db.run(lambda tx: [jobs.enqueue(tx, new_job(expires=1_000)) for _ in range(1_500)])
    live = add(db)
    db.ms += 1_000
    claim(db, "q", "w", 1, None)
    next_at = db.run(jobs.look, "q")
    assert next_at is not None
    assert next_at <= db.ms
    assert ids(claim(db, "q", "w", 1, None)) == [live]


# ------------------------------------------------------------------------ when to look again


@pytest.mark.parametrize("priorities", [(0,), (0, 5), (5, 0), (-100, 100, 3)])
def test_a_look_tells_the_soonest_delayed_job_of_any_priority(db: Database, priorities: tuple[int, ...]) -> None:
    for n, priority in enumerate(priorities):
        add(db, priority=priority, delay=1_000 + n)
    assert db.run(jobs.look, "q") == START + 1_000


def test_a_look_tells_the_end_of_a_lease(db: Database) -> None:
    add(db)
    claim(db, "q", "w", 1, 700)
    add(db, delay=1_000)
    assert db.run(jobs.look, "q") == START + 700


def test_a_look_tells_that_a_job_is_due(db: Database) -> None:
    add(db, delay=1_000)
    db.ms += 5_000
    assert db.run(jobs.look, "q") == START + 1_000


def test_an_empty_claim_tells_what_a_look_tells(db: Database) -> None:
    add(db, delay=1_000)
    found = db.run(jobs.claim, "q", "w", 1, None)
    assert (found.jobs, found.next_at) == ([], START + 1_000)


def test_a_claim_that_has_brought_jobs_tells_when_another_may(db: Database) -> None:
    add(db)
    add(db)
    add(db, delay=1_000)
    assert db.run(jobs.claim, "q", "w", 1, None).next_at == START  # the second one is due
    assert db.run(jobs.claim, "q", "w", 1, None).next_at == START + 1_000


def test_a_job_whose_moment_has_come_takes_its_place_in_the_order(db: Database) -> None:
    urgent = add(db, delay=1_000, priority=1)
    early = add(db, delay=500)
    assert claim(db, "q", "w", 9, None) == []
    db.ms += 1_000
    late = add(db)
    assert ids(claim(db, "q", "w", 9, None)) == [urgent, early, late]


def test_more_jobs_than_one_claim_lets_in_come_due_at_once(db: Database) -> None:
    """None is given away before all have their places: of those that are let in last one may be the first."""
    for _ in range(claiming.UNPARKED_PER_CLAIM + 4):
        add(db, delay=1_000)
    urgent = add(db, delay=1_001, priority=1)
    db.ms += 1_001
    found = db.run(jobs.claim, "q", "w", 1, None)
    assert (found.jobs, found.next_at) == ([], db.ms)
    assert ids(claim(db, "q", "w", 1, None)) == [urgent]
    assert [len(claim(db, "q", "w", 1_000, None)) for _ in range(3)] == [1_000, 4, 0]


def test_more_leases_than_one_claim_takes_back_lapse_at_once(db: Database) -> None:
    for _ in range(claiming.LAPSED_PER_CLAIM + 4):
        add(db, priority=1)
    claim(db, "q", "w", 1_000, 1_000)
    urgent = add(db, priority=2)
    claim(db, "q", "w", 1, 1_001)
    db.ms += 1_001
    found = db.run(jobs.claim, "q", "w", 1, None)
    assert (found.jobs, found.next_at) == ([], db.ms)
    assert ids(claim(db, "q", "w", 1, None)) == [urgent]
    assert [len(claim(db, "q", "w", 1_000, None)) for _ in range(2)] == [claiming.LAPSED_PER_CLAIM + 4, 0]


def test_a_clock_that_was_set_back_makes_due_jobs_wait_again(db: Database) -> None:
    waiting = add(db, priority=1)
    db.ms -= 500
    due = add(db)
    assert db.run(jobs.look, "q") == db.ms
    assert ids(claim(db, "q", "w", 9, None)) == [due]
    assert db.run(jobs.look, "q") == START
    db.ms += 500
    assert ids(claim(db, "q", "w", 9, None)) == [waiting]


def test_a_look_at_nothing_claimable_tells_no_moment(db: Database) -> None:
    add(db, "other")
    db.run(jobs.cancel, "q", add(db))
    assert db.run(jobs.look, "q") is None


# ------------------------------------------------------------------------------ transactions


def test_after_a_claim_of_one_of_two_another_connection_can_write_at_once(tmp_path: Path) -> None:
    mine, other = Database(tmp_path / "a.db"), Database(tmp_path / "a.db", create=False)
    add(mine)
    add(mine)
    claim(mine, "q", "w", 1, None)
    assert add(other) == 3
    assert other.run(jobs.counts, "q").leased == 1
    mine.connection.close()
    other.connection.close()
