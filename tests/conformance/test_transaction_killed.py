"""A process that is killed in the middle of a transaction leaves nothing of it behind; afterwards it leaves all."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from alkstore import open_store
from tests.conformance.transacting import NOTHING, ONE_OF_EACH, stored

PROGRAM = """
import os, signal, sys, trio
from alkstore import open_store
from tests.conformance.transacting import EVERYTHING, make_orders

path, face, moment = sys.argv[1:]

def die(now):
    if now == moment:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with open_store(path) as store:
        await make_orders(store)
        if face == "transaction":
            async with store.transaction() as tx:
                for call in EVERYTHING:
                    await call(tx)
                die("before the commit")
        else:
            def function(tx):
                for call in EVERYTHING:
                    call(tx)
                die("before the commit")
            await store.transact(function)
        die("after the commit")

trio.run(main)
"""


@pytest.mark.parametrize("face", ["transaction", "transact"])
@pytest.mark.parametrize(
    ("moment", "left"), [("before the commit", NOTHING), ("after the commit", ONE_OF_EACH)], ids=["before", "after"]
)
async def test_a_killed_process_leaves_all_or_nothing(
    tmp_path: Path, real_time: None, face: str, moment: str, left: dict[str, int]
) -> None:
    path = tmp_path / "app.db"
    killed = await trio.run_process(
        [sys.executable, "-c", PROGRAM, str(path), face, moment],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, b"")
    async with open_store(path, inline=True) as store:
        assert await stored(store) == left
