"""Tables of `load.json`, `load_few_rows.json`, `load_smollm2.json`,
`load_transformers.json` and `soak.json`.

python recipes/vllm_load/report.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `pages` is there

from pages import markdown_table

from hf_depthroute.files.staged import write_text

HERE = Path(__file__).parent
WAYS = {"all": "routed", "prefill": "prompts only", "native": "dense, vLLM's own model"}
REAL = "SmolLM2-135M-Instruct and a router for prompts alone"
FIGURES = {
    "total_token_throughput": "tokens/s",
    "median_ttft_ms": "first token",
    "median_tpot_ms": "later token",
}


def ratios(found: dict[str, Any], way: str, figure: str) -> dict[tuple[int, int], list[float]]:
    """`{(tokens of a prompt, clients): what a way to serve has of dense in each round}`."""
    cells: dict[tuple[int, int], list[float]] = {}
    for cell in found["cells"]:
        ratio = cell[way][figure] / cell["dense"][figure]
        cells.setdefault((cell["prompt"], cell["clients"]), []).append(ratio)
    return cells


def read_load() -> dict[str, Any]:
    """`load.json`, with the cells of `load_few_rows.json`, which have more requests,
    in place of its own."""
    load, few = (
        json.loads((HERE / f"{name}.json").read_text()) for name in ("load", "load_few_rows")
    )
    assert load["machine"]["device"] == few["machine"]["device"]
    again = {cell["prompt"] for cell in few["cells"]}
    found: dict[str, Any] = load | {
        "cells": few["cells"] + [cell for cell in load["cells"] if cell["prompt"] not in again],
        "rows_full_few": few["rows_full"],
    }
    return found


def said(values: list[float]) -> str:
    """The median, and the lowest and the highest of the rounds."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def load_lines(found: dict[str, Any], file: str = "load.json") -> list[str]:
    """Throughput and latencies over those of the dense server, and what really ran in full."""
    heads = ["prompt", "clients", "dense: tokens/s"]
    columns: list[Callable[[tuple[int, int]], str]] = []
    ways = {way: title for way, title in WAYS.items() if way in found["cells"][0]}
    for way, title in ways.items():
        for figure, name in FIGURES.items():
            heads.append(f"{title}: {name}")
            of_cells = ratios(found, way, figure)
            columns.append(lambda cell, of_cells=of_cells: said(of_cells[cell]))  # type: ignore[misc]
    rows = []
    for cell in ratios(found, next(iter(ways)), "median_ttft_ms"):
        dense = [
            c["dense"]["total_token_throughput"]
            for c in found["cells"]
            if (c["prompt"], c["clients"]) == cell
        ]
        rows.append(
            [
                *map(str, cell),
                f"{statistics.median(dense):.0f}",
                *(column(cell) for column in columns),
            ]
        )
    lines = markdown_table(heads, rows)
    if "rows_full" in found:
        shares = ", ".join(f"{WAYS[way]} {share:.1%}" for way, share in found["rows_full"].items())
        lines += [
            "",
            f"Rows that ran the routed layers in full, over all cells of `{file}`: {shares}.",
        ]
    if "rows_full_few" in found:
        shares = ", ".join(
            f"{WAYS[way]} {share:.1%}" for way, share in found["rows_full_few"].items()
        )
        lines[-1] += f" Those of 32 tokens, which are of `load_few_rows.json`: {shares}."
    return lines


def soak_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """What half an hour of clients that leave came to, for each server."""
    rows: dict[str, list[str]] = {}
    for server in found.values():
        samples, last = server["samples"], server["samples"][-1]
        settled = [s["mib"] for s in samples if s["seconds"] >= 300] or [s["mib"] for s in samples]
        cells = {
            "answers read": f"{server['read']:,}",
            "left in the middle": f"{server['stopped']:,}",
            "left before the first byte": f"{server['vanished']:,}",
            "answers that differ from the prompt's alone": f"{server['wrong']:,}",
            "afterwards, alone again": "the same" if server["same_afterwards"] else "others",
            "memory after 5 minutes, MiB": f"{settled[0]:,.0f}",
            "memory at the end, MiB": f"{settled[-1]:,.0f}",
            "requests that run afterwards": f"{last['running']:.0f}",
            "cache that is taken afterwards": f"{last['cache_used']:.0%}",
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    routed = found["routed"]
    last = routed["samples"][-1]
    return [
        *markdown_table(["", *found], [[name, *cells] for name, cells in rows.items()]),
        "",
        (
            f"{routed['minutes']:g} minutes, {routed['clients']} clients for each server. "
            f"{last['rows_full']:,.0f} of {last['rows']:,.0f} rows of {routed['layers']} routed "
            "layers ran in full; the layers were given "
            f"{'the same number' if routed['layers_agree'] else 'different numbers'} of rows."
        ),
    ]


def page(
    load: dict[str, Any], real: dict[str, Any], other: dict[str, Any], soak: dict[str, Any]
) -> str:
    """`results.md`."""
    lines = []
    engines = ("vLLM", load, "load.json"), (f"vLLM, {REAL}", real, "load_smollm2.json")
    for engine, found, file in (
        *engines,
        ("`transformers serve`", other, "load_transformers.json"),
    ):
        over = (
            "over the dense server's, medians of rounds (lowest - highest), on "
            f"{found['machine']['device']}:"
        )
        lines += [f"{engine}, {over}", "", *load_lines(found, file), ""]
    lines += soak_lines(soak)
    return "\n".join([*lines, ""])


def main() -> None:
    names = "load_smollm2", "load_transformers", "soak"
    write_text(
        HERE / "results.md",
        page(read_load(), *(json.loads((HERE / f"{n}.json").read_text()) for n in names)),
    )


if __name__ == "__main__":
    main()
