"""Measurements of a trained run besides its validation losses.

Shapes: B batch, T positions, N tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from hf_depthroute.base.lm_head import token_losses
from hf_depthroute.evaluation.cost import route_cost
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.inference.calibration import calibrate, gated_routings, use_selection
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import count_routes, record_routes
from hf_depthroute.training.trainer import DepthRouteTrainingArguments

from . import metrics
from .blocks import Blocks, spread, to_batches
from .refresh import refresh_cost
from .utility import exact_utility, utility_labels

CALIBRATION_BLOCKS = 64  # training blocks that set the thresholds
AUC_BLOCKS = 24  # validation blocks that the gate is compared with the oracle on
FORKED_BLOCKS, FORKED_POSITIONS = 4, 8  # of the exact forks

_DIAGNOSTICS = ("gate_prob", "full_ratio", "score_var", "q_distance", "q_cosine")

Batches = list[dict[str, torch.Tensor]]


def autocast(arguments: DepthRouteTrainingArguments) -> torch.autocast:
    """The mixed precision of a run, in which its losses are evaluated too."""
    return torch.autocast(arguments.device.type, dtype=torch.bfloat16, enabled=arguments.bf16)


def measure(
    model: Any,
    blocks: Blocks,
    arguments: DepthRouteTrainingArguments,
    rule: str,
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The part of `summary.json` that is measured on the trained `PeftModel`,
    which ends up calibrated.

    `rule` is what the validation losses were evaluated with, `"topk"` or `"threshold"`; `rows` are
    `metrics.jsonl`.
    """
    # Without the autocast that the Trainer wraps around a model's forward.
    inner = model.get_base_model()
    inner.eval()
    size, device = arguments.per_device_train_batch_size, arguments.device
    validation = to_batches(blocks.validation, size, device)
    with use_selection(model, rule):
        with autocast(arguments):
            losses, targets = losses_and_targets(inner, validation)
        compared = to_batches(spread(blocks.validation, AUC_BLOCKS), size, device)
        forked = to_batches(spread(blocks.validation, FORKED_BLOCKS), FORKED_BLOCKS, device)
        layers = compare_with_oracle(
            inner, compared, forked, arguments.oracle_window, arguments.oracle_gamma
        )
    for index, layer in layers.items():
        means = metrics.tail_means(rows, [f"{name}/layer_{index}" for name in _DIAGNOSTICS])
        layers[index] = {**dict(zip(_DIAGNOSTICS, means.values())), **layer}
    frequent = metrics.frequent_types(blocks.train, model.config.vocab_size)
    frequent_loss, rare_loss = metrics.split_loss(losses, targets, frequent)

    with autocast(arguments):
        if routings_of(model)[0].active_config().fixed_threshold is None:
            calibrate(inner, to_batches(spread(blocks.train, CALIBRATION_BLOCKS), size, device))
        with count_routes(model) as counter:
            threshold_loss = mean_loss(inner, validation)
        refresh = (
            refresh_cost(inner, validation[0], arguments.oracle, rounds=3)
            if arguments.uses_oracle()
            else None
        )
    return {
        "layers": {str(index): layer for index, layer in layers.items()},
        "threshold_loss": threshold_loss,
        "threshold_full_ratio": statistics.fmean(counter.full_ratio().values()),
        "frequent_loss": frequent_loss,
        "rare_loss": rare_loss,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "cost": cost_of(model, arguments),
        "refresh_over_forward": refresh,
    }


@torch.no_grad()
def losses_and_targets(model: Any, batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of every predicted token, and the token, both `[N]`."""
    losses, targets = [], []
    for batch in batches:
        ids_BT = batch["input_ids"]
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        targets.append(ids_BT[:, 1:].flatten())
        losses.append(token_losses(logits_BTV.flatten(0, 1), targets[-1]))
    return torch.cat(losses), torch.cat(targets)


@torch.no_grad()
def compare_with_oracle(
    model: Any, batches: Batches, forked: Batches, window: int, gamma: float
) -> dict[int, dict[str, Any]]:
    """Per layer: how well `p` tells which tokens gain from the full path,
    and the bias of layer-wide forks.

    In float32: the utilities are differences of losses, small against what rounding does to them.
    """
    indices = [routing.layer_index for routing in gated_routings(model)]
    collected: dict[int, list[tuple[torch.Tensor, ...]]] = {index: [] for index in indices}
    for batch in batches:
        with record_routes(model) as trace:
            model(**batch, use_cache=False, logits_to_keep=1)
        on_policy = utility_labels(model, batch, "on_policy", window=1)
        all_full = utility_labels(model, batch, "all_full", window, gamma)
        for index, parts in collected.items():
            near, far, probs = on_policy[index], all_full[index], trace[index].probs
            parts.append(
                (
                    probs[near.valid],
                    near.utility[near.valid],
                    probs[far.valid],
                    far.utility[far.valid],
                )
            )
    biases: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {index: [] for index in collected}
    for batch in forked:
        length = batch["input_ids"].shape[1]
        drawn = torch.randperm(max(1, length - window), generator=torch.Generator().manual_seed(0))
        positions = drawn[:FORKED_POSITIONS].sort().values
        layer_wide = utility_labels(model, batch, "all_full", window, gamma)
        exact = exact_utility(model, batch, positions, "all_full", window, gamma)
        for index, pairs in biases.items():
            pairs.append(
                (layer_wide[index].utility[:, positions.to(exact[index].device)], exact[index])
            )
    result: dict[int, dict[str, Any]] = {}
    for index, values in collected.items():
        probs, utility, probs_ahead, utility_ahead = (torch.cat(parts) for parts in zip(*values))
        result[index] = {
            "oracle_auc": metrics.oracle_auc(probs, utility),
            "oracle_auc_all_full": metrics.oracle_auc(probs_ahead, utility_ahead),
            "fork_bias": metrics.fork_bias(*(torch.cat(parts) for parts in zip(*biases[index]))),
        }
    return result


def cost_of(model: Any, arguments: DepthRouteTrainingArguments) -> dict[str, float]:
    """Inference and training cost in units of one full FFN on one token,
    mean over the routed layers."""
    routings = routings_of(model)
    full, none = (
        dict.fromkeys((routing.layer_index for routing in routings), share) for share in (1.0, 0.0)
    )
    gate, cheap = (
        route_cost(model, full_ratio=full).ffn_ratio - 1,
        route_cost(model, full_ratio=none).ffn_ratio,
    )
    training = metrics.training_ffn_ratio(
        layers=len(routings),
        branch=cheap - gate,
        gate=gate,
        budget=routings[0].active_config().budget,
        oracle=arguments.oracle if arguments.uses_oracle() else "none",
        oracle_interval=arguments.oracle_interval,
        cgs_interval=arguments.cgs_interval if arguments.cgs_weight > 0 else None,
        distilled=arguments.distill_weight > 0,
    )
    return {"inference_ffn_ratio": route_cost(model).ffn_ratio, "training_ffn_ratio": training}
