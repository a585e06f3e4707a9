"""State kept with the KV cache: decisions about sequences, and tokens that a memory has read.

A sequence is decided once, when its prompt enters an empty cache; where its attention is skipped,
there are no keys and values. What is kept has to follow whatever is then done to the cache:
reordered for beam search, repeated, selected, cropped, reset. So it lives in the cache's own layer
object.

Shapes: B sequences of the cache, T new positions, P positions held, M tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .cache_layers import KeepingLayer, SkippingLayer, keeping_class

_CACHES = ("past_key_values", "layer_past")  # what families call it


def cache_layer(cache: Any, index: int) -> Any:
    """Layer `index` of a cache, made now where the cache makes its layers on first use;
    None without a cache."""
    if cache is None:
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def starts_prompt(kwargs: dict[str, Any], length: int) -> bool:
    """Whether a call of the decoder stack with `length` new positions begins a prompt.

    Never waits for a device: of a cache of fixed size elsewhere than on the CPU, more than one
    position is a prompt.
    """
    if is_paged(kwargs):
        return length > 1 and int(kwargs.get("max_length_q", length)) > 1
    layers = getattr(kwargs.get("past_key_values"), "layers", None)
    if not layers:
        return True
    first = layers[0]
    if getattr(first, "keys", None) is None and not isinstance(first, SkippingLayer):
        return True
    if isinstance(first, DynamicLayer) or first.keys.device.type == "cpu":
        return int(first.get_seq_length()) == 0
    return length > 1


def can_skip(layer: Any) -> bool:
    """Whether a cache layer can leave out the keys and values of whole sequences.

    A static or sliding one, or one that holds tokens already, keeps those of every sequence.
    """
    empty = (
        type(layer) in (DynamicLayer, keeping_class(DynamicLayer)) and layer.get_seq_length() == 0
    )
    return empty or isinstance(layer, SkippingLayer)


def remember(cache: Any, index: int, keep: Tensor, probs: Tensor, skips_attention: bool) -> None:
    """Store the decision of layer `index`, `keep` (bool `[B]`) and `probs` (float32 `[B]`).

    With `skips_attention`, a layer that `can_skip` holds the kept sequences only from now on.
    """
    layer = cache_layer(cache, index)
    if skips_attention and not isinstance(layer, SkippingLayer):
        layer = cache.layers[index] = SkippingLayer(getattr(layer, "tokens", None))
    else:
        layer = _keeping_layer(cache, index)
    layer.keep = keep
    layer.probs = probs


def remembered(cache: Any, index: int) -> tuple[Tensor, Tensor] | None:
    """The decision of layer `index`, `keep` and `probs`, each `[B]`; None before there is one."""
    layer = cache_layer(cache, index)
    if getattr(layer, "keep", None) is None:
        return None
    return layer.keep, layer.probs


def remember_tokens(cache: Any, index: int, tokens: Tensor) -> None:
    """Store the last tokens at every new position, int64 `[B, T, M]`, of layer `index`.

    Where the layer can be cropped, those of all positions stay; else the last position's do, where
    they are.
    """
    layer = _keeping_layer(cache, index)
    held = layer.tokens
    last = tokens[:, -1:]
    grows = isinstance(layer, DynamicLayer)
    if grows:
        before = [] if held is None else [held.to(tokens.device)]
        layer.tokens = torch.cat([*before, tokens], dim=1)
    elif held is not None and held.shape == last.shape:
        held.copy_(last)
        layer.seen.add_(tokens.shape[1])
    else:
        layer.tokens = last.clone()
        layer.seen = torch.tensor(tokens.shape[1], device=last.device)
        if not torch.compiler.is_compiling():
            for kept in (layer.tokens, layer.seen):
                # As transformers marks the keys, for CUDA graphs.
                torch._dynamo.mark_static_address(kept)


def last_tokens(cache: Any, index: int, count: int) -> Tensor | None:
    """The last `count` tokens of every sequence in layer `index`, int64 `[B, count]`;
    None if the cache is empty.

    Raises:
        ValueError: The cache holds tokens that were not stored with it, which a layer of fixed size
            tells only while it knows none, or on a CPU, uncompiled; or another number of them.
    """
    layer = cache_layer(cache, index)
    tokens: Tensor | None = getattr(layer, "tokens", None)
    seen: Tensor | None = getattr(layer, "seen", None)
    known = 0 if tokens is None else tokens.shape[1]
    if seen is None:
        missing = layer is not None and layer.get_seq_length() != known
    else:
        # Nothing waits for a device.
        reads = seen.device.type == "cpu" and not torch.compiler.is_compiling()
        missing = reads and int(seen) != int(layer.get_seq_length())
    if missing or (tokens is not None and tokens.shape[-1] != count):
        raise ValueError(
            "this KV cache was filled without the adapter's memory, which has to know its tokens; "
            "start a new cache"
        )
    if tokens is not None and known:
        return tokens[:, -1]
    return None


def earlier_scores(cache: Any, index: int, batch: int) -> Tensor | None:
    """The scores at the positions that layer `index` of a cache holds, `[B, P]`,
    NaN where none was stored; None if it holds none.

    Raises:
        ValueError: The layer is of fixed size.
    """
    layer = cache_layer(cache, index)
    if layer is None:
        return None
    if not isinstance(layer, DynamicLayer):
        raise ValueError(
            "causal_rule='running' keeps scores with the keys of a KV cache that grows, not with "
            f"those of a {type(layer).__name__}; use the default cache, or set_causal_rule(model, "
            "'quantile')"
        )
    scores: Tensor | None = getattr(layer, "scores", None)
    missing = layer.get_seq_length() - (0 if scores is None else scores.shape[1])
    if missing <= 0:
        return scores
    unknown = torch.full((batch, missing), torch.nan)
    if scores is None:
        return unknown
    return torch.cat([scores, unknown.to(scores.device)], dim=1)


def remember_scores(cache: Any, index: int, scores: Tensor) -> None:
    """Store the scores at all positions of layer `index`, `[B, P]`, this pass included."""
    _keeping_layer(cache, index).scores = scores


def kv_cache_bytes(cache: Any) -> int:
    """Bytes of keys and values that a transformers cache holds."""
    parts = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _keeping_layer(cache: Any, index: int) -> Any:
    """Layer `index` of a cache, as one that keeps more than keys and values."""
    layer = cache_layer(cache, index)
    if not isinstance(layer, KeepingLayer):
        cls = keeping_class(layer.__class__)
        state = layer.__dict__
        layer = cls.__new__(cls)
        layer.__dict__ = state
        cache.layers[index] = layer
    return layer


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A layer's keyword arguments for a run that neither reads nor writes the KV cache."""
    return {**kwargs, "use_cache": False, **{name: None for name in _CACHES if name in kwargs}}


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether a call comes from continuous batching: many sequences in a row, a paged cache.

    The attention function writes that cache, so it has to run for every token.
    """
    return kwargs.get("cache") is not None


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The KV cache among a layer's keyword arguments, or None."""
    return next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
