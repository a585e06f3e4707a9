"""The target `"memory"`: what hashed n-grams hold is added before the attention.

Shapes: B batch, T positions, E width of what is looked up, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...base.families import Family
from ...base.sublayers import Kwargs, hidden_of
from ...parts.memory import NgramMemory
from ..call import Decision, RoutedCall
from ..context import ForwardContext
from ..target import Target

if TYPE_CHECKING:
    from ...routing.plan import RoutePlan
    from ...routing.routing import Routing


class MemoryTarget(Target):
    """`h <- h + alpha v` before the whole layer, which runs for every token.

    The full path is `h + v`, the cheap path `h`; `alpha` is the gate's `p`, in training and in
    inference. So the forks of `training.forks` compare forced gates, `alpha = 1` with `alpha = 0`:
    equation 3 of "Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in
    Engram-Style Conditional Memory" (FARS, Analemma;
    gitlab.com/fars-a/counterfactual-gate-supervision), where the other layers follow their gates.

    The object in `TARGETS` has looked nothing up; `of_call` gives the one that a forward pass uses.

    Args:
        retrieved: `e`, `[B, T, E]`.
        value: `v`, `[B, T, d]`.
    """

    skips = ("memory",)
    called = "memory"
    decides: ClassVar[Mapping[str, str]] = {
        "token": (
            "how much of what a table of hashed n-grams holds for it is added before the attention."
        )
    }
    norm_of = "attention"
    reads_ids = True
    fixed: ClassVar[Mapping[str, Any]] = {
        "gate": "memory",
        "branch": "none",
        "budget": 1.0,
        "budget_scope": "layer",
        "selection": "soft",
        "threshold": 0.0,
        "gate_temperature": 1.0,
        "scale_by_gate": False,
        "phases": "all",
        "causal_rule": "quantile",
    }
    decode_step = None
    finish_attends = True

    def __init__(self, retrieved: Tensor | None = None, value: Tensor | None = None) -> None:
        self._retrieved = retrieved
        self._value = value

    def of_call(
        self, routing: Routing, plan: RoutePlan, h: Tensor, context: ForwardContext, kwargs: Kwargs
    ) -> MemoryTarget:
        ngrams = context.ngrams(plan, kwargs)
        memory = cast(NgramMemory, routing.depth_route_memory[plan.adapter])
        retrieved = memory(ngrams).to(h)
        return MemoryTarget(retrieved, memory.value(retrieved))

    def norm(self, layer: nn.Module, family: Family, stream: Tensor) -> Tensor:
        return stream

    def decide(
        self, routing: Routing, plan: RoutePlan, gate_input: Tensor, token_mask: Tensor | None
    ) -> Decision:
        assert self._retrieved is not None
        retrieved = self._retrieved.expand(*gate_input.shape[:-1], -1)
        return super().decide(routing, plan, torch.cat([gate_input, retrieved], dim=-1), token_mask)

    def full(self, call: RoutedCall) -> Tensor:
        assert self._value is not None
        return call.stream + self._value

    def mixed(self, call: RoutedCall, after_full: Tensor, after_cheap: Tensor) -> Tensor:
        assert self._value is not None
        return call.stream + call.probs[..., None].to(self._value.dtype) * self._value

    def finish(self, call: RoutedCall, after: Tensor) -> Tensor:
        return hidden_of(call.layer._base_forward(after, **call.kwargs))
