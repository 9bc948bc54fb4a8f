"""For tests of programs that use a store: virtual time, waiting for what follows, looking, and simulated faults.

- `alkstore_store`, a fixture of the pytest plugin: an empty store in virtual time
- `pass_time`, `settle`, `drain`: let time pass, let everything happen that happens now, let nothing be due
- `SteppedClock`: a clock that can be stepped
- `enqueued`, `assert_enqueued`: what was enqueued
- `simulate`, `Faults`: a whole supervisor tree, repeatable from a seed, while everything around it goes wrong
"""

from __future__ import annotations

from alkstore.testing.clocks import SteppedClock
from alkstore.testing.faults import ROUGH, Faults
from alkstore.testing.history import History
from alkstore.testing.looking import assert_enqueued, enqueued
from alkstore.testing.simulation import Deadlock, Simulation, simulate
from alkstore.testing.waiting import drain, pass_time, settle

__all__ = [
    "ROUGH",
    "Deadlock",
    "Faults",
    "History",
    "Simulation",
    "SteppedClock",
    "assert_enqueued",
    "drain",
    "enqueued",
    "pass_time",
    "settle",
    "simulate",
]
