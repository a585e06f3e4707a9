"""What the figures of a study share: styles, labels, and means over seeds.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .results import Study, number
from .values import mean, std

CORE = ("g1", "g3", "a3_g1", "a3_g3", "a1")
# Colours that stay apart for colour-blind readers; the line style says it a second time.
STYLES = {
    "g1": ("#d55e00", "-"),
    "g3": ("#0072b2", "-"),
    "a3_g1": ("#b8860b", "--"),
    "a3_g3": ("#009e73", "--"),
    "a1": ("#a0527f", ":"),
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#a0527f", "#b8860b")
ROLLING = 5  # windows of the training series


def make_figure(
    width: float,
    height: float,
    columns: int = 1,
    rows: int = 1,
    heights: Sequence[float] = (1,),
    sharey: bool = False,
) -> tuple[Any, list[Any]]:
    """A figure with its panels, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=sharey, height_ratios=heights)
    return figure, list(panels.flat)


def core_configs(study: Study) -> list[str]:
    """The paper's core configs; the first five of a study without them."""
    return [name for name in CORE if name in study.runs] or [name for name in study.names if name in study.runs][:5]


def style_of(name: str, names: Sequence[str]) -> tuple[str, str]:
    index = names.index(name)
    return STYLES.get(name, (COLORS[index % len(COLORS)], ("-", "--", "-.", ":", "-")[index % 5]))


def short_label(study: Study, name: str) -> str:
    """One short line; matplotlib leaves labels that start with an underscore out of the legend."""
    text = " ".join(study.label(name).split()).lstrip("_") or name.lstrip("_") or "config"
    return text if len(text) <= 24 else f"{text[:23]}…"


def name_rows(axes: Any, study: Study, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), labels=[short_label(study, name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def draw_mean(
    axes: Any,
    study: Study,
    name: str,
    names: Sequence[str],
    steps: Sequence[float],
    centre: Sequence[float],
    spread: Sequence[float],
    floor: float = -math.inf,
) -> None:
    """A mean with its shade; on a log axis the shade ends at `floor` times the mean."""
    color, style = style_of(name, names)
    axes.plot(steps, centre, color=color, ls=style, lw=1.8, label=short_label(study, name))
    low = [max(c - s, c * floor) if floor > 0 else c - s for c, s in zip(centre, spread)]
    axes.fill_between(steps, low, [c + s for c, s in zip(centre, spread)], color=color, alpha=0.18, lw=0)


def present(series: Mapping[str, Sequence[Any]], key: str) -> tuple[list[float], list[float]]:
    points = [(number(step), number(value)) for step, value in zip(series.get("step", []), series.get(key, []))]
    kept = [(step, value) for step, value in points if step is not None and value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def mean_curve(study: Study, name: str, kind: str, key: str) -> tuple[list[float], list[float], list[float]]:
    """Steps that all seeds have, with mean and standard deviation over seeds."""
    by_seed = [dict(zip(*present(getattr(run, kind), key))) for run in study.runs.get(name, {}).values()]
    by_seed = [points for points in by_seed if points]
    steps = sorted(set.intersection(*(set(points) for points in by_seed))) if by_seed else []
    columns = [[points[step] for points in by_seed] for step in steps]
    return steps, [mean(column) for column in columns], [std(column) for column in columns]


def rolling(series: Sequence[float]) -> list[float]:
    width = min(ROLLING, len(series))
    return [mean(series[i : i + width]) for i in range(len(series) - width + 1)] if width else []
