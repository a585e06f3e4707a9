"""Plots of a result, as PNG files. Matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..staged_files import png_of, write_bytes
from .results import TIMED, measurements, short_label
from .variants import DISABLED, FULL

COLORS = {
    "routed": "#0072b2",
    "masked": "#d55e00",
    "ideal": "#009e73",
    "roofline": "0.35",
    "lora": "#cc79a7",
    "tuned": "#e69f00",
}
_ROW = 0.26  # inches for one bar


def plot_result(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Draw what the result has: `times.png`, `eta.png`, `roofline.png`, `sweep.png`, `training.png`, `memory.png`.

    Args:
        folder: Made if it is not there.
        result: What `bench` or `run_cases` returned.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    found = [m for m in measurements(result) if "error" not in m]
    drawn: dict[str, Callable[[], Any]] = {
        "times": lambda: _times(found),
        "eta": lambda: _eta(found),
        "roofline": lambda: _roofline(found, result.get("peaks", {})),
        "sweep": lambda: _sweep(found),
        "training": lambda: _training(found),
        "memory": lambda: _memory(found),
    }
    written = []
    for name, draw in drawn.items():
        figure = draw()
        if figure is not None:
            write_bytes(folder / f"{name}.png", png_of(figure, dpi=130))
            written.append(folder / f"{name}.png")
            _close(figure)
    return written


def _timed(found: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    """Label, measurement and budget of every routed time."""
    mine = [m for m in found if m["case"] in TIMED]
    shared = _shared_model(mine)
    return [(f"{_title(m, shared)}, budget {budget}", m, budget) for m in mine for budget in m["budgets"]]


def _model(m: Mapping[str, Any]) -> str:
    return str(m["label"].partition(": ")[2])


def _shared_model(found: list[dict[str, Any]]) -> str:
    """The model and the setting of all measurements, for a title; empty where they differ."""
    models = {_model(m) for m in found}
    return models.pop() if len(models) == 1 else ""


def _title(m: Mapping[str, Any], shared: str) -> str:
    return short_label(m) if shared else f"{short_label(m)} ({_model(m)})"


def _times(found: list[dict[str, Any]]) -> Any:
    """Time over dense time: routed, masked, and the two ideals."""
    rows = _timed(found)
    if not rows:
        return None
    figure, axes = _bars(len(rows), "time / dense time")
    axes.axvline(1.0, color="black", lw=1, ls="--", label="dense")
    for place, (_, m, budget) in enumerate(rows):
        row, masked = m["budgets"][budget], m.get("masked", {}).get(budget)
        axes.barh(place, row["ratio"], 0.62, color=COLORS["routed"], xerr=row.get("ratio_error"),
                  error_kw={"lw": 1}, label=_once(place, "routed"))  # fmt: skip
        if masked:
            axes.plot(masked["ratio"], place, "D", color=COLORS["masked"], ms=6, label="mask after compute")
        tuned = m.get("tuned", {}).get(budget)
        if tuned:
            axes.plot(tuned["ratio"], place, "o", color=COLORS["tuned"], ms=6, label="tuned executors")
        axes.plot(row["flops_routed_over_dense"], place, "|", color=COLORS["ideal"], ms=15, mew=2.4,
                  label=_once(place, "FLOPs / dense"))  # fmt: skip
        if "roofline_routed_over_dense" in row:
            axes.plot(row["roofline_routed_over_dense"], place, "|", color="black", ms=15, mew=1.4,
                      label=_once(place, "roofline / dense"))  # fmt: skip
    shown = [r["ratio"] for _, m, b in rows for r in (m["budgets"][b], m.get("masked", {}).get(b)) if r]
    axes.set_xlim(0, 1.08 * max(1.0, *shown))
    axes.set_title(_shared_model([m for _, m, _ in rows]), fontsize=9)
    _name_rows(axes, [label for label, _, _ in rows])
    _legend(figure, axes)
    return figure


def _eta(found: list[dict[str, Any]]) -> Any:
    """`eta` against FLOPs and against the roofline; 1 is the line."""
    rows = [row for row in _timed(found) if row[1]["budgets"][row[2]].get("eta") is not None]
    if not rows:
        return None
    figure, axes = _bars(len(rows), "eta: saved time / time that could be saved")
    axes.axvline(1.0, color="black", lw=1, ls="--")
    axes.axvline(0.0, color="0.6", lw=1)
    for place, (_, m, budget) in enumerate(rows):
        row = m["budgets"][budget]
        axes.barh(place, row["eta"], 0.62, color=COLORS["routed"], label=_once(place, "against FLOPs"))
        if row.get("eta_roofline") is not None:
            axes.plot(row["eta_roofline"], place, "o", color="black", ms=5, label="against the roofline")
        if row.get("eta_free") is not None:
            axes.plot(row["eta_free"], place, "|", color="black", ms=16, mew=2, label="a router that costs nothing")
        masked = m.get("masked", {}).get(budget)
        if masked and masked["eta"] is not None:
            axes.plot(masked["eta"], place, "D", color=COLORS["masked"], ms=6, label="mask after compute")
    low = min(0.0, *(m["masked"][b]["eta"] or 0.0 for _, m, b in rows if b in m.get("masked", {})), 0.0)
    axes.set_xlim(max(low * 1.1, -1.0), None)
    axes.set_title(_shared_model([m for _, m, _ in rows]), fontsize=9)
    _name_rows(axes, [label for label, _, _ in rows])
    _legend(figure, axes)
    return figure


def _roofline(found: list[dict[str, Any]], peaks: Mapping[str, Any]) -> Any:
    """Reached FLOP rate over arithmetic intensity, under the machine's roof."""
    import matplotlib.pyplot as plt

    dtypes = [d for d in peaks if any(m["case"] in TIMED and m["setting"].get("dtype") == d for m in found)]
    if not dtypes:
        return None
    figure, panels = plt.subplots(1, len(dtypes), figsize=(6.6 * len(dtypes), 4.2), squeeze=False, layout="constrained")
    markers = {"prefill": "o", "decode": "s"}
    for axes, dtype in zip(panels[0], dtypes):
        rate, bandwidth = peaks[dtype]["gflop_per_s"], peaks[dtype]["gb_per_s"]
        mine = [m for m in found if m["case"] in TIMED and m["setting"].get("dtype") == dtype]
        dense = [(m["case"], m["roofline"], m["dense_ms"], "0.35", "dense") for m in mine]
        routed = [
            (m["case"], row["roofline"], row["routed_ms"], COLORS["routed"], "routed")
            for m in mine
            for row in m["budgets"].values()
        ]
        points = dense + routed
        intensity = [roof["gflop"] / roof["gb"] for _, roof, _, _, _ in points]
        low, high = min(intensity) / 3, max(*intensity, rate / bandwidth) * 3
        knee = rate / bandwidth
        axes.plot([low, knee, high], [low * bandwidth, rate, rate], color="black", lw=1.2)
        for (case, roof, ms, color, name), x in zip(points, intensity):
            axes.plot(x, roof["gflop"] / ms * 1e3, markers[case], color=color, ms=6, alpha=0.8, mec="white",
                      label=f"{case}, {name}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s",
                 title=f"{dtype}: {bandwidth:,.0f} GB/s, {rate:,.0f} GFLOP/s measured")  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: "")
        axes.grid(True, which="major", alpha=0.25)
        handles, names = axes.get_legend_handles_labels()
        unique = dict(zip(names, handles))
        axes.legend(unique.values(), unique.keys(), fontsize=8)
    return figure


def _sweep(found: list[dict[str, Any]]) -> Any:
    """Speed-up over length, one line per batch and budget; where a case was measured at three lengths or more."""
    import matplotlib.pyplot as plt

    lines: dict[tuple[str, str], dict[tuple[str, int], list[tuple[int, float]]]] = {}
    for m in found:
        if m["case"] in TIMED:
            for budget, row in m["budgets"].items():
                points = lines.setdefault((m["case"], _model(m)), {}).setdefault((budget, m["batch"]), [])
                points.append((m["length"], row["speedup"]))
    panels = {key: series for key, series in lines.items() if max(map(len, series.values())) >= 3}
    if not panels:
        return None
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.6 * len(panels), 3.9), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, ((case, model), series) in zip(axes[0], panels.items()):
        budgets = sorted({budget for budget, _ in series}, reverse=True)
        batches = sorted({batch for _, batch in series})
        panel.axhline(1.0, color="black", lw=1, ls="--")
        for (budget, batch), points in series.items():
            shade = plt.get_cmap("viridis")(0.85 * batches.index(batch) / max(1, len(batches) - 1))
            style = ("-", ":", "-.", "--")[budgets.index(budget) % 4]
            panel.plot(*zip(*sorted(points)), color=shade, ls=style, marker="o", ms=4,
                       label=f"batch {batch}, budget {budget}")  # fmt: skip
        panel.set(xscale="log", xlabel="prompt tokens" if case == "prefill" else "tokens in the cache")
        ticks = sorted({length for points in series.values() for length, _ in points})
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(f"{case}, {model}", fontsize=9)
        panel.legend(fontsize=7)
    axes[0][0].set_ylabel("speed-up over dense")
    return figure


def _training(found: list[dict[str, Any]]) -> Any:
    """Time and peak memory of a training step, routers beside LoRA."""
    import matplotlib.pyplot as plt

    rows = [m for m in found if m["case"] == "train"]
    if not rows:
        return None
    height = 1.4 + 2.4 * _ROW * len(rows)
    figure, axes = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    for panel, key, scale, label in (
        (axes[0], "{}_ms", 1.0, "optimizer step, ms"),
        (axes[1], "{}_peak_bytes", 1e6, "peak memory above the weights, MB"),
    ):
        for shift, name, title in ((-0.2, "routed", "routers"), (0.2, "lora", "LoRA on the same layers' FFNs")):
            places = [place + shift for place in range(len(rows))]
            panel.barh(places, [m[key.format(name)] / scale for m in rows], 0.36, color=COLORS[name], label=title)
        panel.set_xlabel(label)
    shared = _shared_model(rows)
    _name_rows(axes[0], [short_label(m) + ("" if shared else f"\n{_model(m)}") for m in rows])
    figure.suptitle(shared, fontsize=9)
    _legend(figure, axes[0])
    return figure


def _memory(found: list[dict[str, Any]]) -> Any:
    """KV cache and peak activations of every variant, per case."""
    rows = [
        (m, name, row)
        for m in found
        if m["case"] == "memory"
        for name, row in m["variants"].items()
        if name not in (DISABLED, FULL) or "base" not in m["variants"]
    ]
    if not rows:
        return None
    shared = _shared_model([m for m, _, _ in rows])
    figure, axes = _bars(len(rows), "MB beside the weights")
    for place, (_, _, row) in enumerate(rows):
        axes.barh(place, row["kv_bytes"] / 1e6, 0.62, color=COLORS["ideal"], label=_once(place, "KV cache"))
        rest = max(0, row["prefill_bytes"] - row["kv_bytes"])
        axes.barh(place, rest / 1e6, 0.62, left=row["kv_bytes"] / 1e6, color=COLORS["routed"],
                  label=_once(place, "the rest of prefill's peak"))  # fmt: skip
    _name_rows(axes, [f"{_title(m, shared)}, {name}" for m, name, _ in rows])
    weights = " or ".join(sorted({f"{m['base_bytes'] / 1e6:,.0f}" for m, _, _ in rows}))
    axes.set_title(f"{shared}{': ' if shared else ''}{weights} MB of weights", fontsize=9)
    _legend(figure, axes)
    return figure


def _bars(count: int, label: str) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.3 + _ROW * count), layout="constrained")
    axes.set_xlabel(label)
    return figure, axes


def _name_rows(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    unique = {name: handle for name, handle in zip(names, handles) if not name.startswith("_")}
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique), fontsize=8)


def _once(place: int, label: str) -> str:
    return label if place == 0 else f"_{label}"


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
