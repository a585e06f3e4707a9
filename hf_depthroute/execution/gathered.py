"""Sparse execution for inference: gather the chosen rows, run the module on them, add the result back.

Legend: B batch, T positions, N = B * T rows, F full rows, C cheap rows, d model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Path = Callable[[torch.Tensor], torch.Tensor]


def gathered_update(
    a: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, full: Path, cheap: Path | None
) -> torch.Tensor:
    """`a + full(x)` at the rows in `mask`, `a + cheap(a)` at the others; each row goes through one path only.

    Args:
        a: The residual stream, `[B, T, d]`. It may be overwritten when no gradient is recorded.
        x: What the full path reads, `[B, T, d]`: the stream, or its norm where that is known already.
        mask: Bool `[B, T]`.
        full: From rows of `x` to the full path's update, `[1, F, d] -> [1, F, d]`: three dimensions, because
            mixture-of-experts blocks take nothing else.
        cheap: The same from rows of the stream; None when the cheap path adds nothing.

    Returns:
        `[B, T, d]`.
    """
    width = a.shape[-1]
    rows = a.reshape(-1, width)  # [N, d]
    flat = mask.reshape(-1)
    full_index = flat.nonzero().squeeze(-1)  # [F]
    if full_index.numel() == rows.shape[0]:
        return a + full(x)  # nothing is skipped: no gather, and bit for bit what the base computes
    if full_index.numel():
        full_update = full(x.reshape(-1, width).index_select(0, full_index)[None]).squeeze(0)  # [F, d]
    if cheap is not None:
        cheap_index = (~flat).nonzero().squeeze(-1)  # [C]
        cheap_update = cheap(rows.index_select(0, cheap_index)[None]).squeeze(0)  # [C, d]
    out = rows.clone() if torch.is_grad_enabled() else rows
    if full_index.numel():
        out = out.index_add_(0, full_index, full_update.to(out.dtype))
    if cheap is not None:
        out = out.index_add_(0, cheap_index, cheap_update.to(out.dtype))
    return out.view(a.shape)
