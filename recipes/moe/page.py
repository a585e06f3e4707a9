"""Routed experts on the page of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pages import markdown_table
from study.page import RECIPES, Study, read


def static_at_share(row: str) -> float:
    """The loss of dropped experts at the share of pairs of a row of moe/results.md,
    as it is interpolated there."""
    lines = (RECIPES / "moe/results.md").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"| {row} |")).split(" | ")[3])


def study() -> Study:
    """Routed experts against dropped ones: at half of the pairs in all,
    and at half in every layer."""
    result = read("moe/results.json")
    ratio = result["timing"]["ratio"]

    def mean(method: str, read_one: Callable[[Any], float]) -> float:
        return statistics.fmean(
            read_one(run)
            for run in result["runs"]
            if (run["method"], run.get("budget")) == (method, 0.5)
        )

    rows = [
        [title, f"{mean(method, lambda run: run['share']):.2f}", f"{mean(method, lambda run: run['loss']):.3f}",
         f"{mean(method, lambda run: run['equal_layers']['loss']):.3f}", f"{ratio[f'{method}-b50-s0']:.2f}"]
        for method,
        title in (("per_expert", "a router per expert"), ("per_layer", "a router per layer"))
    ]  # fmt: skip
    ablated, weighted, static = (
        next(run for run in result["runs"] if (run["method"], run.get("dropped")) == case)
        for case in (("greedy", 16), ("weight", 16), ("static", 4))
    )
    random_loss, random_share = (
        mean("random", lambda run, key=key: run[key]) for key in ("loss", "share")
    )
    rows += [
        ["16 of all 32 experts dropped, those that cost least behind those before", f"{ablated['share']:.2f}",
         f"{ablated['loss']:.3f}", "", ""],
        ["16 of all 32 experts dropped, by routing weight", f"{weighted['share']:.2f}",
         f"{weighted['loss']:.3f}", "", ""],
        ["random routing", f"{random_share:.2f}", "", f"{random_loss:.3f}", f"{ratio['random-b50-s0']:.2f}"],
        ["4 of 8 experts of each layer dropped, by routing weight", f"{static['share']:.2f}", "",
         f"{static['loss']:.3f}", f"{ratio['static-drop4-s0']:.2f}"],
    ]  # fmt: skip
    behind = {
        method: f"{mean(method, lambda run: run['loss']) - static_at_share(f'router per {kind}, 0.5'):+.3f}"
        for method, kind in (("per_expert", "expert"), ("per_layer", "layer"))
    }
    steps = result["setting"]["routing"]["base"]["steps"]
    brief = (
        f"half of the pairs of a base of {steps:,} steps, loss over the best static dropping at "
        f"the same share: a router per expert {behind['per_expert']}, a router per layer "
        f"{behind['per_layer']}; prefill takes {rows[0][4]} and {rows[1][4]} of the dense time "
        f"({result['timing']['machine']['device']}, 1 thread)"
    )
    section = [
        (
            f"A tiny mixture of experts that the recipe pretrains for {steps:,} steps (dense loss "
            f"{result['timing']['dense_loss']:.3f}), no cheap branches, budget 0.5. Over the best "
            "static dropping at the same share of pairs, which may take experts from any layer, a "
            f"router per expert ends {behind['per_expert']} nats, and a router per layer "
            f"{behind['per_layer']}. Random routing and dropping of each layer leave out half in "
            "every layer; beside them stands what the routers lose with the budget held in every "
            "layer."
        ),
        "",
        *markdown_table(
            ["", "share of pairs run", "loss", "loss, half of every layer", "prefill time / dense"],
            rows,
        ),
    ]
    return Study(
        "Experts of a tiny mixture",
        "moe",
        "python recipes/moe/route.py --work /tmp/moe",
        brief,
        section,
    )
