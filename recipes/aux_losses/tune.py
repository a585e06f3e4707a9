"""Choose the learning rate of either gate, and the weight of the budget loss, on text and a seed that nothing reports.

    python recipes/aux_losses/tune.py --work WORK --out recipes/aux_losses/tuning.json

The runs are those of `main.yaml`, shorter, on nine tenths of its training text; losses are of the last tenth. With all
losses, each gate gets the learning rate with the lowest loss at the end, of rates that double until it rises. At these
rates, without util and rank, the budget loss gets the lowest weight that holds the mean gate probability of either gate
within 0.05 of the budget, or the highest weight that is tried. Started again, it does what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from hf_depthroute.cli import main as command_line
from hf_depthroute.files.staged import write_text
from hf_depthroute.report.study_results import StudyRuns, read_results

HERE = Path(__file__).resolve().parent
GATES = ("mlp", "jepa")
RATES = (5e-4, 1e-3, 2e-3)  # and on from there
WEIGHTS = (1.0, 4.0, 16.0, 64.0)
SEED, STEPS = 1, 400


def study_of(work: Path, configs: dict[str, Any]) -> Path:
    """A study file in WORK, like `main.yaml` but for steps, seed and text; of these configs, and of those before."""
    for name, config in configs.items():
        (work / f"{name}.yaml").write_text(yaml.safe_dump(config))
    study = yaml.safe_load((HERE / "main.yaml").read_text())
    study["data"] |= {"split": "train[:90%]", "validation_split": "train[90%:]", "validation_blocks": 256}
    study |= {
        "name": "aux_losses_tuning", "base": str((HERE / study["base"]).resolve()), "steps": STEPS, "seeds": [SEED],
        "eval_every": STEPS // 4, "thresholds": [], "configs": sorted(path.name for path in work.glob("*_*.yaml")),
    }  # fmt: skip
    study["training"] |= {"warmup_steps": STEPS // 20, "oracle_warmup": STEPS // 40, "cgs_warmup": STEPS // 10}
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def tried(work: Path, configs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The outcome of each config, which is run where it was not yet."""
    try:
        command_line(["study", str(study_of(work, configs)), "--out", str(work / "runs"), "--only", ",".join(configs)])
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
    study = read_results(work / "runs")
    return {name: outcome(study, name) for name in configs}


def outcome(study: StudyRuns, name: str) -> dict[str, float]:
    """Loss at the end, and mean gate probability."""
    summary = study.runs[name][SEED].summary
    layers = [layer["gate_prob"] for layer in summary["layers"].values()]
    return {"loss": round(summary["endpoint"], 5), "gate_prob": round(sum(layers) / len(layers), 4)}


def rate_of(gate: str, work: Path) -> float:
    """The learning rate of a gate."""
    ladder = list(RATES)
    while True:
        named = {rate: f"{gate}_{rate:g}" for rate in ladder}
        found = tried(
            work,
            {name: {"adapter": {"gate": gate}, "training": {"learning_rate": rate}} for rate, name in named.items()},
        )
        best = min(ladder, key=lambda rate: found[named[rate]]["loss"])
        if best < ladder[-1]:
            return best
        ladder.append(2 * ladder[-1])


def budgeted(gate: str, rate: float, weight: float) -> dict[str, Any]:
    """A config without util and rank."""
    return {
        "adapter": {"gate": gate}, "training": {"learning_rate": rate, "oracle": "none", "budget_weight": weight}
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder that is kept between starts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)

    rates = {gate: rate_of(gate, work) for gate in GATES}
    for weight in WEIGHTS:
        found = tried(work, {f"{gate}_budget_{weight:g}": budgeted(gate, rates[gate], weight) for gate in GATES})
        if all(abs(row["gate_prob"] - 0.5) <= 0.05 for row in found.values()):
            break
    study = read_results(work / "runs")
    found = {name: outcome(study, name) for name in study.names}
    result = {"seed": SEED, "steps": STEPS, "learning_rate": rates, "budget_weight": weight, "tried": found}
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
