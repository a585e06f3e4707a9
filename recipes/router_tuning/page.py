"""Router-Tuning on the page of results."""

from __future__ import annotations

from router_tuning import report as tuning_report
from study.intervals import tell_mean
from study.page import Study, read


def study() -> Study:
    """Trained routers beside the best sublayers dropped,
    and the bytes that skipped sequences leave out."""
    result, cache = read("router_tuning/results.json"), read("router_tuning/kv_cache.json")
    seeds = len(tuning_report.cell(result, "attention", "sequence"))
    behind: dict[str, list[str]] = {}
    for target, granularity in tuning_report.PAPER:
        found = tell_mean(tuning_report.over_dropping(result, target, granularity), sign="+")
        behind.setdefault(granularity, []).append(f"{found} ({target})")
    brief = (
        f"only a linear gate trains, half runs, loss over the best sublayers dropped at that share ({seeds} seeds): "
        + "; ".join(f"per {granularity} {', '.join(said)}" for granularity, said in behind.items())
    )
    big = cache["llama_3_8b_64_x_2048"]
    gib = [big[name] / 2**30 for name in ("dense_bytes", "routed_bytes")]
    equal = "equals" if cache["generation_equals_reference"] else "differs from"
    section = [
        (
            "Three of 6 layers of the embedded base, losses in nats over dense, mean ± standard "
            f"error of {seeds} seeds; the paper's column is the mean accuracy of eight tasks over "
            "dense, in points."
        ),
        "",
        *tuning_report.loss_table(result).split("\n"),
        "",
        (
            f"Attention of {len(cache['routed_layers'])} of 6 layers skipped per sequence by "
            "untrained routers leaves "
            f"{100 * (1 - cache['routed_bytes'] / cache['dense_bytes']):.0f} % of the KV cache out "
            f"({cache['routed_bytes']:,} of {cache['dense_bytes']:,} bytes, {cache['prompts']} "
            f"prompts), and generation {equal} a masked reference. At the shape of Llama-3-8B with "
            f"16 of 32 layers, 64 x 2,048 tokens, it counts {gib[0] - gib[1]:.0f} of {gib[0]:.0f} "
            "GiB; the Router-Tuning paper (arXiv:2410.13184) reports 8 GB."
        ),
    ]
    return Study(
        "Router-Tuning",
        "router_tuning",
        "python recipes/router_tuning/run.py --out OUT",
        brief,
        section,
    )
