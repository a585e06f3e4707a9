"""`Stack`: the decoder of a model, found once, and kept with a model that is routed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from .families import Family, find_decoder, find_family

STACK = "_depth_route_stack"  # the attribute of a decoder that holds its own `Stack`


@dataclass(frozen=True, eq=False)
class Stack:
    """The decoder of a model.

    Attributes:
        family: The model's row of the family table.
        decoder: The module that holds the decoder layers.
    """

    family: Family
    decoder: nn.Module

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return cast(nn.ModuleList, getattr(self.decoder, self.family.layers))

    def keep(self) -> None:
        """From now on `stack_of` answers with this one, for the decoder and modules around it."""
        setattr(self.decoder, STACK, self)

    def forget(self) -> None:
        """Undo `keep`."""
        self.decoder.__dict__.pop(STACK, None)


def stack_of(model: nn.Module) -> Stack:
    """The decoder of a transformers model, or of a module around one: the one that is kept,
    or else what is found.

    Raises:
        UnsupportedModelError: The model's family is not supported, or it has no decoder or more
            than one.
    """
    kept = kept_stack(model)
    if kept is not None:
        return kept
    family = find_family(model)
    return Stack(family, find_decoder(model, family))


def unwrapped(model: nn.Module) -> Any:
    """The transformers model in a `PeftModel`; any other model is its own."""
    if hasattr(model, "get_base_model"):
        return cast(Any, model).get_base_model()
    return model


@contextmanager
def keeping(model: nn.Module) -> Iterator[Stack]:
    """`stack_of(model)`, kept from here on; if the block raises, only if it was before.

    Raises:
        UnsupportedModelError: As `stack_of`.
    """
    before = kept_stack(model)
    stack = before or stack_of(model)
    stack.keep()
    try:
        yield stack
    except BaseException:
        if before is None:
            stack.forget()
        raise


def kept_stack(model: nn.Module) -> Stack | None:
    """The kept `Stack` of the decoder in `model`; None without one.

    It lies with the decoder, a few modules deep, and not in a table by model: a copy of the model
    has its own.
    """
    for module in model.modules():
        if STACK in module.__dict__:
            return cast(Stack, module.__dict__[STACK])
    return None
