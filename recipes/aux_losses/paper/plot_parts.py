"""What the figures of a study share: styles, labels, and means over seeds.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from study.results import StudyRuns, number

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


def core_configs(study: StudyRuns) -> list[str]:
    """The paper's core configs; the first five of a study without them."""
    return [name for name in CORE if name in study.runs] or [
        name for name in study.names if name in study.runs
    ][:5]


def style_of(name: str, names: Sequence[str]) -> tuple[str, str]:
    index = names.index(name)
    return STYLES.get(name, (COLORS[index % len(COLORS)], ("-", "--", "-.", ":", "-")[index % 5]))


def short_label(study: StudyRuns, name: str) -> str:
    """One short line; matplotlib leaves labels that start with an underscore out of the legend."""
    text = " ".join(study.label(name).split()).lstrip("_") or name.lstrip("_") or "config"
    return text if len(text) <= 24 else f"{text[:23]}…"


def name_rows(axes: Any, study: StudyRuns, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), labels=[short_label(study, name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def draw_mean(
    axes: Any,
    study: StudyRuns,
    name: str,
    names: Sequence[str],
    curve: pd.DataFrame,
    floor: float = -math.inf,
) -> None:
    """A mean with its shade; on a log axis the shade ends at `floor` times the mean."""
    color, style = style_of(name, names)
    axes.plot(
        curve.index, curve["mean"], color=color, ls=style, lw=1.8, label=short_label(study, name)
    )
    low = curve["mean"] - curve["error"]
    if floor > 0:
        low = low.clip(lower=curve["mean"] * floor)
    axes.fill_between(
        curve.index, low, curve["mean"] + curve["error"], color=color, alpha=0.18, lw=0
    )


def present(series: Mapping[str, Sequence[Any]], key: str) -> tuple[list[float], list[float]]:
    points = [
        (number(step), number(value))
        for step, value in zip(series.get("step", []), series.get(key, []))
    ]
    kept = [(step, value) for step, value in points if step is not None and value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def mean_curve(study: StudyRuns, name: str, kind: str, key: str) -> pd.DataFrame:
    """`mean` and its standard `error` over seeds, by the steps that all seeds have."""
    curves = [
        pd.Series(dict(zip(*present(getattr(run, kind), key))))
        for run in study.runs.get(name, {}).values()
    ]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return pd.DataFrame(columns=["mean", "error"], dtype=float)
    seeds = pd.concat(curves, axis="columns", join="inner").sort_index()
    return pd.DataFrame(
        {"mean": seeds.mean(axis="columns"), "error": seeds.sem(axis="columns").fillna(0.0)}
    )


def rolling(curve: pd.DataFrame) -> pd.DataFrame:
    """Means over `ROLLING` points, of the steps too."""
    whole = curve.rename_axis("step").reset_index()
    return whole.rolling(max(1, min(ROLLING, len(whole)))).mean().dropna().set_index("step")
