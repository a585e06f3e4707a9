"""How the pairs of tokens and experts spread over the experts, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from pages import png_of

from hf_depthroute.files.staged import write_bytes


def plot_expert_load(path: Path, loads: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    """Share of the (token, expert) pairs that goes to each expert,
    one panel per layer with experts.

    Args:
        path: The PNG file.
        loads: What each bar is called, such as `"before"`, to shares of every expert by layer
            index.
    """
    layers = sorted(next(iter(loads.values())))
    figure, axes = plt.subplots(
        1,
        len(layers),
        figsize=(1.2 + 2.6 * len(layers), 3.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
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
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)
