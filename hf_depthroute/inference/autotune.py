"""Measured choice of executor: per routed layer and input shape, the fastest one,
and never slower than the base.

Skipping pays where the skipped arithmetic or memory traffic costs more than the gate and the
indexing. In the decoding of a large batch on a GPU it does not: some token of the batch needs the
FFN's weights anyway. What a machine does at a shape is measured on the model itself rather than
predicted.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..base.contexts import hooked, of_this_thread, synchronise
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, stream_given
from ..data.batches import device_of
from ..execution.call import RoutedCall
from ..execution.costs import GatherCosts, chosen_flops, gather_costs_of
from ..execution.executors import EXECUTORS, check_executor
from ..execution.target import target_of
from ..parts.gates import GATES
from ..routing.plan import shape_class
from ..routing.routing import ROUTING, Routing
from ..routing.stack import in_turn, state_of
from .calibration import active_routings, gated_routings
from .restoring import restored_on_error


@dataclass(frozen=True)
class Choice:
    """The result of `tune_execution` for one layer and one kind of step.

    Attributes:
        layer: Index of the decoder layer.
        step: `"prefill"` or `"decode"`.
        shape: `(B, T)` of the step.
        executor: The chosen one.
        milliseconds: Time of the whole decoder layer by executor, the mean over its steps, the
            median over repeats; `"full"` is the base's layer.
    """

    layer: int
    step: str
    shape: tuple[int, int]
    executor: str
    milliseconds: dict[str, float]


@in_turn
@torch.no_grad()
def tune_execution(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    steps: int = 8,
    repeats: int = 5,
    floor: float = 0.99,
    keep_decisions: bool = False,
    executors: Sequence[str] | None = None,
) -> list[Choice]:
    """Time every layer that has a gate under every executor on these prompts,
    and use the fastest from now on.

    A layer for which no executor reaches `floor` of the base's speed runs as the base does at that
    shape: every token full, no gate. That changes the output, towards the base's, and makes it
    depend on the batch size; `keep_decisions` forbids it. Prompts should be as many and as long as
    those to come. The choice holds for inputs of about the same number of rows (to the next power
    of two), prefill and decode apart; other shapes run as before. It is not saved. Where FFNs can
    be run by gathered rows and by row kernels, on GPUs, it also measures from how much work on
    gathering is the faster way, for prompts of other sizes (`execution.costs.GatherCosts`).

        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        tune_execution(model, batch.input_ids.to(model.device))

    Args:
        model: A model with an active, calibrated adapter.
        input_ids: Prompts, `[B, T]`.
        attention_mask: `[B, T]`.
        steps: Decoding steps to time; 0 leaves decoding as it is.
        repeats: Times that each executor runs prefill and decode, in turn; the median repeat
            counts.
        floor: Least speed over the base's, per layer.
        keep_decisions: Never turn routing off.
        executors: What to choose from, names in `EXECUTORS`. Default: those that support these
            prompts.

    Returns:
        One `Choice` per layer and kind of step.

    Raises:
        ValueError: No routed adapter is active; decisions are about sequences or exits, which have
            to hold through a generation; the target is memory; `floor` is not in (0, 1]; or there
            is no such executor.
    """
    config = active_routings(model)[0].active_config()
    gate = GATES[config.gate]
    if config.granularity == "sequence" or gate.exits or gate.static:
        about = "decisions of whole sequences and of early exit hold through a generation"
        raise ValueError(f"tune_execution: {about} and cannot depend on the shape")
    if gate.soft:
        raise ValueError(
            f"tune_execution: target={config.target!r} skips nothing, so there is nothing to choose"
        )
    if not 0 < floor <= 1:
        raise ValueError(f"tune_execution: floor must be in (0, 1], not {floor}")
    for name in executors or ():
        check_executor(name)
    with restored_on_error(model):
        model.eval()
        for routing in active_routings(model):
            routing.forget_tuned(routing.active_name())
        return _choices(
            model, input_ids, attention_mask, steps, repeats, floor, keep_decisions, executors
        )


def _choices(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    steps: int,
    repeats: int,
    floor: float,
    keep_decisions: bool,
    executors: Sequence[str] | None,
) -> list[Choice]:
    """Time and choose, and leave the choices with the layers."""
    routings = gated_routings(model)
    every_layer = stack_of(model).layers
    layers = [every_layer[routing.layer_index] for routing in routings]
    if executors is None:
        executors = _supported(model, layers, input_ids, attention_mask)
    times: dict[tuple[str, int, str], list[float]] = {}
    for round_ in range(repeats + 1):  # the first one warms up
        for executor in ("full", *executors):
            spent: dict[tuple[str, int], list[float]] = {}
            with state_of(model).override(executor=executor):
                for step, layer, seconds in _timed(model, layers, input_ids, attention_mask, steps):
                    spent.setdefault((step, layer), []).append(seconds)
            for key, each in spent.items() if round_ else ():
                # Steps that skip and steps that do not take two different times: what counts is
                # their mean.
                times.setdefault((*key, executor), []).append(statistics.fmean(each))
    rows, length = input_ids.shape
    shapes = {"prefill": (rows, length)} | ({"decode": (rows, 1)} if steps else {})
    choices = []
    for routing in routings:
        for step, shape in shapes.items():
            found = {
                x: statistics.median(times[step, routing.layer_index, x]) * 1e3
                for x in ("full", *executors)
            }
            best = min(executors, key=found.__getitem__)
            if not keep_decisions and found[best] > found["full"] / floor:
                best = "full"
            routing.tuned[routing.active_name(), *shape_class(*shape)] = best
            choices.append(Choice(routing.layer_index, step, shape, best, found))
    if {"rows", "gathered"} <= set(executors) and not routings[0].active_target().skips_attention:
        costs = _gather_costs(model, layers, input_ids, attention_mask, repeats)
        routings[0].state.gather_costs = costs
    return choices


def _gather_costs(
    model: nn.Module,
    layers: Sequence[nn.Module],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    repeats: int,
) -> GatherCosts | None:
    """The cost model, from the whole prompts and their last eighth; None without a difference."""
    points = []
    for length in (-(-input_ids.shape[1] // 8), input_ids.shape[1]):
        ids = input_ids[:, -length:]
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, -length:]
        gained = []
        for _ in range(repeats + 1):  # the first one warms up
            spent = {}
            for executor in ("rows", "gathered"):
                with state_of(model).override(executor=executor):
                    times = _timed(model, layers, ids, mask, 0)
                    spent[executor] = sum(seconds for _, _, seconds in times)
            gained.append((spent["rows"] - spent["gathered"]) / len(layers))
        routings = gated_routings(model)
        flops = [chosen_flops(routing, ids.shape, routing.budget()) for routing in routings]
        points.append((statistics.fmean(flops), statistics.median(gained[1:])))
    return gather_costs_of(*points)


def _supported(
    model: nn.Module,
    layers: Sequence[nn.Module],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> list[str]:
    """The executors but `"full"` that support some routed layer's call on these prompts."""
    found: set[str] = set()

    def look(layer: Any, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        routing: Routing = layer._modules[ROUTING]
        plan = routing.plan(False)
        stream = stream_given(args, kwargs)
        assert plan is not None
        call = RoutedCall(layer, routing, plan, target_of(plan), stream, None, None, kwargs)
        for name, executor in EXECUTORS.items():
            # By name on a GPU, where "auto" leaves out what it expects to be the slower way.
            asked = plan
            if stream.is_cuda:
                asked = replace(plan, executor=name)
            if executor.supports(replace(call, plan=asked)):
                found.add(name)

    handles = [
        layer.register_forward_pre_hook(of_this_thread(look), with_kwargs=True) for layer in layers
    ]
    with hooked(handles), state_of(model).override(executor="auto"):
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=1)
    return [name for name in EXECUTORS if name in found and name != "full"]


def _timed(
    model: nn.Module,
    layers: Sequence[nn.Module],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    steps: int,
) -> Iterator[tuple[str, int, float]]:
    """Seconds of every routed layer: once for the prompt, then for each decoding step."""
    started: dict[nn.Module, float] = {}
    seconds: list[tuple[int, float]] = []

    def start(layer: nn.Module, args: object) -> None:
        synchronise(device_of(layer))
        started[layer] = time.perf_counter()

    def stop(layer: Any, args: object, output: object) -> None:
        synchronise(device_of(layer))
        seconds.append((layer._modules[ROUTING].layer_index, time.perf_counter() - started[layer]))

    handles = [layer.register_forward_pre_hook(of_this_thread(start)) for layer in layers]
    handles += [layer.register_forward_hook(of_this_thread(stop)) for layer in layers]
    with hooked(handles):
        out = model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1
        )
        yield from (("prefill", *one) for one in seconds)
        for _ in range(steps):
            seconds.clear()
            token = out.logits[:, -1:].argmax(-1)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
            cache = out.past_key_values
            out = model(
                input_ids=token,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
            )
            yield from (("decode", *one) for one in seconds)
