"""Even load for the experts of a mixture-of-experts base: two losses of its own routers, and a bias without a loss.

* the balance loss: "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding"
  (arXiv:2006.16668), "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity"
  (arXiv:2101.03961);
* the router z-loss: "ST-MoE: Designing Stable and Transferable Sparse Expert Models" (arXiv:2202.08906);
* the bias: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664).

Shapes: N tokens, E experts, K experts of a token, M layers with experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .averages import token_mean
from .families import find_decoder, find_family
from .injection import token_mask_of
from .moe import RouterTrace, by_groups, count_pairs, real_rows, routers


def load_balance(trace: RouterTrace, dispatch: str = "top1") -> torch.Tensor:
    """Switch Transformer, GShard: `E * sum_i f_i P_i`, mean over layers. 1 where `f` and `P` are uniform.

    `P` is the mean router probability of an expert. `f`, without gradient, is the share of tokens whose most probable
    expert it is (`"top1"`, as in both papers), or the share of (token, expert) pairs that really go to it (`"topk"`;
    the same for K = 1). Means run over real tokens, of all processes.

    Raises:
        ValueError: The routers do not choose by a softmax (DeepSeek-V3).
    """
    if not trace.softmax:
        raise ValueError("load_balance: the routers choose by a sigmoid and in groups; this loss is one of a softmax")
    losses = []
    for index, logits_NE in trace.items():
        experts = logits_NE.shape[-1]
        probs_NE = logits_NE.float().softmax(-1)
        chosen_NK = trace.chosen[index] if dispatch == "topk" else logits_NE.argmax(-1, keepdim=True)
        sent_NE = F.one_hot(chosen_NK, experts).float().mean(1)
        real = trace.real(index).expand(2 * experts, -1)
        f_E, P_E = token_mean(torch.cat([sent_NE.T, probs_NE.T]), real).split(experts)
        losses.append(experts * (f_E * P_E).sum())
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def router_z(trace: RouterTrace) -> torch.Tensor:
    """Router z-loss: `mean(logsumexp(logits)^2)` over real tokens, mean over layers."""
    losses = [
        token_mean(logits_NE.float().logsumexp(-1).square()[None], trace.real(index)[None])
        for index, logits_NE in trace.items()
    ]
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


class BalanceBias(nn.Module):
    """Loss-free balancing: a bias per expert, added to the router's probabilities for the choice only.

    The weights of the chosen experts stay the unbiased probabilities, renormalised where the model does that, and no
    gradient passes through the bias. `update`, after an optimizer step, moves every bias by a fixed step against the
    sign of its expert's load error.

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
        ValueError: The model has no layer with experts, or its routers have such a bias already (DeepSeek-V3).
    """

    def __init__(self, model: nn.Module, step: float = 0.001) -> None:
        super().__init__()
        found = routers(model)
        if any(by_groups(router) for router in found.values()):
            raise ValueError("BalanceBias: the routers have a bias of their own and choose in groups")
        self.step = step
        self.layers = list(found)
        self._routers: tuple[nn.Module, ...] = tuple(found.values())  # a tuple: owned by the model
        self._decoder: tuple[nn.Module, ...] = (find_decoder(model, find_family(model)),)
        self._token_mask: torch.Tensor | None = None
        weight = cast(torch.Tensor, self._routers[0].weight)
        self.bias: torch.Tensor
        self.sent: torch.Tensor
        shape = (len(self.layers), weight.shape[0])
        self.register_buffer("bias", torch.zeros(shape, device=weight.device))  # [M, E]
        self.register_buffer("sent", torch.zeros(shape, device=weight.device), persistent=False)  # pairs since `update`

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model's routers choose with the bias inside the block; in training mode their load is counted."""

        def mask_keeper(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._token_mask = token_mask_of(args, kwargs)

        def chooser(row: int) -> Any:
            return lambda router, args, outputs: self._choose(row, router, outputs)

        handles = [router.register_forward_hook(chooser(row)) for row, router in enumerate(self._routers)]
        handles.append(self._decoder[0].register_forward_pre_hook(mask_keeper, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the load since the last update, of all processes."""
        sent = self.sent.clone()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sent)
        self.bias.sub_(self.step * torch.sign(sent - sent.mean(dim=1, keepdim=True)))
        self.sent.zero_()

    def _choose(self, row: int, router: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the router would return, had it chosen by `probability + bias`."""
        logits_NE, weights_NK, _ = outputs
        probs_NE = logits_NE.float().softmax(-1)
        biased_NE = probs_NE.detach() + self.bias[row].to(logits_NE.device)
        chosen_NK = biased_NE.topk(weights_NK.shape[-1], dim=-1).indices
        picked_NK = probs_NE.gather(-1, chosen_NK)
        if getattr(router, "norm_topk_prob", True):  # mixtral always does
            picked_NK = picked_NK / picked_NK.sum(dim=-1, keepdim=True)
        if router.training:
            real_N1 = real_rows(logits_NE, self._token_mask)[:, None]
            self.sent[row] += count_pairs(chosen_NK, real_N1, logits_NE.shape[-1]).to(self.sent.device)
        return logits_NE, picked_NK.to(weights_NK.dtype), chosen_NK
