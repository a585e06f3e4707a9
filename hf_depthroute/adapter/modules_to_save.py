"""`modules_to_save`: base modules of which an adapter trains and saves a copy of its own.

PEFT wraps every module whose name ends with one of the given names, and reads whatever tensors a
file has for them. Here no name may mean what holds a decoder layer or another copy, and a file has
every tensor of each copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..config.adapter import ConfigError, DepthRouteConfig
from ..parts.neurons import NeuronBranch
from ..routing.routing import Routing

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


class SavedCopies(ModulesToSaveWrapper):
    """PEFT's, which asks twice what adapter is active, though another thread may switch it
    meanwhile, and knows no adapter without a copy, though transformers names them all."""

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        super().set_adapter([name for name in names if name in self._adapters], inference_mode)

    def _forward_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        names = self.active_adapters
        if not names:
            return self._forward_wrapped_passthrough(*args, **kwargs)
        return self.modules_to_save[names[0]](*args, **kwargs)


def check_modules_to_save(
    model: nn.Module, layers: Iterable[nn.Module], names: Iterable[str]
) -> None:
    """Raise `ConfigError` unless every name means modules, each to be copied once and whole."""
    layers = set(layers)
    copied: set[str] = set()
    for name in names:
        matched = matching(model, name)
        if not matched:
            raise ConfigError(f"modules_to_save: the model has no module {name!r}")
        for path, module in matched.items():
            if isinstance(module, _CONTAINERS) or not layers.isdisjoint(module.modules()):
                raise ConfigError(
                    f"modules_to_save: {name!r} means {path}, which cannot be copied; name parts "
                    "of it"
                )
        copied |= matched.keys()
    modules = model.named_modules()
    others = {path for path, module in modules if isinstance(module, AuxiliaryTrainingWrapper)}
    for path in sorted(copied | others):
        parents = itertools.accumulate(path.split("."), lambda parent, name: f"{parent}.{name}")
        held = (parent for parent in parents if parent in copied | others and parent != path)
        outer = next(held, None)
        if outer is not None and not copied.isdisjoint({path, outer}):
            raise ConfigError(
                f"modules_to_save: {path} is a part of {outer}, which is copied too; name modules "
                f"in full, such as {outer!r}"
            )


def matching(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """The base's modules whose names end with `name`, by name, without the routers' parts."""
    routings = [path for path, module in model.named_modules() if isinstance(module, Routing)]
    inside = tuple(f"{path}." for path in routings)
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path.endswith(name) and not path.startswith(inside)
    }


def check_names_of_others(model: nn.Module, names: Iterable[str]) -> None:
    """Raise `ConfigError` where another method's `modules_to_save` means parts of routers, or what
    their branches of neurons read.

    PEFT would put copies in their place: the router could not be saved any more, or its branch
    would go on with the base's.
    """
    branches = [module for module in model.modules() if isinstance(module, NeuronBranch)]
    read = {module for branch in branches for module in branch.sources()}
    paths = [path for path, module in model.named_modules() if module in read]
    inside = [
        f"{path}.{part}"
        for path, module in model.named_modules()
        if isinstance(module, Routing)
        for part, _ in module.named_modules()
        if part
    ]
    for name in names:
        if path := next((path for path in inside if path.endswith(name)), None):
            raise ConfigError(
                f"modules_to_save: {name!r} also means {path}, a part of the router; name more of "
                "the module, such as 'model.norm', or put this adapter on the base before the "
                "router"
            )
        if path := next((path for path in paths if path.endswith(name)), None):
            raise ConfigError(
                f"modules_to_save: {name!r} means {path}, of which a router's branch='neurons' "
                "reads the base's own; leave it out, or route with branch='lowrank'"
            )


def copy_modules(
    model: nn.Module, config: DepthRouteConfig, adapter_name: str, active: bool
) -> None:
    """Give adapter `adapter_name` its copies, as PEFT's `set_additional_trainable_modules` does.

    PEFT would copy a gate's `score` too, where the head of a classifier is called so.
    """
    for name in config.modules_to_save or ():
        for path, module in matching(model, name).items():
            parent, _, child = path.rpartition(".")
            if isinstance(module, ModulesToSaveWrapper):
                module.update(adapter_name)
                module.set_adapter(module.active_adapters, inference_mode=config.inference_mode)
            else:
                wrapper = SavedCopies(module, adapter_name)
                used = [adapter_name] if active else []
                wrapper.set_adapter(used, inference_mode=config.inference_mode)
                setattr(model.get_submodule(parent), child, wrapper)


def set_copies(model: nn.Module, routed: set[str], active: list[str], inference_mode: bool) -> None:
    """Use the copies of those `routed` adapters that are `active`; others are another method's."""
    for wrapper in _wrappers(model, routed):
        used = [name for name in active if name in wrapper._adapters]
        wrapper.set_adapter(used, inference_mode=inference_mode)


def copies_that_train(model: nn.Module, names: set[str]) -> list[tuple[nn.Parameter, bool]]:
    """The parameters of the copies that the adapters `names` have, and whether each trains."""
    parameters = (p for wrapper in _wrappers(model, names) for p in wrapper.parameters())
    return [(parameter, parameter.requires_grad) for parameter in parameters]


@contextmanager
def without_copies(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Inside the block the base's own modules run where the adapter has copies."""
    copied = [(each, each._disable_adapters) for each in _wrappers(model, {adapter_name})]
    for wrapper, _ in copied:
        wrapper._disable_adapters = True
    try:
        yield
    finally:
        for wrapper, disabled in copied:
            wrapper._disable_adapters = disabled


def _wrappers(model: nn.Module, names: set[str]) -> list[Any]:
    """The modules in whose place one of these adapters has a copy."""
    found = (module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper))
    return [module for module in found if not names.isdisjoint(module._adapters)]


def key_in_file(key: str, adapter_name: str) -> str:
    """A model's key of a tensor of such a copy, as a file has it; other keys stay."""
    return key.replace(f".modules_to_save.{adapter_name}.", ".")


def unwrap(model: nn.Module, adapter_name: str) -> None:
    """Take an adapter's copies out of the model; after the last, the base's module comes back."""
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if not isinstance(child, AuxiliaryTrainingWrapper):
                continue
            wrapper: Any = child
            others = [name for name in wrapper.active_adapters if name != adapter_name]
            wrapper.delete_adapter(adapter_name, others)
            if not wrapper._adapters:
                setattr(parent, child_name, wrapper.original_module)
