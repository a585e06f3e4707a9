"""What a routed model costs, counted: FLOPs dense, routed and ideal, parameters, and bytes of the KV cache.

Two accountings. FLOPs are whole-model, two per weight and token plus attention. `ffn_ratio` is that of "Revisiting
Auxiliary Losses for Conditional Depth Routing: An Empirical Study" (arXiv:2604.17228): units of one full FFN (or
whatever is routed) on one token at one routed layer, weights only, `rho + (1 - rho) * branch / FFN + gate / FFN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from .calibration import active_routings
from .config import DepthRouteConfig, check_budget
from .execution.projections import STYLES
from .families import find_decoder, find_family
from .gates import GATES, MLPGate
from .holder import HOLDER, Routing


@dataclass(frozen=True)
class RouteCost:
    """Cost of one forward pass.

    Attributes:
        flops_dense: The base model.
        flops_routed: With routers and cheap branches, at the given share of full tokens.
        flops_ideal: The same share, with routers and branches that cost nothing.
        ffn_ratio: Mean over routed layers of the cost of the routed part, in FFNs as above; 1 is the dense part.
        parameters_base: The number of the base model's parameters.
        parameters_adapter: The adapter's, the frozen projection included.
        parameters_trainable: The part of the adapter that trains.
        kv_bytes: KV cache after the pass, all layers. Only whole sequences whose attention is skipped leave it smaller.
        remark: One line where the adapter cannot pay for itself: why not, and what to make smaller; None where it can.
    """

    flops_dense: float
    flops_routed: float
    flops_ideal: float
    ffn_ratio: float
    parameters_base: int
    parameters_adapter: int
    parameters_trainable: int
    kv_bytes: int
    remark: str | None = None


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
        budget: Share of tokens that run full; default: the adapter's budget, and 0 where there is no gate.
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
    per_pair, cached_values = attention_sizes(config)
    attended = length * cached + length * (length + 1) // 2  # query-key pairs of one causal sequence
    attention = len(layers) * batch_size * attended * per_pair
    dense = 2.0 * tokens * sum(weights) + attention + 2.0 * batch_size * logits_to_keep * head_weights

    adapter = {id(p): p for h in holders for p in h.parameters()}
    everything = {id(p): p for p in model.parameters()}
    dtype_bytes = next(p.element_size() for p in everything.values() if id(p) not in adapter)
    per_layer = float(batch_size * (cached + length) * cached_values * dtype_bytes)
    kv_bytes = per_layer * len(layers)
    routed = ideal = dense
    ratios, spent = [], _Spent()
    for holder in holders:
        name, c = holder.active_name(), holder.active_config()
        layer = layers[holder.layer_index]
        share = _share(holder, c, budget) if full_ratio is None else full_ratio[holder.layer_index]
        part = _routed_weights(layer, holder, c, config)
        core = per_pair * attended / length if c.target in ("attention", "block") else 0.0
        core = core if _saves_attention(holder, c) else 0.0
        gates = [group[name] for group in (holder.depth_route_gate, holder.depth_route_predictor) if name in group]
        gate = float(sum(cast(MLPGate, module).weights_per_token() for module in gates))
        gate = gate / length if c.granularity == "sequence" else gate
        has_branch = name in holder.depth_route_branch
        branch = _weights_per_token(holder.depth_route_branch[name], config) if has_branch else 0
        saved, cheap = (1 - share) * (2.0 * part + core), (1 - share) * 2.0 * branch
        ideal -= tokens * saved
        routed -= tokens * (saved - cheap - 2.0 * gate)
        spent = _Spent(spent.saved + saved, spent.gates + 2.0 * gate, spent.branches + cheap)
        ratios.append(share + ((1 - share) * branch + gate) / max(part, 1.0))
        if _skips_sequences(c):
            kv_bytes -= (1 - share) * per_layer

    return RouteCost(
        flops_dense=dense,
        flops_routed=routed,
        flops_ideal=ideal,
        ffn_ratio=sum(ratios) / len(ratios),
        parameters_base=sum(p.numel() for key, p in everything.items() if key not in adapter),
        parameters_adapter=sum(p.numel() for p in adapter.values()),
        parameters_trainable=sum(p.numel() for p in adapter.values() if p.requires_grad),
        kv_bytes=round(kv_bytes),
        remark=_remark(holders[0], spent, routed / dense),
    )


def cost_remark(model: nn.Module) -> str | None:
    """`RouteCost.remark` of the active adapter at its own budget, in prefill; None where nothing is routed."""
    if not any(isinstance(part, Routing) and part.adapter() is not None for part in model.modules()):
        return None
    return route_cost(model).remark


@dataclass(frozen=True)
class _Spent:
    """FLOPs of one token, summed over the routed layers."""

    saved: float = 0.0
    gates: float = 0.0
    branches: float = 0.0


def _remark(holder: Routing, spent: _Spent, ratio: float) -> str | None:
    """Why an adapter that leaves something out costs more than it saves."""
    if spent.saved == 0 or spent.saved > spent.gates + spent.branches:
        return None
    config = holder.active_config()
    names = getattr(GATES[config.gate], "sizes", ()) if spent.gates >= spent.branches else ("branch_rank",)
    smaller = ", ".join(f"{name} (now {getattr(config, name)})" for name in names)
    advice = f"make {smaller} smaller" if smaller else "take a gate with fewer weights, such as gate='linear'"
    return (
        f"this adapter cannot pay for itself: {ratio:.3g} of the dense FLOPs. Per token its layers save "
        f"{spent.saved:,.0f} FLOPs and spend {spent.gates:,.0f} on gates and {spent.branches:,.0f} on cheap branches; "
        f"{advice}, or lower the budget"
    )


def attention_sizes(config: Any) -> tuple[float, int]:
    """FLOPs of one query and one key (both products, all heads) in an attention layer, and values cached per token.

    Falcon caches the keys of one head or those of every query head, repeated; DeepSeek a latent vector.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return 2.0 * heads * (key_width + config.v_head_dim), config.kv_lora_rank + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        shared = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if shared else heads
    return 4.0 * heads * head_dim, 2 * kv_heads * head_dim


def _share(holder: Routing, config: DepthRouteConfig, budget: float | None) -> float:
    """The share that runs full when nothing was measured."""
    if budget is not None:
        return check_budget(budget)
    if config.gate != "none":
        return config.budget
    if config.dropped_experts is None:
        return 0.0
    layers = cast("list[int]", config.layers)
    return 1 - len(config.dropped_experts[layers.index(holder.layer_index)]) / holder.num_experts


def _skips_sequences(config: DepthRouteConfig) -> bool:
    """Whether a skipped attention leaves its keys and values out."""
    whole = config.granularity == "sequence" or config.gate == "none"
    return whole and config.target in ("attention", "block")


def _saves_attention(holder: Routing, config: DepthRouteConfig) -> bool:
    return _skips_sequences(config) or holder.family.queries is not None


def _routed_weights(layer: Any, holder: Routing, config: DepthRouteConfig, base: Any) -> float:
    """Weights that one token does not meet when it takes the cheap path."""
    family = holder.family
    ffn, attention = getattr(layer, family.ffn), getattr(layer, family.attention)
    if config.target == "experts":
        return _weights_per_token(getattr(ffn, family.experts), base)
    weights = 0.0 if config.target == "attention" else _weights_per_token(ffn, base)
    if config.target == "ffn" or not _saves_attention(holder, config):
        return weights
    if _skips_sequences(config):
        return weights + _weights_per_token(attention, base)
    assert family.queries is not None
    parts = STYLES[family.queries].weights(attention)
    return weights + sum(part * getattr(attention, name).weight.numel() for name, part in parts.items())


def _weights_per_token(module: nn.Module, config: Any) -> float:
    """Weights of matrices that one token meets; of fused experts `[E, out, in]`, the share that it is sent to."""
    total = 0.0
    for name, parameter in module.named_parameters():
        if name.startswith(f"{HOLDER}.") or "norm" in name:  # Cohere's norms of heads are matrices too
            continue
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            total += parameter.numel() * config.num_experts_per_tok / parameter.shape[0]
    return total
