"""A real model on the page of results: prompts with a share of the FLOPs, and all tokens routed."""

from __future__ import annotations

from typing import Any

from study.page import RECIPES, Study, read

from hf_depthroute.files.markdown import markdown_table

FOLDER = RECIPES / "smollm2"
NAMES = {"c4": "C4", "wiki": "Wikipedia", "technical": "technical", "code": "code", "wikitext2": "WikiText-2"}
KINDS = {
    "prompts": "fitted for prompts, keep {}, seed {}",
    "pruned": "last {1} layers without {0}, nothing in its place",
    "shortgpt": "ShortGPT's {} least influential blocks left out",
    "all": "all tokens routed, branch {}, keep {}, seed {}",
}


def results() -> dict[str, Any]:
    """By part, in the order of its name: everything with a loss over dense."""
    found = {path.stem: read(f"smollm2/results/{path.name}") for path in sorted((FOLDER / "results").glob("*.json"))}
    return {part: result for part, result in found.items() if "texts" in result}


def label(part: str) -> str:
    kind, *rest = part.split("-")
    parts = {"block": "the whole block", "ffn": "the FFN"}
    return KINDS[kind].format(*(parts.get(word, word) for word in rest))


def times() -> dict[str, Any]:
    """By part, the times over dense; empty before they are measured."""
    path = FOLDER / "results" / "times.json"
    return read("smollm2/results/times.json")["over_dense"] if path.exists() else {}


def lines(setting: str) -> list[str]:
    """A table of the parts of one setting, `"prompts"` or `"all"`."""
    measured, rows = times(), []
    for part, result in results().items():
        if part.startswith("all") != (setting == "all"):
            continue
        losses = [f"{text['more']:+.3f} ± {text['error']:.3f}" for text in (result["texts"][name] for name in NAMES)]
        time = f"{measured[part]['prompt']:.2f}" if part in measured else "not timed"
        rows.append([label(part), f"{result['flops']:.2f}", time, *losses])
    return markdown_table(["", "FLOPs", "time of a prompt of 1,024", *NAMES.values()], rows) if rows else []


def span(part: str) -> str:
    more = [text["more"] for text in results()[part]["texts"].values()]
    return f"{min(more):+.3f} to {max(more):+.3f}"


def study() -> Study:
    shares = sorted({part.split("-")[1] for part in results() if part.startswith("prompts-")}, reverse=True)
    told = ", ".join(f"{span(f'prompts-{share}-0')} at {share} of a prompt's FLOPs" for share in shares)
    brief = (
        f"SmolLM2-135M-Instruct, no training, nats behind a prompt over dense on five kinds of text: {told}; one seed"
    )
    section = ["The text behind prompts of 384 tokens, which alone are routed; nats over dense:", "", *lines("prompts")]
    if every := lines("all"):
        section += ["", "All tokens of rows of 256 routed; nats over dense:", "", *every]
    return Study("A real model", "smollm2", "python recipes/smollm2/run.py", brief, section)
