"""Losses by labels that the forward pass itself gives: what the full path changes, what the cheap one misses, top-k.

`similarity`: "DLO: Dynamic Layer Operation for Efficient Vertical Scaling of LLMs" (arXiv:2407.11030); `predictor`:
"Mixture-of-Depths: Dynamically allocating compute in transformer-based language models" (arXiv:2404.02258).

Shapes: C routed layers, B batch, T positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..parts.selection import topk_mask
from .trace_statistics import gate_cross_entropy, gate_logits, has_budget, real_tokens, stack

if TYPE_CHECKING:
    from .losses import LossInputs


def similarity_loss(inputs: LossInputs) -> torch.Tensor | None:
    """DLO: `BCE(p, label)`; the label is 1 at the `ceil(rho * n)` tokens of a sequence that the full path changes most.

    These are the tokens with the lowest cosine between the stream before and after the full path. None if the trace
    has no cosines: it was made in inference, by routed experts, or outside of a `RoutingObjective` (the Trainer's and
    the callback's), which asks for them. None if there is no budget.
    """
    return _labels_loss(inputs, "similarity", -1)


def recoverability_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`BCE(p, label)`; the label is 1 at the `ceil(rho * n)` tokens of a sequence of which the cheap path misses most.

    What it misses is `|after full - after cheap|`, so labels follow the branch as it learns: a token that the full path
    changes much is easy where the branch knows how. None if `similarity_loss` is.
    """
    return _labels_loss(inputs, "missed", 1)


def _labels_loss(inputs: LossInputs, name: str, sign: int) -> torch.Tensor | None:
    """`BCE(p, label)`, with label 1 where `sign` times the extra is among the budget's share of its sequence."""
    records = list(inputs.trace.values())
    if not has_budget(inputs.trace) or not all(name in record.extras for record in records):
        return None
    labels_CBT = stack([topk_mask(sign * getattr(record, name), record.budget, record.real) for record in records])
    logits_CBT = gate_logits(inputs.trace)
    return gate_cross_entropy(logits_CBT, labels_CBT.to(logits_CBT.dtype), real_tokens(inputs.trace))


def predictor_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Mixture-of-Depths: `BCE(predicted, M)`, what teaches the causal predictor the top-k choice; None without one."""
    records = list(inputs.trace.values())
    if not all("predicted" in record.extras for record in records):
        return None
    predicted_CBT = stack([record.predicted.float() for record in records])
    return gate_cross_entropy(
        predicted_CBT, stack([record.mask.float() for record in records]), real_tokens(inputs.trace)
    )


def stream_similarity(before: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor) -> torch.Tensor:
    """The cosine between the stream before and after the full path, `[B, T]`."""
    return torch.cosine_similarity(before.float(), after_full.float(), dim=-1)


def missed_by_cheap(before: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor) -> torch.Tensor:
    """`|after full - after cheap|`, `[B, T]`."""
    return (after_full.float() - after_cheap.float()).norm(dim=-1)
