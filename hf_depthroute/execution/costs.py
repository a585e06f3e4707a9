"""Costs of routing on a GPU: which way `"auto"` runs a prompt's FFNs,
and whether it routes a decoding step.

Where the host launches one kernel after another, launches and waiting count, not only bytes and
FLOPs. Two models of two numbers each say when they count for more; the numbers are of an NVIDIA
H100 80GB in bfloat16. Neither model asks what was decided, and the second does not ask how many
sequences there are: no token's result depends on the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..base.cache import starts_prompt
from ..files.shown import DepthRouteWarning
from ..routing.routing import ROUTING, Routing

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan
    from .call import RoutedCall

# From a routed layer's eager step, 6.24 ms for four layers, less the base's, 3.33 ms
# (`recipes/speed/h100.json`).
STEP_SECONDS = 7.3e-4
BYTES_PER_SECOND = 3.0e12  # of a card that does not tell


@dataclass(frozen=True)
class GatherCosts:
    """The cost and the gain of gathering an FFN's chosen rows for the base's own products,
    compared with row kernels.

    Attributes:
        wait: Seconds a layer: the host waits for the number of chosen rows, and launches more.
            Assumed.
        saved: Seconds for every FLOP of the chosen rows' products. At 4,096 of 8,192 rows of
            Llama-3-8B's FFN the row kernels take 3.05 ms, half of the dense products 2.21 ms, and
            moving rows 0.11 ms (`recipes/speed/row_ops.json`).
    """

    wait: float = 1e-4
    saved: float = 5.0e-16

    def pays(self, flops: float) -> bool:
        return flops * self.saved > self.wait


def gather_costs_of(few: tuple[float, float], many: tuple[float, float]) -> GatherCosts | None:
    """The line through two measurements, of few rows and of many: FLOPs of the chosen rows of a
    layer, and the seconds that gathering them saves.

    None if more rows save no more, so that the two ways were not told apart.
    """
    if not (many[0] > few[0] and many[1] > few[1]):
        return None
    saved = (many[1] - few[1]) / (many[0] - few[0])
    return GatherCosts(wait=many[0] * saved - many[1], saved=saved)


def is_launched(stream: Tensor) -> bool:
    """Whether the host launches kernels one by one: on a GPU, neither compiled nor captured."""
    return (
        stream.is_cuda
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


def prefers_gathering(call: RoutedCall) -> bool:
    """Whether an FFN's chosen rows are better gathered than run by row kernels."""
    target = call.plan.target
    if not is_launched(call.stream) or target.skips_attention or not target.skips_ffn:
        return False
    costs: GatherCosts = call.routing.state.gather_costs or GatherCosts()
    return costs.pays(chosen_flops(call.routing, call.stream.shape, call.plan.budget))


def chosen_flops(routing: Routing, shape: Sequence[int], budget: float) -> float:
    """FLOPs of a SwiGLU FFN's three products at the rows of a stream of `shape`, `(B, T)` first,
    that run in full."""
    return 6.0 * shape[0] * shape[1] * budget * routing.width * routing.ffn_width


def unrouted_steps(
    layers: Iterable[nn.Module],
    inputs: Tensor,
    kwargs: Mapping[str, object],
    adapters: Mapping[int, str],
) -> frozenset[nn.Module] | None:
    """The layers in which routing this decoding step would take longer than it can save;
    None if there is none.

    A step that goes on with a growing KV cache, on a GPU. One with a static cache may be captured,
    and stays routed. `inputs` `[B, T, ...]` and `kwargs` are what the decoder stack is called with,
    `adapters` those of its routed layers.
    """
    if inputs.shape[1] != 1 or torch.is_grad_enabled() or not is_launched(inputs):
        return None
    cache = kwargs.get("past_key_values")
    if starts_prompt(dict(kwargs), 1) or getattr(cache, "is_compileable", False):
        return None
    held = ((layer, cast("Routing | None", layer._modules.get(ROUTING))) for layer in layers)
    unrouted = {
        layer: routing
        for layer, routing in held
        if routing is not None and _is_unpaid(layer, routing, inputs, adapters)
    }
    for routing in unrouted.values():
        _say_once(routing)
    return frozenset(unrouted) or None


def _is_unpaid(
    layer: nn.Module, routing: Routing, inputs: Tensor, adapters: Mapping[int, str]
) -> bool:
    plan = routing.plan(False, (inputs.shape[0], 1), adapters=adapters)
    if plan is None or not plan.by_token or plan.gate.static or plan.executor != "auto":
        return False
    if plan.replayed is not None or plan.gate.exits or plan.adapter in routing.depth_route_memory:
        return False
    if plan.config.granularity == "sequence" or plan.target.per_pair or not routing.dense_ffn:
        return False
    key = "skipped bytes", plan.adapter
    skipped: int | None = routing.derived.get(key)
    if skipped is None:
        skipped = routing.derived[key] = _skipped_bytes(layer, routing, plan)
    return (1 - plan.budget) * skipped / _bytes_per_second(inputs.device) < STEP_SECONDS


def _skipped_bytes(layer: nn.Module, routing: Routing, plan: RoutePlan) -> int:
    """The weights that a skipped token leaves unread; GPTQ and AWQ hold theirs in buffers."""
    names = []
    if plan.target.skips_ffn:
        names.append(routing.family.ffn)
    if plan.target.skips_attention:
        names.append(routing.family.attention)
    parts = [getattr(layer, name) for name in names]
    weights = [weight for part in parts for weight in (*part.parameters(), *part.buffers())]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _bytes_per_second(device: torch.device) -> float:
    """The bandwidth of a card's memory, two transfers for every tick of its clock."""
    if device.type != "cuda":
        return BYTES_PER_SECOND
    card = torch.cuda.get_device_properties(device)
    kilohertz = getattr(card, "memory_clock_rate", 0)
    bits = getattr(card, "memory_bus_width", 0)
    return 2e3 * kilohertz * bits / 8 or BYTES_PER_SECOND


def _say_once(routing: Routing) -> None:
    if routing.state.told_of_steps:
        return
    routing.state.told_of_steps = True
    warnings.warn(
        "decoding steps run in full, prompts are routed: launched one by one, the kernels of a "
        f"routed layer take about {STEP_SECONDS * 1e3:.2g} ms longer than the base's, more than "
        "skipping its weights can save. Steps are "
        'routed with generate(cache_implementation="static"), which compiles them, or after '
        "tune_execution(model, input_ids, keep_decisions=True)",
        DepthRouteWarning,
        stacklevel=2,
    )
