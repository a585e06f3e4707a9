"""Collect the runs of `pretrain.py` and `route.py` into `results.json`, `results.md` and the plots.

python recipes/moe/report.py [--work DIR]

What DIR does not have stays as `results.json` has it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import matplotlib.pyplot as plt
from pages import markdown_table
from plots import plot_expert_load
from pretrain import BATCH, DATA, LEARNING_RATE
from route import BASE, BUDGETS, DROPPED, SEEDS, name_of, specs
from route import CAPACITY_WEIGHT as ROUTER_CAPACITY_WEIGHT
from route import LEARNING_RATE as ROUTER_LEARNING_RATE
from route import STEPS as ROUTER_STEPS
from study.claims import claims_table
from study.intervals import tell_mean
from verdicts import balance_claims, imbalance, strongest_at

TITLES = {
    "per_expert": "router per expert",
    "per_layer": "router per layer",
    "random": "random routing",
}
STATIC = {
    "static": "experts of each layer dropped, by weight",
    "weight": "of 32 experts dropped, by weight",
    "ablation": "of 32 experts dropped, by ablation",
    "greedy": "of 32 experts dropped, by ablation one after another",
}
HERE = Path(__file__).parent
BASES = {
    "none": "no balancing",
    "switch": "balance loss, 0.01",
    "switch_strong": "balance loss, 0.1",
    "switch_z": "balance and z loss",
    "bias": "loss-free bias",
}


def collect(work: Path, known: dict[str, Any]) -> dict[str, Any]:
    """`known`, with the runs of a work folder in their places."""
    bases = {(base["steps"], base["variant"], base["seed"]): base for base in known["bases"]}
    for path in work.glob("bases/*/result.json"):
        base = json.loads(path.read_text())
        bases[base["steps"], base["variant"], base["seed"]] = base
    known["bases"] = [bases[key] for key in sorted(bases)]
    known["setting"]["pretraining"] = {"batch": BATCH, **DATA, "learning_rate": LEARNING_RATE}
    if (work / "timing.json").exists():
        known["runs"] = [
            json.loads((work / "runs" / name_of(spec) / "result.json").read_text())
            for spec in specs()
        ]
        known["timing"] = json.loads((work / "timing.json").read_text())
        base = json.loads((work / "bases" / BASE / "result.json").read_text())
        known["setting"]["routing"] = {
            "base": {key: base[key] for key in ("variant", "seed", "steps")}, "steps": ROUTER_STEPS,
            "batch": BATCH, "learning_rate": ROUTER_LEARNING_RATE,
            "capacity_weight": ROUTER_CAPACITY_WEIGHT, "seeds": len(SEEDS),
        }  # fmt: skip
    return known


def runs_of(
    result: dict[str, Any], method: str, budget: float | None = None
) -> list[dict[str, Any]]:
    return [
        run for run in result["runs"] if run["method"] == method and run.get("budget") == budget
    ]


def alike(result: dict[str, Any]) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Bases that differ only in their seed, with their number of steps and their title."""
    for steps in sorted({base["steps"] for base in result["bases"]}):
        for name, title in BASES.items():
            bases = [
                base
                for base in result["bases"]
                if (base["steps"], base["variant"]) == (steps, name)
            ]
            if bases:
                yield steps, title, bases


def balance_table(result: dict[str, Any]) -> list[str]:
    rows = []
    for steps, title, bases in alike(result):
        last = [base["curve"][-1] for base in bases]
        rows.append([
            title, f"{steps:,}", str(len(bases)),
            tell_mean([base["validation_loss"] for base in bases]),
            *(tell_mean([imbalance(base[when]) for base in bases], 2) for when in ("load_before", "load_after")),
            tell_mean([one["balance"] for one in last]),
            tell_mean([one["router_z"] for one in last], 2),
        ])  # fmt: skip
    head = [
        "variant",
        "steps",
        "seeds",
        "validation loss",
        "imbalance, untrained",
        "imbalance, trained",
        "balance loss",
        "z loss",
    ]
    return markdown_table(head, rows)


def capacity_table(result: dict[str, Any]) -> list[str]:
    """What a limited capacity drops and costs, and how far the two gradients agree."""
    rows = []
    for steps, title, bases in alike(result):
        cells = []
        for factor in ("1", "1.25"):
            found = [base["capacity"][factor] for base in bases]
            cells.append(tell_mean([100 * one["dropped"] for one in found], 1) + " %")
            cells.append(
                tell_mean(
                    [one["loss"] - base["validation_loss"] for one, base in zip(found, bases)]
                )
            )
        last = [base["conflict"][-1] for base in bases]
        cosines, norms = (
            [one["cosine"] for one in last],
            [one["balance_norm"] / one["task_norm"] for one in last],
        )
        rows.append(
            [
                title,
                f"{steps:,}",
                str(len(bases)),
                *cells,
                tell_mean(cosines, 2),
                tell_mean(norms, 1),
            ]
        )
    limits = ["dropped, capacity 1", "loss", "dropped, capacity 1.25", "loss"]
    return markdown_table(
        ["variant", "steps", "seeds", *limits, "cosine of gradients", "balance over task"], rows
    )


def routing_table(result: dict[str, Any]) -> list[str]:
    ratios = result["timing"]["ratio"]
    rows = []
    for budget, (method, title) in itertools.product(BUDGETS, TITLES.items()):
        runs = runs_of(result, method, budget)
        shares = [run["share"] for run in runs]
        ratio = ratios[name_of({"method": method, "budget": budget, "seed": 0})]
        losses = tell_mean([run["loss"] for run in runs])
        rival = strongest_at(result, statistics.mean(shares))
        rows.append(
            [f"{title}, {budget}", losses, tell_mean(shares), f"{rival:.3f}", f"{ratio:.2f}"]
        )
    for method, title in STATIC.items():
        for run in runs_of(result, method):
            time = f"{ratios[name_of(run)]:.2f}" if name_of(run) in ratios else ""
            cells = [f"{run['loss']:.3f}", f"{run['share']:.3f}", "", time]
            rows.append([f"{run['dropped']} {title}", *cells])
    return markdown_table(
        ["run, budget", "loss", "share of pairs run", "dropped experts at that share", "time"], rows
    )


def trained_table(result: dict[str, Any]) -> list[str]:
    rows = []
    for budget, method in itertools.product(BUDGETS, ("per_expert", "per_layer")):
        runs = runs_of(result, method, budget)
        kinds = itertools.product(("as_trained", "equal_layers"), ("loss", "share"))
        cells = [tell_mean([run[kind][key] for run in runs]) for kind, key in kinds]
        rows.append([f"{TITLES[method]}, {budget}", *cells])
    return markdown_table(
        ["run, budget", "`p >= 1/2`: loss", "share", "equal layers: loss", "share"], rows
    )


def markdown(result: dict[str, Any]) -> str:
    timing, routed = result["timing"], result["setting"]["routing"]["base"]
    lines = [
        "# Results",
        "",
        "## Balancing the experts in pretraining",
        "",
        (
            "Imbalance: the most loaded expert's share over the even share, mean over layers, on "
            "the validation text. The"
        ),
        (
            "balance loss and the z loss are those of the last training batch, whether they were "
            "trained on or not."
        ),
        "",
        *balance_table(result),
        "",
        (
            "With a capacity, an expert takes the first `C T K / E` pairs of a batch of 16 x 128 "
            "tokens, and the rest is"
        ),
        (
            "dropped: share of pairs dropped, and what that adds to the loss. The cosine is that "
            "of the gradients of the"
        ),
        (
            "task and of the balance loss in the routers, at the end of training on one batch; "
            "then the ratio of their"
        ),
        "norms.",
        "",
        *capacity_table(result),
        "",
        *claims_table(balance_claims(result)),
        "",
        (
            f"## Routing the experts of the base with {BASES[routed['variant']]}, "
            f"{routed['steps']:,} steps"
        ),
        "",
        (
            f"Dense loss {timing['dense_loss']:.3f}. Mean ± standard error over seeds. Time: "
            f"prefill of {timing['batch']} x {timing['length']} tokens over dense "
            f"({timing['dense_ms']:.0f} ms), seed 0."
        ),
        "",
        *routing_table(result),
        "",
        (
            "The same routers with other thresholds: `p >= 1/2` in all layers, as they were "
            "trained; and the budget"
        ),
        "in every layer, as random routing and dropped experts have it.",
        "",
        *trained_table(result),
        "",
    ]
    return "\n".join(lines)


def plot_routing(path: Path, result: dict[str, Any]) -> None:
    """Loss against the share of pairs, and against measured time."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, layout="constrained")
    timing = result["timing"]
    dropped = {
        "static": "dropped of each layer, by weight", "weight": "dropped of all, by weight",
        "ablation": "dropped of all, by ablation", "greedy": "dropped of all, one after another",
    }  # fmt: skip
    for (method, title), marker in zip((dropped | TITLES).items(), "sPDvox^"):
        runs, style = (
            [run for run in result["runs"] if run["method"] == method],
            "-" if method in DROPPED else "",
        )
        axes[0].plot(
            [run["share"] for run in runs],
            [run["loss"] for run in runs],
            marker + style,
            label=title,
        )
        timed = [run for run in runs if name_of(run) in timing["ratio"]]
        ratios = [timing["ratio"][name_of(run)] for run in timed]
        axes[1].plot(ratios, [run["loss"] for run in timed], marker + style)
    for panel, label in zip(
        axes, ("share of (token, expert) pairs run", "prefill time / dense time")
    ):
        panel.axhline(timing["dense_loss"], color="black", linestyle="--", linewidth=0.8)
        panel.set(xlabel=label)
    axes[0].set_ylabel("validation loss (nats)")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder of pretrain.py and route.py; default: the committed results",
    )
    args = parser.parse_args()
    result = json.loads((HERE / "results.json").read_text())
    if args.work is not None:
        result = collect(args.work, result)
        (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results.md").write_text(markdown(result))
    # Of the first seed.
    shortest = {title: bases[0] for _, title, bases in reversed(list(alike(result)))}
    loads = {"untrained": shortest[BASES["none"]]["load_before"]}
    loads |= {title: shortest[title]["load_after"] for title in BASES.values()}
    plot_expert_load(
        HERE / "balance.png",
        {name: {int(i): load for i, load in one.items()} for name, one in loads.items()},
    )
    run = runs_of(result, "per_expert", BUDGETS[-1])[0]
    before_after = {"assigned": run["load_assigned"], "run": run["load_ran"]}
    plot_expert_load(
        HERE / "load.png",
        {name: {int(i): load for i, load in one.items()} for name, one in before_after.items()},
    )
    plot_routing(HERE / "routing.png", result)


if __name__ == "__main__":
    main()
