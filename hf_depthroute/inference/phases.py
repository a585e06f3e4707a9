"""`set_phases`: all tokens, or those of prompts alone; `set_causal_rule`: by which rule."""

from __future__ import annotations

from torch import nn

from ..config.adapter import ConfigError, check_phases
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
    are verified at once, those before the last are routed, which `generate` refuses.
    Calibration is the same with both; training, and the loss of a text, look at what
    stands behind prompts (`training.prompts`, `evaluate_budgets`).

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


@in_turn
def set_causal_rule(model: nn.Module, rule: str) -> None:
    """Change at run time how inference decides, without retraining; saved with the adapter.

    With `"quantile"` a score is compared with a threshold, which was found on the text of the
    calibration: on text of another kind the share that runs in full may be some points off. With
    `"running"` it is ranked among the scores of its own sequence so far, at most the last 2,048,
    and the text of the calibration counts as 512 more: of what a threshold misses the share by, a
    half is left over 1,000 tokens and a quarter over 6,000. The rank is as causal as the threshold,
    and does not hang on the batch; a sequence's scores are kept with its KV cache, which has to be
    one that grows. Decoding takes the general path of a layer, and vLLM does not serve it.

        set_causal_rule(model, "running")

    Args:
        model: A calibrated model with one active depth-routed adapter, see `calibrate`.
        rule: `"quantile"` or `"running"`.

    Raises:
        ConfigError: The adapter cannot decide so; with a global budget, also if it was loaded
            without the shares of its layers, which `calibrate` finds.
        ValueError: No routed layer is active.
    """
    config = active_routings(model)[0].active_config()
    if rule == config.causal_rule:
        return
    if "predictor" in (rule, config.causal_rule):
        raise ConfigError(
            f"causal_rule={rule!r}: the adapter has causal_rule={config.causal_rule!r}, for good"
        )
    values = {"causal_rule": rule, "share_shifts": config.share_shifts}
    changed = type(config)(**config.to_dict() | values)
    if rule == "running":
        for index in changed.gated_layers():
            changed.share_shift(index)
    config.causal_rule = rule
