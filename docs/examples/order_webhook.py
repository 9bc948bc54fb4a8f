"""An order is stored together with the webhook that tells of it, and the webhook is delivered until it has arrived.

    pip install -e '.[dev]'  # for the HTTP server and client
    python docs/examples/order_webhook.py [file] [seed]

The receiver is another company's server; here it runs in the same program. It is unreliable: sometimes it answers 503,
and sometimes it takes an order and its answer gets lost. So some webhooks are sent twice, and the receiver tells the
second by its idempotency key. A retry comes five seconds later.
"""

from __future__ import annotations

import logging
import random
import sys
from functools import partial

import h11
import httpx
import trio

from actors import StopToken, Subscription, Supervisor
from alkstore import Event, JobHandle, Outbox, Store, open_store

ORDERS = 8


async def place_order(store: Store, total: int) -> None:
    async with store.transaction() as tx:  # both, or neither
        ((number,),) = await tx.execute("INSERT INTO orders (total) VALUES (?) RETURNING number", (total,))
        await tx.outbox_enqueue("webhooks", {"order": number, "total": total}, key=f"order-{number}")
    print(f"shop: order {number} is stored")


async def post(client: httpx.AsyncClient, url: str, message: JobHandle) -> None:
    """Deliver one webhook. Returning acknowledges it; whatever is raised here is retried."""
    assert message.key is not None
    answer = await client.post(url, json=message.payload, headers={"Idempotency-Key": message.key})
    answer.raise_for_status()


async def until_delivered(outbox: Outbox, events: Subscription[Event]) -> None:
    """Wait until no webhook is left, and tell of those that are retried meanwhile."""
    async for event in events:
        if event.kind == "settled" and event.details["outcome"] == "retried":
            print(f"shop: webhook {event.details['id']} failed, next attempt at {event.details['run_at']:%H:%M:%S} UTC")
        counts = await outbox.counts()
        if counts.ready + counts.delayed + counts.leased == 0:
            return


async def main(path: str, seed: int) -> None:
    logging.getLogger("alkstore.worker").setLevel(logging.ERROR)  # that a webhook fails now and then is no news here
    receiver = Receiver(random.Random(seed))  # noqa: S311 - not a secret
    stop = StopToken()
    async with trio.open_nursery() as nursery, open_store(path) as store, httpx.AsyncClient() as client:
        (listener,) = await nursery.start(partial(trio.serve_tcp, receiver.serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/orders"
        await store.transact(
            lambda tx: tx.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, total INTEGER)")
        )
        outbox = store.outbox("webhooks")
        events = store.events()
        async with Supervisor(stop) as supervisor:
            await supervisor.start("webhooks", partial(outbox.deliver, partial(post, client, url)))
            for n in range(1, ORDERS + 1):
                await place_order(store, total=n * 10)
            await until_delivered(outbox, events)
            stop.stop()
        dead = await outbox.dead()
        nursery.cancel_scope.cancel()  # the receiver would go on for ever
    print(f"shop: {ORDERS} orders placed, {len(dead)} webhooks given up")
    print(
        f"receiver: {len(receiver.orders)} orders taken, {receiver.duplicates} duplicates recognised, "
        f"{receiver.refused} refused at first"
    )


class Receiver:
    """An HTTP server that takes each order once, if it takes it, and does not always say so."""

    def __init__(self, chance: random.Random) -> None:
        self.orders: dict[str, bytes] = {}
        self.duplicates = self.refused = 0
        self._chance = chance
        self._met: set[str] = set()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer one connection's requests."""
        connection = h11.Connection(h11.SERVER)
        while True:
            key, body = "", b""
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Request):
                    key = dict(event.headers)[b"idempotency-key"].decode()
                elif isinstance(event, h11.Data):
                    body += event.data
                else:  # the client has closed the connection
                    return
            status = self.take(key, body)
            if status is None:
                return  # the connection is closed without an answer
            headers = [("Content-Length", "0")]
            answer = connection.send(h11.Response(status_code=status, headers=headers))
            await stream.send_all((answer or b"") + (connection.send(h11.EndOfMessage()) or b""))
            connection.start_next_cycle()

    def take(self, key: str, body: bytes) -> int | None:
        """Take an order; the status to answer with, or None: the answer gets lost."""
        mood = "well" if key in self._met else self._chance.choice(["well", "well", "busy", "forgetful"])
        self._met.add(key)
        if mood == "busy":
            self.refused += 1
            print(f"receiver: {key} refused, too busy")
            return 503
        if key in self.orders:
            self.duplicates += 1
            print(f"receiver: {key} is a duplicate, taken before")
            return 200
        self.orders[key] = body
        print(f"receiver: {key} taken: {body.decode()}" + (", but the answer is lost" if mood == "forgetful" else ""))
        return None if mood == "forgetful" else 200


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else ":memory:", int(sys.argv[2]) if len(sys.argv) > 2 else 3)
