"""`ForwardContext`: what a forward pass hands to the layers of its decoder stack, besides the stream.

Shapes: B batch, T positions, N longest n-gram, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = "depth_route_context"  # the keyword that carries it to the layers

# From a layer, its input `[B, 1, d]`, its keyword arguments and, for a memory, the new tokens' n-grams to its output;
# None if the general pass has to run.
Step = Callable[[nn.Module, Tensor, dict[str, Any], Tensor | None], Tensor | None]


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Data of one forward pass: from the stack to its layers, and from layers to later ones. Passes never share one.

    Attributes:
        token_mask: Bool `[B, T]`, true at real tokens; all are real when it is None.
        last_tokens: Bool `[B, T]`, the tokens that `phases="prefill"` runs full; None without it.
        ngrams: Int64 `[B, T, N]`, the n-grams that end at each token; None without a memory.
        steps: The decoding steps of the layers that have one.
        unrouted: Layers that run this decoding step as the base does, because routing it would not pay; None: no layer.
        kept: Bool `[B, T]` by layer index: the tokens that have not left early, filled by the layers as they run.
    """

    token_mask: Tensor | None = None
    last_tokens: Tensor | None = None
    ngrams: Tensor | None = None
    steps: Mapping[nn.Module, Step] | None = None
    unrouted: frozenset[nn.Module] | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | int, **kwargs: Any) -> ForwardContext:
        """Its tensors on `device`; accelerate asks for it before a layer that is elsewhere."""
        return self.each(lambda x: x.to(device, **kwargs))

    def each(self, change: Callable[[Tensor], Tensor]) -> ForwardContext:
        """The context with `change` of the tensors that it was made with."""

        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return replace(
            self,
            token_mask=changed(self.token_mask),
            last_tokens=changed(self.last_tokens),
            ngrams=changed(self.ngrams),
        )


def unpack(kwargs: dict[str, Any]) -> ForwardContext:
    """Take the context out of a layer's keyword arguments; an empty one where the layer was called alone."""
    context: ForwardContext | None = kwargs.pop(CONTEXT, None)
    return ForwardContext() if context is None else context
