"""Dense execution for training: both paths for every token, selected by the mask.

Nothing is saved here. Every submodule runs on every step, so that DDP and ZeRO see the same parameters on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Path = Callable[[torch.Tensor], torch.Tensor]


def masked_update(
    a: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    probs: torch.Tensor,
    full: Path,
    cheap: Path | None,
    soft: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`out = m_st * (a + full(x)) + (1 - m_st) * (a + cheap(a))` with `m_st = sg(m - p) + p`.

    The forward value is exactly the chosen path's. The gradient reaches the scores only through `p`, where it is
    `grad_out . (full path - cheap path)`.

    Args:
        a: The residual stream, `[B, T, d]`.
        x: What the full path reads, `[B, T, d]`: the stream, or its norm where that is known already.
        mask: Bool `[B, T]`, `m`.
        probs: Float32 `[B, T]`, `p`.
        full: From `x` to the full path's update, both `[B, T, d]`.
        cheap: The same from the stream; None when the cheap path adds nothing.
        soft: Mix with `p` instead of the mask.

    Returns:
        The output and the stream after each path, each `[B, T, d]`.
    """
    after_full = a + full(x)
    after_cheap = a if cheap is None else a + cheap(a)
    weight = probs[..., None].to(a.dtype)
    if soft:
        out = weight * after_full + (1 - weight) * after_cheap
    else:
        out = torch.where(mask[..., None], after_full, after_cheap)
    if not soft and probs.requires_grad:
        out = out + (weight - weight.detach()) * (after_full - after_cheap).detach()
    return out, after_full, after_cheap
