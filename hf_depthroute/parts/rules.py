"""Rules of selection: from scores to what runs in full, one class per rule.

Adding a rule is one class and one row in `RULES`, from this package or from another one; `selection` may then name it.

Shapes: B batch, T positions, K experts per token. Scores are `[B, T]`, or `[B, T, K]` of (token, expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .selection import threshold_mask, topk_mask


@dataclass(frozen=True, eq=False)
class RuleContext:
    """Inputs of a rule besides the scores.

    Attributes:
        probs: Float32, in the shape of the scores: `sigmoid(scores / temperature)`.
        real: Bool, in the shape of the scores, true at real tokens; all are real when it is None.
        budget: The budget in force, in (0, 1].
        threshold: The score that a token has to reach, for the rules that compare: a float, `[]`, or one per token.
        temperature: `tau`.
        per_sequence: Whether all positions of a sequence have its one score.
        weighs: Whether `probs` weighs the two paths of every token, so that nothing is chosen.
        predicted: `[B, T]`, logits of the causal predictor; None without one.
        experts: Int64 `[B, T, K]`, the expert of each pair; None if scores are not of pairs.
        dropped: Indices of the experts that this layer drops; none but with a gate that drops them.
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


class Rule:
    """`score >= threshold`, token by token: causal. The base class of the other rules.

    Attributes:
        trains: Whether `selection` may name it.
        compares: Whether a token's score is compared with the threshold of the budget.
        by_token: Whether a token is decided by itself alone, so that a decoding step decides as a prompt does.
    """

    trains = True
    compares = True
    by_token = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        """The bool mask of what runs in full, and `p`, both in the shape of `scores`."""
        return threshold_mask(scores.detach(), context.threshold, context.real), context.probs


class Threshold(Rule):
    """The rule of inference."""

    by_token = True


class Controller(Rule):
    """In training the threshold is a controller's; see `routing.thresholds.BudgetController`."""


class Soft(Rule):
    """Both paths of every token are mixed; where the gate weighs them in inference too, nothing is chosen."""

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        if not context.weighs:
            return super().decide(scores, context)
        mask = torch.ones_like(scores, dtype=torch.bool) if context.real is None else context.real
        return mask, context.probs


class TopK(Rule):
    """The highest scores of each sequence. It looks at later tokens, so it is a rule of training only."""

    compares = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        real = None if context.real is None else context.real.flatten(1)
        return topk_mask(scores.detach().flatten(1), context.budget, real).view(scores.shape), context.probs


class Gumbel(Rule):
    """A threshold on scores with logistic noise, the difference of two Gumbel variables; `p` has the noise, too."""

    compares = False

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        drawn = scores[:, :1] if context.per_sequence else scores  # a sequence is decided once
        noise = torch.empty_like(drawn).exponential_().log() - torch.empty_like(drawn).exponential_().log()
        scores = scores + context.temperature * noise
        probs = torch.sigmoid((scores - context.threshold) / context.temperature)
        return super().decide(scores, replace(context, probs=probs))


class Predictor(Rule):
    """The causal predictor of `causal_rule="predictor"` decides."""

    trains, compares, by_token = False, False, True

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        assert context.predicted is not None
        return threshold_mask(context.predicted.detach(), 0.0, context.real), context.probs


class Static(Rule):
    """Nothing runs in full; of pairs, all but those of dropped experts do."""

    trains, compares, by_token = False, False, True

    def decide(self, scores: Tensor, context: RuleContext) -> tuple[Tensor, Tensor]:
        if context.experts is None:
            return torch.zeros_like(scores, dtype=torch.bool), context.probs
        dropped = torch.tensor(context.dropped, device=context.experts.device, dtype=context.experts.dtype)
        mask = ~torch.isin(context.experts, dropped)
        return mask if context.real is None else mask & context.real, context.probs


RULES: dict[str, Rule] = {
    "topk": TopK(),
    "threshold": Threshold(),
    "soft": Soft(),
    "gumbel": Gumbel(),
    "controller": Controller(),
    "predictor": Predictor(),
    "static": Static(),
}


def selections() -> tuple[str, ...]:
    """The names that `selection` may have."""
    return tuple(name for name, rule in RULES.items() if rule.trains)
