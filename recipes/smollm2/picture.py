"""A picture of the real model: what is lost against the measured time,
of prompts alone and of all tokens.

python recipes/smollm2/picture.py
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from pathlib import Path

import matplotlib

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402
from pages import png_of  # noqa: E402
from smollm2 import page  # noqa: E402

from hf_depthroute.files.staged import write_bytes  # noqa: E402

PANELS = {  # a setting of the losses: its title
    "long": "prompts of 1,024 tokens, the loss of the text behind",
    "all": "every token of rows of 256, the time of a prompt of 1,024",
}
MARKERS = "osD^v<>PX"


def series(part: str) -> str:
    """The label of a part without its seed: seeds share a color."""
    return re.sub(r", seed \d+", "", page.label(part))


def points(setting: str) -> dict[str, list[tuple[float, float, float]]]:
    """By series: the time over dense, the mean loss of five texts over dense (nats),
    and its error over rows."""
    measured = page.times()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for part, result in page.results().items():
        if setting not in result["settings"] or part not in measured:
            continue
        texts = result["settings"][setting]["texts"].values()
        mean = sum(text["more"] for text in texts) / len(texts)
        error = math.hypot(*(text["error"] for text in texts)) / len(texts)
        found.setdefault(series(part), []).append((measured[part]["prompt"], mean, error))
    return found


def draw(path: Path) -> None:
    """One panel for each setting; every measured system is a point."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 5.5), layout="constrained")
    for axis, (setting, title) in zip(axes, PANELS.items(), strict=True):
        for marker, (name, measured) in zip(
            itertools.cycle(MARKERS), points(setting).items(), strict=False
        ):
            times, means, errors = zip(*measured, strict=True)
            axis.errorbar(times, means, errors, fmt=marker, capsize=3, label=name)
        axis.axvline(1, color="black", linewidth=0.8, label="dense")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(title)
        axis.set_xlabel("time of the prompt / dense time")
        axis.set_xlim(0.65, 1.05)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes[0].set_ylabel("nats over dense, mean of five texts")
    write_bytes(path, png_of(figure, dpi=110))
    plt.close(figure)


if __name__ == "__main__":
    draw(HERE / "results.png")
