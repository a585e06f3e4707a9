"""No gradient for the embeddings' output where nothing needs it.

With gradient checkpointing transformers lets the output of a frozen embedding require a gradient. Reentrant checkpoints
need that: they only connect what goes in with what comes out. Others do not, and there it only has a price: every
frozen layer below the first routed one keeps its input, runs once more and is differentiated, for a gradient that ends
at the embedding and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .families import find_decoder, find_family


@contextmanager
def without_input_gradients(model: nn.Module) -> Iterator[None]:
    """Forward passes inside the block start without a graph at a frozen embedding; no parameter's gradient changes.

    Does nothing where checkpoints are reentrant, or where `enable_input_require_grads` was not called.
    """
    decoder = find_decoder(model, find_family(model))
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None or not embeddings._forward_hooks or _is_reentrant(decoder):
        yield
        return
    handle = embeddings.register_forward_hook(_stop)  # after transformers' own
    try:
        yield
    finally:
        handle.remove()


def _stop(embeddings: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    # A leaf that requires a gradient comes from no parameter: the flag was put on it.
    return output.requires_grad_(False) if output.is_leaf else None


def _is_reentrant(decoder: nn.Module) -> bool:
    """Whether a layer is checkpointed by a function that is not known to be non-reentrant."""
    functions = [
        getattr(module, "_gradient_checkpointing_func", None)
        for module in decoder.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    return any(getattr(function, "keywords", {}).get("use_reentrant") is not False for function in functions)
