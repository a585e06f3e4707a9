"""The HTML page of a `RunReport`, and the page of a token view alone. Both are one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import charts, summary
from .collect import LayerScores, RunReport

_HERE = Path(__file__).parent


def render_page(report: RunReport) -> str:
    """The whole report."""
    budgets = summary.budget_names(report)
    layers = report.tokens["layers"]
    return _render(
        "page.html",
        title=report.title,
        lead=summary.lead(report),
        notes=report.notes,
        budgets=budgets,
        chosen=summary.default_budget(report),
        tiles=[summary.tiles(report, number) for number in range(len(budgets))],
        summary=summary.overview(report),
        data=report.tokens,
        alone=False,
        charts=_curves(report),
        losses=summary.losses(report),
        speed=summary.speed(report),
        cost=_cost(report, budgets),
        ratios=[_ratios(report, number, name) for number, name in enumerate(budgets)],
        ratio_table=summary.ratios(report),
        histograms=[
            [_histogram(number, name, index, scores[index]) for index in layers]
            for number, (name, scores) in enumerate(zip(budgets, report.scores))
        ],
        scores_text=summary.scores_text(report),
        score_table=summary.thresholds(report),
        facts=report.facts,
        method=summary.method(report),
    )


def render_view(data: Mapping[str, Any]) -> str:
    """The token view alone."""
    return _render("view.html", title="Token view", data=data, alone=True)


def _render(template: str, **values: Any) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Sorted keys would move layers; and JSON has no NaN, which nothing here may hold.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False, "separators": (",", ":")}
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    return environment.get_template(template).render(
        style=Markup(style), script=Markup(script), policy=_policy(style, script), **values
    )


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, and no other script or style runs, not even from text that was not escaped."""
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _curves(report: RunReport) -> list[dict[str, Any]]:
    """Loss, and where it was measured time, over the share run full."""
    dense, routed = summary.dense_row(report), summary.routed_rows(report)
    lines = []
    for rule, name, kind, shape in (
        ("threshold", "causal threshold", "a", "square"),
        ("fixed", "the adapter's rule", "a", "square"),
        ("topk", "top-k (sees the future)", "b", "circle"),
    ):
        rows = sorted((row for row in report.rows if row["rule"] == rule), key=lambda row: row["full_ratio"])
        if rows:
            points = [
                (
                    r["full_ratio"],
                    r["loss"],
                    f"{name}, budget {r['budget']:g}: {r['loss']:.4f} at {r['full_ratio']:.3f}",
                )
                for r in rows
            ]
            lines.append(charts.Series(name, kind, shape, points))
    ends = "; ".join(f"{row['loss']:.3f} at share {row['full_ratio']:.2f}" for row in routed)
    said = f"Dense loss {dense['loss']:.3f}. Routed: {ends}."
    found = [
        {
            "picture": charts.line_chart(
                "loss-chart", "Loss against the share run full", said, lines, "loss, nats per token",
                ("dense", dense["loss"]),
            ),
            "caption": "Loss: lower is better. The distance to the dashed line is what routing costs.",
        }
    ]  # fmt: skip
    timed = []
    for part, kinds, shape in (("prefill", ("a", "c"), "square"), ("decode", ("b", "d"), "circle")):
        rows = sorted(summary.timed(report, part).values(), key=lambda row: row["full_ratio"])
        for name, key, kind, mark in (
            (f"{part}, measured", "ratio", kinds[0], shape),
            (f"{part}, FLOPs", "flops_routed_over_dense", kinds[1], "diamond"),
        ):
            if rows:
                points = [(r["full_ratio"], r[key], f"{name}: {r[key]:.3f} at {r['full_ratio']:.3f}") for r in rows]
                timed.append(charts.Series(name, kind, mark, points))
    if timed:
        said = " ".join(
            f"{line.name}: {', '.join(f'{y:.2f} at share {x:.2f}' for x, y, _ in line.points)}." for line in timed
        )
        picture = charts.line_chart(
            "time-chart", "Time and arithmetic against the share run full", said, timed, "of the dense model's",
            ("dense", 1.0), from_zero=True,
        )  # fmt: skip
        caption = "Time: below the dashed line is faster than dense. Dotted, the arithmetic: what the clock could show."
        found.append({"picture": picture, "caption": caption})
    return found


def _cost(report: RunReport, budgets: Sequence[str]) -> dict[str, Any]:
    table = summary.costs(report)
    labels = [f"budget {name}" if report.follows_budget else "routed" for name in budgets]
    said = "; ".join(f"{label}: {row[-1]}" for label, row in zip(labels, table.rows[1:]))
    batch, length = report.cost_shape
    return {
        "picture": charts.cost_chart(
            "cost-chart",
            "Arithmetic of one prompt pass",
            f"In all, of the dense model's: {said}.",
            labels,
            report.costs,
        ),
        "caption": f"FLOPs of a prompt of {batch} x {length} tokens, counted, at the shares measured on the text.",
        "parts": charts.COST_PARTS.items(),
        "columns": table.columns,
        "rows": table.rows,
    }


def _ratios(report: RunReport, number: int, name: str) -> dict[str, Any]:
    layers = report.scores[number]
    said = "; ".join(f"layer {index}: {layer.full_ratio:.2f}" for index, layer in layers.items())
    budget = report.budgets[number] if report.follows_budget else None
    line = " The dashed line is the budget." if report.follows_budget else ""
    return {
        "picture": charts.ratio_chart(
            f"ratio-{number}", f"Share run full by layer at budget {name}", said, layers, budget
        ),
        "caption": f"Budget {name}: the share of real tokens that ran full in each routed layer.{line}",
    }


def _histogram(number: int, name: str, index: int, layer: LayerScores) -> dict[str, Any]:
    threshold = "no threshold" if layer.threshold is None else f"threshold {layer.threshold:.3f}"
    said = f"Scores from {layer.edges[0]:.2f} to {layer.edges[-1]:.2f}, {threshold}, {layer.full_ratio:.1%} ran full."
    title = f"Scores of layer {index} at budget {name}"
    return {
        "picture": charts.histogram(f"scores-{number}-{index}", title, said, layer),
        "caption": f"Layer {index}: {layer.full_ratio:.0%} full",
    }
