"""The papers' claims and open questions, and what a study says to each.

Claims are those of "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228; "the paper", its sections are named), and about CGS those of "Counterfactual Gate
Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory" (FARS,
Analemma; gitlab.com/fars-a/counterfactual-gate-supervision).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from study.claims import OURS, set_against, why_open
from study.intervals import AGREES, OPEN
from study.results import StudyRuns

from . import rules
from .rules import COLLAPSE_RATIO, CONSTANT_RATIO, GRADIENT_RATIO, Finding
from .tables import setting_value
from .values import training_clock

FIRST_HALF, WHOLE, BEST, ENDPOINT = "avg_first_half", "avg_whole", "best", "endpoint"
SOURCES = (  # what the report calls the paper
    'of "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" '
    '(arXiv:2604.17228) and, about CGS, of "Counterfactual Gate Supervision Does Not Fix Gating '
    'Credit Assignment in Engram-Style Conditional Memory"'
)
AUC, GRADIENT = "layers/oracle_auc", "grad_norm_mean"


@dataclass(frozen=True)
class Claim:
    """A claim or a question.

    Attributes:
        key: Short name.
        group: Heading it stands under.
        statement: What is claimed, in one sentence.
        paper: The paper's own numbers, or that it has none.
        needs: Configs that it compares; without one of them in the study the claim is not tested.
        judge: The rule, bound to the configs.
    """

    key: str
    group: str
    statement: str
    paper: str
    needs: Sequence[str]
    judge: Callable[[StudyRuns], Finding]


@dataclass(frozen=True)
class Verdict:
    """A claim with its state, the numbers as sentences, and the reason of an open one."""

    key: str
    group: str
    statement: str
    paper: str
    numbers: str
    state: str
    reason: str

    @property
    def sentence(self) -> str:
        """The numbers of both sides, and the reason."""
        reason = f" {self.reason[0].upper()}{self.reason[1:]}." if self.reason else ""
        return f"{self.numbers} Paper: {self.paper}.{reason}"


STANDARD = "Standard recipe: G1 against G3 (section 5.1)"
ABLATIONS = "Ablations of the JEPA loss: A1, A2, A4 (sections 5.2, 5.3, 5.5)"
WITHOUT = "Neither util nor rank: A3 (section 5.4)"
COST = "Time that the oracle takes (sections 4, 5.4)"
BUDGET = "25 % budget (section 5.6)"
CGS = "Counterfactual gate supervision"
OPEN_QUESTIONS = "Open questions"


def _lower(a: str, b: str, metric: str) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.lower(study, a, b, metric)


def _higher(a: str, b: str, metric: str) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.higher(study, a, b, metric)


def _equal(
    pairs: Sequence[tuple[str, str]], metric: str, margin: float | None = None
) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.equal(study, pairs, metric, margin)


def _not_worse(a: str, b: str, metric: str) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.not_worse(study, a, b, metric)


def _ratio(a: str, b: str, metric: str, at_least: float) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.ratio(study, a, b, metric, at_least)


def _saving_time(study: StudyRuns) -> Finding:
    return rules.saving(study, "a3_g3", "g3", training_clock(study), 0.195)


def _advantage_gone(study: StudyRuns) -> Finding:
    without = rules.not_worse(study, "a3_g1", "a3_g3", FIRST_HALF)
    if rules.lower(study, "g3", "g1", FIRST_HALF).answer == AGREES:
        return without
    return Finding(OPEN, f"{without.sentence} With util and rank G3 shows no advantage to lose.")


def _earlier(a: str, b: str) -> Callable[[StudyRuns], Finding]:
    return lambda study: rules.earlier(study, a, b)


def _calibrated(study: StudyRuns) -> Finding:
    return rules.calibrated(
        study, "a3_g3", "a3_g1", setting_value(study, "a3_g3", "adapter", "budget", 0.5)
    )


_BUDGET_PAIRS = [("g3_b10", "g1_b10"), ("g3_b25", "g1_b25"), ("g3", "g1"), ("g3_b75", "g1_b75")]
_BUDGET_CONFIGS = [name for pair in _BUDGET_PAIRS for name in pair]
_SMALL_WEIGHTS = ("util_010", "util_025", "util_050")

CLAIMS = (
    Claim("g3-early", STANDARD, "G3 has a lower average loss than G1 over the first half of training.",
          "-0.0067", ("g1", "g3"), _lower("g3", "g1", FIRST_HALF)),
    Claim("g3-hits", STANDARD, "G3 reaches the loss thresholds before G1.",
          "4,833 / 8,333 / 12,667 steps against 6,333 / 9,167 / 14,167", ("g1", "g3"), _earlier("g3", "g1")),
    Claim("g3-gradient", STANDARD, "G3 trains with a gradient norm several times lower than G1's.",
          "83.33 / 8.06 = 10.3", ("g1", "g3"), _ratio("g1", "g3", GRADIENT, GRADIENT_RATIO)),
    Claim("g3-endpoint", STANDARD, "G1 and G3 end at the same loss.",
          "-0.0021", ("g1", "g3"), _equal([("g3", "g1")], ENDPOINT)),
    Claim("g1-costmatch", STANDARD, "A G1 with as many parameters as G3 does not close the gap in the first half.",
          "one seed, best loss: 5.0628, between G1 (5.0642) and G3 (5.0613)",
          ("g1_costmatch", "g3"), _lower("g3", "g1_costmatch", FIRST_HALF)),
    Claim("a1-collapse", ABLATIONS, "Without the JEPA loss (A1) q_full and q_cheap collapse onto each other.",
          "distance 0.005, against 0.850 with the JEPA loss kept (A2)",
          ("g3", "a1"), _ratio("g3", "a1", "layers/q_distance", COLLAPSE_RATIO)),
    Claim("a1-scores", ABLATIONS, "Without the JEPA loss (A1) the scores become almost constant.",
          "variance of the order 0.00001", ("g3", "a1"), _ratio("g3", "a1", "layers/score_var", CONSTANT_RATIO)),
    Claim("a1-loss", ABLATIONS, "Without the JEPA loss (A1) the best loss is worse than G3's.",
          "+0.0121", ("g3", "a1"), _higher("a1", "g3", BEST)),
    Claim("a1-gradient", ABLATIONS, "Without the JEPA loss (A1) the gradient norm is lower than G3's.",
          "2.27 against 8.06", ("g3", "a1"), _lower("a1", "g3", GRADIENT)),
    Claim("a2-loss", ABLATIONS, "With deranged targets (A2) the best loss is worse than G3's.",
          "+0.0030, which is within its margin too", ("g3", "a2"), _higher("a2", "g3", BEST)),
    Claim("a2-mild", ABLATIONS, "Deranged targets (A2) cost less than no JEPA loss (A1).",
          "-0.0090", ("a1", "a2"), _lower("a2", "a1", BEST)),
    Claim("a2-collapse", ABLATIONS, "With deranged targets (A2) the predictor does not collapse.",
          "distance 0.850", ("g3", "a2"),
          lambda study: rules.ratio_below(study, "g3", "a2", "layers/q_distance", COLLAPSE_RATIO)),
    Claim("a4-flat", ABLATIONS, "The weight of the JEPA loss does not matter between 0.25 and 2.0 (A4).",
          "best loss -0.0008 (0.25) and +0.0003 (2.0) against weight 1",
          ("a4_025", "a4_200", "g3"), _equal([("a4_025", "g3"), ("a4_200", "g3")], BEST)),
    Claim("cosine-blind", ABLATIONS, "The distance of q_full and q_cheap shows the collapse, their cosine does not.",
          "cosine about 1.00 in all runs, collapsed or not",
          ("g3", "a1"), lambda study: rules.blind_cosine(study, "g3", "a1")),
    Claim("a3-g1-average", WITHOUT, "Without util and rank G1 has a lower average loss.",
          "-0.0080", ("g1", "a3_g1"), _lower("a3_g1", "g1", WHOLE)),
    Claim("a3-g1-best", WITHOUT, "Without util and rank G1 has a lower best loss.",
          "-0.0047, which is within its margin too", ("g1", "a3_g1"), _lower("a3_g1", "g1", BEST)),
    Claim("a3-g1-hits", WITHOUT, "Without util and rank G1 reaches the thresholds earlier.",
          "4,667 / 8,333 steps against 9,167 / 14,167", ("g1", "a3_g1"), _earlier("a3_g1", "g1")),
    Claim("a3-g3-average", WITHOUT, "Without util and rank G3 has a lower average loss.",
          "-0.0029, which is within its margin too", ("g3", "a3_g3"), _lower("a3_g3", "g3", WHOLE)),
    Claim("a3-g3-best", WITHOUT, "Without util and rank G3 has a lower best loss.",
          "-0.0018, which is within its margin too", ("g3", "a3_g3"), _lower("a3_g3", "g3", BEST)),
    Claim("a3-g3-hits", WITHOUT, "Without util and rank G3 reaches the thresholds earlier.",
          "6,167 / 9,833 steps against 8,333 / 12,667", ("g3", "a3_g3"), _earlier("a3_g3", "g3")),
    Claim("a3-equal-best", WITHOUT, "Without util and rank both gates reach the same best loss.",
          "-0.0004 to -0.0012 per seed", ("a3_g1", "a3_g3"), _equal([("a3_g1", "a3_g3")], BEST)),
    Claim("a3-equal-early", WITHOUT, "Without util and rank G3's advantage over G1 in the first half is gone.",
          "-0.0014", ("g1", "g3", "a3_g1", "a3_g3"), _advantage_gone),
    Claim("a3-gradient-g1", WITHOUT, "Without util and rank G1's gradient norm falls.",
          "83.33 / 0.48 = 174", ("g1", "a3_g1"), _ratio("g1", "a3_g1", GRADIENT, GRADIENT_RATIO)),
    Claim("a3-gradient-g3", WITHOUT, "Without util and rank G3's gradient norm falls.",
          "8.06 / 0.51 = 15.8", ("g3", "a3_g3"), _ratio("g3", "a3_g3", GRADIENT, GRADIENT_RATIO)),
    Claim("a3-probability", WITHOUT, "A3-G3's gate probability stays at the budget, A3-G1's does not.",
          "0.496 against 0.622 / 0.372 / 0.370 at a budget of 0.5", ("a3_g1", "a3_g3"), _calibrated),
    Claim("cost-clock", COST, "Without the oracle, training takes much less time by the clock.",
          "2.87 h to 1.75 h, -39 %", ("g3", "a3_g3"), _saving_time),
    Claim("b25-early", BUDGET, "At a budget of 25 % G3 has a lower average loss than G1 over the first half.",
          "-0.0099 (2 seeds)", ("g1_b25", "g3_b25"), _lower("g3_b25", "g1_b25", FIRST_HALF)),
    Claim("b25-hits", BUDGET, "At a budget of 25 % G3 reaches the loss thresholds before G1.",
          "3,500 / 7,750 steps against 4,500 / 7,500 (2 seeds)", ("g1_b25", "g3_b25"), _earlier("g3_b25", "g1_b25")),
    Claim("b25-gradient", BUDGET, "At a budget of 25 % G3 trains with a lower gradient norm than G1.",
          "47.80 against 138.65 (2 seeds)", ("g1_b25", "g3_b25"), _lower("g3_b25", "g1_b25", GRADIENT)),
    Claim("b25-endpoint", BUDGET, "At a budget of 25 % G1 and G3 end at the same loss.",
          "+0.0003, +0.0008 (2 seeds)", ("g1_b25", "g3_b25"), _equal([("g3_b25", "g1_b25")], ENDPOINT)),
    Claim("cgs-auc", CGS, "CGS lowers the gate's oracle AUC.",
          "-0.021 (0.549 to 0.528)", ("cgs", "a3_g1"), _lower("cgs", "a3_g1", AUC)),
    Claim("cgs-loss", CGS, "CGS lowers the endpoint loss at equal steps.",
          "-0.0148", ("cgs", "a3_g1"), _lower("cgs", "a3_g1", ENDPOINT)),
    Claim("cgs-compute", CGS, "The same time without CGS is at least as good, so that compute explains what CGS gains.",
          "-0.0144", ("iso_cgs", "cgs"), _not_worse("iso_cgs", "cgs", ENDPOINT)),
    Claim("cgs-iso-auc", CGS, "The same time without CGS leaves the oracle AUC as it was.",
          "-0.0015", ("iso_cgs", "a3_g1"), _equal([("iso_cgs", "a3_g1")], AUC, rules.AUC_MARGIN)),
    Claim("cgs-frequency", CGS, "CGS does not change the gap between frequent and rare tokens.",
          "+0.0003 in this sign, between hot and cold memory slots",
          ("cgs", "a3_g1"), _equal([("cgs", "a3_g1")], "frequent_minus_rare")),
)  # fmt: skip

QUESTIONS = (
    Claim("h3", OPEN_QUESTIONS, "H3: the harm of util comes from a weight that is too strong.",
          "not swept", ("g3", "a3_g3", *_SMALL_WEIGHTS),
          lambda study: rules.weight_too_strong(study, _SMALL_WEIGHTS, "g3", "a3_g3", WHOLE)),
    Claim("h1-g1", OPEN_QUESTIONS, "H1/H5: for G1 the on-policy oracle is better than the all-full one.",
          "not run", ("on_policy_g1", "g1"), _lower("on_policy_g1", "g1", WHOLE)),
    Claim("h1-g3", OPEN_QUESTIONS, "H1/H5: for G3 the on-policy oracle is better than the all-full one.",
          "not run", ("on_policy_g3", "g3"), _lower("on_policy_g3", "g3", WHOLE)),
    Claim("h1-harmless-g1", OPEN_QUESTIONS, "For G1 the on-policy oracle does no harm: not worse than no oracle.",
          "not run", ("on_policy_g1", "a3_g1"), _not_worse("on_policy_g1", "a3_g1", WHOLE)),
    Claim("h1-harmless-g3", OPEN_QUESTIONS, "For G3 the on-policy oracle does no harm: not worse than no oracle.",
          "not run", ("on_policy_g3", "a3_g3"), _not_worse("on_policy_g3", "a3_g3", WHOLE)),
    Claim("util-harm", OPEN_QUESTIONS, "Util alone does harm.",
          "not run", ("util_only", "a3_g3"), _higher("util_only", "a3_g3", WHOLE)),
    Claim("rank-harm", OPEN_QUESTIONS, "Rank alone does harm.",
          "not run", ("rank_only", "a3_g3"), _higher("rank_only", "a3_g3", WHOLE)),
    Claim("oracle-auc", OPEN_QUESTIONS, "Util and rank teach G3 a better order of tokens: its oracle AUC is higher.",
          "not measured", ("g3", "a3_g3"), _higher("g3", "a3_g3", AUC)),
    Claim("a5", OPEN_QUESTIONS, "A5: without util and rank, deranged targets are worse than paired ones.",
          "not run", ("a5", "a3_g3"), _higher("a5", "a3_g3", BEST)),
    Claim("a6", OPEN_QUESTIONS, "A6: without util and rank, the JEPA loss makes no difference (JEPA as a buffer).",
          "not run", ("a6", "a3_g3"), _equal([("a6", "a3_g3")], BEST)),
    Claim("rank-weight", OPEN_QUESTIONS, "H3 for rank: five times its weight raises G3's average loss.",
          "not swept", ("rank_100", "g3"), _higher("rank_100", "g3", WHOLE)),
    Claim("a1-on-policy", OPEN_QUESTIONS, "With on-policy labels the best loss without the JEPA loss is worse, too.",
          "not run", ("on_policy_a1", "on_policy_g3"), _higher("on_policy_a1", "on_policy_g3", BEST)),
    Claim("a4-a3", OPEN_QUESTIONS,
          "Without util and rank the weight of the JEPA loss does not matter between 0.25 and 2.0 either.",
          "not run", ("a3_a4_025", "a3_a4_200", "a3_g3"),
          _equal([("a3_a4_025", "a3_g3"), ("a3_a4_200", "a3_g3")], BEST)),
    Claim("a3-b25-g1", OPEN_QUESTIONS, "At a budget of 25 %, too, G1 has a lower average loss without util and rank.",
          "not completed", ("a3_g1_b25", "g1_b25"), _lower("a3_g1_b25", "g1_b25", WHOLE)),
    Claim("a3-b25-g3", OPEN_QUESTIONS, "At a budget of 25 %, too, G3 has a lower average loss without util and rank.",
          "not completed", ("a3_g3_b25", "g3_b25"), _lower("a3_g3_b25", "g3_b25", WHOLE)),
    Claim("a3-b25-equal", OPEN_QUESTIONS,
          "At a budget of 25 %, too, both gates reach the same best loss without util and rank.",
          "not completed", ("a3_g1_b25", "a3_g3_b25"), _equal([("a3_g1_b25", "a3_g3_b25")], BEST)),
    Claim("budget-early", OPEN_QUESTIONS, "G3 has a lower average loss than G1 over the first half at every budget.",
          "holds at 50 % and 25 %", _BUDGET_CONFIGS,
          lambda study: rules.lower_everywhere(study, _BUDGET_PAIRS, FIRST_HALF)),
    Claim("budget-endpoint", OPEN_QUESTIONS, "G1 and G3 end at the same loss at every budget.",
          "holds at 50 % and 25 %", _BUDGET_CONFIGS, _equal(_BUDGET_PAIRS, ENDPOINT)),
    Claim("joint", OPEN_QUESTIONS, "With the backbone trained too, removing util and rank still lowers the loss.",
          "not run", ("joint_g3", "joint_a3_g3"), _lower("joint_a3_g3", "joint_g3", WHOLE)),
    Claim("iso-g3", OPEN_QUESTIONS, "Given the training time of G3, A3-G3 ends at a lower loss than G3.",
          OURS, ("iso_g3", "g3"), _lower("iso_g3", "g3", ENDPOINT)),
    Claim("higher-rate", OPEN_QUESTIONS, "At four times the learning rate, too, G1 ends higher without util and rank.",
          OURS, ("g1_8e3", "a3_g1_8e3"), _higher("a3_g1_8e3", "g1_8e3", ENDPOINT)),
    Claim("higher-rate-g3", OPEN_QUESTIONS,
          "At four times the learning rate, too, G3 ends higher without util and rank.",
          OURS, ("g3_8e3", "a3_g3_8e3"), _higher("a3_g3_8e3", "g3_8e3", ENDPOINT)),
    Claim("higher-rate-gates", OPEN_QUESTIONS, "At four times the learning rate, too, G1 ends lower than G3.",
          OURS, ("g1_8e3", "g3_8e3"), _lower("g1_8e3", "g3_8e3", ENDPOINT)),
    Claim("higher-rate-a1", OPEN_QUESTIONS,
          "At four times the learning rate the best loss without the JEPA loss (A1) is lower than G3's.",
          OURS, ("a1_8e3", "g3_8e3"), _lower("a1_8e3", "g3_8e3", BEST)),
    Claim("rate", OPEN_QUESTIONS, "G1 has a lower average loss at the rate that is searched without util and rank.",
          OURS, ("g1", "g1_8e3"), _lower("g1", "g1_8e3", WHOLE)),
    Claim("rate-g3", OPEN_QUESTIONS, "G3 has a lower average loss at a quarter of the rate that is searched for it.",
          OURS, ("g3", "g3_8e3"), _lower("g3", "g3_8e3", WHOLE)),
    Claim("distill", OPEN_QUESTIONS, "Distillation from the dense model lowers the endpoint loss of A3-G1.",
          OURS, ("distill", "a3_g1"), _lower("distill", "a3_g1", ENDPOINT)),
)  # fmt: skip


def judge(study: StudyRuns) -> list[Verdict]:
    """Verdicts on all claims and questions whose configs the study has, in the report's order."""
    asked = [claim for claim in (*CLAIMS, *QUESTIONS) if _tested(study, claim)]
    together, alone = (
        replace(study, info={**study.info, "statements": count}) for count in (len(asked), 1)
    )
    elsewhere, verdicts = rules.other_regime(study), []
    for claim in asked:
        finding = claim.judge(together)
        reason = why_open(
            finding.answer, claim.judge(alone).answer, _common_seeds(study, claim), len(asked)
        )
        state, reason = set_against(finding.answer, reason, _regime_of(claim, elsewhere))
        verdicts.append(
            Verdict(
                claim.key,
                claim.group,
                claim.statement,
                claim.paper,
                finding.sentence,
                state,
                reason,
            )
        )
    return verdicts


def untested(study: StudyRuns) -> list[str]:
    """Statements that need a config that the study does not have."""
    return [claim.statement for claim in (*CLAIMS, *QUESTIONS) if not _tested(study, claim)]


def _tested(study: StudyRuns, claim: Claim) -> bool:
    return set(claim.needs) <= set(study.names)


def _regime_of(claim: Claim, elsewhere: str) -> str:
    """Why the study is of another regime than the claim; empty where the claim is of any."""
    if claim.group == CGS:
        return "a gate of depth, in the paper that of a memory"
    return "" if claim.group == COST or claim.paper == OURS else elsewhere


def _common_seeds(study: StudyRuns, claim: Claim) -> int:
    return len(set.intersection(*(set(study.runs.get(name, {})) for name in claim.needs)))
