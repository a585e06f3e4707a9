"""`RoutedStack`: which layers of a model are routed; made at injection,
and kept with the model's decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from ..base.stack import Stack, kept_stack
from ..config.adapter import DepthRouteConfig
from .routing import Routing
from .state import RunState

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class RoutedStack(Stack):
    """The decoder of a routed model.

    Attributes:
        routed: The adapter state of the routed layers, in layer order.
        state: The settings that they share.
    """

    routed: tuple[Routing, ...]
    state: RunState


def routed_stack(model: nn.Module) -> RoutedStack | None:
    """The routed layers of `model` or of a module around it; None if it has none."""
    kept = kept_stack(model)
    return kept if isinstance(kept, RoutedStack) else None


def routed_layers(model: nn.Module) -> tuple[Routing, ...]:
    """The routings of `model`, in layer order; empty if it has none."""
    stack = routed_stack(model)
    return () if stack is None else stack.routed


def routed_now(model: nn.Module) -> list[Routing]:
    """The routings that an active adapter routes now, in layer order; empty if there is none."""
    return list(adapters_now(routed_layers(model)))


def adapters_now(routings: Sequence[Routing]) -> dict[Routing, str]:
    """Those of a model's layers that are routed now, in layer order, each with its adapter's name.

    Each is asked once, and none while another thread switches from one adapter to another.
    """
    if not routings:
        return {}
    lock: AbstractContextManager[object] = routings[0].state.switching
    if torch.compiler.is_compiling():  # knows no locks
        lock = nullcontext()
    with lock:
        names = [(routing, routing.adapter()) for routing in routings]
    return {routing: name for routing, name in names if name is not None}


def configs_now(routings: Sequence[Routing]) -> list[DepthRouteConfig]:
    """The configurations by which these layers are routed now."""
    return [routing.config(name) for routing, name in adapters_now(routings).items()]


def state_of(model: nn.Module) -> RunState:
    """The settings of `model` at run time.

    Raises:
        ValueError: It has no routed layer.
    """
    return routings_of(model)[0].state


def routings_of(model: nn.Module) -> list[Routing]:
    """The routings of `model`, in layer order.

    Raises:
        ValueError: There is none.
    """
    stack = routed_stack(model)
    if stack is None:
        raise ValueError(
            f"{type(model).__name__} has no routed layer; wrap it with get_depth_routed_model first"
        )
    return list(stack.routed)


def one_change(model: nn.Module) -> AbstractContextManager[object]:
    """Inside the block other threads' changes of `model` by what takes this block wait.

    Two changes at one time could leave some layers with one result and some with the other.
    """
    stack = routed_stack(model)
    if stack is None:
        return nullcontext()
    return stack.state.changing


@contextmanager
def one_switch(model: nn.Module) -> Iterator[None]:
    """The same for a change of what adapters are on: a forward pass that begins meanwhile waits."""
    stack = routed_stack(model)
    with one_change(model), nullcontext() if stack is None else stack.state.switching:
        yield


def in_turn(change: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """`change` inside `one_change` of its first argument, the model that it changes for all."""

    @functools.wraps(change)
    def waits(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        with one_change(model):
            return change(model, *args, **kwargs)

    return waits
