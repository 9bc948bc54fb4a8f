"""A disk that fails at any one operation, or from there on: nobody is told anything but the truth."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from alkstore import ManualClock, StoreError, open_store
from alkstore.testing.world import repeatable
from tests.simulation.disk import CODES, Disk, Failure
from tests.simulation.workload import START, Answers, settle_accounts, work


def run(disk: Disk, path: Path, answers: Answers, *, heals: bool = True) -> StoreError | None:
    """Do the work on this disk; return what the store's opening or closing said, if it did."""

    def heal() -> None:
        if heals:
            disk.failure = None

    clock = trio.testing.MockClock(autojump_threshold=0)
    with disk.plugged_in(), repeatable(0, clock, lambda: 0.0):
        try:
            trio.run(partial(work, path, answers, heal=heal), clock=clock)
        except StoreError as error:
            return error
    return None


def reopen(path: Path) -> None:
    """A sound disk again: the store opens, and its ids go on growing."""

    async def use() -> None:
        async with open_store(path, driver="apsw", inline=True, clock=ManualClock(START)) as store:
            id = await store.queue("after").enqueue(None)
            (handle,) = await store.queue("after").claim("w")
            assert handle.id == id
            assert await handle.ack()

    trio.run(use, clock=trio.testing.MockClock(autojump_threshold=0))


def operations(folder: Path, operation: str) -> int:
    """How many operations of this kind the work takes on a sound disk."""
    disk, answers = Disk(), Answers()
    assert run(disk, folder / "sound.db", answers) is None
    assert not answers.errors
    settle_accounts(folder / "sound.db", answers)
    return disk.done[operation]


LENGTHS = ("once", "until it is mended", "for good")
STRIDES = {"once": 1, "until it is mended": 9, "for good": 4}
"""Each operation fails once; of the longer failures a share must do."""

CASES = [(name, code, length) for length in LENGTHS for name, codes in CODES.items() for code in codes]


@pytest.mark.parametrize(("operation", "code", "length"), CASES)
def test_every_answer_is_the_truth(quick_folder: Path, operation: str, code: int, length: str) -> None:
    count = operations(quick_folder, operation)
    stride = 3 if operation == "read" else 1 if operation == "sync" else STRIDES[length]
    for_good = length == "for good"
    told = list[StoreError]()
    for nth in range(1, count + 1, stride):
        path = quick_folder / f"{nth}.db"
        answers = Answers()
        disk = Disk(Failure(operation, nth, code, lasting=length != "once"))
        try:
            error = run(disk, path, answers, heals=not for_good)
            settle_accounts(path, answers)
            assert for_good or error is not None or "end" in answers.there, "the store did not go on"
            reopen(path)
        except BaseException as failure:
            failure.add_note(f"{operation} number {nth} of {count} fails with {code}; told {answers.errors}")
            raise
        told += answers.errors if error is None else [error]
        for leftover in quick_folder.glob(f"{nth}.db*"):
            leftover.unlink()
    assert told or operation in ("lock", "truncate", "open"), "the faults have struck nobody"
