"""Write `docs/claims.md`: every claim of the papers that a study here tests, from the committed result files.

python recipes/claims.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aux_losses.paper.claims import CLAIMS, QUESTIONS, Claim, Verdict, judge
from engram import report as engram_report
from lora import report as lora_report
from moe import verdicts as moe_verdicts
from router_tuning import report as tuning_report
from token_selective import report as selective_report

from hf_depthroute.files.markdown import markdown_table, markdown_text
from hf_depthroute.report.study_results import read_results

RECIPES = Path(__file__).parent
PAGE = RECIPES.parent / "docs" / "claims.md"
HEAD = """# The papers' claims

Every claim that a study of this repository tests: what the paper reports, what came out here, and how large the
experiment was. A difference is a mean over seeds with an interval; those of a table hold with 95 % for all of its
statements together. *Holds*, *reproduced*, *supported*: the whole interval is on the claimed side. *Opposite*,
*reversed*, *contradicted*: it is on the other. *Not comparable*: it is on the other side, and skipping is not nearly
free here as it is in the paper. *Open*, *not detectable here*: neither. *So here*, *not so here*: whether the numbers
of one seed, or times, are as stated; they have no interval. *In part*: the effect is there, but smaller.
Token-selective routing has its paper's model and number of steps; all else is far smaller, and no verdict on it says
how a claim fares at its paper's size."""


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())


def sizes(here: Sequence[str], paper: Sequence[str]) -> list[str]:
    """The size of an experiment beside the paper's: model, training, seeds."""
    rows = [[name, *pair] for name, *pair in zip(("model", "training", "seeds"), here, paper)]
    return [*markdown_table(["", "here", "paper"], rows), ""]


def depth_routing() -> list[str]:
    """arXiv:2604.17228, and CGS on depth gates."""
    names = {"long": "", "main": "800 steps", "budget_25": "25 %", "variants": "variants", "results": "pilot"}
    studies = {name: read_results(RECIPES / "aux_losses" / name) for name in names}
    main, short, _, variants, pilot = (study.info for study in studies.values())
    found: dict[str, tuple[Verdict, str]] = {}
    for study, size in zip(studies.values(), names.values()):
        for verdict in judge(study):
            found.setdefault(verdict.key, (verdict, size))

    def table(head: str, claims: Sequence[Claim]) -> list[str]:
        rows = []
        for claim in claims:
            verdict, size = found[claim.key]
            numbers = verdict.sentence.removesuffix(f" Paper: {claim.paper}.")
            rows.append([markdown_text(text) for text in (claim.statement, claim.paper, numbers, verdict.word, size)])
        return markdown_table([head, "paper", "here", "verdict", ""], rows)

    return [
        '## "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228)',
        "",
        *sizes(
            [f"{main['base']['parameters'] / 1e6:.1f} M, last 3 of 6 layers routed",
             f"{main['steps']:,} steps of {main['batch_size']} x {main['length']} (25 %, "
             f"variants: {short['steps']}; pilots: {pilot['steps']})",
             f"{len(main['seeds'])} (variants: {len(variants['seeds'])}, pilots: {len(pilot['seeds'])})"],
            ["157 M, last 4 of 12", "20,000 steps of 16 x 256", "3"],
        ),
        "The claims about CGS are those of the paper below, here on depth gates instead of its memory. "
        "[4,000 steps](../recipes/aux_losses/long/report.md), [800 steps](../recipes/aux_losses/main/report.md), "
        "[budget of 25 %](../recipes/aux_losses/budget_25/report.md), "
        "[variants](../recipes/aux_losses/variants/report.md), [pilots](../recipes/aux_losses/results/report.md): the "
        "last column says where a verdict is not from the 4,000 steps. Intervals hold for all statements of one study "
        "together.",
        "",
        *table("claim", CLAIMS),
        "",
        "What the paper leaves open, and what it does not ask:",
        "",
        *table("question", QUESTIONS),
    ]  # fmt: skip


def token_selective() -> list[str]:
    results, small = (selective_report.read(study) for study in selective_report.FILES)
    runs = selective_report.seeds_of(results, "tsa")
    settings = runs[0]["settings"]
    return [
        '## "Adaptive Computation Depth via Learned Token Routing in Transformers" (arXiv:2605.05222)',
        "",
        *sizes(
            ["4.8 M, 6 layers, width 256", f"{settings['steps']:,} steps of {settings['batch']} x {settings['length']}",
             f"{len(runs)}; 1, of a smaller study, in the second table"],
            ["4.8 M, 6 layers, width 256", "5,000 steps of 64 x 128", "not stated"],
        ),
        *selective_report.claims_table(results),
        "",
        *selective_report.single_claims(results, small),
    ]  # fmt: skip


def router_tuning() -> list[str]:
    results, lora = read("router_tuning/results.json"), read("lora/results.json")
    experts = read("moe/results.json")
    seeds = len(tuning_report.cell(results, "attention", "sequence"))
    return [
        '## "Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in Transformers" '
        "(arXiv:2410.13184)",
        "",
        *sizes(
            ["5.2 M, 3 of 6 layers; experts: 3.7 M, all 4 layers, base of "
             f"{experts['setting']['routing']['base']['steps']:,} steps",
             f"{tuning_report.SAMPLES:,} sequences of 128 tokens, twice about half as many, routers only; "
             "with LoRA 1,024",
             f"{seeds}; with LoRA and of experts {len(lora['seeds'])}"],
            ["Llama-3-8B, 16 of 32 layers", "5,000 sequences and more, routers only", "1"],
        ),
        *tuning_report.claims_table(results),
        "",
        tuning_report.COSTS,
        "",
        *tuning_report.cost_table(results, read("router_tuning/kv_cache.json")),
        "",
        *lora_report.claims_table(lora),
        "",
        *moe_verdicts.tuning_table(experts),
    ]  # fmt: skip


def gate_supervision() -> list[str]:
    steps, seeds = [], []
    for name in engram_report.TEXTS:
        lengths = engram_report.by_steps(read(f"engram/{name}"))
        steps.append(" / ".join(f"{steps:,}" for steps in lengths))
        seeds.append(" / ".join(str(len(runs["memory"])) for runs in lengths.values()))
    return [
        '## "Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory"',
        "",
        *sizes(
            ["2 M and the table, 6 layers, width 128",
             f"steps of 16 x 256, of two texts: {'; '.join(steps)}", "; ".join(seeds)],
            ["333 M, 12 layers, width 768", "5,000 steps of 16, 95 M tokens", "3"],
        ),
        *engram_report.by_text(engram_report.differences),
    ]  # fmt: skip


def balancing() -> list[str]:
    result = read("moe/results.json")
    setting = result["setting"]["pretraining"]
    return [
        "## Auxiliary losses for balancing experts",
        "",
        *sizes(
            ["3.7 M, 8 experts, 2 of a token", f"steps of {setting['batch']} x 128: see below", "see below"],
            ["a survey; Switch, GShard, DeepSeek-V3", "", ""],
        ),
        *moe_verdicts.balance_claims(result),
    ]  # fmt: skip


def page() -> str:
    """`docs/claims.md`."""
    parts = [depth_routing(), token_selective(), router_tuning(), gate_supervision(), balancing()]
    return "\n".join([HEAD, *(line for part in parts for line in ("", *part)), ""])


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
