"""Put the runs and the times together: `results.json`, `results.md` and `pareto.png` in this folder.

python recipes/pareto/report.py --out OUT     # from the folder of the runs
python recipes/pareto/report.py               # tables and plot again, from results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from frontier import Point, frontier_at, judge
from run import HERE, load_base, load_blocks, methods, points, quality_of_base, read_yaml

from hf_depthroute.files.markdown import markdown_table

METRICS = ("loss", "accuracy", "bracket_accuracy", "indent_accuracy", "share")


def collect(out: Path) -> dict[str, Any]:
    """The content of `results.json`: one row per run, the setting, the machine and the dense base."""
    setting = read_yaml(HERE / "pareto.yaml")
    timing = json.loads((out / "timing.json").read_text())
    known = methods()
    rows = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*/*/*/run.json"))]
    return {
        "setting": setting,
        "timing": timing,
        "dense": quality_of_base(load_base(setting), setting, load_blocks(setting, out)),
        "importance": json.loads((out / "importance.json").read_text()),
        "methods": {name: {"label": known[name]["label"], "group": group_of(known[name])} for name in known},
        "points": {name: points(known[name])[1] for name in known},
        "runs": rows,
    }


def group_of(method: dict[str, Any]) -> str:
    """`"baseline"`: what routing has to beat; `"tried"`: variants beside the grid; otherwise `"routed"`."""
    if method.get("tried"):
        return "tried"
    return "baseline" if method["adapter"]["gate"] in ("none", "exit") else "routed"


def summarise(result: dict[str, Any]) -> list[Point]:
    """Every method and point, over seeds."""
    found = []
    for name, values in result["points"].items():
        for value in values:
            rows = [r for r in result["runs"] if (r["method"], r["point"]) == (name, value)]
            if rows:
                means = {metric: statistics.fmean(row[metric] for row in rows) for metric in METRICS}
                losses = [row["loss"] for row in rows]
                times = result["timing"]["adapters"][f"{name}|{value:g}"]
                info = result["methods"][name]
                found.append(Point(name, info["label"], info["group"], value, means, losses, times))
    return found


def table_of(summary: list[Point], dense: dict[str, float], group: str) -> list[str]:
    rows = []
    for p in summary:
        if p.group != group:
            continue
        static, against = frontier_at(summary, dense["loss"], p.time), ""
        if static is not None and group != "baseline":
            against = f"{p.loss - static.loss:+.3f} ± {p.joint(static):.3f}"
        accuracies = (p.means[kind] for kind in ("accuracy", "bracket_accuracy", "indent_accuracy"))
        rows.append([
            p.label, f"{p.value:g}", f"{p.means['share']:.2f}", f"{p.time:.3f} ± {p.time_error:.3f}",
            f"{p.loss:.3f} ± {p.spread:.3f}",
            against, *(f"{100 * accuracy:.1f}" for accuracy in accuracies), str(len(p.losses)),
        ])  # fmt: skip
    head = ["method", "point", "share run full", "time", "loss", "loss - best baseline", "top-1 %", "brackets %"]
    return markdown_table([*head, "indents %", "seeds"], rows)


def text(result: dict[str, Any], summary: list[Point]) -> str:
    dense, setting, timing = result["dense"], result["setting"], result["timing"]
    machine = timing["machine"]
    lines = [
        "# Loss against measured time",
        "",
        f"Made by `report.py` from `results.json`. {setting['steps']} steps of {setting['batch_size']} x "
        f"{setting['length']} tokens, {len(setting['seeds'])} seeds; loss in nats, mean ± standard deviation over "
        f"seeds. Time: prefill of {timing['setting']['batch']} x {timing['setting']['length']} tokens over the dense "
        f"base's {timing['dense_ms']:.0f} ms, median ± its standard error of {timing['setting']['rounds']} interleaved "
        f"rounds on one thread of {machine['device']}. Dense base: loss {dense['loss']:.3f}, top-1 "
        f"{100 * dense['accuracy']:.1f} %, brackets {100 * dense['bracket_accuracy']:.1f} %, indents "
        f"{100 * dense['indent_accuracy']:.1f} %.",
        "",
        "`loss - best baseline` compares with the lowest of the baselines' curves (straight lines from the dense base "
        "through each baseline's points) at the same time, ± the uncertainty from seeds and time; empty where none is "
        "that fast.",
        "",
        "![loss against time](pareto.png)",
        "",
        "## Verdicts",
        "",
        *(f"* {line}" for line in judge(summary, dense["loss"])),
    ]
    for group, title in (("routed", "Routed"), ("baseline", "Baselines"), ("tried", "Tried beside the grid")):
        lines += ["", f"## {title}", "", *table_of(summary, dense, group)]
    return "\n".join(lines) + "\n"


BASELINE_STYLES = {"static_ffn": ("-", "s"), "static_block": ("--", "D"), "static_attention": ("-.", "^")}


def plot(summary: list[Point], dense: float, path: Path) -> None:
    """All methods on the left; those that route the FFN, and the FFN drop, larger on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (wide, near) = plt.subplots(1, 2, figsize=(18, 6.5), constrained_layout=True)
    colours = plt.get_cmap("tab20").colors
    shown = [p for p in summary if p.group != "tried"]
    for number, name in enumerate(sorted({p.method for p in shown})):
        mine = sorted((p for p in shown if p.method == name), key=lambda p: p.time)
        look: dict[str, Any] = {
            "ls": ":", "marker": "o^vDP*X"[number % 7], "color": colours[number % 20], "ms": 6, "lw": 1,
        }  # fmt: skip
        if mine[0].group == "baseline":
            line, marker = BASELINE_STYLES.get(name, (":", "x"))
            look = {"ls": line, "marker": marker, "color": "black", "ms": 6, "lw": 1.7, "mfc": "white"}
        for axis in (wide, near):
            if axis is wide or "ffn" in name:
                axis.errorbar(
                    [p.time for p in mine], [p.loss for p in mine], yerr=[p.spread for p in mine],
                    xerr=[p.time_error for p in mine], capsize=2, label=mine[0].label, **look,
                )  # fmt: skip
    for axis in (wide, near):
        axis.plot([1.0], [dense], "k*", ms=14, label="dense")
        axis.set(xlabel="prefill time / dense", ylabel="validation loss (nats)")
        axis.grid(alpha=0.3)
    figure.legend(*wide.get_legend_handles_labels(), fontsize=9, loc="outside right upper")
    near.set_title("FFN routing against static FFN drop")
    wide.set_title("All methods: loss over seeds, time over rounds")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs")
    args = parser.parse_args()
    if args.out is not None:
        (HERE / "results.json").write_text(json.dumps(collect(args.out), indent=1) + "\n")
    result = json.loads((HERE / "results.json").read_text())
    summary = summarise(result)
    (HERE / "results.md").write_text(text(result, summary))
    plot(summary, result["dense"]["loss"], HERE / "pareto.png")


if __name__ == "__main__":
    main()
