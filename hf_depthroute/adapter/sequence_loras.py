"""Passes in which PEFT tells LoRA's layers of the sequences in a batch.

Which adapter is whose (`adapter_names`), where an activated LoRA begins in each, or how X-LoRA
weighs its LoRAs for each token: such layers have to get whole sequences. So where they lie in what
a router skips, both paths are computed of every token. PEFT tells them from
`PeftModel._enable_peft_forward_hooks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from peft import XLoraModel
from peft.tuners.tuners_utils import BaseTunerLayer

from ..routing.stack import RoutedStack, adapters_now, routed_stack


def told_of_sequences(
    enable: Any, self: Any, *args: object, **kwargs: object
) -> AbstractContextManager[None]:
    """Around `enable`, PEFT's own, for the pass with these arguments."""
    hooks: AbstractContextManager[None] = enable(self, *args, **kwargs)
    told = isinstance(self.base_model, XLoraModel) or any(
        kwargs.get(name) is not None for name in self.special_peft_forward_args
    )
    stack = routed_stack(self) if told else None
    if stack is None or not _skip_other_layers(stack):
        return hooks
    return _unskipped(stack, hooks)


def _skip_other_layers(stack: RoutedStack) -> bool:
    """Whether a layer of another PEFT method lies in a part that is routed now."""
    for routing in adapters_now(stack.routed):
        layer = stack.layers[routing.layer_index]
        parts = [getattr(layer, stack.family.ffn)]
        if routing.active_target().skips_attention:
            parts = [getattr(layer, stack.family.attention), *parts]
        if any(isinstance(module, BaseTunerLayer) for part in parts for module in part.modules()):
            return True
    return False


@contextmanager
def _unskipped(stack: RoutedStack, hooks: AbstractContextManager[None]) -> Iterator[None]:
    with stack.state.override(executor="masked"), hooks:
        yield
