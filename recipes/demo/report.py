"""`report.md` of a run: what routing costs in loss and saves in time, from the run's own JSON results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from hf_depthroute.files.markdown import markdown_table
from hf_depthroute.files.shown import shown, shown_block
from hf_depthroute.files.staged import png_of, write_bytes, write_text

_SIZE = (6.4, 3.6)


def write_report(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write `report.md` and its plots into `folder`.

    Args:
        folder: Exists.
        results: `title` (str), `eval` (rows of `hf-depthroute eval --out`), `bench` (of `hf-depthroute bench
            --out`), `training` (of `training.json`), and `samples` (a list of dicts with `label`, `text`).

    Returns:
        The path of the report.
    """
    rows, bench, training = results["eval"]["rows"], results["bench"], results["training"]
    plot_training(folder / "training.png", training["log_history"])
    plot_quality(folder / "quality.png", rows)
    plot_speed(folder / "speed.png", bench)

    dense = next(row for row in rows if row["rule"] == "dense")
    machine, setting = bench["machine"], bench["setting"]
    prefill, decode = bench["prefill"], bench.get("decode")
    lines = [
        f"# {shown(results['title'])}",
        "",
        "## What routing costs and saves",
        "",
        "The share is measured: the fraction of real tokens that ran the full FFN in the routed layers, under the "
        "causal threshold. Times are medians of interleaved runs, as a fraction of the dense time.",
        "",
        *markdown_table(
            ["budget", "share run full", "loss", "loss - dense", "threshold - top-k", "prefill time", "decode time"],
            [_cost_row(row, rows, dense, prefill, decode) for row in rows if row["rule"] == "threshold"],
        ),
        "",
        f"Dense loss {dense['loss']:.4f} (perplexity {dense['perplexity']:.2f}); dense prefill "
        f"{prefill['dense_ms']:.1f} ms for {setting['batch']} x {setting['length']} tokens.",
        "",
        "![quality](quality.png)",
        "",
        "![speed](speed.png)",
        "",
        "## Speed in detail",
        "",
        "`eta = (T_dense - T_routed) / (T_dense - T_ideal)`; 1 means that every skipped FLOP shows on the clock.",
        "",
        *markdown_table(["part", "budget", "time / dense", "FLOPs / dense", "eta", "tokens/s"], _speed_rows(bench)),
        "",
        shown(
            f"Machine: {machine['device']}, {machine['threads']} threads, {setting['dtype']}, "
            f"torch {machine['torch']}, transformers {machine['transformers']}."
        ),
        "",
        "## Training",
        "",
        f"{training['arguments']['steps']} steps of {training['arguments']['batch_size']} x "
        f"{training['arguments']['length']} tokens, {training['seconds']:.0f} s with loading and calibration; "
        f"{training['trainable_parameters']:,} parameters train.",
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


def sample_lines(sample: Mapping[str, str]) -> list[str]:
    """A label and a text in a fence, which nothing in the text ends."""
    text = shown_block(sample["text"].rstrip())
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return [f"{shown(sample['label'])}:", "", fence, text, fence, ""]


def _cost_row(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    dense: Mapping[str, Any],
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any] | None,
) -> list[str]:
    topk = next(r for r in rows if r["rule"] == "topk" and r["budget"] == row["budget"])
    key = str(row["budget"])
    return [
        f"{row['budget']:g}",
        f"{row['full_ratio']:.3f}",
        f"{row['loss']:.4f}",
        f"{row['loss'] - dense['loss']:+.4f}",
        f"{row['loss'] - topk['loss']:+.4f}",
        f"{prefill['budgets'][key]['ratio']:.3f}",
        f"{decode['budgets'][key]['ratio']:.3f}" if decode else "-",
    ]


def _speed_rows(bench: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            part,
            budget,
            f"{row['ratio']:.3f}",
            f"{row['flops_routed_over_dense']:.3f}",
            f"{row['eta']:.2f}",
            f"{row['tokens_per_s']:.0f}",
        ]
        for part in ("prefill", "decode")
        if part in bench
        for budget, row in bench[part]["budgets"].items()
    ]


def plot_training(path: Path, log_history: Sequence[Mapping[str, Any]]) -> None:
    """Language-model loss over steps, and the mean gate probability of each routed layer."""
    rows = [row for row in log_history if "loss_lm" in row]
    steps = [row["step"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(steps, [row["loss_lm"] for row in rows])
    left.set(xlabel="optimizer step", ylabel="training loss (nats)", title="Language-model loss")
    for key in sorted(k for k in rows[-1] if k.startswith("gate_prob/")):
        right.plot(steps, [row[key] for row in rows], label=key.removeprefix("gate_prob/").replace("_", " "))
    right.set(xlabel="optimizer step", ylabel="mean gate probability", ylim=(0, 1.02), title="Gate probability")
    right.legend()
    _save(figure, path)


def plot_quality(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Loss against budget for top-k and causal-threshold selection, with the dense loss as a line."""
    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    dense = next(row["loss"] for row in rows if row["rule"] == "dense")
    axes.axhline(dense, color="black", linestyle="--", label="dense")
    for rule, marker, label in (("topk", "o", "top-k (sees the future)"), ("threshold", "s", "causal threshold")):
        picked = sorted((row["full_ratio"], row["loss"]) for row in rows if row["rule"] == rule)
        if picked:
            axes.plot(*zip(*picked), marker=marker, label=label)
    axes.set(xlabel="share of tokens run full in routed layers", ylabel="validation loss (nats)", title="Quality")
    axes.legend()
    _save(figure, path)


def plot_speed(path: Path, bench: Mapping[str, Any]) -> None:
    """Measured time over dense time against budget, for prefill and decode, with the FLOP ratio."""
    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    axes.axhline(1.0, color="black", linestyle="--", label="dense")
    for part, color in (("prefill", "tab:blue"), ("decode", "tab:orange")):
        if part not in bench:
            continue
        rows = sorted(bench[part]["budgets"].values(), key=lambda row: row["full_ratio"])
        shares = [row["full_ratio"] for row in rows]
        axes.plot(shares, [row["ratio"] for row in rows], marker="o", color=color, label=f"{part}, measured")
        flops = [row["flops_routed_over_dense"] for row in rows]
        axes.plot(shares, flops, linestyle=":", color=color, label=f"{part}, FLOPs")
    axes.set(xlabel="share of tokens run full in routed layers", ylabel="time / dense time", title="Speed")
    axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)
