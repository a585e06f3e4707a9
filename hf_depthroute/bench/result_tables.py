"""Results as tables: rows of text by column, all rows of a table with the same columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .measurements import TIMED, Comparison, measurements, short_label

Row = dict[str, str]  # by column
Makers = dict[Callable[[Mapping[str, Any]], Iterator[Row]], tuple[str, ...]]  # with their cases
_PLAIN = {"", "eager / eager"}


def tables(result: Mapping[str, object], others: Makers | None = None) -> list[list[Row]]:
    """The rows of a table per kind of case in the result; `others` make those of more kinds."""
    found = [m for m in measurements(result) if "error" not in m]
    makers: Makers = {_times: TIMED, _overheads: TIMED, **(others or {})}
    made = [
        [row for m in found if m["case"] in cases for row in make(m)]
        for make, cases in makers.items()
    ]
    return [rows for rows in made if rows]


def brief(rows: Sequence[Row]) -> list[Row]:
    """A table without the modes where all ran alike: narrow enough for a terminal."""
    if not {row.get("modes", "") for row in rows} <= _PLAIN:
        return list(rows)
    return [{name: cell for name, cell in row.items() if name != "modes"} for row in rows]


def comparison_table(comparison: Comparison) -> list[Row]:
    def number(value: float) -> str:
        if value >= 1e4:
            return f"{value:,.0f}"
        return f"{value:.3f}"

    return [
        {"case": c.label, "figure": c.figure, "old": number(c.old), "new": number(c.new)}
        | {"new / old": f"{c.ratio:.3f}", "verdict": c.verdict}
        for c in comparison.changes
    ]


def _times(m: Mapping[str, Any]) -> Iterator[Row]:
    for kind, label in (("budgets", "routed"), ("masked", "masked"), ("tuned", "tuned")):
        for budget, row in m.get(kind, {}).items():
            routed = m["budgets"][budget]
            eta = row.get("eta")
            name = label
            if m.get("follows_budget", True):
                name = f"{label} {budget}"
            yield {
                "case": short_label(m),
                "variant": name,
                "share full": f"{routed['full_ratio']:.3f}",
                "ms": f"{row[f'{label}_ms']:.2f}",
                "dense ms": f"{m['dense_ms']:.2f}",
                "speed-up": f"{row['speedup']:.3f}",
                "FLOPs / dense": f"{routed['flops_routed_over_dense']:.3f}",
                "eta": "-" if eta is None else f"{eta:.2f}",
                "tokens/s": f"{row['tokens_per_s']:.0f}",
                "modes": f"{row['mode']} / {m['dense_mode']}" if "mode" in row else "",
            }


def _overheads(m: Mapping[str, Any]) -> Iterator[Row]:
    if m.get("overheads"):
        over = {f"{name} / base": with_error(row) for name, row in m["overheads"].items()}
        yield {"case": short_label(m), **over}


def with_error(row: Mapping[str, object]) -> str:
    error = row.get("ratio_error")
    return f"{row['ratio']:.3f}" + ("" if error is None else f" ± {error:.3f}")
