"""A real model on the page of results: cheaper prompts, and all tokens routed."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np
from pages import markdown_table
from study.page import RECIPES, Study, read

FOLDER = RECIPES / "smollm2"
MAIN = "results"  # those of SmolLM2
OTHERS = {
    "others/gemma-3-270m": "Gemma 3 270M",
    "others/qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
}
NAMES = {
    "c4": "C4",
    "wiki": "Wikipedia",
    "technical": "technical",
    "code": "code",
    "wikitext2": "WikiText-2",
}
KINDS = {
    "prompts": "fitted for prompts, keep {}, seed {}",
    "pruned": "last {1} layers without {0}, nothing in its place",
    "shortgpt": "ShortGPT's {} least influential blocks left out",
    "all": "all tokens routed, branch {}, keep {}, seed {}",
    "prompts trained": (
        "fitted for prompts, keep {0}, branches trained {3} steps of 512 tokens, seed {1}"
    ),
    "all trained": (
        "all tokens routed, branch {0}, keep {1}, branches trained {4} steps of 256 tokens, seed "
        "{2}"
    ),
    "static": "the best {1} FFNs to replace for every token, branch {0}",
    "static trained": (
        "the best {1} FFNs to replace for every token, branch {0}, trained {3} steps of 256 tokens"
    ),
}


def results(folder: str = MAIN) -> dict[str, Any]:
    """By part, in the order of its name: everything in `folder` with a loss over dense."""
    found = {
        path.stem: read(f"smollm2/{folder}/{path.name}")
        for path in sorted((FOLDER / folder).glob("*.json"))
    }
    return {part: result for part, result in found.items() if "settings" in result}


def label(part: str) -> str:
    kind, *rest = part.split("-")
    kind = f"{kind} trained" if "trained" in rest else kind
    parts = {"block": "the whole block", "ffn": "the FFN"}
    return KINDS[kind].format(*(parts.get(word, word) for word in rest))


def times(folder: str = MAIN) -> dict[str, Any]:
    """By part, the times over dense; empty before they are measured.

    Those of `times-all-tokens.json`, of another run, stand for what `times.json` does not have.
    """
    found: dict[str, Any] = {}
    for name in ("times-all-tokens.json", "times.json"):
        if (FOLDER / folder / name).exists():
            found |= read(f"smollm2/{folder}/{name}")["over_dense"]
    return found


def lines(setting: str, folder: str = MAIN) -> list[str]:
    """A table of the parts of one setting, `"prompts"`, `"long"` or `"all"`;
    behind several seeds, their mean."""
    timed, rows = times(folder) if setting == "long" else {}, []
    parts_of = results(folder).items()
    found = {
        part: result["settings"][setting]
        for part, result in parts_of
        if setting in result["settings"]
    }
    for kind, parts in groupby(found, lambda part: label(part).partition(", seed ")[0]):
        same = []
        for part in parts:
            texts = [found[part]["texts"][name] for name in NAMES]
            time = (
                [timed[part]["prompt"] if part in timed else math.nan] if setting == "long" else []
            )
            losses = [f"{text['more']:+.3f} ± {text['error']:.3f}" for text in texts]
            ran = [", ".join(f"{text['ran']:.2f}" for text in texts)] if setting == "all" else []
            shares = [found[part]["flops"], *time]
            rows.append([label(part), *map(_share, shares), *losses, *ran])
            same.append((shares, [text["more"] for text in texts]))
        if len(same) > 1:
            shares, more = (np.array(column) for column in zip(*same))
            errors = more.std(0, ddof=1) / len(same) ** 0.5
            losses = [f"{mean:+.3f} ± {error:.3f}" for mean, error in zip(more.mean(0), errors)]
            rows.append(
                [
                    f"{kind}: mean of {len(same)} seeds, ± over them",
                    *map(_share, shares.mean(0)),
                    *losses,
                ]
            )
            rows[-1] += [""] * (len(rows[-2]) - len(rows[-1]))
    times_too = ["time"] if setting == "long" else []
    heads = [
        "",
        "FLOPs",
        *times_too,
        *NAMES.values(),
        *(["share of the calls that ran"] if setting == "all" else []),
    ]
    return markdown_table(heads, rows) if rows else []


def _share(value: float) -> str:
    return "not timed" if math.isnan(value) else f"{value:.2f}"


TASKS = "Nine tasks with lm-eval, prompts read as they are served, accuracy in percent:"


def tasks() -> dict[str, dict[str, Any]]:
    """By system and task, every answer right or wrong;
    without systems that did not do all tasks."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((FOLDER / "results" / "tasks").glob("*.json")):
        result = read(f"smollm2/results/tasks/{path.name}")
        found.setdefault(path.stem.removeprefix(result["task"] + "-"), {})[result["task"]] = result
    every = max((set(of_system) for of_system in found.values()), key=len, default=set())
    return {system: of_system for system, of_system in found.items() if set(of_system) == every}


def right(result: dict[str, Any]) -> np.ndarray:
    """1 for each item that was answered right, 0 for the others."""
    return np.array([answer == "1" for answer in result["right"]], dtype=float)


def over_dense(of_system: dict[str, Any], dense: dict[str, Any]) -> tuple[float, float]:
    """The mean over tasks of the accuracy over dense, in points,
    and its standard error over the same items."""
    more = [right(of_system[task]) - right(dense[task]) for task in dense]
    errors = [float(part.std(ddof=1)) / len(part) ** 0.5 for part in more]
    return 100 * float(np.mean([part.mean() for part in more])), 100 * math.hypot(*errors) / len(
        more
    )


def task_lines() -> list[str]:
    """A table of accuracies, in percent."""
    found = tasks()
    if "dense" not in found:
        return []
    dense = found["dense"]
    heads = [
        "",
        *(
            f"{task}, {result['shots']} shots, {len(result['right'])} items"
            for task, result in dense.items()
        ),
    ]
    rows = []
    for system, of_system in found.items():
        name = "dense" if system == "dense" else label(system)
        scores = [f"{100 * right(of_system[task]).mean():.1f}" for task in dense]
        mean, error = over_dense(of_system, dense)
        rows.append([name, *scores, "" if system == "dense" else f"{mean:+.1f} ± {error:.1f}"])
    ran = ", ".join(
        f"{task} {100 * found['prompts-0.8-0'][task]['ran']:.0f} %"
        for task in dense
        if "prompts-0.8-0" in found
    )
    return [
        *markdown_table([*heads, "mean over dense, points"], rows),
        "",
        (
            f"Share of the prompts' tokens that ran in full, keep 0.8: {ran}. ± is the standard "
            "error over the same items."
        ),
    ]


def told() -> list[str]:
    """By share of the time that was asked for, means over seeds: the time of 1,024 tokens,
    and the texts' losses."""
    measured, found = times(), []
    by_keep: dict[str, list[str]] = {}
    for part in results():
        if part.startswith("prompts-") and "trained" not in part:
            by_keep.setdefault(part.split("-")[1], []).append(part)
    for parts in dict(sorted(by_keep.items(), reverse=True)).values():
        taken = sum(measured[part]["prompt"] for part in parts) / len(parts)
        texts = [results()[part]["settings"]["long"]["texts"] for part in parts]
        more = [sum(of_seed[name]["more"] for of_seed in texts) / len(texts) for name in NAMES]
        found.append(f"{taken:.2f} of the time: {min(more):+.3f} to {max(more):+.3f} nats")
    return found


def told_tasks() -> str:
    """What the accuracy of the first fit for prompts is over dense."""
    found = tasks()
    mean, error = over_dense(found["prompts-0.8-0"], found["dense"])
    return f"{len(found['dense'])} tasks {mean:+.1f} ± {error:.1f} points"


def span_of_other(folder: str, part: str = "prompts-0.8-0", setting: str = "prompts") -> str:
    """The least and the greatest loss over dense of five texts."""
    more = [text["more"] for text in results(folder)[part]["settings"][setting]["texts"].values()]
    return f"{min(more):+.3f} to {max(more):+.3f}"


def told_other(folder: str, part: str = "prompts-0.8-0") -> str:
    """As `told`, of one fit of another model."""
    taken = times(folder)[part]["prompt"]
    return f"{OTHERS[folder]}, one seed: {taken:.2f}, {span_of_other(folder, part, 'long')}"


def other_lines(folder: str) -> list[str]:
    """The tables of another model than SmolLM2."""
    found = []
    captions = {
        "long": "Prompts of 1,024 tokens:",
        "prompts": "Prompts of 384 tokens:",
        "all": "All tokens of rows of 256 routed, FLOPs at the share of the calls that ran:",
    }
    for setting, caption in captions.items():
        if table := lines(setting, folder):
            found += ["", caption, "", *table]
    return found


def others() -> list[str]:
    """What the same command gives on other models; one seed each."""
    found = []
    for folder, name in OTHERS.items():
        if results(folder):
            found += ["", f"### {name}", *other_lines(folder)]
    if not found:
        return []
    caption = (
        "The same on other models, one seed, fewer rows, `keep` as a share of the FLOPs; their "
        "weights, too, were those of a 4-bit file."
    )
    return ["", caption, *found]


def study() -> Study:
    brief = (
        "SmolLM2-135M-Instruct, no training, prompts of 1,024 tokens, loss behind them over dense "
        f"on five kinds of text, three seeds: {'; '.join(told())}; {told_tasks()} at the first, "
        "seed 0"
    )
    for folder, name in OTHERS.items():
        if "prompts-0.8-0" in results(folder):
            brief += (
                f"; {name} at 0.8 of the FLOPs, one seed: {span_of_other(folder)} behind prompts "
                "of 384 tokens"
            )
    section = [
        (
            "Prompts alone are routed, and run their last 64 tokens in full; nats over dense of "
            "the 128 tokens behind. FLOPs and times are of the prompt. WikiText-2 was not fitted "
            "on. Prompts of 1,024 tokens:"
        ),
        "",
        *lines("long"),
        "",
        "The same of 384 tokens:",
        "",
        *lines("prompts"),
    ]
    if answered := task_lines():
        section += ["", TASKS, "", *answered]
    if every := lines("all"):
        caption = (
            "All tokens of rows of 256 routed; nats over dense, FLOPs at the share of the calls "
            "that ran:"
        )
        section += ["", caption, "", *every]
        timed = {part: time for part, time in times().items() if part.startswith(("all", "static"))}
        for part, time in timed.items():
            section += [
                "",
                (
                    f"Time over dense, {label(part)}: {time['prompt']:.2f} for a prompt of 1,024 "
                    f"tokens, {time['token']:.2f} for a token of one sequence, "
                    f"{time['tokens_of_8']:.2f} for one of eight."
                ),
            ]
    section += others()
    return Study("A real model", "smollm2", "python recipes/smollm2/run.py", brief, section)
