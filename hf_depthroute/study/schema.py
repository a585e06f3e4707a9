"""What a study file and its configs may say: keys, types and ranges, and the strict YAML they are read with."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any

from ..config import ConfigError, DepthRouteConfig
from ..config_rules import did_you_mean
from ..presets import find_preset
from ..trainer import DepthRouteTrainingArguments, RoutingArguments
from ..yaml_files import YamlError, read_mapping

Schema = dict[str, tuple[Any, float | None]]  # key -> type, lowest value

STUDY: Schema = {
    "name": (str, None), "base": (str, None), "data": (dict, None), "steps": (int, 2), "batch_size": (int, 1),
    "eval_every": (int, 1), "seeds": (list[int], 0), "thresholds": (list[float], 0), "margin": (float, 0),
    "preset": (str, None), "adapter": (dict, None), "training": (dict, None), "configs": (list[str], None),
}  # fmt: skip
CONFIG: Schema = {
    "label": (str, None), "about": (str, None), "preset": (str, None), "adapter": (dict, None),
    "training": (dict, None), "steps": (int, 2), "joint": (bool, None), "iso_compute": (dict[str, str], None),
}  # fmt: skip
BLOCKS: Schema = {"blocks": (str, None)}
DATASET: Schema = {
    "dataset": (str, None), "name": (str, None), "column": (str, None), "split": (str, None),
    "validation_split": (str, None), "length": (int, 2), "validation_blocks": (int, 1),
}  # fmt: skip

_WORDS: dict[Any, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a mapping",
    list[int]: "a list of integers", list[float]: "a list of numbers", list[str]: "a list of file names",
    dict[str, str]: "a mapping of names to names",
}  # fmt: skip

# What a config may set. The runner owns the rest: seeds, steps, the order of the data, and what is written.
ADAPTER_FIELDS = set(DepthRouteConfig.__annotations__) - {
    "base_architecture", "format_version", "library_version", "modules_to_save", "seed", "trainable_token_indices",
    "weights_hash",
}  # fmt: skip
TRAINING_FIELDS = {f.name for f in dataclasses.fields(RoutingArguments)} | {
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "gradient_accumulation_steps", "gradient_checkpointing",
    "learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "optim", "warmup_steps",
    "weight_decay",
}  # fmt: skip


def check_fields(where: str, content: dict[str, Any], schema: Schema) -> None:
    """Raise `ConfigError` at the first key that `schema` does not know, or value that does not fit.

    `DepthRouteConfig` and `DepthRouteTrainingArguments` check the ranges of their own fields; the latter's types are
    checked here.
    """
    for key, value in content.items():
        if key not in schema:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(str(key), schema)}")
        kind, low = schema[key]
        values = value if isinstance(value, list) else [value]
        if not _fits(value, kind) or (low is not None and any(not low <= v < 2**32 for v in values)):
            bound = "" if low is None else f" of at least {low:g}"
            raise ConfigError(f"{where}: {key}={value!r} must be {_WORDS[kind]}{bound}{_exponent_hint(value)}")
    if "preset" in content:
        try:
            find_preset(content["preset"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    hints = typing.get_type_hints(DepthRouteTrainingArguments)
    for part, allowed in (("adapter", ADAPTER_FIELDS), ("training", TRAINING_FIELDS)):
        for key, value in content.get(part, {}).items():
            if key not in allowed:
                raise ConfigError(f"{where}: {part}: {key!r} cannot be set here{did_you_mean(str(key), allowed)}")
            if part == "training" and not _fits(value, hints[key]):  # DepthRouteConfig checks its own
                kind = getattr(hints[key], "__name__", str(hints[key]))
                raise ConfigError(f"{where}: {part}: {key}={value!r} must be {kind}{_exponent_hint(value)}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a YAML value has the type of a field."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _exponent_hint(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+e[-+]?[0-9]+", value):
        return f"; YAML reads {value} as text, write {float(value):.1e}"
    return ""


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: It cannot be read, is too large, repeats a key, or holds anything else.
    """
    try:
        return read_mapping(path)
    except YamlError as error:
        raise ConfigError(" ".join(str(error).split())) from error
