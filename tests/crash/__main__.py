"""``python -m tests.crash --kills 200``: a campaign as long as one likes, for which no test run has the time.

Exits with 1 if a promise was broken; the ledger and the database are then kept. The other tests of this folder have a
long form too: ``pytest tests/crash --long``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

from tests.crash.killing import run_campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many processes to kill (default: 200)")
    parser.add_argument("--seed", type=int, help="the seed of all dice (default: a new one)")
    parser.add_argument(
        "--pace", type=float, default=0.25, help="seconds between two actions, on average (default: 0.25)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the ledger and the database")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="alkstore-crash-"))
    print(f"seed {seed}, in {folder}", flush=True)
    report = trio.run(partial(run_campaign, folder, kills=options.kills, seed=seed, pace=options.pace))
    print(report)
    if not report.broken and not options.keep:
        shutil.rmtree(folder)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
