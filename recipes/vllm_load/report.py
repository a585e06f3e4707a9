"""Tables of `load.json` and `soak.json`.

python recipes/vllm_load/report.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_depthroute.files.markdown import markdown_table
from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
WAYS = {"all": "routed", "prefill": "prompts only"}
FIGURES = {"total_token_throughput": "tokens/s", "median_ttft_ms": "first token", "median_tpot_ms": "later token"}


def ratios(found: dict[str, Any], way: str, figure: str) -> dict[tuple[int, int], list[float]]:
    """`{(tokens of a prompt, clients): what a way to serve has of dense in each round}`."""
    cells: dict[tuple[int, int], list[float]] = {}
    for cell in found["cells"]:
        ratio = cell[way][figure] / cell["dense"][figure]
        cells.setdefault((cell["prompt"], cell["clients"]), []).append(ratio)
    return cells


def said(values: list[float]) -> str:
    """The median, and the lowest and the highest of the rounds."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def load_lines(found: dict[str, Any]) -> list[str]:
    """Throughput and latencies over those of the dense server, and what really ran in full."""
    heads = ["prompt", "clients", "dense: tokens/s"]
    columns: list[Callable[[tuple[int, int]], str]] = []
    for way, title in WAYS.items():
        for figure, name in FIGURES.items():
            heads.append(f"{title}: {name}")
            of_cells = ratios(found, way, figure)
            columns.append(lambda cell, of_cells=of_cells: said(of_cells[cell]))  # type: ignore[misc]
    rows = []
    for cell in ratios(found, "all", "median_ttft_ms"):
        dense = [c["dense"]["total_token_throughput"] for c in found["cells"] if (c["prompt"], c["clients"]) == cell]
        rows.append([*map(str, cell), f"{statistics.median(dense):.0f}", *(column(cell) for column in columns)])
    shares = ", ".join(f"{title} {found['rows_full'][way]:.1%}" for way, title in WAYS.items())
    return [*markdown_table(heads, rows), "", f"Rows that ran the routed layers in full, over all cells: {shares}."]


def soak_lines(found: dict[str, Any]) -> list[str]:
    """What half an hour of clients that leave came to."""
    samples = found["samples"]
    requests = sum(found[end] for end in ("read", "stopped", "vanished"))
    settled = [s["mib"] for s in samples if s["seconds"] >= 300] or [s["mib"] for s in samples]
    last = samples[-1]
    return [
        f"* {found['minutes']:g} minutes, {found['clients']} clients, {requests:,} requests: {found['read']:,} answers "
        f"read, {found['stopped']:,} left in the middle, {found['vanished']:,} before the first byte.",
        f"* Answers that differ from those that the same prompt got alone: {found['wrong']} of {found['read']:,}; "
        f"afterwards, alone again: {'the same' if found['same_afterwards'] else 'others'}.",
        f"* Memory of all processes: {settled[0]:,.0f} MiB after 5 minutes, {settled[-1]:,.0f} MiB at the end.",
        f"* Afterwards {last['running']:.0f} requests run and {last['cache_used']:.0%} of the cache is taken.",
        f"* {last['rows_full']:,.0f} of {last['rows']:,.0f} rows of {found['layers']} routed layers ran in full; the "
        f"layers were given {'the same number' if found['layers_agree'] else 'different numbers'} of rows.",
    ]


def page(load: dict[str, Any], soak: dict[str, Any]) -> str:
    """`results.md`."""
    lines = [
        "Over the dense server's, medians of rounds (lowest - highest):",
        "",
        *load_lines(load),
        "",
        *soak_lines(soak),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    write_text(
        HERE / "results.md", page(*(json.loads((HERE / f"{name}.json").read_text()) for name in ("load", "soak")))
    )


if __name__ == "__main__":
    main()
