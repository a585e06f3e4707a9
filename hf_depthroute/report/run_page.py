"""The page of a routed model: what a `RunReport` says in words, tables and charts,
in one file that loads nothing."""

from __future__ import annotations

from ..routing.description import ranges
from . import charts
from .collect import PARTS, RunReport
from .tokens import render


def render_page(report: RunReport) -> str:
    """The whole report."""
    numbers = range(len(report.budgets))
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
        histograms=[_histograms(report, number) for number in numbers],
    )


def _histograms(report: RunReport, number: int) -> list[charts.Chart | None]:
    """One for each routed layer; None: it has no gate."""
    gated = report.gated(number)
    return [
        charts.histogram(report, number, index) if index in gated else None
        for index in report.tokens["layers"]
    ]
