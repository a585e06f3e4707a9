"""The forward pass of a routed decoder layer.

Shapes: B batch, T positions, d model width, K experts per token.

With the stream `s` before the routed part, for the FFN `s = h + attention(attention_norm(h))`:

    u    = gate(norm(s))  (or gate(s))                   score, [B, T], float32
    m    = u among the top k (training) | u >= theta (inference)
    s    = m * full(s) + (1 - m) * (s + branch(s))
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.cache import cache_of, earlier_scores, remember_scores, without_cache
from ..base.recorded import ATTENTIONS, ROUTER_LOGITS, is_recorded, kept_weights
from ..base.sublayers import Kwargs, hidden_of
from ..parts.rules import all_if_none
from ..routing.decision import decided_tokens
from ..routing.misuse import warn_of_backward
from ..routing.plan import RoutePlan
from ..routing.routing import ROUTING, Routing
from ..routing.trace import RouteRecord
from . import targets as targets  # the rows of `TARGETS`
from .call import Decision, RoutedCall, without_scores
from .context import ForwardContext, unpack
from .executors import executor_of
from .sequences import as_decided, decide_sequences, remember_sequences
from .target import Target, target_of


def routed_forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`forward` of every swapped layer: run it, under gradient checkpointing if that is on,
    and record the decision.

    What is recorded leaves `_run` as a return value, because a reentrant checkpoint runs it without
    a graph and connects only the outputs. The plan is made here, so that a recomputation after the
    end of a `record_routes` or `replay_routes` block repeats the same forward pass.
    """
    kwargs.update(zip(layer._argument_names, args))
    routing: Routing | None = layer._modules.get(ROUTING)
    context = unpack(kwargs)
    step = (context.steps or {}).get(layer)
    if step is not None and not is_recorded(ATTENTIONS, ROUTER_LOGITS):
        stepped = step(layer, hidden_states, kwargs, context)
        if stepped is not None:
            return stepped
    plan = None
    if routing is not None:
        # Without gradients it is no step of training: rollouts, references and metrics decide as
        # inference does.
        trains = layer.training and torch.is_grad_enabled()
        batch, length = hidden_states.shape[:2]
        given = context.last_tokens, context.kept, context.adapters
        plan = routing.plan(trains, (batch, length), *given)
    if routing is None or plan is None:
        outputs = _outputs(layer, None, context, hidden_states, kwargs)
        return outputs if len(outputs) > 1 else outputs[0]
    if context.unrouted is not None and layer in context.unrouted:
        plan = replace(plan, rule="full")
    weights: list[Tensor | None] = []
    if routing.family.returns_weights and kwargs.get("output_attentions"):
        with kept_weights(getattr(layer, routing.family.attention)) as weights:
            outputs = _outputs(layer, plan, context, hidden_states, kwargs)
    else:
        outputs = _outputs(layer, plan, context, hidden_states, kwargs)
    if not layer.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warn_of_backward(routing, plan.config, outputs[0], *outputs[3:4])
    if plan.recorders:
        mask, scores, probs, *extras = outputs[1:]
        named = dict(zip(plan.extras, extras))
        state = plan.temperature, plan.compared, plan.gate.static
        record = RouteRecord(mask, scores, probs, context.token_mask, plan.budget, named, *state)
        for trace in plan.recorders:
            trace[routing.layer_index] = record
    if routing.family.returns_weights:
        return outputs[0], next(iter(weights), None)
    return outputs[0]


def _outputs(
    layer: Any,
    plan: RoutePlan | None,
    context: ForwardContext,
    hidden_states: Tensor,
    kwargs: Kwargs,
) -> Any:
    """`_run`, under gradient checkpointing if that is on.

    A pass without gradients keeps its KV cache, so that a model generates in training mode, too.
    """
    if not (layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()):
        return _run(layer, plan, context, hidden_states, **kwargs)
    run = functools.partial(_run, layer, plan, context, **without_cache(kwargs))
    return layer._gradient_checkpointing_func(run, hidden_states)


def _run(
    layer: Any,
    plan: RoutePlan | None,
    context: ForwardContext,
    hidden_states: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """The layer's output `[B, T, d]`, then what a trace records, if any: see `_recorded`.

    Where nothing is routed, what the base's layer returns. A reentrant checkpoint connects no
    tensors of a tuple in a tuple.
    """
    if plan is None:
        out = layer._base_forward(hidden_states, **kwargs)
        return out if isinstance(out, tuple) else (out,)
    routing: Routing = layer._modules[ROUTING]
    plan = as_decided(plan, kwargs)
    if plan.rule == "full":  # the base's layer; what is recorded has no scores
        if context.token_ids is not None and plan.adapter in routing.depth_route_memory:
            # Later calls may look them up.
            context.ngrams(plan, kwargs)
        out = hidden_of(layer._base_forward(hidden_states, **kwargs))
        if not plan.recorders:
            return (out,)
        mask = all_if_none(context.token_mask, hidden_states[..., 0])
        return _recorded(out, plan, without_scores(routing, plan, hidden_states, mask))
    cache = None
    if plan.rule == "running":
        cache = cache_of(kwargs)
    if cache is not None:  # before the attention adds these positions to it
        plan = replace(plan, earlier=earlier_scores(cache, plan.layer_index, len(hidden_states)))
    call = routed_call(layer, plan, hidden_states, context, kwargs)
    out = executor_of(call).run(call)
    if plan.config.granularity == "sequence":
        remember_sequences(call, skips_attention=False)
    if cache is not None:
        remember_scores(cache, plan.layer_index, scores_so_far(call))
    if not plan.recorders:
        return (out,)
    assert call.decision is not None
    return _recorded(out, plan, call.decision)


def scores_so_far(call: RoutedCall) -> Tensor:
    """The scores of each sequence's tokens up to the last of this call, `[B, P + T]`,
    NaN where they did not decide."""
    assert call.decision is not None
    scores = call.decision.scores.detach()
    earlier = call.plan.earlier
    decided = decided_tokens(call.plan, call.token_mask)
    if decided is not None:
        scores = scores.masked_fill(~decided, torch.nan)
    if earlier is None:
        return scores
    return torch.cat([earlier.to(scores.device), scores], dim=1)


def _recorded(out: Tensor, plan: RoutePlan, made: Decision) -> tuple[Tensor, ...]:
    """The layer's output and the decision, as a checkpoint hands them on."""
    assert made.mask is not None and made.probs is not None
    return out, made.mask, made.scores, made.probs, *(made.extras[name] for name in plan.extras)


def routed_call(
    layer: Any,
    plan: RoutePlan,
    hidden_states: Tensor,
    context: ForwardContext,
    kwargs: Kwargs,
    decides: bool = True,
) -> RoutedCall:
    """The call of the routed part of `layer`, which holds adapter state, on its input
    `[B, T, d]`: the stream before it and, if the gate `decides`, the decision."""
    routing: Routing = layer._modules[ROUTING]
    ngrams = None
    # First: the attention writes the KV cache that they are read over.
    if plan.config.branch == "memory":
        ngrams = context.ngrams(plan, kwargs)
    target = target_of(plan).of_call(routing, plan, hidden_states, context, kwargs)
    stream = target.enter(layer, routing.family, hidden_states, kwargs)
    call = call_on_stream(layer, plan, target, stream, context.token_mask, kwargs, decides)
    if ngrams is None:
        return call
    return replace(call, ngrams=ngrams)


def call_on_stream(
    layer: Any,
    plan: RoutePlan,
    target: Target,
    stream: Tensor,
    token_mask: Tensor | None,
    kwargs: Kwargs,
    decides: bool = True,
    normed: Tensor | None = None,
) -> RoutedCall:
    """As `routed_call`, from the stream before the routed part, and its norm if known."""
    routing: Routing = layer._modules[ROUTING]
    reads_stream = plan.config.gate_input == "residual"
    # A gathered FFN needs the norm of the rows that it runs on, and of no others, unless a gate
    # reads it.
    if normed is None and (plan.training or not (reads_stream or plan.gate.static)):
        normed = target.norm(layer, routing.family, stream)
    decision = None
    if decides:
        if reads_stream or normed is None:
            gate_input = stream
        else:
            gate_input = normed
        if plan.config.granularity == "sequence":
            decision = decide_sequences(layer, plan, gate_input, token_mask, kwargs)
        else:
            decision = target.decide(routing, plan, gate_input, token_mask)
    return RoutedCall(layer, routing, plan, target, stream, normed, token_mask, kwargs, decision)
