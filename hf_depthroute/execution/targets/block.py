"""The target `"block"`: attention and FFN together.

Shapes: B batch, T positions, n rows, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...base.recorded import ROUTER_LOGITS, is_recorded
from ...base.sublayers import attention_update, ffn_map, norm_of, normed_for_ffn, router_of
from ..call import RoutedCall
from ..decode import AttentionStep
from ..gathered import in_slices
from ..masked import scaled
from .attention import AttentionTarget
from .ffn import ffn_rows, runs_by_rows, slice_rows


class BlockTarget(AttentionTarget):
    """Attention and FFN are routed together."""

    skips = ("attention", "ffn")
    called = "whole blocks"
    decides: ClassVar[Mapping[str, str]] = {
        "token": (
            "whether it enters the block, attention and FFN. A token that does not still writes "
            "its key and value."
        ),
        "sequence": (
            "whether its block runs, attention and FFN. Where it does not, no keys and values are "
            "written."
        ),
    }
    decode_step = AttentionStep

    def full(self, call: RoutedCall) -> Tensor:
        return self._scaled(call, None, None)

    def both(self, call: RoutedCall) -> tuple[Tensor, Tensor]:
        return self._scaled(call, call.attention_scale, call.ffn_scale), call.cheap()

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        if call.ffn_scale is None:
            return super().mixed(call, after_full, after_cheap)
        if call.plan.rule != "soft":
            return torch.where(call.mask[..., None], after_full, after_cheap)
        # TSA: the sublayers are scaled already.
        rest = 1 - call.probs[..., None].to(call.stream.dtype)
        return after_full + rest * (after_cheap - call.stream)

    def hides(self, call: RoutedCall) -> bool:
        """The router reads the stream behind the attention, which a skipped token does not have."""
        return is_recorded(ROUTER_LOGITS) and router_of(call.layer, call.family) is not None

    def rest(self, call: RoutedCall, rows: Tensor, before: Tensor, scale: Tensor | None) -> Tensor:
        ffn = ffn_map(call.layer, call.family)
        norm = norm_of(call.layer, call.family, "ffn")
        read = before if call.family.parallel else rows
        update = in_slices(lambda part: ffn(norm(part)), read, slice_rows(call))
        return rows + scaled(update, scale)

    def supports_rows(self, call: RoutedCall) -> bool:
        return super().supports_rows(call) and runs_by_rows(call)

    def rest_by_rows(self, call: RoutedCall, after: Tensor) -> Tensor:
        normed = normed_for_ffn(call.layer, call.family, call.stream, after)
        return ffn_rows(call, after, normed, call.ffn_scale)

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        return after

    def _scaled(
        self, call: RoutedCall, of_attention: Tensor | None, of_ffn: Tensor | None
    ) -> Tensor:
        """`a = h + s attention(LN1(h))`, then `a + t FFN(LN2(a))`; `s`, `t` `[B, T]` or 1."""
        layer = call.layer
        family = call.family
        stream = call.stream
        update = attention_update(layer, family, call.norm(), call.kwargs)
        a = stream + scaled(update, of_attention)
        update = ffn_map(layer, family)(normed_for_ffn(layer, family, stream, a))
        return a + scaled(update, of_ffn)
