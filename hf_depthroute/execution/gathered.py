"""Sparse execution for inference: gather the chosen rows, run them, add the result back.

Legend: B batch, T positions, N = B * T rows, F full rows, C cheap rows, d model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..parts.branches import TensorMap


def cpu_slice(width: int) -> int:
    """Rows of one call of a dense FFN with an intermediate of `width` on a CPU.

    The intermediate then stays in the cache and in memory that the allocator has at hand: at the
    shape of Qwen2.5-0.5B, 256 rows at once take a fifth less time per row than 512. Narrower FFNs
    run more rows, since a call has its price.
    """
    return max(256, 256 * 4864 // width)


def gathered_update(
    a: Tensor,
    x: Tensor,
    mask: Tensor,
    full: TensorMap,
    cheap: TensorMap | None,
    slice_rows: int | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """`a + full(x)` at the rows in `mask`, `a + cheap(a)` at the others, `[B, T, d]`;
    each row goes through one path only.

    Args:
        a: The residual stream, `[B, T, d]`. It may be overwritten when no gradient is recorded.
        x: What the full path reads, `[B, T, d]`: the stream, or its norm where that is known
            already.
        mask: Bool `[B, T]`.
        full: From rows of `x` to the full path's update, `[1, F, d] -> [1, F, d]`: three
            dimensions, because mixture-of-experts blocks take nothing else.
        cheap: The same from rows of the stream; None when the cheap path adds nothing.
        slice_rows: At most this many rows in one call of a path; None for all at once.
        weight: Float `[B, T]`; what the full path's update is multiplied by.
    """
    if weight is not None:
        weight = weight[..., None].to(a.dtype)  # [B, T, 1]
    # One token: a choice between two calls, no indexing.
    if mask.numel() == 1 and not torch.is_grad_enabled():
        if mask:
            return a.add_(full(x) if weight is None else full(x) * weight)
        if cheap is None:
            return a
        return a.add_(cheap(a))
    rows = a.reshape(-1, a.shape[-1])  # [N, d]
    flat = mask.reshape(-1)  # [N]
    full_index = flat.nonzero().squeeze(-1)  # [F]
    # Nothing is skipped: no gather, and bit for bit what the base computes.
    if full_index.numel() == len(rows):
        return a + (full(x) if weight is None else full(x) * weight)
    if full_index.numel() == 0 and cheap is not None:  # everything is skipped: no gather either
        return a + cheap(a)
    out = rows.clone() if torch.is_grad_enabled() else rows
    if cheap is not None:
        out = add_rows(out, rows, _others(flat, len(full_index)), cheap, slice_rows, None)
    x_rows = x.reshape(-1, x.shape[-1])  # [N, d]
    weight_N = None if weight is None else weight.reshape(-1, 1)
    return add_rows(out, x_rows, full_index, full, slice_rows, weight_N).view(a.shape)


def _others(flat: Tensor, chosen: int) -> Tensor:
    """Where `flat`, bool `[N]` and true `chosen` times, is false.

    On a GPU the host does not wait for it.
    """
    if flat.is_cuda:
        return flat.byte().argsort(stable=True)[: len(flat) - chosen]
    return (~flat).nonzero().squeeze(-1)


def in_slices(path: TensorMap, rows: Tensor, slice_rows: int | None) -> Tensor:
    """`path` of rows `[F, d]`, a slice of them at a time."""
    parts = rows.split(slice_rows or max(1, len(rows)))
    return torch.cat([path(part[None])[0] for part in parts if len(part)] or [rows])


def add_rows(
    out: Tensor,
    source: Tensor,
    index: Tensor,
    path: TensorMap,
    slice_rows: int | None,
    weight_N: Tensor | None,
) -> Tensor:
    """Add `path(source[index])`, times `weight_N[index]` `[F, 1]` if given,
    to `out[index]` in place, slice by slice.

    Where `source` is `out` itself this is safe: the rows of different slices and of the two paths
    are disjoint.
    """
    for rows in index.split(slice_rows or max(1, index.numel())):
        if rows.numel():
            update = path(source.index_select(0, rows)[None]).squeeze(0)
            if weight_N is not None:
                update = update * weight_N[rows]
            out = out.index_add_(0, rows, update.to(out.dtype))
    return out
