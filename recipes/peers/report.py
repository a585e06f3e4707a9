"""Table and picture of `results.json`.

python recipes/peers/report.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `pages` is there

import matplotlib
from pages import markdown_table, png_of

from hf_depthroute.files.staged import write_bytes, write_text

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ERRORS = (
    "Times are over the dense model's; a number after ± is a standard error of a median over "
    "rounds."
)
LABELS = {
    "dense, 4.40": "dense, transformers 4.40", "mod": "MoD package, blocks",
    "router-tuning, attention": "Router-Tuning's code, attention",
    "router-tuning, ffn": "Router-Tuning's code, FFNs",
    "router-tuning, everything skipped": "Router-Tuning's code, attention, everything skipped",
    "dense": "dense, transformers 5", "early exit": "transformers' early exit after 6 of 12 layers",
    "block": "blocks, linear gate, no branch", "block, defaults": "blocks, MLP gate and branch",
    "ffn": "FFNs, linear gate, no branch", "ffn, defaults": "FFNs, MLP gate and branch",
    "attention": "attention, linear gate, no branch",
    "attention, everything skipped": "attention by sequence, everything skipped",
}  # fmt: skip


def table(systems: Mapping[str, Any]) -> list[str]:
    """A line for each system: rows computed, whether decode gives what prefill gives,
    times over its dense model's."""
    workloads = list(systems["dense"]["times"])
    lines = []
    for name, row in systems.items():
        shares = " / ".join(f"{row['computed'][part]:.2f}" for part in ("attention", "ffn"))
        apart = row["difference"]["difference"]
        equal = "yes" if apart < 1e-3 else f"no ({apart:.1f})"
        times = [row["times"][label] for label in workloads]
        said = [
            f"{time['ratio']:.2f} ± {time['error']:.2f}" if "ratio" in time else "fails"
            for time in times
        ]
        lines.append([LABELS[name], shares, equal, *said])
    return markdown_table(["what", "rows computed", "decode = prefill", *workloads], lines)


def draw(systems: Mapping[str, Any], path: Path) -> None:
    """A bar for each system that is not dense, for each workload."""
    workloads = list(systems["dense"]["times"])
    names = [name for name in reversed(systems) if not name.startswith("dense")]
    figure, panels = plt.subplots(
        1, len(workloads), figsize=(12, 4), sharey=True, layout="constrained"
    )
    for panel, label in zip(panels, workloads):
        for place, name in enumerate(names):
            time = systems[name]["times"][label]
            if "ratio" in time:
                color = "C2" if systems[name]["own"] else "C7"
                panel.barh(place, time["ratio"], xerr=time["error"], color=color)
            else:
                panel.text(0.02, place, "fails", va="center", fontsize=8)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("time / dense time")
    panels[0].set_yticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
    write_bytes(path, png_of(figure, dpi=130))
    plt.close(figure)


def page(systems: dict[str, Any]) -> str:
    """`results.md`."""
    return "\n".join([*table(systems), "", ERRORS, ""])


def main() -> None:
    systems = json.loads((HERE / "results.json").read_text())["systems"]
    write_text(HERE / "results.md", page(systems))
    draw(systems, HERE / "results.png")


if __name__ == "__main__":
    main()
