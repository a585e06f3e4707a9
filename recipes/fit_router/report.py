"""Table and picture of `results.json`; `recipes/tables.py` draws its losses against time.

python recipes/fit_router/report.py
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `pages` is there

import matplotlib
import numpy as np
from pages import markdown_table, png_of
from scipy.stats import ttest_1samp

from hf_depthroute.files.staged import write_bytes, write_text

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KINDS = {
    "static": "best layers left out", "affine": "fitted, affine gates", "mlp": "fitted, MLP gates",
    "random": "random gates", "linear": "linear gates", "oracle": "MLP gates, oracle",
    "jepa": "JEPA gates", "similarity": "MLP gates, similarity",
    "recoverability": "MLP gates, recoverability",
    "annealed": "MLP gates, recoverability, annealed",
    "mlp_recoverability": "fitted, then recoverability", "gumbel": "MLP gates, Gumbel noise",
    "controller": "MLP gates, controller", "static_rank": "best layers left out, rank + 64",
    "mlp_rank": "fitted, MLP gates, rank + 64", "static_memory": "best layers left out, n-grams",
    "mlp_memory": "fitted, MLP gates, n-grams",
}  # fmt: skip
TITLES = {
    "embedded": "embedded base", "wide": "wider embedded base", "stories260k": "stories260k",
    "shakespeare": "GPT-2 on Tiny-Shakespeare",
}  # fmt: skip

TRAINED = "After training, in steps of 8 x 128 tokens:"
ERRORS = (
    "A number after ± is a standard error, of a mean over seeds (their number) or of a median over "
    "rounds."
)
TUNED = (
    "Where learning rates were chosen, two layers' worth of calls skipped, one seed, on the text "
    "to choose on:"
)


def runs_of(
    found: dict[str, Any], trained: bool = False
) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """`{(kind, layers' worth of calls skipped): {seed: run}}` of one base; after training,
    those with most steps."""
    runs: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for key, row in found.items():
        kind, *rest = key.split()
        if kind in KINDS and ("trained" if trained else "more") in row:
            count, seed = map(int, rest)
            runs.setdefault((kind, count), {})[seed] = row | row["trained"] if trained else row
    steps = (
        max((row["steps"] for seeds in runs.values() for row in seeds.values()), default=0)
        if trained
        else 0
    )
    return {
        key: {seed: row for seed, row in seeds.items() if row.get("steps", 0) == steps}
        for key, seeds in runs.items()
        if any(row.get("steps", 0) == steps for row in seeds.values())
    }


def summary(
    found: dict[str, Any], trained: bool = False
) -> dict[tuple[str, int], dict[str, float]]:
    """`{(kind, layers' worth of calls skipped): means over seeds}` of one base."""
    return {
        key: {
            "more": statistics.mean(row["more"] for row in seeds.values()),
            "error": statistics.stdev(row["more"] for row in seeds.values()) / len(seeds) ** 0.5
            if len(seeds) > 1
            else 0.0,
            "share": statistics.mean(row["share"] for row in seeds.values()),
            "seeds": len(seeds),
            "steps": next(iter(seeds.values())).get("steps", 0),
        }
        for key, seeds in runs_of(found, trained).items()
    }


def left_out_at(share: float, static: Iterable[dict[str, float]]) -> float:
    """What leaving layers out loses where `share` of the calls run, linear between its points."""
    points = sorted((1 - row["share"], row["more"]) for row in static)
    return float(np.interp(1 - share, *zip((0.0, 0.0), *points)))


def rival(kind: str) -> str:
    """The layers left out that a kind is compared with: those with the same branches."""
    static = kind.replace("mlp_", "static_")
    return static if static in KINDS and kind.startswith("mlp_") else "static"


def comparable(points: Iterable[tuple[str, int]], kind: str, count: int) -> bool:
    """Whether a kind has a rival, measured on both sides of its share."""
    there = {skipped for other, skipped in points if other == rival(kind)} | {0}
    return kind != rival(kind) and {count - 1, count} <= there


def spared(
    points: dict[tuple[str, int], dict[str, float]], point: dict[str, float], static: str = "static"
) -> float:
    """The part that `point` spares of what leaving layers out loses at the same share."""
    rows = (row for (kind, _), row in points.items() if kind == static)
    return 1 - point["more"] / left_out_at(point["share"], rows)


def by_chance(found: dict[str, Any], trained: bool = False) -> dict[tuple[str, int], float]:
    """How likely a difference to layers left out would be by chance,
    where three seeds or more have both.

    A two-sided t-test of the differences within each seed, times the number of comparisons on this
    base (Bonferroni).
    """
    runs, chances = runs_of(found, trained), {}
    for (kind, count), seeds in runs.items():
        static = [others for (other, _), others in runs.items() if other == rival(kind)]
        both = set(seeds).intersection(*static)
        if comparable(runs, kind, count) and len(both) > 2:
            differences = [
                seeds[seed]["more"] - left_out_at(seeds[seed]["share"], (of[seed] for of in static))
                for seed in both
            ]
            chances[kind, count] = float(ttest_1samp(differences, 0.0).pvalue)
    return {key: min(1.0, p * len(chances)) for key, p in chances.items()}


def table(results: dict[str, Any], trained: bool = False) -> list[str]:
    """A line for each base, share and kind."""
    lines = []
    for base, found in results.items():
        points, chances = summary(found, trained), by_chance(found, trained)
        for kind, count in sorted(points, key=lambda key: (key[1], list(KINDS).index(key[0]))):
            point = points[kind, count]
            less = (
                f"{spared(points, point, rival(kind)):.0%}"
                if comparable(points, kind, count)
                else ""
            )
            p = chances.get((kind, count))
            chance = "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
            steps = [f"{point['steps']:,.0f}"] if trained else []
            lines.append(
                [
                    TITLES[base],
                    *steps,
                    KINDS[kind],
                    f"{1 - point['share']:.1%}",
                    said(point),
                    less,
                    chance,
                ]
            )
    return markdown_table(
        ["base", *(["steps"] if trained else []), "what", "skipped", "loss", "less", "p"], lines
    )


def tuning_table(results: dict[str, Any]) -> list[str]:
    """The best of the learning rates that were tried, of each kind that was trained."""
    rows: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for base, found in results.items():
        for key, row in found.items():
            if key.startswith("tuning "):
                _, kind, steps, _ = key.split()
                rows.setdefault((base, int(steps), kind), []).append(row)
    lines = []
    for base, steps, kind in sorted(
        rows, key=lambda key: (key[0], key[1], list(KINDS).index(key[2]))
    ):
        tried = rows[base, steps, kind]
        best = min(tried, key=lambda row: row["more"])
        lines.append(
            [
                TITLES[base],
                f"{steps:,}",
                KINDS[kind],
                f"+{best['more']:.4f}",
                f"{best['rate']:g}",
                str(len(tried)),
            ]
        )
    return markdown_table(["base", "steps", "what", "loss", "learning rate", "rates tried"], lines)


def said(point: dict[str, float]) -> str:
    error = f" ± {point['error']:.4f}" if point["seeds"] > 1 else ""
    return f"+{point['more']:.4f}{error} ({point['seeds']:.0f})"


def phases_table(found: dict[str, Any]) -> list[str]:
    """Loss of the text behind a prompt and the time to its first token: everything routed,
    and the prompt only."""
    lines = []
    for keep in sorted({row["keep"] for row in found["rows"]}):
        rows = [row for row in found["rows"] if row["keep"] == keep]
        share = statistics.mean(row["share"] for row in rows)
        points = [
            {
                "more": statistics.mean(row[kind]["more"] for row in rows),
                "error": statistics.stdev(row[kind]["more"] for row in rows) / len(rows) ** 0.5
                if rows[1:]
                else 0.0,
                "seeds": len(rows),
            }
            for kind in ("all", "prefill")
        ]
        times = [
            f"{statistics.mean(row['first_token'][kind]['ratio'] for row in rows):.2f}"
            for kind in ("all", "prefill")
        ]
        lines.append([f"{1 - share:.1%}", *map(said, points), *times])
    heads = ["everything routed", "the prompt only"]
    return markdown_table(["skipped", *heads, *(f"first token, {head}" for head in heads)], lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Losses against the share skipped: a column for each base,
    without training above and trained below."""
    figure, axes = plt.subplots(2, len(results), figsize=(3.6 * len(results), 6.6), squeeze=False)
    there = {
        kind
        for found in results.values()
        for kind, _ in summary(found) | summary(found, trained=True)
    }
    colors = dict(
        zip(
            (kind for kind in KINDS if kind in there),
            (plt.colormaps["tab20"](n) for n in range(20)),
        )
    )
    for axis, (trained, (base, found)) in zip(
        axes.flat, itertools.product((False, True), results.items())
    ):
        points = summary(found, trained)
        steps = (
            next((f", {point['steps']:,.0f} steps" for point in points.values()), "")
            if trained
            else ""
        )
        for kind, color in colors.items():
            line = sorted(
                (1 - row["share"], row["more"], row["error"])
                for (k, _), row in points.items()
                if k == kind
            )
            if line:
                x, y, error = zip(*[(0.0, 0.0, 0.0), *line])
                axis.errorbar(
                    x,
                    y,
                    yerr=error,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    color=color,
                    label=KINDS[kind],
                )
        axis.set_title(f"{TITLES[base]}{steps}", fontsize=10)
        axis.set_xlabel("share of FFN calls skipped")
        axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        axis.set_visible(bool(points))
    for row in axes:
        row[0].set_ylabel("loss over the dense base, nats")
    labels = dict(
        pair for axis in axes.flat for pair in zip(*reversed(axis.get_legend_handles_labels()))
    )
    figure.legend(
        labels.values(), labels.keys(), loc="upper center", ncols=4, fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    write_bytes(path, png_of(figure, dpi=130))


def draw_time(found: dict[str, Any], time: Callable[[str, float], float], path: Path) -> None:
    """Loss of one base without training against the share of calls run,
    and against the time of a prompt.

    Args:
        found: The base's part of `results.json`.
        time: From a row of `KINDS` and a share of the calls to the time of a prompt over the dense
            time.
        path: Where the picture goes.
    """
    points = summary(found)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for kind, color in (("static", "C0"), ("mlp", "C2")):
        rows = sorted(
            (row["share"], row["more"], row["error"]) for (k, _), row in points.items() if k == kind
        )
        x, more, error = zip(*rows, (1.0, 0.0, 0.0))
        for axis, places in zip(panels, (x, [time(kind, share) for share in x])):
            note = {"static": ", time modelled", "mlp": ", times of the demo's routers"}[kind]
            label = f"{KINDS[kind]}{note if axis is panels[1] else ''}"
            axis.errorbar(places, more, yerr=error, marker="o", capsize=2, color=color, label=label)
    for axis, label in zip(panels, ("share of the FFN calls run", "time of a prompt / dense time")):
        axis.plot(1.0, 0.0, marker="*", markersize=12, color="black", linestyle="", label="dense")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    panels[0].set_ylabel("loss over the dense base, nats")
    write_bytes(path, png_of(figure, dpi=130))


def page(results: dict[str, Any], phases: dict[str, Any]) -> str:
    """`results.md`."""
    parts = [ERRORS, "", "Without training:", "", *table(results), ""]
    if any(summary(found, trained=True) for found in results.values()):
        parts += [TRAINED, "", *table(results, trained=True), ""]
    parts += [TUNED, "", *tuning_table(results), ""]
    parts += [
        f"The text behind a routed prompt of {phases['prompt']} tokens:",
        "",
        *phases_table(phases),
        "",
    ]
    return "\n".join(parts)


def main() -> None:
    results, phases = (
        json.loads((HERE / name).read_text()) for name in ("results.json", "phases.json")
    )
    write_text(HERE / "results.md", page(results, phases))
    draw(results, HERE / "results.png")


if __name__ == "__main__":
    main()
