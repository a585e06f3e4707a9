"""The page of a routed model: what a `RunReport` says in words, tables and charts, in one file that loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from . import charts
from .collect import PARTS, LayerScores, RunReport
from .rendering import render

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the columns, and the rows, which the first column heads
_RULES = {
    "dense": "dense", "topk": "top-k", "threshold": "causal threshold", "fixed": "the adapter's rule",
    "static": "layers left out",
}  # fmt: skip


def render_page(report: RunReport) -> str:
    """The whole report."""
    numbers = range(len(report.budgets))
    curves = [charts.loss_chart(report)]
    if any(map(report.timed, PARTS)):
        curves.append(charts.time_chart(report))
    return render(
        "run_page.html",
        title=report.title,
        lead=_lead(report),
        notes=report.notes,
        budgets=report.names,
        chosen=report.start,
        tiles=[_tiles(report, number) for number in numbers],
        summary=_overview(report),
        data=report.tokens,
        alone=False,
        charts=curves,
        losses=_losses(report),
        speed=_speed(report),
        cost=charts.cost_chart(report),
        cost_parts=charts.COST_PARTS,
        cost_table=_costs(report),
        ratios=[charts.ratio_chart(report, number) for number in numbers],
        ratio_table=_ratios(report),
        histograms=[
            [charts.histogram(report, n, i) if i in report.gated(n) else None for i in report.tokens["layers"]]
            for n in numbers
        ],
        thresholds=any(layer.threshold is not None for layer in report.scores[0].values()),
        score_table=_thresholds(report),
        facts=report.facts,
        timed=report.bench is not None,
    )


def _lead(report: RunReport) -> str:
    gated, row = report.gated(report.start), report.routed[report.start]
    losses = f"the loss is {row['loss']:.3f}; the dense model's is {report.dense['loss']:.3f}."
    where = f"{len(gated)} {'layer' if len(gated) == 1 else 'layers'} ({_runs(list(gated))})"
    if report.weighs:
        return f"Gates in {where} weigh what is added to every token. Nothing is skipped; {losses}"
    static = [index for index in report.scores[report.start] if index not in gated]
    left_out = f" Layers without a gate, which every token skips: {_runs(static)}." if static else ""
    share = statistics.fmean(layer.full_ratio for layer in gated.values())
    return (
        f"Routers in {where} decide for every token whether it runs the full layer.{left_out} With {share:.0%} of "
        f"these decisions for full, {losses}"
    )


def _tiles(report: RunReport, number: int) -> Iterable[tuple[str, str, str]]:
    """The figures of one budget: a name, a value and a line of text about it."""
    dense, row = report.dense, report.routed[number]
    shares = [layer.full_ratio for layer in report.gated(number).values()]
    asked = f"asked for {report.budgets[number]:g}; " if report.follows_budget else ""
    change = f"{row['loss'] - dense['loss']:+.3f}, perplexity {row['perplexity']:.2f}"
    yield "Dense loss", f"{dense['loss']:.3f}", f"nats per token, perplexity {dense['perplexity']:.2f}"
    yield "Routed loss", f"{row['loss']:.3f}", change
    static = report.static(report.budgets[number])
    if static is not None:
        instead = (
            f"{static['loss'] - dense['loss']:+.3f}; the same layers for every token, fitted branches, as many calls"
        )
        yield "Loss of layers left out", f"{static['loss']:.3f}", instead
    if not report.weighs:
        where = "layers with a gate" if len(shares) < len(report.scores[number]) else "layers"
        spread = f"{asked}{where} from {min(shares):.0%} to {max(shares):.0%}"
        yield "Run full", f"{statistics.fmean(shares):.1%}", spread
    yield "Arithmetic", f"{report.costs[number].computed:.1%}", "of the dense model's FLOPs"
    times = {part: report.timed(part).get(str(report.budgets[number])) for part in PARTS}
    for part, time in times.items():
        name, value, text = f"{part.capitalize()} speed", "-", "not measured"
        if time is not None:
            of = (report.bench or {})[part]
            shape = f"{of['batch']} x {of['length']} tokens" if part == "prefill" else f"batch {of['batch']}"
            text = (
                f"{time['routed_ms']:.1f} ms, dense {of['dense_ms']:.1f} ms; {shape}, {time['full_ratio']:.0%} run full"
            )
            value = f"{time['speedup']:.2f}x"
        yield name, value, text
    for part, time in times.items():
        eta = (time or {}).get("eta")
        text = "1: all saved arithmetic shows on the clock; below 0: slower than dense"
        yield f"{part.capitalize()} eta", _eta(eta), "not measured" if eta is None else text


def _overview(report: RunReport) -> Table:
    """Every budget in a line."""
    columns = ["budget", "run full", "loss", "loss - dense", "perplexity", "FLOPs / dense"]
    dense = report.dense
    rows = [["dense", "1.000", f"{dense['loss']:.4f}", "", f"{dense['perplexity']:.3f}", "1.000", *[""] * 4]]
    for name, budget, row, cost in zip(report.names, report.budgets, report.routed, report.costs):
        times = [report.timed(part).get(str(budget)) for part in PARTS]
        rows.append([
            name, f"{row['full_ratio']:.3f}", f"{row['loss']:.4f}", f"{row['loss'] - dense['loss']:+.4f}",
            f"{row['perplexity']:.3f}", f"{cost.computed:.3f}",
            *(text for t in times for text in ((f"{t['speedup']:.3f}x", _eta(t["eta"])) if t else ("-", "-"))),
        ])  # fmt: skip
    return [*columns, *(f"{part} {what}" for part in PARTS for what in ("speed", "eta"))], rows


def _losses(report: RunReport) -> Table:
    rows = [
        [
            f"{row['budget']:g}", _RULES.get(row["rule"], row["rule"]), f"{row['full_ratio']:.3f}",
            f"{row['loss']:.4f}", f"{row['perplexity']:.3f}", "" if row.get("gap") is None else f"{row['gap']:+.4f}",
        ]
        for row in report.rows
    ]  # fmt: skip
    return ["budget", "rule", "run full", "loss", "perplexity", "threshold - top-k"], rows


def _speed(report: RunReport) -> Table:
    columns = ["part", "budget", "run full", "ms", "dense ms", "time / dense", "FLOPs / dense", "eta", "tokens/s"]
    rows = [
        [
            part, budget, f"{row['full_ratio']:.3f}", f"{row['routed_ms']:.2f}",
            f"{(report.bench or {})[part]['dense_ms']:.2f}",
            f"{row['ratio']:.3f}" + ("" if row.get("ratio_error") is None else f" ± {row['ratio_error']:.3f}"),
            f"{row['flops_routed_over_dense']:.3f}", _eta(row["eta"]), f"{row['tokens_per_s']:.0f}",
        ]
        for part in PARTS for budget, row in report.timed(part).items()
    ]  # fmt: skip
    return columns, rows


def _costs(report: RunReport) -> Table:
    rows = [["dense", "100.0%", "", "", "", "100.0%"]]
    for name, cost in zip(report.names, report.costs):
        shares = [*(getattr(cost, part) / cost.dense for part in charts.COST_PARTS), cost.computed]
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    return ["budget", "never skipped", "run full", "routers and branches", "saved", "total computed"], rows


def _ratios(report: RunReport) -> Table:
    layers = report.tokens["layers"]
    rows = [[f"layer {i}", *(f"{scores[i].full_ratio:.3f}" for scores in report.scores)] for i in layers]
    return ["layer", *(f"budget {name}" for name in report.names)], rows


def _thresholds(report: RunReport) -> Table:
    columns = ["layer", "score, lower quartile", "median", "upper quartile"]
    rows = []
    for index in report.gated(0):
        thresholds = [scores[index].threshold for scores in report.scores]
        shown = ["-" if threshold is None else f"{threshold:.4f}" for threshold in thresholds]
        rows.append([f"layer {index}", *_quartiles(report.scores[0][index]), *shown])
    return [*columns, *(f"threshold at {name}" for name in report.names)], rows


def _quartiles(layer: LayerScores) -> list[str]:
    """Read from the histogram: each bin's middle, weighted by its count."""
    bins = zip(layer.edges, layer.edges[1:], layer.full, layer.skipped)
    values = [(low + high) / 2 for low, high, full, skipped in bins for _ in range(full + skipped)]
    return ["-"] * 3 if len(values) < 2 else [f"{value:.3f}" for value in statistics.quantiles(values, n=4)]


def _eta(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _runs(layers: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` -> `"1-3, 7"`."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts)
