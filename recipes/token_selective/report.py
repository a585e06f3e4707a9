"""Collect what `run.py` and `measure.py` wrote into `results.json`, and make the tables and plots of this folder.

    python recipes/token_selective/report.py --out OUT

Without `--out` the plots and the tables come from the committed `results.json`. The tables go to standard output;
the README holds them. The paper is arXiv:2605.05222.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from hf_depthroute.files.markdown import markdown_table

HERE = Path(__file__).parent
PAPER = {
    "shakespeare": {"alpha": 0.726, "saved": 0.228, "loss_over_dense": 0.004, "early_exit_over_tsa": 0.0071},
    "lambda_0": {"saved": 0.204},
    "copy": {"alpha": 0.341, "saved": 0.549},
    "sort": {"alpha": 0.730},
}
WEIGHTS = ("0", "0.001", "0.01", "0.1")  # of the sweep
NAMES = {
    "tsa": "TSA, lambda 0.001",
    **{f"lambda_{weight}": f"sweep, lambda {weight}" for weight in WEIGHTS},
    "bias_3": "sweep, lambda 0.001, routers start at p = 0.95",
}


def collect(out: Path) -> dict[str, Any]:
    """Everything in the run folder, one entry per run, and the paper's figures."""
    runs = {}
    for path in sorted(out.glob("*.json")):
        if path.name.count("measured") == 0:
            measured = out / f"{path.stem}.measured.json"
            runs[path.stem] = {**json.loads(path.read_text()), **json.loads(measured.read_text())}
    further = {name: json.loads((out / f"{name}.measured.json").read_text()) for name in ("exit_sweep", "time")}
    return {"paper": PAPER, "runs": runs, **further}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown_table(head, rows))


def percent(value: float, sign: bool = False) -> str:
    return f"{100 * value:{'+' if sign else ''}.1f} %"


def main_table(results: dict[str, Any]) -> str:
    """Dense, TSA soft and hard, early exit at equal share, beside the paper."""
    runs, sweep, paper = results["runs"], results["exit_sweep"], PAPER["shakespeare"]

    def row(name: str, active: float, loss: float, dense: float, said: str = "") -> list[str]:
        kept = 1 - (1 + 5 * active) / 6
        return [name, f"{active:.3f}", percent(kept), f"{loss:.4f}", percent(loss / dense - 1, sign=True), said]

    said = f"{paper['alpha']:.3f}, {percent(paper['saved'])}, {percent(paper['loss_over_dense'], sign=True)}"
    worse = f"{percent(paper['early_exit_over_tsa'])} worse than TSA soft"
    dense, tsa, exits = runs["dense"]["loss"], runs["tsa"], runs["exit"]
    part, soft, hard = sweep["dense"], sweep["tsa_soft"], sweep["tsa_by_threshold"][0]
    equal = sweep["exit_at_equal_share"]
    rows = [
        row("dense", 1.0, dense, dense),
        row("TSA, soft", tsa["alpha"], tsa["loss"], dense, said),
        row("TSA, hard", tsa["hard_share"], tsa["hard_loss"], dense, "not reported"),
        row("early-exit model, no token leaves", 1.0, exits["loss"], dense, "equal to dense"),
        row("every sixth block: dense", 1.0, part, part),
        row("every sixth block: TSA, soft", soft["share"], soft["loss"], part),
        row("every sixth block: early exit at alpha", equal[0]["share"], equal[0]["loss"], part, worse),
        row("every sixth block: TSA, hard", hard["share"], hard["loss"], part),
        row("every sixth block: early exit at the hard share", equal[1]["share"], equal[1]["loss"], part),
    ]
    return table(["", "active share", "operations saved", "validation loss", "over dense", "paper"], rows)


def sweep_table(results: dict[str, Any]) -> str:
    """Where alpha starts and ends for every weight of the depth loss."""
    rows = []
    for name, label in NAMES.items():
        run = results["runs"][name]
        settings = run["settings"]
        rows.append([
            label, f"{settings['steps']} x {settings['batch']}", f"{run['curve'][0]['alpha']:.3f}",
            f"{run['alpha']:.3f}", percent(run["saved"]), f"{run['loss']:.4f}", f"{run['hard_share']:.3f}",
            f"{run['hard_loss']:.4f}",
        ])  # fmt: skip
    head = ["", "steps x batch", "alpha at step 0", "alpha", "saved", "loss, soft", "hard share", "loss, hard"]
    return table(head, rows)


def synthetic_table(results: dict[str, Any]) -> str:
    rows = []
    for task in ("copy", "sort"):
        dense, run = results["runs"][f"{task}_dense"], results["runs"][f"{task}_tsa"]
        paper = PAPER[task]
        said = f"{paper['alpha']:.3f}" + (f", {percent(paper['saved'])}" if "saved" in paper else "")
        rows.append([
            task, percent(dense["accuracy"]), percent(run["accuracy"]), percent(run["hard_accuracy"]),
            f"{run['alpha']:.3f}", percent(run["saved"]), f"{run['hard_share']:.3f}", said,
        ])  # fmt: skip
    head = ["task", "accuracy, dense", "TSA soft", "TSA hard", "alpha", "saved", "hard share", "paper"]
    return table(head, rows)


def time_table(results: dict[str, Any]) -> str:
    labels = {"dense": "dense", "soft": "TSA, soft", "hard": "TSA, hard"}
    rows = []
    for name, ratio in results["time"]["over_dense"].items():
        label = labels.get(name, f"TSA, threshold moved: share {name}")
        rows.append([label, f"{ratio:.3f}"])
    return table(["prefill, 64 x 128 characters", "time over dense"], rows)


def tables(results: dict[str, Any]) -> str:
    """All tables, as they stand in the README."""
    made = [make(results) for make in (main_table, sweep_table, synthetic_table, time_table)]
    return "\n\n".join(made)


def claims_table(results: dict[str, Any]) -> list[str]:
    """The paper's claims beside what these runs, one seed each, came to."""
    runs, paper, sweep = results["runs"], PAPER["shakespeare"], results["exit_sweep"]
    tsa, dense = runs["tsa"], runs["dense"]["loss"]
    soft, hard = tsa["loss"] / dense - 1, tsa["hard_loss"] / dense - 1
    exits = sweep["exit_at_equal_share"][0]["loss"] / sweep["tsa_soft"]["loss"] - 1
    weights = {weight: runs[f"lambda_{weight}"] for weight in WEIGHTS}
    flat = max(weights.values(), key=lambda run: run["loss"])["loss"] / min(run["loss"] for run in weights.values()) - 1
    spared = percent(paper["saved"])
    rows = [
        ["Operations are saved at next to no loss, counted on soft scaling", f"{spared} at +0.4 %",
         f"{percent(tsa['saved'])} at {percent(soft, sign=True)}", "same direction"],
        ["The same where tokens really skip", "not reported",
         f"{percent(tsa['hard_saved'])} at {percent(hard, sign=True)}", "does not hold at p < 1/2"],
        ["Routing emerges from the task loss alone (lambda 0)", percent(PAPER["lambda_0"]["saved"]),
         f"{percent(weights['0']['saved'])}, in a short run", "same direction"],
        ["Lambda from 0 to 0.1 changes the loss little", "range 1.04 %", f"range {percent(flat)}, in short runs",
         "same direction"],
        ["Early exit is worse at the same active share", "0.71 %", f"{percent(exits)}, with fewer steps than TSA",
         "same direction, not a fair comparison"],
        ["Copying needs less depth than sorting", "alpha 0.341 against 0.730",
         f"alpha {runs['copy_tsa']['alpha']:.3f} against {runs['sort_tsa']['alpha']:.3f}", "same direction"],
    ]  # fmt: skip
    return markdown_table(["claim", "paper", "here", "verdict, one seed"], rows)


def plot_curves(results: dict[str, Any], path: Path) -> None:
    """Loss over steps, loss over token-layer operations, and alpha over steps."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, label in (("dense", "dense"), ("tsa", "TSA (soft)")):
        run = results["runs"][name]
        curve, settings = run["curve"], run["settings"]
        steps, losses = [row["step"] for row in curve], [row["loss"] for row in curve]
        left.plot(steps, losses, label=label)
        operations, total = [0.0], 0.0
        for before, row in itertools.pairwise(curve):
            active = 1 if row["alpha"] is None else (before["alpha"] + row["alpha"]) / 2
            tokens = settings["batch"] * settings["length"] * (row["step"] - before["step"])
            total += tokens * (1 + (settings["layers"] - 1) * active) / 1e6
            operations.append(total)
        middle.plot(operations, losses, label=label)
    for name in ("tsa", "lambda_0", "lambda_0.1", "bias_3", "copy_tsa", "sort_tsa"):
        curve = results["runs"][name]["curve"]
        label = NAMES.get(name, name.removesuffix("_tsa"))
        right.plot([row["step"] for row in curve], [row["alpha"] for row in curve], label=label)
    left.set(xlabel="step", ylabel="validation loss (nats)", title="Training")
    middle.set(xlabel="token-layer operations (millions, soft)", ylabel="validation loss (nats)", title="Per operation")
    right.set(xlabel="step", ylabel="alpha", ylim=(0, 1.02), title="Mean active fraction")
    for axes in (left, middle):
        axes.set_ylim(1.6, 2.7)
    for axes in (left, middle, right):
        axes.legend(fontsize=6, loc="upper right")
    _save(figure, path)


def plot_sweep(results: dict[str, Any], path: Path) -> None:
    """Active share and loss over the weight of the depth loss."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    runs = [results["runs"][f"lambda_{weight}"] for weight in WEIGHTS]
    weights = [run["settings"]["depth_weight"] for run in runs]
    left.plot(weights, [run["alpha"] for run in runs], marker="o", label="alpha (soft)")
    left.plot(weights, [run["hard_share"] for run in runs], marker="s", label="share run full (hard)")
    right.plot(weights, [run["loss"] for run in runs], marker="o", label="soft")
    right.plot(weights, [run["hard_loss"] for run in runs], marker="s", label="hard")
    left.axhline(results["runs"]["lambda_0"]["curve"][0]["alpha"], color="grey", linestyle=":", label="before training")
    left.set(ylabel="active share", ylim=(0, 1.02), title="Active share")
    right.set(ylabel="validation loss (nats)", title="Loss")
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=0.001)
        axes.set(xlabel="lambda", xlim=(-0.0003, 0.15))
        axes.legend(fontsize=7)
    _save(figure, path)


def plot_exit(results: dict[str, Any], path: Path) -> None:
    """Loss over the share of tokens run full: early exit, and the halting router at other thresholds."""
    import matplotlib.pyplot as plt

    sweep = results["exit_sweep"]
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, marker, label in (("exit_by_confidence", "o", "early exit"), ("tsa_by_threshold", "s", "TSA, hard")):
        more = sweep["exit_at_equal_share"] if name == "exit_by_confidence" else []
        rows = sorted(sweep[name] + more, key=lambda row: row["share"])
        axes.plot([row["share"] for row in rows], [row["loss"] for row in rows], marker=marker, label=label)
    soft = sweep["tsa_soft"]
    axes.plot(soft["share"], soft["loss"], "*", markersize=12, label="TSA, soft (nothing is skipped)")
    axes.axhline(sweep["dense"], color="black", linestyle="--", label="dense")
    axes.set(xlabel="active share of routed blocks", ylabel="validation loss (nats)", title="Skipping for real")
    axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of run.py; default: the committed results.json")
    args = parser.parse_args()
    path = HERE / "results.json"
    if args.out:
        path.write_text(json.dumps(collect(args.out), indent=1) + "\n")
    results = json.loads(path.read_text())
    plot_curves(results, HERE / "curves.png")
    plot_sweep(results, HERE / "lambda.png")
    plot_exit(results, HERE / "exit.png")
    print(tables(results))


if __name__ == "__main__":
    main()
