"""The target `"attention"`.

Shapes: B batch, T positions, n rows, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...base.sublayers import attention_update, behind, ffn_map, normed_for_ffn
from ..attention import attended_rows, attended_update, supports_rows, supports_subset
from ..call import RoutedCall
from ..decode import AttentionStep, DecodeStep
from ..gathered import add_rows
from ..masked import scaled
from ..target import Target
from .ffn import slice_rows


class AttentionTarget(Target):
    """The attention is routed; the FFN follows, or runs in parallel, for every token.

    The keys and values of every token are written.
    """

    skips: ClassVar[tuple[str, ...]] = ("attention",)
    called = "attention"
    decides: ClassVar[Mapping[str, str]] = {
        "token": "whether it attends. A token that does not still writes its key and value.",
        "sequence": (
            "whether its attention runs. Where it does not, no keys and values are written."
        ),
    }
    norm_of = "attention"
    decode_step: ClassVar[type[DecodeStep] | None] = AttentionStep

    def full(self, call: RoutedCall) -> Tensor:
        return call.stream + attention_update(call.layer, call.family, call.norm(), call.kwargs)

    def rest(self, call: RoutedCall, rows: Tensor, before: Tensor, scale: Tensor | None) -> Tensor:
        """The rest of the full path after the attention,
        for rows `[n, d]` of the stream after and before it."""
        return rows

    def gathered(self, call: RoutedCall) -> Tensor:
        layer = call.layer
        family = call.family
        mask = call.mask
        normed = call.norm()
        attention = getattr(layer, family.attention)
        style = family.queries
        if style is not None and supports_subset(attention, style, call.kwargs):
            attended = attended_rows(attention, style, normed, mask, call.kwargs)
            update = behind(layer, family, "attention", attended)
        else:  # computed for every token: nothing is saved before the FFN
            update = attention_update(layer, family, normed, call.kwargs)[mask]
        return self.from_update(call, update)

    def from_update(self, call: RoutedCall, update: Tensor) -> Tensor:
        """`gathered`, given the attention's update `[n, d]` of the chosen rows."""
        mask = call.mask
        chosen = call.stream[mask]
        scale, of_attention, of_ffn = (
            None if factor is None else factor[mask]
            for factor in (call.scale, call.attention_scale, call.ffn_scale)
        )
        rows = self.rest(call, chosen + scaled(update, of_attention), chosen, of_ffn)
        if scale is not None:
            rows = chosen + scaled(rows - chosen, scale)
        flat = mask.reshape(-1)
        before = call.stream.reshape(-1, call.stream.shape[-1])
        out = before.clone()
        if call.branch is not None:
            weight = None
            if call.cheap_scale is not None:
                weight = call.cheap_scale.reshape(-1, 1).to(before.dtype)
            cheap = (~flat).nonzero().squeeze(-1)
            out = add_rows(out, before, cheap, call.branch, slice_rows(call), weight)
        out = out.index_copy_(0, flat.nonzero().squeeze(-1), rows.to(out.dtype))
        return call.with_recalled(out.view(call.stream.shape))

    def supports_rows(self, call: RoutedCall) -> bool:
        attention = getattr(call.layer, call.family.attention)
        return supports_rows(attention, call.family.queries, call.stream, call.kwargs)

    def by_rows(self, call: RoutedCall) -> Tensor:
        layer = call.layer
        family = call.family
        stream = call.stream
        attention = getattr(layer, family.attention)
        assert family.queries is not None
        rows = attended_update(attention, family.queries, call.norm(), call.mask, call.kwargs)
        update = behind(layer, family, "attention", rows)
        after = self.rest_by_rows(call, stream + scaled(update, call.attention_scale))
        if call.scale is not None:
            after = stream + scaled(after - stream, call.scale)
        return torch.where(call.mask[..., None], after, call.cheap())

    def rest_by_rows(self, call: RoutedCall, after: Tensor) -> Tensor:
        """`rest` for the rows in the mask, `[B, T, d]`; the other rows do not matter."""
        return after

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        normed = normed_for_ffn(call.layer, call.family, call.stream, after)
        return after + ffn_map(call.layer, call.family)(normed)
