"""What a seed makes of a simulated day: which faults, how often, how long, on how many processes."""

from __future__ import annotations

import math
from random import Random

from attrs import frozen

from alkstore.testing import Faults

__all__ = ["Plan"]


@frozen
class Plan:
    """What a seed makes of the day."""

    timely: bool
    """No clock steps and nothing stops: then two handlers never meet at all."""
    faults: Faults
    length: float
    """Seconds until the faults cease."""
    nodes: int
    leadership_ttl: float
    visibility: float
    deployed_every: float
    """Seconds until each process is stopped gracefully and started anew, over and over."""

    @property
    def sound(self) -> bool:
        """Every write succeeds, in time."""
        return self.timely and not self.faults.full

    @classmethod
    def of(cls, seed: int) -> Plan:
        random = Random(f"{seed} plan")  # noqa: S311
        timely = random.random() < 0.4
        share = random.choice((0.0, 1.0, 3.0))
        faults = Faults(
            busy=0.01 * share,
            full=0.001 * share,
            before_commit=0.002 * share,
            after_commit=0.002 * share,
            unreadable=0.0005 * share,
            no_file=0.05 * share,
            lost_renewal=0.02 * share,
            slow_group=0.02 * share,
            stall=0.0 if timely else 0.002,
            stall_up_to=random.choice((1.0, 30.0)),
            cancel=random.choice((0.0, 0.0005, 0.002)),
            step_every=None if timely else random.choice((None, 60.0, 300.0)),
            freeze_every=None if timely else random.choice((None, 60.0, 200.0)),
            freeze_up_to=random.choice((5.0, 90.0)),
            kill_every=random.choice((None, 60.0, 200.0)),
        )
        return cls(
            timely=timely,
            faults=faults,
            length=random.choice((60.0, 120.0, 300.0)),
            nodes=random.randint(1, 3),
            leadership_ttl=random.choice((3.0, 10.0, 30.0)),
            visibility=random.choice((1.0, 5.0, 20.0)),
            deployed_every=random.choice((10.0, 60.0, math.inf)),
        )
