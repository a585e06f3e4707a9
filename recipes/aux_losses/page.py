"""The auxiliary losses on the page of results."""

from __future__ import annotations

from aux_losses.paper.claims import judge
from aux_losses.paper.values import fixed, spread, values
from pages import markdown_table
from study.claims import tell_states
from study.page import RECIPES, Study, read
from study.results import StudyRuns, read_results


def study() -> Study:
    """The auxiliary-loss studies, and what a training step costs."""
    names = ("long", "main", "budget_25", "variants", "results")
    study, short, quarter, variants, pilots = (
        read_results(RECIPES / "aux_losses" / name) for name in names
    )
    steps = read("aux_losses/step_cost.json")
    rows, first = [], {}
    for one in (short, quarter, variants):
        first |= {name: one for name in one.names if name not in first}
    for name, one in (*((name, study) for name in study.names), *first.items()):
        cells = [
            list(values(one, name, metric).values())
            for metric in ("avg_first_half", "endpoint", "layers/gate_prob")
        ]
        config, seeds = one.config(name), str(len(one.seeds))
        rows.append(
            [str(config["label"]), str(config["about"]), f"{one.info['steps']:,}", seeds]
            + [spread(cell, fixed(places)) for cell, places in zip(cells, (4, 4, 3))]
        )

    def counted(one: StudyRuns) -> str:
        return tell_states(verdict.state for verdict in judge(one))

    def sized(one: StudyRuns) -> str:
        return f"{len(one.names)} configs x {len(one.seeds)} seeds"

    small, paper = (
        steps[key] for key in ("study base, last 3 of 6 layers", "paper shape, last 4 of 12 layers")
    )
    mlp, jepa, gate = (
        [f"{case['ratios'][key]['median']:.2f}" for case in (small, paper)]
        for key in ("G1 all_full / G1", "G3 all_full / G3", "G3 / G1")
    )
    info = study.info
    fewer, pilot_size = (f"{sized(one)} of {one.info['steps']} steps" for one in (short, pilots))
    brief = (
        f"{sized(study)} of {info['steps']:,} steps: of the papers' claims and open questions "
        f"{counted(study)}; {fewer}: {counted(short)}; at a budget of 25 %, {sized(quarter)}: "
        f"{counted(quarter)}; variants, {sized(variants)}: {counted(variants)}; pilots, "
        f"{pilot_size}: {counted(pilots)}"
    )
    section = [
        (
            f"{sized(study)} on the embedded base, last 3 of 6 FFNs routed at budget 0.5, "
            f"{info['steps']:,} steps; dense loss {info['base']['dense_loss']:.3f}. Of the papers' "
            f"claims (arXiv:2604.17228 and CGS) and open questions: {counted(study)}; each with "
            "its interval in [the report](../recipes/aux_losses/long/report.md) and on [the page "
            f"of claims](claims.md). [Fewer steps](../recipes/aux_losses/main/report.md), {fewer}: "
            f"{counted(short)}. [At a budget of 25 %](../recipes/aux_losses/budget_25/report.md), "
            f"{sized(quarter)}: {counted(quarter)}. "
            f"[Variants](../recipes/aux_losses/variants/report.md), {sized(variants)}: "
            f"{counted(variants)}. [Pilots](../recipes/aux_losses/results/report.md), "
            f"{pilot_size}: {counted(pilots)}. Top-k loss in nats, mean ± standard error over "
            f"seeds. A training step with the oracle takes {mlp[0]} of the time without it with "
            f"the MLP gate, {jepa[0]} with the JEPA gate, and one with the JEPA gate {gate[0]} of "
            f"one with the MLP gate ({mlp[1]}, {jepa[1]} and {gate[1]} at that paper's shape)."
        ),
        "",
        *markdown_table(
            [
                "config",
                "what",
                "steps",
                "seeds",
                "loss, first half",
                "loss at the end",
                "gate probability",
            ],
            rows,
        ),
    ]
    command = "python recipes/study run recipes/aux_losses/long.yaml --out OUT --jobs 2"
    return Study("Auxiliary losses", "aux_losses", command, brief, section)
