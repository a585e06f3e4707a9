"""The page of a routed model: a `RunReport` in words, tables and charts."""

from __future__ import annotations

from ..routing.description import ranges
from . import charts
from .collect import PARTS, RunReport
from .tokens import render


def render_page(report: RunReport) -> str:
    """The whole report."""
    numbers = range(len(report.budgets))
    layers = report.tokens["layers"]
    curves = [charts.loss_chart(report)]
    if report.is_timed:
        curves.append(charts.time_chart(report))
    return render(
        "run_page.html",
        title=report.title,
        report=report,
        ranges=ranges,
        parts=PARTS,
        chosen=report.start,
        data=report.tokens,
        alone=False,
        charts=curves,
        cost=charts.cost_chart(report),
        cost_parts=charts.COST_PARTS,
        ratios=[charts.ratio_chart(report, number) for number in numbers],
        histograms=[  # None of a layer without a gate
            [charts.histogram(report, n, i) if i in report.gated(n) else None for i in layers]
            for n in numbers
        ],
    )
