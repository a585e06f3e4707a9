"""Entering a model and leaving it: every decoder layer's class, and the hook that hands down the token mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .families import find_decoder, find_family
from .layer import TOKEN_MASK, swap, unswap


def enter(model: nn.Module) -> nn.ModuleList:
    """Switch every decoder layer of `model` to its routed subclass; the layers. A second call changes nothing."""
    family = find_family(model)
    decoder = find_decoder(model, family)
    layers = getattr(decoder, family.layers)
    if _pass_token_mask not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_pass_token_mask, with_kwargs=True)
    for layer in layers:
        swap(layer)
    return layers


def leave(model: nn.Module) -> None:
    """Undo `enter` and drop all adapter state of the decoder layers."""
    family = find_family(model)
    decoder = find_decoder(model, family)
    for layer in getattr(decoder, family.layers):
        unswap(layer)
    for key, hook in list(decoder._forward_pre_hooks.items()):
        if hook is _pass_token_mask:
            del decoder._forward_pre_hooks[key]
            decoder._forward_pre_hooks_with_kwargs.pop(key, None)


def _pass_token_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder stack: hand the 2D attention mask down to the layers as a keyword.

    Layers see a 4D mask, a boolean mask, none, or a block mask, depending on the attention implementation.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    inputs = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if x is not None), None)
    if inputs is None or mask.shape[1] < inputs.shape[1]:
        return None
    # With a cache, the mask covers past positions too; the new ones come last.
    return args, {**kwargs, TOKEN_MASK: mask[:, mask.shape[1] - inputs.shape[1] :].bool()}
