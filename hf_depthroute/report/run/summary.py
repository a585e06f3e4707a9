"""What the page says in words and tables about a `RunReport`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .charts import COST_PARTS
from .collect import LayerScores, RunReport

PARTS = ("prefill", "decode")


@dataclass(frozen=True)
class Tile:
    """One figure with its `name`, `value` and a line of `text` about it."""

    name: str
    value: str
    text: str


@dataclass(frozen=True)
class Table:
    """`rows` of strings, each as long as `columns`; the first column heads its row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def budget_names(report: RunReport) -> list[str]:
    return [f"{budget:g}" for budget in report.budgets] if report.follows_budget else ["fixed"]


def default_budget(report: RunReport) -> int:
    """Position of the budget that the page starts with: the one nearest to one half."""
    return min(range(len(report.budgets)), key=lambda number: abs(report.budgets[number] - 0.5))


def dense_row(report: RunReport) -> Mapping[str, Any]:
    return next(row for row in report.rows if row["rule"] == "dense")


def routed_rows(report: RunReport) -> list[Mapping[str, Any]]:
    """The rows of the inference rule, one per budget."""
    rows = [row for row in report.rows if row["rule"] in ("threshold", "fixed")]
    return [next(row for row in rows if row["budget"] == budget) for budget in report.budgets]


def timed(report: RunReport, part: str) -> Mapping[str, Mapping[str, Any]]:
    """Measured rows of prefill or decode by the budget's number as text; empty where there are none."""
    found: Mapping[str, Mapping[str, Any]] = (report.bench or {}).get(part, {}).get("budgets", {})
    return found


def lead(report: RunReport) -> str:
    layers = report.tokens["layers"]
    rows, dense = routed_rows(report), dense_row(report)
    row = rows[default_budget(report)]
    return (
        f"Routers in {len(layers)} {'layer' if len(layers) == 1 else 'layers'} ({_runs(layers)}) decide for every "
        f"token whether it runs the full layer. With {row['full_ratio']:.0%} of these decisions for full, the loss is "
        f"{row['loss']:.3f}; the dense model's is {dense['loss']:.3f}."
    )


def tiles(report: RunReport, number: int) -> list[Tile]:
    """The figures of one budget."""
    dense, row = dense_row(report), routed_rows(report)[number]
    change = row["loss"] - dense["loss"]
    layers = report.scores[number]
    shares = [layer.full_ratio for layer in layers.values()]
    cost = report.costs[number]
    asked = f"asked for {report.budgets[number]:g}; " if report.follows_budget else ""
    found = [
        Tile("Dense loss", f"{dense['loss']:.3f}", f"nats per token, perplexity {dense['perplexity']:.2f}"),
        Tile("Routed loss", f"{row['loss']:.3f}", f"{change:+.3f}, perplexity {row['perplexity']:.2f}"),
        Tile("Run full", f"{row['full_ratio']:.1%}", f"{asked}layers from {min(shares):.0%} to {max(shares):.0%}"),
        Tile("Arithmetic", f"{1 - cost.saved / cost.dense:.1%}", "of the dense model's FLOPs"),
    ]
    for part in PARTS:
        name = f"{part.capitalize()} speed"
        time = timed(report, part).get(str(report.budgets[number]))
        if time is None:
            found.append(Tile(name, "-", "not measured"))
            continue
        sizes = (report.bench or {})[part]
        shape = f"{sizes['batch']} x {sizes['length']} tokens" if part == "prefill" else f"batch {sizes['batch']}"
        text = (
            f"{time['routed_ms']:.1f} ms, dense {sizes['dense_ms']:.1f} ms; {shape}, {time['full_ratio']:.0%} run full"
        )
        found.append(Tile(name, f"{time['speedup']:.2f}x", text))
    for part in PARTS:
        eta = timed(report, part).get(str(report.budgets[number]), {}).get("eta")
        text = (
            "not measured" if eta is None else "1: all saved arithmetic shows on the clock; below 0: slower than dense"
        )
        found.append(Tile(f"{part.capitalize()} eta", _eta(eta), text))
    return found


def overview(report: RunReport) -> Table:
    """Every budget in a line."""
    columns = ["budget", "run full", "loss", "loss - dense", "perplexity", "FLOPs / dense", *(
        f"{part} {what}" for part in PARTS for what in ("speed", "eta")
    )]  # fmt: skip
    dense = dense_row(report)
    rows = [["dense", "1.000", f"{dense['loss']:.4f}", "", f"{dense['perplexity']:.3f}", "1.000", *[""] * 4]]
    for name, budget, row, cost in zip(budget_names(report), report.budgets, routed_rows(report), report.costs):
        times = [timed(report, part).get(str(budget)) for part in PARTS]
        rows.append([
            name, f"{row['full_ratio']:.3f}", f"{row['loss']:.4f}", f"{row['loss'] - dense['loss']:+.4f}",
            f"{row['perplexity']:.3f}", f"{1 - cost.saved / cost.dense:.3f}",
            *(text for t in times for text in ((f"{t['speedup']:.3f}x", _eta(t["eta"])) if t else ("-", "-"))),
        ])  # fmt: skip
    return Table(columns, rows)


def losses(report: RunReport) -> Table:
    rules = {"dense": "dense", "topk": "top-k", "threshold": "causal threshold", "fixed": "the adapter's rule"}
    rows = [
        [
            f"{row['budget']:g}", rules.get(row["rule"], row["rule"]), f"{row['full_ratio']:.3f}", f"{row['loss']:.4f}",
            f"{row['perplexity']:.3f}", "" if row.get("gap") is None else f"{row['gap']:+.4f}",
        ]
        for row in report.rows
    ]  # fmt: skip
    return Table(["budget", "rule", "run full", "loss", "perplexity", "threshold - top-k"], rows)


def speed(report: RunReport) -> Table:
    columns = ["part", "budget", "run full", "ms", "dense ms", "time / dense", "FLOPs / dense", "eta", "tokens/s"]
    rows = [
        [
            part, budget, f"{row['full_ratio']:.3f}", f"{row['routed_ms']:.2f}",
            f"{(report.bench or {})[part]['dense_ms']:.2f}", _with_error(row),
            f"{row['flops_routed_over_dense']:.3f}", _eta(row["eta"]), f"{row['tokens_per_s']:.0f}",
        ]
        for part in PARTS for budget, row in timed(report, part).items()
    ]  # fmt: skip
    return Table(columns, rows)


def costs(report: RunReport) -> Table:
    rows = [["dense", "100.0%", "", "", "", "100.0%"]]
    for name, cost in zip(budget_names(report), report.costs):
        shares = [getattr(cost, part) / cost.dense for part in COST_PARTS]
        total = 1 - cost.saved / cost.dense
        rows.append([name, *(f"{100 * share:.1f}%" for share in shares), f"{100 * total:.1f}%"])
    return Table(["budget", "never skipped", "run full", "routers and branches", "saved", "total computed"], rows)


def ratios(report: RunReport) -> Table:
    rows = [
        [f"layer {index}", *(f"{scores[index].full_ratio:.3f}" for scores in report.scores)]
        for index in report.tokens["layers"]
    ]
    return Table(["layer", *_headed(report)], rows)


def thresholds(report: RunReport) -> Table:
    rows = [
        [
            f"layer {index}",
            *(_quartiles(report.scores[0][index])),
            *(_threshold(scores[index]) for scores in report.scores),
        ]
        for index in report.tokens["layers"]
    ]
    return Table(["layer", "score, lower quartile", "median", "upper quartile", *_thresholds_headed(report)], rows)


def scores_text(report: RunReport) -> str:
    if any(layer.threshold is not None for layer in report.scores[0].values()):
        return (
            "A token runs a layer in full if its score reaches the layer's threshold. The bars count the tokens of the "
            "evaluated text by score. A layer's scores move a little with the budget, since what earlier layers "
            "skipped changes what it sees."
        )
    return (
        "The bars count the decisions on the evaluated text by score. This adapter does not compare with a threshold."
    )


def method(report: RunReport) -> list[str]:
    """How to read the figures."""
    lines = [
        "Loss is the mean next-token cross-entropy in nats on the text named above. Routed figures are those of the "
        "causal inference rule unless they say top-k.",
        "Run full is measured: the share of decisions about real tokens that were for the full path, mean over the "
        "routed layers.",
        "The token view was recorded at each budget by itself: decisions, scores and thresholds are the library's own, "
        "not computed by the page. Its losses are of the shown tokens alone.",
    ]
    if report.bench is not None:
        lines.append(
            "Times are medians of interleaved runs in one process, ratios medians of each round's own ratio. Each "
            "budget was calibrated on the timed tokens, so that the share asked for really ran. Eta is "
            "(T_dense - T_routed) / (T_dense - T_ideal): at 1, every saved FLOP shows on the clock; below 0, routing "
            "made it slower."
        )
    return lines


def _headed(report: RunReport) -> list[str]:
    return [f"budget {name}" for name in budget_names(report)]


def _thresholds_headed(report: RunReport) -> list[str]:
    return [f"threshold at {name}" for name in budget_names(report)]


def _threshold(layer: LayerScores) -> str:
    return "-" if layer.threshold is None else f"{layer.threshold:.4f}"


def _quartiles(layer: LayerScores) -> list[str]:
    """Read from the histogram: each bin's middle, weighted by its count."""
    middles = [(a + b) / 2 for a, b in zip(layer.edges, layer.edges[1:])]
    counts = [a + b for a, b in zip(layer.full, layer.skipped)]
    values = [middle for middle, count in zip(middles, counts) for _ in range(count)]
    if len(values) < 2:
        return ["-"] * 3
    return [f"{value:.3f}" for value in statistics.quantiles(values, n=4)]


def _eta(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _with_error(row: Mapping[str, Any]) -> str:
    error = row.get("ratio_error")
    return f"{row['ratio']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _runs(layers: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` -> `"1-3, 7"`."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts)
