"""Which layers have a step of their own where one new token per sequence is decoded on a CPU (`decode`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from ..routing.routing import ROUTING, Routing
from .context import Step
from .decode import DECODE_ROWS, run_base
from .executors import prepare


def decode_steps(layers: Iterable[nn.Module], batch: int) -> dict[nn.Module, Step]:
    """The steps of one new token of each of `batch` sequences, of the layers that have one."""
    steps: dict[nn.Module, Step] = {}
    for layer in layers:
        routing = cast("Routing | None", layer._modules.get(ROUTING))
        step = run_base if routing is None else _step_of(layer, routing, batch)
        if step is not None:
            steps[layer] = step
    return steps


def _step_of(layer: nn.Module, routing: Routing, batch: int) -> Step | None:
    """None if the general forward pass has to run."""
    plan = routing.plan(False, (batch, 1))
    if plan is None:
        return run_base
    if plan.recorders:
        return None
    if plan.rule == "full":
        # The KV cache has to learn of the token, or knows what was decided about its sequence.
        remembers = plan.adapter in routing.depth_route_memory
        return None if remembers or plan.config.granularity == "sequence" else run_base
    return None if plan.replayed is not None else prepare(layer, plan, batch)


def decodes(decoder: nn.Module, inputs: Tensor) -> bool:
    """Whether a forward pass of `inputs` `[B, T, ...]` is a decoding step on a CPU, in plain inference."""
    if inputs.shape[1] != 1 or len(inputs) > DECODE_ROWS or inputs.device.type != "cpu":
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
