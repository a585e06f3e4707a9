"""Mistakes that raise nothing and show in no output: said once, where they are made.

Nothing here waits for the device in a forward pass that is repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..files.shown import DepthRouteWarning
from ..parts.gates import GATES
from .thresholds import NOT_FITTED, ScoreQuantiles

if TYPE_CHECKING:
    from ..config.adapter import DepthRouteConfig
    from .plan import RoutePlan
    from .routing import Routing

UNWATCHED = (
    "this forward pass trains routers without the routing losses, which hold their budget: use "
    "DepthRouteTrainer, DepthRouteCallback, or record_routes with routing_losses"
)
IN_EVALUATION_MODE = (
    "a loss was back-propagated through a routed model in evaluation mode: the choice of a path is "
    "hard there, so the language-model loss does not reach the gates; call model.train() before "
    "training"
)
FROZEN = (
    "no parameter of the routed decoder trains: an adapter that was loaded is frozen. To train it, "
    "load it with PeftModel.from_pretrained(base, folder, is_trainable=True)"
)


def warn_of_training(
    decoder: nn.Module, active: Mapping[Routing, DepthRouteConfig], inputs: torch.Tensor
) -> None:
    """Warn of a training step of `decoder` that trains nothing, or routers without their losses.

    `active` are the configurations of its active routed layers, `inputs` its ids or embeddings.
    """
    trained = (routing for routing, config in active.items() if _trains(routing, config))
    training = next(trained, None)
    if training is not None:
        if not training.state.settings.recorders:
            warnings.warn(UNWATCHED, stacklevel=3)
        return
    if not active or inputs.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in decoder.parameters()):
        warnings.warn(FROZEN, stacklevel=3)


def warn_of_backward(routing: Routing, config: DepthRouteConfig, *outputs: torch.Tensor) -> None:
    """Warn if gradients come back to a gate that trains, through a layer in evaluation mode.

    Said by the adapter's last layer with a gate only, which every gradient of a loss passes.
    """
    if routing.layer_index not in config.gated_layers()[-1:]:
        return

    def warn(gradient: torch.Tensor) -> None:
        if _trains(routing, config):
            warnings.warn(IN_EVALUATION_MODE, stacklevel=2)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(warn)


def warn_of_thresholds(routing: Routing, plan: RoutePlan) -> None:
    """Warn, once a model, if inference is to compare with thresholds that were never fitted."""
    config = plan.config
    if plan.budget >= 1.0 or plan.rule not in ("threshold", "running"):
        return
    if not config.takes_budget() or routing.state.settings.selection:
        return
    if routing.layer_index not in config.gated_layers()[:1]:
        return
    table = cast(ScoreQuantiles, routing.depth_route_quantiles[plan.adapter])
    if table.updates.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not table.fitted():
        warnings.warn(NOT_FITTED, DepthRouteWarning, stacklevel=2)


def _trains(routing: Routing, config: DepthRouteConfig) -> bool:
    """Whether its gate trains, and needs training mode and losses for it; a soft one does not."""
    if GATES[config.gate].soft:
        return False
    return any(parameter.requires_grad for parameter in routing.depth_route_gate.parameters())
