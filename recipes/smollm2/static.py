"""The best FFNs to replace for every token by a branch of their own neurons:
what a router has to beat.

Greedy: each layer's branch is fitted on the dense model's stream, then the layer is taken whose
replacement, beside those already taken, loses least on text to choose on. The branches of the
layers that were found are fitted once more, each on the stream that those before it leave.
Attention sinks run in full, as with a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.inference.fitting import fit_branches, ridge_of
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth

Weights = Mapping[int, tuple[dict[str, Any], dict[str, Any]]]
Batches = list[dict[str, torch.Tensor]]


NEURONS = {"branch": "neurons"}  # what a subset is searched with


def replaced(
    base: Any, layers: Iterable[int], weights: Weights, fields: Mapping[str, Any] = NEURONS
) -> Any:
    """`base` with the FFNs of `layers` replaced by branches of these `fields`, and by the gates
    and branches of `weights` where they are known."""
    config = DepthRouteConfig(layers=sorted(layers), gate="sinks", budget=1e-3, **fields)
    model = get_depth_routed_model(base, config).eval()
    for routing in routings_of(model):
        if routing.layer_index in weights:
            gate, branch = weights[routing.layer_index]
            routing.depth_route_gate["default"].load_state_dict(gate)
            routing.depth_route_branch["default"].load_state_dict(branch)
    return model


def parts_of(model: Any) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        routing.layer_index: (
            routing.depth_route_gate["default"].state_dict(),
            routing.depth_route_branch["default"].state_dict(),
        )
        for routing in routings_of(model)
    }


@torch.no_grad()
def fitted(base: Any, layers: list[int], text: Batches, fields: Mapping[str, Any] = NEURONS) -> Any:
    """`base` with the FFNs of `layers` replaced, each fitted to the update that
    it stands in for."""
    model = replaced(base, layers, {}, fields)
    for routing in routings_of(model):
        with full_depth(model):
            routing.depth_route_gate["default"].set_bound(_streams(model, routing, text))
    tokens = sum(batch["input_ids"].numel() for batch in text)
    fit_branches(model, text, ridge_of(True, tokens, model.config.hidden_size))
    return model


def _streams(model: Any, routing: Any, text: Batches) -> torch.Tensor:
    """What enters the FFN's norm of a layer, `[N, d]`."""
    seen: list[torch.Tensor] = []
    norm = routing.norm_in_front("ffn")
    handle = norm.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].flatten(0, -2))
    )
    for batch in text:
        model(**batch, use_cache=False, logits_to_keep=1)
    handle.remove()
    return torch.cat(seen)


def greedy(base: Any, count: int, text: Batches, loss: Callable[[Any], float]) -> list[int]:
    """`count` layers, in the order in which they are taken;
    the dearer half of single layers is not tried again."""
    weights: dict[int, Any] = {}
    for index in range(base.config.num_hidden_layers):
        model = fitted(base, [index], text)
        weights |= parts_of(model)
        model.unload()

    def lost(layers: list[int]) -> float:
        model = replaced(base, layers, weights)
        found = loss(model)
        model.unload()
        return found

    taken: list[int] = []
    candidates = list(weights)
    while len(taken) < count:
        losses = {index: lost([*taken, index]) for index in candidates}
        order = sorted(losses, key=losses.__getitem__)
        print(f"  {taken} and {order[0]}: {losses[order[0]]:.4f}", flush=True)
        taken.append(order[0])
        candidates = order[1:] if len(taken) > 1 else order[1 : len(order) // 2]
    return taken
