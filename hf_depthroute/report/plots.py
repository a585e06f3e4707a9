"""Plots of training, quality and speed, as PNG files. Matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..staged_files import png_of, write_bytes

_SIZE = (6.4, 3.6)


def plot_training(path: Path, log_history: Sequence[Mapping[str, Any]]) -> None:
    """Language-model loss over steps, and the mean gate probability of each routed layer."""
    import matplotlib.pyplot as plt

    rows = [row for row in log_history if "loss_lm" in row]
    steps = [row["step"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(steps, [row["loss_lm"] for row in rows])
    left.set(xlabel="optimizer step", ylabel="training loss (nats)", title="Language-model loss")
    for key in sorted(k for k in rows[-1] if k.startswith("gate_prob/")):
        right.plot(steps, [row[key] for row in rows], label=key.removeprefix("gate_prob/").replace("_", " "))
    right.set(xlabel="optimizer step", ylabel="mean gate probability", ylim=(0, 1.02), title="Gate probability")
    right.legend()
    _save(figure, path)


def plot_quality(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Loss against budget for top-k and causal-threshold selection, with the dense loss as a line."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    dense = next(row["loss"] for row in rows if row["rule"] == "dense")
    axes.axhline(dense, color="black", linestyle="--", label="dense")
    for rule, marker, label in (("topk", "o", "top-k (sees the future)"), ("threshold", "s", "causal threshold")):
        picked = sorted((row["full_ratio"], row["loss"]) for row in rows if row["rule"] == rule)
        if picked:
            axes.plot(*zip(*picked), marker=marker, label=label)
    axes.set(xlabel="share of tokens run full in routed layers", ylabel="validation loss (nats)", title="Quality")
    axes.legend()
    _save(figure, path)


def plot_speed(path: Path, bench: Mapping[str, Any]) -> None:
    """Measured time over dense time against budget, for prefill and decode, with the FLOP ratio."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    axes.axhline(1.0, color="black", linestyle="--", label="dense")
    for part, color in (("prefill", "tab:blue"), ("decode", "tab:orange")):
        if part not in bench:
            continue
        rows = sorted(bench[part]["budgets"].values(), key=lambda row: row["full_ratio"])
        shares = [row["full_ratio"] for row in rows]
        axes.plot(shares, [row["ratio"] for row in rows], marker="o", color=color, label=f"{part}, measured")
        flops = [row["flops_routed_over_dense"] for row in rows]
        axes.plot(shares, flops, linestyle=":", color=color, label=f"{part}, FLOPs")
    axes.set(xlabel="share of tokens run full in routed layers", ylabel="time / dense time", title="Speed")
    axes.legend()
    _save(figure, path)


def plot_expert_load(path: Path, loads: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """Share of the (token, expert) pairs that goes to each expert, one panel per layer with experts.

    Args:
        path: The PNG file.
        loads: What each bar is called, such as `"before"`, to shares of every expert by layer index.
    """
    import matplotlib.pyplot as plt

    layers = sorted(next(iter(loads.values())))
    figure, axes = plt.subplots(
        1, len(layers), figsize=(1.2 + 2.6 * len(layers), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    width = 0.8 / len(loads)
    for panel, layer in zip(axes[0], layers):
        for position, (name, load) in enumerate(loads.items()):
            places = [expert - 0.4 + (position + 0.5) * width for expert in range(len(load[layer]))]
            panel.bar(places, [float(share) for share in load[layer]], width, label=name)
        panel.axhline(1 / len(load[layer]), color="black", linestyle="--", linewidth=0.8)
        panel.set(title=f"layer {layer}", xlabel="expert", xticks=range(len(load[layer])))
    axes[0][0].set_ylabel("share of pairs")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(loads))
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)
