"""Deliverer: a Worker over an outbox, without heartbeats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from actors.handlers import check_takes_one, is_async
from actors.ports import Work, WorkSource
from actors.worker import Worker


def checked_delivery(delivery: Callable[[Work], Awaitable[object]]) -> Callable[[Work], Awaitable[object]]:
    """Return `delivery`, or raise TypeError: as a plain function it would have delivered, and then count as failed.

    TypeError too if it does not take one argument, the message.
    """
    if not is_async(delivery, "delivery"):
        raise TypeError(f"delivery must be an async function, since it waits for somebody else: {delivery!r}")
    check_takes_one(delivery, "delivery")
    return delivery


class Deliverer(Worker[Work]):
    """Delivers messages one by one, or a few at a time, each bounded by its lease and settled on its own.

    Its source renews nothing (`WorkSource.renew_in` is infinite): whoever delivers for longer than a lease says so
    through the message itself.
    """

    def __init__(
        self,
        source: WorkSource[Work],
        delivery: Callable[[Work], Awaitable[object]],
        *,
        concurrency: int = 1,
        grace: float = 30.0,
    ) -> None:
        """`delivery`: an async function of one message; the options are those of `Worker`. TypeError if it is plain."""
        super().__init__(source, checked_delivery(delivery), concurrency=concurrency, grace=grace)
