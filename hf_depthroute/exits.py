"""Early exit: the loss of reading every routed layer's input out through the tied LM head.

Shapes: B batch, T positions, N predicted tokens, d model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .averages import stack, token_mean
from .calibration import active_routings
from .families import find_decoder, find_family
from .readout import ReadOut


class Exits(Mapping[int, torch.Tensor]):
    """Layer index -> the stream that entered the routed layer, `[B, T, d]` with graph; filled by `observe_exits`."""

    def __init__(self, model: nn.Module) -> None:
        family = find_family(model)
        decoder = find_decoder(model, family)
        layers = getattr(decoder, family.layers)
        self.layers: dict[int, nn.Module] = {h.layer_index: layers[h.layer_index] for h in active_routings(model)}
        self.read_out = ReadOut(model)
        self._streams: dict[int, torch.Tensor] = {}

    def __getitem__(self, layer_index: int) -> torch.Tensor:
        return self._streams[layer_index]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._streams))

    def __len__(self) -> int:
        return len(self._streams)

    def keep(self, layer_index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._streams[layer_index] = args[0] if args else kwargs["hidden_states"]

    def forget(self) -> None:
        self._streams = {}


@contextmanager
def observe_exits(model: nn.Module) -> Iterator[Exits]:
    """Keep the streams that enter the routed layers in the last forward pass inside the block; changes nothing.

    Raises:
        ValueError: No depth-routed adapter is active.
    """
    exits = Exits(model)

    def keeper(index: int) -> Any:
        return lambda layer, args, kwargs: exits.keep(index, args, kwargs)

    handles = [layer.register_forward_pre_hook(keeper(i), with_kwargs=True) for i, layer in exits.layers.items()]
    try:
        yield exits
    finally:
        for handle in handles:
            handle.remove()
        exits.forget()


def exit_cross_entropy(exits: Exits, labels_BT: torch.Tensor, real_BT: torch.Tensor) -> torch.Tensor:
    """Mean over routed layers of the next-token cross-entropy of the stream's logits, in nats.

    Over the predicted tokens of all processes. Logits of one layer exist at a time; the backward pass makes them again.

    Args:
        exits: From `observe_exits`, after a forward pass.
        labels_BT: Labels as the model takes them, not shifted; -100 where nothing is to be predicted.
        real_BT: Bool, true at real tokens.
    """
    counted_BT = (labels_BT[:, 1:] != -100) & real_BT[:, 1:] & real_BT[:, :-1]
    targets_N = labels_BT[:, 1:][counted_BT]

    def token_losses(rows_Nd: torch.Tensor) -> torch.Tensor:  # [N]
        logits = exits.read_out(rows_Nd).float()
        return F.cross_entropy(logits, targets_N.to(logits.device), reduction="none")

    losses = []
    for stream_BTd in exits.values():
        rows_Nd = stream_BTd[:, :-1][counted_BT.to(stream_BTd.device)]
        losses.append(cast(torch.Tensor, checkpoint(token_losses, rows_Nd, use_reentrant=False)))
    losses_CN = stack(losses)
    return token_mean(losses_CN, torch.ones_like(losses_CN, dtype=torch.bool)).mean()
