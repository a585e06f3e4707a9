"""Which part of a decoder layer is routed: one class per target.

A site splits the layer's forward pass into what comes in front of the routed part, the part itself, and the rest:

    stream = enter(h);   after = full path or cheap path;   out = finish(after, stream)

Layers with parallel attention and FFN have nothing in front: `stream` is `h`, and `finish` adds the sublayer that is
not routed. Shapes: B batch, T positions, n rows, d model width. `normed` is the stream after the site's norm.
"""

from __future__ import annotations

from typing import Any

import torch

from .execution import CPU_SLICE, add_cheap, gathered_update, in_slices
from .execution.attention import attended_rows, attended_update, supports_rows, supports_subset
from .execution.kernels import swiglu_rows
from .execution.kernels.support import is_swiglu
from .families import Family
from .holder import Routing
from .sublayers import attention_update, behind, ffn_map, norm_of

Kwargs = dict[str, Any]


class FFNSite:
    """`a = h + attention(LN1(h))` in front; the FFN, or the whole MoE block, is routed."""

    def enter(self, layer: Any, holder: Routing, h: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
        return h if holder.family.parallel else _attended(layer, holder.family, h, h, kwargs)

    def norm(self, layer: Any, holder: Routing, stream: torch.Tensor) -> torch.Tensor:
        return norm_of(layer, holder.family, "ffn")(stream)

    def full(
        self, layer: Any, holder: Routing, stream: torch.Tensor, normed: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        """The stream after the full path, `[B, T, d]`."""
        return stream + ffn_map(layer, holder.family)(normed)

    def sparse(
        self,
        layer: Any,
        holder: Routing,
        stream: torch.Tensor,
        normed: torch.Tensor | None,
        mask: torch.Tensor,
        cheap: Any,
        scale: torch.Tensor | None,
        kwargs: Kwargs,
        scale_each: bool = False,
    ) -> torch.Tensor:
        """The stream after the path that `mask` (bool `[B, T]`) chose; skipped rows are not computed.

        `scale` `[B, T]` multiplies the full path's update; with `scale_each`, the update of each of its sublayers. The
        stream may be overwritten. An FFN's `normed` may be None: then only the rows that run are normed.
        """
        ffn, rows = ffn_map(layer, holder.family), slice_rows(holder, stream)
        target = stream.clone() if holder.family.parallel else stream  # the layer's input is still needed
        if normed is not None:
            return gathered_update(target, normed, mask, ffn, cheap, rows, scale)
        norm = norm_of(layer, holder.family, "ffn")
        return gathered_update(target, target, mask, lambda chosen: ffn(norm(chosen)), cheap, rows, scale)

    def supports_rows(self, layer: Any, holder: Routing, x: torch.Tensor, kwargs: Kwargs) -> bool:
        """Whether `by_rows` can run on a stream like `x`."""
        return ffn_by_rows(layer, holder.family, x)

    def by_rows(
        self,
        layer: Any,
        holder: Routing,
        stream: torch.Tensor,
        normed: torch.Tensor,
        mask: torch.Tensor,
        cheap: Any,
        scale: torch.Tensor | None,
        kwargs: Kwargs,
        scale_each: bool = False,
    ) -> torch.Tensor:
        """As `sparse`, in row ops whose shapes do not depend on the mask; the cheap path runs for every token."""
        base = stream if cheap is None else torch.where(mask[..., None], stream, stream + cheap(stream))
        return ffn_rows(getattr(layer, holder.family.ffn), base, normed, mask, scale)

    def finish(
        self, layer: Any, holder: Routing, after: torch.Tensor, stream: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        """The layer's output, from the stream after and in front of the routed part, each `[B, T, d]`."""
        return _attended(layer, holder.family, after, stream, kwargs) if holder.family.parallel else after


class AttentionSite:
    """The attention is routed; the FFN follows, or runs beside it, for every token."""

    def enter(self, layer: Any, holder: Routing, h: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
        return h

    def norm(self, layer: Any, holder: Routing, stream: torch.Tensor) -> torch.Tensor:
        return norm_of(layer, holder.family, "attention")(stream)

    def full(
        self, layer: Any, holder: Routing, stream: torch.Tensor, normed: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        return stream + attention_update(layer, holder.family, normed, kwargs)

    def rest(
        self, layer: Any, holder: Routing, rows: torch.Tensor, before: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """What of the full path comes after the attention, on rows `[n, d]` of the stream after and before it."""
        return rows

    def sparse(
        self,
        layer: Any,
        holder: Routing,
        stream: torch.Tensor,
        normed: torch.Tensor | None,
        mask: torch.Tensor,
        cheap: Any,
        scale: torch.Tensor | None,
        kwargs: Kwargs,
        scale_each: bool = False,
    ) -> torch.Tensor:
        """As `FFNSite.sparse`; the keys and values of every token are written."""
        assert normed is not None
        attention, style = getattr(layer, holder.family.attention), holder.family.queries
        if style is not None and supports_subset(attention, style, kwargs):
            update = behind(layer, holder.family, "attention", attended_rows(attention, style, normed, mask, kwargs))
        else:  # computed for every token: nothing is saved in front of the FFN
            update = attention_update(layer, holder.family, normed, kwargs)[mask]
        factor = None if scale is None else scale[mask][:, None].to(update.dtype)
        each = factor if scale_each else None
        chosen = stream[mask]
        rows = self.rest(layer, holder, chosen + (update if each is None else update * each), chosen, each)
        if factor is not None and not scale_each:
            rows = chosen + (rows - chosen) * factor
        flat = mask.reshape(-1)
        before = stream.reshape(-1, stream.shape[-1])
        out = add_cheap(before.clone(), before, flat, cheap, slice_rows(holder, stream))
        return out.index_copy_(0, flat.nonzero().squeeze(-1), rows.to(out.dtype)).view(stream.shape)

    def supports_rows(self, layer: Any, holder: Routing, x: torch.Tensor, kwargs: Kwargs) -> bool:
        """As `FFNSite.supports_rows`."""
        return supports_rows(getattr(layer, holder.family.attention), holder.family.queries, x, kwargs)

    def by_rows(
        self,
        layer: Any,
        holder: Routing,
        stream: torch.Tensor,
        normed: torch.Tensor,
        mask: torch.Tensor,
        cheap: Any,
        scale: torch.Tensor | None,
        kwargs: Kwargs,
        scale_each: bool = False,
    ) -> torch.Tensor:
        """As `FFNSite.by_rows`; the keys and values of every token are written."""
        attention, style = getattr(layer, holder.family.attention), holder.family.queries
        assert style is not None
        update = behind(layer, holder.family, "attention", attended_update(attention, style, normed, mask, kwargs))
        factor = None if scale is None else scale[..., None].to(update.dtype)
        if factor is not None and scale_each:
            update = update * factor
        after = self.rest_by_rows(layer, holder, stream + update, stream, mask, scale if scale_each else None)
        if factor is not None and not scale_each:
            after = stream + (after - stream) * factor
        return torch.where(mask[..., None], after, stream if cheap is None else stream + cheap(stream))

    def rest_by_rows(
        self,
        layer: Any,
        holder: Routing,
        after: torch.Tensor,
        before: torch.Tensor,
        mask: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """`rest` for the rows in `mask`, `[B, T, d]`; what stands in the other rows does not matter."""
        return after

    def finish(
        self, layer: Any, holder: Routing, after: torch.Tensor, stream: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        """As `FFNSite.finish`."""
        family = holder.family
        read = stream if family.parallel else after
        return after + ffn_map(layer, family)(norm_of(layer, family, "ffn")(read))


class BlockSite(AttentionSite):
    """Attention and FFN are routed together."""

    def full(
        self, layer: Any, holder: Routing, stream: torch.Tensor, normed: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        return self.scaled(layer, holder, stream, normed, None, kwargs)

    def scaled(
        self,
        layer: Any,
        holder: Routing,
        stream: torch.Tensor,
        normed: torch.Tensor,
        scale: torch.Tensor | None,
        kwargs: Kwargs,
    ) -> torch.Tensor:
        """TSA: both updates times `scale` `[B, T]`: `a = h + s attention(LN1(h))`, `a + s FFN(LN2(a))`."""
        factor = None if scale is None else scale[..., None].to(stream.dtype)
        family = holder.family
        update = attention_update(layer, family, normed, kwargs)
        a = stream + (update if factor is None else update * factor)
        update = ffn_map(layer, family)(norm_of(layer, family, "ffn")(stream if family.parallel else a))
        return a + (update if factor is None else update * factor)

    def rest(
        self, layer: Any, holder: Routing, rows: torch.Tensor, before: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor:
        if not len(rows):
            return rows
        ffn, norm = ffn_map(layer, holder.family), norm_of(layer, holder.family, "ffn")
        read = before if holder.family.parallel else rows
        update = in_slices(lambda part: ffn(norm(part)), read, slice_rows(holder, rows))
        return rows + (update if scale is None else update * scale)

    def supports_rows(self, layer: Any, holder: Routing, x: torch.Tensor, kwargs: Kwargs) -> bool:
        return super().supports_rows(layer, holder, x, kwargs) and ffn_by_rows(layer, holder.family, x)

    def rest_by_rows(
        self,
        layer: Any,
        holder: Routing,
        after: torch.Tensor,
        before: torch.Tensor,
        mask: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        normed = norm_of(layer, holder.family, "ffn")(before if holder.family.parallel else after)
        return ffn_rows(getattr(layer, holder.family.ffn), after, normed, mask, scale)

    def finish(
        self, layer: Any, holder: Routing, after: torch.Tensor, stream: torch.Tensor, kwargs: Kwargs
    ) -> torch.Tensor:
        return after


SITES: dict[str, FFNSite | AttentionSite | BlockSite] = {
    "ffn": FFNSite(),
    "attention": AttentionSite(),
    "block": BlockSite(),
}


def _attended(layer: Any, family: Family, target: torch.Tensor, read: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
    """`target` and the attention's update from the stream `read`, `[B, T, d]`."""
    return target + attention_update(layer, family, norm_of(layer, family, "attention")(read), kwargs)


def ffn_by_rows(layer: Any, family: Family, x: torch.Tensor) -> bool:
    """Whether `ffn_rows` can stand in for the FFN's update of a stream like `x`."""
    behind_it = family.ffn_post_norm or family.residual_scale
    return behind_it is None and is_swiglu(getattr(layer, family.ffn), x)


def ffn_rows(
    ffn: Any, stream: torch.Tensor, normed: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """`stream + scale * ffn(normed)` at the tokens in `mask` (bool `[B, T]`), `stream` at the others, `[B, T, d]`."""
    rows, x = (part.reshape(-1, part.shape[-1]) for part in (stream, normed))
    weights = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    flat = None if scale is None else scale.reshape(-1)
    return swiglu_rows(rows, x, mask.reshape(-1), flat, *weights).view(stream.shape)


def slice_rows(holder: Routing, a: torch.Tensor) -> int | None:
    """Rows that gathered execution runs at one time; None for all of them."""
    return CPU_SLICE if holder.dense_ffn and a.device.type == "cpu" else None
