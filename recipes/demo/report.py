"""`report.md` of a run: what routing costs in loss and saves in time,
from the run's own JSON results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from pages import markdown_table, png_of

from hf_depthroute.files.shown import shown, shown_block
from hf_depthroute.files.staged import write_bytes, write_text

LINES = ("layers left out, fitted", "routers fitted", "routers fitted for 0.5, then trained")
SIZES = {"bench": "this base", "bench_wide": "Qwen2.5-0.5B's width"}
PARTS = ("prefill", "decode")


def write_report(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write `report.md` and its plots into `folder`.

    Args:
        folder: Exists.
        results: `title` (str), `eval_fitted` and `eval` (of `hf-depthroute eval --out`, before and
            after training; the latter also with rows of the rule `"static"`), `bench` and
            `bench_wide` (as of `hf-depthroute bench --out`), `fit` and `training` (of
            `training.json`), and `samples` (a list of dicts with `label`, `text`).

    Returns:
        The path of the report.
    """
    training, fit = results["training"], results["fit"]["fit"]
    dense = next(row for row in results["eval"]["rows"] if row["rule"] == "dense")
    plot_training(folder / "training.png", training["log_history"])
    plot_quality(folder / "quality.png", results)
    plot_speed(folder / "speed.png", {title: results[key] for key, title in SIZES.items()})

    machine, setting = results["bench"]["machine"], results["bench"]["setting"]
    lines = [
        f"# {shown(results['title'])}",
        "",
        "## What routing costs, against what",
        "",
        (
            f"Loss over the dense base ({dense['loss']:.4f} nats) on held-out text. In brackets "
            "the share of the routed layers' FFN calls that ran. Layers left out are the same for "
            "every token: of all subsets of that size the one that costs least, with the same "
            "branches fitted in their place, which are not trained. Routed losses are those of "
            "the causal rule; at 0.25 a router that was fitted for it, at the others the one "
            "fitted for 0.5."
        ),
        "",
        *markdown_table(["budget", *LINES], cost_rows(results)),
        "",
        (
            f"Fitted without training in {results['fit']['seconds']:.0f} s on "
            f"{fit['tokens'] + fit['held_out_tokens']:,} tokens; then "
            f"{training['arguments']['steps']} steps of {training['arguments']['batch_size']} x "
            f"{training['arguments']['length']} tokens in {training['seconds']:.0f} s, in which "
            f"{training['trainable_parameters']:,} parameters train."
        ),
        "",
        "![quality](quality.png)",
        "",
        "## What it saves",
        "",
        (
            "Times are medians of interleaved runs, as a fraction of the dense time; in brackets "
            "the share that ran full, which in 48 steps of decode can be far from the budget. The "
            "last two columns are of random weights."
        ),
        "",
        *markdown_table(
            ["budget", *(f"{part}, {title}" for title in SIZES.values() for part in PARTS)],
            times(results),
        ),
        "",
        "![speed](speed.png)",
        "",
        (
            "Loss over dense of prompts in the same time. That of layers left out is linear "
            "between their points, and its time is modelled, not measured: each is taken to save "
            "its part of what leaving out all routed FFNs saves, and its branch to cost nothing."
        ),
        "",
        *markdown_table(["budget", "time / dense", *LINES], equal_time_rows(results)),
        "",
        (
            "`eta = (T_dense - T_routed) / (T_dense - T_ideal)`; 1 means that every skipped FLOP "
            "shows on the clock."
        ),
        "",
        *markdown_table(
            ["model", "part", "budget", "time / dense", "FLOPs / dense", "eta"],
            _speed_rows(results),
        ),
        "",
        shown(
            f"Machine: {machine['device']}, {machine['threads']} threads, {setting['dtype']}, "
            f"torch {machine['torch']}, transformers {machine['transformers']}. Prefill of "
            f"{setting['batch']} x {setting['length']} tokens."
        ),
        "",
        "## Training",
        "",
        "![training](training.png)",
        "",
    ]
    if results.get("samples"):
        lines += ["## Samples", ""]
        for sample in results["samples"]:
            lines += sample_lines(sample)
    path = folder / "report.md"
    write_text(path, "\n".join(lines))
    return path


def lines_of(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each way to skip, by rising share."""
    rules = zip(LINES, ("static", "threshold", "threshold"), ("eval", "eval_fitted", "eval"))
    return {
        name: sorted(
            (row for row in results[key]["rows"] if row["rule"] == rule),
            key=itemgetter("full_ratio"),
        )
        for name, rule, key in rules
    }


def cost_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Loss over dense by budget, for every way to skip."""
    lines = lines_of(results)
    dense = next(row["loss"] for row in results["eval"]["rows"] if row["rule"] == "dense")
    return [
        [
            f"{rows[0]['budget']:g}",
            *(f"{row['loss'] - dense:+.4f} ({row['full_ratio']:.1%})" for row in rows),
        ]
        for rows in zip(*lines.values())
    ]


def equal_time_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Loss over dense by budget, beside that of the layers which could be left out in the
    time of its prefill."""
    static, *routed = time_lines(results).values()
    taken, more = zip(*sorted(static))
    rows = []
    for budget, *points in zip(
        (row["budget"] for row in lines_of(results)[LINES[1]]), *(line[1:] for line in routed)
    ):
        ratio = points[0][0]
        equal = f"{np.interp(ratio, taken, more):+.4f}" if ratio >= taken[0] else "none is as fast"
        rows.append([f"{budget:g}", f"{ratio:.3f}", equal, *(f"{loss:+.4f}" for _, loss in points)])
    return rows


def time_lines(results: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Time of prefill and loss, both over dense, of each way to skip, from the dense base on."""
    prefill = results["bench"]["prefill"]
    dense = next(row["loss"] for row in results["eval"]["rows"] if row["rule"] == "dense")

    def time(row: Mapping[str, Any]) -> float:
        if row["rule"] != "static":
            return float(prefill["budgets"][str(row["budget"])]["ratio"])
        return static_time(prefill, row["full_ratio"])

    return {
        name: [(1.0, 0.0), *((time(row), row["loss"] - dense) for row in rows)]
        for name, rows in lines_of(results).items()
    }


def static_time(prefill: Mapping[str, Any], share: float) -> float:
    """Time over dense where the FFNs of the other layers are left out:
    their part of what leaving out all saves."""
    return float(1 - (1 - share) * (1 - prefill["without_ffns"]))


def times(results: Mapping[str, Any]) -> list[list[str]]:
    """Time over dense time by budget, of both models, and the share that ran full."""
    budgets = sorted(results["bench"]["prefill"]["budgets"], key=float)
    rows = [
        [results[key][part]["budgets"][budget] for key in SIZES for part in PARTS]
        for budget in budgets
    ]
    return [
        [budget, *(f"{row['ratio']:.3f} ({row['full_ratio']:.0%})" for row in timed)]
        for budget, timed in zip(budgets, rows)
    ]


def sample_lines(sample: Mapping[str, str]) -> list[str]:
    """A label and a text in a fence, which nothing in the text ends."""
    text = shown_block(sample["text"].rstrip())
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return [f"{shown(sample['label'])}:", "", fence, text, fence, ""]


def _speed_rows(results: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            title,
            part,
            budget,
            f"{row['ratio']:.3f}",
            f"{row['flops_routed_over_dense']:.3f}",
            f"{row['eta']:.2f}",
        ]
        for key, title in SIZES.items()
        for part in PARTS
        for budget, row in results[key][part]["budgets"].items()
    ]


def plot_training(path: Path, log_history: Sequence[Mapping[str, Any]]) -> None:
    """Divergence from the dense base over steps, and the mean gate probability of
    each routed layer."""
    rows = [row for row in log_history if "loss_distill" in row]
    steps = [row["step"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(steps, [row["loss_distill"] for row in rows])
    left.set(
        xlabel="optimizer step",
        ylabel="training loss (nats)",
        title="Divergence from the dense base",
    )
    for key in sorted(k for k in rows[-1] if k.startswith("gate_prob/")):
        right.plot(
            steps,
            [row[key] for row in rows],
            label=key.removeprefix("gate_prob/").replace("_", " "),
        )
    right.set(
        xlabel="optimizer step",
        ylabel="mean gate probability",
        ylim=(0, 1.02),
        title="Gate probability",
    )
    right.legend()
    _save(figure, path)


def plot_quality(path: Path, results: Mapping[str, Any]) -> None:
    """Loss over dense against the share of calls run, and against the time of prefill,
    for every way to skip."""
    dense = next(row["loss"] for row in results["eval"]["rows"] if row["rule"] == "dense")
    shares = {
        name: [(1.0, 0.0), *((row["full_ratio"], row["loss"] - dense) for row in rows)]
        for name, rows in lines_of(results).items()
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, lines in zip(panels, (shares, time_lines(results))):
        for (name, points), marker in zip(lines.items(), "Dos"):
            modelled = ", time modelled" if axes is panels[1] and name == LINES[0] else ""
            axes.plot(*zip(*sorted(points)), marker=marker, label=f"{name}{modelled}")
        axes.plot(1.0, 0.0, marker="*", markersize=12, color="black", linestyle="", label="dense")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set(xlabel="share of the FFN calls run", ylabel="loss over dense (nats)")
    panels[1].set(xlabel="time of a prompt / dense time")
    _save(figure, path)


def plot_speed(path: Path, benches: Mapping[str, Mapping[str, Any]]) -> None:
    """Measured time over dense time against budget, for prefill and decode, with the FLOP ratio;
    a panel for each."""
    figure, panels = plt.subplots(
        1, len(benches), figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for axes, (title, bench) in zip(panels, benches.items()):
        axes.axhline(1.0, color="black", linestyle="--", label="dense")
        for part, color in zip(PARTS, ("tab:blue", "tab:orange")):
            rows = sorted(bench[part]["budgets"].values(), key=itemgetter("full_ratio"))
            shares = [row["full_ratio"] for row in rows]
            axes.plot(
                shares,
                [row["ratio"] for row in rows],
                marker="o",
                color=color,
                label=f"{part}, measured",
            )
            flops = [row["flops_routed_over_dense"] for row in rows]
            axes.plot(shares, flops, linestyle=":", color=color, label=f"{part}, FLOPs")
        axes.set(xlabel="share of tokens run full in routed layers", title=title)
    panels[0].set(ylabel="time / dense time", ylim=(0, None))
    panels[0].legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)
