"""Results that a report shows instead of measuring: of `hf-depthroute eval` and `bench`,
refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import options as o
from .errors import CliError, refused

if TYPE_CHECKING:
    from ..config.adapter import DepthRouteConfig
    from .report import ReportOptions

_TIMES = (
    "routed_ms",
    "ratio",
    "speedup",
    "eta",
    "full_ratio",
    "flops_routed_over_dense",
    "tokens_per_s",
)


def read_losses(path: Path) -> dict[str, Any]:
    """The results that `eval --out` wrote for a text."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for row in result["rows"]:
            for name in ("budget", "loss", "perplexity", "full_ratio"):
                row[name] = float(row[name])
            row["rule"] = str(row["rule"])
    except OSError as error:
        raise CliError(f"--eval {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(
            f"--eval {path}: not a result of hf-depthroute eval --out ({error!r} is wrong)"
        ) from error
    return result


def read_bench(path: Path) -> dict[str, Any]:
    """The results that `bench --out` wrote for a single prefill or decode."""
    from ..bench.measurements import read_result

    with refused("--bench "):
        result = read_result(path)
    if "prefill" not in result and "decode" not in result:
        raise CliError(
            f"--bench {path}: has no single prefill or decode; measure one size with hf-depthroute "
            "bench"
        )
    try:
        setting = result["setting"]
        for part, batch in (("prefill", "batch"), ("decode", "decode_batch")):
            if part in result:
                sizes = {"batch": setting[batch], "length": setting["length"]}
                measured = result[part] = sizes | result[part]
                measured["dense_ms"] = float(measured["dense_ms"])
                for row in measured["budgets"].values():
                    known = [name for name in _TIMES if (name, row[name]) != ("eta", None)]
                    row |= {name: float(row[name]) for name in known}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"--bench {path}: not a result of hf-depthroute bench --out ({error!r} is wrong)"
        ) from error
    return result


def wanted_budgets(given: ReportOptions, rows: list[dict[str, Any]] | None) -> list[float]:
    """The budgets of the page, ascending: those of `--budgets`, by default all of the rows."""
    if rows is None:
        return sorted(set(o.parse_budgets(given.budgets or "0.25,0.5,0.75")))
    known = sorted({row["budget"] for row in rows if row["rule"] == "threshold"})
    if given.budgets is None:
        return known
    budgets = sorted(set(o.parse_budgets(given.budgets)))
    missing = [budget for budget in budgets if budget not in known]
    if missing:
        raise CliError(f"--eval {given.eval_file}: has no row of budget {missing[0]:g}")
    return budgets


def check_losses(
    given: ReportOptions, config: DepthRouteConfig, result: dict[str, Any], budgets: list[float]
) -> None:
    """Refuse losses of another adapter, or of other tokens than this one's. There must be one dense
    row and one of the inference rule per budget, all with a loss that is a number."""
    from ..card.measured import ResultError, check_origin

    source = f"--eval {given.eval_file}"
    with refused("", ResultError):
        check_origin(source, result, config.weights_hash, given.allow_base_mismatch)
    rows = result["rows"]
    behind = config.phases == "prefill"
    if rows and bool(rows[0].get("behind_prompts")) != behind:
        counted = "whole texts"
        if behind:
            counted = "the text behind prompts, which alone are routed"
        raise CliError(f"{source}: its losses are not of {counted}; measure them again")
    rule = "threshold" if config.takes_budget() else "fixed"
    if not budgets:
        raise CliError(f"{source}: has no row of the threshold rule")
    for budget in budgets:
        if not any(row["rule"] == rule and row["budget"] == budget for row in rows):
            raise CliError(f"{source}: no {rule} row of budget {budget:g}")
    if not any(row["rule"] == "dense" for row in rows):
        raise CliError(f"{source}: no dense row")
    for row in rows:
        if not math.isfinite(row["loss"]):
            loss = f"{row['rule']} loss is {row['loss']}"
            raise CliError(f"{source}: the {loss}; there is nothing to draw")


def check_times(
    given: ReportOptions, config: DepthRouteConfig, result: dict[str, Any], budgets: list[float]
) -> None:
    """Refuse times of another adapter, or of none of the budgets."""
    from ..card.measured import ResultError, check_origin

    source = f"--bench {given.bench_file}"
    with refused("", ResultError):
        check_origin(source, result, config.weights_hash, given.allow_base_mismatch)
    below = [budget for budget in budgets if budget < 1]
    measured = {
        name for part in ("prefill", "decode") for name in result.get(part, {}).get("budgets", ())
    }
    if config.takes_budget() and below and measured.isdisjoint(map(str, below)):
        listed = ",".join(f"{budget:g}" for budget in below)
        raise CliError(
            f"{source}: has times of none of the budgets {listed}; measure them with bench "
            f"--budgets {listed}"
        )
