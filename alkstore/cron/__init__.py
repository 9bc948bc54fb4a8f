"""Cron runs: wall-clock schedules in an explicit time zone, whose occurrences become durable runs."""

from alkstore.cron.expression import preview
from alkstore.cron.handle import Cron
from alkstore.cron.profile import EDGE, STANDALONE, CycleSummary, Profile
from alkstore.cron.running import RunHandle
from alkstore.values import RetryPolicy, Run, RunEvent, Task, Trigger

__all__ = [
    "EDGE",
    "STANDALONE",
    "Cron",
    "CycleSummary",
    "Profile",
    "RetryPolicy",
    "Run",
    "RunEvent",
    "RunHandle",
    "Task",
    "Trigger",
    "preview",
]
