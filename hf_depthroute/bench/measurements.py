"""Results as they are read, the form of a single one, and two of them compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.shown import counted
from .cases import Case

TIMED = ("prefill", "decode")
Figure = tuple[float, float | None]  # value and standard error; None: unknown


def read_result(path: Path) -> dict[str, Any]:
    """A result file; `ValueError`, one line with its name, if it cannot be read or is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.keys().isdisjoint(("measurements", *Case.KINDS)):
        raise ValueError(f"{path}: not a result of hf-depthroute bench")
    return content


def measurements(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of a result; each has `case`, `label` and `setting`."""
    if "measurements" in result:
        return list(result["measurements"])
    found = []
    for part in (part for part in Case.KINDS if part in result):
        setting = result["setting"]
        decodes = part == "decode"
        batch = setting["decode_batch" if decodes else "batch"]
        measured = {"batch": batch, "length": setting["length"], **result[part]}
        steps = setting["decode_steps"] if decodes else 1
        case = Case(case=part, steps=steps, batch=measured["batch"], length=measured["length"])
        label = label_of(case.sizes(), setting)
        found.append({"case": part, "label": label, "setting": setting, **measured})
    return found


def as_single(result: Mapping[str, Any], sizes: Mapping[str, object]) -> dict[str, Any]:
    """The measurements of one model, one of each case, in the form of `bench`: `setting`, with
    `sizes` in it, `machine`, and what was measured under the name of its case.

    Raises:
        MemoryError: There was not enough for one of them.
    """
    single: dict[str, Any] = {"setting": {}, "machine": result["machine"]}
    for measured in result["measurements"]:
        if "error" in measured:
            raise MemoryError(measured["label"])
        of_all = {"case", "label", "setting", "adapter_dtype"}
        own = {key: value for key, value in measured.items() if key not in of_all}
        single[measured["case"]] = own
        single["setting"] = measured["setting"] | {"adapter_dtype": measured["adapter_dtype"]}
    single["setting"] |= sizes
    return single


def label_of(sizes: str, setting: Mapping[str, Any]) -> str:
    """The label of a measurement from what it ran, as `Case.sizes`, and its setting."""
    model = setting.get("shape", setting["model_type"])
    layers = counted(len(setting["routed_layers"]), "layer")
    routed = f"{setting.get('target', 'ffn')} of {layers}"
    phases = ""
    if "phases" in setting:
        phases = f", phases {setting['phases']}"
    return f"{sizes}: {model} {setting['dtype']}, {routed}{phases}"


def short_label(measurement: Mapping[str, Any]) -> str:
    """The part of a label before the model: the run."""
    return str(measurement["label"].split(":")[0])


_ERRORS = 2.0  # standard errors of the difference; more is a change


@dataclass(frozen=True)
class Change:
    """One figure of the measurement `label` in both results. Lower is better for all of them."""

    label: str
    figure: str
    old: float
    new: float
    noise: float | None  # what a difference must exceed to count; None if a result does not say
    ratio: float  # new over old; NaN where the old is 0
    verdict: str  # `lower`, `higher`, `same` (within the noise), or `noise unknown`


@dataclass(frozen=True)
class Comparison:
    """The differences between two results."""

    changes: list[Change]  # all figures that both have
    notes: list[str]  # what else differs, a line each


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare two results of `bench` or `run_cases`. Measurements are matched by their labels."""
    before = {m["label"]: dict(_figures(m)) for m in measurements(old)}
    after = {m["label"]: dict(_figures(m)) for m in measurements(new)}
    was = old.get("machine", {})
    now = new.get("machine", {})
    notes = [
        f"machine: {name} {was.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys((*was, *now))
        if name != "load_before" and was.get(name) != now.get(name)
    ]
    notes += [f"only in the old result: {label}" for label in before if label not in after]
    notes += [f"only in the new result: {label}" for label in after if label not in before]
    changes = [
        _change(label, figure, value, after[label][figure])
        for label, figures in before.items()
        for figure, value in figures.items()
        if figure in after.get(label, {})
    ]
    return Comparison(changes, notes)


def _change(label: str, figure: str, old: Figure, new: Figure) -> Change:
    before, error = old
    after, other = new
    noise = None
    if error is not None and other is not None:
        noise = _ERRORS * math.hypot(error, other)
    verdict = "lower" if after < before else "higher"
    if abs(after - before) <= (noise or 0.0):
        verdict = "same"
    elif noise is None:
        verdict = "noise unknown"
    ratio = after / before if before else math.nan
    return Change(label, figure, before, after, noise, ratio, verdict)


def _figures(m: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The compared figures, by name."""
    if "error" in m:
        return
    if m["case"] in TIMED:
        relative = m.get("dense_error")
        yield "dense ms", (m["dense_ms"], None if relative is None else relative * m["dense_ms"])
        for name, row in m.get("overheads", {}).items():
            yield f"{name} / dense", (row["ratio"], row["ratio_error"])
        kinds = {"budget": m["budgets"], "masked": m.get("masked"), "tuned": m.get("tuned")}
        for kind, rows in kinds.items():
            for budget, row in (rows or {}).items():
                yield f"{kind} {budget} / dense", (row["ratio"], row.get("ratio_error"))
    elif m["case"] == "memory":
        for name, row in m["variants"].items():
            for kind, size in row.items():
                yield f"{name}: {kind.removesuffix('_bytes')} bytes", (size, 0.0)
    else:
        yield "routed / LoRA", (m["ratio"], m["ratio_error"])
        if m["case"] == "train":
            for name in ("routed", "lora"):
                yield f"{name}: peak bytes", (m[f"{name}_peak_bytes"], 0.0)
