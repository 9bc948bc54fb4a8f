"""The truth outside of the store: one file to which all processes of a campaign append what they do, line by line.

A line is on the disk before the program goes on, so whatever kills the program, the ledger has all that it did, but
perhaps for its very last step. ``-ing`` is written before a step and ``-ed`` after it: with only the first of them, the
step may have happened.

====================================  ================================================================================
``asking``, ``answered``              a client stores jobs: ``ids`` and ``tokens``
``claimed``                           ``id``, ``fence``, ``claimed_at`` and ``lease_end`` (ms by the store's clock);
                                      whether a handler begins depends on whether the worker is told to stop
``started``                           a handler begins: ``id``, ``fence``, ``attempt``, ``max_attempts``, ``token``,
                                      ``key``, ``schedule``, ``boundary``
``ended``, ``raised``                 it has done its work, or has failed
``beat``                              its lease was renewed: ``id``, ``fence``, ``lease_end``
``acking``, ``acked``                 ``id``, ``fence``, ``now`` (ms by the store's clock), and the ``answer``
``settling``, ``settled``             the same for every other finaliser, with its ``kind``
``leads``, ``lost``                   a runner leads, with the fencing ``token``, or does not any more
``died``                              the process kills itself at its ``point``
``killed``, ``stopped``, ``told``     the driver does it to ``whom``: SIGKILL, SIGSTOP, SIGTERM
``jumped``                            the driver sets the clock forward, by ``seconds``
====================================  ================================================================================
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, field

__all__ = ["Entry", "Ledger", "read"]

Entry: TypeAlias = dict[str, Any]
"""One line: ``what`` happened, ``by`` whom, ``at`` which time of the machine's monotonic clock, and the facts."""


@define(eq=False)
class Ledger:
    """Appends to the file `path` in the name of `by`. May be used in any thread."""

    path: str
    by: str
    _file: int = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, **facts: object) -> None:
        """Append one line, and return when it is on the disk."""
        line = json.dumps({"what": what, "by": self.by, "at": time.monotonic(), **facts}).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"half a line was written to {self.path}")
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read(path: str) -> list[Entry]:
    """Return the whole ledger, in the order in which it was written."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
