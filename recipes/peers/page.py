"""The peers on the page of results."""

from __future__ import annotations

from peers import report as peers_report
from study.page import Study, read


def study() -> Study:
    """Time and rows of other packages' skipping beside ours."""
    result = read("peers/results.json")
    systems, machine = result["systems"], result["machine"]
    prompt = {
        name: f"{next(iter(row['times'].values()))['ratio']:.2f}" for name, row in systems.items()
    }
    brief = (
        "time of a prompt of 1,024 tokens over dense, half of them skipping in 6 of 12 layers: "
        f"blocks, {prompt['block']} (the MoD package {prompt['mod']}); attention, "
        f"{prompt['attention']} (Router-Tuning's code {prompt['router-tuning, attention']}); every "
        f"token leaving after 6 layers by transformers' early exit, {prompt['early exit']} "
        f"({machine['device']}, {machine['threads']} threads, random weights); of the routers, "
        "only ours both compute no skipped row and decode what they prefill"
    )
    section = [
        (
            "A Llama with random weights, 12 layers at the width of Qwen2.5-0.5B, bfloat16; six "
            "layers are routed, half of the tokens skip. Times are over the dense model of the "
            f"same version of transformers, medians of {result['rounds']} rounds in turn; rows "
            f"computed are those of the routed layers' queries and FFNs ({machine['device']}, "
            f"{machine['threads']} threads)."
        ),
        "",
        *peers_report.table(systems),
    ]
    return Study("Beside the peers", "peers", "python recipes/peers/run.py", brief, section)
