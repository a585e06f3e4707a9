"""`set_phases`: all tokens, or those of prompts alone."""

from __future__ import annotations

from torch import nn

from ..config.adapter import check_phases
from ..routing.stack import in_turn
from .calibration import active_routings


@in_turn
def set_phases(model: nn.Module, phases: str) -> None:
    """Change at run time what inference routes, without retraining; saved with the adapter.

    With `"prefill"`, of every forward pass the last real tokens of each sequence run in full, one
    or as many as `prompt_tail`, and the tokens before them are routed as with `"all"`. A decoding
    step, one token per sequence, therefore runs as the base does, without gate and branch. Neither
    padding nor packing changes which tokens these are, as long as the model is told of them. Where
    a prompt enters in chunks, the last tokens of each chunk run in full; where more drafted tokens
    are verified at once, those before the last are routed. Calibration is the same with both;
    training, and the loss of a text, look at what stands behind prompts (`training.prompts`,
    `evaluate_budgets`).

        set_phases(model, "prefill")

    Args:
        model: A model with one active depth-routed adapter.
        phases: `"all"` or `"prefill"`.

    Raises:
        ConfigError: `phases` is neither, or is `"prefill"` for an adapter that decides about whole
            sequences, or for target memory.
        ValueError: No routed layer is active.
    """
    configs = [routing.active_config() for routing in active_routings(model)]
    for config in configs:
        check_phases(phases, config.granularity, config.target)
    for config in configs:
        config.phases = phases
