"""A model as it was before, where a change of it does not come to its end: an error, Ctrl-C, or no memory left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from ..routing.routing import Routing
from .loading import discard

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def unchanged_on_error(model: nn.Module, adapter_name: str = "default") -> Iterator[None]:
    """If the block raises, whatever it raises, take out adapter `adapter_name`, unless it was there before.

    Which parameters train, and which modules are in training mode, is then as before, too.
    """
    before = has_adapter(model, adapter_name)
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    except BaseException:
        if not before and has_adapter(model, adapter_name):
            discard(model, adapter_name)
        for parameter, trained in trains:
            parameter.requires_grad_(trained)
        for module, training in modes:
            module.training = training
        raise


def restoring(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """`function` in `unchanged_on_error` of its first argument, a model."""

    @functools.wraps(function)
    def called(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with unchanged_on_error(model):
            return function(model, *args, **kwargs)

    return called


def has_adapter(model: nn.Module, adapter_name: str) -> bool:
    """Whether a routed adapter of that name is in `model`."""
    return any(isinstance(m, Routing) and adapter_name in m.depth_route_gate for m in model.modules())
