"""Routing losses and diagnostics, computed from a `RouteTrace`. Adding a loss is one function and one row of `LOSSES`.

Shapes: C routed layers, B batch, T positions. Every mean runs over real tokens, of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .trace import RouteTrace


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at.

    Attributes:
        trace: The decisions of the forward pass, with graph.
        lm: The language-model loss of the same pass.
        alive_min: `p_min` of the `alive` term.
    """

    trace: RouteTrace
    lm: torch.Tensor | None = None
    alive_min: float = 0.05


@dataclass(frozen=True)
class LossTerm:
    """A row of `LOSSES`: the default weight, and the function; it returns None where the term does not apply."""

    weight: float
    compute: Callable[[LossInputs], torch.Tensor | None]


def lm_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Next-token cross-entropy, as the model computed it."""
    return inputs.lm


def jepa_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`(1 - cos(q_full, z_full)) + (1 - cos(q_cheap, z_cheap))`, mean over tokens and layers; JEPA gate only."""
    records = inputs.trace.values()
    if not all("z_full" in record.extras for record in records):
        return None
    per_layer = [2 - _cosine(r.q_full, r.z_full) - _cosine(r.q_cheap, r.z_cheap) for r in records]
    return token_mean(_stack(per_layer), _real(inputs.trace)).mean()


def budget_loss(inputs: LossInputs) -> torch.Tensor:
    """`1/C sum_l (p_bar_l - rho)^2`, `p_bar_l` the mean gate probability of the layer."""
    budgets = torch.tensor([record.budget for record in inputs.trace.values()])
    p_bar = mean_probability(inputs.trace)
    return (p_bar - budgets.to(p_bar)).square().mean()


def alive_loss(inputs: LossInputs) -> torch.Tensor:
    """`1/C sum_l ReLU(p_min - p_bar_l)`."""
    return F.relu(inputs.alive_min - mean_probability(inputs.trace)).mean()


LOSSES: dict[str, LossTerm] = {
    "lm": LossTerm(1.0, lm_loss),
    "jepa": LossTerm(1.0, jepa_loss),
    "budget": LossTerm(1.0, budget_loss),
    "alive": LossTerm(0.5, alive_loss),
}


def routing_losses(
    trace: RouteTrace,
    lm: torch.Tensor | None = None,
    weights: Mapping[str, float] | None = None,
    alive_min: float = 0.05,
) -> dict[str, torch.Tensor]:
    """Every applicable term times its weight; their sum is the loss to minimise.

        with record_routes(model) as trace:
            output = model(**batch)
        loss = sum(routing_losses(trace, lm=output.loss).values())

    With gradient accumulation over G batches divide the routing terms by G, as you do with `output.loss`. Under
    DistributedDataParallel nothing is left to do: the terms already use the statistics of all processes, and their
    gradients survive the averaging.

    Args:
        trace: From `record_routes`, in training mode.
        lm: The model's own loss; left out of the result when None.
        weights: Overrides of the default weights in `LOSSES`; a term with weight 0 is not computed.
        alive_min: `p_min`.

    Raises:
        KeyError: `weights` names no known loss.
    """
    for name in weights or {}:
        if name not in LOSSES:
            raise KeyError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    inputs = LossInputs(trace, lm, alive_min)
    terms = {}
    for name, term in LOSSES.items():
        weight = (weights or {}).get(name, term.weight)
        value = term.compute(inputs) if weight != 0 else None
        if value is not None:
            terms[name] = weight * value
    return terms


@torch.no_grad()
def diagnostics(trace: RouteTrace) -> dict[str, torch.Tensor]:
    """Scalars per layer for the log, such as `full_ratio/layer_11`.

    `full_ratio` (tokens run full), `gate_prob` (mean `p`), `score_var` (variance of `u`), and for the JEPA gate
    `q_distance` (mean `||q_full - q_cheap||_2`) and `q_cosine` (mean cosine of the two).
    """
    result: dict[str, torch.Tensor] = {}
    for index, record in trace.items():
        real = record.real

        def mean(values: torch.Tensor, real: torch.Tensor = real) -> torch.Tensor:
            return (values * real).sum() / real.sum().clamp(min=1)

        average = mean(record.scores)
        values = {
            "full_ratio": mean(record.mask.float()),
            "gate_prob": mean(record.probs),
            "score_var": mean((record.scores - average).square()),
        }
        if "q_full" in record.extras:
            q_full, q_cheap = record.q_full.float(), record.q_cheap.float()
            values["q_distance"] = mean((q_full - q_cheap).norm(dim=-1))
            values["q_cosine"] = mean(_cosine(q_full, q_cheap))
        result |= {f"{name}/layer_{index}": value for name, value in values.items()}
    return result


def mean_probability(trace: RouteTrace) -> torch.Tensor:
    """`p_bar`, `[C]`: the mean gate probability of each routed layer over real tokens."""
    return token_mean(_stack([record.probs for record in trace.values()]), _real(trace))


def token_mean(values_CBT: torch.Tensor, real_CBT: torch.Tensor) -> torch.Tensor:
    """Mean over real tokens per layer, `[C]`, over all processes of a data-parallel group.

    The value is the same on every rank. DDP averages gradients over W ranks, so the local part carries W times its
    share: after averaging, the gradient is that of the one global mean.
    """
    total_C = (values_CBT * real_CBT).sum(dim=(1, 2))
    count_C = real_CBT.sum(dim=(1, 2)).to(total_C.dtype)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return total_C / count_C.clamp(min=1)
    shared = torch.stack([total_C.detach(), count_C])
    dist.all_reduce(shared)
    count_C = shared[1].clamp(min=1)
    local_C = total_C * dist.get_world_size() / count_C
    return shared[0] / count_C + (local_C - local_C.detach())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(a.float(), b.float(), dim=-1)


def _stack(per_layer: list[torch.Tensor]) -> torch.Tensor:
    """`[C, B, T]` on one device; layers of a split model may be on several."""
    return torch.stack([value.to(per_layer[0].device) for value in per_layer])


def _real(trace: RouteTrace) -> torch.Tensor:
    return _stack([record.real for record in trace.values()])
