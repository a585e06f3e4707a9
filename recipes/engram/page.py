"""Counterfactual gate supervision on the page of results."""

from __future__ import annotations

from engram import report as engram_report
from study.claims import tell_states
from study.intervals import MIN_SEEDS, tell_mean
from study.page import Study, read


def over_memory(runs: engram_report.Runs) -> str:
    """What kinds of training have of the memory alone, as means over the seeds that both have."""
    memory = runs["memory"]

    def over(kind: str, measure: engram_report.Measure) -> str:
        seeds = sorted(set(memory) & set(runs[kind]))
        return tell_mean(
            [measure(runs[kind][seed]) - measure(memory[seed]) for seed in seeds], sign="+"
        )

    def of_seeds(kind: str) -> str:
        return "" if len(runs[kind]) == len(memory) else f", {len(runs[kind])} seeds"

    return "; ".join(
        f"{engram_report.KINDS[kind].removeprefix('memory, ')}{of_seeds(kind)} "
        f"{over(kind, engram_report.loss)} (AUC {over(kind, engram_report.area)})"
        for kind in runs
        if kind != "memory"
    )


def study() -> Study:
    """Counterfactual gate supervision on a memory that is trained from scratch."""
    told = []
    for name, text in engram_report.TEXTS.items():
        steps, runs = next(iter(engram_report.by_steps(read(f"engram/{name}")).items()))
        states = tell_states(row.state for row in engram_report.claims(runs))
        found = (
            over_memory(runs) if len(runs["memory"]) >= MIN_SEEDS else "too few to decide anything"
        )
        told.append(
            f"{steps:,} steps on {text}, {len(runs['memory'])} seeds: {found} (claims: {states})"
        )
    brief = (
        "a Llama of width 128 and its memory from scratch; loss, and how well the gate tells "
        f"where the memory helps (AUC), over the memory alone, ± standard errors. {'. '.join(told)}"
    )
    command = "python recipes/engram/run.py --size packages --kinds memory cgs"
    section = [
        '"Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style '
        'Conditional Memory" '
        "again, at the width of 128, in steps of 16 x 256 tokens of Python. Mean ± standard error "
        "(seeds); AUC is how well `alpha` tells where the memory helps, by layer and their mean; "
        "hot tokens are the half whose slots are looked up most often.",
        "",
        *engram_report.by_text(engram_report.table),
        "",
        engram_report.DIFFERENCES,
        "",
        *engram_report.by_text(engram_report.differences),
    ]
    return Study("Counterfactual gate supervision", "engram", command, brief, section)
