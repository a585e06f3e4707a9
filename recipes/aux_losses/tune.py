"""Choose the learning rate of either gate, and the weight of the budget loss,
on text and a seed that nothing reports.

    python recipes/aux_losses/tune.py --work WORK --out recipes/aux_losses/tuning.json

The runs are those of `main.yaml`, shorter, on nine tenths of its training text; losses are of the
last tenth. With all losses, each gate gets the learning rate with the lowest loss at the end, of
rates that double until it rises. At these rates, without util and rank, the budget loss gets the
lowest weight that holds the mean gate probability of either gate within 0.05 of the budget, or the
highest weight that is tried. With this weight the same search follows for what the studies run at
the gates' rates: neither util nor rank, and counterfactual supervision. What OUT holds is not run
again; after a change of `main.yaml` name another OUT and another WORK.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import yaml
from study.__main__ import main as command_line
from study.results import StudyRuns, read_results

from hf_depthroute.files.staged import write_text

HERE = Path(__file__).resolve().parent
GATES = ("mlp", "jepa")
RATES = (5e-4, 1e-3, 2e-3)  # and on from there
OTHERS: dict[str, tuple[str, dict[str, float]]] = {  # gate, weights of losses
    "a3_g1": ("mlp", {}), "a3_g3": ("jepa", {}), "cgs": ("mlp", {"cgs_weight": 0.5}),
}  # fmt: skip
WEIGHTS = (1.0, 4.0, 16.0, 64.0)
SEED, STEPS = 1, 400

Tried = dict[str, dict[str, float]]  # outcome by name of the config


def study_of(work: Path, configs: dict[str, Any]) -> Path:
    """A study file in WORK, like `main.yaml` but for steps, seed and text; of these configs,
    and of those before."""
    for name, config in configs.items():
        (work / f"{name}.yaml").write_text(yaml.safe_dump(config))
    study = yaml.safe_load((HERE / "main.yaml").read_text())
    study["data"] |= {
        "split": "train[:90%]",
        "validation_split": "train[90%:]",
        "validation_blocks": 256,
    }
    study |= {
        "name": "aux_losses_tuning", "base": str((HERE / study["base"]).resolve()), "steps": STEPS,
        "seeds": [SEED], "eval_every": STEPS // 4, "thresholds": [],
        "configs": sorted(path.name for path in work.glob("*_*.yaml")),
    }  # fmt: skip
    study["training"] |= {
        "warmup_steps": STEPS // 20,
        "oracle_warmup": STEPS // 40,
        "cgs_warmup": STEPS // 10,
    }
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def run(work: Path, configs: dict[str, Any], known: Tried) -> None:
    """Add to `known` the outcome of each config that it lacks."""
    missing = {name: config for name, config in configs.items() if name not in known}
    if not missing:
        return
    try:
        command_line(
            [
                "run",
                str(study_of(work, missing)),
                "--out",
                str(work / "runs"),
                "--only",
                ",".join(missing),
            ]
        )
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
    study = read_results(work / "runs")
    known |= {name: outcome(study, name) for name in missing}


def outcome(study: StudyRuns, name: str) -> dict[str, float]:
    """Loss at the end, and mean gate probability."""
    summary = study.runs[name][SEED].summary
    layers = [layer["gate_prob"] for layer in summary["layers"].values()]
    return {"loss": round(summary["endpoint"], 5), "gate_prob": round(sum(layers) / len(layers), 4)}


def best_rate(name: str, config: dict[str, Any], work: Path, known: Tried) -> float:
    """The learning rate with which a config ends lowest,
    of `RATES` and on by doubling while the highest is best."""
    ladder = list(RATES)
    while True:
        named = {rate: f"{name}_{rate:g}" for rate in ladder}
        training = config.get("training", {})
        run(
            work,
            {
                key: config | {"training": training | {"learning_rate": rate}}
                for rate, key in named.items()
            },
            known,
        )
        best = min(ladder, key=lambda rate: known[named[rate]]["loss"])
        if best < ladder[-1]:
            return best
        ladder.append(2 * ladder[-1])


def without_labels(gate: str, weight: float, **training: float) -> dict[str, Any]:
    """A config without util and rank."""
    return {
        "adapter": {"gate": gate},
        "training": {"oracle": "none", "budget_weight": weight, **training},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder that is kept between starts"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    known: Tried = json.loads(args.out.read_text())["tried"] if args.out.exists() else {}

    rates = {gate: best_rate(gate, {"adapter": {"gate": gate}}, work, known) for gate in GATES}
    for weight in WEIGHTS:
        named = {gate: f"{gate}_budget_{weight:g}" for gate in GATES}
        configs = {
            named[gate]: without_labels(gate, weight, learning_rate=rates[gate]) for gate in GATES
        }
        run(work, configs, known)
        if all(abs(known[name]["gate_prob"] - 0.5) <= 0.05 for name in named.values()):
            break
    others = {
        name: best_rate(name, without_labels(gate, weight, **losses), work, known)
        for name, (gate, losses) in OTHERS.items()
    }
    result = {
        "seed": SEED, "steps": STEPS, "learning_rate": rates | others, "budget_weight": weight,
        "tried": dict(sorted(known.items())),
    }  # fmt: skip
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
