"""Write `docs/claims.md`: every claim, baseline, ablation and data set of the papers,
from the committed result files.

python recipes/claims.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aux_losses.paper import proxy
from aux_losses.paper.claims import CLAIMS, QUESTIONS, Claim, Verdict, judge
from engram import report as engram_report
from lora import report as lora_report
from moe import verdicts as moe_verdicts
from pages import markdown_table, markdown_text
from router_tuning import report as tuning_report
from study.claims import Judged, claims_table, count_states, tell_states
from study.intervals import NOT_RUN, STATES
from study.results import read_results
from token_selective import report as selective_report

from hf_depthroute.files.strict_yaml import read_mapping

RECIPES = Path(__file__).parent
PAGE = RECIPES.parent / "docs" / "claims.md"
HEAD = """# The papers' claims

Every claim, baseline, ablation and data set of the five papers: what the paper reports, what came out here, and one of
four states.

* **agrees**, **disagrees**: the whole interval lies on the claimed side, or on the other one.
* **open**: neither. The last column says why: the seeds cannot decide, or the runs are of another regime than the
  paper's. In another regime nothing is decided, in either direction: agreement there counts as little as the opposite.
* **not run**: the last column says what it would take.

A difference is a mean over seeds with two intervals (Student's t). The first holds with 95 % for all rows of a table
together, and decides; the second, *alone*, holds with 95 % for its row only. Where only the second one decides, the
row says that the seeds cannot decide. A row without a number of the paper is a statement of this repository: another
baseline, or the same elsewhere. A number after ± is a standard error. No quality figure here is of a model above
18 million weights; token-selective routing has its paper's model and number of steps, all else is far smaller, and no
state on it says how a claim fares at its paper's size."""


@dataclass
class Paper:
    """A section of the page: lines of text and tables of claims, in their order."""

    title: str
    parts: list[str | list[Judged]] = field(default_factory=list)

    def rows(self) -> list[Judged]:
        return [row for part in self.parts if isinstance(part, list) for row in part]

    def lines(self) -> Iterable[str]:
        yield f"## {self.title}"
        for part in self.parts:
            yield ""
            yield from [part] if isinstance(part, str) else claims_table(part)


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())


def not_run(paper: str) -> list[Judged]:
    """The rows of `not_run.yaml`."""
    rows = read_mapping(RECIPES / "not_run.yaml")[paper]
    return [Judged(row["claim"], row["paper"], "", NOT_RUN, row["takes"]) for row in rows]


def sizes(here: Sequence[str], paper: Sequence[str]) -> str:
    """The size of an experiment beside the paper's: model, training, seeds."""
    rows = [[name, *pair] for name, *pair in zip(("model", "training", "seeds"), here, paper)]
    return "\n".join(markdown_table(["", "here", "paper"], rows))


def depth_routing() -> Paper:
    """arXiv:2604.17228, and CGS on depth gates."""
    names = {
        "long": "",
        "main": "800 steps",
        "budget_25": "25 %",
        "variants": "variants",
        "results": "pilot",
    }
    studies = {name: read_results(RECIPES / "aux_losses" / name) for name in names}
    main, short, _, variants, pilot = (study.info for study in studies.values())
    found: dict[str, tuple[Verdict, str]] = {}
    for study, size in zip(studies.values(), names.values()):
        for verdict in judge(study):
            found.setdefault(verdict.key, (verdict, size))

    def rows(claims: Sequence[Claim]) -> list[Judged]:
        judged = []
        for claim in claims:
            verdict, size = found[claim.key]
            here = f"{verdict.numbers} ({size})" if size else verdict.numbers
            texts = (markdown_text(text) for text in (claim.statement, claim.paper, here))
            judged.append(Judged(*texts, verdict.state, verdict.reason))
        return judged

    return Paper(
        '"Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228)',
        [
            sizes(
                [f"{main['base']['parameters'] / 1e6:.1f} M, last 3 of 6 layers routed",
                 f"{main['steps']:,} steps of {main['batch_size']} x {main['length']} (25 %, "
                 f"variants: {short['steps']}; pilots: {pilot['steps']})",
                 f"{len(main['seeds'])} (variants: {len(variants['seeds'])}, pilots: {len(pilot['seeds'])})"],
                ["157 M, last 4 of 12", "20,000 steps of 16 x 256", "3"],
            ),
            "The claims about CGS are those of the paper below, here on depth gates instead of its memory. "
            "[4,000 steps](../recipes/aux_losses/long/report.md), [800 steps](../recipes/aux_losses/main/report.md), "
            "[budget of 25 %](../recipes/aux_losses/budget_25/report.md), "
            "[variants](../recipes/aux_losses/variants/report.md), [pilots](../recipes/aux_losses/results/report.md): "
            "what is not from the 4,000 steps says so. Intervals hold for all statements of one study together.",
            rows(CLAIMS), "What the paper leaves open, and what it does not ask:", rows(QUESTIONS),
            not_run("depth_routing"),
            "Counted, not run, so in no state: the paper's proxy of a training step, in full FFNs per token and routed "
            "layer, at its shape. Its own numbers include the target projection of the JEPA loss, those of the studies "
            "here do not. Without the oracle a step of G3 costs "
            f"{proxy.saved():.1%} less by this formula, {proxy.saved(targets=True):.1%} less with the target "
            "projection; the paper has 30.0 %.",
            "\n".join(proxy.table()),
        ],
    )  # fmt: skip


def token_selective() -> Paper:
    results, small = (selective_report.read(study) for study in selective_report.FILES)
    runs = selective_report.seeds_of(results, "tsa")
    settings = runs[0]["settings"]
    return Paper(
        '"Adaptive Computation Depth via Learned Token Routing in Transformers" (arXiv:2605.05222)',
        [
            sizes(
                ["4.8 M, 6 layers, width 256",
                 f"{settings['steps']:,} steps of {settings['batch']} x {settings['length']}",
                 f"{len(runs)}; 1, of a smaller study, in the second table"],
                ["4.8 M, 6 layers, width 256", "5,000 steps of 64 x 128", "not stated"],
            ),
            selective_report.claims(results),
            selective_report.single_claims(results, small),
            not_run("token_selective"),
        ],
    )  # fmt: skip


def router_tuning() -> Paper:
    results, lora = read("router_tuning/results.json"), read("lora/results.json")
    experts = read("moe/results.json")
    seeds = len(tuning_report.cell(results, "attention", "sequence"))
    return Paper(
        '"Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in Transformers" '
        "(arXiv:2410.13184)",
        [
            sizes(
                ["5.2 M, 3 of 6 layers; experts: 3.7 M, all 4 layers, base of "
                 f"{experts['setting']['routing']['base']['steps']:,} steps",
                 f"{tuning_report.SAMPLES:,} sequences of 128 tokens, twice about half as many, routers only; "
                 "with LoRA 1,024",
                 f"{seeds}; with LoRA and of experts {len(lora['seeds'])}"],
                ["Llama-3-8B, 16 of 32 layers", "5,000 sequences and more, routers only", "1"],
            ),
            "Routers are compared with the best sublayers dropped at the same share, of the routed three and of all "
            "six; experts with Expert Drop, the paper's baseline, and with the best of four orders of dropping.",
            tuning_report.claims(results), tuning_report.COSTS,
            tuning_report.cost_claims(results, read("router_tuning/kv_cache.json")),
            lora_report.claims(lora), moe_verdicts.tuning_claims(experts),
            moe_verdicts.skipping_claims(experts), not_run("router_tuning"),
        ],
    )  # fmt: skip


def gate_supervision() -> Paper:
    steps, seeds, parts = [], [], []
    for name, text in engram_report.TEXTS.items():
        lengths = engram_report.by_steps(read(f"engram/{name}"))
        steps.append(" / ".join(f"{steps:,}" for steps in lengths))
        seeds.append(" / ".join(str(len(runs["memory"])) for runs in lengths.values()))
        parts.append(f"On {text}.")
        for count, runs in lengths.items():
            parts += [engram_report.heading(count, runs), engram_report.claims(runs)]
    return Paper(
        '"Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory"',
        [
            sizes(
                ["2 M and the table, 6 layers, width 128",
                 f"steps of 16 x 256, of two texts: {'; '.join(steps)}", "; ".join(seeds)],
                ["333 M, 12 layers, width 768", "5,000 steps of 16, 95 M tokens", "3"],
            ),
            *parts,
            not_run("gate_supervision"),
        ],
    )  # fmt: skip


def balancing() -> Paper:
    result = read("moe/results.json")
    setting = result["setting"]["pretraining"]
    return Paper(
        '"Auxiliary Loss Approaches and Their Cost" (a chapter on balancing experts)',
        [
            sizes(
                ["3.7 M, 8 experts, 2 of a token", f"steps of {setting['batch']} x 128: see below", "3"],
                ["a survey of Switch, GShard and DeepSeek-V3; its numbers are illustrative", "", ""],
            ),
            moe_verdicts.balance_claims(result),
            not_run("balancing"),
        ],
    )  # fmt: skip


def papers() -> list[Paper]:
    return [depth_routing(), token_selective(), router_tuning(), gate_supervision(), balancing()]


def counts(found: Sequence[Paper]) -> list[str]:
    """How many of each paper's claims have each state,
    and how many statements that are not the paper's."""
    rows = []
    for title, judged in [
        *((p.title, p.rows()) for p in found),
        ("all", [row for p in found for row in p.rows()]),
    ]:
        states = count_states(row.state for row in judged if not row.ours)
        rows.append(
            [
                title,
                *map(str, states.values()),
                tell_states(row.state for row in judged if row.ours),
            ]
        )
    return markdown_table(["paper", *STATES, "statements that are not the paper's"], rows)


def page() -> str:
    """`docs/claims.md`."""
    found = papers()
    return "\n".join(
        [HEAD, "", *counts(found), *(line for paper in found for line in ("", *paper.lines())), ""]
    )


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
