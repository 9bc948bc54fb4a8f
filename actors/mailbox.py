"""How actors talk: typed messages through a bounded mailbox, told (no answer) or asked (one answer).

One actor reads; anybody holds the mailbox and writes. A question is a message class that names its answer,
so that the asker gets it typed::

    @attrs.frozen
    class FreshLease(Ask[Lease]):
        margin: float

    lease = await mailbox.ask(FreshLease(margin=2))  # a Lease

The actor makes its mailbox when it starts and closes it when it ends. A restarted actor has a new one, and
whoever waited for the old one is told so::

    with mailbox:
        async for envelope in mailbox:
            match envelope.message:
                case FreshLease(margin=margin):
                    envelope.reply(await fresh(margin))
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import trio

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
R = TypeVar("R")


class Ask(Generic[R]):
    """The base of a message that is answered with an `R`. Holds nothing; attrs classes may subclass it."""

    __slots__ = ()


class MailboxClosed(Exception):
    """Nobody reads this mailbox any more: the message was not taken, or the question will not be answered.

    A caller finds the actor's new mailbox and tries again, or gives up. A question may have been acted upon
    before the actor ended; a message that was refused was not.
    """


class Envelope(Generic[M_co]):
    """A message as its actor receives it, and the way back to whoever asked."""

    __slots__ = ("_question", "message")

    def __init__(self, message: M_co, question: _Question | None = None) -> None:
        self.message = message
        self._question = question

    @property
    def abandoned(self) -> bool:
        """Whether it was asked and the asker has gone: an answer, and the work for it, would reach nobody."""
        return self._question is not None and self._question.abandoned

    def reply(self, value: object = None) -> None:
        """Answer with `value`. Does nothing for a message that was told, or whose asker has gone.

        Raises RuntimeError if it was answered before. Never waits.
        """
        if self._question is not None:
            self._question.settle(value, None)

    def fail(self, error: Exception) -> None:
        """Answer by raising `error` where the asker waits. Otherwise as `reply`."""
        if self._question is not None:
            self._question.settle(None, error)


class Mailbox(Generic[M]):
    """A bounded queue of messages `M` to one actor.

    Open from the start; `close` it, or leave it as a context manager. All in one trio thread.
    """

    def __init__(self, capacity: int = 16) -> None:
        """`capacity`: messages that lie unread before `tell` and `ask` wait; 0 or more, 0 is a rendezvous."""
        if capacity < 0:
            raise ValueError(f"capacity must be 0 or more messages, not {capacity!r}")
        self._into, self._out_of = trio.open_memory_channel[Envelope[M]](capacity)
        self._open: set[_Question] = set()

    async def tell(self, message: M) -> None:
        """Put `message` in the mailbox; wait while it is full.

        A checkpoint. Cancelled, it has had no effect. Raises MailboxClosed, also when closed while waiting.
        """
        await self._send(Envelope(message))

    def tell_nowait(self, message: M) -> None:
        """As `tell`, but raises trio.WouldBlock when the mailbox is full."""
        try:
            self._into.send_nowait(Envelope(message))
        except trio.ClosedResourceError:
            raise MailboxClosed("the mailbox is closed") from None

    async def ask(self, message: Ask[R]) -> R:
        """Put `message`, one of the `M`, in the mailbox and wait for its answer.

        A checkpoint. Cancelled before the actor received it, the actor never sees it; cancelled later, the
        answer is dropped. Raises what the actor gives to `fail`, and MailboxClosed when the mailbox is, or
        becomes, closed. An actor that asks itself waits for ever.
        """
        question = _Question()
        self._open.add(question)
        try:
            # No type says "an M that is an Ask[R]": the answer's type was worth more than the check.
            await self._send(Envelope(cast(M, message), question))
            return cast(R, await question.answer())
        finally:
            self._open.discard(question)
            question.abandon()

    async def receive(self) -> Envelope[M]:
        """Wait for the next message, in the order they were put in; what nobody asks any more is left out.

        A checkpoint; cancelled, it takes nothing. After `close` gives what was told before, then raises
        MailboxClosed.
        """
        while True:
            try:
                envelope = await self._out_of.receive()
            except trio.EndOfChannel:
                raise MailboxClosed("the mailbox is closed") from None
            if not envelope.abandoned:
                return envelope

    def close(self) -> None:
        """Take no more messages, and answer every open question with MailboxClosed. May be called again."""
        self._into.close()
        for question in self._open:
            question.abandon(MailboxClosed("the mailbox was closed before the answer"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope[M]:
        try:
            return await self.receive()
        except MailboxClosed:
            raise StopAsyncIteration from None

    async def _send(self, envelope: Envelope[M]) -> None:
        try:
            await self._into.send(envelope)
        except trio.ClosedResourceError:
            raise MailboxClosed("the mailbox is closed") from None


class _Question:
    """The way back of one `ask`: answered once, or abandoned by the asker or by the mailbox's end."""

    __slots__ = ("_answered", "_error", "_settled", "_value", "abandoned")

    def __init__(self) -> None:
        self.abandoned = False
        self._answered = False
        self._settled = trio.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def settle(self, value: object, error: Exception | None) -> None:
        if self._answered:
            raise RuntimeError("this message was answered before")
        self._answered = True
        if not self.abandoned:
            self._value, self._error = value, error
            self._settled.set()

    def abandon(self, error: Exception | None = None) -> None:
        if not self._settled.is_set():
            self.abandoned = True
            self._error = error
            self._settled.set()

    async def answer(self) -> Any:
        if not self._settled.is_set():  # an answer that is there is not lost to a cancellation
            await self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._value
