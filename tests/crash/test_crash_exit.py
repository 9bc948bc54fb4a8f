"""Programs that end, with the store closed or not (H06): the process exits, and what was committed is there."""

from __future__ import annotations

import sys
import time
from typing import Any

import trio

from alkstore import JobHandle, StopToken, open_store
from tests.crash.child import Talk
from tests.crash.harness import Child, Processes, rows

JOBS = "SELECT payload FROM __alkstore_jobs ORDER BY id"

EXITS_WITHIN_S = 10.0
"""It takes a tenth of a second; a thread that nobody ends would take for ever; the rest is for a loaded machine."""

kept: list[Any] = []
"""What a program keeps alive until the interpreter ends."""


def unclosed(talk: Talk, path: str, keep: bool) -> None:
    async def main() -> None:
        opening = open_store(path)
        store = await opening.__aenter__()
        for n in range(20):
            await store.queue("q").enqueue(n)
        if keep:
            kept.extend((opening, store))
        talk.say("end of main")

    trio.run(main)


def closed(talk: Talk, path: str) -> None:
    async def main() -> None:
        async with open_store(path) as store:
            for n in range(20):
                await store.queue("q").enqueue(n)
        talk.say("end of main")

    trio.run(main)


def exiting_handler(talk: Talk, path: str, plain: bool) -> None:
    async def handler(job: JobHandle) -> None:
        leave(job)

    def leave(job: JobHandle) -> None:
        talk.say("end of main")
        sys.exit(7)

    async def main() -> None:
        async with open_store(path) as store:
            await store.queue("q", max_attempts=3).enqueue(0)
            await store.queue("q").work(leave if plain else handler, stop=StopToken())

    trio.run(main)


async def exit_of(child: Child) -> tuple[int, float]:
    """Wait for the end of the process; return its status, and for how long it went on after the end of main."""
    end = (await child.hear("end of main"))["at"]
    status = await child.ended()
    took = time.monotonic() - end
    print(f"exit {took:.2f} s after the end of main")
    return status, took


async def test_a_program_that_closes_its_store_exits(processes: Processes, path: str) -> None:
    """H06."""
    status, took = await exit_of(await processes.start(closed, path=path))
    assert (status, took < EXITS_WITHIN_S) == (0, True)
    assert rows(path, JOBS) == [(str(n),) for n in range(20)]


async def test_a_program_that_drops_its_store_exits_with_a_resource_warning(processes: Processes, path: str) -> None:
    """H06."""
    child = await processes.start(unclosed, path=path, keep=False)
    _, took = await exit_of(child)
    assert "ResourceWarning" in child.errors()
    assert took < EXITS_WITHIN_S
    assert rows(path, JOBS) == [(str(n),) for n in range(20)]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_program_that_keeps_its_store_open_exits_with_a_resource_warning(
    processes: Processes, path: str
) -> None:
    """H06."""
    child = await processes.start(unclosed, path=path, keep=True)
    _, took = await exit_of(child)
    assert "ResourceWarning" in child.errors()
    assert took < EXITS_WITHIN_S
    assert rows(path, JOBS) == [(str(n),) for n in range(20)]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_sys_exit_in_a_handler_ends_the_program_with_its_status(processes: Processes, path: str) -> None:
    """H06."""
    child = await processes.start(exiting_handler, path=path, plain=False)
    status, took = await exit_of(child)
    assert (status, took < EXITS_WITHIN_S, child.errors()) == (7, True, "")
    ((state, attempt, error),) = rows(path, "SELECT state, attempt, error FROM __alkstore_jobs")
    assert (state, attempt) == (0, 1)
    assert "SystemExit" in error


async def test_sys_exit_in_a_plain_handler_ends_the_program_with_its_status(processes: Processes, path: str) -> None:
    """H06."""
    child = await processes.start(exiting_handler, path=path, plain=True)
    status, took = await exit_of(child)
    assert (status, took < EXITS_WITHIN_S, child.errors()) == (7, True, "")
    ((state, attempt, error),) = rows(path, "SELECT state, attempt, error FROM __alkstore_jobs")
    assert (state, attempt) == (0, 1)
    assert "SystemExit" in error
