"""The actor runtime: stop tokens, mailboxes, supervisors, and the actors that lead, tick, work and deliver.

Knows trio, and nothing of where the work comes from: `actors.ports` states what the actors need.
"""

from actors.child import Backoff, Child, ChildEvent, ChildInfo, Intensity, RestartsExceeded, log_event
from actors.deliverer import Deliverer
from actors.events import Broadcast, Subscription
from actors.handlers import HandlerTimeout
from actors.leadership import Leadership
from actors.mailbox import Ask, Envelope, Mailbox, MailboxClosed
from actors.stop import StopToken
from actors.supervisor import Supervisor, SupervisorStopping
from actors.ticker import Ticker, lead_and_tick
from actors.worker import Worker

__all__ = [
    "Ask",
    "Backoff",
    "Broadcast",
    "Child",
    "ChildEvent",
    "ChildInfo",
    "Deliverer",
    "Envelope",
    "HandlerTimeout",
    "Intensity",
    "Leadership",
    "Mailbox",
    "MailboxClosed",
    "RestartsExceeded",
    "StopToken",
    "Subscription",
    "Supervisor",
    "SupervisorStopping",
    "Ticker",
    "Worker",
    "lead_and_tick",
    "log_event",
]
