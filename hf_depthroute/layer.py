"""The forward pass of a routed decoder layer.

Shapes: B batch, T positions, d model width, K experts per token.

With the stream `s` in front of the routed part, for the FFN `s = h + attention(attention_norm(h))`:

    u    = gate(norm(s))  (or gate(s))                   score, [B, T], float32
    m    = u among the top k (training) | u >= theta (inference)
    s    = m * full(s) + (1 - m) * (s + branch(s))
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import sites
from .cache import without_cache
from .decision import RoutePlan
from .execution import masked_update, routed_pairs
from .holder import HOLDER, Routing, Step
from .misuse import warn_of_backward
from .sequences import decide_sequences, skip_sequences
from .sites import SITES
from .sublayers import ffn_map, hidden_of
from .trace import RouteRecord

TOKEN_MASK = "depth_route_token_mask"  # keyword that carries the 2D attention mask to the layers
DECODE_STEPS = "depth_route_decode_steps"  # keyword that carries the layers' `DecodeStep`s, by layer


def routed_forward(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`forward` of every swapped layer: run it, under gradient checkpointing if that is on, and record the decision.

    What is recorded leaves `_run` as a return value, because a reentrant checkpoint runs it without a graph and
    connects only the outputs. The plan is made here, so that a recomputation after the end of a `record_routes` or
    `replay_routes` block repeats the same forward pass.
    """
    kwargs.update(zip(layer._argument_names, args))
    holder: Routing | None = layer._modules.get(HOLDER)
    steps: dict[Any, Step] | None = kwargs.pop(DECODE_STEPS, None)
    if steps is not None and layer in steps:
        kwargs.pop(TOKEN_MASK, None)  # every token is real
        return steps[layer](layer, hidden_states, kwargs)
    if holder is not None and holder.family.returns_weights and kwargs.get("output_attentions"):
        raise ValueError(f"{type(layer).__name__}: a routed layer of this family has no attention weights to return")
    plan = None if holder is None else holder.plan(layer.training, (hidden_states.shape[0], hidden_states.shape[1]))
    token_mask = kwargs.get(TOKEN_MASK)
    if layer.gradient_checkpointing and layer.training:
        kwargs = without_cache(kwargs)
        outputs = layer._gradient_checkpointing_func(functools.partial(_run, layer, plan, **kwargs), hidden_states)
    else:
        outputs = _run(layer, plan, hidden_states, **kwargs)
    if holder is None or plan is None:
        return outputs[0]
    if not layer.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warn_of_backward(holder, outputs[0], *outputs[3:4])
    if plan.recorders:
        _record(holder, plan, outputs[1:], token_mask)
    return (outputs[0], None) if holder.family.returns_weights else outputs[0]


def _run(layer: Any, plan: RoutePlan | None, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The layer's output `[B, T, d]`, then mask, scores, probs and the plan's extras when a trace is recorded."""
    token_mask = kwargs.pop(TOKEN_MASK, None)
    if plan is None:
        return (layer._base_forward(hidden_states, **kwargs),)
    if plan.rule == "full":
        return _run_full(layer, plan, hidden_states, token_mask, kwargs)
    holder: Routing = layer._modules[HOLDER]
    if plan.config.target == "experts":
        return _run_experts(layer, holder, plan, hidden_states, token_mask, kwargs)
    site = SITES[plan.config.target]
    stream = site.enter(layer, holder, hidden_states, kwargs)
    by_rows = _by_rows(layer, holder, plan, stream, kwargs)
    dense = _dense(layer, plan) and not by_rows
    reads_stream = plan.config.gate_input == "residual"
    # Otherwise known for every token; a gathered FFN needs the norm of the rows that it runs on, and of no others.
    gathers = plan.config.target == "ffn" and reads_stream and not (dense or by_rows or plan.everything)
    normed = stream if gathers else site.norm(layer, holder, stream)
    gate_input = stream if reads_stream else normed
    if plan.config.granularity == "sequence":
        skips = plan.config.target != "ffn" and not _dense(layer, plan)
        decided = decide_sequences(layer, holder, plan, gate_input, token_mask, kwargs, skips)
        mask, scores, probs, extras = decided
    else:
        extras = holder.score(plan, gate_input)
        scores = extras.pop("scores")
        mask, probs = holder.decide(plan, scores, token_mask, extras.get("predicted"))
    branch = holder.depth_route_branch._modules.get(plan.adapter)

    after: torch.Tensor | None
    if dense:
        after_full, after_cheap = both_paths(layer, holder, plan, stream, normed, probs, kwargs)
        if plan.mix != "each":
            after = masked_update(stream, after_full, after_cheap, mask, probs, plan.mix)
        elif plan.rule == "soft":  # TSA: the sublayers are scaled already
            after = after_full + (1 - probs[..., None].to(stream.dtype)) * (after_cheap - stream)
        else:
            after = torch.where(mask[..., None], after_full, after_cheap)
        extras |= _outcomes(holder, plan, stream, after_full, after_cheap)
    else:
        scale = probs if plan.mix in ("scaled", "each") else None
        by_sequence = plan.config.granularity == "sequence" or plan.rule == "static"
        if by_sequence and plan.config.target != "ffn" and not _dense(layer, plan):
            after = skip_sequences(layer, holder, plan, stream, normed, mask[:, 0], scale, branch, kwargs)
        elif plan.everything or (plan.config.target != "ffn" and not by_rows and scale is None and bool(mask.all())):
            # Bit for bit what the base computes.
            after = None if holder.family.parallel else site.full(layer, holder, stream, normed, kwargs)
        elif by_rows:
            after = site.by_rows(layer, holder, stream, normed, mask, branch, scale, kwargs, plan.mix == "each")
        else:
            x = None if gathers else normed
            after = site.sparse(layer, holder, stream, x, mask, branch, scale, kwargs, plan.mix == "each")
    if after is None:  # nothing has run yet, and three terms are to be added in the base's own order
        out = hidden_of(layer._base_forward(hidden_states, **kwargs))
    else:
        out = site.finish(layer, holder, after, stream, kwargs)
    if not plan.recorders:
        return (out,)
    return out, mask, scores, probs, *(extras[name] for name in plan.extras)


def _run_full(
    layer: Any, plan: RoutePlan, hidden_states: torch.Tensor, token_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The base's layer; what is recorded has no scores."""
    out = hidden_of(layer._base_forward(hidden_states, **kwargs))
    if not plan.recorders:
        return (out,)
    mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool) if token_mask is None else token_mask
    nothing = torch.full_like(mask, torch.nan, dtype=torch.float32)
    return (out, mask, *[nothing for _ in range(2 + len(plan.extras))])


def _dense(layer: Any, plan: RoutePlan) -> bool:
    """Whether both paths run for every token: in training, where they are mixed, and where a compiler looks.

    Row ops (`_by_rows`) skip under a compiler too.
    """
    return layer.training or plan.rule == "soft" or plan.executor == "masked" or torch.compiler.is_compiling()


def _by_rows(layer: Any, holder: Routing, plan: RoutePlan, stream: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether row ops run the routed part: on CUDA, where a compiler looks, and where they are asked for."""
    if layer.training or plan.rule == "soft" or plan.executor in ("masked", "gathered"):
        return False
    if not (stream.is_cuda or plan.executor == "rows" or torch.compiler.is_compiling()):
        return False
    return SITES[plan.config.target].supports_rows(layer, holder, stream, kwargs)


def both_paths(
    layer: Any,
    holder: Routing,
    plan: RoutePlan,
    stream: torch.Tensor,
    normed: torch.Tensor,
    probs: torch.Tensor,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream after the full and after the cheap path, for every token, each `[B, T, d]`."""
    site = SITES[plan.config.target]
    branch: Any = holder.depth_route_branch._modules.get(plan.adapter)
    if plan.mix == "each":
        after_full = sites.BlockSite().scaled(layer, holder, stream, normed, probs, kwargs)
    else:
        after_full = site.full(layer, holder, stream, normed, kwargs)
    return after_full, stream if branch is None else stream + branch(stream)


def _outcomes(
    holder: Routing, plan: RoutePlan, stream: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What losses want to know of the two paths."""
    found = {}
    if "z_full" in plan.extras:
        project = holder._projections[plan.adapter][0]
        found = {"z_full": project(after_full), "z_cheap": project(after_cheap)}
    if "similarity" in plan.extras:
        with torch.no_grad():
            found["similarity"] = torch.cosine_similarity(stream.float(), after_full.float(), dim=-1)
    return found


def _run_experts(
    layer: Any,
    holder: Routing,
    plan: RoutePlan,
    hidden_states: torch.Tensor,
    token_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """Target experts: one decision per (token, expert) pair that the block's own router chose.

    A dropped pair contributes its weight times the cheap branch.
    """
    site = SITES["ffn"]
    assert not holder.family.parallel
    a = site.enter(layer, holder, hidden_states, kwargs)
    normed = site.norm(layer, holder, a)
    extras = holder.score(plan, a if plan.config.gate_input == "residual" else normed)
    all_scores = extras.pop("scores")  # [B, T], or [B, T, E]
    made: list[torch.Tensor] = []

    def decide(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [N, K]
        index_BTK = index.view(*a.shape[:2], -1)
        if all_scores.ndim == 3:
            scores = all_scores.gather(-1, index_BTK)
        else:
            scores = all_scores[..., None].expand_as(index_BTK)
        mask, probs = holder.decide(plan, scores, token_mask, None, index_BTK)
        made[:] = [mask, scores, probs]
        factor = probs if plan.mix == "soft" else mask + (probs - probs.detach())  # straight-through
        return mask.view_as(index), factor.view_as(index)

    compact = not _dense(layer, plan)
    with routed_pairs(holder.experts_of(layer), decide, compact) as seen:
        out = a + ffn_map(layer, holder.family)(normed)
    branch: Any = holder.depth_route_branch._modules.get(plan.adapter)
    pairs = seen[0]
    if branch is not None:
        dropped = (pairs.weights * (1 - pairs.factor.to(pairs.weights.dtype))).sum(-1).view(*a.shape[:2], 1)
        if compact:
            some = dropped.squeeze(-1) != 0
            out[some] += dropped[some].to(out.dtype) * branch(a[some])
        else:
            out = out + dropped.to(out.dtype) * branch(a)
    if not plan.recorders:
        return (out,)
    extras["expert_index"] = pairs.index.view(*a.shape[:2], -1)
    return out, *made, *(extras[name] for name in plan.extras)


def _record(
    holder: Routing, plan: RoutePlan, values: tuple[torch.Tensor, ...], token_mask: torch.Tensor | None
) -> None:
    mask, scores, probs, *extras = values
    named = dict(zip(plan.extras, extras))
    record = RouteRecord(mask, scores, probs, token_mask, plan.budget, named, plan.temperature, plan.compared)
    for trace in plan.recorders:
        trace[holder.layer_index] = record
