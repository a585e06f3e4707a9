"""The MLP gate beside the JEPA gate, in every committed comparison:
a part of the page about gates."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter

from aux_losses.paper.values import values
from fit_router import report as fit_report
from pages import markdown_table
from study.page import RECIPES, read
from study.results import StudyRuns, read_results


@dataclasses.dataclass(frozen=True)
class Duel:
    """The MLP gate beside the JEPA gate: loss by seed at one budget of one study."""

    study: str
    budget: float
    mlp: dict[int, float]
    jepa: dict[int, float]

    def difference(self) -> float:
        return statistics.fmean(self.jepa.values()) - statistics.fmean(self.mlp.values())

    def lower(self) -> tuple[str, int]:
        """The gate with the lower mean loss, and in how many seeds it is the lower one."""
        sign = 1 if self.difference() > 0 else -1
        return ("MLP" if sign > 0 else "JEPA"), sum(
            sign * (self.jepa[s] - self.mlp[s]) > 0 for s in self.mlp
        )

    def row(self) -> list[str]:
        winner, seeds = self.lower()
        means = [f"{statistics.fmean(losses.values()):.3f}" for losses in (self.mlp, self.jepa)]
        lower = f"{winner}, {seeds} of {len(self.mlp)}"
        return [self.study, f"{self.budget:g}", *means, f"{self.difference():+.3f}", lower]


def duels() -> list[Duel]:
    """Every committed comparison of the two gates that differ in nothing else."""
    found = []
    stories = read("stories260k/results.json")["runs"]
    for gate_input in ("normed", "residual"):
        for budget in (0.75, 0.5, 0.25):
            losses: list[dict[int, float]] = [
                {
                    run["seed"]: next(
                        row["loss"]
                        for row in run["rows"]
                        if (row["rule"], row["budget"]) == ("topk", budget)
                    )
                    for run in stories
                    if (run["gate"], run["gate_input"]) == (gate, gate_input)
                }
                for gate in ("mlp", "jepa")
            ]
            found.append(Duel(f"stories260k, input {gate_input}", budget, *losses))
    runs = fit_report.runs_of(read("fit_router/results.json")["stories260k"], trained=True)
    for count in (1, 2):
        both = sorted(runs["oracle", count].keys() & runs["jepa", count].keys())
        losses = [
            {seed: runs[kind, count][seed]["more"] for seed in both} for kind in ("oracle", "jepa")
        ]
        found.append(
            Duel(
                "fit_router, stories260k, loss over dense, oracle's labels", 1 - count / 5, *losses
            )
        )
    study = read_results(RECIPES / "aux_losses/results")
    configs = [(0.75, "{}_b75"), (0.5, "{}"), (0.25, "{}_b25"), (0.1, "{}_b10")]
    pairs = [("aux_losses, pilots, oracle's labels", *case) for case in configs]
    pairs.append(("aux_losses, pilots, no labels", 0.5, "a3_{}"))
    found += [gates_of(study, *pair) for pair in pairs]
    tuned_pairs = (
        ("main", 0.5, "rate 8e-3", ""),
        ("budget_25", 0.25, "rate 8e-3", "_b25"),
        ("long", 0.5, "rate 2e-3", ""),
        ("long", 0.5, "rate 8e-3", "_8e3"),
    )
    for folder, budget, rate, behind in tuned_pairs:
        tuned = read_results(RECIPES / "aux_losses" / folder)
        title = f"aux_losses, {rate}, {tuned.info['steps']:,} steps, "
        found.append(gates_of(tuned, title + "oracle's labels", budget, "{}" + behind))
        found.append(gates_of(tuned, title + "no labels", budget, "a3_{}" + behind))
    return found


def gates_of(study: StudyRuns, title: str, budget: float, name: str) -> Duel:
    """The two gates of an auxiliary-loss study; `name` is that of both configs but for the gate."""
    return Duel(
        title,
        budget,
        *(dict(values(study, name.format(gate), "endpoint")) for gate in ("g1", "g3")),
    )


def gate_comparison() -> list[str]:
    """Which gate ended lower, in every committed comparison: a part of the page about gates."""
    rows = duels()
    plain, labelled = (
        [duel for duel in rows if ("oracle's" in duel.study) == taught] for taught in (False, True)
    )
    counts = [Counter(duel.lower()[0] for duel in group)["MLP"] for group in (plain, labelled)]
    return [
        (
            "Neither is ahead of the other everywhere. Trained without the oracle's labels the "
            f"MLP gate ended lower in {counts[0]} of {len(plain)} comparisons and the JEPA gate in "
            f"{len(plain) - counts[0]}; with the oracle's labels the MLP gate in {counts[1]} of "
            f"{len(labelled)}. Mean loss in nats over seeds; the last column says in how many "
            "seeds the lower one is lower:"
        ),
        "",
        *markdown_table(
            ["study", "budget", "MLP", "JEPA", "JEPA - MLP", "lower, in seeds"],
            [duel.row() for duel in rows],
        ),
    ]
