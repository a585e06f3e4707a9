"""What the committed `results.json` says to claims about routed and about balanced experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hf_depthroute.files.markdown import markdown_table
from hf_depthroute.report.intervals import answer, interval


def dropped_at(result: dict[str, Any], method: str, share: float) -> float:
    """The loss of dropping experts in one order at a share of pairs, on lines between numbers of experts."""
    points = [(run["share"], run["loss"]) for run in result["runs"] if run["method"] == method]
    curve = sorted([(1.0, result["timing"]["dense_loss"]), *points], reverse=True)
    (high, above), (low, below) = next(pair for pair in itertools.pairwise(curve) if pair[1][0] <= share)
    return float(below + (above - below) * (share - low) / (high - low))


def tuning_table(result: dict[str, Any]) -> list[str]:
    """Router-Tuning's claim about experts: a router per expert loses less than experts left out at the same share."""
    orders = {
        "static": "those of each layer with the least routing weight",
        "weight": "those of all layers with the least routing weight",
        "ablation": "those of all layers that cost least alone",
        "greedy": "those of all layers that cost least behind those before",
    }
    budgets = sorted({run["budget"] for run in result["runs"] if run["method"] == "per_expert"}, reverse=True)
    rows = []
    for budget, (order, title) in itertools.product(budgets, orders.items()):
        runs = [run for run in result["runs"] if (run["method"], run.get("budget")) == ("per_expert", budget)]
        differences = [run["loss"] - dropped_at(result, order, run["share"]) for run in runs]
        found = interval(differences, len(budgets) * len(orders))
        paper = "61.4 against 50.2 points (OLMoE)" if (budget, order) == (0.75, "static") else ""
        claim = f"{budget:.0%} of the pairs: routers per expert beat dropping {title}"
        rows.append([claim, paper, found.tell(), answer(found, "lower")])
    return markdown_table(["claim", "paper", "loss, difference (95 % of all)", "verdict"], rows)


def imbalance(loads: dict[str, list[float]]) -> float:
    """The most loaded expert's share over the even share, mean over layers."""
    return sum(len(load) * max(load) for load in loads.values()) / len(loads)


def balance_claims(result: dict[str, Any]) -> list[str]:
    """What balancing does in pretraining, against no balancing with the same seed; the longest with several seeds."""

    def pairs(one: str, other: str) -> tuple[int, list[tuple[dict[str, Any], dict[str, Any]]]]:
        found: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        bases = {(base["variant"], base["steps"], base["seed"]): base for base in result["bases"]}
        for (variant, steps, seed), base in sorted(bases.items()):
            if variant == one and (other, steps, seed) in bases:
                found.setdefault(steps, []).append((base, bases[other, steps, seed]))
        return max((steps, rows) for steps, rows in found.items() if len(rows) > 1)

    def even(base: dict[str, Any]) -> float:
        return imbalance(base["load_after"])

    def loss(base: dict[str, Any]) -> float:
        return float(base["validation_loss"])

    claims: list[tuple[str, str, str, Callable[[dict[str, Any]], float], str]] = [
        ("The balance loss (0.01) evens the load: imbalance", "switch", "none", even, "lower"),
        ("A bias does, without a loss: imbalance", "bias", "none", even, "lower"),
        ("The balance loss (0.01) costs quality: loss", "switch", "none", loss, "higher"),
        ("Ten times the weight costs more: loss", "switch_strong", "switch", loss, "higher"),
        ("A bias costs less quality than the balance loss (0.01): loss", "bias", "switch", loss, "lower"),
    ]
    rows = []
    for claim, one, other, measure, expected in claims:
        steps, compared = pairs(one, other)
        found = interval([measure(base) - measure(rival) for base, rival in compared], len(claims))
        rows.append([claim, f"{steps:,}", found.tell("{:+.3f}".format), answer(found, expected)])
    return markdown_table(["claim", "steps", "here, difference (95 % of all)", "verdict"], rows)
