"""The adapter's configuration and the Trainer's arguments, from the options of `train`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..config.adapter import DepthRouteConfig
from ..config.fields import PATTERNS, RoutingFields
from ..parts.gates import GATES
from ..training.arguments import RoutingArguments
from ..training.trainer import DepthRouteTrainingArguments
from . import loading
from . import options as o
from .errors import CliError, refused

if TYPE_CHECKING:
    from .train import TrainOptions

# A Trainer's, such as an integration not installed.
ARGUMENT_ERRORS = (ValueError, ImportError, RuntimeError)


def left_to_preset(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """A preset's values of the fields that no option gives."""
    return {
        field: copy.deepcopy(value)
        for field, value in values.items()
        if not given & {field, o.key_of(field)}
    }


def new_or_saved_config(
    options: TrainOptions, given: set[str], preset: Mapping[str, object]
) -> DepthRouteConfig:
    """The configuration that options and preset describe, or that of the adapter in ADAPTER."""
    adapter = options.adapter
    names = [field.name for field in fields(RoutingFields)]
    if adapter is None:
        if options.model is None:
            raise CliError("Missing option '--model' (see hf-depthroute train --help)")
        values = o.values_of(options, names)
        for name, read in _READ.items():
            if values[name] is not None:
                values[name] = read(values[name])
        if options.init == "fit":
            values["budget_scope"] = "global"
        return DepthRouteConfig(**{**values, **preset, "seed": options.seed})
    fixed = sorted(o.option_name(name) for name in given & {"init", "preset", *names} - {"seed"})
    if fixed:
        listed = ", ".join(f"--{name}" for name in fixed)
        raise CliError(f"{listed}: defines a new adapter; with --adapter it is what {adapter} says")
    return loading.load_adapter_config(adapter)


def _dropped(text: str) -> list[list[int]]:
    """`"0,3/1,2"` -> `[[0, 3], [1, 2]]`; an empty part drops nothing in its layer."""
    try:
        lists = [part.split(",") for part in text.split("/")]
        return [[int(number) for number in numbers if number.strip()] for numbers in lists]
    except ValueError as error:
        raise CliError(
            f"--dropped-experts {text!r}: write whole numbers, such as 0,3/1,2"
        ) from error


def _threshold(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # the configuration knows which words it takes


_READ: dict[str, Callable[[str], object]] = {  # fields that are given as text
    "layers": o.parse_layers,
    "static_layers": o.parse_layers,
    **dict.fromkeys(PATTERNS, o.parse_pattern),
    "threshold": _threshold,
    "dropped_experts": _dropped,
    "modules_to_save": lambda text: [name.strip() for name in text.split(",")],
}


def training_arguments(
    options: TrainOptions, preset: dict[str, Any]
) -> DepthRouteTrainingArguments:
    """The Trainer's arguments; `CliError` where it cannot use them."""
    warmup = options.warmup_steps
    if warmup is None:
        warmup = options.steps // 20
    values = {
        "output_dir": str(options.out),
        "learning_rate": options.lr,
        "max_steps": options.steps,
        "warmup_steps": warmup,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "seed": options.seed,
        "bf16": options.dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": options.logging_steps,
        "report_to": [name.strip() for name in options.report_to.split(",")],
        "save_strategy": "steps" if 0 < options.save_steps < options.steps else "no",
        "save_steps": max(1, options.save_steps),
        "save_total_limit": 2,
        **o.values_of(options, (field.name for field in fields(RoutingArguments))),
    }
    with refused("training arguments: ", ARGUMENT_ERRORS):
        arguments = DepthRouteTrainingArguments(**values | preset)
        integrations = transformers.integrations.get_reporting_integration_callbacks
        for integration in integrations(arguments.report_to):
            integration()  # says whether its package is installed
    return arguments


def refuse_unused(
    options: TrainOptions, config: DepthRouteConfig, arguments: RoutingArguments
) -> None:
    """`CliError` where an option that is given has no effect in this run; `config` and `arguments`
    have a preset's values too."""
    named = options.validation_split is not None or options.eval_dataset is not None
    aligns = GATES[config.gate].predicts_outcomes

    def needs(condition: bool, why: str, *names: str) -> None:
        if not condition:
            # A weight of 0 asks for what is.
            set_here = [name for name in names if getattr(options, name) != 0]
            options.refuse_unused(set_here, why)

    texts = "--validation-split or --eval-dataset"
    needs(not named, f"with {texts}, which name the text to evaluate on", "hold_out")
    needs(
        named or options.hold_out > 0,
        f"with --hold-out 0, unless {texts} names a text",
        "validation_blocks",
    )
    needs(aligns, "without --gate jepa", "jepa_weight")
    needs(
        aligns and arguments.jepa_weight > 0,
        "without --gate jepa and --jepa-weight above 0",
        "jepa_targets",
    )
    needs(
        arguments.oracle != "none",
        "without --oracle all_full or on_policy",
        "util_weight",
        "rank_weight",
        "oracle_window",
        "oracle_gamma",
        "oracle_warmup",
        "oracle_interval",
    )
    needs(arguments.alive_weight > 0, "without --alive-weight above 0", "alive_min")
    needs(arguments.cgs_weight > 0, "without --cgs-weight above 0", "cgs_warmup", "cgs_interval")
    needs(config.causal_rule == "predictor", "without --causal-rule predictor", "predictor_weight")
    needs(config.selection == "controller", "without --selection controller", "controller_step")
    for name in ("budget", "temperature"):
        steps = f"{name}_schedule_steps"
        needs(
            getattr(arguments, steps) > 0,
            f"without --{o.option_name(steps)} above 0",
            f"{name}_start",
        )
