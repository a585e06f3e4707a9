"""Hashed n-grams over a KV cache, and the target `"memory"`: what they hold is added before the attention.

Shapes: B batch, T positions, N longest n-gram, E width of what is looked up, d model width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..base.cache import cache_of, last_tokens, remember_tokens
from ..base.families import Family
from ..base.sublayers import hidden_of
from ..parts.memory import NgramMemory, continued, over_padding, suffixes
from ..routing.plan import RoutePlan
from ..routing.routing import Routing
from .call import Decision, Kwargs, RoutedCall, Site
from .context import ForwardContext


def ngrams_of(layer_index: int, order: int, context: ForwardContext, kwargs: Kwargs) -> Tensor:
    """A layer's n-grams of a call, int64 `[B, T, N]`, with the earlier tokens of its KV cache, which then holds these.

    A layer asks once in a forward pass. Where the context's `token_mask` has padding, the cache holds the last real
    tokens before it.

    Args:
        layer_index: Index of the decoder layer.
        order: `N`.
        context: With `token_ids`.
        kwargs: What the layer was called with.

    Raises:
        ValueError: The context has no token ids, or the cache was filled without the memory.
    """
    ids, token_mask = context.token_ids, context.token_mask
    if ids is None:
        raise ValueError(f"layer {layer_index}: its memory needs the token ids; call the whole model")
    ngrams = context.once(("ngrams", order), lambda: suffixes(ids, order, token_mask, context.starts))
    cache = cache_of(kwargs)
    if cache is None:
        return ngrams
    before = last_tokens(cache, layer_index, ngrams.shape[-1] - 1)
    before = None if before is None else before.to(ngrams.device)
    ngrams = ngrams if before is None else continued(ngrams, before)
    held = ngrams[..., :-1]
    if token_mask is not None and token_mask.shape[1] > 1:
        held = over_padding(held, token_mask.to(held.device), before)
    remember_tokens(cache, layer_index, held)
    return ngrams


class MemorySite(Site):
    """`h <- h + alpha v` before the whole layer, which runs for every token.

    The full path is `h + v`, the cheap path `h`; `alpha` is the gate's `p`, in training and in inference. So the forks
    of `training.forks` compare forced gates, `alpha = 1` with `alpha = 0`: equation 3 of "Counterfactual Gate
    Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory" (FARS, Analemma;
    gitlab.com/fars-a/counterfactual-gate-supervision), where the other layers follow their gates.

    The object in `SITES` has looked nothing up; `of_call` gives the one that a forward pass uses.

    Args:
        retrieved: `e`, `[B, T, E]`.
        value: `v`, `[B, T, d]`.
    """

    attends_behind = True

    def __init__(self, retrieved: Tensor | None = None, value: Tensor | None = None) -> None:
        self._retrieved, self._value = retrieved, value

    def of_call(
        self, routing: Routing, plan: RoutePlan, h: Tensor, context: ForwardContext, kwargs: Kwargs
    ) -> MemorySite:
        ngrams = ngrams_of(routing.layer_index, plan.config.ngram_order, context, kwargs)
        memory = cast(NgramMemory, routing.depth_route_memory[plan.adapter])
        retrieved = memory(ngrams).to(h)
        return MemorySite(retrieved, memory.value(retrieved))

    def norm(self, layer: Any, family: Family, stream: Tensor) -> Tensor:
        return stream

    def decide(self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None) -> Decision:
        assert self._retrieved is not None
        retrieved = self._retrieved.expand(*gate_input.shape[:-1], -1)
        return super().decide(routing, plan, torch.cat([gate_input, retrieved], dim=-1), token_mask)

    def full(self, call: RoutedCall) -> Tensor:
        assert self._value is not None
        return call.stream + self._value

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        assert self._value is not None
        return call.stream + call.probs[..., None].to(self._value.dtype) * self._value

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        return hidden_of(call.layer._base_forward(after, **call.kwargs))
