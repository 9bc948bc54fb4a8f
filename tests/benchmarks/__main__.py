"""Runs the benchmarks: `python -m tests.benchmarks [name …]`. Exits with 1 if one that has a bound is over it."""

from __future__ import annotations

import sys

from tests.benchmarks import claim, cron, enqueue, wake, worker, year

BENCHMARKS = {"claim": claim, "enqueue": enqueue, "worker": worker, "wake": wake, "year": year, "cron": cron}

if __name__ == "__main__":
    names = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    sys.exit(max([BENCHMARKS[name].main() for name in names]))
