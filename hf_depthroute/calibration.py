"""Thresholds from score quantiles: the table saved with the adapter, `calibrate` and `set_budget`.

Shapes: B batch, T positions, Q table entries, C routed layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .batches import model_inputs
from .config import DepthRouteConfig, check_budget
from .trace import count_routes, overridden, record_routes, routings

if TYPE_CHECKING:
    from .holder import Routing
    from .trace import RouteRecord, RouteTrace

TABLE_SIZE = 201  # steps of half a percent
NOT_FITTED = (
    "the thresholds of this adapter were never fitted to its scores, so the share of tokens that runs full is not the "
    "budget; call calibrate(model, batches), or train with a Trainer or with record_routes and routing_losses"
)


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
        self.values: torch.Tensor
        self.updates: torch.Tensor
        self.register_buffer("values", temperature * torch.logit(levels))  # [Q]
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # 0: never tracked nor calibrated

    def forward(self, budget: float) -> torch.Tensor:  # -> []
        """The score that a fraction `budget` of the tokens reaches, interpolated linearly."""
        position = (1.0 - budget) * (TABLE_SIZE - 1)
        low = min(int(position), TABLE_SIZE - 2)
        values = self.values.float()
        return torch.lerp(values[low], values[low + 1], position - low)

    def fitted(self) -> bool:
        """Whether the table has been tracked in training or set by `calibrate`. Waits for the device."""
        return self.updates.is_meta or self.updates.item() > 0  # nobody can look into one that is on disk

    @torch.no_grad()
    def set(self, table: torch.Tensor) -> None:
        self.values.copy_(table)
        self.updates.fill_(1)

    @torch.no_grad()
    def track(self, table: torch.Tensor, decay: float = 0.95) -> None:
        """Move towards the table of one more batch. The average starts at the first batch, not at the initial table.

        A table with NaN, of a batch without a single real token, or with infinity changes nothing.
        """
        known = table.isfinite().all()
        weight = torch.clamp(1.0 / (self.updates + 1), min=1.0 - decay) * known
        self.values.lerp_(table.nan_to_num().to(self.values.dtype), weight.to(self.values.dtype))
        self.updates.add_(known)


class BudgetController(nn.Module):
    """A score threshold that training moves against the sign of the load error, instead of a budget loss.

        theta <- theta + step * sign(load - budget)

    The bias of "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664), on the other
    side of the comparison: `u - theta >= 0` decides, and no gradient reaches it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.threshold: torch.Tensor
        self.register_buffer("threshold", torch.zeros(()))

    @torch.no_grad()
    def move(self, load: torch.Tensor, budget: float, step: float) -> None:
        """One step; `load` is the recent share of tokens that ran full, `[]`."""
        self.threshold.add_(step * torch.sign(load.to(self.threshold) - budget))

    @torch.no_grad()
    def set(self, threshold: torch.Tensor) -> None:
        self.threshold.copy_(threshold)


def quantile_table(scores: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Quantiles `[Q]` of `scores` over the entries where `keep` is true. Never waits for the device.

    NaN scores are left out. Without a single entry, the result is NaN.
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
    return torch.where(count > 0, table, torch.nan)


@torch.no_grad()
def quantile_tables(records: list[RouteRecord], pooled: bool = False) -> list[torch.Tensor]:
    """The `quantile_table` of each record's real tokens; over data-parallel processes, their mean weighted by tokens.

    Every process gets the same tables, so thresholds never differ between ranks. With `pooled`, all records get the
    table of their scores together: the one threshold of a global budget.
    """
    if pooled:
        device = records[0].scores.device
        scores = torch.cat([record.scores.reshape(-1).to(device) for record in records])
        keep = torch.cat([record.real.reshape(-1).to(device) for record in records])
        tables, counts = [quantile_table(scores, keep)], [keep.sum()]
    else:
        tables = [quantile_table(record.scores, record.real) for record in records]
        counts = [record.real.sum() for record in records]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        device = tables[0].device
        counts_C1 = torch.stack([count.to(device) for count in counts])[:, None].float()
        tables_CQ = torch.stack([table.to(device) for table in tables])
        shared = torch.cat([tables_CQ.nan_to_num() * counts_C1, counts_C1], dim=1)
        dist.all_reduce(shared)
        tables = list(shared[:, :-1] / shared[:, -1:])  # NaN where no process has a real token
    return tables * len(records) if pooled else tables


@torch.no_grad()
def track_thresholds(trace: RouteTrace) -> None:
    """Move the quantile tables of the layers that `trace` recorded towards their scores, if they are being trained.

    With gradients disabled, or of layers in evaluation mode, nothing moves.
    """
    holders = [holder for holder in trace.holders if holder.training and holder.layer_index in trace]
    if not holders:
        return
    pooled = holders[0].active_config().budget_scope == "global"
    tables = quantile_tables([trace[holder.layer_index] for holder in holders], pooled)
    for holder, table in zip(holders, tables):
        holder.active_quantiles().track(table)


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Any]] | Mapping[str, Any], budget: float | None = None
) -> dict[int, float]:
    """Set every routed layer's threshold so that the fraction `budget` of the tokens in `batches` runs full.

    Two passes. The first selects by top-k, which fixes the share exactly while later layers' scores are collected;
    the second repeats with the thresholds found, so that they fit the stream that inference really produces. Where no
    top-k exists (sequences, a global budget, early exit), three passes with thresholds. The quantile tables become
    part of the adapter: `set_budget` and `save_pretrained` use them.

    Args:
        model: A model with one active depth-routed adapter.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`; lists, single rows and what a
            tokenizer returns are taken too (`batches.model_inputs`). A few thousand tokens suffice; they are kept in
            memory for the later passes.
        budget: In (0, 1]; becomes the adapter's budget. Default: the adapter's.

    Returns:
        `{layer_index: fraction of real tokens that runs full}`, measured in a third pass with the final thresholds.

    Raises:
        ValueError: No routed layer is active, the adapter has a fixed threshold, a batch has no `input_ids`, or
            `batches` holds no real token.
        ConfigError: `budget` is out of range.
    """
    holders = active_routings(model)
    configs = _budgeted_configs(holders)
    budget = check_budget(configs[0].budget if budget is None else budget)
    kept = list(model_inputs(model, batches))
    if not any(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).any() for batch in kept):
        raise ValueError("calibrate: batches is empty" if not kept else "calibrate: batches holds no real token")
    for config in configs:
        config.budget = budget
    was_training = model.training
    model.eval()
    try:
        for rule in ("topk", "threshold") if configs[0].ranks_tokens() else ("threshold",) * 3:
            with use_selection(model, rule):
                scores = _collect(model, kept, configs[0].granularity == "sequence")
            if configs[0].budget_scope == "global":
                scores = dict.fromkeys(scores, torch.cat(list(scores.values())))
            for holder in holders:
                holder.active_quantiles().set(quantile_table(scores[holder.layer_index]))
                _set_controller(holder, budget)
        with count_routes(model) as counter:
            for batch in kept:
                model(**batch, use_cache=False)
    finally:
        model.train(was_training)
    return counter.full_ratio()


def set_budget(model: nn.Module, budget: float) -> None:
    """Change the budget of the active adapter at run time, without retraining; saved with the adapter.

    The thresholds come from quantiles measured at the calibrated budget. At another one, later layers see another
    stream, so the share that runs full can miss the budget by some points; `calibrate(model, batches, budget)` makes
    it exact.

    Raises:
        ConfigError: `budget` is not in (0, 1].
        ValueError: No routed layer is active, the adapter has a fixed threshold, or its thresholds were never fitted,
            so that no share of tokens but all of them could be asked for.
    """
    budget = check_budget(budget)
    holders = active_routings(model)
    configs = _budgeted_configs(holders)
    if budget < 1.0 and not is_calibrated(model):
        raise ValueError(f"set_budget: {NOT_FITTED}")
    for holder, config in zip(holders, configs):
        config.budget = budget
        _set_controller(holder, budget)


def is_calibrated(model: nn.Module) -> bool:
    """Whether every active layer's quantile table has been tracked in training or set by `calibrate`."""
    return all(holder.active_quantiles().fitted() for holder in active_routings(model))


def thresholds(model: nn.Module) -> dict[int, float]:
    """`{layer_index: score}` that a token has to reach to run full. Empty where no threshold of a budget decides."""
    holders = active_routings(model)
    if not holders[0].active_config().takes_budget():
        return {}
    return {h.layer_index: float(h.active_quantiles()(h.active_config().budget)) for h in holders}


def active_routings(model: nn.Module) -> list[Routing]:
    """The routing holders that take part in a forward pass now, in layer order.

    Raises:
        ValueError: There is none.
    """
    holders = [holder for holder in routings(model) if holder.adapter() is not None]
    if not holders:
        raise ValueError("no depth-routed adapter is active; use set_adapter or leave disable_adapter()")
    return holders


def _budgeted_configs(holders: list[Routing]) -> list[DepthRouteConfig]:
    """The configs of the active adapters; `ValueError` where the budget is without effect on inference."""
    configs = [holder.active_config() for holder in holders]
    for config in configs:
        if config.gate == "none":
            raise ValueError("the adapter has no gate: its layers are skipped by every token, whatever the budget")
        if config.fixed_threshold is not None:
            raise ValueError(
                f"the adapter has a fixed threshold, {config.fixed_threshold:g}, and follows no budget; "
                "set its config's threshold to 'budget'"
            )
        if config.causal_rule == "predictor":
            raise ValueError("the adapter decides by its predictor; set its config's causal_rule to 'quantile'")
    return configs


def _set_controller(holder: Routing, budget: float) -> None:
    controller = holder.active_controller()
    if controller is not None:
        controller.set(holder.active_quantiles()(budget))


@contextmanager
def use_selection(model: nn.Module, rule: str) -> Iterator[None]:
    """Decide by `rule` ("topk" or "threshold") in training and inference alike, inside the block."""
    with overridden(model, "selection", rule):
        yield


def _collect(model: nn.Module, batches: list[dict[str, torch.Tensor]], by_sequence: bool) -> dict[int, torch.Tensor]:
    """Scores of all real tokens (pairs, sequences), in one dimension per layer."""
    scores: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        with record_routes(model) as trace:
            model(**batch, use_cache=False)
        for index, record in trace.items():
            found = record.scores[record.real]
            if by_sequence:  # the same at every position: a sequence counts once
                found = record.scores[record.real.any(dim=1), 0]
            scores.setdefault(index, []).append(found)
    return {index: torch.cat(parts) for index, parts in scores.items()}
