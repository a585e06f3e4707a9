"""The page's charts: loss and time against the share run full, arithmetic by part, shares and scores by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collect import BudgetCost, LayerScores
from .svg import LETTER, Chart, Scale

_WIDTH, _HEIGHT = 440.0, 270.0
COST_PARTS = {
    "rest": "never skipped: layers and parts that are not routed, and the head",
    "full": "routed and run full",
    "overhead": "routers and cheap branches",
    "saved": "saved",
}


@dataclass(frozen=True)
class Series:
    """A line with marks.

    Attributes:
        name: In the legend.
        kind: Its CSS class: `a`, `b`, `c` or `d`.
        shape: The shape of its marks: `circle`, `square` or `diamond`.
        points: `(x, y, what pointing at it shows)`, ascending in `x`.
    """

    name: str
    kind: str
    shape: str
    points: Sequence[tuple[float, float, str]]


def line_chart(
    key: str,
    title: str,
    description: str,
    series: Sequence[Series],
    y_label: str,
    reference: tuple[str, float] | None = None,
    from_zero: bool = False,
) -> Chart:
    """Lines over the share run full, and a dashed reference line."""
    chart = Chart(key, _WIDTH, _HEIGHT, title, description)
    values = [y for line in series for _, y, _ in line.points] + ([reference[1]] if reference else [])
    low, high = (0.0 if from_zero else min(values)), max(values)
    pad = 0.08 * (high - low) or 0.1
    names = [*((line.name, line) for line in series), *([(reference[0], None)] if reference else [])]
    top = 18.0 + 18.0 * _legend(chart, names)
    x = Scale(0, 1, 56, _WIDTH - 14)
    y = Scale(low if from_zero else low - pad, high + pad, _HEIGHT - 46, top)
    chart.axes(x, y, "share of tokens run full in the routed layers", y_label)
    if reference:
        chart.line(x.start, y(reference[1]), x.stop, y(reference[1]), "reference")
    for line in series:
        chart.path([(x(a), y(b)) for a, b, _ in line.points], f"line {line.kind}")
        for a, b, tip in line.points:
            chart.mark(x(a), y(b), line.shape, f"mark {line.kind}", tip)
    return chart


def _legend(chart: Chart, names: Sequence[tuple[str, Series | None]]) -> int:
    """Lines of the legend at the chart's top."""
    left, row = 56.0, 0
    for name, line in names:
        width = 30 + LETTER * len(name) + 12
        if left + width > _WIDTH and left > 56:
            left, row = 56.0, row + 1
        y = 12.0 + 18 * row
        chart.line(left, y, left + 24, y, f"line {line.kind}" if line else "reference")
        if line:
            chart.mark(left + 12, y, line.shape, f"mark {line.kind}", name)
        chart.text(left + 30, y + 4, name)
        left += width
    return row + 1


def cost_chart(key: str, title: str, description: str, labels: Sequence[str], costs: Sequence[BudgetCost]) -> Chart:
    """Stacked bars of each budget's arithmetic over the dense model's."""
    row, left, right = 34.0, 96.0, 24.0
    height = 28 + row * (len(costs) + 1) + 44
    chart = Chart(key, _WIDTH, height, title, description)
    most = max(1 - min(cost.saved, 0.0) / cost.dense for cost in costs)
    x = Scale(0, most, left, _WIDTH - right)
    bottom = 8 + row * (len(costs) + 1)
    for percent in (0, 25, 50, 75, 100):
        chart.line(x(percent / 100), 4, x(percent / 100), bottom, "grid")
        chart.text(x(percent / 100), bottom + 14, f"{percent}%", "middle")
    chart.text(left - 8, 25, "dense", "end")
    chart.rect(left, 8, x(1) - left, row - 10, "part rest", "dense: 100%")
    for number, (label, cost) in enumerate(zip(labels, costs), 1):
        y = 8 + row * number
        chart.text(left - 8, y + 17, label, "end")
        start = 0.0
        for name, said in COST_PARTS.items():
            share = max(getattr(cost, name), 0.0) / cost.dense
            tip = f"{label}, {said}: {100 * share:.1f}%"
            chart.rect(x(start), y, x(start + share) - x(start), row - 10, f"part {name}", tip)
            start += share
    chart.text((x.start + x.stop) / 2, bottom + 32, "FLOPs, share of the dense model's", "middle")
    return chart


def ratio_chart(
    key: str, title: str, description: str, layers: Mapping[int, LayerScores], budget: float | None
) -> Chart:
    """A bar per routed layer: the share that ran full; dashed, the budget that was asked for."""
    chart = Chart(key, _WIDTH, _HEIGHT - 30, title, description)
    x, y = Scale(0, len(layers), 56, _WIDTH - 14), Scale(0, 1, _HEIGHT - 76, 24)
    chart.axes(x, y, "layer", "share run full", x_ticks=())
    slot = (x.stop - x.start) / len(layers)
    every = math.ceil(len(layers) * 3 * LETTER / (x.stop - x.start))
    for number, (index, layer) in enumerate(layers.items()):
        left = x(number) + 0.14 * slot
        tip = f"layer {index}: {layer.full_ratio:.3f}"
        chart.rect(left, y.stop, 0.72 * slot, y.start - y.stop, "part skipped", tip)
        chart.rect(left, y(layer.full_ratio), 0.72 * slot, y.start - y(layer.full_ratio), "part full", tip)
        if slot > 36:
            chart.text(x(number) + slot / 2, y.stop - 7, f"{layer.full_ratio:.2f}", "middle")
        if number % every == 0:
            chart.text(x(number) + slot / 2, y.start + 16, str(index), "middle")
    if budget is not None:
        chart.line(x.start, y(budget), x.stop, y(budget), "reference")
    return chart


def histogram(key: str, title: str, description: str, layer: LayerScores) -> Chart:
    """Scores of one layer: what ran full, above what did not, and the threshold."""
    width, height = 300.0, 150.0
    chart = Chart(key, width, height, title, description)
    x = Scale(layer.edges[0], layer.edges[-1], 10, width - 10)
    totals = [a + b for a, b in zip(layer.full, layer.skipped)]
    y = Scale(0, max(max(totals), 1), height - 30, 22)
    for number, (full, skipped) in enumerate(zip(layer.full, layer.skipped)):
        low, high = layer.edges[number], layer.edges[number + 1]
        left, wide = x(low), x(high) - x(low) - 0.6
        tip = f"scores {low:.3f} to {high:.3f}: {full:,} full, {skipped:,} skipped"
        if skipped:
            chart.rect(left, y(skipped), wide, y.start - y(skipped), "part skipped", tip)
        if full:
            chart.rect(left, y(full + skipped), wide, y(skipped) - y(full + skipped), "part full", tip)
    chart.line(x.start, y.start, x.stop, y.start, "axis")
    for place, anchor in ((layer.edges[0], "start"), (layer.edges[-1], "end")):
        chart.text(x(place), y.start + 17, f"{place:.2f}", anchor)
    threshold = layer.threshold
    if threshold is not None and layer.edges[0] <= threshold <= layer.edges[-1]:
        chart.line(x(threshold), 18, x(threshold), y.start, "threshold")
        anchor = "start" if x(threshold) < width / 3 else "end" if x(threshold) > 2 * width / 3 else "middle"
        chart.text(x(threshold), 12, f"threshold {threshold:.3f}", anchor)
    return chart
