"""Rules of selection: from scores to what runs in full, one class per rule.

Adding a rule is one class and one row in `RULES`, from this package or from another one;
`selection` may then name it. In every rule a NaN score is never selected, and neither is padding.

Shapes: B batch, T positions, K experts per token. Scores are `[B, T]`, or `[B, T, K]` of (token,
expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

ALIKE = 1e-5  # relative; scores of one token in float32 differ by less, by the rows beside it
# Tokens of a sequence after which its own scores count for more than those of other text: the
# first tokens of a text are worth more than they rank. On SmolLM2-135M, all tokens routed, five
# texts, one fit (recipes/smollm2/rules.json), 512 lost 0.132 ± 0.010 nats with 0.684 of the calls,
# a lower budget 0.127 ± 0.005 with as many; 128 lost 0.178 ± 0.022 with 0.665, and 32 lost
# 0.229 ± 0.041 with 0.657.
_PRIOR = 512
_WINDOW = 2048  # tokens before a token that it is ranked among
_TOGETHER = 256  # tokens that are ranked at one time


@dataclass(frozen=True, eq=False)
class RuleContext:
    """Inputs of a rule besides the scores.

    Attributes:
        probs: Float32, in the shape of the scores: `sigmoid(scores / temperature)`.
        real: Bool, in the shape of the scores, true at real tokens; all are real when it is None.
        budget: The budget in force, in (0, 1].
        threshold: The score that a token has to reach, for the rules that compare: a float, `[]`,
            or one per token.
        temperature: `tau`.
        per_sequence: Whether all positions of a sequence have its one score.
        weighs: Whether `probs` weighs the two paths of every token, so that nothing is chosen.
        predicted: `[B, T]`, logits of the causal predictor; None without one.
        experts: Int64 `[B, T, K]`, the expert of each pair; None if scores are not of pairs.
        dropped: Indices of the experts that this layer drops; none but with a gate that drops them.
        earlier: `[B, P]`, the scores of each sequence's tokens before these, NaN where they were
            not decided; None if there are none.
        expected: `[B, T]`, the share of tokens that reach a token's score, as far as it is known
            beforehand.
        share: The share of this layer's tokens that should run in full, by the rule of ranks.
    """

    probs: Tensor
    real: Tensor | None
    budget: float
    threshold: Tensor | float
    temperature: float
    per_sequence: bool = False
    weighs: bool = False
    predicted: Tensor | None = None
    experts: Tensor | None = None
    dropped: tuple[int, ...] = ()
    earlier: Tensor | None = None
    expected: Tensor | None = None
    share: float | None = None


class Rule:
    """`score >= threshold`, token by token: causal. The base class of the other rules.

    Attributes:
        trains: Whether `selection` may name it.
        compares: Whether a token's score is compared with the threshold of the budget.
        by_token: Whether a token is decided by itself alone, so that a decoding step decides as a
            prompt does.
    """

    trains = True
    compares = True
    by_token = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        """The bool mask of what runs in full, and `p`, both in the shape of `scores`."""
        return threshold_mask(scores.detach(), context.threshold, context.real), context.probs


class Threshold(Rule):
    """The rule of inference with `causal_rule="quantile"`."""

    by_token = True


class Controller(Rule):
    """In training the threshold is a controller's; see `routing.thresholds.BudgetController`."""


class Soft(Rule):
    """Both paths of every token are mixed; where the gate weighs them in inference too,
    nothing is chosen."""

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        if not context.weighs:
            return super().decide(scores, context)
        return all_if_none(context.real, scores), context.probs


class TopK(Rule):
    """The highest scores of each sequence.

    It looks at later tokens, so it is a rule of training only.
    """

    compares = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        real = None
        if context.real is not None:
            real = context.real.flatten(1)
        mask = topk_mask(scores.detach().flatten(1), context.budget, real)
        return mask.view(scores.shape), context.probs


class Gumbel(Rule):
    """A threshold on scores with logistic noise, the difference of two Gumbel variables;
    `p` has the noise, too."""

    compares = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        # a sequence is decided once
        drawn = scores[:, :1] if context.per_sequence else scores
        first = torch.empty_like(drawn).exponential_().log()
        noise = first - torch.empty_like(drawn).exponential_().log()
        scores = scores + context.temperature * noise
        probs = torch.sigmoid((scores - context.threshold) / context.temperature)
        return super().decide(scores, replace(context, probs=probs))


class Predictor(Rule):
    """The causal predictor of `causal_rule="predictor"` decides."""

    trains, compares, by_token = False, False, True

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        assert context.predicted is not None
        return threshold_mask(context.predicted.detach(), 0.0, context.real), context.probs


class Running(Rule):
    """A token runs in full where its score is among the highest of its own sequence so far: causal.

    Its rank is counted among the scores of the last tokens before it. At the beginning of a
    sequence, where they are few, the share of tokens that reached such a score on other text counts
    as much as `_PRIOR` tokens do.
    """

    trains, compares = False, False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        assert context.expected is not None and context.share is not None
        known = scores.detach()
        if context.real is not None:
            known = known.masked_fill(~context.real, torch.nan)
        higher, count = ranks_among_earlier(known, context.earlier)
        mask = _PRIOR * context.expected + higher < context.share * (_PRIOR + count)
        return mask & ~known.isnan(), context.probs


class Static(Rule):
    """Nothing runs in full; of pairs, all but those of dropped experts do."""

    trains, compares, by_token = False, False, True

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        if context.experts is None:
            return torch.zeros_like(scores, dtype=torch.bool), context.probs
        dropped = torch.tensor(
            context.dropped, device=context.experts.device, dtype=context.experts.dtype
        )
        mask = ~torch.isin(context.experts, dropped)
        return where_real(mask, context.real), context.probs


RULES: dict[str, Rule] = {
    "topk": TopK(),
    "threshold": Threshold(),
    "soft": Soft(),
    "gumbel": Gumbel(),
    "controller": Controller(),
    "predictor": Predictor(),
    "running": Running(),
    "static": Static(),
}


def where_real(mask: Tensor, real: Tensor | None) -> Tensor:
    """`mask` at the real tokens; `real` None: all are."""
    return mask if real is None else mask & real


def all_if_none(mask: Tensor | None, like: Tensor) -> Tensor:
    """`mask`; None stands for a bool mask, in the shape of `like`, that is true everywhere."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return mask


def selections() -> tuple[str, ...]:
    """The names that `selection` may have."""
    return tuple(name for name, rule in RULES.items() if rule.trains)


def budget_count(budget: float, count: Tensor) -> Tensor:
    """`ceil(budget * count)` in exact arithmetic, elementwise on an integer tensor.

    The budget is read as the decimal number that it prints as: 0.07 of 100 tokens is 7 (floating
    point gives 8). A schedule's budgets have many digits; the nearest fraction with a denominator
    up to 10^9 keeps products in 64 bits.
    """
    numerator, denominator = _as_fraction(budget)
    return (count * numerator + denominator - 1) // denominator


@torch.compiler.assume_constant_result
def _as_fraction(budget: float) -> tuple[int, int]:
    exact = max(Fraction(str(budget)).limit_denominator(10**9), Fraction(1, 10**9))
    return exact.numerator, exact.denominator


def topk_mask(scores_BT: Tensor, budget: float, token_mask_BT: Tensor | None = None) -> Tensor:
    """The `k = ceil(budget * n)` highest scores of each sequence, `n` its number of real tokens.

    Ties go to the lowest index, so that exactly `k` tokens are chosen. This rule looks at the whole
    sequence, later tokens included: it is a training rule only.
    """
    real = all_if_none(token_mask_BT, scores_BT)
    count_B = budget_count(budget, real.sum(dim=-1))
    eligible = real & ~scores_BT.isnan()
    # Stable sorts, least significant key first: by score, then eligible tokens before the others.
    known = scores_BT.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = known.argsort(dim=-1, descending=True, stable=True)
    first = eligible.gather(-1, order).to(torch.int8)
    order = order.gather(-1, first.argsort(dim=-1, descending=True, stable=True))
    positions = torch.arange(scores_BT.shape[-1], device=scores_BT.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, positions)
    return (rank < count_B[..., None]) & eligible


def ranks_among_earlier(scores_BT: Tensor, earlier_BP: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many of the tokens before each one score higher, those that score alike by half,
    and how many there are.

    The last `_WINDOW` positions before a token count, of which NaN are left out. Scores of one
    token differ a little in float32, by the other rows of a batch: such ones are alike.

    Args:
        scores_BT: Float32 `[B, T]`.
        earlier_BP: `[B, P]`, the scores before them.

    Returns:
        Float32 `[B, T]` each.
    """
    batch, length = scores_BT.shape
    before_BW = scores_BT.new_full((batch, _WINDOW), torch.nan)
    if earlier_BP is not None:
        before_BW = torch.cat([before_BW, earlier_BP.to(scores_BT)], dim=1)[:, -_WINDOW:]
    all_BS = torch.cat([before_BW, scores_BT], dim=1)
    higher = []
    for start in range(0, length, _TOGETHER):
        own_BK1 = scores_BT[:, start : start + _TOGETHER, None]
        ahead_BKW = all_BS[:, start : start + _WINDOW + own_BK1.shape[1] - 1].unfold(1, _WINDOW, 1)
        near_BK1 = ALIKE * (1 + own_BK1.abs())
        twice = (ahead_BKW > own_BK1 + near_BK1).sum(-1) + (ahead_BKW >= own_BK1 - near_BK1).sum(-1)
        higher.append(twice / 2)
    known_BS = F.pad((~all_BS.isnan()).cumsum(1), (1, 0))
    count_BT = known_BS[:, _WINDOW : _WINDOW + length] - known_BS[:, :length]
    return torch.cat(higher, dim=1), count_BT.float()


def threshold_mask(
    scores_BT: Tensor, threshold: Tensor | float, token_mask_BT: Tensor | None = None
) -> Tensor:
    """`score >= threshold`, token by token: causal, the same in prefill and decode.

    Bool `[B, T]`.
    """
    return where_real(scores_BT >= threshold, token_mask_BT)


def tail_mask(ends: Tensor, count: int, token_mask: Tensor | None = None) -> Tensor:
    """The last `count` real tokens of every sequence, of a shorter one all of them. Bool `[B, T]`.

    `ends`, as the mask `[B, T]`, is true at the last real token of every sequence.
    """
    real = all_if_none(token_mask, ends)
    behind = real.flip(1).cumsum(1)  # from right to left: the real tokens from here on
    behind_the_end = torch.where(ends.flip(1), behind, 0).cummax(1).values
    # Rows after the last end are of no sequence.
    in_tail = (behind_the_end > 0) & (behind - behind_the_end < count)
    return real & in_tail.flip(1)
