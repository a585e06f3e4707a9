"""The README's two generated parts: the five papers with what became of their claims,
and six results.

`python recipes/tables.py` writes them. A number after ± is a standard error: of a mean over seeds,
or of a median over rounds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import claims
from fit_router import report as fit_report
from pages import markdown_table
from router_tuning import report as tuning_report
from smollm2 import page as smollm2
from study.claims import tell_states
from study.intervals import tell_mean
from token_selective import report as selective_report
from vllm_load import report as vllm_report

from hf_depthroute.training.presets import PRESETS

RECIPES = Path(__file__).parent
CODE = "https://gitlab.com/fars-a/counterfactual-gate-supervision"
CHAPTER = "Auxiliary Loss Approaches and Their Cost"  # has no identifier; its method has
VERDICTS = {  # by the presets of a paper: one sentence on what came out
    ("conditional-depth-routing", "conditional-depth-routing-jepa"):
        "skipping costs more here than there, so nothing speaks for or against it",
    ("token-selective-attention",): "soft gates save operations on paper; the loss doubles where tokens really skip",
    ("router-tuning", "router-tuning-experts"):
        "per token better than the best sublayers dropped; per sequence worse for FFNs",
    ("counterfactual-gate-supervision", "counterfactual-gate-supervision-memory"):
        "the flip that it would fix does not show here",
    ("loss-free-balancing",): "every seed's load gets more even; three seeds do not decide it",
}  # fmt: skip


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())


def papers() -> list[str]:
    """Title, identifier, presets and verdict of the five papers."""
    rows = []
    for (names, said), paper in zip(VERDICTS.items(), claims.papers()):
        first = PRESETS[names[0]]
        title = CHAPTER if CHAPTER in paper.title else first.title
        assert title in paper.title
        identifier = linked(first.identifier)
        identifier = f"its method: {identifier}" if title == CHAPTER else identifier
        states = tell_states(row.state for row in paper.rows() if not row.ours)
        presets = ", ".join(f"`{name}`" for name in names)
        rows.append([title, identifier, presets, f"{said} ([{states}](docs/claims.md))"])
    return markdown_table(["paper", "identifier", "preset", "what became of its claims"], rows)


def linked(identifier: str) -> str:
    """An identifier with a link to its paper, or to the published code if it has no number."""
    number = identifier.removeprefix("arXiv:")
    return f"[{identifier}]({CODE if number == identifier else f'https://arxiv.org/abs/{number}'})"


def results() -> list[str]:
    """Six questions: the answer, one number with its error and size, and where it is from."""
    rows = [losses(), routed_prompts(), router_tuning(), token_selective(), with_lora(), served()]
    rows = [
        [question, answer, number, f"[{folder}](recipes/{folder})"]
        for question, answer, number, folder in rows
    ]
    return markdown_table(["question", "answer", "number", "study"], rows)


def losses() -> Sequence[str]:
    points = fit_report.summary(read("fit_router/results.json")["wide"])
    routed, static = points["mlp", 2], points["static", 2]
    return (
        "Does routing lose less than leaving layers out?", "Yes, without any training.",
        f"+{routed['more']:.3f} ± {routed['error']:.3f} nats ({perplexity(routed['more'])}), half of the FFN calls "
        f"skipped; layers left out +{static['more']:.3f} ± {static['error']:.3f}; 18 million weights, "
        f"{routed['seeds']} seeds", "fit_router",
    )  # fmt: skip


def routed_prompts() -> Sequence[str]:
    return (
        "What does a cheaper prompt cost the text behind it?",
        "Little, on a model that people know.",
        f"{smollm2.told()[0]}; SmolLM2-135M-Instruct, 1,024 tokens, five texts, three seeds; {smollm2.told_tasks()}; "
        f"{smollm2.told_other('others/qwen2.5-coder-0.5b')}",
        "smollm2",
    )  # fmt: skip


def with_lora() -> Sequence[str]:
    seeds = read("lora/results.json")["seeds"].values()
    more = [seed["joint"]["loss"] - seed["lora"]["loss"] for seed in seeds]
    return (
        "What does routing cost a model that LoRA fine-tunes?",
        "A tenth of a nat, trained jointly.",
        f"{tell_mean(more, sign='+')} nats ({perplexity(statistics.fmean(more))}), a quarter of the FFN calls skipped; "
        f"5.2 million weights, {len(seeds)} seeds", "lora",
    )  # fmt: skip


def eager_decode(result: Any) -> tuple[float, float, float]:
    """Milliseconds of a decoding step on the GPU, dense and routed, both eager; and their ratio."""
    case = next(m for m in result["measurements"] if m["case"] == "decode")
    (routed,) = case["budgets"].values()
    dense, taken = case["dense_modes"]["eager"], routed["modes"]["eager"] * case["dense_ms"]
    return dense, taken, taken / dense


def served() -> Sequence[str]:
    load = vllm_report.read_load()
    found = vllm_report.ratios(load, "all", "total_token_throughput")
    ratios = [
        statistics.median(found[cell])
        for cell in found
        if cell[0] == max(prompt for prompt, _ in found)
    ]
    of_real = vllm_report.ratios(
        read("vllm_load/load_smollm2.json"), "prefill", "total_token_throughput"
    ).values()
    real = [statistics.median(rounds) for rounds in of_real]
    return (
        "Does vLLM serve more tokens per second?",
        "On four wide layers yes; a small model's prompts hardly.",
        f"{min(ratios):.2f} to {max(ratios):.2f} of the dense rate, prompts of {max(found)[0]:,} tokens, "
        f"{load['machine']['device']}, width of Qwen2.5-0.5B, random weights; SmolLM2-135M, prompts alone routed, "
        f"AMD EPYC, {min(real):.2f} to {max(real):.2f}", "vllm_load",
    )  # fmt: skip


def perplexity(nats: float) -> str:
    """A difference in loss as a factor of the perplexity."""
    return f"perplexity x {math.exp(nats):.2f}"


def router_tuning() -> Sequence[str]:
    results = read("router_tuning/results.json")
    token, sequence = (
        tell_mean(tuning_report.over_dropping(results, "ffn", granularity), sign="+")
        for granularity in ("token", "sequence")
    )
    seeds = len(tuning_report.cell(results, "ffn", "token"))
    return (
        "Do trained routers alone beat the best sublayers dropped?",
        "Per token yes, whole sequences of FFNs no.",
        f"FFNs {token} nats per token, {sequence} per sequence; 5.2 million weights, {seeds} seeds",
        "router_tuning",
    )  # fmt: skip


def token_selective() -> Sequence[str]:
    results = selective_report.read("paper")
    soft, hard = selective_report.costs(results), selective_report.costs(results, hard=True)
    return (
        "Does a gate trained with soft scaling survive real skipping?", "No: the loss doubles.",
        f"loss {hard[2]}, {hard[1]} of operations saved; soft {soft[2]}, nothing skipped; 4.8 million "
        f"weights, {len(results['exit_sweeps'])} seeds", "token_selective",
    )  # fmt: skip
