"""Figures of a study's report, as PNG files.

Matplotlib and adjustText are imported on first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pages import png_of
from study.results import StudyRuns

from .curves import draw_gradients, draw_learning
from .layouts import UTIL_SWEEP
from .plot_parts import (
    COLORS,
    STYLES,
    core_configs,
    make_figure,
    name_rows,
    present,
    short_label,
    style_of,
)
from .tables import setting_value
from .values import METRIC_NAMES, error, layers, mean, training_clock, values

_LAYER_MARKERS = "osD^vP*X"
_DPI = 110


@dataclass(frozen=True)
class Plot:
    """A drawn figure: its `file` in a report's folder and the `png` in it, its size in pixels,
    the words with it."""

    key: str
    file: str
    png: bytes
    width: int
    height: int
    title: str
    alt: str
    caption: str


def plot_study(study: StudyRuns) -> list[Plot]:
    """Every figure that the study has data for."""
    import matplotlib

    plots = []
    # A label is text: one with dollar signs must not be read as a formula.
    with matplotlib.rc_context(
        {"text.parse_math": False, "font.size": 10, "axes.grid": True, "grid.alpha": 0.25}
    ):
        for key, (title, caption, draw) in FIGURES.items():
            figure, drawn = draw(study)
            if not drawn:
                continue
            png = png_of(figure, _DPI)
            margin = f"{study.info['margin']:g}"
            alt = f"{title}, for {'; '.join(drawn)}. The numbers are in the tables."
            width, height = (round(inches * _DPI) for inches in figure.get_size_inches())
            plots.append(
                Plot(
                    key, f"{key}.png", png, width, height, title, alt, caption.format(margin=margin)
                )
            )
    return plots


def draw_util_sweep(study: StudyRuns) -> tuple[Any, list[str]]:
    """Loss against the weight of the util loss, with A3-G3 (neither util nor rank) as a line."""
    figure, panels = make_figure(9, 3.8, columns=2)
    names = [name for name in UTIL_SWEEP if name in study.runs]
    if len(names) < 3:
        return figure, []
    # g3 has the library's default of 1, rank_only says 0 itself.
    weights = [
        setting_value(study, name, "training", "util_weight", 0.0 if name == "rank_only" else 1.0)
        for name in names
    ]
    for axes, metric, title in zip(
        panels, ("avg_whole", "endpoint"), ("Average of the whole run", "Endpoint")
    ):
        points = [
            (w, list(values(study, name, metric).values())) for w, name in zip(weights, names)
        ]
        points = [(w, losses) for w, losses in points if losses]
        axes.errorbar(
            [w for w, _ in points],
            [mean(losses) for _, losses in points],
            yerr=[error(losses) for _, losses in points],
            color="#0072b2", marker="o", capsize=3, label="util at this weight, with rank",
        )  # fmt: skip
        for w, losses in points:
            axes.plot([w] * len(losses), losses, ".", color="#0072b2", alpha=0.4)
        without = list(values(study, "a3_g3", metric).values())
        if without:
            axes.axhline(
                mean(without), color="#009e73", ls="--", label="A3-G3: neither util nor rank"
            )
            low, high = mean(without) - error(without), mean(without) + error(without)
            axes.axhspan(low, high, color="#009e73", alpha=0.15, lw=0)
        axes.set(xlabel="weight of the util loss", title=title)
    panels[0].set_ylabel("validation loss (nats)")
    panels[0].legend(fontsize=9)
    return figure, [short_label(study, name) for name in names]


def draw_policies(study: StudyRuns) -> tuple[Any, list[str]]:
    """Loss without an oracle, with the on-policy one and with the all-full one,
    a thin line per seed."""
    figure, panels = make_figure(9, 3.8, columns=2)
    rows = {"G1": ("a3_g1", "on_policy_g1", "g1"), "G3": ("a3_g3", "on_policy_g3", "g3")}
    drawn = []
    if not {"on_policy_g1", "on_policy_g3"} & set(study.runs):
        return figure, []
    for axes, metric, title in zip(
        panels, ("avg_whole", "endpoint"), ("Average of the whole run", "Endpoint")
    ):
        for (gate, names), offset in zip(rows.items(), (-0.04, 0.04)):
            color, style = STYLES[gate.lower()][0], "-" if gate == "G1" else "--"
            by_config = [values(study, name, metric) for name in names]
            for seed in study.seeds:
                points = [
                    (i + offset, losses[seed])
                    for i, losses in enumerate(by_config)
                    if seed in losses
                ]
                axes.plot(
                    *zip(*points), color=color, ls=style, alpha=0.35, lw=1
                ) if points else None
            means = [
                (i + offset, mean(list(losses.values())))
                for i, losses in enumerate(by_config)
                if losses
            ]
            if means:
                axes.plot(
                    *zip(*means), color=color, ls=style, lw=2.2, marker="o", label=f"{gate}, mean"
                )
        axes.set(
            xticks=range(3), xticklabels=["no oracle", "on-policy", "all later full"], title=title
        )
        axes.set_xlim(-0.3, 2.3)
    drawn = [
        short_label(study, name) for names in rows.values() for name in names if name in study.runs
    ]
    panels[0].set_ylabel("validation loss (nats)")
    panels[0].legend(fontsize=9)
    return figure, drawn


def draw_auc(study: StudyRuns) -> tuple[Any, list[str]]:
    """Oracle AUC per layer and config, on-policy and all-full."""
    names = [name for name in study.names if values(study, name, "layers/oracle_auc")]
    kinds = [("oracle_auc", "On-policy"), ("oracle_auc_all_full", "All later layers full")]
    kinds = [
        (key, title)
        for key, title in kinds
        if any(values(study, name, f"layers/{key}") for name in names)
    ]
    figure, panels = make_figure(
        10, 1.3 + 0.24 * len(names), columns=max(1, len(kinds)), sharey=True
    )
    found = layers(study, names)
    for axes, (key, title) in zip(panels, kinds):
        for index, layer in enumerate(found):
            offset = 0.18 * (index - (len(found) - 1) / 2) if len(found) < 5 else 0.0
            points = [
                (row, list(values(study, n, f"layers/{layer}/{key}").values()))
                for row, n in enumerate(names)
            ]
            points = [(row, found_values) for row, found_values in points if found_values]
            axes.errorbar(
                [mean(v) for _, v in points],
                [row + offset for row, _ in points],
                xerr=[error(v) for _, v in points],
                ls="none", ms=4.5, elinewidth=1,
                color=COLORS[index % len(COLORS)],
                marker=_LAYER_MARKERS[index % len(_LAYER_MARKERS)],
                label=f"layer {layer}",
            )  # fmt: skip
        axes.axvline(0.5, color="0.4", ls="--", lw=1)
        axes.locator_params(axis="x", nbins=6)
        axes.set(xlabel="oracle AUC (0.5 is chance)", title=title)
    if names:
        name_rows(panels[0], study, names)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, fontsize=9, loc="outside upper center", ncols=len(found), frameon=False
        )
    return figure, [short_label(study, name) for name in names]


def draw_probabilities(study: StudyRuns) -> tuple[Any, list[str]]:
    """Mean gate probability: over steps for the core configs, at the end for all."""
    names = [name for name in study.names if values(study, name, "layers/gate_prob")]
    height = 1.0 + 0.24 * len(names)
    figure, (over, final) = make_figure(8.5, 4.2 + height, rows=2, heights=(3.6, height))
    core = core_configs(study)
    for name in core:
        for index, run in enumerate(study.runs.get(name, {}).values()):
            steps, series = present(run.training, "gate_prob")
            color, style = style_of(name, core)
            label = short_label(study, name) if index == 0 else None
            over.plot(steps, series, color=color, ls=style, lw=1.3, alpha=0.85, label=label)
    for budget in {setting_value(study, name, "adapter", "budget", 0.5) for name in core}:
        over.axhline(budget, color="0.3", lw=1)
    over.set(
        xlabel="optimizer step",
        ylabel="mean gate probability",
        title="Over training, a line per seed",
    )
    for row, name in enumerate(names):
        budget = setting_value(study, name, "adapter", "budget", 0.5)
        final.plot(
            [budget, budget],
            [row - 0.35, row + 0.35],
            color="0.3",
            lw=2,
            label="budget" if row == 0 else None,
        )
        seeds = list(values(study, name, "layers/gate_prob").values())
        label = "a seed" if row == 0 else None
        final.plot(seeds, [row] * len(seeds), "o", ms=5, color="#0072b2", alpha=0.6, label=label)
    final.set(xlabel="mean gate probability", xlim=(-0.02, 1.02), title="At the end, all configs")
    if over.get_legend_handles_labels()[0]:
        over.legend(fontsize=9)
    if names:
        name_rows(final, study, names)
        final.legend(fontsize=9)
    return figure, [short_label(study, name) for name in names]


def draw_cost(study: StudyRuns) -> tuple[Any, list[str]]:
    """Endpoint loss against training time, every config with its name.

    Configs that share the usual budget and a frozen base have a panel of their own: the others lie
    far off.
    """
    from adjustText import adjust_text

    points, clock = {}, training_clock(study)
    for name in study.names:
        seconds, losses = (
            list(values(study, name, metric).values()) for metric in (clock, "endpoint")
        )
        if seconds and losses:
            points[name] = (seconds, losses)
    kinds = {
        name: (
            setting_value(study, name, "adapter", "budget", 0.5),
            bool(study.config(name).get("joint")),
        )
        for name in points
    }
    usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else None
    close = [name for name in points if kinds[name] == usual]
    far = [name for name in points if kinds[name] != usual]
    figure, panels = make_figure(
        10, 11 if far else 7, rows=2 if far else 1, heights=(6.8, 4.2) if far else (1,)
    )
    for axes, shown, named in zip(panels, (close, list(points)), (close, far)):
        for group, color in ((close, "#0072b2"), (far, "#d55e00")):
            drawn = [points[name] for name in shown if name in group]
            axes.errorbar(
                [mean(seconds) for seconds, _ in drawn], [mean(losses) for _, losses in drawn],
                xerr=[error(seconds) for seconds, _ in drawn],
                yerr=[error(losses) for _, losses in drawn], fmt="o" if group is close else "s",
                color=color, ecolor="0.82", elinewidth=1, ms=5, zorder=3,
            )  # fmt: skip
        axes.set(ylabel="endpoint validation loss (nats)")
        axes.margins(0.14)
        centres = {name: (mean(points[name][0]), mean(points[name][1])) for name in shown}
        texts = [axes.text(*centres[name], short_label(study, name), fontsize=9) for name in named]
        xs, ys = ([centre[i] for centre in centres.values()] for i in (0, 1))
        adjust_text(
            texts,
            x=xs,
            y=ys,
            ax=axes,
            expand=(1.3, 1.8),
            iter_lim=200,  # not seconds: the same figure on every machine
            arrowprops={"arrowstyle": "-", "color": "0.6", "lw": 0.6},
        )
    if far:
        panels[0].set_title("Usual budget, frozen base")
        panels[1].set_title("All; with names: another budget, or a base that trains too")
    panels[-1].set_xlabel(f"{METRIC_NAMES[clock]} (s), optimizer steps only")
    return figure, [short_label(study, name) for name in points]


FIGURES: dict[str, tuple[str, str, Callable[[StudyRuns], tuple[Any, list[str]]]]] = {
    "learning": (
        "Validation loss over training",
        (
            "Lines are means over seeds, shades one standard error; the grey band is the G3 "
            "endpoint ± {margin}. Step 0 is left out."
        ),
        draw_learning,
    ),
    "gradients": (
        "Gradient norm over training",
        (
            "Means over seeds of a rolling mean over 5 % of the run, on a log axis; shades are one "
            "standard error."
        ),
        draw_gradients,
    ),
    "util_sweep": (
        "Loss against the weight of the util loss",
        (
            "Bars are one standard error over seeds, dots are seeds. The dashed line has neither "
            "util nor rank."
        ),
        draw_util_sweep,
    ),
    "policies": (
        "No oracle, on-policy oracle, all-full oracle",
        "Thin lines join the runs of one seed, thick lines the means.",
        draw_policies,
    ),
    "oracle_auc": (
        "Oracle AUC per layer",
        "Means over seeds, bars one standard error; the dashed line is chance.",
        draw_auc,
    ),
    "gate_probability": (
        "Gate probability",
        (
            "Mean over tokens and routed layers. Top-k runs the budget's share of tokens whatever "
            "the probability."
        ),
        draw_probabilities,
    ),
    "cost": (
        "Training time and endpoint loss",
        "Means over seeds, bars one standard error. Lower left is better.",
        draw_cost,
    ),
}
