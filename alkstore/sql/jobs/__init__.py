"""The life of a job: enqueue, claim, settle, lapse, dead letters. States: 0 ready, 1 leased, 2 dead."""

from alkstore.sql.jobs.claiming import Claimed, claim, look, pause, resume, take, take_back
from alkstore.sql.jobs.dead_letters import PAGE, cancel, prune, redrive, redrive_page, sweep_expired
from alkstore.sql.jobs.enqueueing import NewJob, enqueue, enqueue_many
from alkstore.sql.jobs.looking import counts, get, list_jobs
from alkstore.sql.jobs.settling import ack, delete, fail, give_back, heartbeat, is_held, put_back, retry

__all__ = [
    "PAGE",
    "Claimed",
    "NewJob",
    "ack",
    "cancel",
    "claim",
    "counts",
    "delete",
    "enqueue",
    "enqueue_many",
    "fail",
    "get",
    "give_back",
    "heartbeat",
    "is_held",
    "list_jobs",
    "look",
    "pause",
    "prune",
    "put_back",
    "redrive",
    "redrive_page",
    "resume",
    "retry",
    "sweep_expired",
    "take",
    "take_back",
]
