"""Dense execution for training: both paths for every token, selected by the mask.

Nothing is saved here. Every submodule runs on every step, so that DDP and ZeRO see the same
parameters on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(update: Tensor, scale: Tensor | None) -> Tensor:
    """`update` `[..., d]`, times `scale` `[...]` where there is one."""
    if scale is None:
        return update
    return update * scale[..., None].to(update.dtype)


def masked_update(
    before: Tensor,
    after_full: Tensor,
    after_cheap: Tensor,
    mask: Tensor,
    probs: Tensor,
    mix: str = "hard",
) -> Tensor:
    """The stream `[B, T, d]` after the path that `mask` chose for each token.

    Args:
        before: The stream before the routed part, as the other two `[B, T, d]`.
        after_full: The stream after the full path.
        after_cheap: The stream after the cheap path.
        mask: Bool `[B, T]`, `m`.
        probs: Float32 `[B, T]`, `p`.
        mix: `"hard"`: `m_st * after_full + (1 - m_st) * after_cheap` with `m_st = sg(m - p) + p`:
            exactly the chosen path, and the gradient reaches the scores only through `p`, where it
            is `grad_out . (after_full - after_cheap)`. `"soft"`:
            `p * after_full + (1 - p) * after_cheap`. `"scaled"`:
            `before + p * (after_full - before)` where `m`, else `after_cheap`.
    """
    weight = probs[..., None].to(before.dtype)
    if mix == "soft":
        return weight * after_full + (1 - weight) * after_cheap
    if mix == "scaled":
        return torch.where(mask[..., None], before + weight * (after_full - before), after_cheap)
    out = torch.where(mask[..., None], after_full, after_cheap)
    if probs.requires_grad:
        out = out + (weight - weight.detach()) * (after_full - after_cheap).detach()
    return out
