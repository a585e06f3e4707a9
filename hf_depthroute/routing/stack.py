"""`RoutedStack`: which layers of a model are routed; made at injection,
and kept with the model's decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

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
    return [routing for routing in routed_layers(model) if routing.adapter() is not None]


def configs_now(routings: Iterable[Routing]) -> list[DepthRouteConfig]:
    """The configurations by which these layers are routed now.

    A layer is asked once: another thread may turn its adapter off meanwhile.
    """
    names = [(routing, routing.adapter()) for routing in routings]
    return [routing.config(name) for routing, name in names if name is not None]


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


def in_turn(change: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """`change` inside `one_change` of its first argument, the model that it changes for all."""

    @functools.wraps(change)
    def waits(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> R:
        with one_change(model):
            return change(model, *args, **kwargs)

    return waits
