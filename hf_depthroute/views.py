"""A second model over the same tensors, with flags and depth of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from .config import DepthRouteConfig
from .families import find_decoder, find_family
from .holder import Routing
from .quantiles import BudgetController


def view_of(base: nn.Module) -> Any:
    """A copy of `base` with its own modules, flags and configurations, whose tensors are those of `base`."""
    return copy.deepcopy(base, _shared(base))


def _shared(base: nn.Module) -> dict[int, Any]:
    """The memo of a deep copy that keeps what it finds in it: every tensor, and where accelerate offloads them to."""
    memo: dict[int, Any] = {}
    for module in base.modules():
        if isinstance(module, BudgetController):
            continue  # `set_budget` writes its threshold: each view has its own
        kept: list[Any] = [*module._parameters.values(), *module._buffers.values()]
        if isinstance(module, Routing):
            memo[id(module.recorders)] = []  # traces are the model's own
            kept += [module.replay, module.last_mask]
        hook = module.__dict__.get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):
            kept += [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Mapping)]
        memo.update({id(value): value for value in kept if value is not None})
    return memo


def leave_out(model: Any, drop: Sequence[int]) -> None:
    """Take the decoder layers `drop` out of a view, and number the others, their caches and their adapters anew."""
    family = find_family(model)
    decoder: Any = find_decoder(model, family)
    layers = getattr(decoder, family.layers)
    kept = [index for index in range(len(layers)) if index not in drop]
    setattr(decoder, family.layers, nn.ModuleList(layers[index] for index in kept))
    config = decoder.config
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]

    adapters: dict[int, DepthRouteConfig] = {}
    previous: dict[str, Routing] = {}
    for place, layer in enumerate(getattr(decoder, family.layers)):
        getattr(layer, family.attention).layer_idx = place
        for holder in (module for module in layer.children() if isinstance(module, Routing)):
            holder.layer_index = place
            adapters |= {id(c): c for c in holder.peft_configs.values() if isinstance(c, DepthRouteConfig)}
            for name in list(holder._previous):
                holder._previous.pop(name)
            for name in holder.depth_route_gate:
                if holder.config(name).gate == "exit" and name in previous:
                    holder.follow(name, previous[name])
                previous[name] = holder
    for adapter in adapters.values():
        places = {index: place for place, index in enumerate(kept)}
        routed = cast("list[int]", adapter.layers)
        remaining = [at for at, index in enumerate(routed) if index in places]
        if adapter.dropped_experts is not None:
            adapter.dropped_experts = [adapter.dropped_experts[at] for at in remaining]
        adapter.layers = [places[routed[at]] for at in remaining]
