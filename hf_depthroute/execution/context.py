"""`ForwardContext`: what a forward pass hands to its layers besides the stream.

Shapes: B batch, T positions, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = "depth_route_context"  # the keyword that carries it to the layers

# From a layer, its input `[B, 1, d]`, its keyword arguments and the context to its output; None if
# the general pass has to run.
Step = Callable[[nn.Module, Tensor, dict[str, Any], "ForwardContext"], Tensor | None]


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Data of one forward pass: from the stack to its layers, and from layers to later ones.

    Passes never share one.

    Attributes:
        token_mask: Bool `[B, T]`, true at real tokens; all are real when it is None.
        last_tokens: Bool `[B, T]`, the tokens that `phases="prefill"` runs full; None without it.
        token_ids: Int64 `[B, T]`; None if no active adapter reads them.
        starts: Bool `[B, T]`, true where a document starts after another one; None if the call does
            not say, and without `token_ids`.
        steps: The decoding steps of the layers that have one.
        unrouted: Layers that run this decoding step as the base does, because routing it would not
            pay; None: no layer.
        kept: Bool `[B, T]` by adapter and layer index: the tokens that have not left early, filled
            by the layers as they run.
        made: What layers make of all this in the same way, by a key, so that the first of them
            makes it for all.
    """

    token_mask: Tensor | None = None
    last_tokens: Tensor | None = None
    token_ids: Tensor | None = None
    starts: Tensor | None = None
    steps: Mapping[nn.Module, Step] | None = None
    unrouted: frozenset[nn.Module] | None = None
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    made: dict[Hashable, Tensor] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, which the first layer that asks for `key` in this pass calls for all."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

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
            token_ids=changed(self.token_ids),
            starts=changed(self.starts),
            made={},
        )


def unpack(kwargs: dict[str, Any]) -> ForwardContext:
    """Take the context out of a layer's keyword arguments; an empty one if there is none."""
    return kwargs.pop(CONTEXT, None) or ForwardContext()
