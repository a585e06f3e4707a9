"""Benchmark cases, and the YAML files that list many of them.

A file is a mapping. Keys other than `name` and `cases` are defaults of every case; `cases` is a list of mappings:

    name: cpu
    shape: qwen2.5-0.5b
    dtype: bfloat16
    masked: true
    cases:
      - {case: prefill, layers: "last:12", batch: 4, length: [256, 1024]}
      - {case: decode, layers: all, batch: [1, 8], length: 256, steps: 16}

`batch`, `length` and `loss` may be lists; a case is measured for every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..config.adapter import DepthRouteConfig, check_budget
from ..files.strict_yaml import YamlError, read_mapping
from .lora import LOSSES
from .modes import check_modes
from .shapes import SHAPES

CASES = ("prefill", "decode", "train", "load", "memory")
_MANY = ("batch", "length", "loss")  # keys that may hold a list


@dataclass(frozen=True)
class Case:
    """One measurement.

    The fields from `shape` to `phases` make the model; where a model is given with its adapter, they say nothing.

    Attributes:
        case: One of `CASES`.
        shape: A key of `SHAPES`; None for a model that is given.
        depth: Decoder layers; None for the shape's own.
        vocabulary: Rows of embedding and head; None for the shape's own.
        dtype: The dtype of the base's weights.
        layers: Routed layers, as in `DepthRouteConfig`.
        target: What is routed.
        gate: The gate.
        phases: What inference routes, as in `DepthRouteConfig`.
        budgets: Budgets, in (0, 1).
        masked: Whether the mask-after-compute router is timed too.
        tune: Whether the executors that `tune_execution` chooses are timed too.
        baselines: Modes to run in, of `MODES`; None for eager on CPUs and all on GPUs.
        batch: Sequences.
        length: Tokens of the prompt, or of a training sequence.
        steps: Decoding steps.
        logits: Which of a prompt's logits are computed: `"all"`, or the `"last"` position's. On CPUs PyTorch copies
            the head's weights to take the last ones of several sequences, a cost that dilutes every ratio.
        loss: The loss of a training step, one of `LOSSES`.
        rounds: Rounds; each times every variant once, in random order.

    Raises:
        ValueError: A value cannot be used. The message is one line.
    """

    case: str
    shape: str | None = None
    depth: int | None = None
    vocabulary: int | None = None
    dtype: str = "bfloat16"
    layers: str | tuple[int, ...] = "last:12"
    target: str = "ffn"
    gate: str = "mlp"
    phases: str = "all"
    budgets: tuple[float, ...] = (0.5, 0.25)
    masked: bool = False
    tune: bool = False
    baselines: tuple[str, ...] | None = None
    batch: int = 4
    length: int = 256
    steps: int = 16
    logits: str = "all"
    loss: str = "naive"
    rounds: int = 15

    def __post_init__(self) -> None:
        dtypes, shapes = ("bfloat16", "float32", "float16"), (None, *SHAPES)
        choices = {"case": CASES, "shape": shapes, "dtype": dtypes, "logits": ("all", "last"), "loss": LOSSES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of: {', '.join(filter(None, allowed))}")
        for name in ("batch", "length", "steps", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("masked", "tune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        if any(check_budget(budget) == 1.0 for budget in self.budgets):
            raise ValueError(f"budgets={list(self.budgets)}: give numbers in (0, 1); budget 1 is always measured")
        if self.baselines is not None:
            check_modes(self.baselines, torch.device("cpu"))
        if self.shape is not None:
            self.config().routed_layers(self.layer_count())

    def layer_count(self) -> int:
        return self.depth or int(SHAPES[str(self.shape)]["num_hidden_layers"])

    def config(self) -> DepthRouteConfig:
        layers = list(self.layers) if isinstance(self.layers, tuple) else self.layers
        return DepthRouteConfig(layers=layers, target=self.target, gate=self.gate, phases=self.phases)

    def made_from(self) -> tuple[Any, ...]:
        """Equal for cases of the same base model."""
        return self.shape, self.depth, self.vocabulary, self.dtype

    def describe(self) -> str:
        """One line that tells this case from others, and is the same in every run of it."""
        layers = ",".join(map(str, self.layers)) if isinstance(self.layers, tuple) else self.layers
        depth = "" if self.depth is None else f" cut to {self.depth} layers"
        vocabulary = "" if self.vocabulary is None else f", vocabulary {self.vocabulary}"
        phases = "" if self.phases == "all" else f", phases {self.phases}"
        return f"{self.sizes()}: {self.shape}{depth}{vocabulary} {self.dtype}, {self.target} of {layers}{phases}"

    def sizes(self) -> str:
        """The part of a label before the model: the run."""
        sizes = {
            "decode": f" {self.batch} x {self.steps} steps after {self.length}",
            "train": f" {self.batch} x {self.length}, {self.loss} loss",
            "load": "",
        }
        return self.case + sizes.get(self.case, f" {self.batch} x {self.length}")


def read_suite(path: Path, **overrides: Any) -> tuple[str, list[Case]]:
    """The name and the cases of a suite file.

    Args:
        path: The YAML file.
        overrides: Fields of `Case` that hold for every case, whatever the file says; None leaves the file's. A depth
            also shortens `layers: last:N` in proportion, where the file asks for the whole depth.

    Raises:
        ValueError: The file cannot be used. The message is one line and names file, case and key.
    """
    content = read_mapping(path)
    name = content.pop("name", path.stem)
    listed = content.pop("cases", None)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed) or not listed:
        raise YamlError(f"{path}: cases must be a list of mappings")
    cases = []
    for number, entry in enumerate(listed, start=1):
        try:
            cases += expand({**content, **entry}, overrides)
        except (ValueError, TypeError) as error:
            raise YamlError(f"{path}: case {number}: {error}") from error
    return str(name), cases


def expand(entry: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Case]:
    """The cases of one entry: every combination of the lists in it."""
    values = {**entry, **{key: value for key, value in overrides.items() if value is not None}}
    known = {field.name for field in fields(Case)}
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; use some of: {', '.join(sorted(known))}")
    if missing := [key for key in ("case", "shape") if key not in values]:
        raise ValueError(f"{missing[0]} is missing")
    if overrides.get("depth") and "depth" not in entry and str(values.get("layers")).startswith("last:"):
        whole = int(SHAPES.get(values["shape"], {"num_hidden_layers": 1})["num_hidden_layers"])
        last = int(values["layers"].removeprefix("last:"))
        values["layers"] = f"last:{max(1, last * overrides['depth'] // whole)}"
    for key in ("budgets", "baselines", "layers"):
        if isinstance(values.get(key), list):
            values[key] = tuple(values[key])
    if isinstance(values.get("baselines"), str):
        values["baselines"] = tuple(part.strip() for part in values["baselines"].split(","))
    if isinstance(values.get("budgets"), int | float):
        values["budgets"] = (float(values["budgets"]),)
    many = {key: values[key] if isinstance(values.get(key), list) else [values[key]] for key in _MANY if key in values}
    return [Case(**{**values, **dict(zip(many, chosen))}) for chosen in itertools.product(*many.values())]
