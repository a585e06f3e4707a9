"""The routers of a mixture-of-experts base: what they decide,
and two losses that even the load of the experts.

These routers choose K of E experts for a token. Routing of an adapter with `target="experts"` comes
after them and drops some of the chosen pairs. The losses:

* the balance loss: "GShard: Scaling Giant Models with Conditional Computation and Automatic
  Sharding" (arXiv:2006.16668), "Switch Transformers: Scaling to Trillion Parameter Models with
  Simple and Efficient Sparsity" (arXiv:2101.03961);
* the router z-loss: "ST-MoE: Designing Stable and Transferable Sparse Expert Models"
  (arXiv:2202.08906).

`LOSSES.update(ROWS)` makes them rows of the training loss, `balance` and `router_z`; `loss_weights`
turns them on.

Shapes: B batch, T positions, N = B * T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_depthroute.adapter.call_tokens import token_mask_of
from hf_depthroute.base.contexts import hooked
from hf_depthroute.base.families import find_family
from hf_depthroute.base.stack import stack_of
from hf_depthroute.base.sublayers import router_of
from hf_depthroute.training.losses import LossInputs, LossTerm
from hf_depthroute.training.trace_statistics import stack, token_mean

# Of routers that score by a sigmoid and choose among groups of experts.
GROUP_BIAS = "e_score_correction_bias"


class RouterTrace(dict[int, torch.Tensor]):
    """Layer index -> logits `[N, E]` of the base model's router, with graph,
    of the last forward pass.

    Attributes:
        chosen: Layer index -> the experts of each token, int64 `[N, K]`.
        token_mask: Bool `[B, T]`, true at real tokens; None when the model was called without a 2D
            attention mask.
        softmax: Whether the routers choose by the softmax of their logits, all experts at once.
            DeepSeek's do not.
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
        """Whether this forward pass, such as that of a reference, has no gradients,
        and the one that is kept has."""
        return bool(self) and self.with_graph and not torch.is_grad_enabled()

    def keep(self, layer_index: int, outputs: tuple[torch.Tensor, ...]) -> None:
        if self.passed_over():
            return
        self[layer_index], self.chosen[layer_index] = outputs[0], outputs[2]
        self.with_graph = torch.is_grad_enabled()


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a mixture-of-experts model by layer index;
    a router returns `(logits, weights, chosen)`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    family = find_family(model)
    every = {index: router_of(layer, family) for index, layer in enumerate(stack_of(model).layers)}
    found = {index: router for index, router in every.items() if router is not None}
    if not found:
        raise ValueError(f"{type(model).__name__} has no layer with experts")
    return found


@contextmanager
def observe_routers(model: nn.Module) -> Iterator[RouterTrace]:
    """Keep what the base model's routers decide in the last forward pass inside the block;
    changes nothing.

        with observe_routers(model) as routers:
            loss = model(**batch).loss
        loss = loss + 0.01 * load_balance(routers)

    Raises:
        ValueError: The model has no layer with experts.
    """
    trace = RouterTrace()
    trace.softmax = not any(hasattr(router, GROUP_BIAS) for router in routers(model).values())
    with hooked_routers(
        model, trace, lambda index, router, args, outputs: trace.keep(index, outputs)
    ):
        yield trace


@contextmanager
def hooked_routers(
    model: nn.Module, trace: RouterTrace, hook: Callable[..., Any]
) -> Iterator[None]:
    """Call `hook(layer_index, router, args, outputs)` after every router,
    and keep the token mask of each call."""

    def mask_keeper(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not trace.passed_over():
            trace.token_mask = token_mask_of(args, kwargs)

    decoder = stack_of(model).decoder
    handles = [
        router.register_forward_hook(partial(hook, index))
        for index, router in routers(model).items()
    ]
    with hooked([*handles, decoder.register_forward_pre_hook(mask_keeper, with_kwargs=True)]):
        yield


def real_rows(rows: torch.Tensor, token_mask_BT: torch.Tensor | None) -> torch.Tensor:
    """Bool `[N]`: which of the `N` rows that a router saw are real tokens.

    A routed FFN hands down only the rows that run full, and padding is never among them.
    """
    if token_mask_BT is None or token_mask_BT.numel() != len(rows):
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    return token_mask_BT.reshape(-1).to(rows.device)


def load_balance(trace: RouterTrace, dispatch: str = "top1") -> torch.Tensor:
    """Switch Transformer, GShard: `E * sum_i f_i P_i`, mean over layers.

    1 where `f` and `P` are uniform.

    `P` is the mean router probability of an expert. `f`, without gradient, is the share of tokens
    whose most probable expert it is (`"top1"`, as in both papers), or the share of (token, expert)
    pairs that really go to it (`"topk"`; the same for K = 1). Means run over real tokens, of all
    processes.

    Raises:
        ValueError: The routers do not choose by a softmax (DeepSeek-V3).
    """
    if not trace.softmax:
        raise ValueError(
            "load_balance: the routers choose by a sigmoid and in groups; this loss is one of a "
            "softmax"
        )
    losses = []
    for index, logits_NE in trace.items():
        experts = logits_NE.shape[-1]
        probs_NE = logits_NE.float().softmax(-1)
        chosen_NK = (
            trace.chosen[index] if dispatch == "topk" else logits_NE.argmax(-1, keepdim=True)
        )
        sent_NE = F.one_hot(chosen_NK, experts).float().mean(1)
        real = trace.real(index).expand(2 * experts, -1)
        f_E, P_E = token_mean(torch.cat([sent_NE.T, probs_NE.T]), real).split(experts)
        losses.append(experts * (f_E * P_E).sum())
    return stack(losses).mean()


def router_z(trace: RouterTrace) -> torch.Tensor:
    """Router z-loss: `mean(logsumexp(logits)^2)` over real tokens, mean over layers."""
    squares = {
        index: logits_NE.float().logsumexp(-1).square() for index, logits_NE in trace.items()
    }
    return stack(
        [token_mean(square_N[None], trace.real(index)[None]) for index, square_N in squares.items()]
    ).mean()


def _graph(inputs: LossInputs) -> RouterTrace | None:
    """What the routers did in a pass with gradients; None where nothing watched them."""
    trace: RouterTrace | None = inputs.observed.get(observe_routers)
    if trace is not None and not trace.with_graph:
        raise ValueError(
            "the balance and router_z losses get no gradient through reentrant gradient "
            "checkpointing; set gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    return trace


def _row(loss: Callable[[RouterTrace], torch.Tensor]) -> LossTerm:
    def compute(inputs: LossInputs) -> torch.Tensor | None:
        trace = _graph(inputs)
        return None if trace is None else loss(trace)

    return LossTerm(0.0, compute, observe_routers)


ROWS = {"balance": _row(load_balance), "router_z": _row(router_z)}
