"""Options of `train` that are for another one, which is not given: they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config.adapter import DepthRouteConfig
from ..parts.gates import GATES
from ..training.arguments import RoutingArguments

if TYPE_CHECKING:
    from .train import TrainOptions

_OF_LABELS = (
    "util_weight",
    "rank_weight",
    "oracle_window",
    "oracle_gamma",
    "oracle_warmup",
    "oracle_interval",
)


def refuse_unused(
    options: TrainOptions, config: DepthRouteConfig, arguments: RoutingArguments
) -> None:
    """`CliError` where an option that is given has no effect in this run.

    Args:
        options: Those of the command line or the YAML file.
        config: The adapter, a preset's values included.
        arguments: The losses and schedules, likewise.
    """
    for has_effect, names, why in (*_of_text(options), *_of_losses(config, arguments)):
        if not has_effect:
            # A weight of 0 asks for what is.
            set_here = [name for name in names if getattr(options, name) != 0]
            options.refuse_unused(set_here, f"no effect {why}")


def _of_text(options: TrainOptions) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Whether options about the text to evaluate on have an effect, their names, and why not."""
    named = options.validation_split is not None or options.eval_dataset is not None
    yield (
        not named,
        ("hold_out",),
        "with --validation-split or --eval-dataset, which name the text to evaluate on",
    )
    yield (
        named or options.hold_out > 0,
        ("validation_blocks",),
        "with --hold-out 0, unless --validation-split or --eval-dataset names a text",
    )


def _of_losses(
    config: DepthRouteConfig, a: RoutingArguments
) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Whether options about losses and schedules have an effect, their names, and why not."""
    aligns = GATES[config.gate].predicts_outcomes
    yield aligns, ("jepa_weight",), "without --gate jepa"
    yield (
        aligns and a.jepa_weight > 0,
        ("jepa_targets",),
        "without --gate jepa and --jepa-weight above 0",
    )
    yield a.oracle != "none", _OF_LABELS, "without --oracle all_full or on_policy"
    yield a.alive_weight > 0, ("alive_min",), "without --alive-weight above 0"
    yield a.cgs_weight > 0, ("cgs_warmup", "cgs_interval"), "without --cgs-weight above 0"
    yield (
        config.causal_rule == "predictor",
        ("predictor_weight",),
        "without --causal-rule predictor",
    )
    yield (
        config.selection == "controller",
        ("controller_step",),
        "without --selection controller",
    )
    yield (
        a.budget_schedule_steps > 0,
        ("budget_start",),
        "without --budget-schedule-steps above 0",
    )
    yield (
        a.temperature_schedule_steps > 0,
        ("temperature_start",),
        "without --temperature-schedule-steps above 0",
    )
