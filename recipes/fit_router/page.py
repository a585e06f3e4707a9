"""Fitted routers on the page of results."""

from __future__ import annotations

from typing import Any

from fit_router import branch_report
from fit_router import report as fit_report
from study.page import Study, read

# Kinds of gates that are learned.
LEARNED = {"recoverability", "similarity", "oracle", "jepa", "linear"}


def study() -> Study:
    """Routers without training beside the best static subset."""
    results = read("fit_router/results.json")

    def less(found: dict[str, Any], trained: bool, gates: str = "mlp") -> str:
        """The parts spared, by the number of layers' worth of calls skipped."""
        points = fit_report.summary(found, trained)
        routed = [
            points[gates, count]
            for count in sorted(count for kind, count in points if kind == gates)
        ]
        return " / ".join(f"{fit_report.spared(points, point):.0%}" for point in routed)

    said, trained = (
        [],
        [base for base, found in results.items() if fit_report.summary(found, trained=True)],
    )
    for base, found in results.items():
        skipped = [
            f"{1 - row['share']:.0%}"
            for (kind, _), row in sorted(fit_report.summary(found).items())
            if kind == "static"
        ]
        after = f", {less(found, True)} with both sides trained" if base in trained else ""
        learned = {kind for kind, _ in fit_report.summary(found, True)} & LEARNED
        best = max((less(found, True, kind) for kind in learned), default="")
        after += f" (at best {best} with gates learned from random weights)" if learned else ""
        points = fit_report.summary(found)
        tables = [
            f"{fit_report.spared(points, row):.0%}"
            for (kind, _), row in sorted(points.items())
            if kind == "static_memory" and row["seeds"] > 2
        ]
        after += (
            f"; layers left out lose {' / '.join(tables)} less with a table of n-grams in their "
            "place"
            if tables
            else ""
        )
        said.append(
            f"{fit_report.TITLES[base]} {less(found, False)} less at {' / '.join(skipped)} "
            f"skipped{after}"
        )
    said.append(branch_report.in_brief(results))
    intro = (
        "`fit_router` beside the best of all subsets of FFNs to leave out, with the same branches "
        "fitted on the same 16,384 tokens. Loss over the dense base in nats, on text that neither "
        "side saw: mean ± standard error over "
        'seeds (their number); "skipped" is the share of FFN calls really skipped, "less" how much '
        "is spared of what "
        "leaving layers out loses at that share, linear between its points, as where one layer "
        "more is left out in a "
        'part of the texts; "p" how likely that is by '
        "chance, by a t-test of the differences within each seed, times the number of comparisons "
        "on that base."
    )
    section = [intro, "", "Without training:", "", *fit_report.table(results)]
    if trained:
        section += ["", fit_report.TRAINED, "", *fit_report.table(results, trained=True)]
    section += ["", fit_report.TUNED, "", *fit_report.tuning_table(results)]
    section += ["", *branch_report.section(results, read("fit_router/branch_time.json"))]
    phases = read("fit_router/phases.json")
    behind = (
        f"Loss of the 64 tokens behind a prompt of {phases['prompt']}, "
        f"{fit_report.TITLES[phases['base']]}, without training, and time to the first token of 4 "
        f"prompts of 1,020 tokens over the dense base's ({phases['machine']['device']}, "
        f"{phases['machine']['threads']} threads):"
    )
    section += ["", behind, "", *fit_report.phases_table(phases)]
    return Study(
        "Routing against leaving layers out", "fit_router", "python recipes/fit_router/run.py",
        "what leaving out the best layers adds to the loss, against MLP gates: " + "; ".join(said),
        section,
    )  # fmt: skip
