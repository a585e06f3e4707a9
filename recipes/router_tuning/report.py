"""Collect what `run.py` wrote into `results.json`; write `results.md` and the plots.

    python recipes/router_tuning/report.py --out OUT

Without `--out` the tables and the plots come from the committed `results.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

from pages import markdown_table
from study.claims import Judged, cannot_decide, claims_table, judge, set_against
from study.intervals import AGREES, DISAGREES, OPEN, tell_mean

from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
LAYERS, SAMPLES = 3, 4096  # of the first table
FEWER = (64, 256, 1024, SAMPLES)
# What the dropped sublayers were chosen from: the routed three, or all six.
AMONG = ("candidates", "all")
USED = 0.05  # of the sequences: a layer that fewer run counts as dropped
# Nats over dense: the regime in which the paper compares targets, -0.3 of 69.7 points.
NEARLY_FREE = 0.02
# Table 1 of arXiv:2410.13184, Llama-3-8B: speedup and mean accuracy of eight tasks; the dense model
# has 69.7.
PAPER = {
    ("block", "token"): (1.24, 61.4),
    ("block", "sequence"): (1.26, 61.3),
    ("ffn", "token"): (1.05, 62.0),
    ("ffn", "sequence"): (1.06, 61.8),
    ("attention", "token"): (1.18, 68.7),
    ("attention", "sequence"): (1.21, 69.4),
}
# Figures 2 and 3.
BEATS_DROP = {"attention": "a picture; GSM8K +6.5 points at 25 % skipped", "ffn": "a picture"}
Run = dict[str, Any]


def collect(out: Path) -> dict[str, Any]:
    """All records of the run folder."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("*-seed*.json"))]
    first = min(run["seed"] for run in runs)
    for run in runs:
        if run["seed"] != first or run["samples"] != SAMPLES or run["layers"] != LAYERS:
            del run["curve"]  # plotted for one seed of the table
    return {
        **{name: json.loads((out / f"{name}.json").read_text()) for name in ("dense", "time")},
        "runs": runs,
    }


def pick(results: dict[str, Any], **fields: Any) -> list[Run]:
    """The runs that have these values."""
    return [
        run for run in results["runs"] if all(run[name] == value for name, value in fields.items())
    ]


def cell(results: dict[str, Any], target: str, granularity: str) -> list[Run]:
    """The runs of a row of the first table."""
    return pick(results, target=target, granularity=granularity, layers=LAYERS, samples=SAMPLES)


def over_dense(results: dict[str, Any], runs: list[Run], rule: str) -> list[float]:
    return [run[rule]["loss"] - results["dense"]["dense"] for run in runs]


def dropped(results: dict[str, Any], target: str, among: str) -> dict[int, float]:
    """Loss over dense with the n least important sublayers dropped; with none, 0."""
    rows = [
        row
        for row in results["dense"]["dropped"]
        if (row["target"], row["among"]) == (target, among)
    ]
    return {0: 0.0} | {len(row["layers"]): row["loss"] - results["dense"]["dense"] for row in rows}


def strongest(results: dict[str, Any], target: str) -> dict[int, float]:
    """The same of the best n sublayers that were dropped,
    of the routers' own candidates or of all six."""
    own, every = (dropped(results, target, among) for among in AMONG)
    return {
        count: min(losses[count] for losses in (own, every) if count in losses)
        for count in own | every
    }


def static_at(results: dict[str, Any], target: str, share: float) -> float:
    """Loss over dense of dropping the best sublayers at a share run,
    on lines between numbers of them."""
    losses = strongest(results, target)
    count = LAYERS * (1 - share)
    low = min(int(count), max(losses) - 1)
    return losses[low] + (losses[low + 1] - losses[low]) * (count - low)


def random_routers(results: dict[str, Any], target: str, granularity: str) -> list[Run]:
    """Frozen random routers at the budget, one draw for each seed."""
    return [
        row
        for row in results["dense"]["random"]
        if (row["target"], row["granularity"]) == (target, granularity)
    ]


def over_dropping(
    results: dict[str, Any], target: str, granularity: str, trained: bool = True
) -> list[float]:
    """By seed, the loss of routers at the budget minus that of as much dropped."""
    runs = [run["at_budget"] for run in cell(results, target, granularity)]
    if not trained:
        runs = random_routers(results, target, granularity)
    return [
        run["loss"] - results["dense"]["dense"] - static_at(results, target, run["share"])
        for run in runs
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown_table(head, rows))


def loss_table(results: dict[str, Any]) -> str:
    rows = []
    for (target, granularity), (_, accuracy) in PAPER.items():
        runs = cell(results, target, granularity)
        chance = random_routers(results, target, granularity)
        own, every = (dropped(results, target, among) for among in AMONG)
        rows.append([
            target, granularity, tell_mean(run["trained"]["share"] for run in runs),
            tell_mean(over_dense(results, runs, "trained")),
            tell_mean(run["at_budget"]["share"] for run in runs),
            tell_mean(over_dense(results, runs, "at_budget")),
            tell_mean(row["share"] for row in chance),
            tell_mean(row["loss"] - results["dense"]["dense"] for row in chance),
            f"{own[1]:.3f}, {own[2]:.3f}", f"{every[1]:.3f}, {every[2]:.3f}",
            f"{accuracy - 69.7:+.1f}",
        ])  # fmt: skip
    head = [
        "target", "granularity", "share, as trained", "loss over dense", "share, threshold moved",
        "loss over dense", "share, random routers", "loss over dense", "1, 2 of the 3 dropped",
        "1, 2 of all 6 dropped", "paper: accuracy",
    ]  # fmt: skip
    return table(head, rows)


def kind_table(results: dict[str, Any]) -> str:
    """What the routers do with either kind of text, threshold moved to the budget."""
    rows = []
    for target, granularity in PAPER:
        runs = cell(results, target, granularity)
        cells = []
        for kind, dense in results["dense"]["by_kind"].items():
            found = [run["at_budget"]["by_kind"][kind] for run in runs]
            cells += [
                tell_mean(row["share"] for row in found),
                tell_mean(row["loss"] - dense for row in found),
            ]
        rows.append([target, granularity, *cells])
    heads = [[f"{kind}: share", "loss over dense"] for kind in results["dense"]["by_kind"]]
    return table(["target", "granularity", *heads[0], *heads[1]], rows)


def between(results: dict[str, Any], one: tuple[str, str], other: tuple[str, str]) -> list[float]:
    """Loss at the budget of one row of the table minus that of another, within each seed."""
    left, right = (
        {run["seed"]: run["at_budget"]["loss"] for run in cell(results, *pair)}
        for pair in (one, other)
    )
    return [left[seed] - right[seed] for seed in left if seed in right]


def claims(results: dict[str, Any]) -> list[Judged]:
    """Statements of the paper, and what these runs say to them."""
    sequences = ("attention", "sequence")
    compared = [
        (
            "Whole sequences: attention costs less than FFNs",
            "-0.3 against -7.9 points",
            ("ffn", "sequence"),
        ),
        (
            "Whole sequences: attention costs less than blocks",
            "-0.3 against -8.4 points",
            ("block", "sequence"),
        ),
        (
            "Attention: sequences cost less than tokens",
            "-0.3 against -1.0 points",
            ("attention", "token"),
        ),
    ]
    count = len(compared) + 2 * len(PAPER) + 1
    cost = statistics.fmean(over_dense(results, cell(results, *sequences), "at_budget"))
    elsewhere = (
        ""
        if cost <= NEARLY_FREE
        else f"attention skipped costs {cost:.2f} nats, in the paper next to nothing"
    )
    rows = []
    for claim, paper, other in compared:
        row = judge(f"{claim}: loss", paper, between(results, sequences, other), "lower", count)
        state, reason = set_against(row.state, row.reason, elsewhere)
        rows.append(replace(row, state=state, reason=reason))
    for target, granularity in PAPER:
        trained, drawn = (
            over_dropping(results, target, granularity, trained) for trained in (True, False)
        )
        rivals = {
            "the best sublayers dropped, at their share": trained,
            "random ones, both over dropping at their own share": [
                mine - other for mine, other in zip(trained, drawn)
            ],
        }
        for rival, differences in rivals.items():
            paper = BEATS_DROP.get(target, "") if rival.startswith("the best") else ""
            claim = f"{target} per {granularity}: routers lose less than {rival}"
            rows.append(judge(claim, paper, differences, "lower", count))
    lowest = [min(run["at_budget"]["shares"].values()) - USED for run in cell(results, *sequences)]
    claim = (
        f"Attention per sequence: every routed layer is used, by at least {USED:.0%} of the "
        "sequences; share over that"
    )
    rows.append(judge(claim, "a picture", lowest, "higher", count))
    return rows


def faster(results: dict[str, Any], one: str, other: str) -> tuple[str, str]:
    """Speedups of two adapters at both shapes, and whether the first is faster:
    quartiles apart at both."""
    says, words = [], []
    for shape in results["time"]["shapes"]:
        rows = {row["adapter"]: row for row in shape["adapters"]} | {
            "dense": {"ratio": 1.0, "quartiles": [1.0, 1.0]}
        }
        (low, high), (other_low, other_high) = (rows[name]["quartiles"] for name in (one, other))
        says.append(
            " against ".join(
                f"{1 / rows[name]['ratio']:.2f}x" for name in (one, other) if name != "dense"
            )
        )
        words.append(AGREES if high < other_low else DISAGREES if low > other_high else OPEN)
    return ", ".join(says), words[0] if len(set(words)) == 1 else OPEN


COSTS = (
    "Times are medians over rounds of a prefill at two shapes, and are decided where the quartiles "
    "lie apart at both; bytes are counted."
)


def cost_claims(results: dict[str, Any], cache: dict[str, Any]) -> list[Judged]:
    """What the paper says of time, memory and training text."""
    compared = [
        ("Attention per sequence is faster than dense, prefill", "1.21x, generation", "attention-sequence", "dense"),
        ("Attention per sequence is faster than FFNs, prefill", "1.21x against 1.06x, generation",
         "attention-sequence", "ffn-sequence"),
        ("Attention per sequence is faster than per token, prefill", "1.21x against 1.18x, generation",
         "attention-sequence", "attention-token"),
    ]  # fmt: skip
    rows = []
    for claim, paper, one, other in compared:
        here, state = faster(results, one, other)
        rows.append(
            Judged(
                claim,
                paper,
                here,
                state,
                "the quartiles overlap at a shape" if state == OPEN else "",
            )
        )
    big = cache["llama_3_8b_64_x_2048"]
    dense, routed = (big[name] / 1e9 for name in ("dense_bytes", "routed_bytes"))
    rows.append(Judged(
        "Llama-3-8B, 64 x 2,048 tokens: the KV cache is smaller by 8 GB", "8 GB",
        f"{dense - routed:.1f} of {dense:.1f} GB, counted: half of the sequences in half of the layers",
        OPEN, "counted, not measured; 8.6 GB are all 16 layers, skipped by every sequence",
    ))  # fmt: skip
    fields = {"target": "attention", "granularity": "sequence", "layers": LAYERS}
    (fewer,) = pick(results, **fields, samples=FEWER[-2])
    (whole,) = pick(results, **fields, samples=SAMPLES, seed=fewer["seed"])
    lost = fewer["at_budget"]["loss"] - whole["at_budget"]["loss"]
    by_layers = [
        pick(results, **{**fields, "layers": count}, samples=SAMPLES) for count in (1, 2, 3, 4)
    ]
    by_count = ", ".join(
        f"{statistics.fmean(over_dense(results, runs, 'at_budget')):.3f}" for runs in by_layers
    )
    rows.append(Judged(
        "Up to half of the attention layers can be routed, more degrade", "a picture",
        f"{by_count} nats over dense with 1, 2, 3 and 4 of 6 layers", OPEN,
        f"more layers cost more from the first on; {cannot_decide(1)} (1, 2 and 4 layers)",
    ))  # fmt: skip
    rows.append(Judged(
        "5,000 sequences suffice", "5,000",
        f"{SAMPLES:,}, twice about half as many, are the most that were run; {FEWER[-2]:,} lose {lost:+.3f} nats, "
        "one seed",
        OPEN, f"more than {SAMPLES:,} were not run; {cannot_decide(1)}",
    ))  # fmt: skip
    return rows


def time_table(results: dict[str, Any]) -> str:
    shapes = results["time"]["shapes"]
    rows = []
    for place, ((target, granularity), (speedup, _)) in enumerate(PAPER.items()):
        measured = [shape["adapters"][place] for shape in shapes]
        assert all(row["adapter"] == f"{target}-{granularity}" for row in measured)
        cells = [
            f"{row['ratio']:.3f} ({row['quartiles'][0]:.3f} - {row['quartiles'][1]:.3f}), "
            f"{1 / row['ratio']:.2f}x"
            for row in measured
        ]
        kept = [
            f"{row['kv_bytes'] / shape['dense_kv_bytes']:.3f}"
            for row, shape in zip(measured, shapes)
        ]
        rows.append([target, granularity, *cells, ", ".join(kept), f"{speedup:.2f}x"])
    names = [f"time over dense, {shape['sequences']} x {shape['length']}" for shape in shapes]
    return table(["target", "granularity", *names, "KV cache kept", "paper: speedup"], rows)


def sweep_table(results: dict[str, Any], name: str, values: tuple[int, ...]) -> str:
    rows = []
    static = strongest(results, "attention")
    for value in values:
        fields = {
            "target": "attention",
            "granularity": "sequence",
            "layers": LAYERS,
            "samples": SAMPLES,
        } | {name: value}
        runs = pick(results, **fields)
        rows.append([
            str(value), str(len(runs)), tell_mean(run["trained"]["share"] for run in runs),
            tell_mean(over_dense(results, runs, "trained")),
            tell_mean(run["at_budget"]["share"] for run in runs),
            tell_mean(over_dense(results, runs, "at_budget")),
        ])  # fmt: skip
        if name == "layers":
            rows[-1].append(f"{static[value // 2]:.3f}" if value % 2 == 0 else "")
    head = [
        name,
        "seeds",
        "share, as trained",
        "loss over dense",
        "share, threshold moved",
        "loss over dense",
    ]
    return table([*head, "half as many dropped"] if name == "layers" else head, rows)


def page(results: dict[str, Any]) -> str:
    """`results.md`."""
    dense = ", ".join(f"{kind} {loss:.3f}" for kind, loss in results["dense"]["by_kind"].items())
    return "\n\n".join([
        "# Results",
        f"Losses in nats over the dense base ({results['dense']['dense']:.3f}; {dense}), mean ± standard error over "
        f"{len(cell(results, 'attention', 'sequence'))} seeds; the paper's column is the mean accuracy of eight tasks "
        "over dense, in points.", loss_table(results), "## The paper's claims",
        "\n".join(claims_table(claims(results))), COSTS,
        "\n".join(claims_table(cost_claims(results, json.loads((HERE / "kv_cache.json").read_text())))),
        "## By kind of text", kind_table(results), "## Time", time_table(results),
        "## Ablations: attention per sequence", "Layers: as many of the deepest but the last.",
        sweep_table(results, "layers", (1, 2, 3, 4)), "Training sequences, three layers routed.",
        sweep_table(results, "samples", FEWER),
    ]) + "\n"  # fmt: skip


def plot_table(results: dict[str, Any], path: Path) -> None:
    """Loss over dense against prefill time, every seed a point."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for panel, shape in zip(panels, results["time"]["shapes"]):
        for row in shape["adapters"]:
            target, granularity = row["adapter"].split("-")
            runs = cell(results, target, granularity)
            losses = over_dense(results, runs, "at_budget")
            marker = "o" if granularity == "token" else "s"
            color = {"block": "tab:red", "ffn": "tab:blue", "attention": "tab:green"}[target]
            panel.plot(
                [row["ratio"]] * len(losses),
                losses,
                marker=marker,
                color=color,
                label=row["adapter"],
            )
        panel.plot(1, 0, marker="*", color="black", linestyle="none", label="dense")
        panel.set(
            xlabel="prefill time / dense time",
            title=f"{shape['sequences']} x {shape['length']} tokens",
        )
    panels[0].set_ylabel("loss over dense (nats)")
    panels[1].legend(fontsize=8)
    save(figure, path)


def plot_sweeps(results: dict[str, Any], path: Path) -> None:
    """Loss over dense against the number of routed layers and of training sequences."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, name, values in ((left, "layers", (1, 2, 3, 4)), (right, "samples", FEWER)):
        for rule, label in (
            ("trained", "as trained"),
            ("at_budget", "threshold moved to the budget"),
        ):
            points = []
            for value in values:
                fields = {
                    "target": "attention",
                    "granularity": "sequence",
                    "layers": LAYERS,
                    "samples": SAMPLES,
                }
                losses = over_dense(results, pick(results, **fields | {name: value}), rule)
                points.append((value, statistics.fmean(losses)))
                panel.vlines(value, min(losses), max(losses), color="tab:gray", linewidth=1)
            panel.plot(*zip(*points), marker="o", label=label)
    static = strongest(results, "attention")
    left.plot(
        [2, 4],
        [static[1], static[2]],
        marker="x",
        linestyle=":",
        color="black",
        label="half as many dropped",
    )
    left.set(xlabel="routed attention layers", ylabel="loss over dense (nats)", xticks=[1, 2, 3, 4])
    right.set(xlabel="training sequences", xscale="log")
    right.set_xticks(FEWER, [f"{count:,}" for count in FEWER])
    right.minorticks_off()
    left.legend(fontsize=8)
    save(figure, path)


def plot_training(results: dict[str, Any], path: Path) -> None:
    """Share run full and training loss over steps, one seed of every row of the table."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    parts = {
        "share": "share of tokens run full, mean of 32 steps",
        "lm": "training loss, mean of 32 steps (nats)",
    }
    for panel, (key, name) in zip(panels, parts.items()):
        for target, granularity in PAPER:
            (run,) = (run for run in cell(results, target, granularity) if "curve" in run)
            values = smoothed([row[key] for row in run["curve"]])
            style = "-" if granularity == "token" else "--"
            color = {"block": "tab:red", "ffn": "tab:blue", "attention": "tab:green"}[target]
            panel.plot(
                [row["step"] for row in run["curve"]],
                values,
                style,
                color=color,
                label=f"{target}-{granularity}",
            )
        panel.set(xlabel="optimizer step", ylabel=name)
    panels[0].axhline(0.5, color="black", linewidth=0.8)
    panels[0].legend(fontsize=8)
    save(figure, path)


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and up to 31 before it."""
    return [statistics.fmean(values[max(0, end - 32) : end]) for end in range(1, len(values) + 1)]


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of run.py; default: the committed results.json"
    )
    args = parser.parse_args()
    if args.out is not None:
        (HERE / "results.json").write_text(json.dumps(collect(args.out), indent=1) + "\n")
    results = json.loads((HERE / "results.json").read_text())
    write_text(HERE / "results.md", page(results))
    plot_table(results, HERE / "table.png")
    plot_sweeps(results, HERE / "ablations.png")
    plot_training(results, HERE / "training.png")


if __name__ == "__main__":
    main()
