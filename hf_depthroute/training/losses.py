"""Routing losses, computed from a `RouteTrace`.

Adding a loss is one function and one row of `LOSSES`.

* `budget`, `alive`, `jepa`, `util`, `rank`: "Revisiting Auxiliary Losses for Conditional Depth
  Routing: An Empirical Study" (arXiv:2604.17228);
* `cgs`: "Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style
  Conditional Memory" (FARS, Analemma; gitlab.com/fars-a/counterfactual-gate-supervision);
* `capacity`: "Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in
  Transformers" (arXiv:2410.13184);
* `depth`: "Adaptive Computation Depth via Learned Token Routing in Transformers"
  (arXiv:2605.05222);
* `squared_depth`: "Adaptive Layer-skipping in Pre-trained LLMs" (arXiv:2503.23798);
* `similarity`: "DLO: Dynamic Layer Operation for Efficient Vertical Scaling of LLMs"
  (arXiv:2407.11030);
* `predictor`: "Mixture-of-Depths: Dynamically allocating compute in transformer-based language
  models" (arXiv:2404.02258).

Shapes: C routed layers, B batch, T positions, N predicted tokens, d model width, V vocabulary.
Means run over real tokens, of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..parts.rules import topk_mask
from ..routing.trace import RouteTrace
from .arguments import LOSSES, LossTerm, RoutingArguments
from .exits import exit_loss, observe_exits
from .forks import Prefix, divergence_from_dense
from .oracle import UtilityLabels, cgs_loss, rank_loss, util_loss
from .trace_statistics import (
    cosine,
    diagnostics,
    gate_cross_entropy,
    gate_logits,
    has_budget,
    mean_probability,
    real_tokens,
    squared_depth,
    stack,
    token_mean,
    track_thresholds,
)

__all__ = [
    "LOSSES",
    "LossInputs",
    "LossTerm",
    "diagnostics",
    "mean_probability",
    "routing_losses",
    "token_mean",
]


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss. A term whose inputs are missing does not apply.

    Attributes:
        trace: The decisions of the forward pass, with graph.
        lm: The language-model loss of the same pass.
        alive_min: `p_min` of the `alive` term.
        jepa_targets: `"paired"`, or `"deranged"`: every token gets the target of another one.
        utility: Labels `u*` by layer index, for `util` and `rank`; None between refreshes.
        counterfactual: Labels `dl` by layer index, for `cgs`; None between refreshes.
        counterfactual_temperature: What `cgs` divides `dl` by.
        prefix: The observed forward pass, for `distill`.
        logits: Its logits `[B, T, V]`, with graph, for `distill`.
        labels: Its labels `[B, T]`, for `distill` and `exit`.
        budget_scope: `"layer"`, or `"global"`: `budget` and `alive` hold the mean over layers
            instead of each layer; None: what the adapter says that the trace was recorded of.
        observed: What rows have watched, by their `observe`.
    """

    trace: RouteTrace
    lm: torch.Tensor | None = None
    alive_min: float = 0.05
    jepa_targets: str = "paired"
    utility: Mapping[int, UtilityLabels] | None = None
    counterfactual: Mapping[int, UtilityLabels] | None = None
    counterfactual_temperature: torch.Tensor | float = 1.0
    prefix: Prefix | None = None
    logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    budget_scope: str | None = None
    observed: Mapping[Any, Any] = field(default_factory=dict)


def jepa_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`2 - cos(q_full, z_full) - cos(q_cheap, z_cheap)`, mean over tokens and layers; JEPA only."""
    records = list(inputs.trace.values())
    if not all("z_full" in record.extras for record in records):
        return None
    z_full = [record.z_full for record in records]
    z_cheap = [record.z_cheap for record in records]
    if inputs.jepa_targets == "deranged":
        source = derangement(records[0].real)
        z_full, z_cheap = (
            [shuffled(z, records[0].real, source) for z in targets] for targets in (z_full, z_cheap)
        )
    per_layer = [
        2 - cosine(record.q_full, full) - cosine(record.q_cheap, cheap)
        for record, full, cheap in zip(records, z_full, z_cheap)
    ]
    return token_mean(stack(per_layer), real_tokens(inputs.trace)).mean()


def z_loss(inputs: LossInputs) -> torch.Tensor:
    """`mean(logsumexp(logits)^2)` of the two-way choice `(z/2, -z/2)`, `p = sigmoid(z)`.

    Symmetric in the two paths, least where `p = 1/2`: it holds the scale of the scores, as the
    router z-loss does.
    """
    half_CBT = 0.5 * gate_logits(inputs.trace)
    logsumexp_CBT = torch.logaddexp(half_CBT, -half_CBT)
    return token_mean(logsumexp_CBT.square(), real_tokens(inputs.trace)).mean()


def distill_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`KL(dense || routed)` per predicted token, of this model with the adapter disabled."""
    if inputs.prefix is None or inputs.logits is None or inputs.labels is None:
        return None
    return divergence_from_dense(inputs.prefix, inputs.logits, inputs.labels)


def budget_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`1/C sum_l (p_bar_l - rho)^2`, `p_bar_l` the mean gate probability of the layer;
    `(mean_l p_bar_l - rho)^2` where the budget is global. None if there is no budget."""
    if not has_budget(inputs.trace):
        return None
    budgets = torch.tensor([record.budget for record in inputs.trace.values()])
    p_bar = mean_probability(inputs.trace)
    return _held(inputs, p_bar - budgets.to(p_bar)).square().mean()


def alive_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`1/C sum_l ReLU(p_min - p_bar_l)`, of the layers' mean if global; None without a budget."""
    if not has_budget(inputs.trace):
        return None
    return F.relu(inputs.alive_min - _held(inputs, mean_probability(inputs.trace))).mean()


def capacity_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Router-Tuning: `ReLU(mean(M) - rho)`, `M` the hard mask of all layers with `dM/dp = 1`.

    None if there is no budget.
    """
    if not has_budget(inputs.trace):
        return None
    records = inputs.trace.values()
    masks = stack([r.mask.to(r.probs.dtype) - r.probs.detach() + r.probs for r in records])
    budget = sum(record.budget for record in records) / len(records)
    return F.relu(token_mean(masks, real_tokens(inputs.trace)).mean() - budget)


def similarity_loss(inputs: LossInputs) -> torch.Tensor | None:
    """DLO: `BCE(p, label)`, label 1 at a sequence's `ceil(rho * n)` tokens of lowest cosine.

    It is the cosine between the stream before and after the full path. None if the trace has no
    cosines: it was made in inference, by routed experts, or outside of a `RoutingObjective` (the
    Trainer's and the callback's), which asks for them. None if there is no budget.
    """
    return _labels_loss(inputs, "similarity", -1)


def recoverability_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`BCE(p, label)`; the label is 1 at the `ceil(rho * n)` tokens of a sequence of which the
    cheap path misses most.

    What it misses is `|after full - after cheap|`, so labels follow the branch as it learns: a
    token that the full path changes much is easy where the branch knows how. None if
    `similarity_loss` is.
    """
    return _labels_loss(inputs, "missed", 1)


def _labels_loss(inputs: LossInputs, name: str, sign: int) -> torch.Tensor | None:
    """`BCE(p, label)`; label 1 where `sign` times the extra is highest, at the budget's share."""
    records = list(inputs.trace.values())
    if not has_budget(inputs.trace) or not all(name in record.extras for record in records):
        return None
    labels_CBT = stack(
        [topk_mask(sign * getattr(record, name), record.budget, record.real) for record in records]
    )
    logits_CBT = gate_logits(inputs.trace)
    labels_CBT = labels_CBT.to(logits_CBT.dtype)
    return gate_cross_entropy(logits_CBT, labels_CBT, real_tokens(inputs.trace))


def predictor_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Mixture-of-Depths: `BCE(predicted, M)` teaches the causal predictor the top-k choice."""
    records = list(inputs.trace.values())
    if not all("predicted" in record.extras for record in records):
        return None
    predicted_CBT = stack([record.predicted.float() for record in records])
    mask_CBT = stack([record.mask.float() for record in records])
    return gate_cross_entropy(predicted_CBT, mask_CBT, real_tokens(inputs.trace))


def stream_similarity(
    before: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor
) -> torch.Tensor:
    """The cosine between the stream before and after the full path, `[B, T]`."""
    return torch.cosine_similarity(before.float(), after_full.float(), dim=-1)


def missed_by_cheap(
    before: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor
) -> torch.Tensor:
    """`|after full - after cheap|`, `[B, T]`."""
    return (after_full.float() - after_cheap.float()).norm(dim=-1)


for _name, _compute, _needs in (
    ("lm", lambda i: i.lm, {}),
    ("jepa", jepa_loss, {}),
    ("util", util_loss, {}),
    ("rank", rank_loss, {}),
    ("budget", budget_loss, {}),
    ("alive", alive_loss, {}),
    ("cgs", cgs_loss, {}),
    ("z", z_loss, {}),
    ("distill", distill_loss, {}),
    ("capacity", capacity_loss, {}),
    ("depth", lambda i: mean_probability(i.trace).mean(), {}),
    ("squared_depth", lambda i: squared_depth(i.trace), {}),
    ("similarity", similarity_loss, {"metrics": {"similarity": stream_similarity}}),
    ("recoverability", recoverability_loss, {"metrics": {"missed": missed_by_cheap}}),
    ("predictor", predictor_loss, {}),
    ("exit", exit_loss, {"observe": observe_exits}),
):
    LOSSES[_name] = LossTerm(getattr(RoutingArguments, f"{_name}_weight"), _compute, **_needs)


def routing_losses(
    trace: RouteTrace,
    lm: torch.Tensor | None = None,
    weights: Mapping[str, float] | None = None,
    alive_min: float = 0.05,
    **inputs: Any,
) -> dict[str, torch.Tensor]:
    """Every applicable term times its weight; their sum is the loss to minimise.

        with record_routes(model) as trace:
            output = model(**batch)
        loss = sum(routing_losses(trace, lm=output.loss).values())

    With gradient accumulation over G batches divide the routing terms by G, as you do with
    `output.loss`. Under DistributedDataParallel nothing is left to do: the terms already use the
    statistics of all processes, and their gradients survive the averaging.

    In training the thresholds of inference are tracked too: the quantile tables of the layers that
    `trace` recorded follow its scores, so that `set_budget` and a saved adapter know them.

    Args:
        trace: From `record_routes`, in training mode. Static layers have no part in the losses of
            gates.
        lm: The model's own loss; left out of the result when None.
        weights: Overrides of the default weights in `LOSSES`; a term with weight 0 is not computed.
        alive_min: `p_min`.
        inputs: Further fields of `LossInputs`, such as `utility=oracle.prefix_utility(...)`.

    Raises:
        KeyError: `weights` names no known loss.
        TypeError: `inputs` names no field of `LossInputs`.
    """
    for name in weights or {}:
        if name not in LOSSES:
            raise KeyError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    trace = trace.gated()
    if torch.is_grad_enabled():
        track_thresholds(trace)
    given = LossInputs(trace, lm, alive_min, **inputs)
    terms = {}
    for name, term in LOSSES.items():
        weight = (weights or {}).get(name, term.weight)
        value = term.compute(given) if weight != 0 else None
        if value is not None:
            terms[name] = weight * value
    return terms


def _held(inputs: LossInputs, per_layer_C: torch.Tensor) -> torch.Tensor:
    """The scope of the budget: every layer, or their mean."""
    held = [routing for routing in inputs.trace.routings if routing.layer_index in inputs.trace]
    scope = inputs.budget_scope or "layer"
    if held and not inputs.budget_scope:
        scope = held[0].active_config().budget_scope
    if scope == "global":
        return per_layer_C.mean()
    return per_layer_C


def derangement(real_BT: torch.Tensor) -> torch.Tensor:
    """One random cycle through all real tokens, int64 `[N]`; a single one stays where it is."""
    order = torch.randperm(int(real_BT.sum()), device=real_BT.device)
    source = torch.empty_like(order)
    source[order] = order.roll(1)
    return source


def shuffled(values: torch.Tensor, real_BT: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`values` `[B, T, ...]`, real tokens' rows permuted: row `n` comes from row `source[n]`."""
    values = values.clone()
    values[real_BT] = values[real_BT][source]
    return values
