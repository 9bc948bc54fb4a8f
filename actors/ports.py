"""What the actors need from the outside: protocols that a durable store fulfils and a test can fake.

An actor decides *when* something happens; its port decides *what* that means in storage. So each actor is tested
alone, in virtual time, without a database.

Rules that hold for every port:

- Times are seconds as float. "By the store's clock" means that the port converts: an actor never reads a wall
  clock, it only asks how many seconds are left.
- Every async method is a checkpoint, also when it has nothing to do or fails.
- A method that is cancelled while it waits has had no effect; one that has begun to write runs to its end.
- Any error that is not named here leaves the actor as it is and reaches its supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias, TypeVar

import attrs

Grant = TypeVar("Grant")
Grant_contra = TypeVar("Grant_contra", contravariant=True)
Seen = TypeVar("Seen")
Work = TypeVar("Work")


class Lease(Protocol[Grant]):
    """The right to lead, for `Leadership`. A grant is opaque to the actors: it proves who leads."""

    @property
    def lost(self) -> type[Exception]:
        """The class of the error that says "not the leader any more"; built with one argument, the reason.

        `Leadership` raises it, and so does `Ticks.tick`; it also tells which errors are a lost lease and no more
        than that, so that several of them at once reach the caller as one.
        """
        ...

    async def acquire(self) -> Grant:
        """Wait, as a standby and for as long as it takes, until the lease is ours.

        Cancelled: nothing is held (a lease won in that very moment is given back).
        """
        ...

    async def renew(self, grant: Grant) -> bool:
        """Extend the lease by its ttl from now on. False: it is not ours any more, and nothing has changed.

        A lease that is over is never revived. After True, `renew_in` is positive. A store that is busy for the moment
        is asked again while the lease lives.
        """
        ...

    async def release(self, grant: Grant) -> None:
        """Give the lease back, so that a standby takes over at once. Nothing happens if it was lost before.

        `Leadership` calls this under a shield with a deadline; cancelled by that, the lease runs out by itself.
        """
        ...

    def renew_in(self, grant: Grant) -> float:
        """Seconds until the next renewal is wanted, by the store's clock. Zero or less: now.

        It is wanted when a third of the ttl has gone since the last one, or when the clock was stepped; so the
        value is never more than a third of the ttl. `math.inf`: never.
        """
        ...


class Ticks(Protocol[Grant_contra, Seen]):
    """The schedules, for `Ticker`."""

    def position(self) -> Seen:
        """Where the change feed stands. Taken before looking, so that no change can slip in between."""
        ...

    async def tick(self, grant: Grant_contra) -> float | None:
        """Fire what is due, and return the seconds until there is something to do again.

        0 (or less): at once, as when more was due than one tick fires. None: nothing is scheduled. The tick's own
        transaction proves that the grant is still valid and raises `Lease.lost` if it is not. A tick is not
        cancelled by a stop, only by a lost lease or from outside.
        """
        ...

    async def changed(self, seen: Seen, within: float | None) -> None:
        """Return when something has moved past `seen`, after `within` seconds (None: no limit), or earlier.

        Zero or less: at once. Returning early costs one look and is how a stepped clock is noticed: no wait on a
        wall clock should be longer than 5 s without a look at it. What `tick` itself has written need not count as
        a change.
        """
        ...


class Cycles(Protocol):
    """Bounded rounds of deciding what is due, for `Coordinator`."""

    async def recover(self) -> None:
        """Mend what a crash has left behind. Called once, before the first cycle."""
        ...

    async def cycle(self) -> float | None:
        """Decide about one page, and return the seconds until there is something to do again; None: nothing is due.

        0 or less: at once, as when there was more than one page. Cancelled: what is decided stays decided.
        """
        ...

    async def changed(self, within: float | None) -> None:
        """Return when something has changed since the cycle took its last look, and as `Ticks.changed` does."""
        ...


@attrs.frozen
class Returned:
    """The handler has returned: the work is done."""


@attrs.frozen(eq=False)
class Raised:
    """The handler has failed, and the attempt is spent. The port decides: retry, discard, snooze, bury."""

    error: BaseException
    """What left the handler, without the parts that only say it was interrupted.

    An Exception (never `trio.Cancelled` or KeyboardInterrupt), a group in the handler's own shape,
    `HandlerTimeout`, or SystemExit.
    """


@attrs.frozen
class Interrupted:
    """The handler was interrupted by us, or never started. The work goes back at once, with its attempt."""

    reason: str
    """Fits after "interrupted by ": "shutdown", "cancellation", "KeyboardInterrupt"."""


Outcome: TypeAlias = Returned | Raised | Interrupted


class WorkSource(Protocol[Work]):
    """Leased work, for `Worker`. `Work` is what the handler gets; works are told apart by identity."""

    async def take(self, limit: int) -> Sequence[Work]:
        """Wait until there is work, and take up to `limit` (≥ 1) of it. Empty (allowed): look again.

        Cancelled: nothing stays taken (what was taken in that very moment is given back).
        """
        ...

    async def renew(self, works: Sequence[Work]) -> Collection[Work]:
        """Extend these leases, each by its own length from now on, in one go. Return those that are lost.

        Lost: the lease is over (it is never revived), the work was cancelled, or somebody else has it. Work that
        its own handler has settled is not lost. For each of the others `renew_in` is positive afterwards. A store that
        is busy for the moment is asked again while any of the leases lives: no handler need end for that. An error
        means that nothing is known about any of them; the worker then fails with it.
        """
        ...

    def lease(self, work: Work) -> float:
        """Seconds that this lease has from a renewal on."""
        ...

    def remaining(self, work: Work) -> float:
        """Seconds left of this lease by the store's clock. Zero or less: over. `math.inf`: settled."""
        ...

    def renew_in(self, work: Work) -> float:
        """Seconds until the next renewal is wanted, by the store's clock. Zero or less: now.

        It is wanted when a third of this work's own lease has gone since the last one, or when the clock was
        stepped; so the value is never more than a third of the lease. `math.inf`: never (settled already, or a
        source without renewals).
        """
        ...

    async def pause(self, seconds: float) -> None:
        """Sleep up to `seconds` (> 0).

        Return early when the store's clock was stepped, or for no reason.
        """
        ...

    async def settle(self, work: Work, outcome: Outcome) -> None:
        """Make the outcome durable: ack, retry, discard, snooze, bury, or give back.

        Called once for each work, unless it was lost, cancelled, or left to its lease; and once more, under a shield
        with a deadline, if the worker is cancelled while it waits. A store that is busy for the moment is asked again
        while the lease lives. A refusal (the lease was not ours any more) and work that its handler has settled itself
        are not errors; an error of the store is, and the worker fails with it.
        """
        ...

    def started(self, work: Work, cancel: Callable[[str], None], look: Callable[[], None]) -> None:
        """The worker has this work now. Keep `cancel` and `look` for as long as the work is of interest.

        `cancel(reason)`, called in the trio thread, cancels the handler's scope at once; the work is then not
        settled. Later calls, also after the work has ended, do nothing. `look()` has to be called when the end of the
        lease was moved by somebody else than `renew`, and when the handler has settled the work itself.
        """
        ...

    def tell(self, work: Work, reason: str) -> None:
        """Let a plain handler see that it should stop (`job.cancelled`). May be called more than once."""
        ...

    def lapsed(self, work: Work) -> None:
        """Report that the handler was cancelled since its lease is about to end: the work is left to it."""
        ...

    def raised(self, work: Work, error: BaseException) -> None:
        """Report what a handler has raised whose work cannot be settled any more: lost, cancelled, or abandoned."""
        ...

    def abandoned(self, work: Work, reason: str) -> None:
        """Report that a plain handler could not be stopped: its thread goes on, its lease runs out."""
        ...
