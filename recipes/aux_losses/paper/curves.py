"""Validation loss and gradient norm over training: figures 3 and 4 of the paper.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228).
"""

from __future__ import annotations

from typing import Any

from study.results import StudyRuns

from .plot_parts import core_configs, draw_mean, make_figure, mean_curve, rolling, short_label
from .values import mean, values


def draw_learning(study: StudyRuns) -> tuple[Any, list[str]]:
    """The paper's figure 3: validation loss over steps, all of it and the second half."""
    figure, (whole, half) = make_figure(10, 4.2, columns=2)
    names = core_configs(study)
    drawn = []
    for name in names:
        curve = mean_curve(study, name, "eval", "lm_loss")
        curve = curve[curve.index > 0]
        if curve.empty:
            continue
        drawn.append(short_label(study, name))
        for axes, start in ((whole, 0.0), (half, curve.index[-1] / 2)):
            draw_mean(axes, study, name, names, curve.loc[start:])
    reference = list(values(study, "g3", "endpoint").values())
    if reference and drawn:
        margin = study.info["margin"]
        label = f"G3 endpoint ± {margin:g}"
        for axes in (whole, half):
            axes.axhspan(
                mean(reference) - margin,
                mean(reference) + margin,
                color="0.5",
                alpha=0.3,
                lw=0,
                label=label,
            )
    whole.set(xlabel="optimizer step", ylabel="validation loss (nats)", title="Whole run")
    half.set(xlabel="optimizer step", title="Second half")
    if drawn:
        whole.legend(fontsize=9)
    return figure, drawn


def draw_gradients(study: StudyRuns) -> tuple[Any, list[str]]:
    """The paper's figure 4: gradient norm over steps, on a log axis."""
    figure, (axes,) = make_figure(7, 4.2)
    names = [name for name in core_configs(study) if name != "a1"]
    drawn = []
    for name in names:
        curve = rolling(mean_curve(study, name, "training", "grad_norm"))
        if not (curve["mean"] > 0).any():
            continue
        draw_mean(axes, study, name, names, curve, floor=0.2)
        drawn.append(short_label(study, name))
    axes.set(xlabel="optimizer step", ylabel="gradient norm", yscale="log")
    low, high = axes.get_ylim()
    if high < 8 * low:  # a narrow range may hold no tick at all
        axes.set_ylim(low / 2, high * 2)
    axes.grid(which="minor", alpha=0.12)
    for axis_format in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_format(_plain_tick)
    if drawn:
        axes.legend(
            fontsize=9,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=len(drawn),
            frameon=False,
        )
    return figure, drawn


def _plain_tick(value: float, position: int) -> str:
    """1, 2 and 5 times a power of ten, without an exponent."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
