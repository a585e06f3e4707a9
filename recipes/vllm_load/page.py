"""vLLM under load on the page of results."""

from __future__ import annotations

import statistics

from study.page import Study, read
from vllm_load import report as vllm_report


def study() -> Study:
    """vLLM under load, dense and routed, and half an hour of clients that leave."""
    load, soak = vllm_report.read_load(), read("vllm_load/soak.json")
    other, real = read("vllm_load/load_transformers.json"), read("vllm_load/load_smollm2.json")
    setting, machine = load["setting"], load["machine"]

    cells = {
        cell: statistics.median(found)
        for cell, found in vllm_report.ratios(load, "all", "total_token_throughput").items()
    }
    by_prompt: dict[int, list[float]] = {}
    for (prompt, _), ratio in cells.items():
        by_prompt.setdefault(prompt, []).append(ratio)
    more = ", ".join(
        f"{min(ratios):.2f} to {max(ratios):.2f} at {prompt:,}"
        for prompt, ratios in by_prompt.items()
    )
    brief = (
        f"FFNs of all {setting['layers']} layers at budget {setting['budget']}, random weights in "
        f"{setting['dtype']}, 1 to 16 clients: tokens/s over dense, by prompt tokens: {more}; of "
        f"{soak['routed']['read']:,} answers among clients that leave, {soak['routed']['wrong']} "
        "were wrong"
    )
    section = [
        (
            "One vLLM engine, a dense server and routed ones side by side, under `vllm bench "
            f"serve`: random weights at the width of Qwen2.5-0.5B, {setting['layers']} layers, "
            f"every FFN routed at budget {setting['budget']}, {setting['dtype']}, "
            f"{setting['output']} tokens to write, {machine['threads']} threads of "
            f"{machine['device']}, which the load generator shares. Over the dense server's, "
            "medians of rounds (lowest - highest); `prompts only` is `--phases prefill`."
        ),
        "",
        *vllm_report.load_lines(load),
        "",
        (
            f"{vllm_report.REAL} (`{real['setting']['adapter']}` of [a real "
            f"model](#a-real-model)), {real['setting']['dtype']}, {real['machine']['threads']} "
            f"threads of {real['machine']['device']}; beside the dense server on the backend that "
            "routed models have, one on vLLM's own model:"
        ),
        "",
        *vllm_report.load_lines(real, "load_smollm2.json"),
        "",
        (
            "The same client on `transformers serve`, whose requests wait for one another "
            f"({other['machine']['device']}):"
        ),
        "",
        *vllm_report.load_lines(other),
        "",
        "Among clients that stop reading or vanish:",
        "",
        *vllm_report.soak_lines(soak),
    ]
    return Study("Served by vLLM", "vllm_load", "python recipes/vllm_load/load.py", brief, section)
