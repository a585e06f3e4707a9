"""`modules_to_save`: base modules of which an adapter trains and saves a copy of its own.

PEFT wraps every module whose name ends with one of the given names, and reads whatever tensors a file has for them.
Here the names must mean modules outside of the layers' list, and a file has every tensor of each copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..config.adapter import ConfigError
from ..routing.holder import Routing

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


def check_modules_to_save(model: nn.Module, layers: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Raise `ConfigError` unless every name means at least one module, and none that holds a decoder layer."""
    layers = set(layers)
    holders = [module for layer in layers for module in layer.modules() if isinstance(module, Routing)]
    inside = {part for holder in holders for part in holder.modules()}
    for name in names:
        matched = {path: module for path, module in model.named_modules() if path.endswith(name)}
        if not matched:
            raise ConfigError(f"modules_to_save: the model has no module {name!r}")
        for path, module in matched.items():
            if isinstance(module, _CONTAINERS) or module in inside or not layers.isdisjoint(module.modules()):
                raise ConfigError(f"modules_to_save: {name!r} means {path}, which cannot be copied; name parts of it")


def set_copies(model: nn.Module, routed: set[str], active: list[str], inference_mode: bool) -> None:
    """Use the copies of the `active` ones of the `routed` adapters; what holds none of theirs is another method's."""
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not routed.isdisjoint(module._adapters):
            module.set_adapter([name for name in active if name in module._adapters], inference_mode=inference_mode)


def key_in_file(key: str, adapter_name: str) -> str:
    """A model's key of a tensor of such a copy, as a file has it; other keys stay."""
    return key.replace(f".modules_to_save.{adapter_name}.", ".")


def unwrap(model: nn.Module, adapter_name: str) -> None:
    """Take an adapter's copies out of the model; where none is left, the base's own module comes back."""
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if not isinstance(child, AuxiliaryTrainingWrapper):
                continue
            wrapper: Any = child
            wrapper.delete_adapter(adapter_name, [name for name in wrapper.active_adapters if name != adapter_name])
            if not wrapper._adapters:
                setattr(parent, child_name, wrapper.original_module)
