"""Around forward passes: hooks that go again or belong to one thread, eval mode that ends,
and waiting for the device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# The mode that a module was in when each `evaluating` block that is open began, in all threads.
_modes: WeakKeyDictionary[nn.Module, list[bool]] = WeakKeyDictionary()
_modes_change = threading.RLock()


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block; `handles` are what registering them returned."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


def remove_hooks(module: nn.Module, *functions: object) -> None:
    """Take these functions out of a module's forward hooks; a copy of a model has no handles."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in functions]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def of_this_thread(hook: Callable[..., object]) -> Callable[..., Any]:
    """`hook`, for passes of the calling thread only: others may run the same modules meanwhile."""
    own = threading.get_ident()

    @functools.wraps(hook)
    def called(*args: object, **kwargs: object) -> Any:
        # A compiler traces passes of the thread that compiles, and does not know thread numbers.
        if torch.compiler.is_compiling() or threading.get_ident() == own:
            return hook(*args, **kwargs)
        return None

    return called


def kept_modes(model: nn.Module) -> Callable[[], None]:
    """A function that puts every module back into the mode, training or eval, that it is in now."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; every module's own mode after it, whatever ends it.

    Where blocks overlap, in threads, the last to end puts the modes back.
    """
    modules = list(model.modules())

    def put_back() -> None:
        with _modes_change:
            model.train(model.training)  # what was prepared for evaluation is dropped
            for module in modules:
                module.training = _modes[module].pop()

    with ExitStack() as stack:
        with _modes_change:
            for module in modules:
                _modes.setdefault(module, []).append(module.training)
            stack.callback(put_back)
            model.eval()
        yield


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_exporting() -> bool:
    """Whether `torch.export` is tracing; before torch 2.7 other compilers look the same."""
    asks = getattr(torch.compiler, "is_exporting", None)
    return asks is not None and asks()
