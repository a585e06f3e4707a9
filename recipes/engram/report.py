"""Tables and picture of `results.json`.

python recipes/engram/report.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy.stats import ttest_1samp

from hf_depthroute.files.markdown import markdown_table
from hf_depthroute.files.staged import png_of, write_bytes, write_text

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KINDS = {
    "none": "no memory", "memory": "memory", "cgs": "memory, CGS", "equal": "memory, as much compute",
    "smooth": "memory, CGS with means of 9 labels", "curriculum": "memory, CGS in the second half",
}  # fmt: skip
Runs = dict[str, dict[int, dict[str, Any]]]
Measure = Callable[[dict[str, Any]], float]


def runs_of(results: dict[str, Any]) -> Runs:
    """`{kind: {seed: run}}` of the longest trainings."""
    named = {tuple(key.split()): row for key, row in results.items() if key.split()[0] in KINDS}
    longest = max((int(steps) for _, _, steps in named), default=0)
    runs: Runs = {kind: {} for kind in KINDS}
    for (kind, seed, steps), row in named.items():
        if int(steps) == longest:
            runs[kind][int(seed)] = row
    return {kind: seeds for kind, seeds in runs.items() if seeds}


def loss(run: dict[str, Any]) -> float:
    return float(run["curve"][-1]["loss"])


def area(run: dict[str, Any]) -> float:
    """The area under the ROC curve, mean over layers."""
    return statistics.mean(run["areas"].values())


def gap(run: dict[str, Any]) -> float:
    """What tokens with hot slots lose more than those with cold ones."""
    return float(run["curve"][-1]["hot"] - run["curve"][-1]["cold"])


def preference(run: dict[str, Any]) -> float:
    """How much more of the memory tokens with hot slots take than those with cold ones."""
    last = run["curve"][-1]
    return statistics.mean(last["alpha_hot"]) - statistics.mean(last["alpha_cold"])


def said(values: list[float], digits: int = 4, sign: str = "") -> str:
    """Mean, standard error and number."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.{digits}f}{error} ({len(values)})"


def table(runs: Runs) -> list[str]:
    """A line for each kind."""
    lines = []
    for kind, seeds in runs.items():
        found = list(seeds.values())
        cells = [KINDS[kind], f"{found[0]['steps']:,}", said([loss(run) for run in found])]
        if kind != "none":
            layers = [statistics.mean(run["areas"][layer] for run in found) for layer in found[0]["areas"]]
            cells += [" / ".join(f"{value:.3f}" for value in layers), said([area(run) for run in found])]
            cells += [said([measure(run) for run in found], sign="+") for measure in (gap, preference)]
        lines.append(cells + [""] * (7 - len(cells)))
    heads = ["what", "steps", "loss", "AUC by layer", "AUC", "hot - cold, loss", "hot - cold, alpha"]
    return markdown_table(heads, lines)


CLAIMS: list[tuple[str, str, str, str, Measure]] = [
    ("CGS lowers the loss at equal steps", "-0.0148", "cgs", "memory", loss),
    ("as much compute without CGS lowers it further", "-0.0144", "equal", "cgs", loss),
    ("CGS lowers the AUC", "-0.0208", "cgs", "memory", area),
    ("as much compute without CGS leaves the AUC", "-0.0015", "equal", "memory", area),
    ("CGS leaves the difference between hot and cold tokens", "-0.0003", "cgs", "memory", gap),
]
NEW: list[tuple[str, str, str, Measure]] = [
    ("the memory lowers the loss", "memory", "none", loss),
    ("means of labels lower the loss", "smooth", "cgs", loss),
    ("means of labels raise the AUC", "smooth", "cgs", area),
    ("a curriculum lowers the loss", "curriculum", "cgs", loss),
    ("a curriculum raises the AUC", "curriculum", "cgs", area),
]


def difference(runs: Runs, kind: str, other: str, measure: Measure) -> tuple[list[float], str, str]:
    """Differences within each seed; their mean with its 95 % interval, and p, as words.

    p is that of a two-sided t-test, times the number of comparisons of the page (Bonferroni).
    """
    seeds = sorted(set(runs.get(kind, {})).intersection(runs.get(other, {})))
    found = [measure(runs[kind][seed]) - measure(runs[other][seed]) for seed in seeds]
    if len(found) < 3:
        return found, f"{statistics.mean(found):+.4f}" if found else "", ""
    test = ttest_1samp(found, 0.0)
    low, high = test.confidence_interval()
    p = min(1.0, float(test.pvalue) * (len(CLAIMS) + len(NEW)))
    return found, f"{statistics.mean(found):+.4f} ({low:+.4f} to {high:+.4f})", "< 0.001" if p < 0.001 else f"{p:.3f}"


def claims_table(runs: Runs) -> list[str]:
    """The publication's claims, and what they name as future work, as differences of runs of the same seed."""
    lines = []
    asked = [*CLAIMS, *((claim, "", *rest) for claim, *rest in NEW)]
    for claim, paper, kind, other, measure in asked:
        found, words, p = difference(runs, kind, other, measure)
        if found:
            lines.append([claim, paper, words, str(len(found)), p])
    return markdown_table(["claim", "paper", "here (95 %)", "seeds", "p"], lines)


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
        lines.append([KINDS[kind], f"{steps:,}", f"{loss(best):.4f}", f"{best['rate']:g}", str(len(rows))])
    return markdown_table(["what", "steps", "loss", "learning rate", "rates tried"], lines)


def draw(runs: Runs, path: Path) -> None:
    """Over the training: loss, loss of hot tokens over that of cold ones, and the mean `alpha` of both."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for number, (kind, seeds) in enumerate(runs.items()):
        curves = [run["curve"] for run in seeds.values()]
        steps = [point["step"] for point in curves[0]]
        mean = {name: np.mean([[np.mean(p[name]) for p in curve] for curve in curves], axis=0) for name in curves[0][0]}
        drawn = {"color": f"C{number}", "marker": "o", "markersize": 3}
        panels[0].plot(steps, mean["loss"], label=KINDS[kind], **drawn)
        if kind != "none":
            panels[1].plot(steps, mean["hot"] - mean["cold"], **drawn)
            panels[2].plot(steps, mean["alpha_hot"], **drawn)
            panels[2].plot(steps, mean["alpha_cold"], linestyle="--", **drawn)
    titles = ("loss", "loss of hot tokens - loss of cold ones", "mean alpha: hot tokens, and cold ones (dashed)")
    for panel, title in zip(panels, titles):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("steps")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    panels[1].axhline(0, color="black", linewidth=0.8)
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)


def page(results: dict[str, Any]) -> str:
    """`results.md`."""
    runs = runs_of(results)
    parts = [*table(runs), "", "Differences within each seed:", "", *claims_table(runs), ""]
    parts += ["Where learning rates were chosen, one seed, on the text to choose on:", "", *tuning_table(results), ""]
    if "step" in results:
        step = results["step"]
        ratio = f"{step['ratio']:.3f} ± {step['error']:.3f}"
        parts += [f"A step of CGS takes {ratio} of a step without, in processor time ({step['rounds']} rounds).", ""]
    return "\n".join(parts)


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    write_text(HERE / "results.md", page(results))
    draw(runs_of(results), HERE / "results.png")


if __name__ == "__main__":
    main()
