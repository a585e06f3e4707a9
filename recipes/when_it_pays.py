"""The README's table of where routing saves time, from the committed result files;
`tables.py` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import headlines
from pages import markdown_table

RECIPES = Path(__file__).parent
HALF = "0.5"  # the budget of every figure here


def measured(name: str, case: str) -> list[Any]:
    """The measurements of a suite's kind, `"prefill"` or `"decode"`."""
    result = json.loads((RECIPES / name).read_text())
    return [row for row in result["measurements"] if row["case"] == case and HALF in row["budgets"]]


def told(row: Any) -> str:
    """A time over dense with its standard error."""
    return f"{row['ratio']:.2f} ± {row['ratio_error']:.2f}"


def span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def prompts() -> str:
    demo = json.loads((RECIPES / "demo" / "results.json").read_text())["bench"]
    phases = json.loads((RECIPES / "fit_router" / "phases.json").read_text())
    first = [
        row["first_token"]["prefill"]["ratio"]
        for row in phases["rows"]
        if row["keep"] == float(HALF)
    ]
    millions = demo["setting"]["parameters"] / 1e6
    return (
        f"**{told(demo['prefill']['budgets'][HALF])}** on an Intel Xeon with AMX, {span(first)} on "
        f"an AMD EPYC: a Llama of {millions:.0f} million weights"
    )


def one_sequence() -> str:
    xeon = max(
        measured("speed/cpu-decode.json", "decode"),
        key=lambda row: len(row["setting"]["routed_layers"]),
    )
    epyc = next(
        row
        for row in measured("speed/targets-decode.json", "decode")
        if row["setting"]["target"] == "ffn"
    )
    on_xeon, on_epyc = (told(row["budgets"][HALF]) for row in (xeon, epyc))
    return f"**{on_xeon}** on the Xeon, {on_epyc} on an EPYC: the width of Qwen2.5-0.5B"


def several_sequences() -> str:
    batches = measured("speed/decode-batches.json", "decode")
    some = [row["budgets"][HALF]["ratio"] for row in batches if 2 <= row["batch"] <= 16]
    plain = max(
        measured("speed/cpu.json", "decode"), key=lambda row: len(row["setting"]["routed_layers"])
    )
    without = told(plain["budgets"][HALF])
    return (
        f"**{span(some)}** for 2 to 16 at once on an EPYC with bfloat16 instructions, {without} "
        f"for {plain['batch']} on one without: the same width"
    )


def all_tokens() -> str:
    """A row of a model that people know, whose routers were fitted; other shares than the other rows."""
    times = json.loads((RECIPES / "smollm2" / "results" / "times-all-tokens.json").read_text())
    fits = [time for part, time in times["over_dense"].items() if part.startswith("all-")]
    prompts_of, eight = ([fit[name] for fit in fits] for name in ("prompt", "tokens_of_8"))
    error = stdev(eight) / len(eight) ** 0.5
    return (
        f"prompts **{span(prompts_of)}**, decoding eight {mean(eight):.2f} ± {error:.2f}: "
        f"SmolLM2-135M on an EPYC, float32, {len(fits)} fits, a fifth to a quarter skipped"
    )


def gpu() -> str:
    (prompt,), (step,) = (measured("speed/h100.json", case) for case in ("prefill", "decode"))
    _, _, eager = headlines.eager_decode(json.loads((RECIPES / "speed" / "h100.json").read_text()))
    return (
        f"prompts **{told(prompt['budgets'][HALF])}**; decoding one sequence {eager:.1f} "
        "(both eager; by default such a step is not routed), "
        f"{step['budgets'][HALF]['ratio']:.2f} (both compiled): an H100, the width of Llama-3-8B"
    )


def lines() -> list[str]:
    rows = [
        ["reading prompts (*prefill*), CPU", "yes", prompts()],
        ["decoding one sequence, CPU", "yes", one_sequence()],
        ["decoding several, CPU", "rarely", several_sequences()],
        ["all tokens of a small model, CPU", "no", all_tokens()],
        ["GPU", "prompts; decoding only if compiled", gpu()],
    ]
    return markdown_table(
        ["work", "does it pay?", "time over dense, half of the FFN calls skipped"], rows
    )
