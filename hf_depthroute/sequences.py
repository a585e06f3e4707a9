"""Decisions about whole sequences: made on the prompt, kept with the KV cache, and carried out on the batch.

Shapes: B batch, T positions, d model width.
"""

from __future__ import annotations

from typing import Any

import torch

from .cache import SkippingLayer, cache_layer, cache_of, remember, remembered
from .decision import RoutePlan
from .holder import Routing
from .sites import SITES


def decide_sequences(
    layer: Any,
    holder: Routing,
    plan: RoutePlan,
    gate_input: torch.Tensor,
    token_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    skips_attention: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """One decision per sequence, on the mean over its real tokens; with a KV cache, the one made on the prompt.

    Scores and probs of a decision that is only remembered are NaN: they are not computed again.
    """
    batch, length = gate_input.shape[:2]
    cache = None if layer.training else cache_of(kwargs)
    keep = remembered(cache, holder.layer_index)
    if keep is not None and plan.replayed is None:
        nothing = torch.full((batch, length), torch.nan, device=gate_input.device)
        return keep[:, None].expand(-1, length), nothing, nothing, {name: nothing for name in plan.extras}
    real = gate_input.new_ones(batch, length, dtype=torch.bool) if token_mask is None else token_mask
    # In float32: the sum over a long prompt leaves the range of float16.
    total = gate_input.masked_fill(~real[..., None], 0).sum(1, keepdim=True, dtype=torch.float32)
    pooled = (total / real.sum(1)[:, None, None].clamp(min=1)).to(gate_input.dtype)
    extras = {name: value.expand(-1, length, *value.shape[2:]) for name, value in holder.score(plan, pooled).items()}
    scores = extras.pop("scores")
    mask, probs = holder.decide(plan, scores, None, extras.get("predicted"))
    if cache is not None and keep is None:
        remember(cache, holder.layer_index, mask[:, 0], skips_attention)
    return mask, scores, probs, extras


def skip_sequences(
    layer: Any,
    holder: Routing,
    plan: RoutePlan,
    stream: torch.Tensor,
    normed: torch.Tensor,
    keep: torch.Tensor,
    scale: torch.Tensor | None,
    branch: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The sequences in `keep` (bool `[B]`) run the site in full, on their own; the others write no keys and values."""
    site = SITES[plan.config.target]
    cache = cache_of(kwargs)
    if plan.rule == "static" and cache is not None and remembered(cache, holder.layer_index) is None:
        remember(cache, holder.layer_index, keep, skips_attention=True)
    held = cache_layer(cache, holder.layer_index)
    rows, others = keep.nonzero().squeeze(-1), (~keep).nonzero().squeeze(-1)
    batch = len(keep)
    if cache is not None and not isinstance(held, SkippingLayer):  # this cache holds every sequence
        after = site.full(layer, holder, stream, normed, kwargs)[rows]
    elif len(rows):
        part = {name: whole_sequences(value, rows, batch) for name, value in kwargs.items()}
        after = site.full(layer, holder, stream[rows], normed[rows], part)
    else:
        after = stream[rows]
    if isinstance(held, SkippingLayer):
        held.advance(stream.shape[1])
    if scale is not None:
        after = stream[rows] + (after - stream[rows]) * scale[rows][..., None].to(after.dtype)
    out = stream.clone()
    out[rows] = after
    if branch is not None and len(others):
        out[others] = stream[others] + branch(stream[others])
    return out


def whole_sequences(value: Any, rows: torch.Tensor, batch: int) -> Any:
    """A layer's argument for the sequences `rows`; what broadcasts over the batch stays as it is."""
    if isinstance(value, tuple):
        return tuple(whole_sequences(part, rows, batch) for part in value)
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] != batch or batch == 1:
        return value
    return value[rows]
