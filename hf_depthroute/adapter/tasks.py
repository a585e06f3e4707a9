"""Tasks: PEFT wraps a model by its task, and a classifier's head trains with the adapter.

A decision needs no head, so models without an LM head are routed too.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..config.adapter import ConfigError, DepthRouteConfig

# The names of heads that PEFT adds to `modules_to_save` of a classifier's adapter.
HEADS = ("classifier", "score")
_CLASSIFIERS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}


def task_of(model: nn.Module) -> str:
    """The task of a model, as in `peft.TaskType`, by its class.

    Raises:
        ConfigError: It has a head of another kind.
    """
    name = type(model).__name__
    for ending, task in _CLASSIFIERS.items():
        if name.endswith(ending):
            return task
    if _generates(model):
        return "CAUSAL_LM"
    if getattr(model, "base_model", model) is model:
        return "FEATURE_EXTRACTION"
    raise ConfigError(
        f"{name}: its head is of no task that is routed; route a model for generation, sequence or "
        "token classification, or its AutoModel"
    )


def for_task(model: nn.Module, config: DepthRouteConfig) -> DepthRouteConfig:
    """A copy of `config` for `model`, with its task and a classifier's head to save.

    Raises:
        ConfigError: The task is a classifier's, and the model has no head of one; or it is to
            generate, and the model does not, which PEFT would miss when the layers have changed.
    """
    config = copy.deepcopy(config)
    config.task_type = config.task_type or task_of(model)
    if config.task_type == "CAUSAL_LM" and not _generates(model):
        raise ConfigError(
            f"task_type='CAUSAL_LM': {type(model).__name__} does not generate text; leave "
            f"task_type out, or set it to {task_of(model)!r}"
        )
    if config.task_type not in _CLASSIFIERS.values():
        return config
    names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    heads = [name for name in HEADS if name in names]
    if not heads:
        kind = "Sequence" if config.task_type == "SEQ_CLS" else "Token"
        raise ConfigError(
            f"task_type={config.task_type!r}: {type(model).__name__} has no head named "
            f"{' or '.join(HEADS)}; load the base with its {kind}Classification class"
        )
    # PEFT has added all names of heads, whichever the model has, and again for an adapter that is
    # loaded.
    others = [name for name in config.modules_to_save or () if name not in HEADS]
    config.modules_to_save = list(dict.fromkeys([*others, *heads]))
    return config


def make_for_task(
    make: Any, model: nn.Module, peft_config: Any, *args: object, **kwargs: object
) -> Any:
    """`peft.get_peft_model`, here `make`; a configuration without a task gets the model's."""
    if isinstance(peft_config, DepthRouteConfig) and peft_config.task_type is None:
        peft_config = copy.copy(peft_config)
        peft_config.task_type = task_of(model)
    return make(model, peft_config, *args, **kwargs)


def copies_once(copy_named: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """`_set_trainable` of PEFT's classifiers, here `copy_named`, which follows the injection.

    A routed adapter has its copies by then, and parts of its gates have the names of heads.
    """
    if isinstance(model.peft_config.get(adapter_name), DepthRouteConfig):
        return []
    return copy_named(model, adapter_name, *args, **kwargs)


def _generates(model: nn.Module) -> bool:
    return callable(getattr(model, "prepare_inputs_for_generation", None))
