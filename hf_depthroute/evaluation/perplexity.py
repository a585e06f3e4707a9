"""Next-token loss of the dense base, of top-k routing and of threshold routing, on the same text.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn
from tqdm.auto import tqdm

from ..calibration import active_routings, calibrate, set_budget, use_selection
from ..config import check_budget
from ..trace import count_routes

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class BudgetRow:
    """One line of an evaluation.

    Attributes:
        budget: The fraction of tokens that should run full; 1 for the dense base.
        rule: `"dense"` (adapter disabled), `"topk"` (a training rule, which sees the future), `"threshold"` (the
            inference rule) or `"fixed"` (the inference rule of an adapter that follows no budget).
        loss: Mean next-token cross-entropy, in nats per token.
        perplexity: `exp(loss)`.
        full_ratio: The fraction of real tokens that did run full, mean over routed layers.
        gap: Threshold rows: their loss minus the top-k loss at the same budget. None in other rows, and where the
            adapter has no top-k rule.
    """

    budget: float
    rule: str
    loss: float
    perplexity: float
    full_ratio: float
    gap: float | None = None


@torch.no_grad()
def mean_loss(model: nn.Module, blocks: Iterable[Batch]) -> float:
    """Mean next-token cross-entropy in nats, every predicted token weighted alike.

    Args:
        model: A causal language model. It is evaluated in eval mode and left in the mode it was in.
        blocks: Dicts with `input_ids` and optionally `attention_mask` and `labels`, each `[B, T]`. A token counts when
            it and the one before it are real, and its label is not -100.

    Raises:
        ValueError: There is no token to predict.
    """
    return _mean_loss(model, blocks, after_batch=lambda: None)


def evaluate_budgets(
    model: PeftModel,
    batches: Iterable[Batch],
    calibration_batches: Iterable[Batch] | None,
    budgets: Sequence[float],
) -> list[BudgetRow]:
    """Loss of the dense base, then of top-k and of threshold routing at every budget.

    Args:
        model: A `PeftModel` with one active depth-routed adapter. Its budget, thresholds and mode are restored.
        batches: As for `mean_loss`; kept in memory.
        calibration_batches: Text to calibrate every budget on. With None, the adapter's own thresholds are used.
        budgets: Each in (0, 1].

    Returns:
        One dense row, then a top-k and a threshold row for each budget; of an adapter that follows no budget (a fixed
        threshold, a causal predictor, no gate), one more row.

    Raises:
        ConfigError: A budget is out of range.
        ValueError: `batches` is empty, or no routed layer is active.
    """
    for budget in budgets:
        check_budget(budget)
    kept = list(batches)
    calibration = None if calibration_batches is None else list(calibration_batches)
    with (
        restored(model),
        tqdm(total=len(kept) * (1 + 2 * len(budgets)), desc="eval", unit="batch", disable=None) as bar,
    ):
        with model.disable_adapter():
            rows = [_row(1.0, "dense", _mean_loss(model, kept, bar.update), 1.0)]
        config = active_routings(model)[0].active_config()
        if not config.takes_budget():
            return [*rows, _row(config.budget, "fixed", *_routed_loss(model, kept, bar.update))]
        for budget in budgets:
            set_budget(model, budget)
            if calibration is not None:
                calibrate(model, calibration)
            gap = None
            if config.ranks_tokens():
                with use_selection(model, "topk"):
                    rows.append(_row(budget, "topk", *_routed_loss(model, kept, bar.update)))
                gap = -rows[-1].loss
            loss, full_ratio = _routed_loss(model, kept, bar.update)
            rows.append(_row(budget, "threshold", loss, full_ratio, None if gap is None else loss + gap))
    return rows


def _row(budget: float, rule: str, loss: float, full_ratio: float, gap: float | None = None) -> BudgetRow:
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows a float above 709
    return BudgetRow(float(budget), rule, loss, perplexity, full_ratio, gap)


@torch.no_grad()
def _mean_loss(model: Any, blocks: Iterable[Batch], after_batch: Callable[[], Any]) -> float:
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    was_training = model.training
    model.eval()
    try:
        for block in blocks:
            moved = {name: torch.as_tensor(value).to(device) for name, value in block.items()}
            loss, tokens = _summed_loss(model, moved)
            total += loss.double().cpu()
            count += tokens
            after_batch()
    finally:
        model.train(was_training)
    if count == 0:
        raise ValueError("there is no text to evaluate: no block holds two real tokens")
    return float(total / count)


def _summed_loss(model: nn.Module, block: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy, and the number of tokens it is over."""
    ids_BT = block["input_ids"]
    labels_BT = block.get("labels", ids_BT)[:, 1:]
    counted_BT = labels_BT != -100
    inputs = {"input_ids": ids_BT}
    if "attention_mask" in block:
        inputs["attention_mask"] = block["attention_mask"]
        real_BT = block["attention_mask"].bool()
        counted_BT = counted_BT & real_BT[:, 1:] & real_BT[:, :-1]
    logits_BTV = model(**inputs, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits_BTV[counted_BT].float(), labels_BT[counted_BT], reduction="sum")
    return loss, int(counted_BT.sum())


def _routed_loss(model: nn.Module, blocks: list[Batch], after_batch: Callable[[], Any]) -> tuple[float, float]:
    """The loss, and the fraction of real tokens that ran full, mean over layers."""
    with count_routes(model) as counter:
        loss = _mean_loss(model, blocks, after_batch)
    shares = counter.full_ratio().values()
    return loss, sum(shares) / len(shares)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put the active adapter's budget, quantile tables and controllers back."""
    holders = active_routings(model)
    configs = [holder.active_config() for holder in holders]
    budgets = [config.budget for config in configs]
    tables: list[Any] = [part for h in holders for part in (h.active_quantiles(), h.active_controller()) if part]
    states = [{name: value.clone() for name, value in table.state_dict().items()} for table in tables]
    try:
        yield
    finally:
        for config, budget in zip(configs, budgets):
            config.budget = budget
        for table, state in zip(tables, states):
            table.load_state_dict(state)
