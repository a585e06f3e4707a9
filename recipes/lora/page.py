"""LoRA and routing on the page of results."""

from __future__ import annotations

from lora import report as lora_report
from study.intervals import tell_mean
from study.page import Study, read


def study() -> Study:
    """LoRA, routing, and both."""
    result = read("lora/results.json")
    seeds = result["seeds"].values()

    def over(way: str, other: str) -> str:
        return tell_mean([seed[way]["loss"] - seed[other]["loss"] for seed in seeds], sign="+")

    brief = (
        f"fine-tuned on another text, {len(seeds)} seeds: LoRA and routing of 3 of 6 layers at "
        f"budget 0.5 jointly, over LoRA alone: {over('joint', 'lora')} nats (FFNs), "
        f"{over('joint_router_tuning', 'lora')} (Router-Tuning, attention); over LoRA for half of "
        f"the steps, then routing: {over('joint', 'two_step')} (FFNs)"
    )
    return Study(
        "LoRA and routing",
        "lora",
        "python recipes/lora/run.py --out OUT",
        brief,
        lora_report.lines(result),
    )
