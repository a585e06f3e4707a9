"""Adapters that route prompts alone are refused by Trainers that hand no labels to the model.

Labels say where a prompt ends (`adapter.labels`). Without them an answer behind it in the same pass
would be routed as the prompt is, and a log-probability would not be that of what is served.
"""

from __future__ import annotations

from typing import Any

from ..base.lm_head import has_head
from ..routing.stack import configs_now, routed_layers


def check_answers(trainer: Any) -> None:
    """Refuse a trainer that reads prompt and answer in one pass without labels.

    These are trainers with a `ref_model`, and all of TRL's for language models but its `SFTTrainer`
    and what is made from it.

    Raises:
        ValueError: The active adapter of its model routes prompts alone.
    """
    configs = configs_now(routed_layers(trainer.model))
    if not any(config.phases == "prefill" for config in configs) or _gives_labels(trainer):
        return
    raise ValueError(
        f"{type(trainer).__name__} hands no labels to the model, and reads prompt and answer in "
        "one pass, where phases='prefill' would route the answers too: call set_phases(model, "
        "'all') before it trains or evaluates"
    )


def _gives_labels(trainer: Any) -> bool:
    if hasattr(trainer, "ref_model"):
        return False
    kinds = type(trainer).__mro__
    of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in kinds)
    supervised = any(kind.__name__ == "SFTTrainer" for kind in kinds)
    return not of_trl or supervised or not has_head(trainer.model)
