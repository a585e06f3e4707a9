"""Made-up traces for losses, and averages over their real tokens."""

from __future__ import annotations

import math

import torch

from hf_depthroute.routing.trace import RouteRecord, RouteTrace

# Two sequences of four positions; the second has two padding tokens, one on each side.
REAL = torch.tensor([[True, True, True, True], [False, True, True, False]])
TAU = 2.0


def made_trace(
    budget: float = 0.25, outcomes: bool = False, token_mask: torch.Tensor | None = REAL
) -> RouteTrace:
    """Random records for layers 1 and 3, with graph; padding holds values that would
    show in any mean."""
    generator = torch.Generator().manual_seed(0)
    trace = RouteTrace()
    for index in (3, 1):
        scores = torch.randn(2, 4, generator=generator)
        scores = torch.where(REAL, scores, 50.0).requires_grad_()
        extras = {}
        if outcomes:
            for name in ("q_full", "q_cheap", "z_full", "z_cheap"):
                value = torch.randn(2, 4, 6, generator=generator)
                extras[name] = value.requires_grad_(name.startswith("q"))
        mask = torch.rand(2, 4, generator=generator) < 0.5
        trace[index] = RouteRecord(
            mask, scores, torch.sigmoid(scores / TAU), token_mask, budget, extras
        )
    return trace


def real_entries(values: torch.Tensor) -> list[float]:
    return [values[b, t].item() for b in range(2) for t in range(4) if REAL[b, t]]


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def p_bar(trace: RouteTrace, index: int) -> float:
    return average([1 / (1 + math.exp(-u / TAU)) for u in real_entries(trace[index].scores)])
