"""The forward pass of a routed decoder layer.

Shapes: B batch, T positions, d model width.

A routed layer computes, with `a = h + attention(attention_norm(h))`:

    u    = gate(ffn_norm(a))  (or gate(a))               score, [B, T], float32
    m    = u among the top k (training) | u >= theta (inference)
    out  = m * (a + ffn(ffn_norm(a))) + (1 - m) * (a + branch(a))
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .execution import CPU_SLICE, Path, gathered_update, masked_update
from .holder import HOLDER, RoutePlan, Routing
from .trace import RouteRecord

TOKEN_MASK = "depth_route_token_mask"  # keyword that carries the 2D attention mask to the layers


def routed_forward(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`forward` of every swapped layer: run it, under gradient checkpointing if that is on, and record the decision.

    What is recorded leaves `_run` as a return value, because a reentrant checkpoint runs it without a graph and
    connects only the outputs. The plan is made here, so that a recomputation after the end of a `record_routes` or
    `replay_routes` block repeats the same forward pass.
    """
    kwargs.update(zip(layer._argument_names, args))
    holder: Routing | None = layer._modules.get(HOLDER)
    plan = None if holder is None else holder.plan(layer.training)
    token_mask = kwargs.get(TOKEN_MASK)
    if layer.gradient_checkpointing and layer.training:
        kwargs = without_cache(kwargs)
        outputs = layer._gradient_checkpointing_func(functools.partial(_run, layer, plan, **kwargs), hidden_states)
    else:
        outputs = _run(layer, plan, hidden_states, **kwargs)
    if holder is not None and plan is not None and plan.recorders:
        _record(holder, plan, outputs[1:], token_mask)
    return outputs[0]


def _run(layer: Any, plan: RoutePlan | None, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The layer's output `[B, T, d]`, then mask, scores, probs and the gate's extras when a trace is recorded."""
    token_mask = kwargs.pop(TOKEN_MASK, None)
    if plan is None:
        return (layer._base_forward(hidden_states, **kwargs),)
    holder: Routing = layer._modules[HOLDER]
    name = plan.adapter
    a = attended(layer, holder, hidden_states, **kwargs)
    x, full = full_path(layer, holder, plan, a)
    gate, branch = holder.depth_route_gate[name], holder.depth_route_branch._modules.get(name)
    gate_out = gate(x)
    scores = gate_out.pop("scores")
    probs = torch.sigmoid(scores / plan.temperature)
    mask = holder.decide(plan, scores, token_mask)

    if layer.training or torch.compiler.is_compiling():
        soft = layer.training and plan.rule == "soft"
        out, after_full, after_cheap = masked_update(a, x, mask, probs, full, branch, soft)
        if plan.recorders and name in holder._projections:
            project = holder._projections[name][0]
            gate_out |= {"z_full": project(after_full), "z_cheap": project(after_cheap)}
    else:
        out = gathered_update(a, x, mask, full, branch, slice_rows(holder, a))
    if not plan.recorders:
        return (out,)
    return out, mask, scores, probs, *gate_out.values()


def attended(layer: Any, holder: Routing, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`a = h + attention(attention_norm(h))`, `[B, T, d]`."""
    normed = getattr(layer, holder.family.attention_norm)(hidden_states)
    return hidden_states + getattr(layer, holder.family.attention)(normed, **kwargs)[0]


def full_path(layer: Any, holder: Routing, plan: RoutePlan, a: torch.Tensor) -> tuple[torch.Tensor, Path]:
    """What the gate and the full path read, `[B, T, d]`, and the full path's update as a function of it."""
    ffn, ffn_norm = getattr(layer, holder.family.ffn), getattr(layer, holder.family.ffn_norm)
    if plan.config.gate_input == "normed":
        return ffn_norm(a), ffn  # the gate and the FFN share the normed stream
    return a, lambda rows: ffn(ffn_norm(rows))


def slice_rows(holder: Routing, a: torch.Tensor) -> int | None:
    """Rows that gathered execution runs at one time; None for all of them."""
    return CPU_SLICE if holder.dense_ffn and a.device.type == "cpu" else None


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A layer's keyword arguments for a run that neither reads nor writes the KV cache."""
    return {
        **kwargs,
        "use_cache": False,
        **{name: None for name in ("past_key_values", "layer_past") if name in kwargs},
    }


def _record(
    holder: Routing, plan: RoutePlan, values: tuple[torch.Tensor, ...], token_mask: torch.Tensor | None
) -> None:
    mask, scores, probs, *extras = values
    gate: Any = holder.depth_route_gate[plan.adapter]
    names = (*gate.outputs, "z_full", "z_cheap")
    record = RouteRecord(mask, scores, probs, token_mask, plan.budget, dict(zip(names, extras)), plan.temperature)
    for trace in plan.recorders:
        trace[holder.layer_index] = record
