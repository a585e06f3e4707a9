"""The peers on a real model on the page of results: a table, and a picture of quality against time.

python recipes/peers_smollm2/page.py
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `pages` is there

from pages import markdown_table, png_of

FOLDER = Path(__file__).resolve().parent
LABELS = {
    "routed": "`fit_router`, all tokens",
    "prompts": "`fit_router`, prompts only",
    "shortgpt": "ShortGPT's blocks left out, by this library",
    "economize-shortgpt": "economize `depth_prune`, ShortGPT",
    "economize-sleb": "economize `depth_prune`, SLEB",
    "exit": "LayerSkip's exit, every token leaves",
    "economize-mod": "economize `mod`",
    "economize-gateskip": "economize `gateskip`, budget 0.8",
    "economize-flexidepth": "economize `flexidepth`",
    "economize-flexidepth-0.4": "the same, threshold moved to 40 % of its scores",
    "tide": "TIDE",
    "tide-off": "TIDE, threshold 1 (off)",
    "mod-package": "mixture-of-depth",
    "exit-draft": "LayerSkip's exit as a draft, by transformers",
    "economize-layer_skip": "economize `layer_skip`, a draft",
    "economize-teal": "economize `teal`, 40 %",
    "teal-routed": "`teal`, then `fit_router`",
    "int8": "int8 weights (torchao)",
    "int8-routed": "int8 weights, then `fit_router`",
}
STACKED = ("economize-teal", "teal-routed", "int8", "int8-routed")
COLUMNS = {"prompt": "prompt of 1,024", "one": "token, 1 sequence", "eight": "token, 8 sequences"}


def results(folder: Path = FOLDER / "results") -> dict[str, Any]:
    """By system, in the order of the table: what is measured so far."""
    paths = {name: folder / f"{name}.json" for name in ("dense", *LABELS)}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def times(folder: Path = FOLDER / "results") -> dict[str, Any]:
    """The timed step; empty before it ran."""
    path = folder / "times.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def loss_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """The mean of the texts, nats over dense, and its standard error;
    none where it could not be measured."""
    texts = row.get("loss", {}).get("texts")
    if not texts:
        return None
    errors = [text["error"] for text in texts.values()]
    mean = sum(text["more"] for text in texts.values()) / len(texts)
    return mean, sum(error**2 for error in errors) ** 0.5 / len(errors)


def rows_changed(check: dict[str, Any]) -> str:
    if "fails" in check:
        return "refused"
    return "no" if not check["changed"] else f"{check['changed']} of {check['of']} rows"


def agrees(check: dict[str, Any]) -> str:
    """Tokens that a pass over the text would have chosen otherwise, and how far its logits are."""
    if "fails" in check:
        return "fails"
    apart = "" if check["difference"] is None else f", {check['difference']:.1g}"
    return f"{check['flips']} of {check['of']}{apart}"


def line(name: str, row: dict[str, Any], dense: dict[str, Any], timed: dict[str, Any]) -> list[str]:
    calls, loss = row["calls"], loss_of(row)
    shares = ["fails"] * 2
    if "fails" not in calls:
        shares = [
            f"{calls['pass']:.2f} / {calls['decode']:.2f}",
            f"{calls['flops'] / dense['calls']['flops']:.2f}",
        ]
    if row["setting"] == "prompts":
        shares[1] += " (prompt)"
    seconds = [
        f"{timed[name][part]:.2f}" if part in timed.get(name, {}) else "" for part in COLUMNS
    ]
    lost = "" if loss is None else f"{loss[0]:+.3f} ± {loss[1]:.3f}"
    behaves = [agrees(row["agreement"]), rows_changed(row["batch"]), rows_changed(row["padding"])]
    return [LABELS[name], row["trained"] or "nothing", *shares, lost, *behaves, *seconds]


def table(found: dict[str, Any], timed: dict[str, Any], names: list[str]) -> list[str]:
    heads = ["", "fitted or trained", "FFN calls, pass / decode", "FLOPs", "loss"]
    heads += ["decode ≠ pass", "batch changes", "padding changes"]
    shown = list(COLUMNS) if timed else []
    ratios = timed.get("over_dense", {})
    rows = [
        line(name, found[name], found["dense"], ratios)[: len(heads) + len(shown)] for name in names
    ]
    return markdown_table([*heads, *(COLUMNS[part] for part in shown)], rows)


def failures(found: dict[str, Any]) -> list[str]:
    return [f"{LABELS[name]} does not run on transformers 5.23: `{row['fails']}`."
            for name, row in found.items() if "fails" in row]  # fmt: skip


def stacked(found: dict[str, Any]) -> list[str]:
    """Whether what is lost adds up: each alone, both, and the sum of the two."""
    sentences = []
    for other, both in (("economize-teal", "teal-routed"), ("int8", "int8-routed")):
        three = [loss_of(found.get(name, {})) for name in (other, "routed", both)]
        if None in three:
            continue
        alone, routed, together = (mean for mean, _ in three if mean is not None)
        sentences.append(
            f"{LABELS[other]}: {alone:+.3f} alone, routing {routed:+.3f}, both {together:+.3f} "
            f"(the sum is {alone + routed:+.3f})."
        )
    return sentences


def section() -> list[str]:
    found, timed = results(), times()
    ran = [name for name, row in found.items() if name != "dense" and "fails" not in row]
    written = [
        (
            "SmolLM2-135M-Instruct, float32; nats over dense, the mean of five kinds of text, rows "
            "of 256 tokens (for prompts only: the text behind prompts of 384). FFN calls and FLOPs "
            "are counted. *decode ≠ pass*: of 32 decoded tokens, how many a pass over the same "
            "text would choose otherwise, and the greatest difference of logits. *Batch* and "
            "*padding*: of four rows, how many answer otherwise than alone. One seed, four rows of "
            "each text (for prompts only, two of 512); ± over rows. The loss of prompts only is not to be compared with the "
            "others', which route or leave out for every token: what ShortGPT and POP cost prompts "
            "alone is under *A real model*."
        ),
        "",
        *table(found, timed, [name for name in ran if name not in STACKED]),
    ]
    if timed:
        machine = timed["machine"]
        written += ["", f"Times are over dense: {timed['rounds']} rounds in turn, {machine['device']}, "
                    f"{machine['threads']} threads."]  # fmt: skip
    else:
        written += ["", "Times were not measured."]
    for sentence in failures(found):
        written += ["", sentence]
    if "tide-off" in found:
        written += ["", "TIDE's pass over a text norms the last layer's output, which transformers has normed already, "
                    "once more: what it loses with nothing leaving is that."]  # fmt: skip
    if together := [name for name in ran if name in STACKED]:
        written += [
            "",
            "Together with routing:",
            "",
            *table(found, timed, together),
            "",
            *stacked(found),
        ]
    return written


def brief() -> str:
    """Loss and time of a prompt of those that take about the same FLOPs;
    prompts alone are another setting."""
    found, ratios = results(), times().get("over_dense", {})

    def told(name: str) -> str:
        loss, place = loss_of(found.get(name, {})), ratios.get(name, {}).get("prompt")
        if loss is None:
            return ""
        return f"{LABELS[name]} {loss[0]:+.2f} ± {loss[1]:.2f}" + (
            "" if place is None else f" in {place:.2f}"
        )

    every = [told(name) for name in ("routed", "economize-sleb", "economize-shortgpt", "exit")]
    return (
        "SmolLM2-135M-Instruct, nats over dense, and the time of a prompt of 1,024 over dense. "
        f"Every token: {', '.join(filter(None, every))}; another setting, the text behind prompts "
        f"that alone are routed: {told('prompts')}. Four rows of each of five texts (of prompts two, of 512), one seed"
    )


def draw(path: Path) -> None:
    """Quality against the measured time of a prompt and of a token;
    against FLOPs where nothing is timed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    from hf_depthroute.files.staged import write_bytes

    found, ratios = results(), times().get("over_dense", {})
    panels = {
        part: {name: row[part] for name, row in ratios.items() if part in row} for part in COLUMNS
    }
    titles = {part: f"time / dense time, {COLUMNS[part]}" for part in COLUMNS}
    if not ratios:
        whole = found["dense"]["calls"]["flops"]
        counted = {
            name: row["calls"] for name, row in found.items() if "flops" in row.get("calls", {})
        }
        panels = {"flops": {name: calls["flops"] / whole for name, calls in counted.items()}}
        titles = {"flops": "FLOPs of a pass / dense"}
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.5 * len(panels) + 3, 5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    kinds = {
        **dict.fromkeys(LABELS, "C7"),
        **dict.fromkeys(STACKED, "C1"),
        "routed": "C2",
        "prompts": "C2",
    }
    points: dict[str, Any] = {}
    for axis, (part, places) in zip(axes[0], panels.items(), strict=True):
        for (name, color), marker in zip(kinds.items(), itertools.cycle("osD^v<>P*Xhp")):
            loss = loss_of(found.get(name, {}))
            if loss is not None and name in places:
                place, mean = places[name], max(loss[0], 0)
                points[LABELS[name].replace("`", "")] = axis.errorbar(
                    place, mean, loss[1], fmt=marker, color=color
                )
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_xlim(0.65, 1.4)
        axis.set_xlabel(titles[part])
    axes[0][0].set_ylabel("nats over dense, mean of five texts")
    figure.legend(points.values(), points, loc="outside right upper", fontsize=8)
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)


def study() -> Any:
    from study.page import Study

    command = "python recipes/peers_smollm2/run.py"
    return Study("The peers on a real model", "peers_smollm2", command, brief(), section())


def main() -> None:
    draw(FOLDER / "results.png")


if __name__ == "__main__":
    main()
