"""How even the load of the experts is, and a bias that evens it without a loss.

"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664).

Shapes: N tokens, E experts, K experts of a token, M layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from moe.routers import (
    GROUP_BIAS,
    RouterTrace,
    hooked_routers,
    observe_routers,
    real_rows,
    routers,
)
from torch import nn

from hf_depthroute.base.contexts import evaluating
from hf_depthroute.base.distributed import sum_over_processes
from hf_depthroute.data.batches import model_inputs
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.trace import record_routes


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one layer's experts, as shares of all (token, expert) pairs that its router assigned.

    Attributes:
        assigned: `[E]`; sums to 1.
        ran: `[E]`, the pairs that were computed; less than `assigned` where an adapter dropped
            pairs.
    """

    assigned: torch.Tensor
    ran: torch.Tensor

    @property
    def imbalance(self) -> float:
        """The most loaded expert's share over the even share, `E * max(assigned)`;
        1 at perfect balance."""
        return float(len(self.assigned) * self.assigned.max())


@torch.no_grad()
def expert_load(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[int, ExpertLoad]:
    """How the tokens of `batches` spread over the experts,
    before and after an adapter's routing of experts.

    Args:
        model: A mixture-of-experts model, with or without an adapter. It runs in inference mode.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    assigned: dict[int, torch.Tensor] = {}
    ran: dict[int, torch.Tensor] = {}
    routings = [module for module in model.modules() if isinstance(module, Routing)]
    dropping = any(h.adapter() is not None and h.active_target().per_pair for h in routings)
    with evaluating(model):
        for inputs in model_inputs(model, batches):
            recording: Any = record_routes(model) if dropping else nullcontext({})
            with observe_routers(model) as trace, recording as routes:
                model(**inputs, use_cache=False)
            for index, logits in trace.items():
                sent = kept = count_pairs(
                    trace.chosen[index], trace.real(index)[:, None], logits.shape[-1]
                )
                if index in routes:
                    record = routes[index]
                    kept = count_pairs(
                        record.expert_index, record.mask & record.real, logits.shape[-1]
                    )
                assigned[index] = assigned.get(index, 0) + sent
                ran[index] = ran.get(index, 0) + kept
    pairs = {index: sent.sum().clamp(min=1) for index, sent in assigned.items()}
    return {i: ExpertLoad((assigned[i] / n).cpu(), (ran[i] / n).cpu()) for i, n in pairs.items()}


def count_pairs(chosen: torch.Tensor, keep: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is in `chosen` where `keep`, float32 `[E]`."""
    keep = keep.expand_as(chosen).to(chosen.device)
    zeros = torch.zeros(experts, device=chosen.device)
    return zeros.index_add_(0, chosen.reshape(-1), keep.reshape(-1).float())


class BalanceBias(nn.Module):
    """Loss-free balancing: a bias per expert, added to the router's probabilities for
    the choice only.

    The weights of the chosen experts stay the unbiased probabilities, renormalised where the model
    does that, and no gradient passes through the bias. `update`, after an optimizer step, moves
    every bias by a fixed step against the sign of its expert's load error.

        bias = BalanceBias(model)
        with bias.applied():
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                bias.update()
                optimizer.zero_grad()

    A model that was trained with a bias needs it in inference too: keep its `state_dict`.

    Args:
        model: A mixture-of-experts model. It is not part of this module.
        step: How far one update moves a bias, in units of probability.

    Raises:
        ValueError: The model has no layer with experts, or its routers have such a bias already
            (DeepSeek-V3).
    """

    def __init__(self, model: nn.Module, step: float = 0.001) -> None:
        super().__init__()
        found = routers(model)
        if any(hasattr(router, GROUP_BIAS) for router in found.values()):
            raise ValueError(
                "BalanceBias: the routers have a bias of their own and choose in groups"
            )
        self.step = step
        self.layers = list(found)
        self._model = (model,)  # a tuple: no part of this module
        self._trace = RouterTrace()
        weight = cast(torch.Tensor, next(iter(found.values())).weight)
        self.bias: torch.Tensor
        self.sent: torch.Tensor
        shape = (len(self.layers), weight.shape[0])
        self.register_buffer("bias", torch.zeros(shape, device=weight.device))  # [M, E]
        # Pairs since `update`.
        self.register_buffer("sent", torch.zeros(shape, device=weight.device), persistent=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model's routers choose with the bias inside the block;
        in training mode their load is counted."""
        with hooked_routers(*self._model, self._trace, self._choose):
            yield

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the load since the last update, of all processes."""
        sent = sum_over_processes(self.sent.clone())
        self.bias.sub_(self.step * torch.sign(sent - sent.mean(dim=1, keepdim=True)))
        self.sent.zero_()

    def _choose(self, layer: int, router: Any, args: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
        """The router's output for choices by `probability + bias`."""
        row, (logits_NE, weights_NK, _) = self.layers.index(layer), outputs
        probs_NE = logits_NE.float().softmax(-1)
        biased_NE = probs_NE.detach() + self.bias[row].to(logits_NE.device)
        chosen_NK = biased_NE.topk(weights_NK.shape[-1], dim=-1).indices
        picked_NK = probs_NE.gather(-1, chosen_NK)
        if getattr(router, "norm_topk_prob", True):  # mixtral always does
            picked_NK = picked_NK / picked_NK.sum(dim=-1, keepdim=True)
        if router.training:
            real_N1 = real_rows(logits_NE, self._trace.token_mask)[:, None]
            self.sent[row] += count_pairs(chosen_NK, real_N1, logits_NE.shape[-1]).to(
                self.sent.device
            )
        return logits_NE, picked_NK.to(weights_NK.dtype), chosen_NK
