"""The gate and the branch of a layer as they are now: what copies of their weights are valid for."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..parts.branches import stamp
from ..routing.holder import Routing


class FrozenParts:
    """An adapter's gate and branch in one layer; copies of their weights may be kept while they are `usable`.

    Args:
        holder: The layer's adapter state.
        adapter: Its name.
    """

    def __init__(self, holder: Routing, adapter: str) -> None:
        self._parts: tuple[Any, Any] = parts_of(holder, adapter)
        modules = [module for part in self._parts if part is not None for module in part.modules()]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        self._plain = all(type(w) is nn.Parameter and w.device.type == "cpu" for w in self._weights)
        self._plain &= not any(hasattr(m, "_hf_hook") for m in modules)
        self._stamp = stamp(*self._weights)

    def usable(self) -> bool:
        """Whether the weights are plain, still those of the start, and nobody watches the adapter's modules."""
        return self._plain and not any(self._hooks) and self._stamp is not None and self._stamp == stamp(*self._weights)


def parts_of(holder: Routing, adapter: str) -> tuple[nn.Module, nn.Module | None]:
    """The adapter's gate and, where it has one, its branch."""
    return holder.depth_route_gate[adapter], holder.depth_route_branch._modules.get(adapter)


def folds(norm: nn.Module) -> tuple[int, int, int] | None:
    """Changes whenever what an RMS norm on the CPU does; None where that is more than its weight says."""
    weight = norm._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.is_inference():
        return None
    if norm._forward_hooks or norm._forward_pre_hooks or norm._modules or "forward" in norm.__dict__:
        return None  # somebody watches it, or changes what it computes
    return id(norm), weight.data_ptr(), weight._version
