"""Which part of a decoder layer is routed: one class per target.

Layers with parallel attention and FFN have nothing before the routed part: `stream` is the layer's input, and
`finish` adds the sublayer that is not routed. Shapes: B batch, T positions, n rows, d model width, N tokens, K experts
per token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.families import Family
from ..base.readable import any_watched
from ..base.recorded import ROUTER_LOGITS, is_recorded, unrecorded
from ..base.sublayers import attention_update, behind, ffn_map, norm_of, router_of
from ..routing.plan import RoutePlan
from ..routing.routing import Routing
from .attention import attended_rows, attended_update, supports_rows, supports_subset
from .call import Decision, Kwargs, RoutedCall, Site
from .experts import routed_pairs
from .gathered import add_cheap, cpu_slice, gathered_update, in_slices
from .kernels import swiglu_rows
from .kernels.eligible import is_swiglu
from .memory import MemorySite


class FFNSite(Site):
    """`a = h + attention(LN1(h))` in front; the FFN, or the whole MoE block, is routed."""

    def enter(self, layer: Any, family: Family, h: Tensor, kwargs: Kwargs) -> Tensor:
        return h if family.parallel else attended(layer, family, h, h, kwargs)

    def norm(self, layer: Any, family: Family, stream: Tensor) -> Tensor:
        return norm_of(layer, family, "ffn")(stream)

    def full(self, call: RoutedCall) -> Tensor:
        return call.stream + ffn_map(call.layer, call.family)(call.norm())

    def gathered(self, call: RoutedCall) -> Tensor:
        """As `Site.gathered`; where the norm is not known yet, only the rows that run are normed."""
        router = router_of(call.layer, call.family) if is_recorded(ROUTER_LOGITS) else None
        if router is None:
            return self._gathered(call, call.normed)
        normed = call.norm()
        router(normed.flatten(0, 1))  # records the logits of every token
        with unrecorded(ROUTER_LOGITS):
            return self._gathered(call, normed)

    def _gathered(self, call: RoutedCall, normed: Tensor | None) -> Tensor:
        ffn, rows = ffn_map(call.layer, call.family), _slice_rows(call)
        stream = call.stream.clone() if call.family.parallel else call.stream  # the layer's input is still needed
        if normed is not None:
            after = gathered_update(stream, normed, call.mask, ffn, call.branch, rows, call.scale)
            return call.with_recalled(after)
        norm = norm_of(call.layer, call.family, "ffn")
        after = gathered_update(stream, stream, call.mask, lambda x: ffn(norm(x)), call.branch, rows, call.scale)
        return call.with_recalled(after)

    def supports_rows(self, call: RoutedCall) -> bool:
        return _ffn_by_rows(call)

    def by_rows(self, call: RoutedCall) -> Tensor:
        stream = call.stream
        base = stream if call.branch is None else torch.where(call.mask[..., None], stream, call.cheap())
        return _ffn_rows(call, base, call.norm(), call.scale)

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        return attended(call.layer, call.family, after, call.stream, call.kwargs) if call.family.parallel else after


class AttentionSite(Site):
    """The attention is routed; the FFN follows, or runs in parallel, for every token.

    The keys and values of every token are written.
    """

    def norm(self, layer: Any, family: Family, stream: Tensor) -> Tensor:
        return norm_of(layer, family, "attention")(stream)

    def full(self, call: RoutedCall) -> Tensor:
        return call.stream + attention_update(call.layer, call.family, call.norm(), call.kwargs)

    def rest(self, call: RoutedCall, rows: Tensor, before: Tensor, scale: Tensor | None) -> Tensor:
        """The rest of the full path after the attention, for rows `[n, d]` of the stream after and before it."""
        return rows

    def gathered(self, call: RoutedCall) -> Tensor:
        layer, family, mask, normed = call.layer, call.family, call.mask, call.norm()
        attention, style = getattr(layer, family.attention), family.queries
        if style is not None and supports_subset(attention, style, call.kwargs):
            update = behind(layer, family, "attention", attended_rows(attention, style, normed, mask, call.kwargs))
        else:  # computed for every token: nothing is saved before the FFN
            update = attention_update(layer, family, normed, call.kwargs)[mask]
        factor, of_attention, of_ffn = (
            None if scale is None else scale[mask][:, None].to(update.dtype)
            for scale in (call.scale, call.attention_scale, call.ffn_scale)
        )
        chosen = call.stream[mask]
        attended = chosen + (update if of_attention is None else update * of_attention)
        rows = self.rest(call, attended, chosen, of_ffn)
        if factor is not None:
            rows = chosen + (rows - chosen) * factor
        flat = mask.reshape(-1)
        before = call.stream.reshape(-1, call.stream.shape[-1])
        out = add_cheap(before.clone(), before, flat, call.branch, _slice_rows(call), call.cheap_scale)
        out = out.index_copy_(0, flat.nonzero().squeeze(-1), rows.to(out.dtype))
        return call.with_recalled(out.view(call.stream.shape))

    def supports_rows(self, call: RoutedCall) -> bool:
        attention = getattr(call.layer, call.family.attention)
        return supports_rows(attention, call.family.queries, call.stream, call.kwargs)

    def by_rows(self, call: RoutedCall) -> Tensor:
        layer, family, stream, mask = call.layer, call.family, call.stream, call.mask
        attention, style = getattr(layer, family.attention), family.queries
        assert style is not None
        update = behind(layer, family, "attention", attended_update(attention, style, call.norm(), mask, call.kwargs))
        if call.attention_scale is not None:
            update = update * call.attention_scale[..., None].to(update.dtype)
        after = self.rest_by_rows(call, stream + update)
        if call.scale is not None:
            after = stream + (after - stream) * call.scale[..., None].to(update.dtype)
        return torch.where(mask[..., None], after, call.cheap())

    def rest_by_rows(self, call: RoutedCall, after: Tensor) -> Tensor:
        """`rest` for the rows in the mask, `[B, T, d]`; what stands in the other rows does not matter."""
        return after

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        read = call.stream if call.family.parallel else after
        return after + ffn_map(call.layer, call.family)(norm_of(call.layer, call.family, "ffn")(read))


class BlockSite(AttentionSite):
    """Attention and FFN are routed together."""

    def full(self, call: RoutedCall) -> Tensor:
        return self._scaled(call, None, None)

    def both(self, call: RoutedCall) -> tuple[Tensor, Tensor]:
        return self._scaled(call, call.attention_scale, call.ffn_scale), call.cheap()

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        if call.ffn_scale is None:
            return super().mixed(call, after_full, after_cheap)
        if call.plan.rule != "soft":
            return torch.where(call.mask[..., None], after_full, after_cheap)
        rest = 1 - call.probs[..., None].to(call.stream.dtype)  # TSA: the sublayers are scaled already
        return after_full + rest * (after_cheap - call.stream)

    def hides(self, call: RoutedCall) -> bool:
        """The router reads the stream behind the attention, which a skipped token does not have."""
        return is_recorded(ROUTER_LOGITS) and router_of(call.layer, call.family) is not None

    def rest(self, call: RoutedCall, rows: Tensor, before: Tensor, scale: Tensor | None) -> Tensor:
        if not len(rows):
            return rows
        ffn, norm = ffn_map(call.layer, call.family), norm_of(call.layer, call.family, "ffn")
        read = before if call.family.parallel else rows
        update = in_slices(lambda part: ffn(norm(part)), read, _slice_rows(call))
        return rows + (update if scale is None else update * scale)

    def supports_rows(self, call: RoutedCall) -> bool:
        return super().supports_rows(call) and _ffn_by_rows(call)

    def rest_by_rows(self, call: RoutedCall, after: Tensor) -> Tensor:
        normed = norm_of(call.layer, call.family, "ffn")(call.stream if call.family.parallel else after)
        return _ffn_rows(call, after, normed, call.ffn_scale)

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        return after

    def _scaled(self, call: RoutedCall, of_attention: Tensor | None, of_ffn: Tensor | None) -> Tensor:
        """`a = h + s attention(LN1(h))`, then `a + t FFN(LN2(a))`, with `s` and `t` `[B, T]`, 1 where None."""
        layer, family, stream = call.layer, call.family, call.stream
        update = attention_update(layer, family, call.norm(), call.kwargs)
        a = stream + _times(update, of_attention)
        update = ffn_map(layer, family)(norm_of(layer, family, "ffn")(stream if family.parallel else a))
        return a + _times(update, of_ffn)


class ExpertsSite(FFNSite):
    """The experts of an MoE block: one decision per (token, expert) pair that the block's own router chose.

    A dropped pair contributes its weight times the cheap branch.
    """

    def decide(self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None) -> Decision:
        extras = routing.score(plan, gate_input)
        return Decision(extras.pop("scores"), extras)  # the pairs are known inside the block

    def masked(self, call: RoutedCall) -> Tensor:
        return self._run(call, compact=False)

    def gathered(self, call: RoutedCall) -> Tensor:
        return self._run(call, compact=True)

    def supports_rows(self, call: RoutedCall) -> bool:
        return False

    @torch.compiler.disable  # it sets hooks, which no compiler traces
    def _run(self, call: RoutedCall, compact: bool) -> Tensor:
        assert call.decision is not None and not call.family.parallel
        a, decision, scores = call.stream, call.decision, call.decision.scores

        def decide(index: Tensor) -> tuple[Tensor, Tensor]:  # [N, K]
            index_BTK = index.view(*a.shape[:2], -1)
            per_expert = scores.ndim == 3
            decision.scores = scores.gather(-1, index_BTK) if per_expert else scores[..., None].expand_as(index_BTK)
            mask, probs = call.routing.decide(call.plan, decision.scores, call.token_mask, None, index_BTK)
            decision.mask, decision.probs = mask, probs
            factor = probs if call.plan.mix == "soft" else mask + (probs - probs.detach())  # straight-through
            return mask.reshape(index.shape), factor.reshape(index.shape)  # a replayed mask may be a slice

        with routed_pairs(call.routing.experts_of(call.layer), decide, compact) as seen:
            out = call.full()
        pairs, branch = seen[0], call.branch
        decision.extras["expert_index"] = pairs.index.view(*a.shape[:2], -1)
        if branch is None:
            return out
        dropped = (pairs.weights * (1 - pairs.factor.to(pairs.weights.dtype))).sum(-1).view(*a.shape[:2], 1)
        if not compact:
            return out + dropped.to(out.dtype) * branch(a)
        some = dropped.squeeze(-1) != 0
        out[some] += dropped[some].to(out.dtype) * branch(a[some])
        return out


SITES: dict[str, Site] = {
    "ffn": FFNSite(),
    "attention": AttentionSite(),
    "block": BlockSite(),
    "experts": ExpertsSite(),
    "memory": MemorySite(),
}


def attended(layer: Any, family: Family, target: Tensor, read: Tensor, kwargs: Kwargs) -> Tensor:
    """`target` and the attention's update from the stream `read`, `[B, T, d]`."""
    return target + attention_update(layer, family, norm_of(layer, family, "attention")(read), kwargs)


def _times(update: Tensor, scale: Tensor | None) -> Tensor:
    """`update` `[B, T, d]`, times `scale` `[B, T]` where there is one."""
    return update if scale is None else update * scale[..., None].to(update.dtype)


def _ffn_by_rows(call: RoutedCall) -> bool:
    """Whether `_ffn_rows` can stand in for the FFN's update of a stream like the call's."""
    family = call.family
    if family.ffn_post_norm or family.residual_scale or any_watched(call.layer, family.dropouts):
        return False
    return is_swiglu(getattr(call.layer, family.ffn), call.stream)


def _ffn_rows(call: RoutedCall, stream: Tensor, normed: Tensor, scale: Tensor | None) -> Tensor:
    """`stream + scale * ffn(normed)` at the tokens of the mask, `stream` at the others, `[B, T, d]`."""
    ffn: Any = getattr(call.layer, call.family.ffn)
    rows, x = (part.reshape(-1, part.shape[-1]) for part in (stream, normed))
    weights = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    flat = None if scale is None else scale.reshape(-1)
    return swiglu_rows(rows, x, call.mask.reshape(-1), flat, *weights).view(stream.shape)


def _slice_rows(call: RoutedCall) -> int | None:
    """Rows that gathered execution runs at one time; None for all of them."""
    return cpu_slice(call.routing.ffn_width) if call.routing.dense_ffn and call.stream.device.type == "cpu" else None
