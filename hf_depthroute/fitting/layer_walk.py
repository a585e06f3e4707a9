"""The decoder layers of a model one by one, on the hidden states that the layers before them left.

Whatever the number of layers, a walk costs one forward pass of the text, and holds the hidden
states between two layers, not those of all.

Shapes: B batch, T positions, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from ..base.cache import without_cache
from ..base.contexts import hooked, of_this_thread
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, arguments_given, hidden_of
from ..data.batches import device_of, document_starts, token_mask
from ..execution.call import RoutedCall
from ..execution.context import ForwardContext, unpack
from ..execution.layer import routed_call
from ..inference.non_finite import NonFiniteError
from ..routing.plan import RoutePlan
from ..routing.routing import ROUTING, Routing
from ..routing.trace import full_depth


class LayerWalk:
    """The arguments of every decoder layer on batches, as of `model_inputs`.

    A forward pass finds them in which only the first layer computes.

    Attributes:
        layers: The decoder layers.
        real: Bool `[B, T]` of each batch: the real tokens.
    """

    def __init__(self, model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> None:
        self.layers = list(stack_of(model).layers)
        self.real = [token_mask(batch) for batch in batches]
        self._text = [(batch["input_ids"], document_starts(batch)) for batch in batches]
        self._first: list[torch.Tensor] = []
        self._given: list[list[dict[str, Any]]] = []
        handles = []
        for index, layer in enumerate(self.layers):
            note = of_this_thread(partial(self._note, index))
            handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
        with hooked(handles), full_depth(model), torch.no_grad(), _passed_through(self.layers):
            for batch in batches:
                self._given.append([])
                model(**batch, use_cache=False, logits_to_keep=1)

    def _note(self, index: int, layer: Any, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        h, given = arguments_given(layer, args, kwargs)
        unpack(given)  # what it says is not needed here, or made anew
        if index == 0:
            self._first.append(h)
        self._given[-1].append(without_cache(given))

    def routing(self, index: int) -> Routing | None:
        """The adapter state of layer `index`; None if it is not routed."""
        return self.layers[index]._modules.get(ROUTING)  # type: ignore[return-value]

    def first(self) -> list[torch.Tensor]:
        """The input of the first layer, `[B, T, d]` of each batch."""
        return list(self._first)

    def plan(self, index: int) -> RoutePlan | None:
        """How layer `index` routes; None if it does not."""
        routing = self.routing(index)
        if routing is None:
            return None
        return routing.plan(False)

    def run(self, index: int, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs `[B, T, d]` of layer `index`, which is not routed, one for each batch."""
        layer = self.layers[index]
        return [hidden_of(layer(h, **given[index])) for h, given in zip(states, self._given)]

    def calls(
        self, index: int, states: Sequence[torch.Tensor], plan: RoutePlan
    ) -> list[RoutedCall]:
        """The routed part of layer `index` for each batch, not decided and not run."""
        layer = self.layers[index]
        device = device_of(getattr(layer, ROUTING), layer)
        calls = []
        for h, of_batch, real, (ids, starts) in zip(states, self._given, self.real, self._text):
            h, given = send_to_device((h, of_batch[index]), device)
            context = ForwardContext(token_mask=real, token_ids=ids, starts=starts)
            calls.append(routed_call(layer, plan, h, context, dict(given), decides=False))
        return calls


@contextmanager
def _passed_through(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block layers but the first give back their input, in its output's form."""
    outputs: list[Any] = []

    def note(layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        outputs[:] = [output]

    def passed(
        hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor | tuple[Any, ...]:
        (first,) = outputs
        if isinstance(first, tuple):
            return hidden_states, *first[1:]
        return hidden_states

    before = [layer.__dict__.get("forward") for layer in layers]
    with hooked([layers[0].register_forward_hook(of_this_thread(note))]):
        for layer in layers[1:]:
            layer.__dict__["forward"] = passed
        try:
            yield
        finally:
            for layer, forward in zip(layers[1:], before[1:]):
                if forward is None:
                    del layer.__dict__["forward"]
                else:
                    layer.__dict__["forward"] = forward


def check_finite(index: int, streams: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> None:
    """Raise `NonFiniteError` unless the stream behind a layer, `[B, T, d]` of each batch, is finite
    at the real tokens."""
    wrong = 0
    for stream, mask in zip(streams, real, strict=True):
        wrong += int((~stream.isfinite().all(-1) & mask.to(stream.device)).sum())
    if wrong == 0:
        return
    tokens = sum(int(mask.sum()) for mask in real)
    dtype = str(streams[0].dtype).removeprefix("torch.")
    raise NonFiniteError(
        f"the stream behind layer {index} is not finite in {dtype} for {wrong} of {tokens} tokens; "
        "load the base in float32 or bfloat16, or check its weights"
    )


Visit = Callable[[int, list[RoutedCall]], list[torch.Tensor]]


@torch.no_grad()
def walk_layers(walk: LayerWalk, visit: Visit) -> None:
    """Call `visit(index, calls)` of every routed layer in order; it returns the outputs."""
    states = walk.first()
    for index in range(len(walk.layers)):
        plan = walk.plan(index)
        if plan is None:
            states = walk.run(index, states)
        else:
            states = visit(index, walk.calls(index, states, plan))
