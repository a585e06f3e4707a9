"""The figures in what lm-eval returns and saves; needs no lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_scores(results: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """`(task, metric) -> (value, standard error)` of all that lm-eval reports as a number.

    Where a task takes a metric through several filters, each is a metric of its own:
    `exact_match,strict-match`.
    """
    found: dict[tuple[str, str], tuple[float, float | None]] = {}
    for task, values in results.get("results", {}).items():
        metrics = [name.partition(",")[0] for name in values]
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, (int, float)) and kind and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                known = error if isinstance(error, (int, float)) else None
                shown = metric if metrics.count(metric) == 1 else name
                found[task, shown] = float(value), known
    return found
