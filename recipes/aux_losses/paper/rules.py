"""Rules that turn paired differences into an answer: the statement holds, its opposite holds, or neither shows.

Every rule compares runs of the same seed, needs at least `MIN_SEEDS` common seeds, and returns a `Finding` whose
sentence holds the numbers behind the answer. `describe_rules` says the same in words, for the report.
"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_depthroute.report.study_results import StudyRuns

from .values import METRIC_NAMES, NEVER, hits, mean, paired, signed, significant, values

HOLDS, OPPOSITE, OPEN = "holds", "opposite", "open"
MIN_SEEDS = 2
AUC_MARGIN = 0.01
GRADIENT_RATIO = 3.0
COLLAPSE_RATIO = 10.0
CONSTANT_RATIO = 100.0
PROBABILITY_MARGIN = 0.05
SAME_COSINE, OTHER_COSINE = 0.01, 0.1


@dataclass(frozen=True)
class Finding:
    """`answer` (HOLDS, OPPOSITE or OPEN) and one or more sentences with the numbers it rests on."""

    answer: str
    sentence: str


def describe_rules(margin: float) -> list[str]:
    """The rules in words."""
    return [
        "Runs are compared in pairs of the same seed; seeds stand in brackets. With fewer than 2 common seeds nothing "
        "is called detectable.",
        f"Lower loss: detectable when all seeds agree in sign and the mean difference exceeds the margin of {margin:g} "
        "nats. In the claimed direction the claim is reproduced, in the other it is reversed.",
        f"Equal loss: reproduced when the difference of every seed is at most {margin:g}, reversed when it is "
        "detectable, else not detectable here. Not worse: the same, with only a higher loss held against it.",
        "Thresholds: a seed counts as earlier when it is earlier at one threshold or more and later at none; a "
        "threshold that was never reached counts as later than any step, and says nothing when neither run reached "
        "it. Reproduced when all seeds are earlier, reversed when all are later. Steps are known to one evaluation.",
        f"Gradient norm: reproduced when the ratio is at least {GRADIENT_RATIO:g} in all seeds, reversed when it is "
        "below 1 in all seeds.",
        f"Collapse: reproduced when G3's q distance is at least {COLLAPSE_RATIO:g} times that of the other in all "
        f"seeds; constant scores: the same with a variance ratio of {CONSTANT_RATIO:g}. Reversed when the ratio is "
        "below 1 in all seeds. That A2 does not collapse: reproduced when the ratio is under the bound in all seeds.",
        f"Cosine: where the distance shows a collapse, the cosine is blind when it moves by at most {SAME_COSINE:g} in "
        f"all seeds, and not blind when it moves by more than {OTHER_COSINE:g} in all seeds.",
        "Savings: reproduced when at least half of the paper's saving shows in all seeds, reversed when nothing is "
        "saved in any seed.",
        f"Oracle AUC: as losses, with a margin of {AUC_MARGIN:g}. Gate probability: near the budget means within "
        f"{PROBABILITY_MARGIN:g}.",
        "Too strong a weight: supported when full weight is detectably worse than no util and rank while some smaller "
        "weight is not worse; contradicted when every smaller weight is detectably worse as well.",
        "Open questions are answered by the same rules, in the words supported and contradicted.",
        "With three seeds, agreement in sign alone comes about by chance in one case of four; the margin does the "
        "rest. Nothing is corrected for the number of comparisons.",
    ]


def lower(study: StudyRuns, a: str, b: str, metric: str, margin: float | None = None) -> Finding:
    """Whether `a` is detectably lower than `b`."""
    differences = paired(study, a, b, metric)
    return Finding(_direction(differences, _margin(study, margin)), _tell(study, a, b, metric, differences, margin))


def higher(study: StudyRuns, a: str, b: str, metric: str, margin: float | None = None) -> Finding:
    """Whether `a` is detectably higher than `b`."""
    differences = paired(study, a, b, metric)
    answer = _direction({seed: -value for seed, value in differences.items()}, _margin(study, margin))
    return Finding(answer, _tell(study, a, b, metric, differences, margin))


def equal(study: StudyRuns, pairs: Sequence[tuple[str, str]], metric: str, margin: float | None = None) -> Finding:
    """Whether every seed of every pair differs by at most the margin."""
    limit = _margin(study, margin)
    answers, sentences = [], []
    for a, b in pairs:
        differences = paired(study, a, b, metric)
        answers.append(_no_difference(differences, limit))
        sentences.append(_tell(study, a, b, metric, differences, margin))
    return Finding(_all(answers), " ".join(sentences))


def not_worse(study: StudyRuns, a: str, b: str, metric: str) -> Finding:
    """Whether `a` is above `b` by no more than the margin in any seed; detectably higher is the opposite."""
    differences = paired(study, a, b, metric)
    return Finding(_no_worse(differences, _margin(study, None)), _tell(study, a, b, metric, differences, None))


def ratio(study: StudyRuns, a: str, b: str, metric: str, at_least: float) -> Finding:
    """Whether `a` is at least so many times `b` in all seeds; smaller than `b` in all seeds is the opposite."""
    ratios = _ratios(study, a, b, metric)
    answer = OPEN
    if len(ratios) >= MIN_SEEDS:
        if all(r >= at_least for r in ratios.values()):
            answer = HOLDS
        elif all(r < 1 for r in ratios.values()):
            answer = OPPOSITE
    return Finding(answer, _tell_ratio(study, a, b, metric, ratios, f"Bound: {at_least:g}."))


def ratio_below(study: StudyRuns, a: str, b: str, metric: str, bound: float) -> Finding:
    """Whether `a` is less than so many times `b` in all seeds; at least so many in all seeds is the opposite."""
    ratios = _ratios(study, a, b, metric)
    answer = OPEN
    if len(ratios) >= MIN_SEEDS:
        if all(r < bound for r in ratios.values()):
            answer = HOLDS
        elif all(r >= bound for r in ratios.values()):
            answer = OPPOSITE
    return Finding(answer, _tell_ratio(study, a, b, metric, ratios, f"Bound: {bound:g}."))


def saving(study: StudyRuns, a: str, b: str, metric: str, at_least: float) -> Finding:
    """Whether `a` costs less than `b` by this fraction in all seeds; no less in all seeds is the opposite."""
    saved = {seed: 1 - r for seed, r in _ratios(study, a, b, metric).items()}
    answer = OPEN
    if len(saved) >= MIN_SEEDS:
        if all(s >= at_least for s in saved.values()):
            answer = HOLDS
        elif all(s <= 0 for s in saved.values()):
            answer = OPPOSITE
    told = _per_seed(saved, lambda s: f"{100 * s:.1f} %")
    text = f"{_compared(study, a, 'against', b, metric)}, saved: {told}. Bound: {100 * at_least:g} %."
    return Finding(answer, text)


def earlier(study: StudyRuns, a: str, b: str) -> Finding:
    """Whether `a` reaches the thresholds before `b` in all seeds."""
    votes: dict[int, list[int]] = {}
    parts = []
    for threshold in study.info["thresholds"]:
        left, right = hits(study, a, threshold), hits(study, b, threshold)
        common = [seed for seed in left if seed in right]
        for seed in common:
            if min(left[seed], right[seed]) < NEVER:
                order = (left[seed] > right[seed]) - (left[seed] < right[seed])
                votes.setdefault(seed, []).append(order)
        steps = ", ".join(f"{_step(left[seed])} against {_step(right[seed])} ({seed})" for seed in common)
        parts.append(f"{threshold:g}: {steps}" if steps else f"{threshold:g}: no common seed")
    answer = OPEN
    if len(votes) >= MIN_SEEDS:
        if all(min(v) < 0 and max(v) <= 0 for v in votes.values()):
            answer = HOLDS
        elif all(max(v) > 0 and min(v) >= 0 for v in votes.values()):
            answer = OPPOSITE
    told = "; ".join(parts) or "the study has no thresholds"
    pair = f"{study.label(a)} against {study.label(b)}"
    return Finding(answer, f"Step of the first evaluation under the threshold, {pair}: {told}.")


def calibrated(study: StudyRuns, near: str, far: str, budget: float) -> Finding:
    """Whether the gate probability of `near` stays at the budget in all seeds while that of `far` leaves it."""
    offs = {
        name: {seed: p - budget for seed, p in values(study, name, "layers/gate_prob").items()} for name in (near, far)
    }
    common = [seed for seed in offs[near] if seed in offs[far]]
    at = {name: [abs(off[seed]) <= PROBABILITY_MARGIN for seed in common] for name, off in offs.items()}
    answer = OPEN
    if len(common) >= MIN_SEEDS:
        if all(at[near]) and not any(at[far]):
            answer = HOLDS
        elif all(at[far]) and not any(at[near]):
            answer = OPPOSITE
    told = "; ".join(
        f"{study.label(name)} {_per_seed({seed: off[seed] for seed in common}, lambda x: f'{x:+.3f}')}"
        for name, off in offs.items()
    )
    return Finding(answer, f"Mean gate probability minus the budget of {budget:g}: {told}.")


def blind_cosine(study: StudyRuns, sound: str, collapsed: str) -> Finding:
    """Whether the cosine stays the same in all seeds while the distance shows the collapse."""
    ratios = _ratios(study, sound, collapsed, "layers/q_distance")
    cosines = paired(study, collapsed, sound, "layers/q_cosine")
    common = [seed for seed in ratios if seed in cosines]
    answer = OPEN
    if len(common) >= MIN_SEEDS and all(ratios[seed] >= COLLAPSE_RATIO for seed in common):
        if all(abs(cosines[seed]) <= SAME_COSINE for seed in common):
            answer = HOLDS
        elif all(abs(cosines[seed]) > OTHER_COSINE for seed in common):
            answer = OPPOSITE
    told = _tell_ratio(study, sound, collapsed, "layers/q_distance", ratios, f"Bound: {COLLAPSE_RATIO:g}.")
    moved = _tell(study, collapsed, sound, "layers/q_cosine", cosines, SAME_COSINE)
    return Finding(answer, f"{told} {moved}")


def weight_too_strong(study: StudyRuns, weights: Sequence[str], full: str, without: str, metric: str) -> Finding:
    """Whether the harm of `full` against `without` is gone at one of the smaller weights.

    The opposite: every smaller weight is detectably worse than `without` too. Open where `full` does no harm.
    """
    margin = _margin(study, None)
    harm = paired(study, full, without, metric)
    sentences = [_tell(study, full, without, metric, harm, None)]
    smaller = {name: paired(study, name, without, metric) for name in weights}
    smaller = {name: differences for name, differences in smaller.items() if len(differences) >= MIN_SEEDS}
    sentences += [_tell(study, name, without, metric, differences, None) for name, differences in smaller.items()]
    answer = OPEN
    if _direction(harm, margin) != OPPOSITE:  # `full` is not detectably higher
        sentences.append(f"There is no detectable harm of {study.label(full)} to explain.")
    elif any(_no_worse(differences, margin) == HOLDS for differences in smaller.values()):
        answer = HOLDS
    elif smaller and all(_direction(differences, margin) == OPPOSITE for differences in smaller.values()):
        answer = OPPOSITE
    return Finding(answer, " ".join(sentences))


def lower_everywhere(study: StudyRuns, pairs: Sequence[tuple[str, str]], metric: str) -> Finding:
    """Whether `a` is detectably lower than `b` in every pair; detectably higher in one or more is the opposite."""
    margin = _margin(study, None)
    differences = {pair: paired(study, *pair, metric) for pair in pairs}
    answers = [_direction(d, margin) for d in differences.values()]
    answer = OPPOSITE if OPPOSITE in answers else HOLDS if answers and set(answers) == {HOLDS} else OPEN
    return Finding(answer, " ".join(_tell(study, *pair, metric, d, None) for pair, d in differences.items()))


def _all(answers: Sequence[str]) -> str:
    if OPPOSITE in answers:
        return OPPOSITE
    return HOLDS if answers and set(answers) == {HOLDS} else OPEN


def _margin(study: StudyRuns, margin: float | None) -> float:
    return study.info["margin"] if margin is None else margin


def _direction(differences: Mapping[int, float], margin: float) -> str:
    numbers = list(differences.values())
    if len(numbers) < MIN_SEEDS or abs(mean(numbers)) <= margin:
        return OPEN
    if all(x < 0 for x in numbers):
        return HOLDS
    return OPPOSITE if all(x > 0 for x in numbers) else OPEN


def _no_difference(differences: Mapping[int, float], margin: float) -> str:
    if len(differences) >= MIN_SEEDS and all(abs(x) <= margin for x in differences.values()):
        return HOLDS
    return OPPOSITE if _direction(differences, margin) != OPEN else OPEN


def _no_worse(differences: Mapping[int, float], margin: float) -> str:
    if len(differences) >= MIN_SEEDS and all(x <= margin for x in differences.values()):
        return HOLDS
    return OPPOSITE if _direction(differences, margin) == OPPOSITE else OPEN


def _ratios(study: StudyRuns, a: str, b: str, metric: str) -> dict[int, float]:
    left, right = values(study, a, metric), values(study, b, metric)
    both = [seed for seed in left if seed in right and (left[seed] > 0 or right[seed] > 0)]
    return {seed: left[seed] / right[seed] if right[seed] > 0 else math.inf for seed in both}


def _tell(study: StudyRuns, a: str, b: str, metric: str, differences: Mapping[int, float], margin: float | None) -> str:
    limit = _margin(study, margin)
    text = f"{_compared(study, a, 'minus', b, metric)}: {_per_seed(differences, signed)}"
    numbers = list(differences.values())
    if len(numbers) < MIN_SEEDS:
        return f"{text}."
    below, above = sum(x < 0 for x in numbers), sum(x > 0 for x in numbers)
    if max(below, above) < len(numbers):
        return f"{text}; lower in {below} and higher in {above} of {len(numbers)} seeds."
    inside = "" if abs(mean(numbers)) > limit else f", by a mean within the margin of {limit:g}"
    return f"{text}; {'lower' if below else 'higher'} in {len(numbers)} of {len(numbers)} seeds{inside}."


def _tell_ratio(study: StudyRuns, a: str, b: str, metric: str, ratios: Mapping[int, float], bound: str) -> str:
    told = _per_seed(ratios, lambda r: significant(r) if r < math.inf else "infinite")
    return f"{_compared(study, a, 'over', b, metric)}: {told}. {bound}"


def _compared(study: StudyRuns, a: str, how: str, b: str, metric: str) -> str:
    """`Best loss, G3 minus G1`."""
    name = METRIC_NAMES[metric]
    return f"{name[0].upper()}{name[1:]}, {study.label(a)} {how} {study.label(b)}"


def _per_seed(numbers: Mapping[int, float], show: Callable[[float], str]) -> str:
    """`-0.0072 (42), -0.0061 (123), mean -0.0067`."""
    if not numbers:
        return "no common seed"
    told = ", ".join(f"{show(value)} ({seed})" for seed, value in numbers.items())
    return f"{told}, mean {show(mean(list(numbers.values())))}" if len(numbers) > 1 else f"{told}, only 1 common seed"


def _step(step: float) -> str:
    return "never" if step == NEVER else f"{step:.0f}"
