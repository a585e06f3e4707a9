"""Thresholds from score quantiles: the table saved with the adapter, `calibrate` and `set_budget`.

Shapes: B batch, T positions, Q table entries, C routed layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .config import check_budget
from .trace import record_routes, routings

if TYPE_CHECKING:
    from .layer import Routing

TABLE_SIZE = 201  # steps of half a percent


class ScoreQuantiles(nn.Module):
    """The quantile function of a layer's scores at `0, 0.005, ..., 1`; calling it gives the threshold of a budget.

    Before any training it is the logistic distribution's, `Q(x) = tau * log(x / (1 - x))`, for which a budget `rho`
    selects the tokens with `p >= 1 - rho`.

    Args:
        temperature: `tau`.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        levels = torch.linspace(0, 1, TABLE_SIZE).clamp(1e-4, 1 - 1e-4)
        self.register_buffer("values", temperature * torch.logit(levels))  # [Q]
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # 0: never tracked nor calibrated

    def forward(self, budget: float) -> torch.Tensor:  # -> []
        """The score that a fraction `budget` of the tokens reaches, interpolated linearly."""
        position = (1.0 - budget) * (TABLE_SIZE - 1)
        low = min(int(position), TABLE_SIZE - 2)
        values = self.values.float()
        return torch.lerp(values[low], values[low + 1], position - low)

    @torch.no_grad()
    def set(self, table: torch.Tensor) -> None:
        self.values.copy_(table)
        self.updates.fill_(1)

    @torch.no_grad()
    def track(self, table: torch.Tensor, decay: float = 0.95) -> None:
        """Move towards the table of one more batch. The average starts at the first batch, not at the initial table."""
        weight = torch.clamp(1.0 / (self.updates + 1), min=1.0 - decay)
        self.values.lerp_(table.to(self.values.dtype), weight.to(self.values.dtype))
        self.updates.add_(1)


def quantile_table(scores: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Quantiles `[Q]` of `scores` over the entries where `keep` is true. Never waits for the device.

    NaN scores are left out. Without a single entry, the result is zeros.
    """
    flat = scores.detach().float().reshape(-1)
    valid = ~flat.isnan() if keep is None else keep.reshape(-1) & ~flat.isnan()
    count = valid.sum()
    ordered = torch.where(valid, flat, torch.inf).sort().values
    last = (count - 1).clamp(min=0)
    position = torch.linspace(0, 1, TABLE_SIZE, device=flat.device) * last
    low = position.floor().long()
    high = torch.minimum(low + 1, last)
    table = torch.lerp(ordered[low], ordered[high], position - low)
    return torch.where(count > 0, table, torch.zeros_like(table))


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]], budget: float | None = None
) -> dict[int, float]:
    """Set every routed layer's threshold so that the fraction `budget` of the tokens in `batches` runs full.

    Two passes. The first selects by top-k, which fixes the share exactly while later layers' scores are collected;
    the second repeats with the thresholds found, so that they fit the stream that inference really produces. The
    quantile tables become part of the adapter: `set_budget` and `save_pretrained` use them.

    Args:
        model: A model with one active depth-routed adapter.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`. A few thousand tokens suffice;
            they are kept in memory for the second pass.
        budget: In (0, 1]; becomes the adapter's budget. Default: the adapter's.

    Returns:
        `{layer_index: fraction of real tokens that ran full}` in the second pass.

    Raises:
        ValueError: No routed layer is active, or `batches` is empty.
        ConfigError: `budget` is out of range.
    """
    if budget is not None:
        set_budget(model, budget)
    holders = active_routings(model)
    device = next(model.parameters()).device
    kept = [
        {name: torch.as_tensor(batch[name]).to(device) for name in ("input_ids", "attention_mask") if name in batch}
        for batch in batches
    ]
    if not kept:
        raise ValueError("calibrate: batches is empty")
    was_training = model.training
    model.eval()
    try:
        for rule in ("topk", "threshold"):
            with use_selection(model, rule):
                scores, chosen = _collect(model, kept)
            for holder in holders:
                holder.depth_route_quantiles[holder.adapter()].set(quantile_table(scores[holder.layer_index]))
    finally:
        model.train(was_training)
    return {index: float(mask.float().mean()) for index, mask in chosen.items()}


def set_budget(model: nn.Module, budget: float) -> None:
    """Change the budget of the active adapter at run time, without retraining; saved with the adapter.

    Raises:
        ConfigError: `budget` is not in (0, 1].
        ValueError: No routed layer is active, or the adapter has a fixed threshold.
    """
    check_budget(budget)
    configs = [holder.config(holder.adapter()) for holder in active_routings(model)]
    if any(config.threshold is not None for config in configs):
        raise ValueError("the adapter has a fixed threshold; set its config's threshold to None to use budgets")
    for config in configs:
        config.budget = float(budget)


def is_calibrated(model: nn.Module) -> bool:
    """Whether every active layer's quantile table has been tracked in training or set by `calibrate`."""
    return all(holder.depth_route_quantiles[holder.adapter()].updates.item() > 0 for holder in active_routings(model))


def active_routings(model: nn.Module) -> list[Routing]:
    """The routing holders that take part in a forward pass now, in layer order.

    Raises:
        ValueError: There is none.
    """
    holders = [holder for holder in routings(model) if holder.adapter() is not None]
    if not holders:
        raise ValueError("no depth-routed adapter is active; use set_adapter or leave disable_adapter()")
    return holders


@contextmanager
def use_selection(model: nn.Module, rule: str) -> Iterator[None]:
    """Decide by `rule` ("topk" or "threshold") in training and inference alike, inside the block."""
    holders = routings(model)
    before = [holder.selection for holder in holders]
    for holder in holders:
        holder.selection = rule
    try:
        yield
    finally:
        for holder, previous in zip(holders, before):
            holder.selection = previous


def _collect(
    model: nn.Module, batches: list[dict[str, torch.Tensor]]
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Scores and masks of all real tokens, `[number of tokens]` per layer."""
    scores: dict[int, list[Any]] = {}
    masks: dict[int, list[Any]] = {}
    for batch in batches:
        with record_routes(model) as trace:
            model(**batch, use_cache=False)
        for index, record in trace.items():
            scores.setdefault(index, []).append(record.scores[record.real])
            masks.setdefault(index, []).append(record.mask[record.real])
    return {i: torch.cat(s) for i, s in scores.items()}, {i: torch.cat(m) for i, m in masks.items()}
