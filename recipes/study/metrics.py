"""Metrics of a run, as functions of its records. Nothing here runs a model.

"The paper" is "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study"
(arXiv:2604.17228).

Shapes: N tokens, C routed layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Evaluations = Sequence[tuple[int, float]]  # step, validation loss


def window_average(evaluations: Evaluations, last_step: float) -> float | None:
    """Mean of the validation losses at steps above 0, up to `last_step`;
    None when there is none."""
    losses = [loss for step, loss in evaluations if 0 < step <= last_step]
    return statistics.fmean(losses) if losses else None


def best_of(evaluations: Evaluations) -> tuple[int, float]:
    """The step above 0 with the lowest validation loss, the first of equals, and that loss."""
    return min((e for e in evaluations if e[0] > 0), key=lambda e: e[1])


def first_hits(evaluations: Evaluations, thresholds: Iterable[float]) -> dict[str, int | None]:
    """The first evaluated step whose loss is at or under each threshold, or None,
    by the threshold as printed."""
    return {
        str(t): next((step for step, loss in evaluations if loss <= t), None) for t in thresholds
    }


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a logged quantity over the steps that logged it; None when none did."""
    values = [row[name] for row in rows if name in row]
    return statistics.fmean(values) if values else None


def tail_means(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """`mean_of` each quantity over the last tenth of the steps."""
    tail = rows[-max(1, len(rows) // 10) :]
    return {name: mean_of(tail, name) for name in names}


def oracle_auc(probs: torch.Tensor, utility: torch.Tensor) -> float | None:
    """ROC-AUC of the gate's `p` against `1[utility > 0]`, both `[N]`;
    None when all tokens have the same label.

    One half says that the gate knows nothing of which tokens gain from the full path.
    """
    from sklearn.metrics import roc_auc_score

    gains = utility > 0
    if gains.all() or not gains.any():
        return None
    return float(roc_auc_score(gains.cpu().numpy(), probs.float().cpu().numpy()))


def fork_bias(layer_wide: torch.Tensor, exact: torch.Tensor) -> dict[str, float | None]:
    """How the utility of a fork of all positions at once differs from that of one position
    alone; both `[N]`.

    Returns:
        `correlation` (Pearson's; None when either is constant), `sign_agreement` (share of tokens
        with the same sign), `mean_layer_wide` and `mean_exact`.
    """
    a, b = layer_wide.double().flatten().cpu(), exact.double().flatten().cpu()
    spread = float(a.std() * b.std()) if len(a) > 1 else 0.0
    covariance = float(((a - a.mean()) * (b - b.mean())).sum()) / max(1, len(a) - 1)
    return {
        "correlation": covariance / spread if spread > 0 else None,
        "sign_agreement": float((a.sign() == b.sign()).double().mean()),
        "mean_layer_wide": float(a.mean()),
        "mean_exact": float(b.mean()),
    }


def frequent_types(train: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The fewest token types that make up half of the training tokens: bool `[vocabulary]`.

    Ties: lowest id.
    """
    counts = torch.bincount(train.flatten().long(), minlength=vocabulary)
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]  # tokens of more frequent types
    frequent = torch.zeros(vocabulary, dtype=torch.bool)
    frequent[order[2 * before < counts.sum()]] = True
    return frequent


def split_loss(
    losses: torch.Tensor, targets: torch.Tensor, frequent: torch.Tensor
) -> tuple[float | None, float | None]:
    """Mean loss over frequent and over rare target tokens; `losses` and `targets` are `[N]`.

    None without a token.
    """
    is_frequent = frequent[targets.cpu()]
    values = losses.double().cpu()
    means = [
        float(values[keep].mean()) if keep.any() else None for keep in (is_frequent, ~is_frequent)
    ]
    return means[0], means[1]


def training_ffn_ratio(
    layers: int,
    branch: float,
    gate: float,
    budget: float,
    oracle: str = "none",
    oracle_interval: int = 5,
    cgs_interval: int | None = None,
    distilled: bool = False,
    targets: float = 0.0,
) -> float:
    """Cost of a training step in the paper's accounting: full FFNs per token,
    mean over the C routed layers.

    The paper also counts the target projection of the JEPA loss; studies leave it out (`targets`
    0).

    With `b = branch/FFN`, `g = gate/FFN` and `s = rho + (1 - rho) b + g`, the cost of one layer on
    one stream that follows the gate:

        1 + b + g                                                   every step: both paths, and the gate
        + [C + C b + C(C-1)/2] / C / interval                       oracle "all_full"
        + [C (1 + b + g) + C(C-1) s] / C / interval                 oracle "on_policy"
        + [C (1 + b + g) + (C-1) s] / C / cgs_interval              counterfactual gate supervision
        + 1                                                         distillation: the dense teacher
        + targets                                                   target projection of both paths

    A refresh of `"all_full"` labels runs one trunk with every layer full, which is also every
    layer's full fork, and one cheap fork per layer, which runs full in all later layers: `C(C-1)/2`
    of them. `"on_policy"` needs both paths on the trunk, and two forks per layer that follow the
    gate later. Gate supervision is the same for one layer, the mean over which is taken. Warm-ups
    without labels are not counted.

    Args:
        layers: `C`.
        branch: Weights of the cheap branch over those of the FFN.
        gate: Weights of the gate over those of the FFN.
        budget: `rho`.
        oracle: `"none"`, `"all_full"` or `"on_policy"`.
        oracle_interval: Steps between refreshes of the labels.
        cgs_interval: Steps between counterfactual supervisions; None without.
        distilled: Whether a dense teacher runs on every step.
        targets: Weights of the target projection, once for each path, over those of the FFN.
    """
    step = 1 + branch + gate
    later = layers - 1  # per layer, half of them on average
    follow = budget + (1 - budget) * branch + gate
    refresh = {"none": 0.0, "all_full": 1 + branch + later / 2, "on_policy": step + later * follow}[
        oracle
    ]
    supervision = 0.0 if cgs_interval is None else (step + later * follow / layers) / cgs_interval
    return step + refresh / oracle_interval + supervision + float(distilled) + targets
