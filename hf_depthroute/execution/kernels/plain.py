"""The row ops in plain PyTorch: gather the chosen rows, compute, scatter.

Legend: N rows, F chosen rows, i and o input and output width, d model width, f FFN width, B
sequences, T positions, S keys, H query heads, G key-value heads, k head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gathered import cpu_slice

_CAUSAL_SLICE = 64  # chosen queries of a sequence that are run against one cut of the keys


def linear(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` at the rows in `mask`, zeros at the others.

    Args:
        x: `[N, i]`.
        mask: Bool `[N]`.
        weight: `[o, i]`, in the dtype of `x`.
        bias: `[o]`, or None.

    Returns:
        `[N, o]`.
    """
    index = mask.nonzero().squeeze(-1)  # [F]
    if index.numel() == len(x):
        return F.linear(x, weight, bias)
    out = x.new_zeros(len(x), len(weight))
    if index.numel():
        out.index_copy_(0, index, F.linear(x.index_select(0, index), weight, bias))
    return out


def swiglu(
    stream: Tensor,
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
) -> Tensor:
    """`stream + scale * W_down (SiLU(W_gate x) * W_up x)` at the rows in `mask`,
    `stream` at the others.

    Args:
        stream: `[N, d]`.
        x: `[N, d]`, what the FFN reads.
        mask: Bool `[N]`.
        scale: Float `[N]`; None is 1.
        w_gate: `[f, d]`, as the other weights in the dtype of `x`.
        w_up: `[f, d]`.
        w_down: `[d, f]`.

    Returns:
        `[N, d]`.
    """
    index = mask.nonzero().squeeze(-1)  # [F]
    out = stream.clone()
    for rows in index.split(cpu_slice(len(w_up)) if x.device.type == "cpu" else max(1, len(index))):
        if not rows.numel():
            continue
        part = x
        if rows.numel() != len(x):
            part = x.index_select(0, rows)
        update = F.linear(F.silu(F.linear(part, w_gate)) * F.linear(part, w_up), w_down)
        if scale is not None:
            update = update * scale[rows, None].to(update.dtype)
        out.index_add_(0, rows, update)
    return out


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    past: int,
    scaling: float,
) -> Tensor:
    """Softmax attention of the queries in `mask`, zeros at the others;
    query heads share key-value heads in order.

    Args:
        q: `[B, T, H, k]`.
        keys: `[B, G, S, k]` with any strides, as the values.
        values: `[B, G, S, k]`.
        mask: Bool `[B, T]`.
        allowed: `[B or 1, 1, T, S]`: bool, or a float that is added to the scores. None: query `t`
            sees keys `0 .. past + t`.
        past: Positions before the first query; without effect where `allowed` is given.
        scaling: What the scores are multiplied by.

    Returns:
        `[B, T, H, k]`.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, chosen in enumerate(mask):
        time_F = chosen.nonzero().squeeze(-1)
        if not time_F.numel():
            continue
        if allowed is not None:
            rows = allowed[b if len(allowed) > 1 else 0, 0, time_F]  # [F, S]
            out[b, time_F] = _attention(q[b, time_F], keys[b], values[b], rows, scaling)
            continue
        # A slice of the queries sees no more keys than its last one needs.
        for time in time_F.split(_CAUSAL_SLICE):
            end = past + int(time[-1]) + 1
            seen = None
            if len(time) > 1:
                seen = torch.arange(end, device=q.device) <= past + time[:, None]
            out[b, time] = _attention(
                q[b, time], keys[b, :, :end], values[b, :, :end], seen, scaling
            )
    return out


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None, scaling: float
) -> Tensor:
    """Queries `[F, H, k]` of one sequence against its keys `[G, S, k]`: `[F, H, k]`."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if allowed is None else allowed[None, None],
        scale=scaling,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    return out[0].transpose(0, 1)
