"""Dead letters: failing, cancelling, redriving, pruning, sweeping; and pausing a queue."""

from __future__ import annotations

from typing import Any

import pytest

from alkstore.sql import jobs
from alkstore.sql.jobs import dead_letters
from alkstore.values import Counts, Job, at
from tests.alkstore.sqltx import START, Database, add, claim, ids, new_job


def stored(db: Database, job_id: int) -> Job:
    job = db.run(jobs.get, job_id)
    assert job is not None
    return job


def failed(db: Database, **options: Any) -> int:
    """Enqueue a job, claim it and fail it; return its id."""
    job_id = add(db, **options)
    (job,) = claim(db, "q", "w", 1, None)
    assert job.id == job_id
    assert db.run(jobs.fail, job.id, job.fence, "ValueError: a", "failed")
    return job_id


def redrive_all(db: Database) -> tuple[int, int]:
    """Redrive page by page; return how many jobs, in how many pages."""
    done, pages, after = 0, 0, 0
    next_page: int | None = 0
    while next_page is not None:
        after = next_page
        count, next_page = db.run(jobs.redrive_page, "q", after)
        done += count
        pages += 1
    return done, pages


# ------------------------------------------------------------------------------------- fail, cancel


def test_a_failed_job_is_a_dead_letter_with_its_error(db: Database) -> None:
    job = stored(db, failed(db))
    assert (job.state, job.reason, job.error, job.died_at) == ("dead", "failed", "ValueError: a", at(START))
    assert (job.worker, job.lease_until, job.attempt, job.fence) == (None, None, 1, 1)


def test_a_dead_letter_is_reported_with_its_reason(db: Database) -> None:
    job_id = failed(db)
    assert db.kinds("dead") == [("q", {"id": job_id, "reason": "failed"})]


def test_a_dead_letter_is_never_claimed(db: Database) -> None:
    failed(db)
    db.ms += 10**10
    assert claim(db, "q", "w", 10, None) == []


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_a_live_job_can_be_cancelled(db: Database, state: str) -> None:
    job_id = add(db, delay=1_000 if state == "delayed" else 0)
    if state == "leased":
        claim(db, "q", "w", 1, None)
    assert stored(db, job_id).state == state
    assert db.run(jobs.cancel, "q", job_id)
    assert (stored(db, job_id).state, stored(db, job_id).reason) == ("dead", "cancelled")


def test_a_dead_letter_cannot_be_cancelled(db: Database) -> None:
    job_id = failed(db)
    assert not db.run(jobs.cancel, "q", job_id)
    assert stored(db, job_id).reason == "failed"


def test_an_unknown_job_cannot_be_cancelled(db: Database) -> None:
    assert not db.run(jobs.cancel, "q", 1)


def test_a_job_cannot_be_cancelled_through_another_queue(db: Database) -> None:
    job_id = add(db)
    assert not db.run(jobs.cancel, "other", job_id)
    assert stored(db, job_id).state == "ready"


# ------------------------------------------------------------------------------------------ redrive


def test_a_redriven_job_is_due_now_and_keeps_id_and_fence(db: Database) -> None:
    job_id = failed(db, expires=5_000)
    db.ms += 10_000
    assert db.run(jobs.redrive, "q", job_id)
    job = stored(db, job_id)
    assert (job.state, job.run_at, job.attempt, job.fence) == ("ready", at(db.ms), 0, 1)
    assert (job.expires_at, job.reason, job.died_at) == (None, None, None)


def test_a_redriven_job_keeps_its_last_error(db: Database) -> None:
    job_id = failed(db)
    db.run(jobs.redrive, "q", job_id)
    assert stored(db, job_id).error == "ValueError: a"


def test_a_redriven_job_has_all_its_attempts_again(db: Database) -> None:
    job_id = failed(db, max_attempts=2)
    db.run(jobs.redrive, "q", job_id)
    attempts: list[tuple[int, int]] = []
    for _ in range(5):
        for job in claim(db, "q", "w", 1, None):
            attempts.append((job.attempt, job.fence))
            db.run(jobs.retry, job.id, job.fence, None, 0)
    assert attempts == [(1, 2), (2, 3)]


def test_who_had_the_job_before_it_was_redriven_cannot_settle_it(db: Database) -> None:
    job_id = add(db)
    (before,) = claim(db, "q", "w", 1, None)
    db.run(jobs.cancel, "q", job_id)
    db.run(jobs.redrive, "q", job_id)
    claim(db, "q", "w", 1, None)
    assert not db.run(jobs.ack, before.id, before.fence)


@pytest.mark.parametrize("queue", ["q", "other"])
def test_only_a_dead_letter_of_the_queue_is_redriven(db: Database, queue: str) -> None:
    job_id = add(db) if queue == "q" else failed(db)
    assert not db.run(jobs.redrive, queue, job_id)


def test_a_dead_letter_whose_key_is_taken_is_not_redriven(db: Database) -> None:
    dead = failed(db, key="k")
    live = add(db, key="k")
    assert not db.run(jobs.redrive, "q", dead)
    assert (stored(db, dead).state, stored(db, live).state) == ("dead", "ready")


def test_a_key_held_by_an_expired_job_does_not_keep_a_dead_letter_from_being_redriven(db: Database) -> None:
    dead = failed(db, key="k")
    expired = add(db, key="k", expires=1_000)
    db.ms += 1_000
    assert db.run(jobs.redrive, "q", dead)
    assert (stored(db, dead).state, stored(db, expired).reason) == ("ready", "expired")


def test_redriving_wakes_who_waits_for_the_queue(db: Database) -> None:
    job_id = failed(db)
    db.topics.clear()
    db.run(jobs.redrive, "q", job_id)
    assert db.topics == ["queue:q"]


def test_all_dead_letters_are_redriven_page_by_page(db: Database) -> None:
    db.run(lambda tx: [jobs.cancel(tx, "q", jobs.enqueue(tx, new_job())) for _ in range(2 * dead_letters.PAGE + 1)])
    assert redrive_all(db) == (2 * dead_letters.PAGE + 1, 3)
    assert db.run(jobs.counts, "q") == Counts(delayed=0, ready=2 * dead_letters.PAGE + 1, leased=0, dead=0)


def test_of_two_dead_letters_with_one_key_the_older_is_redriven(db: Database) -> None:
    first, second = failed(db, key="k"), failed(db, key="k")
    assert redrive_all(db) == (1, 1)
    assert (stored(db, first).state, stored(db, second).state) == ("ready", "dead")


def test_redriving_nothing_wakes_nobody(db: Database) -> None:
    assert db.run(jobs.redrive_page, "q", 0) == (0, None)
    assert db.topics == []


# ------------------------------------------------------------------------------------- prune, sweep


@pytest.mark.parametrize(("elapsed", "pruned"), [(999, 0), (1_000, 1)])
def test_dead_letters_of_an_age_are_pruned(db: Database, elapsed: int, pruned: int) -> None:
    failed(db)
    db.ms += elapsed
    assert db.run(jobs.prune, "q", 1_000) == pruned
    assert db.run(jobs.counts, "q").dead == 1 - pruned


def test_pruning_leaves_live_jobs_and_other_queues_alone(db: Database) -> None:
    failed(db)
    kept = [add(db), add(db, "other")]
    db.run(jobs.cancel, "other", kept[1])
    db.ms += 1_000
    assert db.run(jobs.prune, "q", 0) == 1
    assert all(db.run(jobs.get, job_id) for job_id in kept)


def test_pruning_takes_a_page_at_a_time(db: Database) -> None:
    db.run(lambda tx: [jobs.cancel(tx, "q", jobs.enqueue(tx, new_job())) for _ in range(dead_letters.PAGE + 1)])
    assert [db.run(jobs.prune, "q", 0) for _ in range(3)] == [dead_letters.PAGE, 1, 0]


def test_a_sweep_buries_what_has_expired(db: Database) -> None:
    expired, kept = add(db, expires=1_000), add(db, expires=1_001)
    db.ms += 1_000
    assert db.run(jobs.sweep_expired, "q") == 1
    assert (stored(db, expired).reason, stored(db, kept).state) == ("expired", "ready")


def test_a_sweep_leaves_a_job_that_is_being_worked_on_alone(db: Database) -> None:
    job_id = add(db, expires=1_000)
    claim(db, "q", "w", 1, 5_000)
    db.ms += 1_000
    assert db.run(jobs.sweep_expired, "q") == 0
    assert stored(db, job_id).state == "leased"


def test_a_sweep_leaves_other_queues_alone(db: Database) -> None:
    add(db, "other", expires=0)
    assert db.run(jobs.sweep_expired, "q") == 0


def test_a_sweep_takes_a_page_at_a_time(db: Database) -> None:
    db.run(lambda tx: [jobs.enqueue(tx, new_job(expires=0)) for _ in range(dead_letters.PAGE + 1)])
    assert [db.run(jobs.sweep_expired, "q") for _ in range(3)] == [dead_letters.PAGE, 1, 0]


# -------------------------------------------------------------------------------------------- pause


def test_a_paused_queue_gives_nothing_and_shows_nothing_to_wait_for(db: Database) -> None:
    add(db)
    assert db.run(jobs.pause, "q")
    assert claim(db, "q", "w", 1, None) == []
    assert db.run(jobs.look, "q") is None


def test_a_pause_does_not_touch_other_queues(db: Database) -> None:
    db.run(jobs.pause, "q")
    job_id = add(db, "other")
    assert ids(claim(db, "other", "w", 1, None)) == [job_id]


def test_a_paused_queue_can_be_enqueued_to(db: Database) -> None:
    db.run(jobs.pause, "q")
    job_id = add(db)
    db.run(jobs.resume, "q")
    assert ids(claim(db, "q", "w", 1, None)) == [job_id]


def test_a_job_that_was_claimed_before_the_pause_can_be_settled(db: Database) -> None:
    add(db)
    (job,) = claim(db, "q", "w", 1, None)
    db.run(jobs.pause, "q")
    assert db.run(jobs.heartbeat, job.id, job.fence, None)
    assert db.run(jobs.ack, job.id, job.fence)


def test_pausing_and_resuming_tell_whether_they_changed_anything(db: Database) -> None:
    assert [db.run(jobs.pause, "q") for _ in range(2)] == [True, False]
    assert [db.run(jobs.resume, "q") for _ in range(2)] == [True, False]


def test_resuming_wakes_who_waits_for_the_queue(db: Database) -> None:
    db.run(jobs.pause, "q")
    db.run(jobs.resume, "q")
    assert db.topics == ["queue:q"]
