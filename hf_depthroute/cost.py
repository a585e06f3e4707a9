"""What a routed model costs, counted: FLOPs dense, routed and ideal, parameters, and bytes of the KV cache.

Two accountings. FLOPs are whole-model, two per weight and token plus attention. `ffn_ratio` is the paper's: units of
one full FFN on one token at one routed layer, weights only, `rho + (1 - rho) * branch / FFN + gate / FFN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from .calibration import active_routings
from .config import check_budget
from .families import find_decoder, find_family
from .gates import JEPAGate, MLPGate
from .holder import HOLDER


@dataclass(frozen=True)
class RouteCost:
    """Cost of one forward pass.

    Attributes:
        flops_dense: The base model.
        flops_routed: With routers and cheap branches, at the given share of full tokens.
        flops_ideal: The same share, with routers and branches that cost nothing.
        ffn_ratio: Mean over routed layers of the paper's cost of a routed FFN; 1 is the dense FFN.
        parameters_base: Of the base model.
        parameters_adapter: Of the adapter, the frozen projection included.
        parameters_trainable: The part of the adapter that trains.
        kv_bytes: KV cache after the pass, all layers. FFN routing does not change it.
    """

    flops_dense: float
    flops_routed: float
    flops_ideal: float
    ffn_ratio: float
    parameters_base: int
    parameters_adapter: int
    parameters_trainable: int
    kv_bytes: int


def route_cost(
    model: nn.Module,
    *,
    batch_size: int = 1,
    length: int = 1024,
    cached: int = 0,
    budget: float | None = None,
    full_ratio: Mapping[int, float] | None = None,
    logits_to_keep: int = 1,
) -> RouteCost:
    """Count the cost of one forward pass of a model with an active depth-routed adapter.

    Args:
        model: The routed model; its weights may be on the meta device.
        batch_size: Sequences.
        length: New tokens per sequence: the prompt in prefill, 1 in decode.
        cached: Tokens per sequence already in the KV cache.
        budget: Share of tokens that run full; default: the adapter's budget.
        full_ratio: Measured shares per layer, as from `RouteTrace.full_ratio`; overrides `budget`.
        logits_to_keep: Positions per sequence that go through the LM head.

    Raises:
        ValueError: No routed adapter is active.
        ConfigError: `budget` is out of range.
    """
    holders = active_routings(model)
    family = find_family(model)
    layers = getattr(find_decoder(model, family), family.layers)
    config: Any = model.config
    tokens = batch_size * length

    weights = [_weights_per_token(layer, config) for layer in layers]
    width = config.hidden_size
    head_weights = config.vocab_size * width
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    attended = length * cached + length * (length + 1) // 2  # query-key pairs of one causal sequence
    attention = len(layers) * 4.0 * batch_size * attended * heads * head_dim
    dense = 2.0 * tokens * sum(weights) + attention + 2.0 * batch_size * logits_to_keep * head_weights

    routed = ideal = dense
    ratios = []
    for holder in holders:
        name = holder.active_name()
        share = check_budget(budget) if budget is not None else holder.active_config().budget
        share = full_ratio[holder.layer_index] if full_ratio is not None else share
        ffn = _weights_per_token(getattr(layers[holder.layer_index], family.ffn), config)
        gate = cast(MLPGate | JEPAGate, holder.depth_route_gate[name]).weights_per_token()
        has_branch = name in holder.depth_route_branch
        branch = _weights_per_token(holder.depth_route_branch[name], config) if has_branch else 0
        ideal -= 2.0 * tokens * (1 - share) * ffn
        routed -= 2.0 * tokens * ((1 - share) * (ffn - branch) - gate)
        ratios.append(share + (1 - share) * branch / ffn + gate / ffn)

    adapter = {id(p): p for h in holders for p in h.parameters()}
    everything = {id(p): p for p in model.parameters()}
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dtype_bytes = next(p.element_size() for p in everything.values() if id(p) not in adapter)
    return RouteCost(
        flops_dense=dense,
        flops_routed=routed,
        flops_ideal=ideal,
        ffn_ratio=sum(ratios) / len(ratios),
        parameters_base=sum(p.numel() for key, p in everything.items() if key not in adapter),
        parameters_adapter=sum(p.numel() for p in adapter.values()),
        parameters_trainable=sum(p.numel() for p in adapter.values() if p.requires_grad),
        kv_bytes=2 * len(layers) * batch_size * (cached + length) * kv_heads * head_dim * dtype_bytes,
    )


def _weights_per_token(module: nn.Module, config: Any) -> float:
    """Weights of matrices that one token meets; of fused experts `[E, out, in]`, the share that it is sent to."""
    total = 0.0
    for name, parameter in module.named_parameters():
        if name.startswith(f"{HOLDER}."):
            continue
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            total += parameter.numel() * config.num_experts_per_tok / parameter.shape[0]
    return total
