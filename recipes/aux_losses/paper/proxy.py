"""The paper's proxy of what a training step costs, at the paper's shape,
without and with the target projection.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228), section 4 and table 4. This is arithmetic on its architecture; nothing is run.
"""

from __future__ import annotations

from pages import markdown_table
from study.metrics import training_ffn_ratio

PAPER = {"G1": 1.513, "G3": 1.527, "A3-G1": 1.054, "A3-G3": 1.068}
WIDTH, FFN_WIDTH, LAYERS, BUDGET, RANK, INTERVAL = 640, 2560, 4, 0.5, 80, 5
CONTEXT, SUMMARY, ACTION = 128, 64, 16
FFN, BRANCH = 2 * WIDTH * FFN_WIDTH, 2 * WIDTH * RANK  # weights
GATES = {
    "G1": WIDTH * WIDTH // 4 + WIDTH // 4,
    "G3": WIDTH * CONTEXT
    + 2 * ((CONTEXT + ACTION) * SUMMARY + SUMMARY**2)
    + 3 * SUMMARY * SUMMARY
    + SUMMARY,
}
TARGETS = 2 * WIDTH * SUMMARY  # the projection of both paths' outcomes, for the JEPA loss


def cost(name: str, targets: bool = False) -> float:
    """Cost of a training step in full FFNs per token and routed layer; `name` is one of `PAPER`."""
    kind = name.removeprefix("A3-")
    oracle = "all_full" if name == kind else "none"
    projected = TARGETS / FFN if targets and kind == "G3" else 0.0
    return training_ffn_ratio(
        LAYERS, BRANCH / FFN, GATES[kind] / FFN, BUDGET, oracle, INTERVAL, targets=projected
    )


def saved(targets: bool = False) -> float:
    """The part of a G3 step's cost that removing the oracle saves."""
    return 1 - cost("A3-G3", targets) / cost("G3", targets)


def table() -> list[str]:
    rows = [
        [name, f"{paper:.3f}", f"{cost(name):.3f}", f"{cost(name, targets=True):.3f}"]
        for name, paper in PAPER.items()
    ]
    return markdown_table(["config", "paper", "here", "here, with the target projection"], rows)
