"""Plots of a result, as PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from pages import png_of

from hf_depthroute.bench.measurements import TIMED, measurements, short_label
from hf_depthroute.bench.variants import DISABLED, FULL
from hf_depthroute.files.staged import write_bytes

Found = Sequence[Mapping[str, Any]]  # measurements
COLORS = {
    "routed": "#0072b2",
    "masked": "#d55e00",
    "ideal": "#009e73",
    "lora": "#cc79a7",
    "tuned": "#e69f00",
}
_ROW = 0.26  # inches for one bar
_ONE: dict[str, Any] = {"color": "black", "lw": 1, "ls": "--"}
# Marks on the bars: column, label, marker, colour, size, width of the edge.
_TIMES = (
    ("masked.ratio", "mask after compute", "D", COLORS["masked"], 6, None),
    ("tuned.ratio", "tuned executors", "o", COLORS["tuned"], 6, None),
    ("budgets.flops_routed_over_dense", "FLOPs / dense", "|", COLORS["ideal"], 15, 2.4),
    ("budgets.roofline_routed_over_dense", "roofline / dense", "|", "black", 15, 1.4),
)
_ETAS = (
    ("budgets.eta_roofline", "against the roofline", "o", "black", 5, None),
    ("budgets.eta_free", "a router that costs nothing", "|", "black", 16, 2),
    ("masked.eta", "mask after compute", "D", COLORS["masked"], 6, None),
)


def plot_result(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Draw what the result has: `times.png`, `eta.png`, `roofline.png`, `sweep.png`,
    `training.png`, `memory.png`.

    Args:
        folder: Made if it is not there.
        result: What `bench` or `run_suite` returned.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [m for m in measurements(result) if "error" not in m]
    figures: dict[str, Figure | None] = {}
    if timed := [m for m in found if m["case"] in TIMED]:
        rows = _rows(timed)
        figures = {
            "times": _times(rows),
            "eta": _eta(rows),
            "roofline": _roofline(rows, result.get("peaks", {})),
        }
        figures["sweep"] = _sweep(rows)
    for name, case, draw in (("training", "train", _training), ("memory", "memory", _memory)):
        mine = [m for m in found if m["case"] == case]
        figures[name] = draw(mine) if mine else None
    drawn = {
        folder / f"{name}.png": figure for name, figure in figures.items() if figure is not None
    }
    for path, figure in drawn.items():
        write_bytes(path, png_of(figure, dpi=130))
    return list(drawn)


def _rows(timed: Found) -> pd.DataFrame:
    """A row for every budget of every measurement; nested values in columns such as
    `"masked.ratio"`."""
    rows = [
        {"title": f"{title}, budget {budget}", "model": _model(m), "budget": budget}
        | {"eta": row.get("eta"), "error": row.get("ratio_error")}
        | {
            name: m.get(name)
            for name in ("case", "batch", "length", "setting", "dense_ms", "roofline")
        }
        | {kind: m.get(kind, {}).get(budget, {}) for kind in ("budgets", "masked", "tuned")}
        for m, title in zip(timed, _titles(timed))
        for budget, row in m["budgets"].items()
    ]
    return pd.json_normalize(rows)


def _times(rows: pd.DataFrame) -> Figure:
    """Time over dense time: routed, masked, and the two ideals."""
    figure, axes = _bars(rows["title"], _shared(rows["model"]), "time / dense time")
    axes.axvline(1.0, label="dense", **_ONE)
    style = {"color": COLORS["routed"], "label": "routed", "error_kw": {"lw": 1}}
    axes.barh(rows.index, rows["budgets.ratio"], 0.62, xerr=pd.to_numeric(rows["error"]), **style)
    _mark(axes, rows, _TIMES)
    axes.set_xlim(
        0, 1.08 * pd.Series([1.0, *rows["budgets.ratio"], *rows.get("masked.ratio", ())]).max()
    )
    _legend(figure, axes)
    return figure


def _eta(rows: pd.DataFrame) -> Figure | None:
    """`eta` against FLOPs and against the roofline; 1 is the line."""
    rows = rows.dropna(subset="eta").reset_index()
    if rows.empty:
        return None
    figure, axes = _bars(
        rows["title"], _shared(rows["model"]), "eta: saved time / time that could be saved"
    )
    axes.axvline(1.0, **_ONE)
    axes.axvline(0.0, color="0.6", lw=1)
    axes.barh(rows.index, rows["eta"], 0.62, color=COLORS["routed"], label="against FLOPs")
    _mark(axes, rows, _ETAS)
    axes.set_xlim(max(1.1 * pd.Series([0.0, *rows.get("masked.eta", ())]).min(), -1.0), None)
    _legend(figure, axes)
    return figure


def _mark(axes: Any, rows: pd.DataFrame, marks: Sequence[tuple[Any, ...]]) -> None:
    for column, label, marker, color, size, edge in marks:
        if column in rows and rows[column].notna().any():
            axes.plot(rows[column], rows.index, marker, label=label, color=color, ms=size, mew=edge)


def _roofline(rows: pd.DataFrame, peaks: Mapping[str, Any]) -> Figure | None:
    """Reached FLOP rate over arithmetic intensity, under the machine's roof."""
    panels = [(dtype, mine) for dtype, mine in rows.groupby("setting.dtype") if dtype in peaks]
    if not panels:
        return None
    figure = Figure(figsize=(6.6 * len(panels), 4.2), layout="constrained")
    for axes, (dtype, mine) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        rate, bandwidth = peaks[dtype]["gflop_per_s"], peaks[dtype]["gb_per_s"]
        knee, intensities = rate / bandwidth, []
        for prefix, ms, name, color in (
            ("roofline", "dense_ms", "dense", "0.35"),
            ("budgets.roofline", "budgets.routed_ms", "routed", COLORS["routed"]),
        ):
            for case, part in mine.drop_duplicates([f"{prefix}.gflop", ms]).groupby("case"):
                x = part[f"{prefix}.gflop"] / part[f"{prefix}.gb"]
                axes.plot(x, part[f"{prefix}.gflop"] / part[ms] * 1e3, "o" if case == "prefill" else "s", color=color,
                          ms=6, alpha=0.8, mec="white", label=f"{case}, {name}")  # fmt: skip
                intensities += list(x)
        low, high = min(intensities) / 3, max(*intensities, knee) * 3
        axes.plot(
            [low, knee, high], [low * bandwidth, rate, rate], color="black", lw=1.2, zorder=1.9
        )
        title = f"{dtype}: {bandwidth:,.0f} GB/s, {rate:,.0f} GFLOP/s measured"
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s", title=title)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(fontsize=8)
    return figure


def _sweep(rows: pd.DataFrame) -> Figure | None:
    """Speed-up over length, one line per batch and budget;
    where a case was measured at three lengths or more."""
    lines = ["budget", "batch"]
    panels = [(*key, part) for key, part in rows.groupby(["case", "model"], sort=False)]
    panels = [panel for panel in panels if panel[2].groupby(lines).size().max() >= 3]
    if not panels:
        return None
    figure = Figure(figsize=(5.6 * len(panels), 3.9), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (case, model, part) in zip(axes, panels):
        budgets, batches = sorted(set(part["budget"]), reverse=True), sorted(set(part["batch"]))
        panel.axhline(1.0, **_ONE)
        for (budget, batch), line in part.sort_values("length").groupby(lines, sort=False):
            shade = matplotlib.colormaps["viridis"](
                0.85 * batches.index(batch) / max(1, len(batches) - 1)
            )
            style = ("-", ":", "-.", "--")[budgets.index(budget) % 4]
            panel.plot(line["length"], line["budgets.speedup"], color=shade, ls=style, marker="o", ms=4,
                       label=f"batch {batch}, budget {budget}")  # fmt: skip
        panel.set(
            xscale="log", xlabel="prompt tokens" if case == "prefill" else "tokens in the cache"
        )
        ticks = sorted(set(part["length"]))
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(f"{case}, {model}", fontsize=9)
        panel.legend(fontsize=7)
    axes[0].set_ylabel("speed-up over dense")
    return figure


def _training(found: Found) -> Figure:
    """Time and peak memory of a training step, routers and LoRA."""
    shared = _shared(map(_model, found))
    figure = Figure(figsize=(11, 1.4 + 2.4 * _ROW * len(found)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    units = (
        ("ms", 1.0, "optimizer step, ms"),
        ("peak_bytes", 1e6, "peak memory above the weights, MB"),
    )
    for panel, (key, scale, label) in zip(axes, units):
        for shift, name, title in (
            (-0.2, "routed", "routers"),
            (0.2, "lora", "LoRA on the same layers' FFNs"),
        ):
            places = [place + shift for place in range(len(found))]
            panel.barh(
                places,
                [m[f"{name}_{key}"] / scale for m in found],
                0.36,
                color=COLORS[name],
                label=title,
            )
        panel.set_xlabel(label)
    _name_rows(axes[0], [short_label(m) + ("" if shared else f"\n{_model(m)}") for m in found])
    figure.suptitle(shared, fontsize=9)
    _legend(figure, axes[0])
    return figure


def _memory(found: Found) -> Figure:
    """KV cache and peak activations of every variant, per case."""
    names, cached, rest = zip(*(
        (f"{title}, {name}", row["kv_bytes"] / 1e6, max(0, row["prefill_bytes"] - row["kv_bytes"]) / 1e6)
        for m, title in zip(found, _titles(found))
        for name, row in m["variants"].items()
        if name not in (DISABLED, FULL) or "base" not in m["variants"]
    ))  # fmt: skip
    shared, weights = (
        _shared(map(_model, found)),
        " or ".join(sorted({f"{m['base_bytes'] / 1e6:,.0f}" for m in found})),
    )
    title = f"{shared}{': ' if shared else ''}{weights} MB of weights"
    figure, axes = _bars(names, title, "MB besides the weights")
    axes.barh(range(len(names)), cached, 0.62, color=COLORS["ideal"], label="KV cache")
    axes.barh(
        range(len(names)),
        rest,
        0.62,
        left=cached,
        color=COLORS["routed"],
        label="the rest of prefill's peak",
    )
    _legend(figure, axes)
    return figure


def _model(m: Mapping[str, Any]) -> str:
    return str(m["label"].partition(": ")[2])


def _shared(models: Iterable[str]) -> str:
    """The model of all, for a title; empty where they differ."""
    different = set(models)
    return different.pop() if len(different) == 1 else ""


def _titles(found: Found) -> list[str]:
    """A label per measurement: the run, and the model if they differ."""
    shared = _shared(map(_model, found))
    return [short_label(m) if shared else f"{short_label(m)} ({_model(m)})" for m in found]


def _bars(names: Sequence[str], title: str, xlabel: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9, 1.3 + _ROW * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=9)
    _name_rows(axes, names)
    return figure, axes


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
