"""The README's two generated parts: the five papers with what became of their claims, and six results.

`python recipes/tables.py` writes them. A number after ± is a standard error: of a mean over seeds, or of a median over
rounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import claims
from fit_router import report as fit_report
from router_tuning import report as tuning_report
from token_selective import report as selective_report

from hf_depthroute.files.markdown import markdown_table
from hf_depthroute.report.claims import tell_states
from hf_depthroute.report.intervals import tell_mean
from hf_depthroute.training.presets import PRESETS

RECIPES = Path(__file__).parent
NOTE = (
    "Losses are in nats; ± is a standard error, of a mean over seeds or of a median over rounds. No quality figure is "
    "of a model above 18 million weights."
)
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
        identifier = f"its method: {first.identifier}" if title == CHAPTER else first.identifier
        states = tell_states(row.state for row in paper.rows() if not row.ours)
        presets = ", ".join(f"`{name}`" for name in names)
        rows.append([title, identifier, presets, f"{said} ([{states}](docs/claims.md))"])
    return markdown_table(["paper", "identifier", "preset", "what became of its claims"], rows)


def results() -> list[str]:
    """Six questions: the answer, one number with its error and size, and where it is from."""
    rows = [losses(), prompts(), decoding(), gpu(), router_tuning(), token_selective()]
    rows = [[question, answer, number, f"[{folder}](recipes/{folder})"] for question, answer, number, folder in rows]
    return [*markdown_table(["question", "answer", "number", "study"], rows), "", NOTE]


def losses() -> Sequence[str]:
    points = fit_report.summary(read("fit_router/results.json")["wide"])
    routed, static = points["mlp", 2], points["static", 2]
    return (
        "Does routing lose less than leaving layers out?", "Yes, without any training.",
        f"+{routed['more']:.3f} ± {routed['error']:.3f} nats with {1 - routed['share']:.0%} of the FFN calls skipped "
        f"(best {1 - static['share']:.0%} of the FFNs left out: +{static['more']:.3f} ± {static['error']:.3f}); "
        f"18 million weights, {routed['seeds']} seeds", "fit_router",
    )  # fmt: skip


def prompts() -> Sequence[str]:
    demo, phases = read("demo/results.json"), read("fit_router/phases.json")
    half, machine = demo["bench"]["prefill"]["budgets"]["0.5"], demo["bench"]["machine"]
    others = [row["first_token"]["all"]["ratio"] for row in phases["rows"] if row["keep"] == 0.5]
    return (
        "Does a prompt get faster on a CPU?", "Yes; how much depends on the processor.",
        f"{half['ratio']:.2f} ± {half['ratio_error']:.2f} of the dense time at budget 0.5 ({machine['device']} with "
        f"AMX), {min(others):.2f} to {max(others):.2f} ({phases['machine']['device']}, {len(others)} fits); 18 million "
        f"weights, {demo['bench']['setting']['dtype']}, {machine['threads']} threads", "demo",
    )  # fmt: skip


def decoding() -> Sequence[str]:
    result = read("speed/decode-batches.json")
    case = next(m for m in result["measurements"] if m["case"] == "decode" and m["batch"] == 8)
    half = case["budgets"]["0.5"]
    return (
        "Does decoding of several sequences get faster on a CPU?", 'No: route prompts only (`phases="prefill"`).',
        f"{half['ratio']:.2f} ± {half['ratio_error']:.2f} of the dense time for 8 sequences at budget 0.5 "
        f"({result['machine']['device']}, width of Qwen2.5-0.5B, random weights)", "speed",
    )  # fmt: skip


def eager_decode(result: Any) -> tuple[float, float, float]:
    """Milliseconds of a decoding step on the GPU, dense and routed, both eager; and their ratio."""
    case = next(m for m in result["measurements"] if m["case"] == "decode")
    (routed,) = case["budgets"].values()
    dense, taken = case["dense_modes"]["eager"], routed["modes"]["eager"] * case["dense_ms"]
    return dense, taken, taken / dense


def gpu() -> Sequence[str]:
    result = read("speed/h100.json")
    dense, taken, ratio = eager_decode(result)
    case = next(m for m in result["measurements"] if m["case"] == "decode")
    compiled = case["budgets"]["0.5"]
    return (
        "Does decoding get faster on a GPU?", "Eagerly no, compiled yes.",
        f"eager {ratio:.1f} times the dense eager time ({taken:.1f} ms against {dense:.1f}); compiled "
        f"{compiled['ratio']:.3f} ± {compiled['ratio_error']:.3f} of compiled dense ({result['machine']['device']}, 1 "
        f"sequence, {case['setting']['depth']} layers of the width of Llama-3-8B, random weights)", "speed",
    )  # fmt: skip


def router_tuning() -> Sequence[str]:
    results = read("router_tuning/results.json")
    token, sequence = (
        tell_mean(tuning_report.over_dropping(results, "ffn", granularity), sign="+")
        for granularity in ("token", "sequence")
    )
    seeds = len(tuning_report.cell(results, "ffn", "token"))
    return (
        "Do trained routers alone beat the best sublayers dropped?", "Per token yes, whole sequences of FFNs no.",
        f"FFNs {token} nats per token, {sequence} per sequence; 5.2 million weights, {seeds} seeds", "router_tuning",
    )  # fmt: skip


def token_selective() -> Sequence[str]:
    results = selective_report.read("paper")
    soft, hard = selective_report.costs(results), selective_report.costs(results, hard=True)
    return (
        "Does a gate trained with soft scaling survive real skipping?", "No: the loss doubles.",
        f"{hard[2]} of loss at {hard[1]} of operations saved (soft, where nothing is skipped, {soft[2]}); 4.8 million "
        f"weights, {len(results['exit_sweeps'])} seeds", "token_selective",
    )  # fmt: skip
