"""The page's charts: loss and time against the share run full, arithmetic by part,
shares and scores by layer.

Matplotlib draws them as SVG that stands in the page itself: text stays text, and colours are CSS
classes of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from .collect import RunReport

_POINTS = 72  # to an inch; a unit of the view box is a point
_FONT = 12.5  # as in the page's style
COST_PARTS = {
    "rest": "never skipped: layers and parts that are not routed, and the head",
    "full": "routed and run full",
    "overhead": "routers and cheap branches",
    "saved": "saved",
}
_Points = Sequence[tuple[float, float, str]]  # x, y, and what pointing at it shows


class Chart:
    """One pair of axes, with a title and a description for those who do not see it.

    `key`, a part of the page's ids, is unique; `size` is the view box's width and height.
    `layout` is Matplotlib's engine that makes room for labels; None for fixed margins.
    """

    def __init__(
        self,
        key: str,
        title: str,
        description: str,
        caption: str,
        size: tuple[float, float] = (440, 270),
        layout: Any = "constrained",
    ) -> None:
        self.key = key
        self.words = {"title": title, "desc": description}
        self.caption = caption
        self.figure = Figure(figsize=(size[0] / _POINTS, size[1] / _POINTS), layout=layout)
        self.axes = self.figure.add_subplot()
        spines = [self.axes.spines[side] for side in ("top", "left", "right")]
        for part in (self.figure.patch, self.axes.patch, *spines):
            part.set_visible(False)
        self.axes.tick_params(length=0)
        self.axes.set_axisbelow(True)
        self._named: dict[str, tuple[str, Sequence[str]]] = {}

    def name(self, artist: Any, kind: str, tips: Sequence[str] = ()) -> None:
        """Give an artist its CSS class, and its marks, or itself, their tips."""
        artist.set_gid(f"{self.key}-{len(self._named)}")
        self._named[artist.get_gid()] = kind, tips

    def bars(self, rows: Sequence[tuple[float, float, float, float, str]], kind: str) -> None:
        """Rectangles of class `part kind`: the lower left corner, width, height, and the tip."""
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h, _ in rows]
        drawn = self.axes.add_collection(PolyCollection(corners, zorder=2))
        self.name(drawn, f"part {kind}", [tip for *_, tip in rows])

    def __html__(self) -> str:
        for text in self.figure.findobj(Text):
            text.set_fontsize(_FONT)
        file = io.BytesIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.key}):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        drawn = ET.fromstring(file.getvalue())
        labelled = " ".join(f"{self.key}-{tag}" for tag in self.words)
        shown = {"viewBox": drawn.attrib["viewBox"], "role": "img", "aria-labelledby": labelled}
        root = ET.Element("svg", {**shown, "class": "chart"})
        for tag, words in self.words.items():
            ET.SubElement(root, tag, {"id": f"{self.key}-{tag}"}).text = words
        root.extend(drawn.findall("{*}g"))
        for part in root.iter():
            self._adapt(part)
        return ET.tostring(root, encoding="unicode")

    def _adapt(self, part: ET.Element) -> None:
        """Replace an element's own style by the page's classes, and add its tips."""
        part.tag = part.tag.rpartition("}")[2]
        style = part.attrib.pop("style", "")
        part.attrib.pop("clip-path", None)
        for name in [name for name in part.attrib if "}" in name]:
            part.attrib[name.rpartition("}")[2]] = part.attrib.pop(name)
        if part.tag == "text":
            part.set("class", "label")
            anchor = re.search(r"text-anchor: (\w+)", style)
            part.set("text-anchor", anchor[1] if anchor else "start")
        if part.tag == "path":
            outline = re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]):.2f}", part.get("d", ""))
            part.set("d", " ".join(outline.split()))
        if part.tag == "g":
            name = part.attrib.pop("id", "")
            # What is not named is what the axes draw themselves: grid lines, and the one spine that
            # is left.
            unnamed = {"line2d": "grid", "patch": "axis"}.get(name.partition("_")[0], "")
            kind, tips = self._named.get(name, (unnamed, ()))
            if kind:
                part.set("class", kind)
            marks = part.findall(".//{*}use") or part.findall(".//{*}path")
            for mark, tip in zip(marks, tips):
                ET.SubElement(mark, "title").text = tip


def loss_chart(report: RunReport) -> Chart:
    """Loss over the share run full, by rule."""
    dense = report.dense["loss"]
    found = []
    for rule, name, kind, mark in (
        ("threshold", "causal threshold", "a", "s"),
        ("fixed", "the adapter's rule", "a", "s"),
        ("topk", "top-k (sees the future)", "b", "o"),
    ):
        rows = [r for r in report.rows if r["rule"] == rule]
        at = "" if rule == "fixed" else ", budget {:g}"
        points = [
            _point(r["full_ratio"], r["loss"], name + at.format(r["budget"]), 4) for r in rows
        ]
        found.append((name, kind, mark, points))
    ends = "; ".join(f"{row['loss']:.3f} at share {row['full_ratio']:.2f}" for row in report.routed)
    title = "Loss against the share run full"
    caption = "Loss: lower is better. The distance to the dashed line is what routing costs."
    chart = Chart("loss-chart", title, f"Dense loss {dense:.3f}. Routed: {ends}.", caption)
    return _lines(chart, found, dense, "loss, nats per token")


def time_chart(report: RunReport) -> Chart:
    """Time and arithmetic over the share run full, of prefill and decode."""
    found = []
    for part, kinds, mark in (("prefill", "ac", "s"), ("decode", "bd", "o")):
        rows = sorted(report.timed(part).values(), key=itemgetter("full_ratio"))
        for name, key, kind, shape in (
            (f"{part}, measured", "ratio", kinds[0], mark),
            (f"{part}, FLOPs", "flops_routed_over_dense", kinds[1], "D"),
        ):
            points = [_point(row["full_ratio"], row[key], name, 3) for row in rows]
            found.append((name, kind, shape, points))
    said = " ".join(
        f"{name}: {', '.join(f'{y:.2f} at share {x:.2f}' for x, y, _ in points)}."
        for name, *_, points in found
        if points
    )
    title = "Time and arithmetic against the share run full"
    caption = (
        "Time: below the dashed line is faster than dense. Dotted, the arithmetic: what the clock "
        "could show."
    )
    chart = Chart("time-chart", title, said, caption)
    _lines(chart, found, 1.0, "of the dense model's").axes.set_ylim(bottom=0)
    return chart


def _point(x: float, y: float, name: str, digits: int) -> tuple[float, float, str]:
    return x, y, f"{name}: {y:.{digits}f} at {x:.3f}"


def _lines(
    chart: Chart, lines: Sequence[tuple[str, str, str, _Points]], dense: float, y_label: str
) -> Chart:
    """A line for each `(name in the legend, CSS class, Matplotlib's letter for its marks, points)`.

    Marks differ, so that colour is not all that tells lines apart.
    """
    axes = chart.axes
    drawn: list[tuple[Any, str, Sequence[str]]] = [
        (axes.axhline(dense, label="dense"), "reference", ())
    ]
    for name, kind, mark, points in lines:
        if points:
            xs, ys, texts = zip(*sorted(points, key=itemgetter(0)))
            size = 7.5 if mark == "D" else 9
            (line,) = axes.plot(xs, ys, marker=mark, markersize=size, label=name)
            drawn.append((line, f"line {kind}", texts))
    legend = chart.figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=2.5)
    for (artist, kind, tips), handle in zip(drawn, legend.legend_handles):
        chart.name(artist, kind, tips)
        chart.name(handle, kind)
    axes.grid(axis="y")
    axes.margins(y=0.08)
    axes.set(xlabel="share of tokens run full in the routed layers", ylabel=y_label, xlim=(0, 1))
    return chart


def cost_chart(report: RunReport) -> Chart:
    """Stacked bars of each budget's arithmetic over the dense model's."""
    costs = report.costs
    labels = [f"budget {name}" if report.follows_budget else "routed" for name in report.names]
    said = "; ".join(f"{label}: {cost.computed:.1%}" for label, cost in zip(labels, costs))
    batch, length = report.cost_shape
    chart = Chart(
        "cost-chart",
        "Arithmetic of one prompt pass",
        f"In all, of the dense model's: {said}.",
        f"FLOPs of a prompt of {batch} x {length} tokens, counted, at the shares measured on the "
        "text.",
        size=(440, 72 + 34 * (len(costs) + 1)),
    )
    chart.bars([(0, -0.35, 1, 0.7, "dense: 100%")], "rest")
    starts = [0.0] * len(costs)
    for name, said in COST_PARTS.items():
        shares = [max(getattr(cost, name), 0.0) / cost.dense for cost in costs]
        tips = [f"{label}, {said}: {share:.1%}" for label, share in zip(labels, shares)]
        rows = [
            (x, row + 0.65, share, 0.7, tip)
            for row, (x, share, tip) in enumerate(zip(starts, shares, tips))
        ]
        chart.bars(rows, name)
        starts = [start + share for start, share in zip(starts, shares)]
    chart.axes.grid(axis="x")
    chart.axes.set(xlabel="FLOPs, share of the dense model's", ylim=(len(costs) + 0.5, -0.5))
    chart.axes.set_xlim(0, max(1 - min(cost.saved, 0.0) / cost.dense for cost in costs))
    chart.axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    chart.axes.set_yticks(range(len(costs) + 1), ["dense", *labels])
    return chart


def ratio_chart(report: RunReport, number: int) -> Chart:
    """A bar per routed layer: the share that ran full; dashed, the budget asked for."""
    layers = report.scores[number]
    name = report.names[number]
    line = ""
    if report.follows_budget:
        line = " The dashed line is the budget."
    chart = Chart(
        f"ratio-{number}",
        f"Share run full by layer at budget {name}",
        "; ".join(f"layer {index}: {layer.full_ratio:.2f}" for index, layer in layers.items()),
        f"Budget {name}: the share of real tokens that ran full in each routed layer.{line}",
        size=(440, 240),
    )
    ratios = [layer.full_ratio for layer in layers.values()]
    tips = [f"layer {index}: {ratio:.3f}" for index, ratio in zip(layers, ratios)]
    for heights, kind in (([1.0] * len(ratios), "skipped"), (ratios, "full")):
        bars = enumerate(zip(heights, tips))
        chart.bars([(x - 0.36, 0, 0.72, height, tip) for x, (height, tip) in bars], kind)
    if len(layers) <= 10:
        for x, ratio in enumerate(ratios):
            chart.axes.text(x, 1.02, f"{ratio:.2f}", ha="center")
    every = math.ceil(len(layers) / 16)
    chart.axes.set_xticks(range(0, len(layers), every), [str(index) for index in layers][::every])
    chart.axes.grid(axis="y")
    chart.axes.set(
        xlabel="layer", ylabel="share run full", xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1)
    )
    if report.follows_budget:
        chart.name(chart.axes.axhline(report.budgets[number]), "reference")
    return chart


def histogram(report: RunReport, number: int, index: int) -> Chart:
    """Scores of one layer at one budget: what ran full, above what did not, and the threshold."""
    layer = report.scores[number][index]
    first, *_, last = layer.edges
    threshold = layer.threshold
    limit = "no threshold"
    if threshold is not None:
        limit = f"threshold {threshold:.3f}"
    chart = Chart(
        f"scores-{number}-{index}",
        f"Scores of layer {index} at budget {report.names[number]}",
        f"Scores from {first:.2f} to {last:.2f}, {limit}, {layer.full_ratio:.1%} ran full.",
        f"Layer {index}: {layer.full_ratio:.0%} full",
        size=(300, 150),
        layout=None,  # slow, and these are many
    )
    chart.figure.subplots_adjust(left=0.03, right=0.97, bottom=0.2, top=0.85)
    bars: dict[str, list[Any]] = {"skipped": [], "full": []}
    for low, high, full, skipped in zip(layer.edges, layer.edges[1:], layer.full, layer.skipped):
        tip = f"scores {low:.3f} to {high:.3f}: {full:,} full, {skipped:,} skipped"
        for kind, bottom, height in (("skipped", 0.0, skipped), ("full", skipped, full)):
            if height:
                bars[kind].append((low, bottom, 0.9 * (high - low), height, tip))
    for kind, rows in bars.items():
        chart.bars(rows, kind)
    highest = max(map(sum, zip(layer.full, layer.skipped, strict=True)), default=1) or 1
    chart.axes.set(xlim=(first, last), ylim=(0, highest), yticks=[])
    chart.axes.set_xticks([first, last], [f"{first:.2f}", f"{last:.2f}"])
    left, right = chart.axes.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
    if threshold is not None and first <= threshold <= last:
        place = (threshold - first) / (last - first)
        beside: Any = ("left", "center", "right")[min(int(3 * place), 2)]  # inside the chart
        chart.name(chart.axes.axvline(threshold), "threshold")
        chart.axes.set_title(f"threshold {threshold:.3f}", x=place, ha=beside)
    return chart
