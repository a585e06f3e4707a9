"""How the attention of a family projects its input to queries, keys and values:
one table row per style.

Shapes: B batch, T positions, H query heads, G key-value heads, k head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .readable import is_readable


@dataclass(frozen=True)
class Projections:
    """How the attention of a family makes queries, keys and values.

    Args:
        project: `(attention, x [..., d], names)` -> one projection for each of the names,
            `[..., H * k]` or `[..., G * k]`; `names` is `"q"`, `"kv"` or `"qkv"`.
        heads: `(attention, projection, "q", "k" or "v") -> [..., H or G, k]`, before the rotary
            embedding.
        weights: Names of the attention's children that a skipped query does not meet, and the part
            of each: of a fused projection, the rows that are the query's.
        output: Name of the output projection.
        dropout: Name of the dropout module behind it; None if the attention has none of its own.
        rotates: `(attention) -> bool`: whether queries and keys are rotated by
            `position_embeddings`; some families leave it to three layers of four, or to those with
            a sliding window.
        halves: Whether the rotation is the usual one, of the halves of a head. Otherwise it is the
            model's own function, and row ops do not do it.
        softcap: Whether the kernel is given the attention's `attn_logit_softcapping`.
        fused: Name of the one projection that makes queries, keys and values; None if each has its
            own.
    """

    project: Callable[[Any, Tensor, str], Sequence[Tensor]]
    heads: Callable[[Any, Tensor, str], Tensor]
    weights: Callable[[Any], dict[str, float]] = lambda _: {"q_proj": 1.0, "o_proj": 1.0}
    output: str = "o_proj"
    dropout: str | None = None
    rotates: Callable[[Any], bool] = lambda _: True
    halves: bool = True
    softcap: bool = False
    fused: str | None = None

    def whole(self, attention: Any) -> bool:
        """Whether queries, keys and values come out of one call, which nothing may pass by."""
        return self.fused is not None and not is_readable(
            getattr(attention, self.fused), nn.Linear, Conv1D
        )

    def outputs(self, attention: Any, x: Tensor) -> Tensor:
        """The output projection and what comes behind it, `[..., H * k] -> [..., d]`."""
        x = getattr(attention, self.output)(x)
        if self.dropout is None:
            return x
        return getattr(attention, self.dropout)(x)

    def keys_values(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`[B, T, d] -> [B, T, G, k]` twice, before the rotary embedding; and,
        where it came with them, the query's."""
        names = "qkv" if self.whole(attention) else "kv"
        *queries, keys, values = self.project(attention, x, names)
        keys = self.heads(attention, keys, "k")
        values = self.heads(attention, values, "v")
        return keys, values, next(iter(queries), None)


def _separate(attention: Any, x: Tensor, names: str) -> Sequence[Tensor]:
    return [getattr(attention, f"{name}_proj")(x) for name in names]


def _stacked(attention: Any, x: Tensor, names: str) -> Sequence[Tensor]:
    """Phi-3's fused projection: queries, then keys, then values."""
    fused = attention.qkv_proj
    width = int(attention.config.num_attention_heads * attention.head_dim)
    if names == "qkv":
        made = fused(x)
        return made[..., :width], *made[..., width:].chunk(2, dim=-1)
    rows = slice(0, width) if names == "q" else slice(width, None)
    part = F.linear(x, fused.weight[rows], None if fused.bias is None else fused.bias[rows])
    return part.chunk(len(names), dim=-1)


def _fused(attention: Any, x: Tensor, names: str) -> Sequence[Tensor]:
    """GPT-2's fused projection, by columns in units of d."""
    fused = attention.c_attn
    width = attention.split_size
    if names == "qkv":
        return fused(x).chunk(3, dim=-1)
    columns = slice(0, width) if names == "q" else slice(width, 3 * width)
    return F.linear(x, fused.weight[:, columns].T, fused.bias[columns]).chunk(len(names), dim=-1)


def _by_heads(attention: Any, x: Tensor, names: str) -> Sequence[Tensor]:
    """GPT-NeoX's fused projection: query, key and value of a head, `[..., H, k]`, side by side."""
    fused = attention.query_key_value
    width = attention.head_size
    if names == "qkv":
        queries, keys, values = fused(x).unflatten(-1, (-1, 3, width)).unbind(-2)
        return queries.flatten(-2), keys, values
    start = 0
    count = 1
    if names != "q":
        start = 1
        count = 2
    columns = slice(start * width, (start + count) * width)
    rows = x.reshape(1, -1, x.shape[-1])
    # [H, n k, d], a view
    weight = fused.weight.view(-1, 3 * width, x.shape[-1])[:, columns]
    part = torch.bmm(rows.expand(len(weight), -1, -1), weight.transpose(1, 2)).transpose(0, 1)
    if fused.bias is not None:
        part = part + fused.bias.view(-1, 3 * width)[:, columns]
    part = part.reshape(*x.shape[:-1], -1, count, width)
    if names == "q":
        return [part.flatten(-3)]
    return part.unbind(-2)


def _split(attention: Any, x: Tensor, name: str) -> Tensor:
    return x.unflatten(-1, (-1, attention.head_dim))


def _queries_split(attention: Any, x: Tensor, name: str) -> Tensor:
    if name == "q":
        return x.unflatten(-1, (-1, attention.head_size))
    return x


def _head_norm(attention: Any, x: Tensor, name: str) -> Tensor:
    x = _split(attention, x, name)
    if name == "v":
        return x
    return getattr(attention, f"{name}_norm")(x)


def _optional_norm(attention: Any, x: Tensor, name: str) -> Tensor:
    return (_head_norm if attention.use_qk_norm else _split)(attention, x, name)


def _clipped(attention: Any, x: Tensor, name: str) -> Tensor:
    bound = getattr(attention.config, "clip_qkv", None)
    return _split(attention, x if bound is None else x.clamp(min=-bound, max=bound), name)


def _flat_norm(attention: Any, x: Tensor, name: str) -> Tensor:
    return _clipped(attention, x if name == "v" else getattr(attention, f"{name}_norm")(x), name)


def _layernorm(attention: Any, x: Tensor, name: str) -> Tensor:
    """StableLM and Phi: one norm for all heads, or a list of one per head over dimension 1."""
    x = _split(attention, x, name)
    if name == "v" or not attention.qk_layernorm:
        return x
    return getattr(attention, f"{name}_layernorm")(x.flatten(0, -3)).view_as(x)


def _stacked_weights(attention: Any) -> dict[str, float]:
    heads = attention.config.num_attention_heads
    return {"qkv_proj": heads / (heads + 2 * attention.config.num_key_value_heads), "o_proj": 1.0}


_PLAIN = Projections(_separate, _split)
_HEAD_NORM = replace(_PLAIN, heads=_head_norm)
_LAYERNORM = replace(_PLAIN, heads=_layernorm)
_PAIRS = replace(_PLAIN, halves=False)  # neighbouring dimensions are rotated together

STYLES: dict[str, Projections] = {
    "rotary": _PLAIN,
    "rotary_clipped": replace(_PLAIN, heads=_clipped),
    "rotary_flat_norm": replace(_PLAIN, heads=_flat_norm),
    "rotary_head_norm": _HEAD_NORM,
    # EXAONE 4: every layer of a model without windows; otherwise those with one, and each knows the
    # model's.
    "rotary_head_norm_some": replace(
        _HEAD_NORM, rotates=lambda a: a.sliding_window is None or bool(a.is_sliding)
    ),
    "rotary_layernorm": _LAYERNORM,
    "rotary_layernorm_dense": replace(
        _LAYERNORM, weights=lambda _: {"q_proj": 1.0, "dense": 1.0}, output="dense"
    ),
    "rotary_pairs": _PAIRS,
    "rotary_pairs_norm": replace(_PAIRS, heads=_optional_norm),
    # Cohere 2.
    "rotary_pairs_some": replace(_PAIRS, rotates=lambda a: a.sliding_window is not None),
    "rotary_softcap": replace(_PLAIN, softcap=True),
    # SmolLM3: three layers of four.
    "rotary_some": replace(_PLAIN, rotates=lambda a: bool(a.use_rope)),
    "rotary_fused": Projections(_stacked, _split, _stacked_weights, fused="qkv_proj"),
    "rotary_fused_heads": Projections(
        _by_heads,
        _queries_split,
        lambda _: {"query_key_value": 1 / 3, "dense": 1.0},
        output="dense",
        fused="query_key_value",
    ),
    "fused": Projections(
        _fused,
        _split,
        lambda _: {"c_attn": 1 / 3, "c_proj": 1.0},
        output="c_proj",
        dropout="resid_dropout",
        rotates=lambda _: False,
        fused="c_attn",
    ),
}
