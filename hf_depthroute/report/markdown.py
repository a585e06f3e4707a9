"""`report.md` of a run: what routing costs in loss and saves in time, from the run's own JSON results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..shown import shown, shown_block
from ..staged_files import write_text
from .plots import plot_quality, plot_speed, plot_training


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
        _table(
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
        _table(["part", "budget", "time / dense", "FLOPs / dense", "eta", "tokens/s"], _speed_rows(bench)),
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruled = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)
