"""The power is cut at any sync: what was acknowledged is there, and what was not is there wholly or not at all."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from alkstore.testing.world import repeatable
from tests.simulation.disk import Disk
from tests.simulation.test_io_faults import reopen
from tests.simulation.workload import Answers, settle_accounts, work


@pytest.mark.parametrize("seed", [None, *range(6)], ids=lambda seed: "nothing arrived" if seed is None else str(seed))
def test_acknowledged_work_survives_a_power_cut(quick_folder: Path, seed: int | None) -> None:
    answers = Answers()
    disk = Disk(answered=lambda: len(answers.given))
    clock = trio.testing.MockClock(autojump_threshold=0)
    with disk.plugged_in(), repeatable(seed or 0, clock, lambda: 0.0):
        trio.run(partial(work, quick_folder / "app.db", answers), clock=clock)
    assert len(disk.cuts) > 10
    chance = None if seed is None else random.Random(seed)  # noqa: S311
    for number, cut in enumerate(disk.cuts):
        folder = quick_folder / str(number)
        folder.mkdir()
        path = cut.leave(folder, chance)
        try:
            settle_accounts(path, answers.as_of(cut.answered))
            reopen(path)
        except BaseException as error:
            error.add_note(f"power cut at sync {number} of {len(disk.cuts)}, after {cut.answered} answers")
            raise
