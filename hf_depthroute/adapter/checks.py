"""Checks that refuse an adapter before the model is changed: its name, its sizes, its base,
and other adapters."""

from __future__ import annotations

import re
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..base.families import Family
from ..base.lm_head import has_head
from ..base.stack import Stack
from ..base.sublayers import width_of
from ..config.adapter import ConfigError, DepthRouteConfig
from ..parts.flexidepth import default_width
from ..parts.gates import GATES
from ..parts.memory import embedding_width, hash_count
from ..parts.neurons import neurons_of
from ..parts.targets import TARGETS
from ..routing.routing import Routing
from .base_check import check_base
from .files import PEFT_TYPE
from .modules_to_save import check_modules_to_save, check_names_of_others, matching

_MEMORY_NUMBERS = 1 << 30  # in the tables of all layers
_SMALL_WIDTH = 256  # parts of any model may be this wide; above it, four times the model's width


def check_injection(model: nn.Module, name: str, config: PeftConfig, stack: Stack) -> list[int]:
    """The indices of the layers to route, in `model` whose decoder is `stack`.

    Raises:
        ConfigError: Adapter `name`, configured by `config`, cannot be added to this model.
        AdapterMismatchError: It was made for another base.
    """
    family = stack.family
    layers = stack.layers
    if any(hasattr(parameter, "ds_id") for parameter in layers[0].parameters()):
        raise ConfigError(
            "DeepSpeed ZeRO-3 has split the base's weights already, so the adapter cannot be sized "
            "by them; load it and inject before the Accelerator or the TrainingArguments are made "
            "(after that transformers splits what it loads, with zero3_init_flag: false too), and "
            "let ZeRO-3 split both"
        )
    if not isinstance(config, DepthRouteConfig):
        raise ConfigError(
            f"adapter {name!r}: expected a DepthRouteConfig, got {type(config).__name__}"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"adapter name {name!r} must be 1 to 64 letters, digits, '_' or '-'")
    check_name_is_free(model, name)
    others = [
        m for m in model.modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, Routing)
    ]
    if config.modules_to_save and others:
        raise ConfigError(
            f"modules_to_save={config.modules_to_save}: PEFT would switch the copies off next to a "
            f"{_kind(others[0])} adapter; give modules_to_save to that adapter, or merge it first "
            "with merge_and_unload()"
        )
    if config.base_architecture is not None:
        check_base(model, config.base_architecture)
    routed = config.routed_layers(len(layers))
    _check_parts(model, family, layers, routed, config)
    return routed


def _check_parts(
    model: Any, family: Family, layers: Any, routed: list[int], config: DepthRouteConfig
) -> None:
    """Raise `ConfigError` where a layer lacks what is routed, or a part would be absurdly wide."""
    width = width_of(layers[0], family)
    widest = max(4 * width, _SMALL_WIDTH)
    for index in routed:
        if config.branch_of(index) == "neurons":
            _check_neurons(config, family, layers, index)
        elif (rank := config.rank_of(index) or 0) > widest:
            raise ConfigError(
                f"branch_rank={rank} must be at most {widest} on a model of width {width}"
            )
    for name in ("gate_hidden", "context_dim", "summary_dim", "action_dim"):
        size = getattr(config, name) or 0
        if size > widest:
            raise ConfigError(f"{name}={size} must be at most {widest} on a model of width {width}")
    if config.has_memory:
        _check_memory(config, len(routed), widest)
    check_modules_to_save(model, layers, config.modules_to_save or ())
    _check_no_copies(model, family, layers, routed, config)
    if GATES[config.gate].reads_logits and not has_head(model):
        raise ConfigError(f"gate={config.gate!r} needs a model with an LM head")
    for place, index in enumerate(routed if TARGETS[config.target].per_pair else ()):
        experts = getattr(getattr(layers[index], family.ffn), family.experts, None)
        count = getattr(experts, "num_experts", 0)
        if not count:
            raise ConfigError(
                f"target={config.target!r}: layer {index} has no experts; use target='ffn' or "
                "other layers"
            )
        for expert in (config.dropped_experts or [[]] * len(routed))[place]:
            if expert >= count:
                raise ConfigError(
                    f"dropped_experts: layer {index} has experts 0 to {count - 1}, not {expert}"
                )


def default_rank(config: DepthRouteConfig, width: int, ffn: Any, layer_index: int = -1) -> int:
    """The rank of a layer's branch where none is named; by default, of layers without a pattern."""
    branch = config.branch_of(layer_index)
    neurons = neurons_of(ffn)
    if branch == "swiglu":
        return default_width(neurons or 4 * width)
    return max(1, width // 8 if branch != "neurons" or neurons is None else neurons // 4)


def _check_neurons(config: DepthRouteConfig, family: Family, layers: Any, index: int) -> None:
    count = neurons_of(getattr(layers[index], family.ffn))
    wanted = config.rank_of(index)
    if count is None:
        raise ConfigError(
            f"branch='neurons': the FFN of layer {index} is a mixture of experts or of a form that "
            "is not known; use branch='lowrank'"
        )
    if (wanted or 1) > count:
        raise ConfigError(
            f"branch_rank={wanted} must be at most {count}, the neurons of layer {index}'s FFN"
        )


def _check_no_copies(
    model: nn.Module, family: Family, layers: Any, routed: list[int], config: DepthRouteConfig
) -> None:
    """Raise `ConfigError` where `modules_to_save` would copy what a branch of neurons reads."""
    reading = [layers[index] for index in routed if config.branch_of(index) == "neurons"]
    names = [name for name in (family.ffn, family.ffn_norm) if name is not None]
    read = {getattr(layer, name) for layer in reading for name in names}
    for name in config.modules_to_save or ():
        copied = (path for path, module in matching(model, name).items() if module in read)
        if path := next(copied, None):
            raise ConfigError(
                f"modules_to_save: {name!r} means {path}, of which branch='neurons' reads the "
                "base's own; leave it out, or use branch='lowrank'"
            )


def _check_memory(config: DepthRouteConfig, layers: int, widest: int) -> None:
    embedding = embedding_width(config)
    if embedding > widest:
        raise ConfigError(
            f"memory_width={config.memory_width}: {hash_count(config)} hashes look up {embedding} "
            f"numbers for a token; on this model at most {widest}"
        )
    numbers = layers * config.memory_slots * config.memory_width
    if numbers > _MEMORY_NUMBERS:
        raise ConfigError(
            f"memory_slots={config.memory_slots}: {numbers:,} numbers in {layers} layers; at most "
            f"{_MEMORY_NUMBERS:,}, 4 GiB in float32"
        )


def check_name_is_free(model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, Routing):
            if name in module.depth_route_gate:
                raise ConfigError(
                    f"there already is a depth-routed adapter named {name!r}; choose another name"
                )
        elif isinstance(module, BaseTunerLayer) and name in module._get_available_adapters():
            raise ConfigError(
                f"adapter name {name!r} is taken by a {_kind(module)} adapter on this model; pass "
                "adapter_name='router'"
            )


def _kind(layer: nn.Module) -> str:
    """The name of the PEFT method that a layer is of, such as `"lora"`."""
    return type(layer).__module__.split(".")[-2]


def add_of_same_method(
    add: Any, self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
) -> None:
    """`PeftModel.add_adapter`, which takes one method; the error names the way to route, too.

    What an adapter of another method saves of the base must be no part of a router.
    """
    # None while a PeftModel of prompt learning is made: it adds its first adapter so.
    active = self.peft_config.get(self.active_adapter, peft_config)
    here = getattr(active, "peft_type", None)
    there = getattr(peft_config, "peft_type", None)
    if here != there and PEFT_TYPE in (getattr(kind, "value", kind) for kind in (here, there)):
        raise ConfigError(
            f"add_adapter({adapter_name!r}, {type(peft_config).__name__}): a PeftModel holds "
            "adapters of one method; two go on one base: get_peft_model(model.get_base_model(), "
            f"config, adapter_name={adapter_name!r})"
        )
    if not isinstance(peft_config, DepthRouteConfig):
        check_names_of_others(self, getattr(peft_config, "modules_to_save", None) or ())
    add(self, adapter_name, peft_config, *args, **kwargs)
