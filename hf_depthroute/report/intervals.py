"""Means over seeds with an interval of Student's t, and what they say to a statement.

The intervals are as wide as makes several statements hold at once (Bonferroni).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MIN_SEEDS = 3  # with fewer, a spread says nothing
HOLDS, OPPOSITE, OPEN = "holds", "opposite", "open"


@dataclass(frozen=True)
class Interval:
    """Mean over the seeds and the interval around it; unbounded with fewer than `MIN_SEEDS`."""

    seeds: int
    mean: float
    low: float
    high: float

    def sign(self) -> int:
        """-1 where the whole interval is below zero, 1 where it is above, else 0."""
        return (self.low > 0) - (self.high < 0)

    def inside(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high

    def outside(self, low: float, high: float) -> bool:
        return self.high < low or high < self.low

    def tell(self, show: Callable[[float], str] = "{:+.4f}".format) -> str:
        """`-0.0200 (-0.0300 to -0.0100), 3 seeds`."""
        if not self.seeds:
            return "no common seed"
        if self.seeds < MIN_SEEDS:
            return f"{show(self.mean)}, only {self.seeds} common seed{'s' * (self.seeds > 1)}"
        return f"{show(self.mean)} ({show(self.low)} to {show(self.high)}), {self.seeds} seeds"


def tell_mean(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """`0.123 ± 0.004`: mean and standard error; of a single value, the value."""
    known = list(values)
    error = f" ± {statistics.stdev(known) / math.sqrt(len(known)):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):{sign}.{digits}f}{error}"


def interval(numbers: Sequence[float], statements: int = 1) -> Interval:
    """The interval around the mean of one number per seed, with 95 % for `statements` such intervals together."""
    if len(numbers) < MIN_SEEDS:
        return Interval(len(numbers), statistics.fmean(numbers) if numbers else 0.0, -math.inf, math.inf)
    from scipy.stats import t as student

    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    reach = float(student.isf(0.05 / statements / 2, len(numbers) - 1)) * error
    centre = statistics.fmean(numbers)
    return Interval(len(numbers), centre, centre - reach, centre + reach)


def answer(found: Interval, expected: str, margin: float = 0.0) -> str:
    """Whether a difference is what a statement says: HOLDS, OPPOSITE or OPEN.

    Args:
        found: The difference.
        expected: `"lower"`, `"higher"`, `"equal"` (within the margin; the opposite is outside of it) or `"not higher"`
            (than the margin).
        margin: What counts as equal.
    """
    if expected == "equal":
        return HOLDS if found.inside(-margin, margin) else OPPOSITE if found.outside(-margin, margin) else OPEN
    if expected == "not higher":
        return HOLDS if found.high <= margin else OPPOSITE if found.low > margin else OPEN
    direction = {"lower": -1, "higher": 1}[expected]
    return {direction: HOLDS, -direction: OPPOSITE, 0: OPEN}[found.sign()]
