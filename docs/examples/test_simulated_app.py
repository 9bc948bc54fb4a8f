"""Tests of a small shop: what it enqueues, what it does in time, and how it stands a bad day.

    python -m pytest docs/examples/test_simulated_app.py

`alkstore_store` and `alkstore.testing` come with alkstore; they need pytest, and pytest-trio with
``trio_mode = true``.
"""

from __future__ import annotations

from functools import partial

from actors import StopToken, Supervisor
from alkstore import JobHandle, OutcomeUnknown, Store, StoreError, open_store
from alkstore.testing import ROUGH, Simulation, assert_enqueued, drain, enqueued, pass_time, simulate

# ------------------------------------------------------------------------------------------------------- the shop


async def take_order(store: Store, number: int) -> None:
    """Note the order, and let its invoice be sent if it was noted, and only then."""
    async with store.transaction() as tx:
        await tx.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)")
        await tx.execute("INSERT INTO orders (number) VALUES (?)", (number,))
        await tx.outbox_enqueue("invoices", {"order": number}, key=f"invoice-{number}")


async def send_invoice(sent: set[str], message: JobHandle) -> None:
    """The receiver knows an invoice by its key: it takes the same one twice, and does nothing the second time."""
    assert message.key is not None
    sent.add(message.key)


async def remind(store: Store, customer: str) -> None:
    await store.queue("reminders").enqueue({"to": customer}, delay=3 * 86_400, headers={"kind": "gentle"})


# ---------------------------------------------------------------------------------------- what it has enqueued


async def test_a_customer_is_reminded_gently(alkstore_store: Store) -> None:
    await remind(alkstore_store, "alice@example.com")

    job = await assert_enqueued(
        alkstore_store, "reminders", payload={"to": "alice@example.com"}, headers={"kind": "gentle"}, times=1
    )
    assert job.state == "delayed"
    assert await enqueued(alkstore_store, "invitations") == []


# ------------------------------------------------------------------------------------------------ what time does


async def test_a_reminder_is_sent_after_three_days(alkstore_store: Store) -> None:
    reminded: list[str] = []

    async def send(job: JobHandle) -> None:
        reminded.append(job.payload["to"])

    await remind(alkstore_store, "alice@example.com")
    async with Supervisor() as team:
        await team.start("reminders", partial(alkstore_store.queue("reminders").work, send))
        await pass_time(3 * 86_400 - 1)
        assert reminded == []
        await pass_time(1)
        assert reminded == ["alice@example.com"]
        team.stop()


# -------------------------------------------------------------------------------------------------- a bad day


async def a_day_in_the_shop(sim: Simulation) -> None:
    """Two processes sell and deliver, while disks fail, processes are killed, and the clock is stepped."""
    noted: set[int] = set()
    sent: set[str] = set()

    async def shop(first: int) -> None:
        try:
            async with open_store(sim.path("shop.db")) as store, Supervisor(on_event=lambda _: None) as team:
                await team.start("invoices", partial(store.outbox("invoices").deliver, partial(send_invoice, sent)))
                for number in range(first, first + 100):
                    if number not in noted:
                        await sell(store, number)
                    await pass_time(sim.random.uniform(0, 60))
                await drain(store)
                team.stop()
        except* StoreError as trouble:
            sim.note(f"the shop at {first} has to close: {trouble.exceptions}")

    async def sell(store: Store, number: int) -> None:
        try:
            await take_order(store, number)
        except OutcomeUnknown:
            return  # it may be there, or not: this shop lets it be
        except StoreError:
            return  # it is not there
        noted.add(number)

    for first in (0, 1000):
        sim.process(f"shop{first}", partial(shop, first))
    await pass_time(2 * 3_600)
    sim.cease_faults()

    async with open_store(sim.path("shop.db")) as store:
        stop = StopToken()
        async with Supervisor(stop) as team:
            await team.start("invoices", partial(store.outbox("invoices").deliver, partial(send_invoice, sent)))
            await pass_time(86_400)  # retries wait, and so do the leases of who was killed
            await drain(store)
            stop.stop()
        orders = {number for (number,) in await store.transact(lambda tx: tx.execute("SELECT number FROM orders"))}

    assert noted <= orders  # what was acknowledged is there
    assert sent == {f"invoice-{number}" for number in orders}  # each has its invoice, and there are no others


def test_every_order_gets_its_invoice_whatever_happens() -> None:
    for seed in range(5):
        simulate(seed, a_day_in_the_shop, faults=ROUGH)


def test_the_same_seed_is_the_same_day() -> None:
    assert simulate(3, a_day_in_the_shop, faults=ROUGH).digest == simulate(3, a_day_in_the_shop, faults=ROUGH).digest
