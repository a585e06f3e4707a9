"""Mistakes that raise nothing and show in no output: said once, where they are made.

Nothing here waits for the device in a forward pass that is repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from .quantiles import NOT_FITTED, ScoreQuantiles
from .trace import routings

if TYPE_CHECKING:
    from .decision import RoutePlan
    from .holder import Routing

UNWATCHED = (
    "this forward pass trains routers without the routing losses, which hold their budget: use DepthRouteTrainer, "
    "DepthRouteCallback, or record_routes with routing_losses"
)
IN_EVALUATION_MODE = (
    "a loss was back-propagated through a routed model in evaluation mode: the choice of a path is hard there, so the "
    "language-model loss does not reach the gates; call model.train() before training"
)
FROZEN = (
    "no parameter of the routed decoder trains: an adapter that was loaded is frozen. To train it, load it with "
    "PeftModel.from_pretrained(base, folder, is_trainable=True)"
)


def warn_of_training(decoder: nn.Module, holders: Iterable[Routing], inputs: torch.Tensor) -> None:
    """Warn of a training step that trains nothing, or routers without their losses.

    Args:
        decoder: The stack of decoder layers, in training mode.
        holders: The holders of its active routed layers.
        inputs: Ids or embeddings that it is called with.
    """
    holders = list(holders)
    for holder in holders:
        if _trains(holder):
            if not holder.recorders:
                warnings.warn(UNWATCHED, stacklevel=3)
            return
    if holders and not inputs.requires_grad and not any(p.requires_grad for p in decoder.parameters()):
        warnings.warn(FROZEN, stacklevel=3)


def warn_of_backward(holder: Routing, *outputs: torch.Tensor) -> None:
    """Warn if gradients come back through the outputs of a layer that is in evaluation mode and whose gate trains.

    Said by the adapter's last layer only, which every gradient of a loss passes.
    """
    if holder.layer_index != cast("list[int]", holder.active_config().layers)[-1]:
        return

    def warn(gradient: torch.Tensor) -> None:
        if _trains(holder):
            warnings.warn(IN_EVALUATION_MODE, stacklevel=2)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(warn)


def warn_of_thresholds(holder: Routing, plan: RoutePlan) -> None:
    """Warn if inference is about to compare scores with thresholds that were never fitted; said by one layer only."""
    config = plan.config
    if plan.budget >= 1.0 or plan.rule != "threshold" or not config.takes_budget():
        return
    if holder.selection or holder.layer_index != cast("list[int]", config.layers)[0]:
        return
    table = cast(ScoreQuantiles, holder.depth_route_quantiles[plan.adapter])
    if table.updates.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not table.fitted():
        warnings.warn(NOT_FITTED, stacklevel=2)


def warn_of_saving(model: nn.Module) -> None:
    """Warn if an adapter is about to be saved whose gates train and whose thresholds were never fitted."""
    for holder in routings(model):
        for name, table in holder.depth_route_quantiles.items():
            trained = any(parameter.requires_grad for parameter in holder.depth_route_gate[name].parameters())
            if trained and holder.config(name).takes_budget() and not cast(ScoreQuantiles, table).fitted():
                warnings.warn(f"adapter {name!r} is saved as it is: {NOT_FITTED}", stacklevel=4)
                return


def _trains(holder: Routing) -> bool:
    return any(parameter.requires_grad for parameter in holder.depth_route_gate.parameters())
