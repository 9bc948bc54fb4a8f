"""Two tasks want the same lock; so could two processes.

    python docs/examples/lock.py [file]

Each holder has a fencing token that is larger than that of the one before.
"""

from __future__ import annotations

import sys

import trio

from alkstore import Store, open_store


async def report(store: Store, who: str) -> None:
    async with store.lock("nightly-report").hold(ttl=30) as held:
        print(f"{who} holds the lock with token {held.fencing_token}")
        await trio.sleep(0.2)  # renewed for as long as this takes; cancelled, with LockLost, if the lease is lost
        print(f"{who} is done")


async def main(path: str) -> None:
    async with open_store(path) as store:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report, store, "one")
            nursery.start_soon(report, store, "another")

        held = await store.lock("nightly-report").acquire(ttl=30)  # does not wait: None if somebody has it
        print(f"free again: {held is not None}")
        if held is not None:
            await held.release()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else ":memory:")
