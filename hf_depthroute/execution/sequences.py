"""Decisions about sequences: made on the prompt, kept with the KV cache, run on the batch.

Shapes: B batch, T positions, d model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.cache import cache_layer, cache_of, can_skip, remember, remembered
from ..base.cache_layers import SkippingLayer
from ..base.recorded import records_attention
from ..base.sublayers import Kwargs
from ..parts.rules import all_if_none
from ..routing.decision import decide
from ..routing.plan import RoutePlan
from ..routing.routing import ROUTING, Routing
from .call import Decision, RoutedCall, without_scores
from .masked import scaled


def as_decided(plan: RoutePlan, kwargs: Kwargs) -> RoutePlan:
    """`plan`, but in the middle of a generation, whose prompt was decided:
    that decision holds at a budget of 1 too."""
    full = plan.rule == "full" or plan.everything
    if not full or plan.config.granularity != "sequence":
        return plan
    if remembered(cache_of(kwargs), plan.layer_index) is None:
        return plan
    return replace(plan, rule="threshold", everything=False)


def decide_sequences(
    layer: Any, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None, kwargs: Kwargs
) -> Decision:
    """One decision per sequence, on the mean over its real tokens; with a KV cache,
    the one made on the prompt.

    Scores and extras of a decision that is only remembered are NaN: they are not computed again.
    """
    routing: Routing = layer._modules[ROUTING]
    length = gate_input.shape[1]
    made = None
    if not plan.training:
        made = remembered(cache_of(kwargs), plan.layer_index)
    if made is not None and plan.replayed is None:
        keep, probs = (part[:, None].expand(-1, length) for part in made)
        return without_scores(routing, plan, gate_input, keep, probs)
    real = all_if_none(token_mask, gate_input[..., 0])
    # In float32: the sum over a long prompt leaves the range of float16.
    total = gate_input.masked_fill(~real[..., None], 0).sum(1, keepdim=True, dtype=torch.float32)
    pooled = (total / real.sum(1)[:, None, None].clamp(min=1)).to(gate_input.dtype)
    extras = {
        name: value.expand(-1, length, *value.shape[2:])
        for name, value in routing.score(plan, pooled).items()
    }
    scores = extras.pop("scores")
    return Decision(scores, extras, *decide(plan, scores, None, extras.get("predicted")))


def remember_sequences(call: RoutedCall, skips_attention: bool) -> None:
    """Keep the decision with a KV cache that has none yet; see `cache.remember`."""
    cache = None
    if not call.plan.training:
        cache = cache_of(call.kwargs)
    index = call.plan.layer_index
    if cache is not None and remembered(cache, index) is None:
        remember(cache, index, call.mask[:, 0], call.probs[:, 0], skips_attention)


def skips_sequences(call: RoutedCall) -> bool:
    """Whether `skip_sequences` runs the call: one decision per sequence about its attention,
    no mixing, no compiler.

    A cache that holds the keys and values of every sequence, a mask that cannot be indexed by them
    (a block mask of flex attention), and outputs that are recorded of every sequence leave the call
    to the executors of tokens.

    Raises:
        ValueError: Such outputs are asked for in the middle of a generation that has skipped
            sequences.
    """
    plan = call.plan
    if not plan.target.skips_attention or call.needs_both_paths or torch.compiler.is_compiling():
        return False
    static = plan.rule == "static" and plan.last_tokens is None and plan.replayed is None
    if not (plan.config.granularity == "sequence" or static):
        return False
    cache = cache_of(call.kwargs)
    attended = call.kwargs.get("attention_mask")
    held = cache_layer(cache, plan.layer_index)
    if records_attention(call.kwargs) or call.target.hides(call):
        if isinstance(held, SkippingLayer):
            raise ValueError(
                f"layer {plan.layer_index}: attention weights or router logits are asked "
                "for over a KV cache that holds no keys of skipped sequences; ask for them from "
                "the prompt on, with a new cache"
            )
        return False
    indexed = attended is None or isinstance(attended, Tensor)
    return indexed and (cache is None or can_skip(held))


def skip_sequences(call: RoutedCall) -> Tensor:
    """The stream after the routed part, `[B, T, d]`.

    The sequences that are kept run the target in full, on their own; the others write no keys and
    values.
    """
    stream = call.stream
    keep = call.mask[:, 0]
    remember_sequences(call, skips_attention=True)
    rows = keep.nonzero().squeeze(-1)
    others = (~keep).nonzero().squeeze(-1)
    if len(rows):
        kwargs = {
            name: by_sequence(value, len(keep), lambda part: part[rows])
            for name, value in call.kwargs.items()
        }
        after = call.of(rows, kwargs).full()
    else:
        after = stream[rows]
        held = cache_layer(cache_of(call.kwargs), call.plan.layer_index)
        if held is not None:
            held.advance(stream.shape[1])
    if call.scale is not None:
        after = stream[rows] + scaled(after - stream[rows], call.scale[rows])
    out = stream.clone()
    out[rows] = after
    if call.branch is not None and len(others):
        out[others] = stream[others] + call.branch(stream[others])
    return call.with_recalled(out)


def by_sequence(value: object, batch: int, change: Callable[[Tensor], Tensor]) -> object:
    """A layer's argument with `change` of what has a row for each of `batch` sequences;
    what broadcasts over the batch stays."""
    if isinstance(value, tuple):
        return tuple(by_sequence(part, batch, change) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != batch or batch == 1:
        return value
    return change(value)
