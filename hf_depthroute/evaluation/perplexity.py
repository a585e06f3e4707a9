"""Next-token loss of the dense base, of top-k routing and of threshold routing, on the same text.

Where prompts alone are routed, it is the loss of the text behind them: nothing else depends on what
a prompt skips.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from peft import PeftModel
from torch import nn
from tqdm.auto import tqdm

from ..base.contexts import evaluating
from ..base.lm_head import check_head, predicting, token_losses
from ..config.adapter import check_budget
from ..data.batches import INPUTS, device_of, labels_of, prompts_of
from ..inference.calibration import active_routings, calibrate, set_budget, use_selection
from ..inference.restoring import restored
from ..routing.trace import RouteCounter, count_routes
from .served import as_base, read_behind_prompts

Batch = Mapping[str, torch.Tensor]
BEHIND_PROMPTS = (
    "prompts alone are routed: the first two thirds of every block are read as a prompt, and the "
    "loss is that of the text behind it"
)


@dataclass(frozen=True, kw_only=True)
class BudgetRow:
    """One line of an evaluation.

    Attributes:
        budget: The fraction of tokens that should run full; 1 for the dense base.
        rule: `"dense"` (the model without the router), `"topk"` (a training rule, which sees the
            future), `"threshold"` (the inference rule, running ranks included) or `"fixed"` (the
            inference rule of an adapter that follows no budget).
        loss: Mean next-token cross-entropy, in nats per token.
        perplexity: `exp(loss)`.
        full_ratio: The fraction of real tokens that did run full, mean over routed layers.
        gap: Threshold rows: their loss minus the top-k loss at the same budget. None in other rows,
            and where the adapter has no top-k rule.
        behind_prompts: Whether prompts alone are routed, the first two thirds of every row: the
            loss is that of the text behind them, and `full_ratio` is of the prompts' tokens.
        calibrated: Whether the thresholds were calibrated for this row, and are not the adapter's
            own.
    """

    budget: float
    rule: str
    loss: float
    perplexity: float = field(init=False)
    full_ratio: float
    gap: float | None = None
    behind_prompts: bool = False
    calibrated: bool = False

    def __post_init__(self) -> None:
        # exp overflows a float above 709
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        object.__setattr__(self, "perplexity", perplexity)


@torch.no_grad()
def mean_loss(model: nn.Module, blocks: Iterable[Batch]) -> float:
    """Mean next-token cross-entropy in nats, every predicted token weighted alike.

    An adapter for prompts alone reads every block as one prompt, which is not how it is served:
    `evaluate_budgets` tells the loss of the text behind prompts.

    Args:
        model: A causal language model. It is evaluated in eval mode and left in the mode it was in.
        blocks: Dicts with `input_ids` and optionally `attention_mask`, `position_ids` and `labels`,
            each `[B, T]`. A token counts when it and the one before it are real, and its label is
            not -100.

    Raises:
        ValueError: There is no token to predict, or the model has no LM head.
    """
    return _mean_loss(model, blocks, partial(_logits, model), behind=False)


def _mean_loss(
    model: nn.Module, blocks: Iterable[Batch], read: Callable[[Batch], torch.Tensor], behind: bool
) -> float:
    """`mean_loss` of the logits `[B, T, V]` of `read`, or that of the text `behind` prompts."""
    check_head(model, "a loss of text")
    device = device_of(model)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    with evaluating(model):
        for block in blocks:
            given = {name: torch.as_tensor(value).to(device) for name, value in block.items()}
            inputs = {name: given[name] for name in INPUTS if name in given}
            labels_BT = labels_of(given)
            counted_BT = predicting(labels_BT, given.get("attention_mask"))
            if behind:
                counted_BT &= prompts_of(given)[1][:, :-1]
            losses_N = token_losses(read(inputs)[:, :-1][counted_BT], labels_BT[:, 1:][counted_BT])
            total += losses_N.sum().double().cpu()
            count += len(losses_N)
    if count == 0:
        raise ValueError("there is no text to evaluate: no block holds two real tokens")
    return float(total / count)


def evaluate_budgets(
    model: PeftModel,
    batches: Iterable[Batch],
    calibration_batches: Iterable[Batch] | None,
    budgets: Sequence[float],
) -> list[BudgetRow]:
    """Loss of the dense base, then of top-k and of threshold routing at every budget.

    Args:
        model: A `PeftModel` with one active depth-routed adapter. Its budget, thresholds and mode
            are restored.
        batches: As for `mean_loss`; kept in memory.
        calibration_batches: Text to calibrate every budget on. With None, the adapter's own
            thresholds are used.
        budgets: Each in (0, 1].

    Returns:
        One dense row, then a top-k and a threshold row for each budget; of an adapter that follows
        no budget (a fixed threshold, a causal predictor, no gate), one more row. With
        `phases="prefill"`, all are `behind_prompts`.

    Raises:
        ConfigError: A budget is out of range.
        ValueError: `batches` is empty, or no routed layer is active.
    """
    for budget in budgets:
        check_budget(budget)
    kept = list(batches)
    calibration = None
    if calibration_batches is not None:
        calibration = list(calibration_batches)
    rounds = 1 + 2 * len(budgets)
    config = active_routings(model)[0].active_config()
    behind = config.phases == "prefill"
    with (
        restored(model),
        tqdm(total=len(kept) * rounds, desc="eval", unit="batch", disable=None) as bar,
    ):

        def seen() -> Iterator[Batch]:
            for batch in kept:
                yield batch
                bar.update()

        with as_base(model):
            loss = _mean_loss(model, seen(), partial(_logits, model), behind)
        rows = [
            BudgetRow(budget=1.0, rule="dense", loss=loss, full_ratio=1.0, behind_prompts=behind)
        ]
        if not config.takes_budget():
            return [*rows, _routed_row(model, seen(), config.budget, "fixed")]
        for budget in budgets:
            if calibration is None:
                set_budget(model, budget)
            else:
                calibrate(model, calibration, budget)
            topk_loss = None
            if config.ranks_tokens():
                with use_selection(model, "topk"):
                    rows.append(_routed_row(model, seen(), budget, "topk"))
                topk_loss = rows[-1].loss
            rows.append(_routed_row(model, seen(), budget, "threshold", topk_loss))
    if calibration is not None:
        rows[1:] = [replace(row, calibrated=True) for row in rows[1:]]
    return rows


def _routed_row(
    model: PeftModel,
    blocks: Iterable[Batch],
    budget: float,
    rule: str,
    topk_loss: float | None = None,
) -> BudgetRow:
    """The row of the routed model as it is set now."""
    behind = active_routings(model)[0].active_config().phases == "prefill"
    if behind:
        counter = RouteCounter()
        loss = _mean_loss(model, blocks, partial(_logits_behind_prompts, model, counter), behind)
    else:
        with count_routes(model) as counter:
            loss = mean_loss(model, blocks)
    shares = counter.full_ratio().values()
    return BudgetRow(
        budget=float(budget),
        rule=rule,
        loss=loss,
        full_ratio=sum(shares) / len(shares),
        gap=None if topk_loss is None else loss - topk_loss,
        behind_prompts=behind,
    )


def _logits(model: nn.Module, inputs: Batch) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits


def _logits_behind_prompts(model: PeftModel, counter: RouteCounter, inputs: Batch) -> torch.Tensor:
    """The logits of the routed model; `counter` counts the decisions about the prompts."""
    trace, logits = read_behind_prompts(model, inputs)
    prompts_BT, _ = prompts_of(inputs)
    for index, record in trace.items():
        counter[index] = replace(record, token_mask=prompts_BT.to(record.mask.device))
    return logits
