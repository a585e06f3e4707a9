"""The target `"experts"`: the experts of an MoE block.

Shapes: B batch, T positions, d model width, N tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..call import Decision, RoutedCall
from ..experts import routed_pairs
from .ffn import FFNTarget

if TYPE_CHECKING:
    from ...routing.plan import RoutePlan
    from ...routing.routing import Routing


class ExpertsTarget(FFNTarget):
    """The experts of an MoE block: one decision per (token,
    expert) pair that the block's own router chose.

    A dropped pair contributes its weight times the cheap branch.
    """

    skips = ("experts",)
    called = "experts"
    decides: ClassVar[Mapping[str, str]] = {
        "token": "which of the experts that the base chose are run."
    }
    per_pair = True
    row_wise = False
    decode_step = None

    def decide(
        self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None
    ) -> Decision:
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
        a = call.stream
        decision = call.decision
        scores = call.decision.scores

        def decide(index: Tensor) -> tuple[Tensor, Tensor]:  # [N, K]
            index_BTK = index.view(*a.shape[:2], -1)
            if scores.ndim == 3:
                decision.scores = scores.gather(-1, index_BTK)
            else:
                decision.scores = scores[..., None].expand_as(index_BTK)
            mask, probs = call.routing.decide(
                call.plan, decision.scores, call.token_mask, None, index_BTK
            )
            decision.mask = mask
            decision.probs = probs
            factor = probs
            if call.plan.mix != "soft":
                factor = mask + (probs - probs.detach())  # straight-through
            # A replayed mask may be a slice.
            return mask.reshape(index.shape), factor.reshape(index.shape)

        with routed_pairs(call.routing.experts_of(call.layer), decide, compact) as seen:
            out = call.full()
        pairs = seen[0]
        branch = call.branch
        decision.extras["expert_index"] = pairs.index.view(*a.shape[:2], -1)
        if branch is None:
            return out
        lost = pairs.weights * (1 - pairs.factor.to(pairs.weights.dtype))
        dropped = lost.sum(-1).view(*a.shape[:2], 1)
        if not compact:
            return out + dropped.to(out.dtype) * branch(a)
        some = dropped.squeeze(-1) != 0
        out[some] += dropped[some].to(out.dtype) * branch(a[some])
        return out
