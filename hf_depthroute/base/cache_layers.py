"""Layers of a KV cache that hold more than keys and values, or not those of every sequence.

Shapes: B sequences of the cache, P positions held, M tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Attributes of a layer, each with the sequences as its first dimension.
_KEPT = ("keep", "probs", "tokens", "scores")
_NO_TOKEN = -1  # `parts.memory.MISSING`


class KeepingLayer:
    """Mixin of a cache layer.

    Attributes:
        keep: Bool `[B]`, true for the sequences that run the routed part in full.
        probs: Float32 `[B]`, their `p`.
        tokens: Int64 `[B, P, M]`, at every position the last tokens, as `parts.memory.suffixes` has
            them; `[B, 1, M]`, those of the last position, in a layer of fixed size, which is
            written in place as its keys are.
        seen: Int64 `[]`, of how many positions, in a layer of fixed size.
        scores: Float32 `[B, P]`, the gate's score at every position, NaN where it did not decide.
    """

    keep: Tensor | None = None
    probs: Tensor | None = None
    tokens: Tensor | None = None
    seen: Tensor | None = None
    scores: Tensor | None = None

    def change_kept(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put `change` of everything besides keys and values in its place."""
        for name in _KEPT:
            kept = getattr(self, name)
            if kept is not None:
                setattr(self, name, change(kept))


class _Following(KeepingLayer):
    """Mixin of a class that holds keys and values of every sequence."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.change_kept(lambda kept: kept[beam_idx.to(kept.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.change_kept(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.change_kept(lambda kept: kept[indices.to(kept.device)])

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.keep = self.probs = self.scores = None
        if self.tokens is not None:  # a captured graph reads where a layer of fixed size has them
            if isinstance(self, DynamicLayer):
                self.tokens = None
            else:
                self.tokens = self.tokens.fill_(_NO_TOKEN)
        if self.seen is not None:
            self.seen.zero_()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_layer, (type(self).__bases__[1],), self.__dict__

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        length = self.get_seq_length()  # type: ignore[attr-defined]
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length]
        if self.scores is not None:
            self.scores = self.scores[:, :length]
        if length == 0:  # the next tokens are a prompt
            self.keep = self.probs = None


class SkippingLayer(KeepingLayer, DynamicLayer):
    """A cache layer that holds keys and values of the kept sequences only,
    and the length of all of them."""

    _layer_type = None  # transformers registers subclasses by it

    def __init__(self, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.length = 0

    def advance(self, count: int) -> None:
        """`count` more positions have been seen, of which no sequence keeps keys and values."""
        self.length += count

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keep is None or len(key_states) != int(self.keep.sum()):
            raise ValueError(
                "this KV cache was filled with whole sequences skipped and cannot be read without "
                "the adapter that did it; start a new cache"
            )
        self.length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.length

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keep is not None:
            indices = torch.arange(len(self.keep), device=self.keep.device)
            self.batch_select_indices(indices.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` positions; a positive number is the length to leave."""
        left = tokens_to_remove
        if tokens_to_remove <= 0:
            left = self.length + tokens_to_remove
        self.length = min(self.length, left)
        if self.length == 0:  # the next tokens are a prompt
            self.reset()
        if self.keys is not None and self.values is not None and self.is_initialized:
            self.keys = self.keys[..., : self.length, :]
            self.values = self.values[..., : self.length, :]
        if self.tokens is not None:
            self.tokens = self.tokens[:, : self.length]

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.keep = self.probs = self.tokens = None
        self.length = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.keep is None:
            return
        indices = indices.to(self.keep.device)
        if self.keys is not None and self.values is not None:
            rows = (self.keep.cumsum(0) - 1)[indices][self.keep[indices]]
            self.keys = self.keys[rows]
            self.values = self.values[rows]
        self.change_kept(lambda kept: kept[indices.to(kept.device)])


@functools.cache
def keeping_class(base: Any) -> Any:
    """The subclass of a cache layer's class that keeps more than keys and values."""
    held = {"_layer_type": None, "__module__": base.__module__}
    return type(base.__name__, (_Following, base), held)


def _empty_layer(base: Any) -> Any:
    """A layer of that subclass, which pickle and copy do not find by its name."""
    cls = keeping_class(base)
    return cls.__new__(cls)
