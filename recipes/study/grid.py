"""The study file: read strictly, its keys, types and ranges checked,
and expanded into one `RunSpec` per run."""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_depthroute.config.adapter import ConfigError, DepthRouteConfig
from hf_depthroute.config.fields import MAX_SEED, RoutingFields
from hf_depthroute.files.shown import reason
from hf_depthroute.files.strict_yaml import YamlError, read_mapping
from hf_depthroute.files.suggestions import did_you_mean
from hf_depthroute.training.presets import find_preset
from hf_depthroute.training.trainer import DepthRouteTrainingArguments, RoutingArguments

Schema = dict[str, tuple[Any, float | None]]  # key -> type, lowest value

STUDY: Schema = {
    "name": (str, None), "base": (str, None), "data": (dict, None), "steps": (int, 2),
    "batch_size": (int, 1), "eval_every": (int, 1), "seeds": (list[int], 0),
    "thresholds": (list[float], 0), "margin": (float, 0), "preset": (str, None),
    "adapter": (dict, None), "training": (dict, None), "configs": (list[str], None),
}  # fmt: skip
CONFIG: Schema = {
    "label": (str, None), "about": (str, None), "preset": (str, None), "adapter": (dict, None),
    "training": (dict, None), "steps": (int, 2), "joint": (bool, None),
    "iso_compute": (dict[str, str], None),
}  # fmt: skip
BLOCKS: Schema = {"blocks": (str, None)}
DATASET: Schema = {
    "dataset": (str, None), "name": (str, None), "column": (str, None), "split": (str, None),
    "validation_split": (str, None), "length": (int, 2), "validation_blocks": (int, 1),
}  # fmt: skip

_WORDS: dict[Any, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a mapping",
    list[int]: "a list of integers", list[float]: "a list of numbers",
    list[str]: "a list of file names", dict[str, str]: "a mapping of names to names",
}  # fmt: skip

# What a config may set. The runner owns the rest: seeds, steps, the order of the data, and what is
# written.
ADAPTER_FIELDS = {f.name for f in dataclasses.fields(RoutingFields)} - {"modules_to_save", "seed"}
ADAPTER_FIELDS |= {"gate_module", "gate_package"}
TRAINING_FIELDS = {f.name for f in dataclasses.fields(RoutingArguments)} | {
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "gradient_accumulation_steps",
    "gradient_checkpointing", "learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type",
    "max_grad_norm", "optim", "warmup_steps", "weight_decay",
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it becomes a folder


@dataclass(frozen=True)
class RunSpec:
    """One training run: everything that tells it from the study's other runs.

    Attributes:
        config: Name of the config.
        seed: Draws the adapter's weights, the order of the data, and whatever else is drawn.
        steps: Optimizer steps; None if `iso_compute` has yet to say.
        adapter: Fields of `DepthRouteConfig`.
        training: Fields of `DepthRouteTrainingArguments`.
        joint: Whether the base model trains too.
        iso_compute: `{"same_time_as": config, "steps_of": config}`: as many steps of the second
            config as fit in the time of the first one, by a measured ratio of their steps.
    """

    config: str
    seed: int
    steps: int | None
    adapter: dict[str, Any]
    training: dict[str, Any]
    joint: bool = False
    iso_compute: dict[str, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.config}/{self.seed}"

    def adapter_config(self) -> DepthRouteConfig:
        """Raises `ConfigError` on a value that cannot be used."""
        return DepthRouteConfig(**self.adapter, seed=self.seed)

    def training_arguments(self, batch_size: int, folder: Path) -> DepthRouteTrainingArguments:
        """The Trainer's arguments: every step logged, nothing saved,
        blocks in the order of the data set.

        Raises:
            ConfigError: A value cannot be used.
        """
        gpu = torch.cuda.is_available()
        fixed: dict[str, Any] = {
            "output_dir": str(folder), "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "max_steps": self.steps or 1,
            "per_device_train_batch_size": batch_size, "use_cpu": not gpu, "seed": self.seed,
            "data_seed": self.seed, "train_sampling_strategy": "sequential", "logging_steps": 1,
            "logging_nan_inf_filter": False, "dataloader_pin_memory": gpu,
        }  # fmt: skip
        try:
            arguments = DepthRouteTrainingArguments(**self.training, **fixed)
            arguments._n_gpu = min(1, arguments.n_gpu)  # one device per run, whatever is visible
            return arguments
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise ConfigError(f"training: {reason(error)}") from error


@dataclass(frozen=True)
class StudyConfig:
    """One override file, merged over the study's own adapter and training."""

    name: str
    label: str
    about: str
    adapter: dict[str, Any]
    training: dict[str, Any]
    steps: int | None
    joint: bool
    iso_compute: dict[str, str] | None

    def spec(self, seed: int) -> RunSpec:
        return RunSpec(
            self.name, seed, self.steps, self.adapter, self.training, self.joint, self.iso_compute
        )


@dataclass(frozen=True)
class Study:
    """A study file.

    Attributes:
        folder: Where the file is, and what its relative paths start from.
        thresholds: Validation losses; the first step at or under each is a result.
        margin: Differences in the final loss up to this are undetectable.
        data: `dataset`, `split`, ..., or `blocks`.
    """

    folder: Path
    name: str
    base: str
    data: dict[str, Any]
    steps: int
    batch_size: int
    eval_every: int
    seeds: list[int]
    thresholds: list[float]
    margin: float
    adapter: dict[str, Any]
    training: dict[str, Any]
    configs: list[StudyConfig]

    def specs(
        self, only: Collection[str] | None = None, seeds: Collection[int] | None = None
    ) -> list[RunSpec]:
        """The runs of the configs and seeds asked for (default: all), seed by seed.

        Raises:
            ConfigError: The study has no such config or seed.
        """
        names = [config.name for config in self.configs]
        for name in only or ():
            if name not in names:
                raise ConfigError(
                    f"--only {name}: the study has no such config{did_you_mean(name, names)}"
                )
        for seed in seeds or ():
            if seed not in self.seeds:
                raise ConfigError(
                    f"--seeds {seed}: the study's seeds are {', '.join(map(str, self.seeds))}"
                )
        return [
            config.spec(seed)
            for seed in self.seeds
            if seeds is None or seed in seeds
            for config in self.configs
            if only is None or config.name in only
        ]

    def resolve(self, path: str) -> str:
        """A path of the study file as it is found from here;
        what is nothing there is a name on the Hub."""
        return str(self.folder / path) if (self.folder / path).exists() else path


def read_study(path: Path, steps: int | None = None) -> Study:
    """Read and check a study file and the configs it names.

    Args:
        path: The study file.
        steps: Optimizer steps instead of the file's, at least 2. The steps that configs name
            themselves change by the same factor, and `eval_every` falls to half of the steps where
            it is more.

    Raises:
        ConfigError: A file cannot be read, is no mapping, repeats a key, or has an unknown key or a
            value that cannot be used. The message is one line.
    """
    content = read_yaml(path)
    check_fields(str(path), content, STUDY)
    for key in ("name", "base", "data", "steps", "eval_every", "seeds", "configs"):
        if key not in content:
            raise ConfigError(f"{path}: {key} is missing")
    check_fields(
        f"{path}: data", content["data"], BLOCKS if "blocks" in content["data"] else DATASET
    )
    if not content["data"].keys() & {"blocks", "dataset"}:
        raise ConfigError(f"{path}: data needs a dataset, or blocks")
    for key in ("seeds", "configs"):
        if not content[key] or len(set(content[key])) < len(content[key]):
            raise ConfigError(f"{path}: {key} must not be empty, and not repeat anything")
    if max(content["seeds"]) > MAX_SEED:
        raise ConfigError(f"{path}: seeds={max(content['seeds'])} must be at most {MAX_SEED}")
    if content["steps"] < 2 * content["eval_every"]:
        raise ConfigError(
            f"{path}: eval_every={content['eval_every']} must be at most half of steps"
        )
    factor = 1.0 if steps is None else steps / content["steps"]
    if steps is not None:
        content |= {"steps": steps, "eval_every": min(content["eval_every"], steps // 2)}
    configs = [_read_config(path.parent / name, content, factor) for name in content["configs"]]
    by_name = {config.name: config for config in configs}
    if len(by_name) < len(configs):
        raise ConfigError(
            f"{path}: two configs have the same file name, which names them; rename one"
        )
    for config in configs:
        for key, other in (config.iso_compute or {}).items():
            where = f"{path}: config {config.name}: {key}={other!r} is"
            if other not in by_name:
                raise ConfigError(f"{where} no config{did_you_mean(other, by_name)}")
            if by_name[other].iso_compute is not None:
                raise ConfigError(f"{where} itself iso_compute")
    study = Study(
        folder=path.parent,
        **{key: content[key] for key in ("name", "base", "data", "steps", "eval_every", "seeds")},
        batch_size=content.get("batch_size", 8),
        thresholds=[float(value) for value in content.get("thresholds", [])],
        margin=float(content.get("margin", 0.005)),
        adapter=_merged("adapter", content),
        training=_merged("training", content),
        configs=configs,
    )
    for spec in study.specs():  # everything is refused before anything runs
        try:
            spec.adapter_config()
            spec.training_arguments(study.batch_size, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: config {spec.config}: {error}") from error
    return study


def _read_config(path: Path, study: dict[str, Any], factor: float) -> StudyConfig:
    content = read_yaml(path)
    check_fields(str(path), content, CONFIG)
    if not _NAME.fullmatch(path.stem):
        raise ConfigError(
            f"{path}: the file's name names the config; use letters, digits, '_', '-' and '.'"
        )
    iso = content.get("iso_compute")
    if iso is not None:
        if iso.keys() != {"same_time_as", "steps_of"}:
            raise ConfigError(
                f"{path}: iso_compute needs same_time_as and steps_of, and nothing else"
            )
        if "steps" in content:
            raise ConfigError(f"{path}: steps does not go with iso_compute, which sets them")
    steps = content.get("steps", study["steps"])
    if factor != 1 and "steps" in content:
        steps = max(round(factor * steps), 2 * study["eval_every"])
    if steps < 2 * study["eval_every"]:
        raise ConfigError(f"{path}: steps={steps} must be at least twice the study's eval_every")
    return StudyConfig(
        name=path.stem,
        label=content.get("label", path.stem),
        about=content.get("about", ""),
        adapter=_merged("adapter", study, content),
        training=_merged("training", study, content),
        steps=None if iso else steps,
        joint=content.get("joint", False),
        iso_compute=iso,
    )


def _merged(part: str, *contents: dict[str, Any]) -> dict[str, Any]:
    """`adapter` or `training` of several files, later ones over earlier ones;
    a file's fields over its own preset."""
    merged: dict[str, Any] = {}
    for content in contents:
        if "preset" in content:
            merged |= copy.deepcopy(getattr(find_preset(content["preset"]), part))
        merged |= content.get(part, {})
    return merged


def check_fields(where: str, content: dict[str, Any], schema: Schema) -> None:
    """Raise `ConfigError` at the first key that `schema` does not know, or value that does not fit.

    `DepthRouteConfig` and `DepthRouteTrainingArguments` check the ranges of their own fields; the
    latter's types are checked here.
    """
    for key, value in content.items():
        if key not in schema:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(str(key), schema)}")
        kind, low = schema[key]
        values = value if isinstance(value, list) else [value]
        if not _fits(value, kind) or (
            low is not None and any(not low <= v < 2**32 for v in values)
        ):
            bound = "" if low is None else f" of at least {low:g}"
            raise ConfigError(
                f"{where}: {key}={value!r} must be {_WORDS[kind]}{bound}{_exponent_hint(value)}"
            )
    if "preset" in content:
        try:
            find_preset(content["preset"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    hints = typing.get_type_hints(DepthRouteTrainingArguments)
    for part, allowed in (("adapter", ADAPTER_FIELDS), ("training", TRAINING_FIELDS)):
        for key, value in content.get(part, {}).items():
            if key not in allowed:
                raise ConfigError(
                    f"{where}: {part}: {key!r} cannot be set here{did_you_mean(str(key), allowed)}"
                )
            # DepthRouteConfig checks its own.
            if part == "training" and not _fits(value, hints[key]):
                kind = getattr(hints[key], "__name__", str(hints[key]))
                raise ConfigError(
                    f"{where}: {part}: {key}={value!r} must be {kind}{_exponent_hint(value)}"
                )


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
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(
            value, bool
        )
    return isinstance(value, kind)


def _exponent_hint(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+e[-+]?[0-9]+", value):
        return f"; YAML reads {value} as text, write {float(value):.1e}"
    return ""


def read_yaml(path: Path) -> dict[str, Any]:
    """`read_mapping`, whose errors are `ConfigError`s here."""
    try:
        return read_mapping(path)
    except YamlError as error:
        raise ConfigError(str(error)) from error
