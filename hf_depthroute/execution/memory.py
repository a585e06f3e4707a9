"""Hashed n-grams over a KV cache.

Shapes: B batch, T positions, N longest n-gram.
"""

from __future__ import annotations

from torch import Tensor

from ..base.cache import cache_of, last_tokens, remember_tokens
from ..base.sublayers import Kwargs
from ..parts.memory import continued, over_padding, suffixes
from .context import ForwardContext


def ngrams_of(layer_index: int, order: int, context: ForwardContext, kwargs: Kwargs) -> Tensor:
    """A layer's n-grams of a call, int64 `[B, T, N]`, with the earlier tokens of its KV cache,
    which then holds these.

    A layer asks once in a forward pass. Where the context's `token_mask` has padding, the cache
    holds the last real tokens before it.

    Raises:
        ValueError: The context has no token ids, or the cache was filled without the memory.
    """
    ids = context.token_ids
    token_mask = context.token_mask
    if ids is None:
        raise ValueError(
            f"layer {layer_index}: its memory needs the token ids; call the whole model"
        )
    ngrams = context.once(
        ("ngrams", order), lambda: suffixes(ids, order, token_mask, context.starts)
    )
    cache = cache_of(kwargs)
    if cache is None:
        return ngrams
    before = last_tokens(cache, layer_index, ngrams.shape[-1] - 1)
    if before is not None:
        before = before.to(ngrams.device)
        ngrams = continued(ngrams, before)
    held = ngrams[..., :-1]
    if token_mask is not None:
        held = over_padding(held, token_mask.to(held.device), before)
    remember_tokens(cache, layer_index, held)
    return ngrams
