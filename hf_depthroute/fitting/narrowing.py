"""Layers that need no router: those left out of the adapter, and those that lose their gates.

Shapes: B rows of a batch, R rows of all processes, L routed layers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from torch import nn

from ..adapter.tuner import get_depth_routed_model
from ..base.distributed import rows_of_all
from ..base.lm_head import predicting, token_losses
from ..config.adapter import DepthRouteConfig, renumber
from ..data.batches import labels_of
from ..files.versions import versions
from ..inference.calibration import active_routings, gated_routings, set_thresholds
from ..routing.trace import count_routes, record_routes
from ..training.record import remember_training, trainable_parameters
from .text import Batches, tokens_of

MISSED = 0.1  # from the share that was asked for, one that is further off has missed it


def row_losses(model: nn.Module, batches: Batches) -> torch.Tensor:
    """The sum of each row's next-token losses, nats, and how many there are, `[R, 2]`."""
    rows = [torch.empty(0, 2, dtype=torch.float64)]
    for batch in batches:
        labels = labels_of(batch)
        counted = predicting(labels, batch.get("attention_mask"))
        logits = model(**batch, use_cache=False).logits[:, :-1]
        losses = token_losses(logits[counted], labels[:, 1:][counted]).double()
        sums = losses.new_zeros(counted.shape).masked_scatter(counted, losses).sum(1)
        rows.append(torch.stack([sums, counted.sum(1).to(sums)], dim=1).cpu())
    return torch.cat(rows)


def parts_of_mean(rows_R2: torch.Tensor) -> torch.Tensor:
    """Each row's part, from its sum and count, in the mean over all tokens: their mean is that.

    Rows without a token that counts are left out.
    """
    rows_R2 = rows_R2[rows_R2[:, 1] > 0]
    return rows_R2[:, 0] * len(rows_R2) / rows_R2[:, 1].sum()


def standard_error(values_R: torch.Tensor) -> float | None:
    """The standard error of the mean over rows; None for a single row."""
    if len(values_R) > 1:
        return float(values_R.std() / len(values_R) ** 0.5)
    return None


def rises(loss_R: torch.Tensor, before_R: torch.Tensor) -> bool:
    """Whether the loss is higher than before by more than the standard error of the rows'
    differences."""
    rise_R = loss_R - before_R
    return float(rise_R.mean()) > (standard_error(rise_R) or 0.0)


def tokens_and_losses(
    tokens: int, held_out: Batches, dense_R: torch.Tensor, loss_R: torch.Tensor
) -> dict[str, object]:
    """The part of every fit's record: tokens, and the losses `[R]` of dense and routed model."""
    return {
        "tokens": tokens,
        "held_out_tokens": tokens_of(held_out),
        "loss_dense": float(dense_R.mean()),
        "loss": float(loss_R.mean()),
        "loss_over_dense_error": standard_error(loss_R - dense_R),
    }


def remember_fit(
    model: PeftModel, fit: dict[str, object], started: float, seconds_of: dict[str, float]
) -> PeftModel:
    """Keep the record of a fit with the adapter, and leave the model in eval mode.

    It `started` at that `time.monotonic()`; `seconds_of` are those of every phase.
    """
    record = {
        "fit": fit,
        "seconds": round(time.monotonic() - started, 1),
        "seconds_of": seconds_of,
        "trainable_parameters": trainable_parameters(model),
        "versions": versions(),
    }
    remember_training(model, record)
    return model.eval()


class Trial(NamedTuple):
    """The outcome of a pass over the rows of all processes.

    Attributes:
        loss_R: The part of each row in the mean loss of all tokens, nats (`parts_of_mean`).
        ran_R: The share of the routed layers' tokens that ran in full, of each row.
        shares: The share of each layer's tokens that ran in full.
    """

    loss_R: torch.Tensor
    ran_R: torch.Tensor
    shares: dict[int, float]


def trial_of(model: nn.Module, batches: Batches) -> Trial:
    """One pass of this process's rows, with the thresholds as they are."""
    losses = [torch.empty(0, 2, dtype=torch.float64)]
    shares = [torch.empty(0, dtype=torch.float64)]
    with count_routes(model) as counter:
        for batch in batches:
            with record_routes(model) as trace:
                losses.append(row_losses(model, [batch]))
            ran_LB = torch.stack([(record.mask & record.real).sum(1) for record in trace.values()])
            seen_LB = torch.stack([record.real.sum(1) for record in trace.values()])
            shares.append((ran_LB.sum(0).double() / seen_LB.sum(0).clamp(min=1)).cpu())
    return Trial(
        parts_of_mean(rows_of_all(torch.cat(losses))),
        rows_of_all(torch.cat(shares)),
        counter.full_ratio(),
    )


def layer_states(model: nn.Module) -> dict[int, dict[str, object]]:
    """A copy of what every routed layer holds, by its index."""
    return {
        routing.layer_index: copy.deepcopy(routing.state_dict())
        for routing in active_routings(model)
    }


def restore(model: nn.Module, state: Mapping[int, dict[str, object]]) -> None:
    """Give every layer what it held; of a layer that has become static, the gate is left out."""
    for routing in active_routings(model):
        if (held := state.get(routing.layer_index)) is not None:
            routing.load_state_dict({name: held[name] for name in routing.state_dict()})


def narrowed(model: PeftModel, dense: Sequence[int] = (), static: Sequence[int] = ()) -> PeftModel:
    """The model with the layers in `dense` not routed and those in `static` without gates.

    The others hold what they held, their threshold included, and the budget that is left; where no
    other is left, the model stays as it is.
    """
    config = copy.deepcopy(active_routings(model)[0].active_config())
    layers = cast("list[int]", config.layers)
    gated = [index for index in layers if index not in (*dense, *static)]
    if not gated or len(gated) == len(layers):
        return model
    config.budget = min(1.0, max(0.01, (config.budget * len(layers) - len(dense)) / len(gated)))
    renumber(config, {index: index for index in layers if index not in dense})
    config.static_layers = [index for index in layers if index in static] or None
    thresholds = {
        routing.layer_index: routing.active_quantiles()(routing.budget())
        for routing in gated_routings(model)
    }
    fewer = _injected(model, config, layer_states(model))
    # The tables are of all layers together: at the budget of those that are left, they would give
    # another threshold.
    for routing in gated_routings(fewer):
        table = routing.active_quantiles()
        table.set(thresholds[routing.layer_index].expand_as(table.values))
    return fewer


def _injected(
    model: PeftModel, config: DepthRouteConfig, state: Mapping[int, dict[str, object]]
) -> PeftModel:
    """The base of `model` with another configuration of the adapter, and what its layers hold."""
    routed = get_depth_routed_model(model.unload(), config)
    restore(routed, state)
    return routed.eval()


def without_layers(
    model: PeftModel, found: Trial, dense: Sequence[int], text: Batches
) -> tuple[PeftModel, Trial]:
    """The model with the layers in `dense` not routed, with thresholds for what is left.

    It stays as it is where no threshold of the others holds their budget: the scores of layers that
    add nothing are alike.
    """
    config = active_routings(model)[0].active_config()
    state = layer_states(model)
    fewer = narrowed(model, dense=dense)
    if fewer is model:
        return model, found
    set_thresholds(fewer, text)
    without = trial_of(fewer, text)
    share = sum(without.shares.values()) / len(without.shares)
    if abs(share - gated_routings(fewer)[0].budget()) > MISSED:
        return _injected(fewer, config, state), found
    return fewer, without


def without_gates(
    model: PeftModel, found: Trial, static: Sequence[int], text: Batches
) -> tuple[PeftModel, Trial]:
    """The model with the layers in `static` static, unless that costs more than noise."""
    if not static or len(static) == len(found.shares):
        return model, found
    config = active_routings(model)[0].active_config()
    state = layer_states(model)
    fewer = narrowed(model, static=static)
    set_thresholds(fewer, text)
    without = trial_of(fewer, text)
    if rises(without.loss_R, found.loss_R):
        return _injected(fewer, config, state), found
    return fewer, without
