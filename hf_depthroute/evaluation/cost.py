"""Counted cost of a routed model: dense, routed and ideal FLOPs, parameters,
and bytes of the KV cache.

Two accountings. FLOPs are whole-model, two per weight and token plus attention. `ffn_ratio` is that
of "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228): units of one full FFN (or whatever is routed) on one token at one routed layer,
weights only, `rho + (1 - rho) * branch / FFN + gate / FFN`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..base.families import text_config
from ..base.stack import stack_of
from ..base.weights import weight_shapes
from ..config.adapter import check_budget
from ..inference.calibration import active_routings
from ..parts.gates import GATES
from ..routing.routing import ROUTING, Routing
from . import flops


@dataclass(frozen=True)
class RouteCost:
    """Cost of one forward pass.

    Attributes:
        flops_dense: The base model.
        flops_routed: With routers and cheap branches, at the given share of full tokens.
        flops_ideal: The same share, with routers and branches that cost nothing.
        ffn_ratio: Mean over routed layers of the cost of the routed part, in FFNs as above; 1 is
            the dense part. With target memory, which skips nothing, the unit is its `W_V`.
        parameters_base: The number of the base model's parameters.
        parameters_adapter: The adapter's, the frozen projection included.
        parameters_trainable: The part of the adapter that trains.
        kv_bytes: KV cache after the pass, all layers; those with a sliding window hold what the
            next token still meets. Only whole sequences whose attention is skipped leave it
            smaller.
        remark: One line where the adapter cannot pay for itself: why not, and what to make smaller;
            None if it can.
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
        length: New tokens per sequence: the prompt in prefill, 1 in decode, which
            `phases="prefill"` leaves dense.
        cached: Tokens per sequence already in the KV cache.
        budget: Share of tokens that run full; default: the adapter's budget, and 0 where there is
            no gate, or one that spares attention sinks alone. In static layers it is 0 in any case.
        full_ratio: Measured shares per layer, as from `RouteTrace.full_ratio`; overrides `budget`.
        logits_to_keep: Positions per sequence that go through the LM head.

    Raises:
        ValueError: No routed adapter is active.
        ConfigError: `budget` is out of range.
    """
    routings = active_routings(model)
    stack = stack_of(model)
    config = text_config(model.config)
    if full_ratio is None:
        full_ratio = {h.layer_index: _share_at(h, budget, length) for h in routings}
    count = functools.partial(
        flops.count_flops, model, batch=batch_size, length=length, cached=cached
    )
    dense = sum(count(logits=logits_to_keep).values())
    counted = count(logits=logits_to_keep, shares=full_ratio)
    total = sum(counted.values())
    ideal = total - counted["router"]

    adapter = {id(p): p for h in routings for p in h.parameters()}
    # The first is the embeddings'.
    dtype_bytes = next(p.element_size() for p in model.parameters() if id(p) not in adapter)
    per_token = float(batch_size * flops.attention_sizes(config)[1] * dtype_bytes)
    windows = flops.windows_of(config, cached + length + 1)  # of the next token, which meets itself
    kv_bytes = per_token * sum(window - 1 for window in windows)
    ratios = []
    gates = branches = 0.0
    for routing in routings:
        if flops.runs_full(routing, length):
            ratios.append(1.0)
            continue
        share = full_ratio[routing.layer_index]
        met = flops.matrices(stack.layers[routing.layer_index], config, stack.family, routing)
        part = sum(m.left_out * m.per_token for m in met) + flops.memory_weights(routing)
        gate = flops.gate_weights(routing, length)
        branch = flops.branch_share(routing, config, share, length)
        branch *= flops.branch_weights(routing, config)
        ratios.append(share + (branch + gate) / max(part, 1.0))
        gates += 2.0 * gate
        branches += 2.0 * branch
        if flops.skips_sequences(routing, config):
            kv_bytes -= (1 - share) * per_token * (windows[routing.layer_index] - 1)
    saved = (dense - ideal) / (batch_size * length)
    return RouteCost(
        flops_dense=dense,
        flops_routed=total,
        flops_ideal=ideal,
        ffn_ratio=sum(ratios) / len(ratios),
        parameters_base=sum(
            math.prod(shape) for name, shape in weight_shapes(model) if f".{ROUTING}." not in name
        ),
        parameters_adapter=sum(p.numel() for p in adapter.values()),
        parameters_trainable=sum(p.numel() for p in adapter.values() if p.requires_grad),
        kv_bytes=round(kv_bytes),
        remark=_remark(routings[0], saved, gates, branches, total / dense),
    )


def cost_remark(model: nn.Module) -> str | None:
    """`RouteCost.remark` at the adapter's own budget, in prefill; None if nothing is routed."""
    routings = [part for part in model.modules() if isinstance(part, Routing)]
    if not any(routing.adapter() is not None for routing in routings):
        return None
    return route_cost(model).remark


def _remark(
    routing: Routing, saved: float, gates: float, branches: float, ratio: float
) -> str | None:
    """Why an adapter costs more than it saves, from FLOPs of one token over all layers."""
    if saved == 0 or saved > gates + branches:
        return None
    config = routing.active_config()
    names: Sequence[str] = ("branch_rank",)
    if gates >= branches:
        names = GATES[config.gate].sizes
    elif config.branch == "memory":
        names = ("branch_rank", "memory_width")
    smaller = ", ".join(f"{name} (now {getattr(config, name)})" for name in names)
    advice = "take a gate with fewer weights, such as gate='linear'"
    if smaller:
        advice = f"make {smaller} smaller"
    return (
        f"this adapter cannot pay for itself: {ratio:.3g} of the dense FLOPs. Per token its layers "
        f"save {saved:,.0f} FLOPs and spend {gates:,.0f} on gates and {branches:,.0f} on cheap "
        f"branches; {advice}, or lower the budget"
    )


def _share_at(routing: Routing, budget: float | None, length: int) -> float:
    """The share of a layer's tokens that runs full, where nothing was measured."""
    config = routing.active_config()
    index = routing.layer_index
    share = 0.0  # of the decisions
    if budget is not None:
        if config.gate_of(index) == config.gate:
            share = check_budget(budget)
    elif routing.active_gate().follows_budget():
        share = routing.budget()
    elif config.dropped_experts is not None:
        share = 1 - len(config.experts_dropped_in(index)) / routing.num_experts
    always = flops.share_in_full(routing, length)
    return always + (1 - always) * share
