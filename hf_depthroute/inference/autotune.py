"""Measured choice of executor: per routed layer and input shape, the fastest one,
and never slower than the base.

Skipping pays where the skipped arithmetic or memory traffic costs more than the gate and the
indexing. In the decoding of a large batch on a GPU it does not: some token of the batch needs the
FFN's weights anyway. What a machine does at a shape is measured on the model itself rather than
predicted.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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
        prompts = _Prompts(model, input_ids, attention_mask)
        if executors is None:
            executors = _supported(prompts)
        times = _times(prompts, executors, steps, repeats)
        rows, length = input_ids.shape
        shapes = {"prefill": (rows, length)}
        if steps:
            shapes["decode"] = rows, 1
        routings = gated_routings(model)
        choices = []
        for routing, (step, shape) in itertools.product(routings, shapes.items()):
            index = routing.layer_index
            found = {name: times[index, step, name] for name in ("full", *executors)}
            best = min(executors, key=found.__getitem__)
            if not keep_decisions and found[best] > found["full"] / floor:
                best = "full"
            routing.tuned[routing.active_name(), *shape_class(*shape)] = best
            choices.append(Choice(index, step, shape, best, found))
        attends = routings[0].active_target().skips_attention
        if {"rows", "gathered"} <= set(executors) and not attends:
            routings[0].state.gather_costs = _gather_costs(prompts, repeats)
        return choices


class _Prompts(NamedTuple):
    """The prompts that layers are timed on: `[B, T]` each."""

    model: nn.Module
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None

    def layers(self) -> list[nn.Module]:
        """The decoder layers that have a gate."""
        every_layer = stack_of(self.model).layers
        return [every_layer[routing.layer_index] for routing in gated_routings(self.model)]

    def last(self, length: int) -> _Prompts:
        """Their last positions."""
        mask = self.attention_mask
        if mask is not None:
            mask = mask[:, -length:]
        return _Prompts(self.model, self.input_ids[:, -length:], mask)


def _times(
    prompts: _Prompts, executors: Sequence[str], steps: int, repeats: int
) -> dict[tuple[int, str, str], float]:
    """Milliseconds by layer, kind of step and executor, `"full"` included."""
    times: dict[tuple[int, str, str], list[float]] = {}
    for round_ in range(repeats + 1):  # the first one warms up
        for executor in ("full", *executors):
            spent: dict[tuple[int, str], list[float]] = {}
            with state_of(prompts.model).override(executor=executor):
                for step, layer, seconds in _timed(prompts, steps):
                    spent.setdefault((layer, step), []).append(seconds)
            for key, each in spent.items() if round_ else ():
                # Steps that skip and steps that do not take two different times: what counts is
                # their mean.
                times.setdefault((*key, executor), []).append(statistics.fmean(each))
    return {key: statistics.median(each) * 1e3 for key, each in times.items()}


def _gather_costs(prompts: _Prompts, repeats: int) -> GatherCosts | None:
    """The cost model, from the whole prompts and their last eighth; None without a difference."""
    points = []
    length = prompts.input_ids.shape[1]
    for part in (prompts.last(-(-length // 8)), prompts):
        gained = []
        routings = gated_routings(part.model)
        for _ in range(repeats + 1):  # the first one warms up
            spent = {}
            for executor in ("rows", "gathered"):
                with state_of(part.model).override(executor=executor):
                    spent[executor] = sum(seconds for _, _, seconds in _timed(part, 0))
            gained.append((spent["rows"] - spent["gathered"]) / len(routings))
        flops = [chosen_flops(h, part.input_ids.shape, h.budget()) for h in routings]
        points.append((statistics.fmean(flops), statistics.median(gained[1:])))
    return gather_costs_of(*points)


def _supported(prompts: _Prompts) -> list[str]:
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

    watch = of_this_thread(look)
    handles = [
        layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in prompts.layers()
    ]
    model, ids, mask = prompts
    with hooked(handles), state_of(model).override(executor="auto"):
        model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return [name for name in EXECUTORS if name in found and name != "full"]


def _timed(prompts: _Prompts, steps: int) -> Iterator[tuple[str, int, float]]:
    """Seconds of every gated layer: once for the prompt, then for each decoding step."""
    model, ids, mask = prompts
    indices = [routing.layer_index for routing in gated_routings(model)]
    with timed_layers(prompts.layers()) as seconds:
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        yield from (("prefill", *one) for one in zip(indices, seconds))
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            cache = out.past_key_values
            out = model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True)
            yield from (("decode", *one) for one in zip(indices, seconds))


@contextmanager
def timed_layers(layers: Sequence[nn.Module]) -> Iterator[list[float]]:
    """Inside the block, the seconds of each layer's last call."""
    seconds = [0.0] * len(layers)

    def start(place: int, device: torch.device, *_: object) -> None:
        synchronise(device)
        seconds[place] = -time.perf_counter()

    def stop(place: int, device: torch.device, *_: object) -> None:
        synchronise(device)
        seconds[place] += time.perf_counter()

    handles = []
    for place, layer in enumerate(layers):
        at = place, device_of(layer)
        handles.append(layer.register_forward_pre_hook(of_this_thread(partial(start, *at))))
        handles.append(layer.register_forward_hook(of_this_thread(partial(stop, *at))))
    with hooked(handles):
        yield seconds
