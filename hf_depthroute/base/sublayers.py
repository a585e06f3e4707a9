"""The attention and the FFN of a decoder layer, by its row of the family table:
what they read and what they add.

Shapes: B batch, T positions, d model width. An update is what a sublayer adds to the residual
stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .families import Family

# From `[..., n, d]` to `[..., n, d]`, row by row.
RowMap = Callable[[Tensor], Tensor]

Kwargs = dict[str, Any]  # keyword arguments of a decoder layer


def norm_of(layer: nn.Module, family: Family, part: str) -> RowMap:
    """The norm before `part`, `"attention"` or `"ffn"`; an identity if there is none."""
    name = getattr(family, f"{part}_norm")
    if name is None:
        return lambda x: x
    return getattr(layer, name)


def attention_update(layer: nn.Module, family: Family, normed: Tensor, kwargs: Kwargs) -> Tensor:
    """The attention's update of the stream, `[B, T, d]`, from its normed input."""
    return behind(layer, family, "attention", getattr(layer, family.attention)(normed, **kwargs)[0])


def attended(
    layer: nn.Module, family: Family, target: Tensor, read: Tensor, kwargs: Kwargs
) -> Tensor:
    """`target` and the attention's update from the stream `read`, `[B, T, d]`."""
    normed = norm_of(layer, family, "attention")(read)
    return target + attention_update(layer, family, normed, kwargs)


def ffn_map(layer: nn.Module, family: Family) -> RowMap:
    """From what the FFN reads to what it adds to the stream: `[..., n, d] -> [..., n, d]`."""
    ffn = getattr(layer, family.ffn)
    if family.ffn_post_norm or family.ffn_dropout or family.residual_scale:
        return lambda x: behind(layer, family, "ffn", ffn(x))
    return ffn


def router_of(layer: nn.Module, family: Family) -> nn.Module | None:
    """The router of a layer's experts, `[N, d] -> (logits [N, E], weights, chosen)`;
    None if the layer has none."""
    ffn = getattr(layer, family.ffn)
    if hasattr(ffn, family.experts):
        return ffn.gate
    return None


def behind(layer: nn.Module, family: Family, part: str, update: Tensor) -> Tensor:
    """A sublayer's output as it is added to the stream: normed, dropped out or scaled."""
    for name in (getattr(family, f"{part}_post_norm"), getattr(family, f"{part}_dropout")):
        if name is not None:
            update = getattr(layer, name)(update)
    if family.residual_scale is None:
        return update
    return update * getattr(layer, family.residual_scale)


def normed_for_ffn(layer: nn.Module, family: Family, before: Tensor, after: Tensor) -> Tensor:
    """The FFN's input, normed, from the streams before and after the attention."""
    read = after
    if family.parallel:
        read = before
    return norm_of(layer, family, "ffn")(read)


def template_norm(layer: nn.Module, family: Family, part: str) -> tuple[Any, bool]:
    """A norm of the kind that a branch in place of `part` starts with,
    and whether its values mean the same there.

    Before `part` where there is one. A norm after it is of the right kind, but scales something
    else.
    """
    front = getattr(family, f"{part}_norm")
    if front is not None:
        return getattr(layer, front), True
    return getattr(layer, getattr(family, f"{part}_post_norm")), False


def width_of(layer: nn.Module, family: Family) -> int:
    """`d`, read from a norm of the layer; OLMo's have no weights."""
    norm, _ = template_norm(layer, family, "ffn")
    weight = getattr(norm, "weight", None)
    return int(norm.normalized_shape[-1] if weight is None else weight.shape[-1])


def stream_given(args: tuple[Any, ...], kwargs: Kwargs) -> Tensor:
    """The stream in what a decoder layer is called with: the first argument, or `hidden_states`."""
    return args[0] if args else kwargs["hidden_states"]


def arguments_given(layer: Any, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[Tensor, Kwargs]:
    """The stream, and by name the other arguments, that a swapped layer is called with."""
    named = kwargs | dict(zip(layer._argument_names, args[1:]))
    named.pop("hidden_states", None)
    return stream_given(args, kwargs), named


def hidden_of(output: Any) -> Tensor:
    """The stream in what a decoder layer returns; some families return attention weights too."""
    if isinstance(output, tuple):
        return output[0]
    return output
