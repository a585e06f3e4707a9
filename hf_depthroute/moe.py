"""Mixture-of-experts bases: what their own routers decide, and how evenly the tokens spread over the experts.

Shapes: B batch, T positions, N = B * T tokens, E experts, K experts of a token.

These are the base model's routers, which choose K of E experts for a token. Routing of an adapter with
`target="experts"` comes after them and drops some of the chosen pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .families import find_decoder, find_family
from .holder import Routing
from .injection import token_mask_of
from .trace import record_routes


class RouterTrace(Mapping[int, torch.Tensor]):
    """Layer index -> logits `[N, E]` of the base model's router, with graph, of the last forward pass.

    Attributes:
        chosen: Layer index -> the experts of each token, int64 `[N, K]`.
        token_mask: Bool `[B, T]`, true at real tokens; None when the model was called without a 2D attention mask.
        softmax: Whether the routers choose by the softmax of their logits, all experts at once. DeepSeek's do not.
        with_graph: False when a reentrant checkpoint ran the routers without a graph.
    """

    def __init__(self) -> None:
        self._logits: dict[int, torch.Tensor] = {}
        self.chosen: dict[int, torch.Tensor] = {}
        self.token_mask: torch.Tensor | None = None
        self.softmax = True
        self.with_graph = True

    def __getitem__(self, layer_index: int) -> torch.Tensor:
        return self._logits[layer_index]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._logits))

    def __len__(self) -> int:
        return len(self._logits)

    def real(self, layer_index: int) -> torch.Tensor:
        """Bool `[N]`: which rows of the layer's logits are real tokens."""
        return real_rows(self[layer_index], self.token_mask)

    def keep(self, layer_index: int, outputs: tuple[torch.Tensor, ...]) -> None:
        self._logits[layer_index], self.chosen[layer_index] = outputs[0], outputs[2]
        self.with_graph = torch.is_grad_enabled()


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a mixture-of-experts model by layer index; a router returns `(logits, weights, chosen)`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    family = find_family(model)
    blocks = {
        index: getattr(layer, family.ffn)
        for index, layer in enumerate(getattr(find_decoder(model, family), family.layers))
    }
    found = {index: block.gate for index, block in blocks.items() if hasattr(block, family.experts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no layer with experts")
    return found


def by_groups(router: nn.Module) -> bool:
    """Whether a router scores experts by a sigmoid and chooses among groups of them, with a bias of its own."""
    return hasattr(router, "e_score_correction_bias")


@contextmanager
def observe_routers(model: nn.Module) -> Iterator[RouterTrace]:
    """Keep what the base model's routers decide in the last forward pass inside the block; changes nothing.

        with observe_routers(model) as routers:
            loss = model(**batch).loss
        loss = loss + 0.01 * balancing.load_balance(routers)

    Raises:
        ValueError: The model has no layer with experts.
    """
    trace = RouterTrace()

    def mask_keeper(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.token_mask = token_mask_of(args, kwargs)

    def keeper(index: int) -> Any:
        return lambda router, args, outputs: trace.keep(index, outputs)

    trace.softmax = not any(by_groups(router) for router in routers(model).values())
    decoder = find_decoder(model, find_family(model))
    handles = [router.register_forward_hook(keeper(index)) for index, router in routers(model).items()]
    handles.append(decoder.register_forward_pre_hook(mask_keeper, with_kwargs=True))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


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
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`.

    Raises:
        ValueError: The model has no layer with experts.
    """
    device = next(model.parameters()).device
    assigned: dict[int, torch.Tensor] = {}
    ran: dict[int, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            inputs = {n: torch.as_tensor(batch[n]).to(device) for n in ("input_ids", "attention_mask") if n in batch}
            with observe_routers(model) as trace:
                dropping = _dropping(model)
                if dropping:
                    with record_routes(model) as routes:
                        model(**inputs, use_cache=False)
                else:
                    model(**inputs, use_cache=False)
            for index, logits in trace.items():
                sent = count_pairs(trace.chosen[index], trace.real(index)[:, None], logits.shape[-1])
                kept = sent
                if dropping and index in routes:
                    record = routes[index]
                    kept = count_pairs(record.expert_index, record.mask & record.real, logits.shape[-1])
                assigned[index] = assigned.get(index, 0) + sent
                ran[index] = ran.get(index, 0) + kept
    finally:
        model.train(was_training)
    return {
        index: ExpertLoad((sent / sent.sum().clamp(min=1)).cpu(), (ran[index] / sent.sum().clamp(min=1)).cpu())
        for index, sent in assigned.items()
    }


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


def _dropping(model: nn.Module) -> bool:
    """Whether an adapter that routes experts is active."""
    holders = [module for module in model.modules() if isinstance(module, Routing)]
    return any(h.adapter() is not None and h.active_config().target == "experts" for h in holders)
