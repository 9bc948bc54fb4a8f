"""Times side by side: the cases of a benchmark take turns in many short rounds, so that noise slows all alike."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence

from attrs import frozen

__all__ = ["Times", "heading", "quantile", "ratio", "take_turns"]


@frozen
class Times:
    """What the rounds of one case took, in seconds, in the order of the rounds."""

    rounds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def each(self, count: int) -> Times:
        """The same for one of the `count` operations of which each round consisted."""
        return Times([seconds / count for seconds in self.rounds])

    def shown(self) -> str:
        """The median in microseconds, and between which bounds eight of ten rounds lie."""
        low, high = quantile(self.rounds, 0.1), quantile(self.rounds, 0.9)
        return f"{self.median * 1e6:9.1f} us ({low * 1e6:.1f} … {high * 1e6:.1f})"

    def rate(self) -> str:
        """How often per second, by the median."""
        return f"{1 / self.median:9,.0f}/s"


async def take_turns(rounds: int, cases: Mapping[str, Callable[[], Awaitable[float]]]) -> dict[str, Times]:
    """Run every case once a round, A B C A B C …, and return the seconds that each said it took."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            taken[name].append(await case())
    return {name: Times(seconds) for name, seconds in taken.items()}


def ratio(of: Times, to: Times) -> tuple[float, str]:
    """How many times as long `of` takes as `to`: the median of the rounds' own ratios, and it with its spread."""
    each = [ours / theirs for ours, theirs in zip(of.rounds, to.rounds, strict=True)]
    middle = statistics.median(each)
    return middle, f"{middle:6.2f} ({quantile(each, 0.1):.2f} … {quantile(each, 0.9):.2f})"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def heading(text: str) -> None:
    """Print the title of a table."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)
