"""Around forward passes: hooks that go again, and eval mode that ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block; `handles` are what registering them returned."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def is_exporting() -> bool:
    """Whether `torch.export` is tracing; before torch 2.7 that cannot be told from another compiler."""
    asks = getattr(torch.compiler, "is_exporting", None)
    return asks is not None and asks()
