"""Descriptions of a routed model for `print(model)` and `model.print_trainable_parameters()`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ..base.stack import stack_of
from ..config.described import AdapterFields
from ..config.fields import PATTERNS
from ..files.shown import counted
from ..parts.memory import shortest_order
from ..parts.targets import TARGETS

if TYPE_CHECKING:
    from peft import PeftModel


def routing_summary(config: AdapterFields, layer: int | None = None) -> str:
    """`ffn per token, budget 0.5, gate mlp, branch lowrank`; of one `layer`, or of all."""
    memory = (
        f"{config.memory_slots:,} slots of {config.memory_width}, {config.memory_heads} heads, "
        f"{_orders(config)}"
    )
    if TARGETS[config.target].reads_ids:
        return f"{config.target} per {config.granularity}, {memory}"
    one = -1 if layer is None else layer
    parts = [f"{config.target_of(one)} per {config.granularity}", f"budget {config.budget:g}"]
    parts.append(f"gate {config.gate_of(one)}")
    if config.branch_of(one) != "none":
        parts.append(f"branch {config.branch_of(one)}")
    if layer is None:
        parts += patterns_words(config)
    if config.branch == "memory":
        parts.append(memory)
    if config.phases != "all":
        parts.append(f"phases {config.phases}")
    if config.causal_rule == "running":
        parts.append("running ranks")
    return ", ".join(parts)


def patterns_words(config: AdapterFields) -> list[str]:
    """Exceptions of single layers, such as `["target block in 28-29", "rank 192 in 28"]`."""
    said = []
    for name in PATTERNS:
        pattern = getattr(config, name) or {}
        for value in dict.fromkeys(pattern.values()):
            layers = ranges([index for index, other in pattern.items() if other == value])
            said.append(f"{name.removesuffix('_pattern')} {value} in {layers}")
    return said


def budget_words(config: AdapterFields, depth: int) -> str:
    """`0.73 of the calls in 19 layers with a gate, which is ...`, of an injected adapter.

    A budget and the `keep` of `fit_router` are shares of different things, so both are named.
    """
    gated = counted(len(config.gated_layers()), "layer")
    share = config.share_of_all(depth, config.budget)
    return (
        f"{config.budget:.3g} of the calls in {gated} with a gate, which is {share:.3g} of "
        f"all {depth} layers"
    )


def _orders(config: AdapterFields) -> str:
    shortest = shortest_order(config)
    longest = config.ngram_order
    if shortest == longest:
        return f"{longest}-grams"
    return f"{shortest}- to {longest}-grams"


def routed_lines(model: PeftModel) -> list[str]:
    """One line per routed adapter of `model`: how many of its layers are routed, and how."""
    base = model.get_base_model()
    lines = []
    for name, config in model.peft_config.items():
        if isinstance(config, AdapterFields) and isinstance(config.layers, list):
            depth = len(stack_of(base).layers)
            which = f"{len(config.layers)} of {depth} layers ({ranges(config.layers)})"
            if config.static_layers:
                which += f", static {ranges(config.static_layers)}"
            lines.append(f"routed: {which}: {routing_summary(config)}; adapter {name!r}")
    return lines


def ranges(numbers: list[int]) -> str:
    """`[1, 4, 5, 6]` -> `1, 4-6`."""
    grouped = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[n for _, n in run] for _, run in grouped]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
