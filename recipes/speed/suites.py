"""Benchmark suites: YAML files that list many cases of models with random weights,
and the run of one.

A file is a mapping. Keys other than `name` and `cases` are defaults of every case; `cases` is a
list of mappings:

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

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench.cases import Case
from hf_depthroute.bench.inference import Shares, Times, measure_inference
from hf_depthroute.bench.modes import check_modes, first_sequences
from hf_depthroute.bench.suite import new_result, run_case, size_of, tokens_of
from hf_depthroute.bench.timing import dtype_name
from hf_depthroute.bench.variants import (
    adapter_dtype,
    dense_view,
    hold_in_base_dtype,
)
from hf_depthroute.files.strict_yaml import YamlError, read_mapping
from hf_depthroute.parts.targets import TARGETS

from .lora import LOSSES, measure_loading, measure_training
from .memory import measure_memory
from .roofline import Peaks, add_roofline, measure_peaks
from .shapes import SHAPES, random_model
from .variants import SpeedVariants, add_variants

_MANY = ("batch", "length", "loss")  # keys that may hold a list
_TUNED_PROMPT = 128  # tokens


@dataclass(frozen=True, kw_only=True)
class SuiteCase(Case):
    """One measurement of a model that is made for it.

    Attributes:
        masked: Whether the mask-after-compute router is timed too.
        tune: Whether the executors that `tune_execution` chooses are timed too.
        shape: A key of `SHAPES`.
        depth: Decoder layers; None for the shape's own.
        vocabulary: Rows of embedding and head; None for the shape's own.
        dtype: The dtype of the base's weights.
        layers: Routed layers, as in `DepthRouteConfig`.
        target: What is routed.
        gate: The gate.
        phases: What inference routes, as in `DepthRouteConfig`.
        loss: The loss of a training step, one of `LOSSES`.

    Raises:
        ValueError: A value cannot be used. The message is one line.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("prefill", "decode", "train", "load", "memory")

    masked: bool = False
    tune: bool = False
    shape: str
    depth: int | None = None
    vocabulary: int | None = None
    dtype: str = "bfloat16"
    layers: str | tuple[int, ...] = "last:12"
    target: str = "ffn"
    gate: str = "mlp"
    phases: str = "all"
    loss: str = "naive"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("masked", "tune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        self.check_choice("shape", tuple(SHAPES))
        self.check_choice("dtype", ("bfloat16", "float32", "float16"))
        self.check_choice("loss", LOSSES)
        self.config().routed_layers(self.layer_count())

    def layer_count(self) -> int:
        return self.depth or int(SHAPES[self.shape]["num_hidden_layers"])

    def config(self) -> DepthRouteConfig:
        layers = list(self.layers) if isinstance(self.layers, tuple) else self.layers
        return DepthRouteConfig(
            layers=layers, target=self.target, gate=self.gate, phases=self.phases
        )

    def made_from(self) -> tuple[Any, ...]:
        """Equal for cases of the same base model."""
        return self.shape, self.depth, self.vocabulary, self.dtype

    def describe(self) -> str:
        """One line that tells this case from others, and is the same in every run of it."""
        layers = ",".join(map(str, self.layers)) if isinstance(self.layers, tuple) else self.layers
        depth = "" if self.depth is None else f" cut to {self.depth} layers"
        vocabulary = "" if self.vocabulary is None else f", vocabulary {self.vocabulary}"
        phases = "" if self.phases == "all" else f", phases {self.phases}"
        return (
            f"{self.sizes()}: {self.shape}{depth}{vocabulary} {self.dtype}, {self.target} of "
            f"{layers}{phases}"
        )

    def sizes(self) -> str:
        if self.case == "load":
            return "load"
        return super().sizes() + (f", {self.loss} loss" if self.case == "train" else "")

    def setting(self, base: Any) -> dict[str, Any]:
        """How the model was made."""
        made: dict[str, Any] = {
            "routed_layers": self.config().routed_layers(self.layer_count()),
            "target": self.target,
            "gate": self.gate,
            "shape": self.shape,
            "depth": self.layer_count(),
            "vocabulary": base.config.vocab_size,
        }
        if self.phases != "all":
            made["phases"] = self.phases
        return made | size_of(base)


def read_suite(path: Path, **overrides: Any) -> tuple[str, list[SuiteCase]]:
    """The name and the cases of a suite file.

    Args:
        path: The YAML file.
        overrides: Fields of `SuiteCase` that hold for every case, whatever the file says; None
            leaves the file's. A depth also shortens `layers: last:N` in proportion, where the file
            asks for the whole depth.

    Raises:
        ValueError: The file cannot be used. The message is one line and names file, case and key.
    """
    content = read_mapping(path)
    name = content.pop("name", path.stem)
    listed = content.pop("cases", None)
    if (
        not isinstance(listed, list)
        or not all(isinstance(entry, dict) for entry in listed)
        or not listed
    ):
        raise YamlError(f"{path}: cases must be a list of mappings")
    cases = []
    for number, entry in enumerate(listed, start=1):
        try:
            cases += expand({**content, **entry}, overrides)
        except (ValueError, TypeError) as error:
            raise YamlError(f"{path}: case {number}: {error}") from error
    return str(name), cases


def expand(entry: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[SuiteCase]:
    """The cases of one entry: every combination of the lists in it."""
    values = {**entry, **{key: value for key, value in overrides.items() if value is not None}}
    known = {field.name for field in fields(SuiteCase)}
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; use some of: {', '.join(sorted(known))}")
    if missing := [key for key in ("case", "shape") if key not in values]:
        raise ValueError(f"{missing[0]} is missing")
    if (
        overrides.get("depth")
        and "depth" not in entry
        and str(values.get("layers")).startswith("last:")
    ):
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
    many = {
        key: values[key] if isinstance(values.get(key), list) else [values[key]]
        for key in _MANY
        if key in values
    }
    return [
        SuiteCase(**{**values, **dict(zip(many, chosen))})
        for chosen in itertools.product(*many.values())
    ]


def run_suite(
    cases: Sequence[SuiteCase],
    name: str = "bench",
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure all cases, one after the other; models of the same shape are made once.

    Args:
        cases: What to measure.
        name: A name for the result.
        device: Where the weights are made; default: the GPU if there is one.
        progress: Called with one line per case.

    Returns:
        A JSON-ready dict, as from `hf_depthroute.bench.run_cases`, with the machine's `peaks` (per
        dtype).
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result = new_result(name, device)
    result["peaks"] = {}
    for kind in dict.fromkeys(case.made_from() for case in cases):
        group = [case for case in cases if case.made_from() == kind]
        first = group[0]
        dtype = getattr(torch, first.dtype)
        base = random_model(
            first.shape, dtype, depth=first.depth, vocabulary=first.vocabulary, device=device
        )
        peaks = measure_peaks(device, dtype)
        result["peaks"][dtype_name(dtype)] = peaks.to_dict()
        for case in group:
            measure_one = functools.partial(_measure, base=base, peaks=peaks)
            result["measurements"].append(
                run_case(case, case.describe(), case.setting(base), measure_one, progress)
            )
        del base, measure_one
    return result


def _measure(case: SuiteCase, base: Any, peaks: Peaks) -> dict[str, Any]:
    if case.case == "train":
        sizes = {"batch": case.batch, "length": case.length, "rounds": case.rounds}
        return measure_training(base, case.config(), loss=case.loss, peaks=peaks, **sizes)
    if case.case == "load":
        return measure_loading(base, case.config(), rounds=case.rounds)
    # Copies of the modules around the same weights: the base itself stays as it is for the next
    # case.
    model = get_depth_routed_model(dense_view(base), case.config())
    if case.case != "memory":
        modes = check_modes(case.baselines, next(base.parameters()).device)
        hold_in_base_dtype(model, base, modes)
    ids = tokens_of(case, model)
    if case.case == "memory":
        ids = torch.cat([ids, ids[:, :1]], dim=1)
    variants = SpeedVariants(
        model,
        dense_view(base),
        case.budgets,
        first_sequences(ids),
        case.masked,
        *_tuned_on(case, ids),
    )

    def also(measured: dict[str, Any], times: Times, shares: Shares) -> None:
        add_variants(measured, times, shares)
        add_roofline(measured, times, shares, peaks)

    try:
        if case.case == "memory":
            measured = measure_memory(variants, case, ids)
        else:
            measured = measure_inference(variants, case, ids, also)
    finally:
        variants.restore()
    return {"adapter_dtype": adapter_dtype(model), **measured}


def _tuned_on(case: SuiteCase, input_ids: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """The prompts that executors are chosen on, if they are,
    and whether for decoding steps after them."""
    decodes = case.case == "decode"
    if not case.tune or case.case == "memory":
        return None, decodes
    prompts = input_ids[:, : case.length]
    if decodes and not TARGETS[case.target].skips_attention:
        # An FFN's steps do not depend on how long the prompt was.
        prompts = prompts[:, -_TUNED_PROMPT:]
    return prompts, decodes
