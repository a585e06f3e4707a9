"""The demo on the page of results."""

from __future__ import annotations

from demo import report as demo_report
from pages import markdown_table
from speed.page import with_error
from study.page import Study, read


def study() -> Study:
    """The demo's own tables."""
    result = read("demo/results.json")
    costs, times = (
        demo_report.cost_rows(result),
        {row[0]: row[1:] for row in demo_report.times(result)},
    )
    half = next(row for row in costs if row[0] == "0.5")
    machine, prefill = result["bench"]["machine"], result["bench"]["prefill"]["budgets"]["0.5"]
    wide = result["bench_wide"]["prefill"]["budgets"]["0.5"]
    brief = (
        f"FFN budget {half[0]}, no training: loss over dense (share run) {half[2]}, {half[1]} with "
        f"the best layers left out; {half[3]} after {result['training']['arguments']['steps']} "
        f"steps of the routers' branches; prefill takes {with_error(prefill)} of the dense time "
        f"({machine['threads']} threads of {machine['device']} with AMX; other processors differ); "
        "18 million weights, one run"
    )
    section = [
        (
            "Loss over dense on the wider embedded base, with the share of FFN calls that ran; "
            "times over dense times, with the share that ran in them (in 48 steps of decode it "
            "can be far from the budget), of that base and of random weights: three layers of the "
            "width of Qwen2.5-0.5B, a vocabulary of 2,048. Chosen rows run in slices, which makes "
            "each row cheaper and would do so in a dense model, too, which runs all rows at once: "
            f"at budget 0.5 the second model takes {wide['ratio']:.3f} of the time at "
            f"{wide['flops_routed_over_dense']:.3f} of the FLOPs. One run, {machine['threads']} "
            f"threads of {machine['device']}, {result['bench']['setting']['dtype']}."
        ),
        "",
        *markdown_table(["budget", *demo_report.LINES], costs),
        "",
        (
            "Loss over dense of prompts in the same time; the time of layers left out is modelled, "
            "not measured: they are taken to save their part of what leaving out all routed FFNs "
            "saves, and their branches to cost nothing:"
        ),
        "",
        *markdown_table(
            ["budget", "time / dense", *demo_report.LINES], demo_report.equal_time_rows(result)
        ),
        "",
        *markdown_table(
            [
                "budget",
                *(
                    f"{part}, {title}"
                    for title in demo_report.SIZES.values()
                    for part in demo_report.PARTS
                ),
            ],
            [[budget, *row] for budget, row in times.items()],
        ),
    ]
    return Study("A small Llama", "demo", "python recipes/demo/small_llama.py", brief, section)
