"""From scores to a boolean mask: which tokens run the full path.

Shapes: B sequences, T positions. In every rule a NaN score is never selected, and neither is padding.
"""

from __future__ import annotations

from fractions import Fraction

import torch


def budget_count(budget: float, count: torch.Tensor) -> torch.Tensor:
    """`ceil(budget * count)` in exact arithmetic, elementwise on an integer tensor.

    The budget is read as the decimal number that it prints as: 0.07 of 100 tokens is 7 (floating point gives 8). A
    schedule's budgets have many digits; the nearest fraction with a denominator up to 10^9 keeps products in 64 bits.
    """
    numerator, denominator = _as_fraction(budget)
    return (count * numerator + denominator - 1) // denominator


@torch.compiler.assume_constant_result
def _as_fraction(budget: float) -> tuple[int, int]:
    exact = max(Fraction(str(budget)).limit_denominator(10**9), Fraction(1, 10**9))
    return exact.numerator, exact.denominator


def topk_mask(scores_BT: torch.Tensor, budget: float, token_mask_BT: torch.Tensor | None = None) -> torch.Tensor:
    """The `k = ceil(budget * n)` highest scores of each sequence, `n` its number of real tokens.

    Ties go to the lowest index, so that exactly `k` tokens are chosen. This rule looks at the whole sequence, later
    tokens included: it is a training rule only.

    Args:
        scores_BT: `[B, T]`.
        budget: In (0, 1].
        token_mask_BT: Bool, true at real tokens; all tokens are real when it is None.

    Returns:
        Bool `[B, T]`.
    """
    real = torch.ones_like(scores_BT, dtype=torch.bool) if token_mask_BT is None else token_mask_BT
    count_B = budget_count(budget, real.sum(dim=-1))
    eligible = real & ~scores_BT.isnan()
    # Stable sorts, least significant key first: by score, then eligible tokens before the others.
    order = scores_BT.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(
        dim=-1, descending=True, stable=True
    )
    order = order.gather(-1, eligible.gather(-1, order).to(torch.int8).argsort(dim=-1, descending=True, stable=True))
    positions = torch.arange(scores_BT.shape[-1], device=scores_BT.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, positions)
    return (rank < count_B[..., None]) & eligible


def threshold_mask(
    scores_BT: torch.Tensor, threshold: torch.Tensor | float, token_mask_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """`score >= threshold`, token by token: causal, the same in prefill and decode. Bool `[B, T]`."""
    mask = scores_BT >= threshold
    return mask if token_mask_BT is None else mask & token_mask_BT


def tail_mask(ends: torch.Tensor, count: int, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """The last `count` real tokens of every sequence, of a shorter one all of them. Bool `[B, T]`.

    Args:
        ends: Bool `[B, T]`, true at the last real token of every sequence.
        count: At least 1.
        token_mask: Bool `[B, T]`, true at real tokens; all are real when it is None.
    """
    real = torch.ones_like(ends) if token_mask is None else token_mask
    behind = real.flip(1).cumsum(1)  # from right to left: the real tokens from here on
    behind_the_end = torch.where(ends.flip(1), behind, 0).cummax(1).values
    in_tail = (behind_the_end > 0) & (behind - behind_the_end < count)  # rows after the last end are of no sequence
    return real & in_tail.flip(1)
