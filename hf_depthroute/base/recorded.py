"""Outputs that the caller of a model asked for and that hooks below its decoder record:
what they see has to be whole.

`output_attentions=True` and `output_router_logits=True` are served by hooks of transformers on the
attention and on the router of every layer. A part that is given some of the tokens only records
those, or nothing. Falcon has no such hooks: its layers return their attention weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.utils import output_capturing

from .contexts import hooked

RECORDER = output_capturing.__name__  # the module of those hooks
ATTENTIONS = "attentions"
ROUTER_LOGITS = "router_logits"


_kept: ContextVar[list[Tensor | None] | None] = ContextVar(
    "depth_route_attention_weights", default=None
)


def records_attention(kwargs: Mapping[str, object]) -> bool:
    """Whether attention weights are wanted of a layer that is called with `kwargs`."""
    return bool(kwargs.get("output_attentions")) or is_recorded(ATTENTIONS)


def is_recorded(*names: str) -> bool:
    """Whether one of `names` is recorded in the forward pass that is running."""
    recorded = output_capturing._active_collector.get()
    return bool(recorded) and any(name in recorded for name in names)


@contextmanager
def unrecorded(name: str) -> Iterator[None]:
    """In this block `name` is not recorded, everything else is."""
    recorded = output_capturing._active_collector.get() or {}
    others = {key: kept for key, kept in recorded.items() if key != name}
    token = output_capturing._active_collector.set(others)
    try:
        yield
    finally:
        output_capturing._active_collector.reset(token)


@contextmanager
def kept_weights(attention: nn.Module) -> Iterator[list[Tensor | None]]:
    """A list of the attention weights of this thread's last call of `attention` in the block."""
    kept: list[Tensor | None] = []
    token = _kept.set(kept)

    def keep(module: nn.Module, args: object, out: tuple[Any, ...]) -> None:
        if _kept.get() is kept:
            kept[:] = [out[1]]

    try:
        with hooked([attention.register_forward_hook(keep)]):
            yield kept
    finally:
        _kept.reset(token)
