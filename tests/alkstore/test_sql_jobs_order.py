"""The order of a claim against a naive model, over rows in every state."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from alkstore.sql import jobs
from alkstore.sql.jobs import claiming
from alkstore.sql.tx import Row, Tx
from tests.alkstore.sqltx import START, Database, claim, ids, opened

Planted: TypeAlias = dict[str, int | None]

near = st.integers(-3, 3).map(lambda ms: START + ms)
planted_rows = st.lists(
    st.fixed_dictionaries(
        {
            "state": st.sampled_from([0, 0, 0, 1, 2]),
            "priority": st.sampled_from([-100, -1, 0, 0, 1, 100]) | st.integers(-100, 100),
            "run_at": near,
            "expires_at": st.none() | st.none() | near,
            "lease_end": near,
            "attempt": st.integers(1, 3),
            "max_attempts": st.integers(1, 3),
        }
    ),
    max_size=40,
)

PLANT = """
INSERT INTO __alkstore_jobs (queue, state, priority, run_at, expires_at, attempt, max_attempts,
                             visibility, backoff, worker, lease, lease_end, payload, reason, died_at,
                             created_at)
VALUES (:queue, :state, :priority, :run_at, :expires_at, :attempt, :max_attempts, 1000, 1000,
        :worker, :lease, :lease_end, 'null', :reason, :died_at, 0)
RETURNING id"""


def plant(tx: Tx, queue: str, row: Planted) -> int:
    leased, dead = row["state"] == 1, row["state"] == 2
    found = tx.one(
        PLANT,
        {
            **row,
            "queue": queue,
            "worker": "earlier" if leased else None,
            "lease": 1 if leased else None,
            "lease_end": row["lease_end"] if leased else None,
            "reason": "failed" if dead else None,
            "died_at": 0 if dead else None,
        },
    )
    assert found is not None
    return int(found[0])


def order(row: tuple[int, Planted]) -> tuple[int, int, int]:
    job_id, values = row
    priority, run_at = values["priority"], values["run_at"]
    assert priority is not None
    assert run_at is not None
    return -priority, run_at, job_id


def is_past(moment: int | None) -> bool:
    return moment is not None and moment <= START


@settings(deadline=None)
@given(planted_rows, st.integers(1, 50))
def test_a_claim_returns_what_a_naive_model_returns(rows: list[Planted], limit: int) -> None:
    for db in opened():
        mine = [(db.run(plant, "q", row), row) for row in rows]
        others = [db.run(plant, "other", row) for row in rows]
        before = state_of(db, others)
        exhausted, ready = [], []
        for job_id, row in mine:
            lapsed = row["state"] == 1 and is_past(row["lease_end"])
            if lapsed and (row["attempt"] or 0) >= (row["max_attempts"] or 0):
                exhausted.append(job_id)
            elif (row["state"] == 0 or lapsed) and is_past(row["run_at"]):
                ready.append((job_id, row))
        ready.sort(key=order)
        due = [job_id for job_id, row in ready if not is_past(row["expires_at"])]

        claimed = claim(db, "q", "w", limit, None)

        assert ids(claimed) == due[:limit]
        assert [
            job_id for job_id in exhausted if (job := db.run(jobs.get, job_id)) and job.reason == "lease expired"
        ] == exhausted
        assert state_of(db, others) == before
        untouched = [job_id for job_id, row in mine if row["state"] == 1 and not is_past(row["lease_end"])]
        assert all(
            job is not None and job.worker == "earlier" for job in (db.run(jobs.get, job_id) for job_id in untouched)
        )


@settings(deadline=None)
@given(planted_rows, st.integers(1, 50))
def test_claiming_one_by_one_and_all_at_once_give_the_same_order(rows: list[Planted], limit: int) -> None:
    orders: list[list[int]] = []
    for steps in ([1] * limit, [limit]):
        for db in opened():
            for row in rows:
                db.run(plant, "q", row)
            orders.append([job_id for step in steps for job_id in ids(claim(db, "q", "w", step, None))])
    assert orders[0] == orders[1]


@settings(deadline=None)
@given(planted_rows, st.integers(1, 50))
def test_the_pick_gives_rows_in_claim_order_without_sorting(rows: list[Planted], limit: int) -> None:
    for db in opened():
        mine = [(db.run(plant, "q", row), row) for row in rows]
        due = [(job_id, row) for job_id, row in mine if row["state"] == 0 and is_past(row["run_at"])]
        picked = db.run(lambda tx: tx.all(claiming.PICK, {"queue": "q", "now": START, "limit": limit}))
        assert [row[0] for row in picked] == [job_id for job_id, _ in sorted(due, key=order)][:limit]


def state_of(db: Database, wanted: list[int]) -> list[Row]:
    return [row for row in db.run(lambda tx: tx.all("SELECT * FROM __alkstore_jobs ORDER BY id")) if row[0] in wanted]


@settings(deadline=None)
@given(planted_rows)
def test_whenever_a_claim_would_change_something_a_look_says_now(rows: list[Planted]) -> None:
    for db in opened():
        for row in rows:
            db.run(plant, "q", row)
        next_at = db.run(jobs.look, "q")
        changes = db.connection.total_changes
        claim(db, "q", "w", 1, None)
        assert (db.connection.total_changes > changes) == (next_at is not None and next_at <= START)
