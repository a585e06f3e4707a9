"""What the committed `results.json` says to claims about routed and about balanced experts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from study.claims import Judged, judge

Base = dict[str, Any]  # a pretraining of `results.json`
MOST = 4.0  # the imbalance where two of eight experts take all pairs
COLLAPSED = 3.6  # nine tenths of it
ACROSS, SAME = 0.9, 0.1  # of the norm of a gradient
ORDERS = ("static", "weight", "ablation", "greedy")  # of dropped experts


def dropped_at(result: dict[str, Any], method: str, share: float) -> float:
    """The loss of dropping experts in one order at a share of pairs,
    on lines between numbers of experts."""
    points = [(run["share"], run["loss"]) for run in result["runs"] if run["method"] == method]
    curve = sorted([(1.0, result["timing"]["dense_loss"]), *points], reverse=True)
    (high, above), (low, below) = next(
        pair for pair in itertools.pairwise(curve) if pair[1][0] <= share
    )
    return float(below + (above - below) * (share - low) / (high - low))


def strongest_at(result: dict[str, Any], share: float) -> float:
    """The loss of dropping experts at a share of pairs,
    in the best of all orders that were measured."""
    return min(dropped_at(result, order, share) for order in ORDERS)


def tuning_claims(result: dict[str, Any]) -> list[Judged]:
    """Router-Tuning's claim about experts: a router per expert loses less than experts left out
    at the same share."""
    rivals: dict[str, Callable[[float], float]] = {
        "Expert Drop, those of all layers with the least routing weight": lambda share: dropped_at(
            result, "weight", share
        ),
        "the best of four orders of dropping": lambda share: strongest_at(result, share),
    }
    budgets = sorted(
        {run["budget"] for run in result["runs"] if run["method"] == "per_expert"}, reverse=True
    )
    rows = []
    for budget, (title, rival) in itertools.product(budgets, rivals.items()):
        runs = [
            run
            for run in result["runs"]
            if (run["method"], run.get("budget")) == ("per_expert", budget)
        ]
        differences = [run["loss"] - rival(run["share"]) for run in runs]
        published = budget == 0.75 and title.startswith("Expert Drop")
        paper = (
            "61.4 against 50.2 points (OLMoE), 62.4 against 61.1 (DeepSeek-MoE)"
            if published
            else ""
        )
        claim = f"{budget:.0%} of the pairs: routers per expert lose less than {title}"
        rows.append(judge(claim, paper, differences, "lower", len(budgets) * len(rivals)))
    return rows


def skipping_claims(result: dict[str, Any]) -> list[Judged]:
    """Router-Tuning's figure 8: what the routers leave out evens the load of the experts."""
    rows = []
    budgets = sorted(
        {run["budget"] for run in result["runs"] if run["method"] == "per_expert"}, reverse=True
    )
    for budget in budgets:
        runs = [
            run
            for run in result["runs"]
            if (run["method"], run.get("budget")) == ("per_expert", budget)
        ]
        evened = [
            statistics.fmean(
                max(ran) - max(load)
                for ran, load in zip(run["load_ran"].values(), run["load_assigned"].values())
            )
            for run in runs
        ]
        claim = (
            f"{budget:.0%} of the pairs: routing lowers the load of the most loaded expert, as a "
            "share of all pairs"
        )
        rows.append(
            judge(claim, "a picture" if budget == 0.75 else "", evened, "lower", len(budgets))
        )
    return rows


def imbalance(loads: dict[str, list[float]]) -> float:
    """The most loaded expert's share over the even share, mean over layers."""
    return sum(len(load) * max(load) for load in loads.values()) / len(loads)


def pairs(result: dict[str, Any], one: str, other: str) -> dict[int, list[tuple[Base, Base]]]:
    """Bases of two variants with the same seed, by steps; lengths with one seed are left out."""
    bases = {(base["variant"], base["steps"], base["seed"]): base for base in result["bases"]}
    found: dict[int, list[tuple[Base, Base]]] = {}
    for (variant, steps, seed), base in sorted(bases.items()):
        if variant == one and (other, steps, seed) in bases:
            found.setdefault(steps, []).append((base, bases[other, steps, seed]))
    return {steps: rows for steps, rows in found.items() if len(rows) > 1}


def even(base: Base) -> float:
    return imbalance(base["load_after"])


def loss(base: Base) -> float:
    return float(base["validation_loss"])


def dropped(base: Base) -> float:
    return float(base["capacity"]["1"]["dropped"])


def across(found: dict[str, float]) -> float:
    """The part of the balance loss's gradient that is orthogonal to the task's, of its norm."""
    return math.sqrt(1 - found["cosine"] ** 2)


def balance_claims(result: dict[str, Any]) -> list[Judged]:
    """What balancing does in pretraining, against no balancing with the same seed;
    the longest with several seeds."""
    compared: list[tuple[str, str, str, str, Callable[[Base], float], str]] = [
        ("The balance loss (weight 0.01) evens the load: imbalance", "its purpose", "switch", "none", even, "lower"),
        ("A bias does, without a loss: imbalance", "its purpose", "bias", "none", even, "lower"),
        ("With the balance loss an expert's capacity of 1 drops fewer pairs: share", "its purpose", "switch", "none",
         dropped, "lower"),
        ("The balance loss (weight 0.01) costs quality: loss", "no number", "switch", "none", loss, "higher"),
        ("Ten times the weight costs more: loss", "perplexity +1.2 %", "switch_strong", "switch", loss, "higher"),
        ("A bias costs less quality than the balance loss (weight 0.01): loss", "perplexity -0.4 %", "bias", "switch",
         loss, "lower"),
    ]  # fmt: skip
    by_steps = pairs(result, "switch", "none")
    longest, shortest = max(by_steps), min(by_steps)
    balanced, free = zip(*by_steps[longest])
    costs = {
        steps: {base["seed"]: loss(base) - loss(rival) for base, rival in rows}
        for steps, rows in by_steps.items()
    }
    said: list[tuple[str, str, list[float], str]] = []
    for claim, paper, one, other, measure, expected in compared:
        steps, found = max(pairs(result, one, other).items())
        said.append(
            (
                f"{claim}, {steps:,} steps",
                paper,
                [measure(a) - measure(b) for a, b in found],
                expected,
            )
        )
    said += [
        (f"Without balancing the router collapses: imbalance over {COLLAPSED:g} of at most {MOST:g}, {longest:,} steps",
         "training fails", [even(base) - COLLAPSED for base in free], "higher"),
        (f"What the balance loss costs grows in training: loss over none after {longest:,} steps minus after "
         f"{shortest:,}", "no number", [costs[longest][seed] - costs[shortest][seed] for seed in costs[longest]],
         "higher"),
        (f"The balance loss's gradient lies across the task's: orthogonal part of its norm over {ACROSS:g}, at the end "
         f"of {longest:,} steps", "no number", [across(base["conflict"][-1]) - ACROSS for base in balanced], "higher"),
        (f"It does so all through training: the same at the end minus at a third of {longest:,} steps", "no number",
         [across(base["conflict"][-1]) - across(base["conflict"][0]) for base in balanced], "equal"),
    ]  # fmt: skip
    return [
        judge(
            claim,
            paper,
            numbers,
            expected,
            len(said),
            SAME if expected == "equal" else 0.0,
            "{:+.3f}".format,
        )
        for claim, paper, numbers, expected in said
    ]
