"""How the attention of a family projects its input to queries, keys and values: one table row per style.

Shapes: B batch, T positions, H query heads, G key-value heads, k head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D


def _always(attention: Any) -> bool:
    return True


@dataclass(frozen=True)
class Projections:
    """How the attention of a family makes queries, keys and values.

    Args:
        projected: `(attention, x [..., d]) -> [..., H * k]`, the query projection.
        queries: `(attention, projected [..., H * k]) -> [..., H, k]`, before the rotary embedding.
        keys_values: `(attention, x [B, T, d]) -> [B, T, G, k]` twice, before the rotary embedding.
        weights: Names of the attention's children that a skipped query does not meet, and the part of each: of a fused
            projection, the rows that are the query's.
        output: Name of the output projection.
        rotates: `(attention) -> bool`: whether queries and keys are rotated by `position_embeddings`; some families
            leave it to three layers of four, or to those with a sliding window.
        halves: Whether the rotation is the usual one, of the halves of a head. Otherwise it is the model's own
            function, and row ops do not do it.
        softcap: Whether the kernel is given the attention's `attn_logit_softcapping`.
    """

    projected: Callable[[Any, torch.Tensor], torch.Tensor]
    queries: Callable[[Any, torch.Tensor], torch.Tensor]
    keys_values: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    weights: Callable[[Any], dict[str, float]]
    output: str = "o_proj"
    rotates: Callable[[Any], bool] = _always
    halves: bool = True
    softcap: bool = False


def _split(attention: Any, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, attention.head_dim))


def _query_output(attention: Any) -> dict[str, float]:
    return {"q_proj": 1.0, "o_proj": 1.0}


def _plain_projected(attention: Any, x: torch.Tensor) -> Any:
    return attention.q_proj(x)


def _plain_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _split(attention, attention.k_proj(x)), _split(attention, attention.v_proj(x))


def _head_norm_queries(attention: Any, projected: torch.Tensor) -> Any:
    return attention.q_norm(_split(attention, projected))


def _head_norm_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _plain_keys_values(attention, x)
    return attention.k_norm(keys), values


def _flat_norm_queries(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    return _split(attention, _clipped(attention, attention.q_norm(projected)))


def _flat_norm_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = attention.k_norm(attention.k_proj(x)), attention.v_proj(x)
    return _split(attention, _clipped(attention, keys)), _split(attention, _clipped(attention, values))


def _clipped(attention: Any, x: torch.Tensor) -> torch.Tensor:
    bound = getattr(attention.config, "clip_qkv", None)
    return x if bound is None else x.clamp(min=-bound, max=bound)


def _layernorm_queries(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    queries = _split(attention, projected)
    return _by_head(attention.q_layernorm, queries) if attention.qk_layernorm else queries


def _layernorm_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _plain_keys_values(attention, x)
    return _by_head(attention.k_layernorm, keys) if attention.qk_layernorm else keys, values


def _by_head(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm that is one for all heads, or a list of one per head over dimension 1 (StableLM)."""
    out: torch.Tensor = norm(x.flatten(0, -3))
    return out.view_as(x)


def _optional_norm_queries(attention: Any, projected: torch.Tensor) -> Any:
    queries = _split(attention, projected)
    return attention.q_norm(queries) if attention.use_qk_norm else queries


def _optional_norm_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _plain_keys_values(attention, x)
    return attention.k_norm(keys) if attention.use_qk_norm else keys, values


def _clipped_queries(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    return _split(attention, _clipped(attention, projected))


def _clipped_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (_clipped(attention, project(x)) for project in (attention.k_proj, attention.v_proj))
    return _split(attention, keys), _split(attention, values)


def _stacked_part(attention: Any, x: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
    """Outputs `start:stop` of Phi-3's fused projection: queries, then keys, then values."""
    fused = attention.qkv_proj
    if type(fused) is not nn.Linear:
        out: torch.Tensor = fused(x)[..., start:stop]
        return out
    return F.linear(x, fused.weight[start:stop], None if fused.bias is None else fused.bias[start:stop])


def _stacked_projected(attention: Any, x: torch.Tensor) -> torch.Tensor:
    return _stacked_part(attention, x, 0, _query_width(attention))


def _stacked_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _stacked_part(attention, x, _query_width(attention), None).chunk(2, dim=-1)
    return _split(attention, keys), _split(attention, values)


def _query_width(attention: Any) -> int:
    return int(attention.config.num_attention_heads * attention.head_dim)


def _stacked_weights(attention: Any) -> dict[str, float]:
    config = attention.config
    heads = config.num_attention_heads
    return {"qkv_proj": heads / (heads + 2 * config.num_key_value_heads), "o_proj": 1.0}


def _by_heads_part(attention: Any, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Parts `start:stop` of GPT-NeoX's fused projection, `[..., H, stop - start, k]`.

    It has query, key and value of a head side by side, `[..., H, k]` of each.
    """
    fused, width = attention.query_key_value, attention.head_size
    if type(fused) is not nn.Linear:
        out: torch.Tensor = fused(x).unflatten(-1, (-1, 3, width))[..., start:stop, :]
        return out
    rows = x.reshape(1, -1, x.shape[-1])
    weight = fused.weight.view(-1, 3 * width, x.shape[-1])[:, start * width : stop * width]  # [H, n k, d], not copied
    part = torch.bmm(rows.expand(len(weight), -1, -1), weight.transpose(1, 2)).transpose(0, 1)
    if fused.bias is not None:
        part = part + fused.bias.view(-1, 3 * width)[:, start * width : stop * width]
    return part.reshape(*x.shape[:-1], -1, stop - start, width)


def _by_heads_projected(attention: Any, x: torch.Tensor) -> torch.Tensor:
    return _by_heads_part(attention, x, 0, 1).flatten(-3)


def _by_heads_queries(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    return projected.unflatten(-1, (-1, attention.head_size))


def _by_heads_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _by_heads_part(attention, x, 1, 3).unbind(-2)
    return keys, values


def _rotates_here(attention: Any) -> bool:
    """SmolLM3: three layers of four."""
    return bool(attention.use_rope)


def _rotates_unless_global(attention: Any) -> bool:
    """EXAONE 4: every layer of a model without windows; otherwise those with one, and each knows the model's."""
    return attention.sliding_window is None or bool(attention.is_sliding)


def _rotates_in_windows(attention: Any) -> bool:
    """Cohere 2: the layers that have a sliding window."""
    return attention.sliding_window is not None


def _fused_part(attention: Any, x: torch.Tensor, start: int, stop: int) -> Any:
    """Columns `start:stop` (in units of d) of GPT-2's fused projection."""
    fused, width = attention.c_attn, attention.split_size
    if type(fused) is not Conv1D:  # a LoRA layer around it computes all columns or none
        return fused(x)[..., start * width : stop * width]
    columns = slice(start * width, stop * width)
    return F.linear(x, fused.weight[:, columns].T, fused.bias[columns])


def _fused_projected(attention: Any, x: torch.Tensor) -> Any:
    return _fused_part(attention, x, 0, 1)


def _fused_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _fused_part(attention, x, 1, 3).chunk(2, dim=-1)
    return _split(attention, keys), _split(attention, values)


_PLAIN = Projections(_plain_projected, _split, _plain_keys_values, _query_output)
_HEAD_NORM = replace(_PLAIN, queries=_head_norm_queries, keys_values=_head_norm_keys_values)
_LAYERNORM = replace(_PLAIN, queries=_layernorm_queries, keys_values=_layernorm_keys_values)
_PAIRS = replace(_PLAIN, halves=False)  # neighbouring dimensions are rotated together

STYLES: dict[str, Projections] = {
    "rotary": _PLAIN,
    "rotary_clipped": replace(_PLAIN, queries=_clipped_queries, keys_values=_clipped_keys_values),
    "rotary_flat_norm": replace(_PLAIN, queries=_flat_norm_queries, keys_values=_flat_norm_keys_values),
    "rotary_head_norm": _HEAD_NORM,
    "rotary_head_norm_some": replace(_HEAD_NORM, rotates=_rotates_unless_global),
    "rotary_layernorm": _LAYERNORM,
    "rotary_layernorm_dense": replace(_LAYERNORM, weights=lambda _: {"q_proj": 1.0, "dense": 1.0}, output="dense"),
    "rotary_pairs": _PAIRS,
    "rotary_pairs_norm": replace(_PAIRS, queries=_optional_norm_queries, keys_values=_optional_norm_keys_values),
    "rotary_pairs_some": replace(_PAIRS, rotates=_rotates_in_windows),
    "rotary_softcap": replace(_PLAIN, softcap=True),
    "rotary_some": replace(_PLAIN, rotates=_rotates_here),
    "rotary_fused": Projections(_stacked_projected, _split, _stacked_keys_values, _stacked_weights),
    "rotary_fused_heads": Projections(
        _by_heads_projected,
        _by_heads_queries,
        _by_heads_keys_values,
        lambda _: {"query_key_value": 1 / 3, "dense": 1.0},
        output="dense",
    ),
    "fused": Projections(
        _fused_projected,
        _split,
        _fused_keys_values,
        lambda _: {"c_attn": 1 / 3, "c_proj": 1.0},
        output="c_proj",
        rotates=lambda _: False,
    ),
}
