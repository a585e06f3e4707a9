"""The routers of a mixture-of-experts base: what they decide, how even the load of the experts is, what evens it.

These routers choose K of E experts for a token. Routing of an adapter with `target="experts"` comes after them and
drops some of the chosen pairs. What evens the load, two losses and a bias without a loss:

* the balance loss: "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding"
  (arXiv:2006.16668), "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity"
  (arXiv:2101.03961);
* the router z-loss: "ST-MoE: Designing Stable and Transferable Sparse Expert Models" (arXiv:2202.08906);
* the bias: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664).

Shapes: B batch, T positions, N = B * T tokens, E experts, K experts of a token, M layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..adapter.injection import token_mask_of
from ..base.contexts import evaluating, hooked
from ..base.distributed import sum_over_processes
from ..base.families import find_decoder, find_family, find_layers
from ..base.sublayers import router_of
from ..data.batches import model_inputs
from ..routing.holder import Routing
from ..routing.trace import record_routes
from .trace_statistics import stack, token_mean

_GROUP_BIAS = "e_score_correction_bias"  # of routers that score by a sigmoid and choose among groups of experts


class RouterTrace(dict[int, torch.Tensor]):
    """Layer index -> logits `[N, E]` of the base model's router, with graph, of the last forward pass.

    Attributes:
        chosen: Layer index -> the experts of each token, int64 `[N, K]`.
        token_mask: Bool `[B, T]`, true at real tokens; None when the model was called without a 2D attention mask.
        softmax: Whether the routers choose by the softmax of their logits, all experts at once. DeepSeek's do not.
        with_graph: False when a reentrant checkpoint ran the routers without a graph.
    """

    token_mask: torch.Tensor | None = None
    softmax = True
    with_graph = True

    def __init__(self) -> None:
        super().__init__()
        self.chosen: dict[int, torch.Tensor] = {}

    def real(self, layer_index: int) -> torch.Tensor:
        """Bool `[N]`: which rows of the layer's logits are real tokens."""
        return real_rows(self[layer_index], self.token_mask)

    def passed_over(self) -> bool:
        """Whether this forward pass, such as that of a reference, has no gradients, and the one that is kept has."""
        return bool(self) and self.with_graph and not torch.is_grad_enabled()

    def keep(self, layer_index: int, outputs: tuple[torch.Tensor, ...]) -> None:
        if self.passed_over():
            return
        self[layer_index], self.chosen[layer_index] = outputs[0], outputs[2]
        self.with_graph = torch.is_grad_enabled()


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a mixture-of-experts model by layer index; a router returns `(logits, weights, chosen)`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    family = find_family(model)
    every = {index: router_of(layer, family) for index, layer in enumerate(find_layers(model))}
    found = {index: router for index, router in every.items() if router is not None}
    if not found:
        raise ValueError(f"{type(model).__name__} has no layer with experts")
    return found


@contextmanager
def observe_routers(model: nn.Module) -> Iterator[RouterTrace]:
    """Keep what the base model's routers decide in the last forward pass inside the block; changes nothing.

        with observe_routers(model) as routers:
            loss = model(**batch).loss
        loss = loss + 0.01 * load_balance(routers)

    Raises:
        ValueError: The model has no layer with experts.
    """
    trace = RouterTrace()
    trace.softmax = not any(hasattr(router, _GROUP_BIAS) for router in routers(model).values())
    with hooked_routers(model, trace, lambda index, router, args, outputs: trace.keep(index, outputs)):
        yield trace


@contextmanager
def hooked_routers(model: nn.Module, trace: RouterTrace, hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook(layer_index, router, args, outputs)` after every router, and keep the token mask of each call."""

    def mask_keeper(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not trace.passed_over():
            trace.token_mask = token_mask_of(args, kwargs)

    decoder = find_decoder(model, find_family(model))
    handles = [router.register_forward_hook(partial(hook, index)) for index, router in routers(model).items()]
    with hooked([*handles, decoder.register_forward_pre_hook(mask_keeper, with_kwargs=True)]):
        yield


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one layer's experts, as shares of all (token, expert) pairs that its router assigned.

    Attributes:
        assigned: `[E]`; sums to 1.
        ran: `[E]`, the pairs that were computed; less than `assigned` where an adapter dropped pairs.
    """

    assigned: torch.Tensor
    ran: torch.Tensor

    @property
    def imbalance(self) -> float:
        """The most loaded expert's share over the even share, `E * max(assigned)`; 1 at perfect balance."""
        return float(len(self.assigned) * self.assigned.max())


@torch.no_grad()
def expert_load(model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[int, ExpertLoad]:
    """How the tokens of `batches` spread over the experts, before and after an adapter's routing of experts.

    Args:
        model: A mixture-of-experts model, with or without an adapter. It runs in inference mode.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each `[B, T]`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    assigned: dict[int, torch.Tensor] = {}
    ran: dict[int, torch.Tensor] = {}
    holders = [module for module in model.modules() if isinstance(module, Routing)]
    dropping = any(h.adapter() is not None and h.active_target().per_pair for h in holders)
    with evaluating(model):
        for inputs in model_inputs(model, batches):
            recording: Any = record_routes(model) if dropping else nullcontext({})
            with observe_routers(model) as trace, recording as routes:
                model(**inputs, use_cache=False)
            for index, logits in trace.items():
                sent = kept = count_pairs(trace.chosen[index], trace.real(index)[:, None], logits.shape[-1])
                if index in routes:
                    record = routes[index]
                    kept = count_pairs(record.expert_index, record.mask & record.real, logits.shape[-1])
                assigned[index] = assigned.get(index, 0) + sent
                ran[index] = ran.get(index, 0) + kept
    pairs = {index: sent.sum().clamp(min=1) for index, sent in assigned.items()}
    return {i: ExpertLoad((assigned[i] / n).cpu(), (ran[i] / n).cpu()) for i, n in pairs.items()}


def real_rows(rows: torch.Tensor, token_mask_BT: torch.Tensor | None) -> torch.Tensor:
    """Bool `[N]`: which of the `N` rows that a router saw are real tokens.

    A routed FFN hands down only the rows that run full, and padding is never among them.
    """
    if token_mask_BT is None or token_mask_BT.numel() != len(rows):
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    return token_mask_BT.reshape(-1).to(rows.device)


def count_pairs(chosen: torch.Tensor, keep: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is in `chosen` where `keep`, float32 `[E]`."""
    keep = keep.expand_as(chosen).to(chosen.device)
    zeros = torch.zeros(experts, device=chosen.device)
    return zeros.index_add_(0, chosen.reshape(-1), keep.reshape(-1).float())


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
    return stack(losses).mean()


def router_z(trace: RouterTrace) -> torch.Tensor:
    """Router z-loss: `mean(logsumexp(logits)^2)` over real tokens, mean over layers."""
    squares = {index: logits_NE.float().logsumexp(-1).square() for index, logits_NE in trace.items()}
    return stack([token_mean(square_N[None], trace.real(index)[None]) for index, square_N in squares.items()]).mean()


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
        if any(hasattr(router, _GROUP_BIAS) for router in found.values()):
            raise ValueError("BalanceBias: the routers have a bias of their own and choose in groups")
        self.step = step
        self.layers = list(found)
        self._model = (model,)  # a tuple: no part of this module
        self._trace = RouterTrace()
        weight = cast(torch.Tensor, next(iter(found.values())).weight)
        self.bias: torch.Tensor
        self.sent: torch.Tensor
        shape = (len(self.layers), weight.shape[0])
        self.register_buffer("bias", torch.zeros(shape, device=weight.device))  # [M, E]
        self.register_buffer("sent", torch.zeros(shape, device=weight.device), persistent=False)  # pairs since `update`

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model's routers choose with the bias inside the block; in training mode their load is counted."""
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
            self.sent[row] += count_pairs(chosen_NK, real_N1, logits_NE.shape[-1]).to(self.sent.device)
        return logits_NE, picked_NK.to(weights_NK.dtype), chosen_NK
