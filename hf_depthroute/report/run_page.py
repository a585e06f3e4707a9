"""The page of a routed model: what a `RunReport` says in words, tables and charts, in one file that loads nothing."""

from __future__ import annotations

from ..routing.description import ranges
from . import charts
from .collect import PARTS, RunReport
from .rendering import render


def render_page(report: RunReport) -> str:
    """The whole report."""
    numbers = range(len(report.budgets))
    curves = [charts.loss_chart(report)]
    if report.is_timed:
        curves.append(charts.time_chart(report))
    return render(
        "run_page.html",
        title=report.title,
        lead=_lead(report),
        report=report,
        parts=PARTS,
        chosen=report.start,
        data=report.tokens,
        alone=False,
        charts=curves,
        cost=charts.cost_chart(report),
        cost_parts=charts.COST_PARTS,
        ratios=[charts.ratio_chart(report, number) for number in numbers],
        histograms=[
            [charts.histogram(report, n, i) if i in report.gated(n) else None for i in report.tokens["layers"]]
            for n in numbers
        ],
    )


def _lead(report: RunReport) -> str:
    gated, row = report.gated(report.start), report.routed[report.start]
    losses = f"the loss is {row['loss']:.3f}; the dense model's is {report.dense['loss']:.3f}."
    where = f"{len(gated)} {'layer' if len(gated) == 1 else 'layers'} ({ranges(list(gated))})"
    if report.weighs:
        return f"Gates in {where} weigh what is added to every token. Nothing is skipped; {losses}"
    static = [index for index in report.scores[report.start] if index not in gated]
    left_out = f" Layers without a gate, which every token skips: {ranges(static)}." if static else ""
    return (
        f"Routers in {where} decide for every token whether it runs the full layer.{left_out} "
        f"With {report.share_full(report.start):.0%} of these decisions for full, {losses}"
    )
