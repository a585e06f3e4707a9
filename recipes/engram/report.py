"""Tables and picture of `results.json`.

python recipes/engram/report.py [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import matplotlib
import numpy as np
from pages import markdown_table, png_of
from study.claims import Judged, claims_table, judge
from study.intervals import OPEN, tell_mean

from hf_depthroute.files.staged import write_bytes, write_text

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KINDS = {
    "none": "no memory", "memory": "memory", "cgs": "memory, CGS",
    "equal": "memory, as much compute", "weak": "memory, CGS with lambda 0.005",
    "smooth": "memory, CGS with means of 9 labels", "curriculum": "memory, CGS in the second half",
    "curriculum_slow": "memory, CGS in the second half, at the memory's rate",
}  # fmt: skip
TEXTS = {  # what the trainings of a file read
    "packages.json": "25 M tokens of Python, none read twice",
    "results.json": "2.5 M tokens of Python, read several times by the longer trainings",
}
DIFFERENCES = (
    "Means ± standard errors over seeds above. Differences within each seed, with the interval "
    "that holds with 95 % for all rows of a table together, which decides, and that of the row "
    "alone."
)
Runs = dict[str, dict[int, dict[str, Any]]]
Measure = Callable[[dict[str, Any]], float]


def by_steps(results: dict[str, Any]) -> dict[int, Runs]:
    """`{steps: {kind: {seed: run}}}`, the longest trainings first;
    steps are those of the memory alone."""
    lengths: dict[int, Runs] = {}
    for kind in KINDS:
        for key, row in results.items():
            if key.startswith(f"{kind} "):
                _, seed, steps = key.split()
                lengths.setdefault(int(steps), {}).setdefault(kind, {})[int(seed)] = row
    return dict(sorted(lengths.items(), reverse=True))


def loss(run: dict[str, Any]) -> float:
    return float(run["curve"][-1]["loss"])


def area(run: dict[str, Any]) -> float:
    """The area under the ROC curve, mean over layers."""
    return statistics.mean(run["areas"].values())


def gap(run: dict[str, Any]) -> float:
    """Loss of tokens with cold slots minus that of tokens with hot ones;
    below 0 is the publication's flip."""
    return float(run["curve"][-1]["cold"] - run["curve"][-1]["hot"])


def deepest(run: dict[str, Any]) -> float:
    """The area under the ROC curve of the deepest memory minus the mean of the others."""
    *others, last = run["areas"].values()
    return float(last - statistics.mean(others))


def preference(run: dict[str, Any]) -> float:
    """How much more of the memory tokens with hot slots take than those with cold ones."""
    last = run["curve"][-1]
    return statistics.mean(last["alpha_hot"]) - statistics.mean(last["alpha_cold"])


def rates_of(seeds: dict[int, dict[str, Any]]) -> str:
    return " and ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in seeds.values()}))


def said(values: list[float], sign: str = "") -> str:
    return f"{tell_mean(values, 4, sign)} ({len(values)})"


def table(lengths: dict[int, Runs]) -> list[str]:
    """A line for each kind and length."""
    lines = []
    for kind, seeds in (item for runs in lengths.values() for item in runs.items()):
        found = list(seeds.values())
        cells = [
            KINDS[kind],
            f"{found[0]['steps']:,}",
            rates_of(seeds),
            said([loss(run) for run in found]),
        ]
        if kind != "none":
            layers = [
                statistics.mean(run["areas"][layer] for run in found) for layer in found[0]["areas"]
            ]
            cells += [
                " / ".join(f"{value:.3f}" for value in layers),
                said([area(run) for run in found]),
            ]
            cells += [
                said([measure(run) for run in found], sign="+") for measure in (gap, preference)
            ]
        lines.append(cells + [""] * (8 - len(cells)))
    heads = [
        "what",
        "steps",
        "rate",
        "loss",
        "AUC by layer",
        "AUC",
        "cold - hot, loss",
        "hot - cold, alpha",
    ]
    return markdown_table(heads, lines)


EQUAL_AUC, EQUAL_LOSS = 0.01, 0.005  # differences up to these count as none
FLIP = "The flip: tokens with cold slots end with the lower loss, cold - hot"
LEFT = "The flip stays with CGS: cold - hot is as it was"
CLAIMS: list[tuple[str, str, str, str | None, Measure, str, float]] = [
    # kind, and what is taken off: the same seed of another kind, or nothing
    (FLIP, "-0.0551", "memory", None, gap, "lower", 0.0),
    ("The gate takes more of the memory for hot tokens, hot - cold alpha", "throughout", "memory", None, preference,
     "higher", 0.0),
    ("CGS lowers the loss at equal steps", "-0.0148", "cgs", "memory", loss, "lower", 0.0),
    ("as much compute without CGS lowers it further", "-0.0144", "equal", "cgs", loss, "lower", 0.0),
    ("CGS lowers the AUC", "-0.0208", "cgs", "memory", area, "lower", 0.0),
    ("CGS lowers the AUC of the deepest memory most", "-0.002 to the others", "cgs", "memory", deepest, "lower", 0.0),
    ("as much compute without CGS leaves the AUC", "-0.0015", "equal", "memory", area, "equal", EQUAL_AUC),
    (LEFT, "-0.0003", "cgs", "memory", gap, "equal", EQUAL_LOSS),
    ("CGS with lambda 0.005 lowers the loss of the memory alone", "", "weak", "memory", loss, "lower", 0.0),
    ("CGS with lambda 0.005 raises the AUC of the memory alone", "", "weak", "memory", area, "higher", 0.0),
    ("the memory lowers the loss", "", "memory", "none", loss, "lower", 0.0),
    ("means of labels lower the loss", "", "smooth", "cgs", loss, "lower", 0.0),
    ("means of labels raise the AUC", "", "smooth", "cgs", area, "higher", 0.0),
    ("a curriculum lowers the loss", "", "curriculum", "cgs", loss, "lower", 0.0),
    ("a curriculum raises the AUC", "", "curriculum", "cgs", area, "higher", 0.0),
    ("a curriculum at the memory's rate lowers its loss", "", "curriculum_slow", "memory", loss, "lower", 0.0),
    ("a curriculum at the memory's rate raises its AUC", "", "curriculum_slow", "memory", area, "higher", 0.0),
]  # fmt: skip


def seeds_of(runs: Runs, kind: str, other: str | None) -> list[int]:
    """The seeds that a claim compares."""
    return sorted(set(runs.get(kind, {})) & set(runs.get(other or kind, {})))


def claims(runs: Runs) -> list[Judged]:
    """The publication's claims, and what it names as future work,
    as differences of runs of the same seed."""
    asked = [claim for claim in CLAIMS if seeds_of(runs, *claim[2:4])]
    flipped = any(gap(run) < 0 for run in runs.get("memory", {}).values())
    rows = []
    for claim, paper, kind, other, measure, expected, margin in asked:
        seeds = seeds_of(runs, kind, other)
        less = [measure(runs[other][seed]) if other else 0.0 for seed in seeds]
        numbers = [measure(runs[kind][seed]) - one for seed, one in zip(seeds, less)]
        row = judge(claim, paper, numbers, expected, len(asked), margin)
        if claim == LEFT and not flipped:
            row = replace(
                row,
                state=OPEN,
                reason="no seed shows the flip here: what CGS does to it cannot be tested",
            )
        rows.append(row)
    return rows


def past_lowest(runs: Runs) -> str:
    """Whether the text is used up: how far the memory alone ends above the lowest
    loss of its curve."""
    rises = [
        loss(run) - min(point["loss"] for point in run["curve"]) for run in runs["memory"].values()
    ]
    if max(rises) == 0:
        return ""
    return (
        f" The loss of the memory alone ends {tell_mean(rises, 4)} above the lowest of its curve."
    )


def heading(steps: int, runs: Runs) -> str:
    """How long the trainings of a table were, and at which rates."""
    rates = ", ".join(
        f"{rates_of(runs[kind])} ({KINDS[kind]})" for kind in ("memory", "cgs") if kind in runs
    )
    return f"After {steps:,} steps, at learning rates of {rates}.{past_lowest(runs)}"


def differences(lengths: dict[int, Runs]) -> list[str]:
    """Claims by length of the training; the intervals of each table hold together."""
    lines = []
    for steps, runs in lengths.items():
        lines += ["", heading(steps, runs), "", *claims_table(claims(runs))]
    return lines[1:]


def by_text(tell: Callable[[dict[int, Runs]], list[str]]) -> list[str]:
    """What `tell` says of the committed results, text by text."""
    lines = []
    for name, text in TEXTS.items():
        lines += ["", f"On {text}.", "", *tell(by_steps(json.loads((HERE / name).read_text())))]
    return lines[1:]


def tuning_table(results: dict[str, Any]) -> list[str]:
    """The best of the learning rates that were tried."""
    tried: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for key, row in results.items():
        if key.startswith("tuning "):
            tried.setdefault((row["steps"], key.split()[1]), []).append(row)
    lines = []
    for steps, kind in sorted(tried, key=lambda key: (key[0], list(KINDS).index(key[1]))):
        rows = tried[steps, kind]
        best = min(rows, key=loss)
        lines.append(
            [KINDS[kind], f"{steps:,}", f"{loss(best):.4f}", f"{best['rate']:g}", str(len(rows))]
        )
    return (
        markdown_table(["what", "steps", "loss", "learning rate", "rates tried"], lines)
        if lines
        else []
    )


def gradient_table(found: dict[str, Any]) -> list[str]:
    """Norms of the gradients of both losses by part of the model."""
    lines = []
    for part, norms in found["parts"].items():
        lines.append(
            [part, f"{norms['lm']:.2g}", f"{norms['cgs']:.2g}", f"{norms['cgs'] / norms['lm']:.3g}"]
        )
    return markdown_table(["part", "language model", "CGS, lambda 1", "ratio"], lines)


def draw(lengths: dict[int, Runs], path: Path) -> None:
    """By length, over the training: loss, that of hot tokens over that of cold ones,
    and the mean `alpha` of both."""
    count = max(1, len(lengths))
    figure, rows = plt.subplots(
        count, 3, figsize=(13, 3.6 * count + 0.6), layout="constrained", squeeze=False
    )
    for panels, runs in zip(rows, lengths.values()):
        draw_length(runs, panels)
    titles = (
        "loss",
        "loss of cold tokens - loss of hot ones (below 0: the flip)",
        "mean alpha: hot tokens, and cold ones (dashed)",
    )
    for panel, title in zip(rows[0], titles):
        panel.set_title(title, fontsize=10)
    for panel in rows[-1]:
        panel.set_xlabel("steps")
    lines = {line.get_label(): line for panel in rows[:, 0] for line in panel.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=9)
    write_bytes(path, png_of(figure, dpi=110))
    plt.close(figure)


def draw_length(runs: Runs, panels: Any) -> None:
    """A row of the picture."""
    for kind, seeds in runs.items():
        curves = [run["curve"] for run in seeds.values()]
        steps = [point["step"] for point in curves[0]]
        mean = {
            name: np.mean([[np.mean(p[name]) for p in curve] for curve in curves], axis=0)
            for name in curves[0][0]
        }
        drawn = {"color": f"C{list(KINDS).index(kind)}", "marker": "o", "markersize": 3}
        panels[0].plot(steps, mean["loss"], label=KINDS[kind], **drawn)
        if kind != "none":
            panels[1].plot(steps, mean["cold"] - mean["hot"], **drawn)
            panels[2].plot(steps, mean["alpha_hot"], **drawn)
            panels[2].plot(steps, mean["alpha_cold"], linestyle="--", **drawn)
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[1].axhline(0, color="black", linewidth=0.8)


def page(results: dict[str, Any]) -> str:
    """`results.md`."""
    lengths = by_steps(results)
    parts = [*table(lengths), "", DIFFERENCES, "", *differences(lengths), ""]
    if tried := tuning_table(results):
        parts += [
            "Where learning rates were chosen, one seed, on the text to choose on:",
            "",
            *tried,
            "",
        ]
    if "text" in results:
        text = results["text"]
        sources = ", ".join(f"{name} {version}" for name, version in text["versions"].items())
        parts += [
            (
                f"{text['tokens']['train']:,} tokens to train on, {text['tokens']['report']:,} to "
                f"report on; {sources}."
            ),
            "",
        ]
    if "gradients" in results:
        found = results["gradients"]
        labelled = (
            f"medians over the labelled steps of the last half of {found['steps']} (seed "
            f"{found['seed']})"
        )
        layer = "table and projections of the layer that is supervised"
        parts += [
            f"Norms of gradients in a training with CGS, {labelled}; {layer}:",
            "",
            *gradient_table(found),
            "",
        ]
    if "step" in results:
        step = results["step"]
        ratio = f"{step['ratio']:.3f} ± {step['error']:.3f}"
        parts += [
            (
                f"A step of CGS takes {ratio} of a step without, in processor time "
                f"({step['rounds']} rounds)."
            ),
            "",
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results.json", help="page and picture lie beside it"
    )
    path = parser.parse_args().results
    results = json.loads(path.read_text())
    write_text(path.with_suffix(".md"), page(results))
    draw(by_steps(results), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
