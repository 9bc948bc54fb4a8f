"""A share of the simulated days, short ones; `python -m tests.simulation --seeds 0:500` lives through whole ones."""

from __future__ import annotations

from functools import partial

import pytest
from attrs import evolve

from alkstore.testing import simulate
from tests.simulation import hours
from tests.simulation.hours import Tally, live_through
from tests.simulation.plan import Plan
from tests.simulation.scenario import live

SHORT_S = 15


@pytest.mark.parametrize("seed", range(25))
def test_a_day_of_faults_breaks_no_promise(seed: int) -> None:
    plan = evolve(Plan.of(seed), length=SHORT_S)
    simulate(seed, partial(live, plan=plan), faults=plan.faults)


def test_no_boundary_is_lost_or_doubled() -> None:
    tally = Tally()
    simulate(0, partial(live_through, schedules=50, hours=1, tally=tally), faults=hours.FAULTS)
    assert tally.expected > 100
    assert (tally.lost, tally.doubled, tally.overdue, tally.unhandled) == (0, 0, 0, 0)
