"""Results that a report shows instead of measuring: of `hf-depthroute eval` and `bench`,
refused in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CliError, refused

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


def read_bench(path: Path) -> dict[str, object]:
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


def check_origin(
    source: str, result: Mapping[str, object], weights_hash: str | None, any_base: bool
) -> None:
    """Refuse a result that says it is of other weights, or on another base."""
    if weights_hash is not None and result.get("weights_hash") not in (None, weights_hash):
        raise CliError(
            f"{source}: was measured with other weights than this adapter's; measure it again"
        )
    if result.get("base_mismatch") and not any_base:
        raise CliError(
            f"{source}: was measured on another base than this adapter's; measure it on its own"
        )
