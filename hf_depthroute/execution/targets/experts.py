"""The target `"experts"`: the experts of an MoE block.

Shapes: B batch, T positions, d model width, N tokens, K experts per token, E experts, P pairs that
are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ...base.contexts import hooked, of_this_thread
from ...routing.decision import decide
from ..call import Decision, RoutedCall
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
        """The stream after the block, whose experts see the chosen pairs only, whatever runs them.

        `compact` leaves dropped pairs out (inference); otherwise every pair is computed, its weight
        times a factor. The block's forward calls its experts once.
        """
        assert call.decision is not None and not call.family.parallel
        a = call.stream
        branch = call.branch
        decision = call.decision
        scores = decision.scores
        dropped: list[Tensor] = []  # of each token, the weights of its pairs that are not run
        kept: list[Tensor] = []  # the token of each pair that is, [P]

        def choose(
            experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor] | None:
            x, index, weights = args  # [N, d], [N, K], [N, K]
            index_BTK = index.view(*a.shape[:2], -1)
            if scores.ndim == 3:
                decision.scores = scores.gather(-1, index_BTK)
            else:
                decision.scores = scores[..., None].expand_as(index_BTK)
            mask, probs = decide(call.plan, decision.scores, call.token_mask, None, index_BTK)
            decision.mask = mask
            decision.probs = probs
            decision.extras["expert_index"] = index_BTK
            factor = probs
            if call.plan.mix != "soft":
                factor = mask + (probs - probs.detach())  # straight-through
            # A replayed mask may be a slice.
            factor = factor.reshape(index.shape).to(weights.dtype)
            if branch is not None:
                dropped[:] = [(weights * (1 - factor)).sum(-1)]
            if not compact:
                return x, index, weights * factor
            token_P, slot_P = mask.reshape(index.shape).nonzero(as_tuple=True)
            if token_P.numel() == mask.numel():
                return None  # nothing is dropped: bit for bit what the base computes
            # One row per pair: all implementations of the experts take it, and none computes more.
            kept[:] = [token_P]
            return x[token_P], index[token_P, slot_P][:, None], weights[token_P, slot_P][:, None]

        def gather(experts: nn.Module, args: object, out: Tensor) -> Tensor | None:
            if not kept:
                return None
            return out.new_zeros(a.shape[:2].numel(), out.shape[-1]).index_add(0, kept[0], out)

        experts = call.routing.experts_of(call.layer)
        handles = [
            experts.register_forward_pre_hook(of_this_thread(choose)),
            experts.register_forward_hook(of_this_thread(gather)),
        ]
        with hooked(handles):
            out = call.full()
        if branch is None:
            return out
        lost = dropped[0].view(*a.shape[:2], 1)
        if not compact:
            return out + lost.to(out.dtype) * branch(a)
        some = lost.squeeze(-1) != 0
        out[some] += lost[some].to(out.dtype) * branch(a[some])
        return out
