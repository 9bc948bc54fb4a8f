"""What goes wrong in a simulation, and how often: `Faults` says it, a `FaultPlan` decides each time, from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

import trio
from attrs import Attribute, define, field, fields, frozen

from alkstore.testing.history import History
from alkstore.testing.processes import present_life

__all__ = ["ROUGH", "FaultPlan", "Faults"]


def _share(_instance: object, attribute: Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{attribute.name} must be a probability from 0 to 1, not {value!r}")


def _seconds(_instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise ValueError(f"{attribute.name} must be seconds, 0 or more, not {value!r}")


def _chance() -> float:
    return field(default=0.0, validator=_share)


def _mean() -> float | None:
    mean: float | None = field(default=None, validator=_seconds)
    return mean


@frozen(kw_only=True)
class Faults:
    """How often what goes wrong. Nothing does unless it is named.

    The first group are probabilities, from 0 to 1, each time the thing is done; of the second group each happens on
    average once in so many seconds of virtual time, None: never.
    """

    busy: float = _chance()
    """The write lock is somebody else's (SQLITE_BUSY)."""
    full: float = _chance()
    """The disk is full at a write or at COMMIT (SQLITE_FULL): everything in the transaction is undone."""
    before_commit: float = _chance()
    """The disk fails at COMMIT, and nothing is durable (SQLITE_IOERR)."""
    after_commit: float = _chance()
    """The disk fails at COMMIT, and yet all is durable (SQLITE_IOERR): the answer is lost."""
    unreadable: float = _chance()
    """The disk fails at a read (SQLITE_IOERR); nothing is undone by that."""
    no_file: float = _chance()
    """A connection cannot be opened anew (SQLITE_CANTOPEN)."""
    lost_renewal: float = _chance()
    """The renewal of a lease is refused."""
    slow_group: float = _chance()
    """A unit of work takes so long that its group ends."""
    stall: float = _chance()
    """A store call hangs, before or after it has taken effect."""
    cancel: float = _chance()
    """A process, or a part of one that stands in `Simulation.cancellable`, is cancelled at this checkpoint."""

    stall_up_to: float = field(default=5.0, validator=_seconds)
    """Seconds that a call hangs at most."""
    step_every: float | None = _mean()
    """The wall clock is stepped, and stays within `step_up_to` ahead of where it began."""
    step_up_to: float = field(default=3_600.0, validator=_seconds)
    freeze_every: float | None = _mean()
    """One process is stopped, as by SIGSTOP, and goes on later."""
    freeze_up_to: float = field(default=120.0, validator=_seconds)
    """Seconds that a process is stopped at most."""
    kill_every: float | None = _mean()
    """One process is killed, as by SIGKILL, and started anew."""


ROUGH = Faults(
    busy=0.02,
    full=0.001,
    before_commit=0.002,
    after_commit=0.002,
    unreadable=0.0005,
    lost_renewal=0.01,
    slow_group=0.02,
    stall=0.002,
    cancel=0.0002,
    step_every=3_600.0,
    freeze_every=1_800.0,
    kill_every=1_800.0,
)
"""A bad day: every kind of fault, often enough for most hours of it to see some of each."""


@define(eq=False)
class FaultPlan:
    """Decides, each time something may go wrong, whether it does. Everything follows from the seed."""

    faults: Faults
    random: Random
    history: History
    active: bool = field(default=True, init=False)
    """False once the faults have ceased."""
    struck: dict[str, int] = field(factory=dict, init=False)
    """How often each fault has struck."""
    lag_s: float = field(default=0.0, init=False)
    """How far the processor's own clock has gone on while trio's stood still."""

    def __attrs_post_init__(self) -> None:
        self.struck = {attribute.name: 0 for attribute in fields(Faults) if not attribute.name.endswith("_up_to")}

    def strikes(self, fault: str, who: str) -> bool:
        """Return whether `fault` strikes `who` now."""
        chance: float = getattr(self.faults, fault)
        if not self.active or not chance or present_life().spared or self.random.random() >= chance:
            return False
        self.tell(fault, who)
        return True

    def tell(self, fault: str, who: str, more: str = "") -> None:
        """Note that a fault has struck."""
        self.struck[fault] += 1
        self.history.note(who, f"fault {fault}{more}")

    async def stall(self, who: str) -> None:
        """Hang for a while, perhaps; a call that hangs cannot be cancelled."""
        if self.strikes("stall", who):
            with trio.CancelScope(shield=True):
                await trio.sleep(self.random.uniform(0, self.faults.stall_up_to))

    async def wait(self, mean: float) -> None:
        """Wait for the next of what happens on average once in `mean` seconds (Poisson process)."""
        await trio.sleep(self.random.expovariate(1 / mean))
