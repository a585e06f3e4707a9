"""Which configs and columns the tables of a study's report have.

Config names are those of recipes/aux_losses.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """What a table is made of.

    Attributes:
        key: Short name.
        title: Heading.
        configs: Rows; those without a finished run are left out.
        columns: Keys of `tables.COLUMNS`; `hits` is one column per threshold, `difference` the
            endpoint's to the row's baseline.
        needs: The table is left out unless one of these configs has a finished run.
        note: Sentences under the table.
        baseline: Per config, the one that its difference is taken to.
    """

    key: str
    title: str
    configs: Sequence[str]
    columns: Sequence[str]
    needs: Sequence[str]
    note: str = ""
    baseline: Mapping[str, str] = field(default_factory=dict)


LOSSES = ("best", "avg first half", "avg whole", "endpoint")
RANK_SWEEP = ("util_only", "g3", "rank_100")
UTIL_SWEEP = ("rank_only", "util_010", "util_025", "util_050", "g3")
BUDGETS = ("b10", "b25", "b75")

LAYOUTS = (
    Layout(
        "table-1",
        "Table 1 of the paper: G1 against G3",
        ("g1", "g3", "g1_costmatch"),
        (*LOSSES, "hits", "grad norm", "trainable"),
        needs=("g1", "g3", "g1_costmatch"),
        note=(
            "Paper: best 5.0636 (G1), 5.0614 (G3); first half 5.0843, 5.0776; gradient norm 83.3, "
            "8.06."
        ),
    ),
    Layout(
        "table-2",
        "Table 2 of the paper: A1, no JEPA loss",
        ("g3", "a1", "g3_8e3", "a1_8e3"),
        (*LOSSES, "hits", "grad norm", "q distance", "q cosine", "score variance"),
        needs=("a1",),
        note=(
            "Paper: best 5.0614 (G3), 5.0735 (A1); A1 has distance 0.005 and a score variance of "
            "the order 0.00001."
        ),
    ),
    Layout(
        "table-3",
        "Table 3 of the paper: A2, deranged targets",
        ("g3", "a2"),
        (*LOSSES, "hits", "q distance", "q cosine", "score variance"),
        needs=("a2",),
        note="Paper: best 5.0614 (G3), 5.0645 (A2); A2 has distance 0.850.",
    ),
    Layout(
        "table-4",
        "Table 4 of the paper: A3, neither util nor rank",
        ("g1", "g3", "a3_g3", "a3_g1", "g1_8e3", "g3_8e3", "a3_g3_8e3", "a3_g1_8e3"),
        (*LOSSES, "hits", "grad norm", "gate prob", "train cost (paper)", "wall (s)", "CPU (s)"),
        needs=("a3_g1", "a3_g3"),
        note=(
            "Paper: best 5.0636 (G1), 5.0614 (G3), 5.0597 (A3-G3), 5.0589 (A3-G1); cost 1.513, "
            "1.527, 1.068, 1.054, target projection included; wall 2.87 h (G3), 1.75 h (A3-G3)."
        ),
    ),
    Layout(
        "table-5",
        "Table 5 of the paper: A4, weight of the JEPA loss",
        ("a4_025", "g3", "a4_200"),
        ("JEPA weight", *LOSSES),
        needs=("a4_025", "a4_200"),
        note="Paper: best 5.0606 (0.25), 5.0614 (1.0), 5.0617 (2.0).",
    ),
    Layout(
        "table-6",
        "Table 6 of the paper: 25 % budget",
        ("g1_b25", "g3_b25"),
        (*LOSSES, "hits", "grad norm"),
        needs=("g1_b25", "g3_b25"),
        note=(
            "Paper (2 seeds): best 5.0599 (G1), 5.0604 (G3); first half 5.0889, 5.0790; gradient "
            "norm 138.7, 47.8."
        ),
    ),
    Layout(
        "util-sweep",
        "Weight of the util loss",
        UTIL_SWEEP,
        ("util weight", *LOSSES, "difference", "grad norm"),
        needs=("util_010", "util_025", "util_050"),
        note="The rank weight stays at its default. Weight 0 is rank-only.",
        baseline=dict.fromkeys(UTIL_SWEEP, "rank_only"),
    ),
    Layout(
        "util-rank",
        "Util alone, rank alone",
        ("a3_g3", "util_only", "rank_only", "g3"),
        (*LOSSES, "difference", "grad norm", "oracle AUC"),
        needs=("util_only", "rank_only"),
        baseline=dict.fromkeys(("util_only", "rank_only", "g3"), "a3_g3"),
    ),
    Layout(
        "on-policy",
        "Oracle off-policy (all later layers full) and on-policy (later layers follow the gate)",
        ("a3_g1", "g1", "on_policy_g1", "a3_g3", "g3", "on_policy_g3", "on_policy_a1"),
        (
            *LOSSES,
            "difference",
            "grad norm",
            "oracle AUC",
            "oracle AUC, all-full",
            "wall (s)",
            "CPU (s)",
        ),
        needs=("on_policy_g1", "on_policy_g3"),
        note="A3 has no oracle.",
        baseline={
            "a3_g1": "g1",
            "on_policy_g1": "g1",
            "a3_g3": "g3",
            "on_policy_g3": "g3",
            "on_policy_a1": "g3",
        },
    ),
    Layout(
        "rank-sweep",
        "Weight of the rank loss",
        RANK_SWEEP,
        ("rank weight", *LOSSES, "difference", "grad norm", "oracle AUC"),
        needs=("rank_100",),
        note="The util weight stays at its default. Weight 0 is util-only.",
        baseline=dict.fromkeys(RANK_SWEEP, "util_only"),
    ),
    Layout(
        "a4-a3",
        "A4 without util and rank",
        ("a3_a4_025", "a3_g3", "a3_a4_200"),
        ("JEPA weight", *LOSSES, "difference", "q distance"),
        needs=("a3_a4_025", "a3_a4_200"),
        baseline=dict.fromkeys(("a3_a4_025", "a3_a4_200"), "a3_g3"),
    ),
    Layout(
        "a3-b25",
        "A3 at a budget of 25 %",
        ("g1_b25", "a3_g1_b25", "g3_b25", "a3_g3_b25"),
        (*LOSSES, "difference", "hits", "grad norm", "gate prob"),
        needs=("a3_g1_b25", "a3_g3_b25"),
        baseline={"a3_g1_b25": "g1_b25", "a3_g3_b25": "g3_b25"},
    ),
    Layout(
        "a5-a6",
        "A5 and A6: deranged targets and no JEPA loss, without util and rank",
        ("a3_g3", "a5", "a6", "a3_g1"),
        (*LOSSES, "difference", "q distance", "q cosine", "score variance"),
        needs=("a5", "a6"),
        baseline=dict.fromkeys(("a5", "a6", "a3_g1"), "a3_g3"),
    ),
    Layout(
        "budgets",
        "Budgets",
        ("g1_b10", "g3_b10", "g1_b25", "g3_b25", "g1", "g3", "g1_b75", "g3_b75"),
        ("budget", *LOSSES, "difference", "grad norm", "full ratio"),
        needs=tuple(f"{gate}_{budget}" for gate in ("g1", "g3") for budget in BUDGETS),
        baseline={"g3": "g1", **{f"g3_{budget}": f"g1_{budget}" for budget in BUDGETS}},
    ),
    Layout(
        "joint",
        "Joint training: the backbone trains too",
        ("joint_g3", "joint_a3_g3", "g3", "a3_g3"),
        (*LOSSES, "difference", "grad norm", "trainable"),
        needs=("joint_g3", "joint_a3_g3"),
        baseline={"joint_a3_g3": "joint_g3", "a3_g3": "g3"},
    ),
    Layout(
        "cgs",
        "Counterfactual gate supervision against its baseline, and against the same time without "
        "it",
        ("a3_g1", "cgs", "iso_cgs"),
        (
            "steps",
            *LOSSES,
            "difference",
            "oracle AUC",
            "frequent",
            "rare",
            "frequent - rare",
            "wall (s)",
            "CPU (s)",
        ),
        needs=("cgs", "iso_cgs"),
        note=(
            "Paper, on its own host (a gated n-gram memory): loss 4.4813, 4.4665 with supervision, "
            "4.4521 with the same time; oracle AUC 0.549, 0.528, 0.548. It splits hot and cold "
            "memory slots, not frequent and rare tokens."
        ),
        baseline={"cgs": "a3_g1", "iso_cgs": "a3_g1"},
    ),
    Layout(
        "iso-compute",
        "A3-G3 with the training time of G3",
        ("g3", "a3_g3", "iso_g3"),
        ("steps", *LOSSES, "difference", "wall (s)", "CPU (s)"),
        needs=("iso_g3",),
        note=(
            "The first half of a longer run ends later, so only the endpoint is compared like with "
            "like."
        ),
        baseline={"a3_g3": "g3", "iso_g3": "g3"},
    ),
    Layout(
        "distill",
        "Distillation from the dense model",
        ("a3_g1", "distill"),
        (*LOSSES, "difference", "frequent", "rare", "wall (s)", "CPU (s)"),
        needs=("distill",),
        baseline={"distill": "a3_g1"},
    ),
)
