"""Statistics of a `RouteTrace`, layer by layer: means over the real tokens of all processes,
and what is logged.

Shapes: C routed layers, B batch, T positions. Records of routed experts have a third dimension, the
K experts of a token; everything here averages over it too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..base.distributed import sum_over_processes, world_size
from ..routing.thresholds import quantile_tables
from ..routing.trace import RouteTrace


def token_mean(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Mean over real tokens per layer, `[C, ...] -> [C]`, over all data-parallel processes."""
    total_C = (values * real).flatten(1).sum(dim=1)
    return mean_of_all(total_C, real.flatten(1).sum(dim=1).to(total_C.dtype))


def mean_of_all(total_C: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """`total / count`, each `[C]` and summed over all processes.

    The value is the same on every rank. DDP averages gradients over W ranks, so the local part
    carries W times its share: after averaging, the gradient is that of the one global mean.
    """
    if world_size() == 1:
        return total_C / count_C.clamp(min=1)
    shared = sum_over_processes(torch.stack([total_C.detach(), count_C]))
    count_C = shared[1].clamp(min=1)
    local_C = total_C * world_size() / count_C
    return shared[0] / count_C + (local_C - local_C.detach())


def mean_probability(trace: RouteTrace) -> torch.Tensor:
    """`p_bar`, `[C]`: the mean gate probability of each routed layer over real tokens."""
    return token_mean(stack([record.probs for record in trace.values()]), real_tokens(trace))


def squared_depth(trace: RouteTrace) -> torch.Tensor:
    """FlexiDepth: `mean_t (sum_l p_lt)^2`, `[]`: the square of the layers that a token runs."""
    depth_BT = stack([record.probs for record in trace.values()]).sum(0)
    return token_mean(depth_BT.square()[None], real_tokens(trace)[:1])[0]


def gate_logits(trace: RouteTrace) -> torch.Tensor:
    """`u / tau`, `[C, B, T]`: a probability rounded to 0 or 1 would have no gradient."""
    return stack([record.scores / record.temperature for record in trace.values()])


def gate_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """Binary cross-entropy, mean over real tokens and layers; each argument is `[C, B, T]`."""
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return token_mean(losses, real).mean()


def has_budget(trace: RouteTrace) -> bool:
    """Whether the layers were asked to hold one, and any has a gate that can."""
    gates = [routing.active_gate() for routing in trace.routings if routing.layer_index in trace]
    if gates and not any(gate.follows_budget() for gate in gates):
        return False
    return not any(math.isnan(record.budget) for record in trace.values())


def real_tokens(trace: RouteTrace) -> torch.Tensor:
    """Bool `[C, B, T]`."""
    return stack([record.real for record in trace.values()])


def stack(per_layer: list[torch.Tensor]) -> torch.Tensor:
    """`[C, ...]` on one device; layers of a split model may be on several."""
    return torch.stack([value.to(per_layer[0].device) for value in per_layer])


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine over the last dimension, in float32, in fewer passes than `F.cosine_similarity`."""
    a = a.float()
    b = b.float()
    return (a * b).sum(-1) * torch.rsqrt(((a * a).sum(-1) * (b * b).sum(-1)).clamp_min(1e-16))


@torch.no_grad()
def diagnostics(trace: RouteTrace) -> dict[str, torch.Tensor]:
    """Scalars per layer for the log, such as `full_ratio/layer_11`.

    `full_ratio` (tokens run full), `gate_prob` (mean `p`), `score_var` (variance of `u`), and for
    the JEPA gate `q_distance` (mean `||q_full - q_cheap||_2`) and `q_cosine` (mean cosine of the
    two). A static layer has the first.
    """
    result: dict[str, torch.Tensor] = {}
    gated = trace.gated()
    for index, record in trace.items():

        def mean(values: torch.Tensor, real: torch.Tensor = record.real) -> torch.Tensor:
            return (values * real).sum() / real.sum().clamp(min=1)

        values = {"full_ratio": mean(record.mask.float())}
        if index in gated:
            values["gate_prob"] = mean(record.probs)
            values["score_var"] = mean((record.scores - mean(record.scores)).square())
        if "q_full" in record.extras:
            q_full = record.q_full.float()
            q_cheap = record.q_cheap.float()
            values["q_distance"] = mean((q_full - q_cheap).norm(dim=-1))
            values["q_cosine"] = mean(cosine(q_full, q_cheap))
        result |= {f"{name}/layer_{index}": value for name, value in values.items()}
    return result


@torch.no_grad()
def track_thresholds(trace: RouteTrace) -> None:
    """Move the quantile tables of the layers that `trace` recorded towards their scores.

    Nothing moves with gradients disabled, or in layers in evaluation mode.
    """
    scored = trace.gated()
    routings = [
        routing for routing in trace.routings if routing.training and routing.layer_index in scored
    ]
    if not routings:
        return
    config = routings[0].active_config()
    pooled = config.budget_scope == "global"
    if pooled:
        config.share_shifts = None  # of the gates as they were
    tables = quantile_tables([trace[routing.layer_index] for routing in routings], pooled)
    for routing, (table, tokens) in zip(routings, tables):
        routing.active_quantiles().track(table, tokens)
