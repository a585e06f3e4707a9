"""Means over seeds with an interval of Student's t, and what they say to a statement.

Every difference has two intervals: one that holds with 95 % for all statements of a table together
(Bonferroni), which decides, and one that holds with 95 % for this statement alone, which is shown
next to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

MIN_SEEDS = 3  # with fewer, a spread says nothing
AGREES, DISAGREES, OPEN, NOT_RUN = "agrees", "disagrees", "open", "not run"
STATES = (AGREES, DISAGREES, OPEN, NOT_RUN)  # of a claim; no other word stands for a verdict
EVERYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """Mean over the seeds and the intervals around it,
    which are unbounded with fewer than `MIN_SEEDS`.

    Attributes:
        seeds: Their number.
        mean: The mean of one number per seed.
        low, high: The interval that holds together with those of the other statements.
        alone: The interval of this statement alone.
    """

    seeds: int
    mean: float
    low: float
    high: float
    alone: tuple[float, float] = EVERYWHERE

    def sign(self) -> int:
        """-1 where the whole interval is below zero, 1 where it is above, else 0."""
        return (self.low > 0) - (self.high < 0)

    def inside(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high

    def outside(self, low: float, high: float) -> bool:
        return self.high < low or high < self.low

    def by_itself(self) -> Interval:
        """The same mean with the interval of this statement alone."""
        return replace(self, low=self.alone[0], high=self.alone[1])

    def tell(self, show: Callable[[float], str] = "{:+.4f}".format) -> str:
        """`-0.0200 (-0.0300 to -0.0100; alone -0.0250 to -0.0150), 3 seeds`."""
        if not self.seeds:
            return "no common seed"
        if self.seeds < MIN_SEEDS:
            return f"{show(self.mean)}, only {self.seeds} common seed{'s' * (self.seeds > 1)}"
        together, alone = (
            f"{show(low)} to {show(high)}" for low, high in ((self.low, self.high), self.alone)
        )
        told = together if together == alone else f"{together}; alone {alone}"
        return f"{show(self.mean)} ({told}), {self.seeds} seeds"


def tell_mean(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """`0.123 ± 0.004`: mean and standard error; of a single value, the value."""
    known = list(values)
    error = (
        f" ± {statistics.stdev(known) / math.sqrt(len(known)):.{digits}f}" if len(known) > 1 else ""
    )
    return f"{statistics.fmean(known):{sign}.{digits}f}{error}"


def interval(numbers: Sequence[float], statements: int = 1) -> Interval:
    """The intervals around the mean of one number per seed,
    one of them for `statements` such intervals together."""
    if len(numbers) < MIN_SEEDS:
        return Interval(len(numbers), statistics.fmean(numbers) if numbers else 0.0, *EVERYWHERE)
    from scipy.stats import t as student

    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    centre = statistics.fmean(numbers)
    both = [
        error * float(student.isf(0.05 / count / 2, len(numbers) - 1)) for count in (statements, 1)
    ]
    (low, high), alone = ((centre - reach, centre + reach) for reach in both)
    return Interval(len(numbers), centre, low, high, alone)


def answer(found: Interval, expected: str, margin: float = 0.0) -> str:
    """Whether a difference is what a statement says: AGREES, DISAGREES or OPEN.

    Args:
        found: The difference.
        expected: `"lower"`, `"higher"`, `"equal"` (within the margin; outside of it is the
            opposite) or `"not higher"` (than the margin).
        margin: What counts as equal.
    """
    if expected == "equal":
        return (
            AGREES
            if found.inside(-margin, margin)
            else DISAGREES
            if found.outside(-margin, margin)
            else OPEN
        )
    if expected == "not higher":
        return AGREES if found.high <= margin else DISAGREES if found.low > margin else OPEN
    direction = {"lower": -1, "higher": 1}[expected]
    return {direction: AGREES, -direction: DISAGREES, 0: OPEN}[found.sign()]
