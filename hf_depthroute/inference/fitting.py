"""Cheap branches by least squares: a start that already imitates the path it stands in for.

Shapes: B batch, T positions, N tokens, d model width, r branch rank (one more with a bias).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.cache import without_cache
from ..base.contexts import evaluating
from ..base.families import find_layers
from ..data.batches import model_inputs, token_mask
from ..execution.layer import DECODE_STEPS, LAST_TOKENS, TOKEN_MASK, routed_call
from ..parts.targets import TARGETS
from ..parts.traits import traits_of
from ..routing.holder import Routing
from ..routing.trace import record_routes
from .calibration import active_routings


@torch.no_grad()
def fit_branches(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]], ridge: float = 1e-3
) -> dict[int, float]:
    """Set every low-rank branch's `down` so that `down(silu(up(norm(a))))` comes close to the full path's update.

    Ridge regression in float64 on calibration tokens; `norm` and `up` stay as they are. Layers are fitted in order, on
    the stream that the layers before, already fitted, really produce: one pass over the batches per layer. A layer
    that has been calibrated or trained, or has no gate, is fitted on the tokens that take its cheap path; any other,
    and one where fewer tokens than the branch has parameters per output do, on all of them. Nothing is random.

    Args:
        model: A model with one active adapter with `branch="lowrank"` and target ffn, attention or block.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`; a few thousand tokens suffice.
            They are kept in memory.
        ridge: Penalty on the weights, as a fraction of the mean squared feature.

    Returns:
        `{layer_index: sum |update - branch|^2 / sum |update|^2}`, on the tokens it was fitted on; a branch that adds
        nothing has 1.

    Raises:
        ValueError: No adapter is active, it routes experts or has no low-rank branch, `ridge` is negative, or
            `batches` holds no real token.
    """
    holders = active_routings(model)
    config = holders[0].active_config()
    if TARGETS[config.target].per_pair:
        known = ", ".join(name for name, target in TARGETS.items() if not target.per_pair)
        raise ValueError(f"fit_branches: target={config.target!r} has no update to imitate; use {known}")
    if config.branch != "lowrank":
        raise ValueError(f"fit_branches: branch={config.branch!r} has nothing to fit; use 'lowrank'")
    if not ridge >= 0:
        raise ValueError(f"fit_branches: ridge={ridge!r} must be at least 0")
    kept = list(model_inputs(model, batches))
    if not any(bool(token_mask(batch).any()) for batch in kept):
        raise ValueError("fit_branches: batches holds no real token")
    with evaluating(model):
        return {holder.layer_index: _fit_layer(model, holder, kept, ridge) for holder in holders}


def _fit_layer(model: nn.Module, holder: Routing, batches: list[dict[str, torch.Tensor]], ridge: float) -> float:
    name = holder.active_name()
    branch: Any = holder.depth_route_branch[name]
    features_BTr, updates_BTd = torch.empty(0), torch.empty(0)

    def look(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal features_BTr, updates_BTd
        kwargs = without_cache(kwargs | dict(zip(layer._argument_names, args[1:])))
        kwargs.pop(TOKEN_MASK, None)
        kwargs.pop(LAST_TOKENS, None)
        kwargs.pop(DECODE_STEPS, None)
        h = args[0] if args else kwargs.pop("hidden_states")
        plan = holder.plan(layer.training)
        assert plan is not None
        call = routed_call(layer, plan, h, None, kwargs, decides=False)
        stream = call.stream
        features_BTr = F.silu(branch.up(branch.norm(stream).to(stream.dtype)))
        if branch.down.bias is not None:
            features_BTr = torch.cat([features_BTr, torch.ones_like(features_BTr[..., :1])], dim=-1)
        updates_BTd = call.full() - stream

    sums: dict[bool, list[Any]] = {}  # over the cheap tokens, over all tokens
    with find_layers(model)[holder.layer_index].register_forward_pre_hook(look, with_kwargs=True):
        for batch in batches:
            with record_routes(model) as trace:
                model(**batch, use_cache=False, logits_to_keep=1)
            real = token_mask(batch).to(updates_BTd.device)
            for cheap_only in (True, False):
                chosen = real & ~trace[holder.layer_index].mask.to(real.device) if cheap_only else real
                x_Nr, y_Nd = features_BTr[chosen].double(), updates_BTd[chosen].double()
                found = [len(x_Nr), (x_Nr.T @ x_Nr).cpu(), (x_Nr.T @ y_Nd).cpu(), y_Nd.square().sum().cpu()]
                sums[cheap_only] = [a + b for a, b in zip(sums[cheap_only], found)] if cheap_only in sums else found
    config = holder.config(name)
    decided = traits_of(config.gate).static or config.fixed_threshold is not None or holder.active_quantiles().fitted()
    _, gram_rr, cross_rd, square = sums[bool(decided and sums[True][0] >= len(sums[True][1]))]
    penalty = ridge * gram_rr.diagonal().mean() * torch.eye(len(gram_rr), dtype=gram_rr.dtype)
    weights_rd = torch.linalg.lstsq(gram_rr + penalty, cross_rd).solution
    rank = branch.down.in_features
    branch.down.weight.copy_(weights_rd[:rank].T)
    if branch.down.bias is not None:
        branch.down.bias.copy_(weights_rd[rank])
    left = square - 2 * (weights_rd * cross_rd).sum() + (weights_rd * (gram_rr @ weights_rd)).sum()
    return float(left.clamp(min=0) / square) if square > 0 else 0.0  # 0 where there is nothing to imitate
