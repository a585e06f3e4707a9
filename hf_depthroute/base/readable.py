"""Whether the weights of a module may be read directly, instead of the module being called.

A slice of a fused projection, a kernel that takes weights and a product of several maps pass the
call of a module by. What hangs on that call is then lost: hooks, offloading, a quantised or a split
weight, a forward of the instance's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .recorded import RECORDER

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_readable(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of `module` does what the forward of one of `kinds` does with its weights,
    and nothing else.

    Its type is one of `kinds` itself, its weights are all there, and nothing watches or replaces
    the call.
    """
    if type(module) not in kinds or is_watched(module):
        return False
    return all(weight is None or is_whole(weight) for weight in module._parameters.values())


def is_watched(module: nn.Module) -> bool:
    """Whether hooks (accelerate's, too), a forward of its own or a parametrization hang on the
    call of a module.

    The hooks by which transformers records outputs stay for good and do nothing until something is
    recorded; whether that is so, `recorded` says.
    """
    held = module.__dict__
    if "forward" in held or "_hf_hook" in held or "parametrizations" in module._modules:
        return True
    hooks = [hook for name in _HOOKS for hook in held[name].values()]
    if any(getattr(hook, "__module__", "") != RECORDER for hook in hooks):
        return True
    return bool(_has_any_global_hook())


def any_drops(parent: nn.Module, names: Iterable[str]) -> bool:
    """Whether one of the named dropouts of `parent` drops something, as where a model generates in
    training mode, or is watched."""
    parts: list[Any] = [getattr(parent, name) for name in names]
    return any(is_watched(part) or (part.training and getattr(part, "p", 0) > 0) for part in parts)


def is_whole(weight: object) -> bool:
    """Whether a parameter is plain numbers: not quantised, split over processes or on disk."""
    return type(weight) is nn.Parameter and not weight.is_meta and not hasattr(weight, "ds_id")
