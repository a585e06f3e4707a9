"""How the attention of a family projects its input to queries, keys and values: one table row per style.

Shapes: B batch, T positions, H query heads, G key-value heads, k head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
        usable: `(attention) -> bool`: whether this attention is what the style describes.
    """

    projected: Callable[[Any, torch.Tensor], torch.Tensor]
    queries: Callable[[Any, torch.Tensor], torch.Tensor]
    keys_values: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    weights: Callable[[Any], dict[str, float]]
    output: str = "o_proj"
    rotates: Callable[[Any], bool] = _always
    halves: bool = True
    usable: Callable[[Any], bool] = _always


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


def _layernorm_queries(attention: Any, projected: torch.Tensor) -> Any:
    queries = _split(attention, projected)
    return attention.q_layernorm(queries) if attention.qk_layernorm else queries


def _layernorm_keys_values(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _plain_keys_values(attention, x)
    return attention.k_layernorm(keys) if attention.qk_layernorm else keys, values


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


STYLES: dict[str, Projections] = {
    "rotary": Projections(_plain_projected, _split, _plain_keys_values, _query_output),
    "rotary_head_norm": Projections(_plain_projected, _head_norm_queries, _head_norm_keys_values, _query_output),
    "rotary_flat_norm": Projections(_plain_projected, _flat_norm_queries, _flat_norm_keys_values, _query_output),
    "rotary_dense": Projections(
        _plain_projected, _layernorm_queries, _layernorm_keys_values, lambda _: {"q_proj": 1.0, "dense": 1.0}, "dense"
    ),
    "fused": Projections(
        _fused_projected,
        _split,
        _fused_keys_values,
        lambda _: {"c_attn": 1 / 3, "c_proj": 1.0},
        output="c_proj",
        rotates=lambda attention: False,
    ),
}
