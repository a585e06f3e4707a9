"""Values of a study by config, metric and seed, and how they are printed.

A metric is a path into `summary.json`: `endpoint`, `cost/training_ffn_ratio`,
`layers/3/oracle_auc`. Without a layer, `layers/oracle_auc` is the mean over the routed layers.
`frequent_minus_rare` and `threshold_minus_topk` are derived. "The paper" is "Revisiting Auxiliary
Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean as mean
from statistics import stdev
from typing import Any

from study.results import StudyRuns, number

NEVER = math.inf  # the step of a threshold that was not reached: later than any step

UNEVEN = 1.25

METRIC_NAMES = {
    "best": "best loss",
    "avg_first_half": "average loss of the first half",
    "avg_whole": "average loss of the whole run",
    "endpoint": "endpoint loss",
    "grad_norm_mean": "mean gradient norm",
    "train_seconds": "training time",
    "train_cpu_seconds": "processor time of training",
    "layers/q_distance": "distance of q_full and q_cheap",
    "layers/q_cosine": "cosine of q_full and q_cheap",
    "layers/score_var": "variance of the scores",
    "layers/gate_prob": "mean gate probability",
    "layers/oracle_auc": "oracle AUC",
    "frequent_minus_rare": "loss on frequent minus rare tokens",
}


def read(summary: Mapping[str, Any], metric: str) -> float | None:
    """The metric's value in a summary, or None where it is missing, null or not finite."""
    if metric == "frequent_minus_rare":
        return _difference(summary, "frequent_loss", "rare_loss")
    if metric == "threshold_minus_topk":
        return _difference(summary, "threshold_loss", "endpoint")
    return _walk(summary, metric.split("/"))


def _difference(summary: Mapping[str, Any], a: str, b: str) -> float | None:
    x, y = read(summary, a), read(summary, b)
    return None if x is None or y is None else x - y


def _walk(value: Any, path: Sequence[str]) -> float | None:
    for position, key in enumerate(path):
        if not isinstance(value, Mapping):
            return None
        if position == 1 and path[0] == "layers" and key not in value and not key.isdecimal():
            layers = [_walk(layer, path[1:]) for layer in value.values()]
            present = [layer for layer in layers if layer is not None]
            return sum(present) / len(present) if present else None
        value = value.get(key)
    return number(value)


def values(study: StudyRuns, name: str, metric: str) -> dict[int, float]:
    """Per seed, in the study's order; seeds without a finished run or without the
    value are left out."""
    runs = study.runs.get(name, {})
    found = {seed: read(runs[seed].summary, metric) for seed in study.seeds if seed in runs}
    return {seed: value for seed, value in found.items() if value is not None}


def training_clock(study: StudyRuns) -> str:
    """The metric of training time: processor time on a CPU,
    which other work on the machine does not lengthen."""
    device = (study.info.get("machine") or {}).get("device")
    timed = any(values(study, name, "train_cpu_seconds") for name in study.names)
    return "train_cpu_seconds" if device == "cpu" and timed else "train_seconds"


def hits(study: StudyRuns, name: str, threshold: float) -> dict[int, float]:
    """Per seed, the first step under the threshold; `NEVER` where the run did not reach it."""
    runs, steps = study.runs.get(name, {}), {}
    for seed in study.seeds:
        recorded = runs[seed].summary.get("hits") if seed in runs else None
        if not isinstance(recorded, Mapping):
            continue
        for written, step in recorded.items():
            if _is_number(written) and float(written) == threshold:
                reached = number(step)
                steps[seed] = NEVER if reached is None else reached
    return steps


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def layers(study: StudyRuns, names: Sequence[str]) -> list[str]:
    """Routed layers that occur in the summaries of these configs, in order."""
    found = {
        layer
        for name in names
        for run in study.runs.get(name, {}).values()
        for layer in (run.summary.get("layers") or {})
    }
    return sorted(
        found,
        key=lambda layer: (not layer.isdecimal(), int(layer) if layer.isdecimal() else 0, layer),
    )


def paired(study: StudyRuns, a: str, b: str, metric: str) -> dict[int, float]:
    """`a - b` per seed that both have, rounded so that a difference of exactly the margin
    compares as that."""
    left, right = values(study, a, metric), values(study, b, metric)
    return {seed: round(left[seed] - right[seed], 9) for seed in left if seed in right}


def error(numbers: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one number."""
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0


def spread(numbers: Sequence[float], show: Callable[[float], str]) -> str:
    """Mean ± standard error, both to the same decimal place;
    the value alone where all are the same; "-" for none."""
    if not numbers:
        return "-"
    centre = show(mean(numbers))
    if min(numbers) == max(numbers):
        return centre
    if "e" in centre:
        return f"{centre} ± {error(numbers):.1e}"
    decimals = len(centre.partition(".")[2])
    return f"{centre} ± {error(numbers):,.{decimals}f}"


def spread_hits(steps: Sequence[float]) -> str:
    """Mean ± standard error over the seeds that reached the threshold,
    with their number if not all; or "never"."""
    reached = [step for step in steps if step != NEVER]
    if not steps:
        return "-"
    if not reached:
        return "never"
    text = spread(reached, fixed(0))
    return text if len(reached) == len(steps) else f"{text} ({len(reached)} of {len(steps)})"


def uneven_times(study: StudyRuns) -> tuple[float, float] | None:
    """Least and most mean seconds among configs of equal work,
    where they are `UNEVEN` times apart; else None.

    Equal work: the same seeds, steps, training cost in the paper's accounting, and terms of the
    loss that cost more than it counts. Other load on the machine shows here.
    """
    groups: dict[tuple[object, ...], list[float]] = {}
    for name in study.names:
        seconds = values(study, name, training_clock(study))
        work = tuple(
            tuple(values(study, name, metric).items())
            for metric in ("steps", "cost/training_ffn_ratio")
        )
        if not seconds or not all(work):
            continue
        config = study.config(name)
        settings = config.get("training")
        terms = tuple(
            str(dict(settings or {}).get(key)) for key in ("oracle", "cgs_weight", "distill_weight")
        )
        groups.setdefault((*work, terms, bool(config.get("joint"))), []).append(
            mean(list(seconds.values()))
        )
    ranges = [(min(times), max(times)) for times in groups.values() if min(times) > 0]
    widest = max(ranges, key=lambda r: r[1] / r[0], default=None)
    return widest if widest is not None and widest[1] > UNEVEN * widest[0] else None


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def significant(value: float) -> str:
    """Three significant digits, without an exponent between 0.001 and a million."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def signed(value: float) -> str:
    """A difference of losses, with its sign."""
    return f"{value:+.4f}"
