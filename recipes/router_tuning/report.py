"""Collect what `run.py` wrote into `results.json`, print the tables of the README, and make the plots.

    python recipes/router_tuning/report.py --out OUT

Without `--out` the tables and the plots come from the committed `results.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_depthroute.files.markdown import markdown_table

HERE = Path(__file__).parent
# Table 1 of arXiv:2410.13184, Llama-3-8B: speedup and mean accuracy of eight tasks; the dense model has 69.7.
PAPER = {
    ("block", "token"): (1.24, 61.4),
    ("block", "sequence"): (1.26, 61.3),
    ("ffn", "token"): (1.05, 62.0),
    ("ffn", "sequence"): (1.06, 61.8),
    ("attention", "token"): (1.18, 68.7),
    ("attention", "sequence"): (1.21, 69.4),
}
Run = dict[str, Any]


def collect(out: Path) -> dict[str, Any]:
    """All records of the run folder."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    for run in runs:
        if run["seed"] or run["samples"] != 512 or run["layers"] != 3:
            del run["curve"]  # plotted for one seed of the table
    return {**{name: json.loads((out / f"{name}.json").read_text()) for name in ("dense", "time")}, "runs": runs}


def pick(results: dict[str, Any], **fields: Any) -> list[Run]:
    """The runs that have these values."""
    return [run for run in results["runs"] if all(run[name] == value for name, value in fields.items())]


def over_dense(results: dict[str, Any], runs: list[Run], rule: str) -> list[float]:
    return [run[rule]["loss"] - results["dense"]["dense"] for run in runs]


def spread(values: Iterable[float]) -> str:
    """Mean, lowest and highest; of a single value, the value."""
    known = list(values)
    if len(known) == 1:
        return f"{known[0]:.3f}"
    return f"{statistics.fmean(known):.3f} ({min(known):.3f} - {max(known):.3f})"


def dropped(results: dict[str, Any], target: str) -> dict[int, float]:
    """Loss over dense with the n least important sublayers dropped; with none, 0."""
    rows = [row for row in results["dense"]["dropped"] if row["target"] == target]
    return {0: 0.0} | {len(row["layers"]): row["loss"] - results["dense"]["dense"] for row in rows}


def random_routers(results: dict[str, Any], target: str, granularity: str) -> Run:
    rows = results["dense"]["random"]
    return next(row for row in rows if (row["target"], row["granularity"]) == (target, granularity))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown_table(head, rows))


def loss_table(results: dict[str, Any]) -> str:
    rows = []
    for (target, granularity), (_, accuracy) in PAPER.items():
        runs = pick(results, target=target, granularity=granularity, layers=3, samples=512)
        chance, static = random_routers(results, target, granularity), dropped(results, target)
        rows.append([
            target, granularity, spread(run["trained"]["share"] for run in runs),
            spread(over_dense(results, runs, "trained")), spread(run["at_budget"]["share"] for run in runs),
            spread(over_dense(results, runs, "at_budget")),
            f"{chance['loss'] - results['dense']['dense']:.3f} at {chance['share']:.2f}",
            f"{static[1]:.3f}, {static[2]:.3f}", f"{accuracy - 69.7:+.1f}",
        ])  # fmt: skip
    head = [
        "target", "granularity", "share, as trained", "loss over dense", "share, threshold moved", "loss over dense",
        "random routers", "1, 2 sublayers dropped", "paper: accuracy",
    ]  # fmt: skip
    return table(head, rows)


def time_table(results: dict[str, Any]) -> str:
    shapes = results["time"]["shapes"]
    rows = []
    for place, ((target, granularity), (speedup, _)) in enumerate(PAPER.items()):
        measured = [shape["adapters"][place] for shape in shapes]
        assert all(row["adapter"] == f"{target}-{granularity}" for row in measured)
        cells = [
            f"{row['ratio']:.3f} ({row['quartiles'][0]:.3f} - {row['quartiles'][1]:.3f}), {1 / row['ratio']:.2f}x"
            for row in measured
        ]
        kept = [f"{row['kv_bytes'] / shape['dense_kv_bytes']:.3f}" for row, shape in zip(measured, shapes)]
        rows.append([target, granularity, *cells, ", ".join(kept), f"{speedup:.2f}x"])
    names = [f"time over dense, {shape['sequences']} x {shape['length']}" for shape in shapes]
    return table(["target", "granularity", *names, "KV cache kept", "paper: speedup"], rows)


def sweep_table(results: dict[str, Any], name: str, values: tuple[int, ...]) -> str:
    rows = []
    static = dropped(results, "attention")
    for value in values:
        fields = {"target": "attention", "granularity": "sequence", "layers": 3, "samples": 512} | {name: value}
        runs = pick(results, **fields)
        rows.append([
            str(value), str(len(runs)), spread(run["trained"]["share"] for run in runs),
            spread(over_dense(results, runs, "trained")), spread(run["at_budget"]["share"] for run in runs),
            spread(over_dense(results, runs, "at_budget")),
        ])  # fmt: skip
        if name == "layers":
            rows[-1].append(f"{static[value // 2]:.3f}" if value % 2 == 0 else "")
    head = [name, "seeds", "share, as trained", "loss over dense", "share, threshold moved", "loss over dense"]
    return table([*head, "half as many dropped"] if name == "layers" else head, rows)


def tables(results: dict[str, Any]) -> str:
    """All tables, as they stand in the README."""
    made = [loss_table(results), time_table(results)]
    made += [sweep_table(results, "layers", (1, 2, 3, 4)), sweep_table(results, "samples", (64, 256, 512, 1024))]
    return "\n\n".join(made)


def plot_table(results: dict[str, Any], path: Path) -> None:
    """Loss over dense against prefill time, every seed a point."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for panel, shape in zip(panels, results["time"]["shapes"]):
        for row in shape["adapters"]:
            target, granularity = row["adapter"].split("-")
            runs = pick(results, target=target, granularity=granularity, layers=3, samples=512)
            losses = over_dense(results, runs, "at_budget")
            marker = "o" if granularity == "token" else "s"
            color = {"block": "tab:red", "ffn": "tab:blue", "attention": "tab:green"}[target]
            panel.plot([row["ratio"]] * len(losses), losses, marker=marker, color=color, label=row["adapter"])
        panel.plot(1, 0, marker="*", color="black", linestyle="none", label="dense")
        panel.set(xlabel="prefill time / dense time", title=f"{shape['sequences']} x {shape['length']} tokens")
    panels[0].set_ylabel("loss over dense (nats)")
    panels[1].legend(fontsize=8)
    save(figure, path)


def plot_sweeps(results: dict[str, Any], path: Path) -> None:
    """Loss over dense against the number of routed layers and of training sequences."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, name, values in ((left, "layers", (1, 2, 3, 4)), (right, "samples", (64, 256, 512, 1024))):
        for rule, label in (("trained", "as trained"), ("at_budget", "threshold moved to the budget")):
            points = []
            for value in values:
                fields = {"target": "attention", "granularity": "sequence", "layers": 3, "samples": 512}
                losses = over_dense(results, pick(results, **fields | {name: value}), rule)
                points.append((value, statistics.fmean(losses)))
                panel.vlines(value, min(losses), max(losses), color="tab:gray", linewidth=1)
            panel.plot(*zip(*points), marker="o", label=label)
    static = dropped(results, "attention")
    left.plot([2, 4], [static[1], static[2]], marker="x", linestyle=":", color="black", label="half as many dropped")
    left.set(xlabel="routed attention layers", ylabel="loss over dense (nats)", xticks=[1, 2, 3, 4])
    right.set(xlabel="training sequences", xscale="log", xticks=[64, 256, 512, 1024])
    right.set_xticks([64, 256, 512, 1024], ["64", "256", "512", "1024"])
    right.minorticks_off()
    left.legend(fontsize=8)
    save(figure, path)


def plot_training(results: dict[str, Any], path: Path) -> None:
    """Share run full and training loss over steps, one seed of every row of the table."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    parts: tuple[tuple[str, str, Callable[[list[float]], list[float]]], ...] = (
        ("share", "share of tokens run full", lambda values: values),
        ("lm", "training loss, mean of 8 steps (nats)", smoothed),
    )
    for panel, (key, name, treat) in zip(panels, parts):
        for target, granularity in PAPER:
            (run,) = pick(results, target=target, granularity=granularity, layers=3, samples=512, seed=0)
            values = treat([row[key] for row in run["curve"]])
            style = "-" if granularity == "token" else "--"
            color = {"block": "tab:red", "ffn": "tab:blue", "attention": "tab:green"}[target]
            panel.plot(
                [row["step"] for row in run["curve"]], values, style, color=color, label=f"{target}-{granularity}"
            )
        panel.set(xlabel="optimizer step", ylabel=name)
    panels[0].axhline(0.5, color="black", linewidth=0.8)
    panels[0].legend(fontsize=8)
    save(figure, path)


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and up to seven before it."""
    return [statistics.fmean(values[max(0, end - 8) : end]) for end in range(1, len(values) + 1)]


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of run.py; default: the committed results.json")
    args = parser.parse_args()
    if args.out is not None:
        (HERE / "results.json").write_text(json.dumps(collect(args.out), indent=1) + "\n")
    results = json.loads((HERE / "results.json").read_text())
    print(tables(results))
    plot_table(results, HERE / "table.png")
    plot_sweeps(results, HERE / "ablations.png")
    plot_training(results, HERE / "training.png")


if __name__ == "__main__":
    main()
