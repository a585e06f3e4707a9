"""The study file: read, checked, and expanded into one `RunSpec` per config and seed."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError, DepthRouteConfig
from ..config_rules import did_you_mean
from ..presets import find_preset
from ..shown import reason
from ..trainer import DepthRouteTrainingArguments
from .schema import BLOCKS, CONFIG, DATASET, STUDY, check_fields, read_yaml

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it becomes a folder


@dataclass(frozen=True)
class RunSpec:
    """One training run: everything that tells it from the study's other runs.

    Attributes:
        config: Name of the config.
        seed: Draws the adapter's weights, the order of the data, and whatever else is drawn.
        steps: Optimizer steps; None where `iso_compute` has yet to say.
        adapter: Fields of `DepthRouteConfig`.
        training: Fields of `DepthRouteTrainingArguments`.
        joint: Whether the base model trains too.
        iso_compute: `{"same_time_as": config, "steps_of": config}`: as many steps of the second config as fit in the
            time that the first one took, with the same seed.
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
        """The Trainer's arguments: every step logged, nothing saved, blocks in the order of the data set.

        Raises:
            ConfigError: A value cannot be used.
        """
        fixed: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": self.steps or 1,
            "per_device_train_batch_size": batch_size,
            "seed": self.seed,
            "data_seed": self.seed,
            "train_sampling_strategy": "sequential",
            "use_cpu": not torch.cuda.is_available(),
            "dataloader_pin_memory": torch.cuda.is_available(),
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
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
        return RunSpec(self.name, seed, self.steps, self.adapter, self.training, self.joint, self.iso_compute)


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

    def settings(self) -> dict[str, Any]:
        """What all runs share: under other settings, a finished run is worth nothing."""
        names = ("steps", "batch_size", "eval_every", "thresholds", "margin", "adapter", "training", "data")
        return {name: getattr(self, name) for name in names}

    def specs(self, only: Collection[str] | None = None, seeds: Collection[int] | None = None) -> list[RunSpec]:
        """The runs of the configs and seeds asked for (default: all), seed by seed.

        Raises:
            ConfigError: The study has no such config or seed.
        """
        names = [config.name for config in self.configs]
        for name in only or ():
            if name not in names:
                raise ConfigError(f"--only {name}: the study has no such config{did_you_mean(name, names)}")
        for seed in seeds or ():
            if seed not in self.seeds:
                raise ConfigError(f"--seeds {seed}: the study's seeds are {', '.join(map(str, self.seeds))}")
        return [
            config.spec(seed)
            for seed in self.seeds
            if seeds is None or seed in seeds
            for config in self.configs
            if only is None or config.name in only
        ]

    def resolve(self, path: str) -> str:
        """A path of the study file as it is found from here; what is nothing there is a name on the Hub."""
        return str(self.folder / path) if (self.folder / path).exists() else path


def read_study(path: Path, steps: int | None = None) -> Study:
    """Read and check a study file and the configs it names.

    Args:
        path: The study file.
        steps: Optimizer steps instead of the file's, at least 2. The steps that configs name themselves change by the
            same factor, and `eval_every` falls to half of the steps where it is more.

    Raises:
        ConfigError: A file cannot be read, is no mapping, repeats a key, or has an unknown key or a value that cannot
            be used. The message is one line.
    """
    content = read_yaml(path)
    check_fields(str(path), content, STUDY)
    for key in ("name", "base", "data", "steps", "eval_every", "seeds", "configs"):
        if key not in content:
            raise ConfigError(f"{path}: {key} is missing")
    check_fields(f"{path}: data", content["data"], BLOCKS if "blocks" in content["data"] else DATASET)
    if not content["data"].keys() & {"blocks", "dataset"}:
        raise ConfigError(f"{path}: data needs a dataset, or blocks")
    for key in ("seeds", "configs"):
        if not content[key] or len(set(content[key])) < len(content[key]):
            raise ConfigError(f"{path}: {key} must not be empty, and not repeat anything")
    if content["steps"] < 2 * content["eval_every"]:
        raise ConfigError(f"{path}: eval_every={content['eval_every']} must be at most half of steps")
    factor = 1.0
    if steps is not None:
        factor = steps / content["steps"]
        content |= {"steps": steps, "eval_every": min(content["eval_every"], steps // 2)}
    configs = [_read_config(path.parent / name, content, factor) for name in content["configs"]]
    _check_configs(path, configs)
    study = Study(
        folder=path.parent,
        name=content["name"],
        base=content["base"],
        data=content["data"],
        steps=content["steps"],
        batch_size=content.get("batch_size", 8),
        eval_every=content["eval_every"],
        seeds=content["seeds"],
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
        raise ConfigError(f"{path}: the file's name names the config; use letters, digits, '_', '-' and '.'")
    iso = content.get("iso_compute")
    if iso is not None:
        if iso.keys() != {"same_time_as", "steps_of"}:
            raise ConfigError(f"{path}: iso_compute needs same_time_as and steps_of, and nothing else")
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
    """`adapter` or `training` of several files, later ones over earlier ones; a file's fields over its own preset."""
    merged: dict[str, Any] = {}
    for content in contents:
        if "preset" in content:
            merged |= copy.deepcopy(getattr(find_preset(content["preset"]), part))
        merged |= content.get(part, {})
    return merged


def _check_configs(path: Path, configs: list[StudyConfig]) -> None:
    by_name = {config.name: config for config in configs}
    if len(by_name) < len(configs):
        raise ConfigError(f"{path}: two configs have the same file name, which names them; rename one")
    for config in configs:
        for key, other in (config.iso_compute or {}).items():
            if other not in by_name:
                raise ConfigError(
                    f"{path}: config {config.name}: {key}={other!r} is no config{did_you_mean(other, by_name)}"
                )
            if by_name[other].iso_compute is not None:
                raise ConfigError(f"{path}: config {config.name}: {key}={other!r} is itself iso_compute")
