"""Whether a model computes finite numbers, and where it first does not.

Finite weights can do it: a branch of 1e38 overflows. Greedy decoding then takes any token without a
word, and sampling ends in an error about probabilities. Nothing here waits for the device inside a
forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.contexts import hooked, of_this_thread
from ..base.stack import stack_of
from ..base.sublayers import hidden_of
from ..files.shown import OneLine
from ..routing.routing import ROUTING


class NonFiniteError(OneLine, RuntimeError):
    """A model computed NaN or infinity. The message is one line that names the first layer."""


@contextmanager
def finite_logits(model: Any) -> Iterator[None]:
    """Raise at the end of the block if a forward pass of the PEFT `model` gave non-finite logits.

    Until then such logits count as zero, so that sampling goes on.

    Raises:
        NonFiniteError: With the first layer whose output is not finite, in another pass over the
            same tokens.
    """
    base: Any = model.get_base_model()
    # Token ids [B, T], and whether it went wrong, on the device.
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(module: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> Any:
        # -inf is how a token is forbidden.
        wrong = out.logits.isnan().any() | out.logits.isposinf().any()
        passes.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0], wrong))
        out.logits = out.logits.masked_fill(wrong, 0.0)
        return out

    with base.register_forward_hook(of_this_thread(look), with_kwargs=True):
        yield
    wrong = []
    if passes:
        wrong = torch.stack([flag for _, flag in passes]).tolist()
    if any(wrong):
        read = _up_to([ids for ids, _ in passes], wrong.index(True))
        raise NonFiniteError(_where(model, [{"input_ids": read}]))


def _up_to(passes: Sequence[torch.Tensor], last: int) -> torch.Tensor:
    """The ids read by pass `last`; after the prompt, each pass reads one token."""
    first = last
    while first > 0 and passes[first].shape[1] == 1:
        if passes[first - 1].shape[0] != passes[first].shape[0]:
            break
        first -= 1
    return torch.cat(list(passes[first : last + 1]), dim=1)


def check_losses(
    model: nn.Module, losses: Sequence[float], batches: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    """Raise `NonFiniteError` unless every loss is finite; the layer is looked for on `batches`."""
    if not all(math.isfinite(loss) for loss in losses):
        raise NonFiniteError(_where(model, batches))


def _where(model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]) -> str:
    place = first_non_finite_layer(model, batches)
    if place is None:
        place = "the logits are not finite, and no layer's output is the first"
    return (
        f"{place}; train the adapter again, or use --dtype float32 if the base is loaded in a "
        "narrower one"
    )


@torch.no_grad()
def first_non_finite_layer(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> str | None:
    """The first layer whose output is not finite on `batches`, in words; None without one."""
    base: Any = model.get_base_model()
    layers = stack_of(base).layers
    for batch in batches:
        finite: dict[nn.Module, torch.Tensor] = {}

        def note(
            layer: nn.Module,
            args: object,
            out: object,
            finite: dict[nn.Module, torch.Tensor] = finite,
        ) -> None:
            finite[layer] = hidden_of(out).isfinite().all()

        given = {name: value.to(base.device) for name, value in batch.items() if name != "labels"}
        with hooked(layer.register_forward_hook(of_this_thread(note)) for layer in layers):
            base(**given, use_cache=False)
        for index, layer in enumerate(layers):
            if layer in finite and not bool(finite[layer]):
                kind = "not routed"
                if hasattr(layer, ROUTING):
                    kind = "routed: look at its gate and branch"
                return f"layer {index} ({kind}) is the first whose output is not finite"
    return None
