"""Cheap branches by least squares: a start that already imitates the path it stands in for.

Shapes: B batch, T positions, N tokens, d model width, r branch rank (one more with a bias).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .batches import model_inputs
from .cache import without_cache
from .calibration import active_routings
from .families import find_decoder
from .holder import Routing
from .importance import evaluating, real_tokens
from .layer import DECODE_STEPS, TOKEN_MASK
from .sites import SITES
from .trace import record_routes


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
    if config.target not in SITES:
        raise ValueError(f"fit_branches: target={config.target!r} has no update to imitate; use {', '.join(SITES)}")
    if config.branch != "lowrank":
        raise ValueError(f"fit_branches: branch={config.branch!r} has nothing to fit; use 'lowrank'")
    if not ridge >= 0:
        raise ValueError(f"fit_branches: ridge={ridge!r} must be at least 0")
    kept = list(model_inputs(model, batches))
    if not any(bool(real_tokens(batch).any()) for batch in kept):
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
        kwargs.pop(DECODE_STEPS, None)
        h = args[0] if args else kwargs.pop("hidden_states")
        site = SITES[holder.config(name).target]
        stream = site.enter(layer, holder, h, kwargs)
        full = site.full(layer, holder, stream, site.norm(layer, holder, stream), kwargs)
        features_BTr = F.silu(branch.up(branch.norm(stream).to(stream.dtype)))
        if branch.down.bias is not None:
            features_BTr = torch.cat([features_BTr, torch.ones_like(features_BTr[..., :1])], dim=-1)
        updates_BTd = full - stream

    decided = _has_decided(holder, name)
    sums: dict[bool, _Sums] = {}  # over the cheap tokens, over all tokens
    handle = _layer_of(model, holder).register_forward_pre_hook(look, with_kwargs=True)
    try:
        for batch in batches:
            with record_routes(model) as trace:
                model(**batch, use_cache=False, logits_to_keep=1)
            real = real_tokens(batch).to(updates_BTd.device)
            for cheap_only in (True, False):
                chosen = real & ~trace[holder.layer_index].mask.to(real.device) if cheap_only else real
                found = _Sums(features_BTr[chosen].double(), updates_BTd[chosen].double())
                sums[cheap_only] = sums[cheap_only] + found if cheap_only in sums else found
    finally:
        handle.remove()
    used = sums[decided and sums[True].count >= len(sums[True].gram)]
    weights_rd = used.solve(ridge)
    rank = branch.down.in_features
    branch.down.weight.copy_(weights_rd[:rank].T)
    if branch.down.bias is not None:
        branch.down.bias.copy_(weights_rd[rank])
    return used.error(weights_rd)


class _Sums:
    """What the least-squares problem `min |features W - updates|^2` needs of its rows."""

    def __init__(self, features_Nr: torch.Tensor, updates_Nd: torch.Tensor) -> None:
        self.count = len(features_Nr)
        self.gram = (features_Nr.T @ features_Nr).cpu()  # [r, r]
        self.cross = (features_Nr.T @ updates_Nd).cpu()  # [r, d]
        self.square = updates_Nd.square().sum().cpu()

    def __add__(self, other: _Sums) -> _Sums:
        joined = object.__new__(_Sums)
        joined.__dict__ = {name: value + getattr(other, name) for name, value in self.__dict__.items()}
        return joined

    def solve(self, ridge: float) -> torch.Tensor:  # -> [r, d]
        penalty = ridge * self.gram.diagonal().mean() * torch.eye(len(self.gram), dtype=self.gram.dtype)
        return torch.linalg.lstsq(self.gram + penalty, self.cross).solution

    def error(self, weights_rd: torch.Tensor) -> float:
        """Squared error over squared size of the updates; 0 where there is nothing to imitate."""
        left = self.square - 2 * (weights_rd * self.cross).sum() + (weights_rd * (self.gram @ weights_rd)).sum()
        return float(left.clamp(min=0) / self.square) if self.square > 0 else 0.0


def _has_decided(holder: Routing, name: str) -> bool:
    """Whether the layer's decisions mean anything yet."""
    config = holder.config(name)
    if config.gate == "none":
        return True
    return config.fixed_threshold is not None or bool(holder.active_quantiles().updates > 0)


def _layer_of(model: nn.Module, holder: Routing) -> nn.Module:
    layers: Any = getattr(find_decoder(model, holder.family), holder.family.layers)
    return layers[holder.layer_index]
