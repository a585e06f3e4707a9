"""Collect what `run.py` and `measure.py` wrote, and make the tables and plots of this folder.

    python recipes/token_selective/report.py --out OUT                        # of paper.yaml: results.json
    python recipes/token_selective/report.py --out OUT --study small          # of small.yaml: small.json

Without `--out` the plots and the tables come from the committed files. The tables go to standard
output; the README holds them. The paper is arXiv:2605.05222. Intervals and standard errors are over
the seeds of a run: `dense`, `dense_1` and `dense_2` are one run with three seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

from pages import markdown_table
from study.claims import Judged, cannot_decide, claims_table, judge
from study.intervals import AGREES, DISAGREES, OPEN, tell_mean

from hf_depthroute.files.strict_yaml import read_mapping

HERE = Path(__file__).parent
PAPER = {
    "shakespeare": {"alpha": 0.726, "saved": 0.228, "loss_over_dense": 0.004},
    "lambda_0.05": {"saved": 0.504, "loss_over_dense": 0.005},  # at most
    "early_exit_over_tsa": 0.0071,
    "lambda_0": {"alpha": 0.755, "range": 0.0104},  # range: of the loss over lambda from 0 to 0.1
    "copy": {"alpha": 0.341, "saved": 0.549},
    "sort": {"alpha": 0.730},
}
WEIGHTS = ("0", "0.001", "0.005", "0.01", "0.05", "0.1")  # of the sweep
FILES = {"paper": "results.json", "small": "small.json"}  # by study
SEEDS = ("", "_1", "_2")
# Bits per character: the paper's thresholds, which it states for enwik8 only.
BITS = (2.5, 2.0, 1.8)
THRESHOLDS = tuple(bits * math.log(2) for bits in BITS)  # the same as validation losses, in nats
MARGIN = 0.005  # relative: what the paper calls next to no loss
Run = dict[str, Any]
KINDS = {"tsa": "lambda 0.001", "lambda_0.05": "lambda 0.05"}  # with several seeds
NAMES = {
    "tsa": "lambda 0.001",
    **{f"lambda_{weight}": f"sweep, lambda {weight}" for weight in WEIGHTS},
    "bias_3": "sweep, lambda 0.001, routers start at p = 0.95",
}


def collect(out: Path, study: str) -> dict[str, Any]:
    """Everything in the run folder, one entry per run, and the paper's figures."""
    runs, asked = {}, read_mapping(HERE / f"{study}.yaml")
    for path in sorted(out.glob("*.json")):
        if path.name.count("measured") == 0:
            measured = out / f"{path.stem}.measured.json"
            run = {**json.loads(path.read_text()), **json.loads(measured.read_text())}
            mine = asked["runs"].get(path.stem, {})
            if run["settings"] != {**asked["tasks"].get(mine.get("task"), {}), **mine}:
                sys.exit(f"{path} is not a run of {study}.yaml (see --study)")
            runs[path.stem] = run
    ends = [seed for seed in SEEDS if (out / f"time{seed}.measured.json").exists()]
    further = {
        f"{name}s": [json.loads((out / f"{name}{seed}.measured.json").read_text()) for seed in ends]
        for name in ("exit_sweep", "time")
    }
    return {"paper": PAPER, "runs": runs, **further}


def read(study: str) -> dict[str, Any]:
    """What is committed of `paper.yaml` or `small.yaml`."""
    return json.loads((HERE / FILES[study]).read_text())  # type: ignore[no-any-return]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown_table(head, rows))


def percent(value: float, sign: bool = False) -> str:
    return f"{100 * value:{'+' if sign else ''}.1f} %"


def seeds_of(results: dict[str, Any], name: str) -> list[Run]:
    """The runs of a name, in the order of their seeds."""
    return [results["runs"][name + seed] for seed in SEEDS]


def relative(results: dict[str, Any], name: str, loss: Callable[[Run], float]) -> list[float]:
    """A loss of TSA over that of the dense model of the same seed, minus 1."""
    pairs = zip(seeds_of(results, name), seeds_of(results, "dense"))
    return [loss(tsa) / (lowest if loss is lowest else final)(dense) - 1 for tsa, dense in pairs]


def final(run: Run) -> float:
    return float(run["loss"])


def final_hard(run: Run) -> float:
    return float(run["hard_loss"])


def lowest(run: Run) -> float:
    """The lowest validation loss on the way, which the model at the end may be far above."""
    return float(min(row["loss"] for row in run["curve"]))


def tell_percent(values: list[float], sign: str = "") -> str:
    """Mean and standard error in percent."""
    return tell_mean([100 * value for value in values], 1, sign) + " %"


def costs(results: dict[str, Any], name: str = "tsa", hard: bool = False) -> tuple[str, str, str]:
    """Active share, operations saved and loss over dense of TSA, each the mean over seeds."""
    active, kept = ("hard_share", "hard_saved") if hard else ("alpha", "saved")
    shares, saved = ([run[key] for run in seeds_of(results, name)] for key in (active, kept))
    return (
        tell_mean(shares),
        tell_percent(saved),
        tell_percent(relative(results, name, final_hard if hard else final), "+"),
    )


def main_table(results: dict[str, Any]) -> str:
    """Dense and TSA, soft and hard, beside the paper; mean and standard error over the seeds."""
    paper, dense = PAPER["shakespeare"], seeds_of(results, "dense")
    said = {
        "tsa": (
            f"{paper['alpha']:.3f}, {percent(paper['saved'])}, "
            f"{percent(paper['loss_over_dense'], sign=True)}"
        ),
        "lambda_0.05": f"{percent(PAPER['lambda_0.05']['saved'])}, below +0.5 %",
    }

    def losses(runs: list[Run], loss: Callable[[Run], float]) -> list[str]:
        return [
            tell_mean([loss(run) for run in runs], 4),
            tell_mean([loss(run) / math.log(2) for run in runs]),
        ]

    # On the way a part of the text may have been evaluated only, which is easier or harder than all
    # of it.
    whole = all(run["curve"][-1]["loss"] == round(run["loss"], 5) for run in dense)
    best = tell_mean([lowest(run) for run in dense], 4) if whole else ""
    rows = [["dense", "1", "0 %", *losses(dense, final), "", best, "", ""]]
    for name, label in KINDS.items():
        if name + SEEDS[-1] not in results["runs"]:
            continue
        runs = seeds_of(results, name)
        active, kept, over = costs(results, name)
        least = [
            tell_mean([lowest(run) for run in runs], 4),
            tell_percent(relative(results, name, lowest), "+"),
        ]
        rows.append(
            [
                f"{label}, soft",
                active,
                kept,
                *losses(runs, final),
                over,
                *(least if whole else ["", ""]),
                said[name],
            ]
        )
        active, kept, over = costs(results, name, hard=True)
        rows.append(
            [
                f"{label}, hard",
                active,
                kept,
                *losses(runs, final_hard),
                over,
                "",
                "",
                "no loss reported",
            ]
        )
    head = [
        "", "active share", "operations saved", "loss at the end", "bits per character",
        "over dense", "lowest loss", "over dense", "paper",
    ]  # fmt: skip
    return table(head, rows)


def exit_table(results: dict[str, Any]) -> str:
    """Early exit beside TSA at equal share, on every sixth block."""
    sweeps = results["exit_sweeps"]
    named: list[tuple[str, Callable[[dict[str, Any]], dict[str, float]]]] = [
        ("dense", lambda sweep: {"share": 1.0, "loss": sweep["dense"]}),
        ("TSA, soft", lambda sweep: sweep["tsa_soft"]),
        ("early exit at about the soft share", lambda sweep: sweep["exit_at_equal_share"][0]),
        ("TSA, hard", lambda sweep: sweep["tsa_by_threshold"][0]),
        ("early exit at about the hard share", lambda sweep: sweep["exit_at_equal_share"][1]),
        ("TSA, hard, threshold moved to p = 0.27", lambda sweep: sweep["tsa_by_threshold"][1]),
    ]
    rows = []
    for name, found in named:
        points = [found(sweep) for sweep in sweeps]
        over = [point["loss"] / sweep["dense"] - 1 for point, sweep in zip(points, sweeps)]
        share, loss = (
            tell_mean([point[key] for point in points], digits)
            for key, digits in (("share", 3), ("loss", 4))
        )
        rows.append([name, share, loss, tell_percent(over, "+")])
    return table(["", "active share", "loss at the end", "over dense"], rows)


def kind_table(results: dict[str, Any], name: str) -> str:
    """Where TSA spends its depth: `p` by kind of character,
    and by the entropy of what the model says next."""
    tsa = seeds_of(results, name)
    layers = range(len(tsa[0]["alpha_by_layer"]))

    def row(name: str, share: str, found: list[list[float]]) -> list[str]:
        by_layer = " / ".join(
            f"{statistics.fmean(one[layer] for one in found):.2f}" for layer in layers
        )
        return [name, share, tell_mean(statistics.fmean(one) for one in found), by_layer]

    rows = [
        row("all", "100 %", [run["alpha_by_layer"] for run in tsa]),
        row(
            "share with p of at least 1/2",
            "100 %",
            [[*run["hard_share_by_layer"].values()] for run in tsa],
        ),
    ]
    for kind, share in tsa[0]["share_of_kind"].items():
        rows.append(row(kind, percent(share), [run["alpha_by_kind"][kind] for run in tsa]))
    for place, name in enumerate(
        ("least sure quarter", "third quarter", "second quarter", "surest quarter")
    ):
        rows.append(row(name, "25 %", [run["alpha_by_difficulty"][3 - place] for run in tsa]))
    return table(["the character that is read", "of the text", "mean p", "by router"], rows)


def sweep_table(results: dict[str, Any]) -> str:
    """Where alpha starts and ends for every weight of the depth loss."""
    rows = []
    for name, label in NAMES.items():
        run = results["runs"][name]
        settings = run["settings"]
        rows.append([
            label, f"{settings['steps']} x {settings['batch']}", f"{run['curve'][0]['alpha']:.3f}",
            f"{run['alpha']:.3f}", percent(run["saved"]), f"{run['loss']:.4f}",
            f"{run['hard_share']:.3f}", f"{run['hard_loss']:.4f}",
        ])  # fmt: skip
    head = [
        "",
        "steps x batch",
        "alpha at step 0",
        "alpha",
        "saved",
        "loss, soft",
        "hard share",
        "loss, hard",
    ]
    return table(head, rows)


def synthetic_table(results: dict[str, Any]) -> str:
    rows = []
    for task in ("copy", "sort"):
        dense, run = results["runs"][f"{task}_dense"], results["runs"][f"{task}_tsa"]
        paper = PAPER[task]
        said = f"{paper['alpha']:.3f}" + (
            f", {percent(paper['saved'])}" if "saved" in paper else ""
        )
        rows.append([
            task, percent(dense["accuracy"]), percent(run["accuracy"]),
            percent(run["hard_accuracy"]), f"{run['alpha']:.3f}", percent(run["saved"]),
            f"{run['hard_share']:.3f}", said,
        ])  # fmt: skip
    head = [
        "task",
        "accuracy, dense",
        "TSA soft",
        "TSA hard",
        "alpha",
        "saved",
        "hard share",
        "paper",
    ]
    return table(head, rows)


def time_table(results: dict[str, Any], small: dict[str, Any]) -> str:
    """Times of a forward pass: the small study's on a CPU,
    and the full-size models' on the GPU that trained them."""
    gpu = [one["over_dense"] for one in results["times"]]
    labels = {"dense": "dense", "soft": "TSA, soft", "hard": "TSA, hard"}
    rows = []
    for name, ratio in small["times"][0]["over_dense"].items():
        label = labels.get(name, f"TSA, threshold moved: share {name}")
        rows.append(
            [
                label,
                f"{ratio:.3f}",
                tell_mean([one[name] for one in gpu], 2) if name in labels else "",
            ]
        )
    device = results["runs"]["tsa"]["device"]["device"]
    return table(
        ["prefill, 64 x 128 characters, over dense", "one CPU core, small study", device], rows
    )


def tables(results: dict[str, Any], small: dict[str, Any]) -> str:
    """All tables, as they stand in the README."""
    made = [
        main_table(results), exit_table(results), *(kind_table(results, name) for name in KINDS),
        main_table(small), kind_table(small, "tsa"), sweep_table(small), synthetic_table(small),
        time_table(results, small), "\n".join(claims_table(claims(results))),
        "\n".join(claims_table(single_claims(results, small))),
    ]  # fmt: skip
    return "\n\n".join(made)


def steps_to(run: Run, threshold: float) -> float | None:
    """The step at which the validation loss falls to a threshold, between two evaluations;
    None where it does not."""
    for before, after in itertools.pairwise(run["curve"]):
        if before["loss"] > threshold >= after["loss"]:
            part = (before["loss"] - threshold) / (before["loss"] - after["loss"])
            return float(before["step"] + part * (after["step"] - before["step"]))
    return None


def reached(runs: list[Run]) -> list[float]:
    """Those of the paper's thresholds, in bits per character, that every run gets under."""
    return [
        bits
        for bits, loss in zip(BITS, THRESHOLDS)
        if all(steps_to(run, loss) is not None for run in runs)
    ]


def later(mine: Run, base: Run) -> float:
    """How many more steps a run takes to the thresholds than another,
    mean of those that both reach."""
    pairs = [(steps_to(mine, at), steps_to(base, at)) for at in THRESHOLDS]
    return statistics.fmean(
        one - other for one, other in pairs if one is not None and other is not None
    )


def kind_gap(run: Run) -> float:
    """`p` of spaces and punctuation minus that of characters inside words,
    in the last two routers."""
    kinds = run["alpha_by_kind"]
    easy = statistics.fmean(
        kinds[name][layer] for name in ("space", "punctuation") for layer in (-1, -2)
    )
    return easy - statistics.fmean(kinds["inside a word"][-2:])


def difficulty_gap(run: Run) -> float:
    """`p` of the least sure quarter minus that of the surest, mean over routers."""
    easiest, *_, hardest = (statistics.fmean(layers) for layers in run["alpha_by_difficulty"])
    return hardest - easiest


def over_tsa(
    results: dict[str, Any], place: int, ours: Callable[[dict[str, Any]], dict[str, float]]
) -> list[float]:
    """The loss of early exit over that of TSA at about its share, minus 1."""
    return [
        sweep["exit_at_equal_share"][place]["loss"] / ours(sweep)["loss"] - 1
        for sweep in results["exit_sweeps"]
    ]


def claims(results: dict[str, Any]) -> list[Judged]:
    """The paper's claims that have several seeds."""
    dense, tsa, paper = seeds_of(results, "dense"), seeds_of(results, "tsa"), PAPER["shakespeare"]
    every = tsa[0]["settings"]["eval_every"]
    saved, hard_saved = (tell_percent([run[key] for run in tsa]) for key in ("saved", "hard_saved"))
    more = tell_percent([run["saved"] for run in seeds_of(results, "lambda_0.05")])
    said = f"{percent(paper['saved'])} at {percent(paper['loss_over_dense'], sign=True)}"
    said_more = f"{percent(PAPER['lambda_0.05']['saved'])} below +0.5 %"
    signed: Callable[[float], str] = "{:+.3f}".format
    part: Callable[[float], str] = "{:+.1%}".format
    exits = [
        sorted(sweep["exit_by_confidence"], key=lambda row: row["share"])
        for sweep in results["exit_sweeps"]
    ]
    bits = ", ".join(f"{one:g}" for one in reached([*dense, *tsa]))
    stated: list[tuple[str, str, list[float], str, float, Callable[[float], str]]] = [
        (f"Operations are saved ({saved} here) at less than 0.5 % of loss, counted on soft scaling; at the end", said,
         relative(results, "tsa", final), "not higher", MARGIN, part),
        ("The same at the lowest validation loss of each", "", relative(results, "tsa", lowest), "not higher", MARGIN,
         part),
        (f"Lambda 0.05 saves more ({more} here) at less than 0.5 % of loss, soft; at the end", said_more,
         relative(results, "lambda_0.05", final), "not higher", MARGIN, part),
        ("The same at the lowest validation loss of each", "", relative(results, "lambda_0.05", lowest), "not higher",
         MARGIN, part),
        (f"It carries over to inference that skips ({hard_saved} here), at less than 0.5 % of loss", "no loss reported",
         relative(results, "tsa", final_hard), "not higher", MARGIN, part),
        ("Early exit is worse than soft TSA at about the same share, at the end",
         percent(PAPER["early_exit_over_tsa"], sign=True), over_tsa(results, 0, lambda sweep: sweep["tsa_soft"]),
         "higher", 0.0, part),
        ("Early exit is worse than TSA that skips, at about the same share, at the end", "",
         over_tsa(results, 1, lambda sweep: sweep["tsa_by_threshold"][0]), "higher", 0.0, part),
        (f"Every threshold takes as many steps as without routers (within {every}); of the three that the paper names, "
         f"for enwik8, {bits} bits per character is reached here", "the same, thresholds not named",
         [later(mine, base) for mine, base in zip(tsa, dense)], "equal", every, "{:+.0f}".format),
        ("Spaces and punctuation get less of the last two blocks than characters inside words", "a picture",
         [kind_gap(run) for run in tsa], "lower", 0.0, signed),
        ("Early exit loses less where fewer tokens leave: loss at half of the depth over that at 0.83", "a table",
         [at_half["loss"] - at_most["loss"] for at_half, *_, at_most in exits], "higher", 0.0, signed),
        ("Early routers keep more tokens active than late ones: alpha of the first two minus that of the last two",
         "a picture", [statistics.fmean(run["alpha_by_layer"][:2]) - statistics.fmean(run["alpha_by_layer"][-2:])
                       for run in tsa], "higher", 0.0, signed),
        ("What a dense model is unsure about gets more depth than what it is sure about", "not measured",
         [difficulty_gap(run) for run in tsa], "higher", 0.0, signed),
    ]  # fmt: skip
    return [
        judge(claim, source, numbers, expected, len(stated), margin, show)
        for claim, source, numbers, expected, margin, show in stated
    ]


def single_claims(results: dict[str, Any], small: dict[str, Any]) -> list[Judged]:
    """Claims that runs of the small study, of one seed, or times speak to."""
    runs, times = small["runs"], small["times"][0]["over_dense"]
    weights = [runs[f"lambda_{weight}"] for weight in WEIGHTS]
    losses = [run["loss"] for run in weights]
    flat, free = max(losses) / min(losses) - 1, weights[0]
    short = "{steps} steps of {batch}".format(**free["settings"])
    kinds = {kind: statistics.fmean(layers) for kind, layers in free["alpha_by_kind"].items()}
    least, most = min(kinds, key=kinds.__getitem__), max(kinds, key=kinds.__getitem__)
    copied, sorted_ = runs["copy_tsa"]["alpha"], runs["sort_tsa"]["alpha"]
    begin, limit = free["curve"][0]["alpha"], PAPER["lambda_0"]["range"]
    biased = 1 - (1 + (free["settings"]["layers"] - 1) * begin) / free["settings"]["layers"]
    (soft,) = over_tsa(small, 0, lambda sweep: sweep["tsa_soft"])
    (hard,) = over_tsa(small, 1, lambda sweep: sweep["tsa_by_threshold"][0])
    stated = [
        ("The task loss alone (lambda 0) routes: operations are saved, and some kinds of characters get more than "
         "others", f"20.4 % saved, alpha {PAPER['lambda_0']['alpha']:.3f}",
         f"{percent(free['saved'])} saved, alpha {free['alpha']:.3f}; mean p {kinds[least]:.2f} ({least}) to "
         f"{kinds[most]:.2f} ({most}), {short}. The routers' bias alone starts at alpha {begin:.3f}, "
         f"{percent(biased)} saved", free["saved"] > 0 and kinds[most] > kinds[least]),
        (f"Lambda from 0 to 0.1 changes the loss by no more than {percent(limit)}", percent(limit),
         f"{percent(flat)}, {short}", flat <= limit),
        ("Early exit is worse than soft TSA at the same share", percent(PAPER["early_exit_over_tsa"], sign=True),
         f"{percent(soft, sign=True)}, small study", soft > 0),
        ("Early exit is worse than TSA that skips, at the same share", "", f"{percent(hard, sign=True)}, small study",
         hard > 0),
        ("Copying needs less depth than sorting",
         f"alpha {PAPER['copy']['alpha']:.3f} against {PAPER['sort']['alpha']:.3f}",
         f"alpha {copied:.3f} against {sorted_:.3f}, 400 steps of 64", copied < sorted_),
        ("Soft routers cost no more than 2 % of time", "1 % (M1 Pro)",
         f"{percent(times['soft'] - 1, sign=True)} on one CPU core", times["soft"] <= 1.02),
        ("Skipping saves time, with 64 sequences", "2.3 % at alpha 0.726 (M1 Pro)",
         f"{percent(1 - times['hard'])} on one CPU core at alpha {runs['tsa']['hard_share']:.3f}", times["hard"] < 1),
    ]  # fmt: skip
    rows = [
        Judged(
            claim,
            paper,
            here,
            OPEN,
            f"{AGREES if same else DISAGREES} in the one seed; {cannot_decide(1)}",
        )
        for claim, paper, here, same in stated
    ]
    device = results["runs"]["tsa"]["device"]["device"]
    for claim, paper, way, limit in (
        ("Soft routers cost no more than 2 % of time", "1 % (M1 Pro)", "soft", 0.02),
        ("Skipping saves time, with 64 sequences", "2.3 % at alpha 0.726 (M1 Pro)", "hard", 0.0),
    ):
        more = [one["over_dense"][way] - 1 for one in results["times"]]
        rows.append(
            judge(
                f"{claim}: {device}, time over dense",
                paper,
                more,
                "not higher",
                2,
                limit,
                "{:+.0%}".format,
            )
        )
    return rows


def plot_curves(results: dict[str, Any], small: dict[str, Any], path: Path) -> None:
    """Loss over steps, loss over token-layer operations, and alpha over steps."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, label in (
        ("dense", "dense"),
        *((name, f"TSA (soft), {kind}") for name, kind in KINDS.items()),
    ):
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
    shown = [(results["runs"][name], f"{kind}, full size") for name, kind in KINDS.items()]
    shown += [
        (small["runs"][name], f"{NAMES[name]}, small") for name in ("tsa", "lambda_0", "bias_3")
    ]
    for run, label in shown:
        right.plot(
            [row["step"] for row in run["curve"]],
            [row["alpha"] for row in run["curve"]],
            label=label,
        )
    left.set(xlabel="step", ylabel="validation loss (nats)", title="Training")
    middle.set(
        xlabel="token-layer operations (millions, soft)",
        ylabel="validation loss (nats)",
        title="Per operation",
    )
    right.set(
        xlabel="step", ylabel="alpha", ylim=(0, 1.02), title="Mean active fraction", xlim=(0, None)
    )
    right.set_xscale("symlog", linthresh=200)
    for axes in (left, middle):
        axes.set_ylim(1.4, 2.4)
    for axes, corner in ((left, "upper right"), (middle, "upper right"), (right, "lower left")):
        axes.legend(fontsize=6, loc=corner)
    _save(figure, path)


def plot_sweep(results: dict[str, Any], path: Path) -> None:
    """Active share and loss over the weight of the depth loss."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    runs = [results["runs"][f"lambda_{weight}"] for weight in WEIGHTS]
    weights = [run["settings"]["depth_weight"] for run in runs]
    left.plot(weights, [run["alpha"] for run in runs], marker="o", label="alpha (soft)")
    left.plot(
        weights, [run["hard_share"] for run in runs], marker="s", label="share run full (hard)"
    )
    right.plot(weights, [run["loss"] for run in runs], marker="o", label="soft")
    right.plot(weights, [run["hard_loss"] for run in runs], marker="s", label="hard")
    left.axhline(
        results["runs"]["lambda_0"]["curve"][0]["alpha"],
        color="grey",
        linestyle=":",
        label="before training",
    )
    left.set(ylabel="active share", ylim=(0, 1.02), title="Active share")
    right.set(ylabel="validation loss (nats)", title="Loss")
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=0.001)
        axes.set(xlabel="lambda", xlim=(-0.0003, 0.15))
        axes.legend(fontsize=7)
    _save(figure, path)


def plot_exit(results: dict[str, Any], path: Path) -> None:
    """Loss over the share of tokens run full: early exit,
    and the halting router at other thresholds."""
    import matplotlib.pyplot as plt

    sweep = results["exit_sweeps"][0]
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, marker, label in (
        ("exit_by_confidence", "o", "early exit"),
        ("tsa_by_threshold", "s", "TSA, hard"),
    ):
        more = sweep["exit_at_equal_share"] if name == "exit_by_confidence" else []
        rows = sorted(sweep[name] + more, key=lambda row: row["share"])
        axes.plot(
            [row["share"] for row in rows],
            [row["loss"] for row in rows],
            marker=marker,
            label=label,
        )
    soft = sweep["tsa_soft"]
    axes.plot(
        soft["share"], soft["loss"], "*", markersize=12, label="TSA, soft (nothing is skipped)"
    )
    axes.axhline(sweep["dense"], color="black", linestyle="--", label="dense")
    axes.set(
        xlabel="active share of routed blocks",
        ylabel="validation loss (nats)",
        title="Skipping for real",
    )
    axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of run.py; default: what is committed")
    parser.add_argument("--study", choices=FILES, default="paper", help="what OUT has")
    args = parser.parse_args()
    if args.out:
        (HERE / FILES[args.study]).write_text(
            json.dumps(collect(args.out, args.study), indent=1) + "\n"
        )
    results, small = (read(study) for study in FILES)
    plot_curves(results, small, HERE / "curves.png")
    plot_sweep(small, HERE / "lambda.png")
    plot_exit(results, HERE / "exit.png")
    print(tables(results, small))


if __name__ == "__main__":
    main()
