"""`decide`: from the scores of a layer to what runs in full, as its plan says.

Shapes: B batch, T positions, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..parts.rules import RULES, RuleContext, where_real

if TYPE_CHECKING:
    from .plan import RoutePlan


def decide(
    plan: RoutePlan,
    scores: torch.Tensor,
    token_mask: torch.Tensor | None,
    predicted: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bool mask of what runs full, and `p`, both in the shape of `scores`.

    A token that left early stays out, unless a replay says otherwise.

    Args:
        plan: The plan of this forward pass.
        scores: Float32 `[B, T]`, or `[B, T, K]` of pairs.
        token_mask: Bool `[B, T]`, true at real tokens; None for all.
        predicted: Logits of the causal predictor, `[B, T]`.
        experts: Int64 `[B, T, K]`, the expert of each pair.

    Raises:
        ValueError: The decision to replay has another shape.
    """
    last = plan.last_tokens
    routed = decided_tokens(plan, token_mask)
    expected = plan.expected
    mask = None
    probs = torch.sigmoid(scores / plan.temperature)
    if plan.replayed is not None:
        if plan.replayed.shape != scores.shape:
            raise ValueError(
                f"layer {plan.layer_index}: the replayed mask has shape "
                f"{tuple(plan.replayed.shape)}, the input {tuple(scores.shape)}"
            )
        mask = plan.replayed.to(scores.device)
    if mask is None or plan.gate.soft:
        if routed is not None and scores.ndim == 3:
            routed = routed[..., None].expand_as(scores)
        context = RuleContext(
            probs=probs if mask is None else mask,
            real=routed,
            budget=plan.budget,
            threshold=plan.threshold,
            temperature=plan.temperature,
            per_sequence=plan.config.granularity == "sequence",
            weighs=plan.gate.soft,
            predicted=predicted,
            experts=experts,
            dropped=plan.config.experts_dropped_in(plan.layer_index),
            earlier=plan.earlier,
            expected=None if expected is None else expected.share_above(scores.detach()),
            share=None if expected is None else expected.share(plan.budget),
        )
        # Of a budget of 1, which no score fails to reach.
        rule = "threshold" if plan.rule == "full" else plan.rule
        mask, probs = RULES[rule].decide(scores, context)
    if last is not None:
        if scores.ndim == 3:
            last = last[..., None]
        if plan.replayed is None:
            mask = mask | last
        probs = probs.masked_fill(last, 1.0)
    if plan.gate.exits:
        assert plan.kept is not None
        # A layer that is not there ran in full, and no token left in it.
        places = [i for name, i in plan.kept if name == plan.adapter and i < plan.layer_index]
        if places and plan.replayed is None:
            mask = mask & plan.kept[plan.adapter, max(places)].to(mask.device)
        plan.kept[plan.adapter, plan.layer_index] = mask
    return mask, probs


def decided_tokens(plan: RoutePlan, token_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The tokens that gates decide about, bool `[B, T]`: real ones but the last; None for all."""
    if plan.last_tokens is None:
        return token_mask
    return where_real(~plan.last_tokens, token_mask)
