"""The target `"ffn"`: the FFN, or the whole MoE block.

Shapes: B batch, T positions, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...base.families import Family
from ...base.readable import any_drops
from ...base.recorded import ROUTER_LOGITS, is_recorded, unrecorded
from ...base.sublayers import Kwargs, attended, ffn_map, norm_of, router_of
from ..call import RoutedCall
from ..decode import DecodeStep
from ..gathered import cpu_slice, gathered_update
from ..kernels import swiglu_rows
from ..kernels.eligible import is_swiglu
from ..target import Target


class FFNTarget(Target):
    """`a = h + attention(LN1(h))` in front; the FFN, or the whole MoE block, is routed."""

    skips = ("ffn",)
    called = "FFNs"
    decides: ClassVar[Mapping[str, str]] = {
        "token": "whether it enters the FFN.",
        "sequence": "whether it enters the FFN.",
    }
    norm_of = "ffn"
    row_wise = True
    decode_step: ClassVar[type[DecodeStep] | None] = DecodeStep

    def enter(self, layer: nn.Module, family: Family, h: Tensor, kwargs: Kwargs) -> Tensor:
        if family.parallel:
            return h
        return attended(layer, family, h, h, kwargs)

    def full(self, call: RoutedCall) -> Tensor:
        return call.stream + ffn_map(call.layer, call.family)(call.norm())

    def gathered(self, call: RoutedCall) -> Tensor:
        """As `Target.gathered`; where no norm is known yet, only the rows that run are normed."""
        family = call.family
        ffn = ffn_map(call.layer, family)
        norm = norm_of(call.layer, family, "ffn")
        normed = call.normed
        recording: AbstractContextManager[None] = nullcontext()
        router = router_of(call.layer, family) if is_recorded(ROUTER_LOGITS) else None
        if router is not None:
            normed = call.norm()
            router(normed.flatten(0, 1))  # records the logits of every token
            recording = unrecorded(ROUTER_LOGITS)

        def full(rows: Tensor) -> Tensor:
            return ffn(norm(rows) if normed is None else rows)

        stream = call.stream
        if family.parallel:
            stream = stream.clone()  # the layer's input is still needed
        read = stream if normed is None else normed
        with recording:
            after = gathered_update(
                stream, read, call.mask, full, call.branch, slice_rows(call), call.scale
            )
        return call.with_recalled(after)

    def supports_rows(self, call: RoutedCall) -> bool:
        return runs_by_rows(call)

    def by_rows(self, call: RoutedCall) -> Tensor:
        base = call.stream
        if call.branch is not None:
            base = torch.where(call.mask[..., None], base, call.cheap())
        return ffn_rows(call, base, call.norm(), call.scale)

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        if not call.family.parallel:
            return after
        return attended(call.layer, call.family, after, call.stream, call.kwargs)


def runs_by_rows(call: RoutedCall) -> bool:
    """Whether `ffn_rows` can stand in for the FFN's update of a stream like the call's."""
    family = call.family
    if family.ffn_post_norm or family.residual_scale or any_drops(call.layer, family.dropouts):
        return False
    return is_swiglu(getattr(call.layer, family.ffn), call.stream)


def ffn_rows(call: RoutedCall, stream: Tensor, normed: Tensor, scale: Tensor | None) -> Tensor:
    """`stream + scale * ffn(normed)` at the mask's tokens, `stream` at the others, `[B, T, d]`."""
    ffn: Any = getattr(call.layer, call.family.ffn)
    rows, x = (part.reshape(-1, part.shape[-1]) for part in (stream, normed))
    weights = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    flat = None if scale is None else scale.reshape(-1)
    return swiglu_rows(rows, x, call.mask.reshape(-1), flat, *weights).view(stream.shape)


def slice_rows(call: RoutedCall) -> int | None:
    """Rows that gathered execution runs at one time; None for all of them."""
    if not call.routing.dense_ffn or call.stream.device.type != "cpu":
        return None
    return cpu_slice(call.routing.ffn_width)
