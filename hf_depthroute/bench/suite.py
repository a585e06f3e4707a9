"""Many measurements in one process, from a list of cases: `run_cases`, and the YAML files that describe them.

A file is a mapping. Keys beside `name` and `cases` are defaults of every case; `cases` is a list of mappings:

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

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import DepthRouteConfig, check_budget
from ..tuner import get_depth_routed_model
from ..yaml_files import YamlError, read_mapping
from .inference import Workload, measure_inference
from .lora import LOSSES, measure_loading, measure_training
from .memory import measure_memory
from .modes import check_modes, forget_compiled
from .shapes import SHAPES, dense_view, first_sequences, random_model, random_tokens
from .timing import Peaks, describe_machine, measure_peaks, relative_load
from .variants import Variants, adapter_dtype, hold_adapter_in, wants_base_dtype

CASES = ("prefill", "decode", "train", "load", "memory")
DTYPES = ("bfloat16", "float32", "float16")
_TUNED_PROMPT = 128  # tokens
_MANY = ("batch", "length", "loss")  # keys that may hold a list


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        case: One of `CASES`.
        shape: A key of `SHAPES`.
        depth: Decoder layers; None for the shape's own.
        vocabulary: Rows of embedding and head; None for the shape's own.
        dtype: The dtype of the base's weights.
        layers: Routed layers, as in `DepthRouteConfig`.
        target: What is routed.
        gate: The gate.
        budgets: Budgets, in (0, 1).
        masked: Whether the mask-after-compute router is timed too.
        tune: Whether the executors that `tune_execution` chooses are timed too.
        baselines: Modes to run in, of `MODES`; None for eager on CPUs and all on GPUs.
        batch: Sequences.
        length: Tokens of the prompt, or of a training sequence.
        steps: Decoding steps.
        logits: Which of a prompt's logits are computed: `"all"`, or the `"last"` position's.
        loss: The loss of a training step, one of `LOSSES`.
        rounds: Rounds.

    Raises:
        ValueError: A value cannot be used. The message is one line.
    """

    case: str
    shape: str
    depth: int | None = None
    vocabulary: int | None = None
    dtype: str = "bfloat16"
    layers: str | tuple[int, ...] = "last:12"
    target: str = "ffn"
    gate: str = "mlp"
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
        choices = {"case": CASES, "shape": tuple(SHAPES), "dtype": DTYPES, "logits": ("all", "last"), "loss": LOSSES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of: {', '.join(allowed)}")
        for name in ("batch", "length", "steps", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("masked", "tune"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        if not self.budgets or any(check_budget(budget) == 1.0 for budget in self.budgets):
            raise ValueError(f"budgets={list(self.budgets)}: give numbers in (0, 1); budget 1 is always measured")
        if self.baselines is not None:
            check_modes(self.baselines, torch.device("cpu"))
        self.config().routed_layers(self.layer_count())

    def layer_count(self) -> int:
        return self.depth or int(SHAPES[self.shape]["num_hidden_layers"])

    def config(self) -> DepthRouteConfig:
        layers = list(self.layers) if isinstance(self.layers, tuple) else self.layers
        return DepthRouteConfig(layers=layers, target=self.target, gate=self.gate)

    def describe(self) -> str:
        """One line that tells this case from others, and is the same in every run of it."""
        layers = ",".join(map(str, self.layers)) if isinstance(self.layers, tuple) else self.layers
        depth = "" if self.depth is None else f" cut to {self.depth} layers"
        vocabulary = "" if self.vocabulary is None else f", vocabulary {self.vocabulary}"
        sizes = {
            "decode": f" {self.batch} x {self.steps} steps after {self.length}",
            "train": f" {self.batch} x {self.length}, {self.loss} loss",
            "load": "",
        }.get(self.case, f" {self.batch} x {self.length}")
        return f"{self.case}{sizes}: {self.shape}{depth}{vocabulary} {self.dtype}, {self.target} of {layers}"


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
    known = {field.name for field in dataclasses.fields(Case)}
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


def run_cases(
    cases: Sequence[Case],
    *,
    name: str = "bench",
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure all cases, one after the other; models of the same shape are built once.

    A case for which there is not enough memory says so in its result and does not end the run.

    Returns:
        A JSON-ready dict: `name`, `machine`, `peaks` (per dtype) and `measurements`, in each of which `label` tells
        the case, and `setting` how the model was made.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result: dict[str, Any] = {
        "name": name,
        "machine": describe_machine(device) | {"load_before": relative_load()},
        "peaks": {},
        "measurements": [],
    }
    for group in _by_model(cases):
        dtype = getattr(torch, group[0].dtype)
        peaks = measure_peaks(device, dtype)
        result["peaks"][group[0].dtype] = peaks.to_dict()
        base = random_model(group[0].shape, dtype, depth=group[0].depth, vocabulary=group[0].vocabulary, device=device)
        for case in group:
            _say(progress, case.describe())
            measured = {"case": case.case, "label": case.describe(), "setting": _setting(case, base)}
            try:
                measured |= _measure(case, base, peaks)
            except Exception as error:
                if not _out_of_memory(error):
                    raise
                measured["error"] = "out of memory"
                _say(progress, "  out of memory")
            result["measurements"].append(measured)
            forget_compiled()
            gc.collect()
        del base
    return result


def _measure(case: Case, base: Any, peaks: Peaks) -> dict[str, Any]:
    if case.case == "train":
        return measure_training(
            base,
            case.config(),
            batch=case.batch,
            length=case.length,
            loss=case.loss,
            rounds=case.rounds,
            peaks=peaks,
        )
    if case.case == "load":
        return measure_loading(base, case.config(), rounds=case.rounds)
    # Copies of the modules around the same weights: the base itself stays as it is for the next case.
    routed = get_depth_routed_model(dense_view(base), case.config()).eval()
    steps = {"prefill": 0, "memory": 1}.get(case.case, case.steps)
    ids = random_tokens(base, case.batch, case.length + steps)
    device = ids.device
    if case.case != "memory" and wants_base_dtype(device, check_modes(case.baselines, device)):
        hold_adapter_in(routed, getattr(torch, case.dtype))
    tuned_on = _tuning_prompts(case, ids) if case.tune and case.case != "memory" else None
    variants = Variants(
        routed,
        dense_view(base),
        case.budgets,
        case.masked,
        first_sequences(ids),
        tuned_on,
        case.case == "decode",
    )
    workload = Workload(ids, steps, case.logits)
    if case.case == "memory":
        return measure_memory(variants, workload)
    dtype = {"adapter_dtype": adapter_dtype(routed)}
    return dtype | measure_inference(variants, workload, modes=case.baselines, rounds=case.rounds, peaks=peaks)


def _tuning_prompts(case: Case, input_ids: torch.Tensor) -> torch.Tensor:
    """What executors are chosen on; an FFN's decoding steps do not depend on how long the prompt was."""
    prompts = input_ids[:, : case.length]
    return prompts[:, -_TUNED_PROMPT:] if case.case == "decode" and case.target == "ffn" else prompts


def _by_model(cases: Sequence[Case]) -> Iterator[list[Case]]:
    def key(case: Case) -> tuple[Any, ...]:
        return case.shape, case.depth, case.vocabulary, case.dtype

    for wanted in dict.fromkeys(map(key, cases)):
        yield [case for case in cases if key(case) == wanted]


def _setting(case: Case, base: Any) -> dict[str, Any]:
    return {
        "shape": case.shape,
        "depth": case.layer_count(),
        "vocabulary": base.config.vocab_size,
        "dtype": case.dtype,
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "routed_layers": case.config().routed_layers(case.layer_count()),
        "target": case.target,
        "gate": case.gate,
    }


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _say(progress: Callable[[str], None] | None, line: str) -> None:
    if progress is not None:
        progress(line)
