"""Mailbox: told and asked, bounded, and honest about an actor that has gone."""

from __future__ import annotations

from typing import assert_type

import attrs
import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from actors import Ask, Envelope, Mailbox, MailboxClosed


@attrs.frozen
class Add:
    amount: int


@attrs.frozen
class Total(Ask[int]):
    pass


Message = Add | Total


async def counter(mailbox: Mailbox[Message]) -> None:
    total = 0
    with mailbox:
        async for envelope in mailbox:
            match envelope.message:
                case Add(amount=amount):
                    total += amount
                case Total():
                    envelope.reply(total)


async def test_an_actor_is_told_and_asked_in_order(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    nursery.start_soon(counter, mailbox)
    await mailbox.tell(Add(3))
    mailbox.tell_nowait(Add(4))
    answer = await mailbox.ask(Total())
    assert_type(answer, int)
    assert answer == 7
    mailbox.close()


async def test_fail_raises_at_the_asker_as_itself(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    error = LookupError("no total")

    async def actor() -> None:
        (await mailbox.receive()).fail(error)

    nursery.start_soon(actor)
    with pytest.raises(LookupError) as raised:
        await mailbox.ask(Total())
    assert raised.value is error


async def test_answering_a_told_message_does_nothing() -> None:
    mailbox: Mailbox[Message] = Mailbox()
    await mailbox.tell(Add(1))
    envelope = await mailbox.receive()
    envelope.reply(1)
    envelope.reply(2)
    envelope.fail(LookupError())
    assert not envelope.abandoned


async def test_answering_twice_is_an_error(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    answers: list[int] = []

    async def asker() -> None:
        answers.append(await mailbox.ask(Total()))

    nursery.start_soon(asker)
    envelope = await mailbox.receive()
    envelope.reply(1)
    with pytest.raises(RuntimeError, match="answered before"):
        envelope.fail(LookupError())
    await wait_all_tasks_blocked()
    with pytest.raises(RuntimeError, match="answered before"):
        envelope.reply(2)
    assert answers == [1]


async def test_a_full_mailbox_makes_tell_wait_and_tell_nowait_fail(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox(1)
    await mailbox.tell(Add(1))
    with pytest.raises(trio.WouldBlock):
        mailbox.tell_nowait(Add(2))
    nursery.start_soon(mailbox.tell, Add(3))
    await wait_all_tasks_blocked()
    assert [(await mailbox.receive()).message for _ in range(2)] == [Add(1), Add(3)]


async def test_a_cancelled_tell_has_had_no_effect(autojump_clock: MockClock) -> None:
    mailbox: Mailbox[Message] = Mailbox(1)
    await mailbox.tell(Add(1))
    with trio.move_on_after(1):
        await mailbox.tell(Add(2))
    mailbox.close()
    assert [envelope.message async for envelope in mailbox] == [Add(1)]


async def test_a_question_cancelled_before_it_is_received_is_never_seen(autojump_clock: MockClock) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    with trio.move_on_after(1) as scope:
        await mailbox.ask(Total())
    await mailbox.tell(Add(1))
    assert scope.cancelled_caught
    assert (await mailbox.receive()).message == Add(1)


async def test_an_asker_that_goes_away_does_not_trouble_the_actor(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    scope = trio.CancelScope()

    async def asker() -> None:
        with scope:
            await mailbox.ask(Total())

    nursery.start_soon(asker)
    envelope = await mailbox.receive()
    before = envelope.abandoned
    scope.cancel()
    await wait_all_tasks_blocked()
    assert (before, envelope.abandoned) == (False, True)
    envelope.reply(1)


async def test_an_answer_given_before_the_cancellation_arrives_is_an_answer(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    answers: list[int] = []
    scope = trio.CancelScope()

    async def asker() -> None:
        with scope:
            answers.append(await mailbox.ask(Total()))

    nursery.start_soon(asker)
    envelope = await mailbox.receive()
    envelope.reply(1)
    scope.cancel()
    await wait_all_tasks_blocked()
    assert answers == [1]


async def test_a_closed_mailbox_takes_nothing(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    mailbox.close()
    mailbox.close()
    with pytest.raises(MailboxClosed):
        await mailbox.tell(Add(1))
    with pytest.raises(MailboxClosed):
        mailbox.tell_nowait(Add(1))
    with pytest.raises(MailboxClosed):
        await mailbox.ask(Total())
    with pytest.raises(MailboxClosed):
        await mailbox.receive()


@pytest.mark.parametrize("received", [False, True])
async def test_closing_answers_open_questions_with_mailbox_closed(received: bool) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    envelope: Envelope[Message] | None = None
    async with trio.open_nursery() as nursery:

        async def asker() -> None:
            with pytest.raises(MailboxClosed, match="before the answer"):
                await mailbox.ask(Total())

        nursery.start_soon(asker)
        await wait_all_tasks_blocked()
        if received:
            envelope = await mailbox.receive()
        mailbox.close()
    if envelope is not None:
        envelope.reply(1)
    with pytest.raises(MailboxClosed):
        await mailbox.receive()


async def test_closing_wakes_tells_that_wait_for_room() -> None:
    mailbox: Mailbox[Message] = Mailbox(0)
    async with trio.open_nursery() as nursery:

        async def teller() -> None:
            with pytest.raises(MailboxClosed):
                await mailbox.tell(Add(1))

        nursery.start_soon(teller)
        await wait_all_tasks_blocked()
        mailbox.close()


async def test_closing_wakes_the_actor(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    read: list[list[Message]] = []

    async def actor() -> None:
        read.append([envelope.message async for envelope in mailbox])

    nursery.start_soon(actor)
    await wait_all_tasks_blocked()
    mailbox.close()
    await wait_all_tasks_blocked()
    assert read == [[]]


async def test_what_was_told_before_the_close_is_still_received() -> None:
    mailbox: Mailbox[Message] = Mailbox()
    await mailbox.tell(Add(1))
    await mailbox.tell(Add(2))
    mailbox.close()
    assert [envelope.message async for envelope in mailbox] == [Add(1), Add(2)]


async def test_an_actor_that_fails_answers_all_who_wait_by_leaving_its_mailbox() -> None:
    mailbox: Mailbox[Message] = Mailbox()

    async def actor() -> None:
        with mailbox:
            await mailbox.receive()
            raise OSError

    async def asker() -> None:
        with pytest.raises(MailboxClosed):
            await mailbox.ask(Total())

    with pytest.RaisesGroup(OSError):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as askers:
                    askers.start_soon(asker)
                    askers.start_soon(asker)
                    await wait_all_tasks_blocked()
                    nursery.start_soon(actor)


async def test_every_operation_is_a_checkpoint(nursery: trio.Nursery) -> None:
    mailbox: Mailbox[Message] = Mailbox()
    with assert_checkpoints():
        await mailbox.tell(Add(1))
    with assert_checkpoints():
        await mailbox.receive()


def test_a_capacity_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="capacity must be 0 or more messages, not -1"):
        Mailbox[Message](-1)
