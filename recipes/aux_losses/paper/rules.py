"""Rules that turn paired differences into an answer: the statement holds, its opposite holds,
or neither shows.

Every rule compares runs of the same seed, needs at least `MIN_SEEDS` common seeds, and returns a
`Finding` whose sentence holds the numbers behind the answer. What it goes by is an interval of
Student's t over the seeds, as wide as makes all statements of a report hold at once (`statements`
in the study's `info`). `describe_rules` says the same in words, for the report. "The paper" is
"Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from study.intervals import AGREES, DISAGREES, MIN_SEEDS, OPEN, Interval, answer, interval
from study.results import StudyRuns

from .values import METRIC_NAMES, NEVER, fixed, hits, mean, paired, signed, significant, values

AUC_MARGIN = 0.01
GRADIENT_RATIO = 3.0
COLLAPSE_RATIO = 10.0
CONSTANT_RATIO = 100.0
PROBABILITY_MARGIN = 0.05
SAME_COSINE, OTHER_COSINE = 0.01, 0.1
NEARLY_FREE = 0.02  # nats over the dense base
# The first of these that the study has tells what skipping costs.
PLAIN = ("a3_g1", "a3_g3", "g1", "g3")
BUDGETS = ("", "_b25")  # at a budget of 50 %, or, where the study has none of those, of 25 %


@dataclass(frozen=True)
class Finding:
    """`answer` (AGREES, DISAGREES or OPEN) and one or more sentences with the
    numbers it rests on."""

    answer: str
    sentence: str


def over_seeds(study: StudyRuns, numbers: Sequence[float]) -> Interval:
    """The interval around the mean of one number per seed."""
    return interval(numbers, study.info.get("statements", 1))


def describe_rules(study: StudyRuns, statements: int) -> list[str]:
    """The rules in words."""
    margin = study.info["margin"]
    return [
        (
            "Runs are compared in pairs of the same seed. A mean is followed by its interval, of "
            f"Student's t over the seeds; those of all {statements} statements hold together with "
            "95 % (Bonferroni), and decide. The second interval holds with 95 % for its statement "
            f"alone. Where only that one decides, and with fewer than {MIN_SEEDS} common seeds, "
            "the seeds cannot decide."
        ),
        (
            "Lower, higher: when the whole interval is. In the claimed direction the study agrees, "
            "in the other one it disagrees; else the statement is open."
        ),
        (
            f"Equal loss: agrees when the whole interval lies within {margin:g} nats, the paper's "
            "own margin; disagrees when it lies outside. Not worse: the same, with only a higher "
            "loss held against it."
        ),
        (
            "In another regime than the paper's nothing is decided, in either direction: a "
            "statement about the paper's models then stays open, and the reason says what shows "
            "here. The regime is that of the paper where skipping is nearly free, which is where "
            f"A3-G1 ends within {NEARLY_FREE:g} nats of the dense base; the paper gives no dense "
            "loss, but its losses at 50 % and 25 % are the same. Time by the clock, and "
            "statements that are not the paper's, stand for themselves."
        ),
        (
            "Thresholds: the mean over the thresholds of how many times as many steps were needed "
            "to get under them, counting one that was never reached as reached at the end. A "
            "difference of one evaluation counts as none."
        ),
        (
            f"Gradient norm: agrees when the ratio is at least {GRADIENT_RATIO:g} in the whole "
            f"interval. Collapse: the same with a q distance {COLLAPSE_RATIO:g} times that of the "
            f"other; constant scores with a variance ratio of {CONSTANT_RATIO:g}. Disagrees: a "
            "ratio below 1 in the whole interval. Intervals are of the logarithms. That A2 does "
            "not collapse: agrees when the whole interval is under the bound."
        ),
        (
            "Cosine: where the distance shows a collapse, the cosine is blind when it moves by at "
            f"most {SAME_COSINE:g}, and not blind when it moves by more than {OTHER_COSINE:g}."
        ),
        (
            "Time: agrees when at least half of the paper's saving shows; disagrees when nothing "
            "is saved."
        ),
        (
            f"Oracle AUC: as losses, with a margin of {AUC_MARGIN:g}. Gate probability: near the "
            f"budget means within {PROBABILITY_MARGIN:g}."
        ),
        (
            "Too strong a weight: agrees when full weight is worse than no util and rank while "
            "some smaller weight is not worse; disagrees when every smaller weight is worse as "
            "well."
        ),
        "Open questions are answered by the same rules.",
    ]


def other_regime(study: StudyRuns) -> str:
    """Why runs of this study are of another regime than the paper's;
    empty where skipping costs next to nothing."""
    dense = study.info.get("base", {}).get("dense_loss")
    names = [f"{name}{budget}" for budget in BUDGETS for name in PLAIN]
    ends = next((found for name in names if (found := values(study, name, "endpoint"))), {})
    if dense is None or not ends:
        return "what skipping costs is not known"
    cost = mean(list(ends.values())) - dense
    return (
        ""
        if cost <= NEARLY_FREE
        else f"skipping costs {cost:.2f} nats, in the paper next to nothing"
    )


def lower(study: StudyRuns, a: str, b: str, metric: str) -> Finding:
    """Whether `a` is detectably lower than `b`."""
    found = difference(study, a, b, metric)
    return Finding(answer(found, "lower"), _tell(study, a, b, metric, found))


def higher(study: StudyRuns, a: str, b: str, metric: str) -> Finding:
    """Whether `a` is detectably higher than `b`."""
    found = difference(study, a, b, metric)
    return Finding(answer(found, "higher"), _tell(study, a, b, metric, found))


def equal(
    study: StudyRuns, pairs: Sequence[tuple[str, str]], metric: str, margin: float | None = None
) -> Finding:
    """Whether the interval of every pair lies within the margin."""
    limit = study.info["margin"] if margin is None else margin
    answers, sentences = [], []
    for a, b in pairs:
        found = difference(study, a, b, metric)
        answers.append(answer(found, "equal", limit))
        sentences.append(_tell(study, a, b, metric, found))
    return Finding(_all(answers), " ".join(sentences))


def not_worse(study: StudyRuns, a: str, b: str, metric: str) -> Finding:
    """Whether `a` is above `b` by no more than the margin; more than that is the opposite."""
    found = difference(study, a, b, metric)
    return Finding(
        answer(found, "not higher", study.info["margin"]), _tell(study, a, b, metric, found)
    )


def ratio(study: StudyRuns, a: str, b: str, metric: str, at_least: float) -> Finding:
    """Whether `a` is at least so many times `b`; smaller than `b` is the opposite."""
    found = _ratio(study, a, b, metric)
    verdict = AGREES if found.low >= at_least else DISAGREES if found.high < 1 else OPEN
    return Finding(verdict, _tell_ratio(study, a, b, metric, found, at_least))


def ratio_below(study: StudyRuns, a: str, b: str, metric: str, bound: float) -> Finding:
    """Whether `a` is less than so many times `b`; at least so many is the opposite."""
    found = _ratio(study, a, b, metric)
    verdict = AGREES if found.high < bound else DISAGREES if found.low >= bound else OPEN
    return Finding(verdict, _tell_ratio(study, a, b, metric, found, bound))


def saving(study: StudyRuns, a: str, b: str, metric: str, at_least: float) -> Finding:
    """Whether `a` costs less than `b` by this fraction; no less is the opposite."""
    found = over_seeds(study, [1 - r for r in _ratios(study, a, b, metric)])
    verdict = AGREES if found.low >= at_least else DISAGREES if found.high <= 0 else OPEN
    told = found.tell(lambda s: f"{100 * s:.1f} %")
    text = (
        f"{_compared(study, a, 'against', b, metric)}, saved: {told}. Bound: {100 * at_least:g} %."
    )
    return Finding(verdict, text)


def earlier(study: StudyRuns, a: str, b: str) -> Finding:
    """Whether `a` reaches the thresholds before `b`: the geometric mean of the
    ratios of their steps."""
    logs: dict[int, list[float]] = {}
    last, resolution = study.info["steps"], study.info.get("eval_every", 0)
    for threshold in study.info["thresholds"]:
        left, right = hits(study, a, threshold), hits(study, b, threshold)
        for seed in left:
            if seed in right and min(left[seed], right[seed]) < NEVER:
                mine, theirs = min(left[seed], last), min(right[seed], last)
                same = abs(mine - theirs) <= resolution
                logs.setdefault(seed, []).append(0.0 if same else math.log(mine / theirs))
    found = _of_logs(over_seeds(study, [mean(seen) for seen in logs.values()]))
    verdict = AGREES if found.high < 1 else DISAGREES if found.low > 1 else OPEN
    told = found.tell(fixed(2)) if logs else "no threshold was reached"
    return Finding(
        verdict, f"Steps to the thresholds, {study.label(a)} over {study.label(b)}: {told}."
    )


def calibrated(study: StudyRuns, near: str, far: str, budget: float) -> Finding:
    """Whether the gate probability of `near` stays at the budget while that of `far` leaves it."""
    found = {
        name: over_seeds(
            study, [p - budget for p in values(study, name, "layers/gate_prob").values()]
        )
        for name in (near, far)
    }
    at = {name: off.inside(-PROBABILITY_MARGIN, PROBABILITY_MARGIN) for name, off in found.items()}
    away = {
        name: off.outside(-PROBABILITY_MARGIN, PROBABILITY_MARGIN) for name, off in found.items()
    }
    verdict = AGREES if at[near] and away[far] else DISAGREES if at[far] and away[near] else OPEN
    told = "; ".join(
        f"{study.label(name)} {off.tell(lambda x: f'{x:+.3f}')}" for name, off in found.items()
    )
    return Finding(verdict, f"Mean gate probability minus the budget of {budget:g}: {told}.")


def blind_cosine(study: StudyRuns, sound: str, collapsed: str) -> Finding:
    """Whether the cosine stays the same while the distance shows the collapse."""
    distances = _ratio(study, sound, collapsed, "layers/q_distance")
    cosines = difference(study, collapsed, sound, "layers/q_cosine")
    verdict = OPEN
    if distances.low >= COLLAPSE_RATIO:
        if cosines.inside(-SAME_COSINE, SAME_COSINE):
            verdict = AGREES
        elif cosines.outside(-OTHER_COSINE, OTHER_COSINE):
            verdict = DISAGREES
    told = _tell_ratio(study, sound, collapsed, "layers/q_distance", distances, COLLAPSE_RATIO)
    return Finding(verdict, f"{told} {_tell(study, collapsed, sound, 'layers/q_cosine', cosines)}")


def weight_too_strong(
    study: StudyRuns, weights: Sequence[str], full: str, without: str, metric: str
) -> Finding:
    """Whether the harm of `full` against `without` is gone at one of the smaller weights.

    The opposite: every smaller weight is detectably worse than `without` too. Open where `full`
    does no harm.
    """
    harm = difference(study, full, without, metric)
    smaller = {name: difference(study, name, without, metric) for name in weights}
    sentences = [
        _tell(study, name, without, metric, found)
        for name, found in {full: harm, **smaller}.items()
    ]
    found = OPEN
    if harm.sign() <= 0:
        sentences.append(f"There is no harm of {study.label(full)} to explain that shows.")
    elif any(answer(one, "not higher", study.info["margin"]) == AGREES for one in smaller.values()):
        found = AGREES
    elif all(one.sign() > 0 for one in smaller.values()):
        found = DISAGREES
    return Finding(found, " ".join(sentences))


def lower_everywhere(study: StudyRuns, pairs: Sequence[tuple[str, str]], metric: str) -> Finding:
    """Whether `a` is detectably lower than `b` in every pair;
    detectably higher in one or more is the opposite."""
    found = {pair: difference(study, *pair, metric) for pair in pairs}
    answers = [answer(one, "lower") for one in found.values()]
    return Finding(
        _all(answers), " ".join(_tell(study, *pair, metric, one) for pair, one in found.items())
    )


def difference(study: StudyRuns, a: str, b: str, metric: str) -> Interval:
    """`a - b` over the seeds that both have."""
    return over_seeds(study, list(paired(study, a, b, metric).values()))


def _all(answers: Sequence[str]) -> str:
    if DISAGREES in answers:
        return DISAGREES
    return AGREES if answers and set(answers) == {AGREES} else OPEN


def _ratios(study: StudyRuns, a: str, b: str, metric: str) -> list[float]:
    left, right = values(study, a, metric), values(study, b, metric)
    both = [seed for seed in left if seed in right and (left[seed] > 0 or right[seed] > 0)]
    return [left[seed] / right[seed] if right[seed] > 0 else math.inf for seed in both]


def _ratio(study: StudyRuns, a: str, b: str, metric: str) -> Interval:
    """The interval around the geometric mean; what is divided by nothing counts as
    1e12 times as much."""
    logs = [math.log(min(max(r, 1e-12), 1e12)) for r in _ratios(study, a, b, metric)]
    return _of_logs(over_seeds(study, logs))


def _of_logs(found: Interval) -> Interval:
    def power(x: float) -> float:
        return math.exp(x) if x < 700 else math.inf

    alone = (power(found.alone[0]), power(found.alone[1]))
    return Interval(found.seeds, power(found.mean), power(found.low), power(found.high), alone)


def _tell(study: StudyRuns, a: str, b: str, metric: str, found: Interval) -> str:
    return f"{_compared(study, a, 'minus', b, metric)}: {found.tell(signed)}."


def _tell_ratio(
    study: StudyRuns, a: str, b: str, metric: str, found: Interval, bound: float
) -> str:
    return f"{_compared(study, a, 'over', b, metric)}: {found.tell(significant)}. Bound: {bound:g}."


def _compared(study: StudyRuns, a: str, how: str, b: str, metric: str) -> str:
    """`Best loss, G3 minus G1`."""
    name = METRIC_NAMES[metric]
    return f"{name[0].upper()}{name[1:]}, {study.label(a)} {how} {study.label(b)}"
