"""The baselines' frontier of loss over time, and whether a routed model lies below it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A method at one point of its sweep, over seeds.

    Attributes:
        method: Name of its config.
        label: What it is called in tables.
        group: `"routed"`, `"baseline"` or `"tried"`.
        value: Budget, depth weight, or layers dropped.
        means: Mean over seeds of every metric.
        losses: Validation loss of each seed, in nats.
        times: Prefill time over the dense base's, of one seed in every round.
    """

    method: str
    label: str
    group: str
    value: float
    means: dict[str, float]
    losses: list[float]
    times: list[float]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def time(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Standard deviation of the loss over seeds; 0 for one seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0

    @property
    def time_error(self) -> float:
        """Standard error of the median over rounds (1.25 times that of a mean)."""
        return 1.25 * statistics.stdev(self.times) / len(self.times) ** 0.5 if len(self.times) > 1 else 0.0

    def joint(self, other: Frontier) -> float:
        """Uncertainty of the distance from the frontier: of both losses over seeds, and of the time it is read at."""
        return math.hypot(self.spread, other.spread, other.slope * self.time_error)


@dataclass(frozen=True)
class Frontier:
    """The best baseline at a given time.

    Attributes:
        label: Which one.
        loss: Between two of its points, in nats.
        spread: Uncertainty of `loss`, from the seeds and the times of the two points.
        slope: Loss per time.
    """

    label: str
    loss: float
    spread: float
    slope: float


def frontier_at(points: Sequence[Point], dense_loss: float, time: float) -> Frontier | None:
    """The lowest of the baselines' curves at `time`; None where no curve reaches that far.

    A curve joins the dense base (time 1) and the points of one baseline with straight lines, in order of time; it
    stays level above time 1.
    """
    found = []
    for method in dict.fromkeys(p.method for p in points if p.group == "baseline"):
        mine = sorted((p for p in points if p.method == method), key=lambda p: p.time)
        curve = [(p.time, p.loss, p.spread, p.time_error) for p in mine if p.time < 1.0] + [(1.0, dense_loss, 0.0, 0.0)]
        if time >= 1.0:
            found.append(Frontier("dense", dense_loss, 0.0, 0.0))
        for (t0, loss0, spread0, error0), (t1, loss1, spread1, error1) in itertools.pairwise(curve):
            if t0 <= time <= t1 and t1 > t0:
                w, slope = (time - t0) / (t1 - t0), (loss1 - loss0) / (t1 - t0)
                loss = loss0 + w * (loss1 - loss0)
                spread = math.hypot(spread0 + w * (spread1 - spread0), slope * (error0 + w * (error1 - error0)))
                found.append(Frontier(mine[0].label, loss, spread, slope))
    return min(found, key=lambda f: f.loss, default=None)


def judge(points: Sequence[Point], dense_loss: float) -> list[str]:
    """One line per budget: whether a routed config beats every baseline at its own time, beyond the seed spread.

    "Beats" means: lower by more than twice `Point.joint`, with two seeds or more. The n-th point of a method without
    budgets counts as its n-th budget.
    """
    lines = []
    budgets = (0.75, 0.5, 0.25, 0.1)
    for budget in budgets:
        better, close = [], []
        for p in points:
            if p.group != "routed" or _budget_of(p, points, budgets) != budget or p.time >= 1.0:
                continue
            static = frontier_at(points, dense_loss, p.time)
            if static is None:
                continue
            margin = p.loss - static.loss
            said = f"{p.label} ({p.loss:.3f} at {p.time:.3f}; {static.label}: {static.loss:.3f}, {margin:+.3f})"
            close.append((margin, said))
            if len(p.losses) > 1 and margin < -2 * p.joint(static):
                better.append((margin, said))
        if better:
            lines.append(
                f"budget {budget:g}: **yes**, {len(better)} of {len(close)}: " + "; ".join(_sorted(better)[:4])
            )
        elif close:
            lines.append(f"budget {budget:g}: **no**; the closest is {_sorted(close)[0]}")
        else:
            lines.append(
                f"budget {budget:g}: no routed config is faster than dense and slower than the fastest baseline"
            )
    return lines


def _sorted(entries: list[tuple[float, str]]) -> list[str]:
    return [said for _, said in sorted(entries)]


def _budget_of(point: Point, points: Sequence[Point], budgets: Sequence[float]) -> float:
    if point.value in budgets and point.method != "halting":
        return point.value
    values = [p.value for p in points if p.method == point.method]
    return budgets[values.index(point.value)]
