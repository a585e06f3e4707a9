"""Results read, compared with each other, and as tables of strings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .shapes import SHAPES

TIMED = ("prefill", "decode")
_PARTS = (*TIMED, "memory")


def read_result(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: It cannot be read, or is none. The message is one line and names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not ("measurements" in content or any(part in content for part in _PARTS)):
        raise ValueError(f"{path}: not a result of hf-depthroute bench")
    return content


def measurements(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of a result of `run_cases` or of `bench`; each has `case`, `label` and `setting`."""
    if "measurements" in result:
        return list(result["measurements"])
    found = []
    for part in _PARTS:
        if part in result:
            setting = result["setting"]
            batch = result[part].get("batch", setting["decode_batch" if part == "decode" else "batch"])
            length = result[part].get("length", setting["length"])
            sizes = f"{batch} x {setting['decode_steps']} steps after {length}" if part == "decode" else ""
            model = setting.get("shape", setting["model_type"])
            if "depth" in setting and setting["depth"] != SHAPES[model]["num_hidden_layers"]:
                model += f" cut to {setting['depth']} layers"
            routed = f"{setting.get('target', 'ffn')} of {len(setting['routed_layers'])} layers"
            label = f"{part} {sizes or f'{batch} x {length}'}: {model} {setting['dtype']}, {routed}"
            kept = {"case": part, "label": label, "setting": setting, "batch": batch, "length": length}
            found.append({**kept, **result[part]})
    return found


def short_label(measurement: Mapping[str, Any]) -> str:
    """The part of a label in front of the model: what was run."""
    return str(measurement["label"].split(":")[0])


_ERRORS = 2.0  # standard errors of the difference; more is a change


@dataclass(frozen=True)
class Change:
    """One figure in both results. Lower is better for all of them.

    Attributes:
        label: The measurement's label.
        figure: What was measured.
        old: Before.
        new: After.
        noise: What the difference must exceed to count, in the figure's unit; None where a result does not say.
    """

    label: str
    figure: str
    old: float
    new: float
    noise: float | None

    @property
    def ratio(self) -> float:
        return self.new / self.old if self.old else math.nan

    @property
    def verdict(self) -> str:
        """`lower`, `higher`, `same` (within the noise), or `noise unknown`."""
        if self.noise is None:
            return "same" if self.new == self.old else "noise unknown"
        if abs(self.new - self.old) <= self.noise:
            return "same"
        return "lower" if self.new < self.old else "higher"


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    changes: All figures that both results have.
    notes: One line each: what else differs.
    """

    changes: list[Change]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(change), "ratio": change.ratio, "verdict": change.verdict} for change in self.changes]
        return {"changes": rows, "notes": self.notes}


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare two results of `bench` or `run_cases`. Measurements are matched by their labels."""
    before = {m["label"]: m for m in measurements(old)}
    after = {m["label"]: m for m in measurements(new)}
    changes, notes = [], []
    for name, (a, b) in _differences(old.get("machine", {}), new.get("machine", {})):
        notes.append(f"machine: {name} {a} -> {b}")
    for label in before:
        if label not in after:
            notes.append(f"only in the old result: {label}")
            continue
        found, now = dict(_figures(before[label])), dict(_figures(after[label]))
        for figure, (value, error) in found.items():
            if figure in now:
                noise = None
                if error is not None and now[figure][1] is not None:
                    noise = _ERRORS * math.hypot(error, now[figure][1])
                changes.append(Change(label, figure, value, now[figure][0], noise))
    notes += [f"only in the new result: {label}" for label in after if label not in before]
    return Comparison(changes, notes)


def _figures(measurement: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, Any]]]:
    """Name, value and standard error (None: unknown) of what is compared."""
    m = measurement
    if "error" in m:
        return
    if m["case"] in TIMED:
        relative = m.get("dense_error")
        yield "dense ms", (m["dense_ms"], None if relative is None else relative * m["dense_ms"])
        for name, row in m.get("overheads", {}).items():
            yield f"{name} / dense", (row["ratio"], row["ratio_error"])
        for kind, rows in (("budget", m["budgets"]), ("masked", m.get("masked", {})), ("tuned", m.get("tuned", {}))):
            for budget, row in rows.items():
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


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys((*old, *new)):
        if name != "load_before" and old.get(name) != new.get(name):
            yield name, (old.get(name), new.get(name))


@dataclass(frozen=True)
class Table:
    """`rows` of strings, each as long as `head`."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> list[str]:
        return ["| " + " | ".join(row) + " |" for row in (self.head, ("---",) * len(self.head), *self.rows)]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """A table per kind of case that the result has."""
    found = measurements(result)
    makers = (_times, _overheads, _training, _loading, _memory)
    return [table for table in (make(found) for make in makers) if table.rows]


def comparison_table(comparison: Comparison) -> Table:
    rows = [
        (c.label, c.figure, _number(c.old), _number(c.new), f"{c.ratio:.3f}", c.verdict) for c in comparison.changes
    ]
    return Table(("case", "figure", "old", "new", "new / old", "verdict"), rows)


def _times(found: list[dict[str, Any]]) -> Table:
    head = ("case", "variant", "share full", "ms", "dense ms", "speed-up", "FLOPs / dense", "eta", "eta roofline",
            "eta free", "tokens/s", "modes")  # fmt: skip
    rows = []
    for m in found:
        if m["case"] not in TIMED or "error" in m:
            continue
        for kind, label in (("budgets", "routed"), ("masked", "masked"), ("tuned", "tuned")):
            for budget, row in m.get(kind, {}).items():
                routed = m["budgets"][budget]
                modes = f"{row['mode']} / {m['dense_mode']}" if "mode" in row else ""
                rows.append((
                    short_label(m), f"{label} {budget}", f"{routed['full_ratio']:.3f}",
                    f"{row[f'{label}_ms']:.2f}", f"{m['dense_ms']:.2f}", f"{row['speedup']:.3f}",
                    f"{routed['flops_routed_over_dense']:.3f}", _optional(row.get("eta")),
                    *(_optional(row.get(name)) for name in ("eta_roofline", "eta_free")),
                    f"{row['tokens_per_s']:.0f}", modes,
                ))  # fmt: skip
    return Table(head, rows)


def _overheads(found: list[dict[str, Any]]) -> Table:
    rows = []
    for m in found:
        if m["case"] in TIMED and m.get("overheads") and "error" not in m:
            roof = m["roofline"]
            rows.append((
                short_label(m), *(_with_error(m["overheads"][name]) for name in ("disabled", "budget 1.0")),
                f"{roof['gflop']:.1f}", f"{roof['gb']:.2f}", f"{roof['ideal_ms']:.2f}", roof["bound"],
                f"{roof['ideal_ms'] / m['dense_ms']:.2f}",
            ))  # fmt: skip
    head = ("case", "disabled / base", "budget 1.0 / base", "dense GFLOP", "dense GB", "roofline ms", "bound by",
            "roofline / dense")  # fmt: skip
    return Table(head, rows)


def _training(found: list[dict[str, Any]]) -> Table:
    rows = [
        (
            short_label(m), f"{m['routed_ms']:.1f}", f"{m['lora_ms']:.1f}", _with_error(m),
            f"{m['routed_tokens_per_s']:.0f}", f"{m['routed_peak_bytes'] / 1e6:.1f}",
            f"{m['lora_peak_bytes'] / 1e6:.1f}", f"{m['logits_bytes'] / 1e6:.1f}",
        )
        for m in found if m["case"] == "train" and "error" not in m
    ]  # fmt: skip
    head = ("case", "router step ms", "LoRA step ms", "router / LoRA", "tokens/s", "router peak MB", "LoRA peak MB",
            "logits MB")  # fmt: skip
    return Table(head, rows)


def _loading(found: list[dict[str, Any]]) -> Table:
    rows = [
        (
            m["label"].removeprefix("load: "),
            name, *(f"{m[name][f'{step}_ms']:.1f}" for step in ("inject", "save", "load")),
            f"{m[name]['bytes'] / 1e6:.2f}",
        )
        for m in found if m["case"] == "load" and "error" not in m for name in ("routed", "lora")
    ]  # fmt: skip
    return Table(("model", "adapter", "inject ms", "save ms", "load ms", "MB"), rows)


def _memory(found: list[dict[str, Any]]) -> Table:
    rows = []
    for m in found:
        if m["case"] == "memory" and "error" not in m:
            weights = {name: m["base_bytes"] + (0 if name == "base" else m["adapter_bytes"]) for name in m["variants"]}
            for name, row in m["variants"].items():
                sizes = (weights[name], *(row.get(key) for key in ("kv_bytes", "prefill_bytes", "decode_bytes")))
                rows.append((short_label(m), name, *("-" if s is None else f"{s / 1e6:.2f}" for s in sizes)))
    head = ("case", "variant", "weights MB", "KV cache MB", "prefill peak MB", "decode peak MB")
    return Table(head, rows)


def _with_error(row: Mapping[str, Any]) -> str:
    error = row.get("ratio_error")
    return f"{row['ratio']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.3f}"
