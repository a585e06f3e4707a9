"""Entering a model and leaving it: every decoder layer's class,
and the hook on the stack that holds the layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..base.cache import cache_of, is_paged, starts_prompt
from ..base.stack import STACK, Stack, stack_of
from ..config.adapter import ConfigError, DepthRouteConfig
from ..data.batches import breaks_of, document_starts
from ..execution.context import CONTEXT, ForwardContext, Step
from ..execution.costs import unrouted_steps
from ..execution.decode import decodes, run_base
from ..execution.executors import decode_steps
from ..execution.layer import routed_forward
from ..parts.rules import tail_mask, where_real
from ..routing.misuse import warn_of_training
from ..routing.routing import ROUTING, Routing
from ..routing.stack import RoutedStack

Forward = Callable[..., Any]

_handed_down: ContextVar[ForwardContext | None] = ContextVar(
    "depth_route_handed_down", default=None
)


def enter(stack: Stack) -> None:
    """Switch every decoder layer of `stack` to its routed subclass; a second call does nothing."""
    if _hand_down not in stack.decoder._forward_pre_hooks.values():
        stack.decoder.register_forward_pre_hook(_hand_down, with_kwargs=True)
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
        _unhook(layer, _receive)
    _unhook(stack.decoder, _hand_down)
    stack.forget()


def _unhook(module: nn.Module, function: Any) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is function:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hand_down(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the decoder stack: give the layers, by a keyword, what only the stack knows."""
    stack: RoutedStack = getattr(decoder, STACK)
    given = kwargs
    if len(args) > 1:  # a bare decoder may be given its mask by place
        kwargs = by_name(decoder, args, kwargs)
    inputs = _inputs(args, kwargs)
    family = stack.family
    if not family.passes_keywords:
        _handed_down.set(None)
    if inputs is None:
        return None
    # Asked once: another thread may turn the adapter off, or another one on.
    active = _active(stack)
    if _splits_a_packed_row(active, inputs, kwargs):
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
    last = None
    ids = None
    starts = None
    steps: Mapping[nn.Module, Step] | None = None
    tails = {config.last_in_full for config in active.values() if config.phases == "prefill"}
    if len(tails) > 1:
        raise ConfigError(
            f"adapters that are active together need one prompt_tail, not {sorted(tails)}"
        )
    tail = max(tails, default=0)
    in_full = stack.state.settings.in_full
    if tail > 0 and in_full is not None:
        last = _of_shape(in_full, inputs, real)
    elif inputs.shape[1] > tail > 0:
        seen = seen_by_head(decoder, active.values(), inputs, real)
        last = last_tokens_of(inputs, seen, kwargs, tail)
    if any(config.has_memory for config in active.values()):
        ids, starts = token_ids_of(inputs, kwargs)
    if last is None and decodes(decoder, inputs) and (real is None or real.all()):
        steps = decode_steps(stack.layers, inputs.shape[0])
    unrouted = unrouted_steps(stack.layers, inputs, kwargs)
    if unrouted and not any(routing.state.settings.recorders for routing in active):
        steps = dict.fromkeys(unrouted, run_base)
    context = ForwardContext(real, last, ids, starts, steps, unrouted)
    if not family.passes_keywords:
        _handed_down.set(context)
        return None
    return args, {**given, CONTEXT: context}


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by the names that its `forward` gives them."""
    return dict(zip(inspect.signature(module.forward).parameters, args)) | kwargs


def _of_shape(
    in_full: torch.Tensor, inputs: torch.Tensor, real: torch.Tensor | None
) -> torch.Tensor:
    """The real tokens among those a caller runs in full, bool `[B, T]` on the input's device."""
    if in_full.shape != inputs.shape[:2]:
        raise ValueError(
            f"in_full has shape {tuple(in_full.shape)}, the input {tuple(inputs.shape[:2])}"
        )
    return where_real(in_full.to(inputs.device), real)


def _receive(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of layers whose stack keeps its keywords; the first, so that others see them."""
    return args, {**kwargs, CONTEXT: _handed_down.get()}


def _splits_a_packed_row(
    active: dict[Routing, DepthRouteConfig], inputs: torch.Tensor, kwargs: dict[str, Any]
) -> bool:
    """Whether a layer would decide about a row as one sequence that holds several."""
    told = is_paged(kwargs) or kwargs.get("cu_seq_lens_q") is not None
    positions = kwargs.get("position_ids")
    masked = kwargs.get("attention_mask") is not None
    if not told and (positions is None or masked or inputs.shape[1] == 1):
        return False
    configs = active.values()
    if not any(c.granularity == "sequence" or c.causal_rule == "running" for c in configs):
        return False
    return told or positions is None or bool(breaks_of(positions).any())


def _active(stack: RoutedStack) -> dict[Routing, DepthRouteConfig]:
    """The routings of the layers that are routed now, each with its adapter's configuration."""
    named = [(routing, routing.adapter()) for routing in stack.routed]
    return {routing: routing.config(name) for routing, name in named if name is not None}


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    return next((x for x in given if x is not None), None)


def token_mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Which new tokens of a decoder's call are real, bool `[B, T]`; None if no mask says so.

    Layers see a 4D mask, a boolean mask, none, or a block mask, depending on the attention
    implementation.
    """
    inputs = _inputs(args, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # one per kind of attention, made by `generate` for static caches
        mask = next(iter(mask.values()), None)
    # Its keys are in no order of time.
    if inputs is None or not isinstance(mask, torch.Tensor) or is_paged(kwargs):
        return None
    batch, length = inputs.shape[:2]
    if mask.ndim == 2 and mask.shape[1] >= length:
        return _of_new_tokens(mask, length, kwargs)
    if mask.ndim == 4 and length > 1:
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        allowed = mask if mask.dtype == torch.bool else mask == 0
        # In a mask of a sliding window that has moved on, the new positions come last.
        start = min(past, max(0, mask.shape[-1] - length))
        # A position that no query may look at is padding.
        real = allowed[:, 0, :, start : start + length].any(dim=1).expand(batch, -1)
        if real.shape[1] == length:
            return real
    return None


def _of_new_tokens(mask: torch.Tensor, length: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """The new tokens' columns of a mask `[B, S]`, bool `[B, T]`: those after the cache's.

    A mask may be longer, as one that was made for a whole static cache. In one that is shorter,
    they come last.
    """
    spare = mask.shape[1] - length
    cache = cache_of(kwargs)
    past = 0 if cache is None else cache.get_seq_length()
    if not isinstance(past, torch.Tensor):
        start = min(past, spare)
        return mask[:, start : start + length].bool()
    # Waits for no device.
    columns = past.to(mask.device).clamp(max=spare) + torch.arange(length, device=mask.device)
    return mask[:, columns].bool()


def seen_by_head(
    decoder: nn.Module,
    configs: Iterable[DepthRouteConfig],
    inputs: torch.Tensor,
    real: torch.Tensor | None,
) -> torch.Tensor | None:
    """Among which tokens the model's head takes the last one, bool `[B, T]`; None: among all.

    A sequence classifier passes over every token that has the id of padding, with a mask or
    without.
    """
    padding = getattr(getattr(decoder, "config", None), "pad_token_id", None)
    if padding is None or inputs.is_floating_point():
        return real
    if not any(config.task_type == "SEQ_CLS" for config in configs):
        return real
    return where_real(inputs != padding, real)


def last_tokens_of(
    inputs: torch.Tensor, token_mask: torch.Tensor | None, kwargs: dict[str, Any], count: int
) -> torch.Tensor:
    """The last `count` real tokens of every sequence of a call of the decoder stack, bool `[B, T]`.

    Packed rows hold several sequences; of a shorter one it is all of its tokens.
    """
    ends = _ends_of(inputs, token_mask, kwargs)
    if count == 1:
        return ends
    return tail_mask(ends, count, token_mask)


def _ends_of(
    inputs: torch.Tensor, token_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """The last real token of every sequence, bool `[B, T]`."""
    last = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    ends = kwargs.get("cu_seq_lens_q")
    positions = kwargs.get("position_ids")
    if ends is not None:
        last.view(-1)[ends[1:].long() - 1] = True
        return last
    if token_mask is not None:
        last = token_mask & (token_mask.flip(1).cumsum(1).flip(1) == 1)
    else:
        last[:, -1] = True
    mask = kwargs.get("attention_mask")
    one_a_row = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if positions is not None and positions.ndim == 2 and not one_a_row:
        ends = breaks_of(positions)[:, 1:]
        last[:, :-1] |= ends if token_mask is None else ends & token_mask[:, :-1]
    return last


def token_ids_of(
    inputs: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The token ids of a decoder's call, `[B, T]`, and where a document starts, bool `[B, T]`.

    `document_starts` or `cu_seq_lens_q` says so; None if neither says anything.

    Raises:
        ConfigError: The call has no token ids, or is one of continuous batching.
    """
    if inputs.is_floating_point():
        raise ConfigError(
            "the adapter's memory looks token ids up, and inputs_embeds holds none; pass input_ids"
        )
    if is_paged(kwargs):
        raise ConfigError(
            "the adapter's memory does not know a request's earlier tokens in continuous batching; "
            "generate without it"
        )
    starts = None
    ends = kwargs.get("cu_seq_lens_q")
    positions = kwargs.get("position_ids")
    if ends is not None:
        starts = torch.zeros_like(inputs, dtype=torch.bool)
        starts.view(-1)[ends[:-1].long()] = True
    elif positions is not None and positions.ndim == 2 and inputs.shape[1] > 1:
        starts = document_starts({**kwargs, "input_ids": inputs})
    return inputs, starts


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
