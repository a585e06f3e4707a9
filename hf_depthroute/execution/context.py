"""`ForwardContext`: what a forward pass hands to its layers besides the stream.

Shapes: B batch, T positions, d model width, N longest n-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.cache import cache_of, last_tokens, remember_tokens
from ..base.sublayers import Kwargs
from ..parts.memory import continued, over_padding, suffixes

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan

CONTEXT = "depth_route_context"  # the keyword that carries it to the layers

# From a layer, its input `[B, 1, d]`, its keyword arguments and the context to its output; None if
# the general pass has to run.
Step = Callable[[nn.Module, Tensor, dict[str, Any], "ForwardContext"], Tensor | None]


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Data of one forward pass: from the stack to its layers, and from layers to later ones.

    Passes never share one.

    Attributes:
        adapters: The adapter of each layer that is routed in this pass, by layer index; None: those
            that are active when a layer runs. Another thread may switch them meanwhile.
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
        suffixes: The n-grams of this call alone, int64 `[B, T, N]` by `N`; the first layer that
            looks some up makes them for all.
    """

    adapters: Mapping[int, str] | None = None
    token_mask: Tensor | None = None
    last_tokens: Tensor | None = None
    token_ids: Tensor | None = None
    starts: Tensor | None = None
    steps: Mapping[nn.Module, Step] | None = None
    unrouted: frozenset[nn.Module] | None = None
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    suffixes: dict[int, Tensor] = field(default_factory=dict)

    def ngrams(self, plan: RoutePlan, kwargs: Kwargs) -> Tensor:
        """A layer's n-grams of a call, int64 `[B, T, N]`, with the earlier tokens of its KV cache,
        which then holds these.

        A layer asks once in a forward pass. Where `token_mask` has padding, the cache holds the
        last real tokens before it.

        Raises:
            ValueError: There are no token ids, or the cache was filled without the memory.
        """
        if self.token_ids is None:
            raise ValueError(
                f"layer {plan.layer_index}: its memory needs the token ids; call the whole model"
            )
        order = plan.config.ngram_order
        if order not in self.suffixes:
            made = suffixes(self.token_ids, order, self.token_mask, self.starts)
            self.suffixes[order] = made
        ngrams = self.suffixes[order]
        cache = cache_of(kwargs)
        if cache is None:
            return ngrams
        before = last_tokens(cache, plan.layer_index, ngrams.shape[-1] - 1)
        if before is not None:
            before = before.to(ngrams.device)
            ngrams = continued(ngrams, before)
        held = ngrams[..., :-1]
        if self.token_mask is not None:
            held = over_padding(held, self.token_mask.to(held.device), before)
        remember_tokens(cache, plan.layer_index, held)
        return ngrams

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
            suffixes={},
        )


def unpack(kwargs: dict[str, Any]) -> ForwardContext:
    """Take the context out of a layer's keyword arguments; an empty one if there is none."""
    return kwargs.pop(CONTEXT, None) or ForwardContext()
