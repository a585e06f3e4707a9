"""Attention for some of the queries: keys and values of every token, queries,
softmax and output of the chosen ones.

Legend: B batch, T positions, S keys, N chosen queries, R sequences with a chosen query, Q most
chosen queries of one sequence, H query heads, G key-value heads, k head width, d model width.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..base.cache import cache_of, is_paged
from ..base.projections import STYLES, Projections
from ..base.readable import is_watched
from ..base.recorded import records_attention
from ..base.sublayers import Kwargs
from .kernels import attend_rows, linear_rows
from .kernels.eligible import is_plain_linear

_KERNELS = ("sdpa", "eager")  # attention implementations that take any subset of the queries
# Of a configuration; what they drop of a subset would be another draw.
_DROPOUTS = ("attention_dropout", "attn_pdrop")
# Chosen queries of a sequence that are run against one cut of the keys. Fewer read more keys than
# they use up, since keys are repeated for every slice; more see keys that come after them.
_CAUSAL_SLICE = 256


def supports_subset(attention: nn.Module, style: str | None, kwargs: Kwargs) -> bool:
    """Whether `attended_rows` can stand in for a call of `attention`."""
    config: Any = attention.config
    kind = config._attn_implementation
    drops = attention.training and any(getattr(config, name, 0) for name in _DROPOUTS)
    return (
        style is not None
        and not drops
        and not is_paged(kwargs)
        and not is_watched(attention)
        and kind in _KERNELS
        and not (kind == "eager" and getattr(attention, "reorder_and_upcast_attn", False))
        and not records_attention(kwargs)
    )


def supports_rows(attention: Any, style: str | None, x: Tensor, kwargs: Kwargs) -> bool:
    """Whether `attended_update` can stand in for a call of `attention` with `x`."""
    allowed = kwargs.get("attention_mask")
    return (
        supports_subset(attention, style, kwargs)
        and style is not None
        and STYLES[style].halves
        and not STYLES[style].softcap
        and all(is_plain_linear(attention._modules.get(name), x) for name in ("q_proj", "o_proj"))
        and (allowed is None or (allowed.ndim == 4 and allowed.shape[1] == 1))
    )


def attended_rows(attention: Any, style: str, x: Tensor, mask: Tensor, kwargs: Kwargs) -> Tensor:
    """The attention's output at the tokens in `mask`, `[B, T]`: `[N, d]`, in their order.

    All tokens of `x`, `[B, T, d]`, enter the KV cache. `style` is a key of `STYLES`.
    """
    make = STYLES[style]
    keys, values, projected, embeddings = _keys_values(attention, make, x, kwargs)
    row_N, time_N = mask.nonzero(as_tuple=True)
    if row_N.numel() == 0:
        return x.new_zeros(0, x.shape[-1])
    if projected is None:
        chosen = make.project(attention, x[row_N, time_N][None], "q")[0][0]
    else:
        chosen = projected[row_N, time_N]
    queries = make.heads(attention, chosen, "q")  # [N, H, k]
    if embeddings is not None:
        cos, sin = (part.expand(len(x), -1, -1)[row_N, time_N] for part in embeddings)
        queries = _rotated(attention, make, queries, cos, sin)

    count_B = mask.sum(dim=1)
    used_R = count_B.nonzero().squeeze(-1)
    if used_R.numel() < len(x):
        keys = keys[used_R]
        values = values[used_R]
    # A chosen query's sequence, 0..R-1, and its slot there, 0..Q-1.
    row_N = (count_B > 0).cumsum(0)[row_N] - 1
    slot_N = (mask.cumsum(dim=1) - 1)[mask]
    shape = len(used_R), int(count_B.max())

    def padded(rows: Tensor, fill: int = 0) -> Tensor:  # [N, ...] -> [R, Q, ...]
        out = rows.new_full((*shape, *rows.shape[1:]), fill)
        out[row_N, slot_N] = rows
        return out

    queries = padded(queries).transpose(1, 2)
    allowed = kwargs.get("attention_mask")
    if allowed is None and x.shape[1] > 1:
        out = _causal(attention, make, queries, keys, values, padded(time_N))
    else:
        if allowed is not None:  # [N, 1 or H, S]; padding sees every key
            allowed = allowed[..., : keys.shape[2]].expand(len(x), -1, -1, -1)
            rows = allowed.transpose(1, 2)[mask]
            allowed = padded(rows, fill=rows.dtype == torch.bool).transpose(1, 2)
        out = _run(attention, make, queries, keys, values, allowed)
    return make.outputs(attention, out[row_N, slot_N].flatten(-2)[None])[0]


def write_keys_values(attention: Any, style: str | None, x: Tensor, kwargs: Kwargs) -> None:
    """Enter `x`, `[B, T, d]`, into the KV cache and nothing else; where that cannot be,
    the attention runs for it."""
    if style is not None and supports_subset(attention, style, kwargs):
        _keys_values(attention, STYLES[style], x, kwargs)
    else:
        attention(x, **kwargs)


def attended_update(attention: Any, style: str, x: Tensor, mask: Tensor, kwargs: Kwargs) -> Tensor:
    """`attended_rows` by row ops: `[B, T, d]`, zeros where not `mask`;
    its shapes do not depend on the mask."""
    make = STYLES[style]
    flat = mask.reshape(-1)
    keys, values, _, embeddings = _keys_values(attention, make, x, kwargs)
    project = attention.q_proj
    output = attention.o_proj
    queries = linear_rows(x.reshape(-1, x.shape[-1]), flat, project.weight, project.bias)
    queries = make.heads(attention, queries.view(*x.shape[:-1], -1), "q")  # [B, T, H, k]
    if embeddings is not None:
        queries = _rotated(attention, make, queries, *embeddings)
    allowed = kwargs.get("attention_mask")
    if allowed is not None:
        allowed = allowed[..., : keys.shape[2]]
    # Without a mask, one query sees every key; several are the first positions of the cache.
    past = keys.shape[2] - 1 if x.shape[1] == 1 else 0
    out = attend_rows(queries, keys, values, mask, allowed, past, attention.scaling)
    rows = linear_rows(out.flatten(0, 1).flatten(1), flat, output.weight, output.bias)
    return rows.view(*x.shape[:-1], -1)


def _keys_values(
    attention: Any, make: Projections, x: Tensor, kwargs: Kwargs
) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    """Keys and values of every token seen, `[B, G, S, k]` each,
    with those of `x` `[B, T, d]` in the cache.

    Behind them the query projection of `x`, None unless a fused one was called whole, and the
    rotary embeddings, None if the attention does not rotate.
    """
    cache = cache_of(kwargs)
    embeddings = None
    if make.rotates(attention):
        embeddings = kwargs.get("position_embeddings")
    keys, values, projected = make.keys_values(attention, x)  # [B, T, G, k]
    if embeddings is not None:
        keys = _rotated(attention, make, keys, *embeddings)
    keys = keys.transpose(1, 2)
    values = values.transpose(1, 2)
    if cache is not None:
        keys, values = cache.update(keys, values, attention.layer_idx)
    return keys, values, projected, embeddings


def _run(
    attention: Any, make: Projections, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None
) -> Tensor:
    """The model's own attention kernel: queries `[R, H, Q, k]` to `[R, Q, H, k]`."""
    # A model that runs has loaded it.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = attention.config._attn_implementation
    eager = _source_of(attention).eager_attention_forward
    kernel: Any = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    if kind == "eager" and seen is not None and seen.dtype == torch.bool:
        seen = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    how = {"dropout": 0.0, "scaling": attention.scaling}
    if make.softcap:
        how["softcap"] = attention.attn_logit_softcapping
    return kernel(attention, q, keys, values, seen, **how)[0]


def _causal(
    attention: Any, make: Projections, q: Tensor, keys: Tensor, values: Tensor, time_RQ: Tensor
) -> Tensor:
    """Without a mask: token `t` sees keys `0..t`.

    Queries are cut into slices that see no more keys than they need.
    """
    parts = []
    for part, time in zip(q.split(_CAUSAL_SLICE, dim=2), time_RQ.split(_CAUSAL_SLICE, dim=1)):
        length = int(time.max()) + 1
        seen = torch.arange(length, device=time.device) <= time[:, None, :, None]
        cut = keys[:, :, :length], values[:, :, :length]
        parts.append(_run(attention, make, part, *cut, seen))
    return torch.cat(parts, dim=1)


def _rotated(attention: Any, make: Projections, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys `[..., H, k]` turned by `cos`, `sin` `[..., r]`;
    `k - r` dimensions of a head stay."""
    turned = x[..., : cos.shape[-1]]
    rest = x[..., cos.shape[-1] :]
    if make.halves:
        cos = cos.unsqueeze(-2)
        sin = sin.unsqueeze(-2)
        first, second = turned.chunk(2, dim=-1)
        turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    else:  # the model's own, which takes queries and keys together: here, no key
        rotate = _source_of(attention).apply_rotary_pos_emb
        turned = rotate(turned, turned[..., :0, :], cos, sin, unsqueeze_dim=-2)[0]
    if rest.shape[-1]:
        return torch.cat((turned, rest), dim=-1)
    return turned


def _source_of(attention: Any) -> Any:
    """The Python module that defines the attention, also one that PEFT has copied."""
    return sys.modules[type(getattr(attention, "original_module", attention)).__module__]
