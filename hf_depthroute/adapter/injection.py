"""Entering a model and leaving it: every decoder layer's class,
and the hook on the stack that holds the layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..base.cache import starts_prompt
from ..base.contexts import remove_hooks
from ..base.stack import STACK, Stack, stack_of
from ..config.adapter import ConfigError
from ..execution.context import CONTEXT, ForwardContext, Step
from ..execution.costs import unrouted_steps
from ..execution.decode import decodes, run_base
from ..execution.executors import decode_steps
from ..execution.layer import routed_forward
from ..routing.misuse import warn_of_training
from ..routing.routing import ROUTING
from ..routing.stack import RoutedStack, adapters_now
from .call_tokens import (
    by_name,
    inputs_of,
    last_in_full,
    splits_a_packed_row,
    token_ids_of,
    token_mask_of,
)

Forward = Callable[..., Any]

_handed_down: ContextVar[ForwardContext | None] = ContextVar(
    "depth_route_handed_down", default=None
)


def enter(stack: Stack) -> None:
    """Switch every decoder layer of `stack` to its routed subclass; a second call does nothing."""
    if _hand_down not in stack.decoder._forward_pre_hooks.values():
        stack.decoder.register_forward_pre_hook(_hand_down, with_kwargs=True)
        if not stack.family.passes_keywords:
            stack.decoder.register_forward_hook(_forget, always_call=True)
    for layer in stack.layers:
        swap(layer, routed_forward)
        if not stack.family.passes_keywords and _receive not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_receive, prepend=True, with_kwargs=True)


def swap(layer: Any, forward: Forward) -> None:
    """Switch a decoder layer to its subclass with this `forward`; a second call does nothing."""
    if not hasattr(layer, "_depth_route_base"):
        base: Any = type(layer)
        _set_class(layer, routed_class(base, forward))


def leave(model: nn.Module) -> None:
    """Undo `enter` and drop all adapter state of the decoder layers."""
    stack = stack_of(model)
    for layer in stack.layers:
        if hasattr(layer, "_depth_route_base"):
            layer._modules.pop(ROUTING, None)
            _set_class(layer, layer._depth_route_base)
        remove_hooks(layer, _receive)
    remove_hooks(stack.decoder, _hand_down, _forget)
    stack.forget()


def _hand_down(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the decoder stack: give the layers, by a keyword, what only the stack knows."""
    stack: RoutedStack = getattr(decoder, STACK)
    given = kwargs
    if len(args) > 1:  # a bare decoder may be given its mask by place
        kwargs = by_name(decoder, args, kwargs)
    inputs = inputs_of(args, kwargs)
    family = stack.family
    if not family.passes_keywords:
        _handed_down.set(None)
    if inputs is None:
        return None
    # Asked once, for the whole pass: another thread may turn the adapter off, or another one on.
    named = adapters_now(stack.routed)
    active = {routing: routing.config(name) for routing, name in named.items()}
    adapters = {routing.layer_index: name for routing, name in named.items()}
    if splits_a_packed_row(active.values(), inputs, kwargs):
        raise ConfigError(
            "granularity='sequence' and causal_rule='running' decide by a row, and this row holds "
            "several sequences: turn packing (padding-free batches, continuous batching) off, or "
            "route with granularity='token' and causal_rule='quantile'"
        )
    if decoder.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warn_of_training(decoder, active, inputs)
    if not torch.compiler.is_compiling() and starts_prompt(kwargs, inputs.shape[1]):
        # A training or averaging library may have written weights in a way of its own.
        for routing in active:
            routing.forget_prepared()
    real = token_mask_of(args, kwargs)
    last = last_in_full(
        decoder, active.values(), stack.state.settings.in_full, inputs, real, kwargs
    )
    ids = None
    starts = None
    steps: Mapping[nn.Module, Step] | None = None
    if any(config.has_memory for config in active.values()):
        ids, starts = token_ids_of(inputs, kwargs)
    if last is None and decodes(decoder, inputs) and (real is None or real.all()):
        steps = decode_steps(stack.layers, inputs.shape[0], adapters)
    unrouted = unrouted_steps(stack.layers, inputs, kwargs, adapters)
    if unrouted and not any(routing.state.settings.recorders for routing in active):
        steps = dict.fromkeys(unrouted, run_base)
    context = ForwardContext(adapters, real, last, ids, starts, steps, unrouted)
    if not family.passes_keywords:
        _handed_down.set(context)
        return None
    return args, {**given, CONTEXT: context}


def _forget(decoder: nn.Module, args: object, output: object) -> None:
    """Hook of such a stack: a layer that is called by itself knows nothing of the pass before."""
    _handed_down.set(None)


def _receive(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of layers whose stack keeps its keywords; the first, so that others see them."""
    return args, {**kwargs, CONTEXT: _handed_down.get()}


@functools.cache
def routed_class(base: Any, forward: Forward) -> Any:
    """The subclass of `base` for decoder layers: same name and module, our `forward`."""
    names = tuple(inspect.signature(base.forward).parameters)[2:]
    cls = type(base)(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__call__": nn.Module.__call__,  # checkpointing is done once, in `routed_forward`
            "__reduce_ex__": lambda self, protocol: (_rebuild, (base, forward), self.__dict__),
            "_base_forward": base.forward,
            "_argument_names": tuple(name for name in names if name != "kwargs"),
            "_depth_route_base": base,
            "gradient_checkpointing": False,
        },
    )
    cls.forward = forward  # after creation: transformers wraps what the class body defines
    return cls


def _set_class(layer: Any, cls: Any) -> None:
    # accelerate keeps the bound forward of the class it found, and leaves it on the instance when
    # its hook is removed. Rebind both, or routing is silently off.
    before = type(layer).forward
    layer.__class__ = cls
    for name in ("_old_forward", "forward"):
        if getattr(layer.__dict__.get(name), "__func__", None) is before:
            setattr(layer, name, cls.forward.__get__(layer))


def _rebuild(base: Any, forward: Forward) -> Any:
    cls = routed_class(base, forward)
    return cls.__new__(cls)
