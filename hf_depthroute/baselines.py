"""Losses of other routing methods, as functions of a `RouteTrace`; their rows are in `losses.LOSSES`.

The methods:

* Router-Tuning: "Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in Transformers"
  (arXiv:2410.13184);
* Token-Selective Attention (TSA): "Adaptive Computation Depth via Learned Token Routing in Transformers"
  (arXiv:2605.05222);
* DLO: "DLO: Dynamic Layer Operation for Efficient Vertical Scaling of LLMs" (arXiv:2407.11030);
* Mixture-of-Depths: "Mixture-of-Depths: Dynamically allocating compute in transformer-based language models"
  (arXiv:2404.02258).

Shapes: C routed layers, B batch, T positions. Means run over real tokens, of all processes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .averages import gate_logits, mean_probability, real_tokens, stack, token_mean
from .selection import topk_mask
from .trace import RouteTrace


def capacity(trace: RouteTrace) -> torch.Tensor:
    """Router-Tuning: `ReLU(mean(M) - rho)`, `M` the hard mask of all routed layers together, with `dM/dp = 1`."""
    masks = stack(
        [record.mask.to(record.probs.dtype) - record.probs.detach() + record.probs for record in trace.values()]
    )
    return F.relu(token_mean(masks, real_tokens(trace)).mean() - mean_budget(trace))


def depth(trace: RouteTrace) -> torch.Tensor:
    """Token-Selective Attention: `mean_l mean(p)`, the active fraction. Its paper's weight is 0.001."""
    return mean_probability(trace).mean()


def similarity(trace: RouteTrace) -> torch.Tensor | None:
    """DLO: `BCE(p, label)`; the label is 1 at the `ceil(rho * n)` tokens of a sequence that the full path changes most.

    These are the tokens with the lowest cosine between the stream before and after the full path. None where the trace
    has no cosines: it was made in inference, or by routed experts.
    """
    records = list(trace.values())
    if not all("similarity" in record.extras for record in records):
        return None
    labels_CBT = stack([topk_mask(-record.similarity.detach(), record.budget, record.real) for record in records])
    logits_CBT = gate_logits(trace)
    losses_CBT = F.binary_cross_entropy_with_logits(logits_CBT, labels_CBT.to(logits_CBT.dtype), reduction="none")
    return token_mean(losses_CBT, real_tokens(trace)).mean()


def predictor(trace: RouteTrace) -> torch.Tensor | None:
    """Mixture-of-Depths: `BCE(predicted, M)`, what teaches the causal predictor the top-k choice; None without one."""
    records = list(trace.values())
    if not all("predicted" in record.extras for record in records):
        return None
    predicted_CBT = stack([record.predicted.float() for record in records])
    masks_CBT = stack([record.mask.float() for record in records])
    losses_CBT = F.binary_cross_entropy_with_logits(predicted_CBT, masks_CBT, reduction="none")
    return token_mean(losses_CBT, real_tokens(trace)).mean()


def mean_budget(trace: RouteTrace) -> float:
    """Mean budget of the routed layers, as each record was made with."""
    return sum(record.budget for record in trace.values()) / len(trace)
