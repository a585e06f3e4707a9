"""The ways to run the routed part of a layer, one row per executor.

`"auto"` takes the first row that supports a call. A row is chosen by its name in
`RunSettings.executor`, or by `tune_execution`; a call that it does not support runs as `"auto"`
says. Adding an executor is one class and one row, from this package or from another one; after
`"masked"`, which supports every call, it is only taken by name.

Where one token per sequence is decoded on a CPU, `prepare` of the same row may make a step that
stands in for `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ..base.contexts import is_exporting
from ..base.readable import any_drops
from ..base.sublayers import hidden_of
from ..routing.plan import RoutePlan
from ..routing.routing import ROUTING, Routing
from .call import Executor, RoutedCall
from .context import Step
from .costs import prefers_gathering
from .decode import DecodeStep, SequenceStep, run_base, supports_decode
from .sequences import skip_sequences, skips_sequences
from .step_weights import StepWeights
from .target import target_of


class Sequences(Executor):
    """Whole sequences are left out of the batch: those that skip their attention write no
    keys and values."""

    def supports(self, call: RoutedCall) -> bool:
        return skips_sequences(call)

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(skip_sequences(call))


class Full(Executor):
    """No token is skipped, and the host knows it. Bit for bit what the base computes.

    Chosen by its name, it turns the layer's routing off: the gate does not run either.
    """

    def supports(self, call: RoutedCall) -> bool:
        return call.plan.everything and not call.plan.target.per_pair

    def run(self, call: RoutedCall) -> Tensor:
        # Nothing has run yet, and three terms are to be added in the base's own order.
        if call.family.parallel:
            return hidden_of(call.layer._base_forward(call.stream, **call.kwargs))
        return call.finish(call.full())


class Rows(Executor):
    """Row operators, whose shapes do not depend on the mask: on CUDA, under a compiler,
    and where it is asked for.

    On CUDA, eager, `"auto"` takes them where few rows run, and gathers many
    (`costs.prefers_gathering`).

    An exported program has none of them: it is to run where this library is not installed.
    """

    def supports(self, call: RoutedCall) -> bool:
        if is_exporting() or call.plan.executor not in ("auto", "rows"):
            return False
        if call.plan.executor == "auto":
            asked = call.stream.is_cuda or torch.compiler.is_compiling()
            if not asked or prefers_gathering(call):
                return False
        return (
            not call.needs_both_paths
            and not skips_sequences(call)
            and call.target.supports_rows(call)
        )

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(call.target.by_rows(call))


class Gathered(Executor):
    """The chosen rows are gathered and run, and no others."""

    def supports(self, call: RoutedCall) -> bool:
        if call.needs_both_paths or torch.compiler.is_compiling() or call.target.hides(call):
            return False
        return not skips_sequences(call)

    def run(self, call: RoutedCall) -> Tensor:
        if call.plan.target.skips_attention and call.plan.mix == "hard" and bool(call.mask.all()):
            return EXECUTORS["full"].run(call)
        return call.finish(call.target.gathered(call))

    def prepare(self, layer: nn.Module, plan: RoutePlan, batch: int) -> DecodeStep | None:
        """The step of the plan's target, with the adapter's weights as they are."""
        routing = cast(Routing, layer._modules[ROUTING])
        kind = target_of(plan).decode_step
        if kind is None or not supports_decode(plan, routing.family):
            return None
        if any_drops(layer, routing.family.dropouts):
            return None  # a step leaves them out
        remembers = plan.adapter in routing.depth_route_memory
        # A static layer without attention writes no keys and values, as a sequence without.
        static = plan.target.skips_attention and plan.rule == "static"
        if static or plan.config.granularity == "sequence":
            kind = SequenceStep
        if batch > kind.most_rows or (kind is SequenceStep and remembers):
            return None
        key = "weights", plan.adapter, plan.rule, kind.scores
        weights: StepWeights | None = routing.derived.get(key)
        if weights is None or weights.prompts != routing.prompts or not weights.usable():
            weights = routing.derived[key] = StepWeights(routing, plan, kind.scores)
        if not weights.usable():
            return None
        step: DecodeStep | None = routing.derived.get(plan)
        if step is None or step.weights is not weights or type(step) is not kind:
            step = routing.derived[plan] = kind(routing, plan, weights)
        return step


class Masked(Executor):
    """Both paths of every token: what training needs, and what runs anywhere."""

    def supports(self, call: RoutedCall) -> bool:
        return True

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(call.target.masked(call))


EXECUTORS: dict[str, Executor] = {
    "sequences": Sequences(),
    "full": Full(),
    "rows": Rows(),
    "gathered": Gathered(),
    "masked": Masked(),
}


def executor_of(call: RoutedCall) -> Executor:
    """The row that the call's plan names, or else the first row that supports the call.

    Raises:
        ValueError: There is no such row.
    """
    name = call.plan.executor
    if name != "auto":
        check_executor(name)
        if EXECUTORS[name].supports(call):
            return EXECUTORS[name]
    for executor in EXECUTORS.values():
        if executor.supports(call):
            return executor
    raise ValueError(f"no executor supports a layer of {type(call.layer).__name__}")


def check_executor(name: str) -> None:
    """Raise `ValueError` for a name that is neither `"auto"` nor in the table."""
    if name != "auto" and name not in EXECUTORS:
        raise ValueError(f"executor={name!r} must be one of: {', '.join(('auto', *EXECUTORS))}")


def decode_steps(
    layers: Iterable[nn.Module], batch: int, adapters: Mapping[int, str] | None = None
) -> dict[nn.Module, Step]:
    """The steps of one new token of each of `batch` sequences, of the layers that have one: of the
    row that a plan names, or of the first with one. `adapters` are those of the routed layers, by
    default those that are active now.

    Raises:
        ValueError: There is no such row.
    """
    steps: dict[nn.Module, Step] = {}
    for layer in layers:
        routing = cast("Routing | None", layer._modules.get(ROUTING))
        step: Step | None = run_base
        if routing is not None:
            step = _step_of(layer, routing, batch, adapters)
        if step is not None:
            steps[layer] = step
    return steps


def _step_of(
    layer: nn.Module, routing: Routing, batch: int, adapters: Mapping[int, str] | None
) -> Step | None:
    """None if the general forward pass has to run."""
    plan = routing.plan(False, (batch, 1), adapters=adapters)
    if plan is None:
        return run_base
    if plan.recorders:
        return None
    if plan.rule == "full":
        # The KV cache has to learn of the token, or knows what was decided about its sequence.
        remembers = plan.adapter in routing.depth_route_memory
        if remembers or plan.config.granularity == "sequence":
            return None
        return run_base
    if plan.replayed is not None:
        return None
    check_executor(plan.executor)
    names = tuple(EXECUTORS) if plan.executor == "auto" else (plan.executor,)
    made = (EXECUTORS[name].prepare(layer, plan, batch) for name in names)
    return next((step for step in made if step is not None), None)
