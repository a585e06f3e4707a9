"""The loss of early exits: the LM head on the streams that enter the routed layers.

Shapes: C routed layers, B batch, T positions, N predicted tokens, d model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..base.contexts import hooked, of_this_thread
from ..base.lm_head import LMHead, predicting
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, stream_given
from ..execution.context import unpack
from ..inference.calibration import active_routings
from ..routing.routing import ROUTING
from .trace_statistics import stack, token_mean

if TYPE_CHECKING:
    from .losses import LossInputs


class Exits(dict[int, torch.Tensor]):
    """Layer index -> the stream `[B, T, d]` that entered the routed layer, with graph.

    Attributes:
        lm_head: The model's.
        token_mask: Bool `[B, T]`, true at real tokens, whether or not gates decide about them;
            None: all are real.
    """

    lm_head: LMHead
    token_mask: torch.Tensor | None = None
    with_graph = False


@contextmanager
def observe_exits(model: nn.Module) -> Iterator[Exits]:
    """Keep the streams that enter the routed layers in the block's last forward pass.

    Raises:
        ValueError: No depth-routed adapter is active.
    """
    exits = Exits()
    layers = stack_of(model).layers
    exits.lm_head = LMHead(model)

    @of_this_thread
    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        # Else a reference's pass, behind that of the loss.
        if torch.is_grad_enabled() or not exits.with_graph:
            exits[getattr(layer, ROUTING).layer_index] = stream_given(args, kwargs)
            exits.token_mask = unpack(dict(kwargs)).token_mask
            exits.with_graph = torch.is_grad_enabled()

    indices = [routing.layer_index for routing in active_routings(model)]
    with hooked(layers[i].register_forward_pre_hook(keep, with_kwargs=True) for i in indices):
        try:
            yield exits
        finally:
            exits.clear()


def exit_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Mean next-token loss, in nats, of the LM head on the stream into each routed layer.

    With L exits in all, the final one included, weights `lm` 1/L and `exit` (L - 1)/L give the mean
    over exits.
    """
    exits: Exits | None = inputs.observed.get(observe_exits)
    if exits is None:
        return None
    if inputs.labels is None:
        raise ValueError("the exit loss needs labels in the batch")
    return exit_cross_entropy(exits, inputs.labels, exits.token_mask)


def exit_cross_entropy(
    exits: Exits, labels_BT: torch.Tensor, real_BT: torch.Tensor | None
) -> torch.Tensor:
    """`exit_loss` over all processes; the backward pass makes each layer's logits again."""
    counted_BT = predicting(labels_BT, real_BT)
    targets_N = labels_BT[:, 1:][counted_BT]
    losses: list[torch.Tensor] = []
    again = partial(checkpoint, exits.lm_head.token_losses, use_reentrant=False)
    for stream_BTd in exits.values():
        rows_Nd = stream_BTd[:, :-1][counted_BT.to(stream_BTd.device)]
        losses.append(again(rows_Nd, targets_N))
    losses_CN = stack(losses)
    return token_mean(losses_CN, torch.ones_like(losses_CN, dtype=torch.bool)).mean()
