"""Simulate many days, or very many schedule-hours: `python -m tests.simulation --seeds 0:500`, `--hours 100000`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from functools import partial

from attrs import evolve

from alkstore.testing import simulate
from tests.simulation import hours
from tests.simulation.plan import Plan
from tests.simulation.scenario import live


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:25", help="FIRST:PAST_THE_LAST, or one seed")
    parser.add_argument("--hours", type=int, help="schedule-hours (schedules x hours) to live through, instead")
    parser.add_argument("--length", type=float, help="seconds of virtual time until the faults cease")
    parser.add_argument("--digests", action="store_true", help="print each seed's digest and nothing else")
    given = parser.parse_args()
    first, _, past = given.seeds.partition(":")
    seeds = range(int(first), int(past) if past else int(first) + 1)
    if given.hours is not None:
        return hours.main(given.hours, seeds.start)
    logging.disable()  # handlers fail on purpose, thousands of times
    began, events, struck, failed = time.perf_counter(), 0, Counter[str](), []
    for seed in seeds:
        plan = Plan.of(seed)
        if given.length is not None:
            plan = evolve(plan, length=given.length)
        try:
            history = simulate(seed, partial(live, plan=plan), faults=plan.faults)
        except Exception as error:  # noqa: BLE001 - it is told, and the other seeds are still of interest
            failed.append(seed)
            print(f"seed {seed} FAILED: {type(error).__name__}: {error}")
            print("\n".join(getattr(error, "__notes__", [])), flush=True)
            continue
        if given.digests:
            print(seed, history.digest)
        events += history.count
        struck.update(line.split("fault ", 1)[1].split()[0] for line in history.lines if ": fault " in line)
    if not given.digests:
        print(f"{len(seeds)} seeds, {events:,} events, {time.perf_counter() - began:.0f} s; faults: {dict(struck)}")
        print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
