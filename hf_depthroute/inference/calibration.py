"""Thresholds from score quantiles: `calibrate`, `set_budget`, and the tables that training tracks.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.contexts import evaluating
from ..base.distributed import each_of_all, rows_of_all
from ..base.lm_head import keeps_logits
from ..config.adapter import check_budget
from ..data.batches import device_of, model_inputs, token_mask
from ..parts.gates import GATES
from ..routing.stack import in_turn, routings_of, state_of
from ..routing.thresholds import NOT_FITTED, Measured, share_shifts, table_through, threshold_table
from ..routing.trace import count_routes, record_routes
from .restoring import restored_on_error

if TYPE_CHECKING:
    from ..config.adapter import DepthRouteConfig
    from ..routing.routing import Routing


@in_turn
@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    budget: float | None = None,
) -> dict[int, float]:
    """Set every routed layer's threshold so that the fraction `budget` of the tokens in
    `batches` runs full.

    Two passes. The first selects by top-k, which fixes the share exactly while later layers' scores
    are collected; the second repeats with the thresholds found, so that they fit the stream that
    inference really produces. Where no top-k exists (sequences, a global budget, early exit), three
    passes with thresholds. The quantile tables become part of the adapter: `set_budget` and
    `save_pretrained` use them. They are the same whatever the adapter's `phases`.

    Args:
        model: A model with one active depth-routed adapter.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`; lists, single rows and what a tokenizer returns are taken too
            (`batches.model_inputs`). A few thousand tokens suffice; they are kept in memory for the
            later passes.
        budget: In (0, 1]; becomes the adapter's budget. Default: the adapter's.

    Where it does not come to its end, be it by Ctrl-C, the model is as before.

    Returns:
        `{layer_index: fraction of real tokens that runs full}`, measured in a third pass with the
        final thresholds; 0 in static layers, which have no part in the budget.

    Raises:
        ValueError: No routed layer is active, the adapter has a fixed threshold, a batch has no
            `input_ids`, or `batches` holds no real token.
        ConfigError: `budget` is out of range.
    """
    routings = _budgeted_routings(model)
    config = routings[0].active_config()
    state = state_of(model)
    budget = check_budget(config.budget if budget is None else budget)
    kept = list(model_inputs(model, batches))
    if not _holds_tokens(kept):
        raise ValueError(
            "calibrate: batches is empty" if not kept else "calibrate: batches holds no real token"
        )
    with evaluating(model), restored_on_error(model):
        with state.override(budget=budget):
            for rule in ("topk", "threshold") if config.ranks_tokens() else ("threshold",) * 3:
                set_thresholds(model, kept, rule)
            with use_selection(model, "threshold"), count_routes(model) as counter:
                for batch in kept:
                    model(**batch, **_without_logits(model))
        _adopt(routings, budget)
        ratios = counter.full_ratio()
        keep_shares(routings, ratios, budget)
    return ratios


def keep_shares(routings: Sequence[Routing], shares: Mapping[int, float], budget: float) -> None:
    """Note with the layers that have a gate what their thresholds let run full at `budget`."""
    config = routings[0].active_config()
    own = {routing.layer_index: shares[routing.layer_index] for routing in routings}
    if config.budget_scope == "global":
        config.share_shifts = share_shifts(own)
    for routing in routings:
        measured = Measured(budget, own[routing.layer_index], "calibration")
        routing.active_quantiles().measured = measured


@torch.no_grad()
def set_thresholds(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], rule: str = "threshold"
) -> None:
    """One pass of `calibrate`: thresholds for the budget in force, on the stream of `rule`.

    With `"threshold"` that is the stream of the thresholds as they are.
    """
    routings = gated_routings(model)
    config = routings[0].active_config()
    with use_selection(model, rule):
        scores = _scores(model, batches, config)
    for routing in routings:
        routing.active_quantiles().set(threshold_table(scores[routing.layer_index]))
        if (controller := routing.active_controller()) is not None:
            controller.set(routing.active_quantiles()(routing.budget()))


@in_turn
@torch.no_grad()
def calibrate_budgets(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    budgets: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
) -> None:
    """Make `set_budget` hold every budget: the thresholds of each are found on the stream that it
    produces itself.

    What earlier layers skip moves the scores of later ones, so the quantiles that `calibrate`
    measures at one budget are off at another. Here every layer's table goes through the thresholds
    found at each of `budgets`, two passes for each, and is linear in between. The adapter's own
    budget, and the threshold that it has, stay; of `budgets` within half a percent of it,
    thresholds are near those found.

    Args:
        model: A calibrated model, see `calibrate`.
        batches: As there; a few thousand tokens suffice.
        budgets: In (0, 1).

    Raises:
        ValueError: As `calibrate`, and where the model is not calibrated.
        ConfigError: A budget is out of range.
    """
    routings = _budgeted_routings(model)
    config = routings[0].active_config()
    state = state_of(model)
    own = config.budget
    kept = list(model_inputs(model, batches))
    if not is_calibrated(model):
        raise ValueError(f"calibrate_budgets: {NOT_FITTED}")
    if not _holds_tokens(kept):
        raise ValueError("calibrate_budgets: batches holds no real token")
    tables = [routing.active_quantiles() for routing in routings]
    knots: list[dict[float, float]] = [{1 - own: float(table(own))} for table in tables]
    measured = [table.measured for table in tables]
    with evaluating(model), restored_on_error(model):
        others = {check_budget(budget) for budget in budgets} - {own, 1.0}
        for budget in sorted(others, key=lambda budget: abs(budget - own)):
            for _ in range(2):
                with state.override(selection="threshold", budget=budget):
                    scores = _scores(model, kept, config)
                for routing, known in zip(routings, knots):
                    table = threshold_table(scores[routing.layer_index]).cpu()
                    position = round((1 - budget) * (len(table) - 1))
                    known |= {0.0: float(table[0]), 1.0: float(table[-1])}
                    known[1 - budget] = float(table[position])
                    routing.active_quantiles().set(table_through(known, 1 - own, len(table)))
        for quantiles, before in zip(tables, measured):
            quantiles.measured = before


@in_turn
def set_budget(model: nn.Module, budget: float) -> None:
    """Change the budget of the active adapter at run time, without retraining;
    saved with the adapter.

    A change of the model, for all threads: what generates meanwhile goes on with it, and another
    thread's change waits for this one's end, as with `calibrate`. `use_budget` is for one request.

    Without `calibrate_budgets`, the thresholds come from quantiles measured at the calibrated
    budget. At another one, later layers see another stream, so the share that runs full can miss
    the budget by some points. Static layers stay so at every budget.

    Raises:
        ConfigError: `budget` is not in (0, 1].
        ValueError: No routed layer is active, the adapter has a fixed threshold, or its thresholds
            were never fitted, so that no share of tokens but all of them could be asked for.
    """
    budget = _supported_budget(model, budget, "set_budget")
    with restored_on_error(model):
        _adopt(_budgeted_routings(model), budget)


def _adopt(routings: Sequence[Routing], budget: float) -> None:
    """Make `budget` the adapter's, and its thresholds those of the controllers.

    What training moved theirs to stays where the budget is the adapter's already.
    """
    if budget == routings[0].active_config().budget:
        return
    for routing in routings:
        routing.active_config().budget = budget
        if (controller := routing.active_controller()) is not None:
            controller.set(routing.active_quantiles()(budget))


@contextmanager
def use_budget(model: nn.Module, budget: float) -> Iterator[None]:
    """Route by another budget inside the block, in the calling thread only:
    a budget for one request.

        with use_budget(model, 0.25):
            model.generate(**inputs)

    The adapter's own budget stays, in other threads and in what is saved. Thresholds are those of
    `set_budget`.

    Raises:
        ConfigError: `budget` is not in (0, 1].
        ValueError: As `set_budget`.
    """
    budget = _supported_budget(model, budget, "use_budget")
    with state_of(model).override(budget=budget):
        yield


def _supported_budget(model: nn.Module, budget: float, caller: str) -> float:
    """`budget`, where the active adapter can be run at it; otherwise errors as of `set_budget`."""
    budget = check_budget(budget)
    with state_of(model).switching:  # several questions about what is active
        _budgeted_routings(model)
        if budget < 1.0 and not is_calibrated(model):
            raise ValueError(f"{caller}: {NOT_FITTED}")
    return budget


def is_calibrated(model: nn.Module) -> bool:
    """Whether training tracked, or `calibrate` set, the quantile table of every active gate."""
    return all(routing.active_quantiles().fitted() for routing in gated_routings(model))


def thresholds(model: nn.Module) -> dict[int, float]:
    """`{layer_index: score}` that a token has to reach to run full.

    Empty where no threshold of a budget decides.
    """
    routings = gated_routings(model)
    if not routings:
        return {}
    config = routings[0].active_config()
    if not config.takes_budget() or config.inference_rule != "threshold":
        return {}
    return {h.layer_index: float(h.threshold(h.active_name(), h.budget())) for h in routings}


def active_routings(model: nn.Module) -> list[Routing]:
    """The routings that take part in a forward pass now, in layer order.

    Raises:
        ValueError: There is none.
    """
    routings = [routing for routing in routings_of(model) if routing.adapter() is not None]
    if not routings:
        raise ValueError(
            "no depth-routed adapter is active; use set_adapter or leave disable_adapter()"
        )
    return routings


def gated_routings(model: nn.Module) -> list[Routing]:
    """The `active_routings` that have a gate: all but the static ones."""
    return [routing for routing in active_routings(model) if not routing.active_gate().static]


def _budgeted_routings(model: nn.Module) -> list[Routing]:
    """`gated_routings`; `ValueError` where the budget is without effect on inference."""
    for config in (routing.active_config() for routing in active_routings(model)):
        if GATES[config.gate].soft:
            raise ValueError(
                f"target={config.target!r} is weighed by its gate: there is no budget, and no "
                "threshold"
            )
        if GATES[config.gate].static:
            raise ValueError(
                "the adapter has no gate: its layers are skipped by every token, whatever the "
                "budget"
            )
        if config.fixed_threshold is not None:
            raise ValueError(
                f"the adapter has a fixed threshold, {config.fixed_threshold:g}, and follows no "
                "budget; set its config's threshold to 'budget'"
            )
        if config.causal_rule == "predictor":
            raise ValueError(
                "the adapter decides by its predictor; set its config's causal_rule to 'quantile'"
            )
    routings = gated_routings(model)
    if not routings:  # of a draft that leaves out all layers with gates
        raise ValueError(
            "no layer with a gate is left: the others are skipped by every token, whatever the "
            "budget"
        )
    return routings


def use_selection(model: nn.Module, rule: str) -> AbstractContextManager[None]:
    """Inside the block, decide by `rule` ("topk" or "threshold") in training and inference."""
    return state_of(model).override(selection=rule)


def _holds_tokens(batches: list[dict[str, torch.Tensor]]) -> bool:
    return any(each_of_all(any(bool(token_mask(batch).any()) for batch in batches)))


def _scores(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], config: DepthRouteConfig
) -> dict[int, torch.Tensor]:
    """Scores of all real tokens (pairs, sequences), `[N]`, by gated layer; of all if global."""
    by_sequence = config.granularity == "sequence"
    nothing = torch.empty(0, device=device_of(model))
    scores = {routing.layer_index: [nothing] for routing in gated_routings(model)}
    for batch in batches:
        with record_routes(model) as trace:
            model(**batch, **_without_logits(model))
        for index, record in trace.gated().items():
            once = (record.real.any(dim=1), 0)  # a sequence's score is the same at every position
            scores[index].append(record.scores[once if by_sequence else record.real])
    found = {
        index: rows_of_all(torch.cat([part.to(parts[-1].device) for part in parts]))
        for index, parts in scores.items()
    }
    if config.budget_scope == "global":  # one threshold for all layers is found on
        device = next(iter(found.values())).device
        return dict.fromkeys(found, torch.cat([part.to(device) for part in found.values()]))
    return found


def _without_logits(model: nn.Module) -> dict[str, Any]:
    """Arguments of a pass that nothing but the decisions is read from."""
    return {"use_cache": False} | ({"logits_to_keep": 1} if keeps_logits(model) else {})
