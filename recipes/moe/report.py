"""Collect the runs of `pretrain.py` and `route.py` into `results.json`, `results.md` and the plots.

python recipes/moe/report.py --work DIR [--out recipes/moe]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from plots import plot_expert_load
from pretrain import BATCH, DATA, LEARNING_RATE, STEPS, VARIANTS
from route import BASE, BUDGETS, DROPPED, SEEDS, name_of, specs
from route import CAPACITY_WEIGHT as ROUTER_CAPACITY_WEIGHT
from route import LEARNING_RATE as ROUTER_LEARNING_RATE
from route import STEPS as ROUTER_STEPS

from hf_depthroute.files.markdown import markdown_table

TITLES = {"per_expert": "router per expert", "per_layer": "router per layer", "random": "random routing"}
STATIC = {"static": "experts of each layer dropped, by weight", "ablation": "of 32 experts dropped, by ablation"}
BASES = {"none": "no balancing", "switch": "balance loss", "switch_z": "balance and z loss", "bias": "loss-free bias"}


def collect(work: Path) -> dict[str, Any]:
    runs = [json.loads((work / "runs" / name_of(spec) / "result.json").read_text()) for spec in specs()]
    return {
        "setting": {
            "pretraining": {"steps": STEPS, "batch": BATCH, **DATA, "learning_rate": LEARNING_RATE, "seeds": 1},
            "routing": {
                "base": BASE, "steps": ROUTER_STEPS, "batch": BATCH, "learning_rate": ROUTER_LEARNING_RATE,
                "capacity_weight": ROUTER_CAPACITY_WEIGHT, "seeds": len(SEEDS),
            },
        },
        "pretraining": {name: json.loads((work / "bases" / name / "result.json").read_text()) for name in VARIANTS},
        "runs": runs,
        "timing": json.loads((work / "timing.json").read_text()),
    }  # fmt: skip


def imbalance(loads: dict[str, list[float]]) -> float:
    """The most loaded expert's share over the even share, mean over layers."""
    return statistics.mean(len(load) * max(load) for load in loads.values())


def mean_spread(values: list[float], digits: int = 3) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def static_loss(result: dict[str, Any], share: float) -> float:
    """The loss of dropping experts at a share of pairs, interpolated between numbers of experts; the better choice."""
    found = []
    for method in DROPPED:
        points = [(run["share"], run["loss"]) for run in runs_of(result, method)]
        curve = sorted([(1.0, result["timing"]["dense_loss"]), *points], reverse=True)
        for (high, above), (low, below) in itertools.pairwise(curve):
            if low <= share <= high:
                found.append(below + (above - below) * (share - low) / (high - low))
    return min(found)


def runs_of(result: dict[str, Any], method: str, budget: float | None = None) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if run["method"] == method and run.get("budget") == budget]


def balance_table(result: dict[str, Any]) -> list[str]:
    rows = []
    for name, title in BASES.items():
        base = result["pretraining"][name]
        last = base["curve"][-1]
        imbalances = [f"{imbalance(base[when]):.2f}" for when in ("load_before", "load_after")]
        rows.append(
            [title, f"{base['validation_loss']:.3f}", *imbalances, f"{last['balance']:.3f}", f"{last['router_z']:.2f}"]
        )
    head = ["variant", "validation loss", "imbalance, untrained", "imbalance, trained", "balance loss", "z loss"]
    return markdown_table(head, rows)


def routing_table(result: dict[str, Any]) -> list[str]:
    ratios = result["timing"]["ratio"]
    rows = []
    for budget, (method, title) in itertools.product(BUDGETS, TITLES.items()):
        runs = runs_of(result, method, budget)
        shares = [run["share"] for run in runs]
        ratio = ratios[name_of({"method": method, "budget": budget, "seed": 0})]
        losses = mean_spread([run["loss"] for run in runs])
        rival = static_loss(result, statistics.mean(shares))
        rows.append([f"{title}, {budget}", losses, mean_spread(shares), f"{rival:.3f}", f"{ratio:.2f}"])
    for method, title in STATIC.items():
        for run in runs_of(result, method):
            time = f"{ratios[name_of(run)]:.2f}" if name_of(run) in ratios else ""
            cells = [f"{run['loss']:.3f}", f"{run['share']:.3f}", "", time]
            rows.append([f"{run['dropped']} {title}", *cells])
    return markdown_table(["run, budget", "loss", "share of pairs run", "dropped experts at that share", "time"], rows)


def trained_table(result: dict[str, Any]) -> list[str]:
    rows = []
    for budget, method in itertools.product(BUDGETS, ("per_expert", "per_layer")):
        runs = runs_of(result, method, budget)
        kinds = itertools.product(("as_trained", "equal_layers"), ("loss", "share"))
        cells = [mean_spread([run[kind][key] for run in runs]) for kind, key in kinds]
        rows.append([f"{TITLES[method]}, {budget}", *cells])
    return markdown_table(["run, budget", "`p >= 1/2`: loss", "share", "equal layers: loss", "share"], rows)


def markdown(result: dict[str, Any]) -> str:
    timing = result["timing"]
    lines = [
        "# Results",
        "",
        "## Balancing the experts in pretraining",
        "",
        "Imbalance: the most loaded expert's share over the even share, mean over layers, on the validation text. The",
        "balance loss and the z loss are those of the last training batch, whether they were trained on or not.",
        "",
        *balance_table(result),
        "",
        f"## Routing the experts of the base with {BASES[BASE]}",
        "",
        f"Dense loss {timing['dense_loss']:.3f}. Mean over seeds (lowest - highest). Time: prefill of "
        f"{timing['batch']} x {timing['length']} tokens over dense ({timing['dense_ms']:.0f} ms), seed 0.",
        "",
        *routing_table(result),
        "",
        "The same routers with other thresholds: `p >= 1/2` in all layers, as they were trained; and the budget",
        "in every layer, as random routing and dropped experts have it.",
        "",
        *trained_table(result),
        "",
    ]
    return "\n".join(lines)


def plot_routing(path: Path, result: dict[str, Any]) -> None:
    """Loss against the share of pairs, and against measured time."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    timing = result["timing"]
    titles = {"static": "dropped experts, by weight", "ablation": "dropped experts, by ablation", **TITLES}
    for (method, title), marker in zip(titles.items(), "sDox^"):
        runs, style = [run for run in result["runs"] if run["method"] == method], "-" if method in DROPPED else ""
        axes[0].plot([run["share"] for run in runs], [run["loss"] for run in runs], marker + style, label=title)
        timed = [run for run in runs if name_of(run) in timing["ratio"]]
        ratios = [timing["ratio"][name_of(run)] for run in timed]
        axes[1].plot(ratios, [run["loss"] for run in timed], marker + style)
    for panel, label in zip(axes, ("share of (token, expert) pairs run", "prefill time / dense time")):
        panel.axhline(timing["dense_loss"], color="black", linestyle="--", linewidth=0.8)
        panel.set(xlabel=label)
    axes[0].set_ylabel("validation loss (nats)")
    axes[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    result = collect(args.work)
    (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(result))
    bases = result["pretraining"]
    loads = {"untrained": bases["none"]["load_before"], **{BASES[name]: bases[name]["load_after"] for name in BASES}}
    plot_expert_load(
        args.out / "balance.png", {name: {int(i): load for i, load in one.items()} for name, one in loads.items()}
    )
    run = runs_of(result, "per_expert", BUDGETS[-1])[0]
    before_after = {"assigned": run["load_assigned"], "run": run["load_ran"]}
    plot_expert_load(
        args.out / "load.png", {name: {int(i): load for i, load in one.items()} for name, one in before_after.items()}
    )
    plot_routing(args.out / "routing.png", result)


if __name__ == "__main__":
    main()
