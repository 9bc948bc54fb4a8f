"""Leadership: takes and renews the lease, and answers who asks for a fresh one, or raises "lost"."""

from __future__ import annotations

from typing import Generic, NoReturn

import attrs
import trio

from actors.mailbox import Ask, Envelope, Mailbox
from actors.ports import Grant, Lease
from actors.unwinding import last_write


@attrs.frozen
class Fresh(Ask[Grant]):
    """Asks Leadership for a lease that needs no renewal at the moment of the answer."""


class Leadership(Generic[Grant]):
    """One term of office: stands by, leads, and gives the lease back. A new term needs a new Leadership.

    It runs in one group (nursery) with those who ask it, and has no stop token of its own: they end first, then the
    group is cancelled. So the lease is held, and renewed, until the last tick has ended, and is released right
    after it. And if the term ends first, those who ask are cancelled, not answered.
    """

    def __init__(self, lease: Lease[Grant]) -> None:
        self._lease = lease
        self._questions: Mailbox[Fresh[Grant]] = Mailbox()

    async def fresh(self) -> Grant:
        """Wait until we lead and no renewal is due; return the grant. Cancelled: the question is gone."""
        return await self._questions.ask(Fresh())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Wait for the lease as a standby, then lead until the lease is lost or this is cancelled.

        Ready (`task_status.started`) at once: standing by is a state of health. Raises `lease.lost` when a renewal
        is refused. In every other case that ends a lead the lease is released first, under a shield with a
        deadline; trio.TooSlowError says that it took too long, and that the lease will run out by itself.
        """
        task_status.started()
        grant = await self._lease.acquire()
        try:
            await self._lead(grant)
        except BaseException as leaving:
            with last_write("releasing the lease", leaving):
                await self._lease.release(grant)
            raise
        raise self._lease.lost("the lease is not ours any more: its renewal was refused")

    async def _lead(self, grant: Grant) -> None:
        """Renew and answer until a renewal is refused."""
        while True:
            question = None
            if (within := self._lease.renew_in(grant)) > 0:
                with trio.move_on_after(within):
                    question = await self._answer(grant)
            if self._lease.renew_in(grant) <= 0 and not await self._lease.renew(grant):
                return
            if question is not None:
                question.reply(grant)

    async def _answer(self, grant: Grant) -> Envelope[Fresh[Grant]]:
        """Answer until a question comes that has to wait for a renewal, and return that one.

        Looked at after each wait: whoever slept through a suspended machine or a stepped clock renews first.
        """
        while True:
            question = await self._questions.receive()
            if self._lease.renew_in(grant) <= 0:
                return question
            question.reply(grant)
