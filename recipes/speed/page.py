"""Measured time on the page of results."""

from __future__ import annotations

from typing import Any

import headlines
from pages import markdown_table
from study.page import Study, read

from hf_depthroute.execution.costs import GatherCosts

from .shapes import SHAPES


def decode_step() -> list[str]:
    """Where a decoding step's time goes."""
    result = read("speed/decode-step.json")
    lines = [
        (
            "Where the time of a decoding step of one sequence goes, milliseconds, at budget 0.5: "
            "dense, routed, and with the same decisions at no cost "
            f"({result['machine']['device']}). `gate, up` is what finds the scores, and the "
            "branch's first map with them."
        ),
        "",
    ]
    ways = ("dense", "routed", "free")
    columns = [(row, way) for row in result["measured"] for way in ways]
    names = list(dict.fromkeys(part for row, way in columns for part in row["parts_ms"][way]))
    rows = [
        [name, *(f"{row['parts_ms'][way].get(name, 0):.2f}" for row, way in columns)]
        for name in names
    ]
    rows.append(["whole step", *(f"{row['ms'][way]:.2f}" for row, way in columns)])
    head = ["part", *(f"{way}, {row['layers']}" for row, way in columns)]
    reached = " and ".join(f"{row['of_ideal']:.2f} ({row['layers']})" for row in result["measured"])
    return [
        *lines,
        *markdown_table(head, rows),
        "",
        f"Of what the free router saves, the routed step saves {reached}.",
    ]


def timed_cases(result: Any) -> list[Any]:
    return [m for m in result["measurements"] if m["case"] in ("prefill", "decode")]


def machine_of(result: Any, dtype: str) -> str:
    """The processor, and what a large product reaches on it."""
    return f"{result['machine']['device']}, {result['peaks'][dtype]['gflop_per_s']:,.0f} GFLOP/s"


def with_error(row: Any) -> str:
    return (
        f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        if row["ratio_error"]
        else f"{row['ratio']:.3f}"
    )


def timed_rows(result: Any) -> list[list[str]]:
    """A row per case and budget of a suite."""
    rows = []
    for m in timed_cases(result):
        setting, sizes = m["setting"], f"{m['batch']} x {m['length']}"
        case = f"prefill {sizes}" if m["case"] == "prefill" else f"decode, batch {m['batch']}"
        routed = f"{len(setting['routed_layers'])} of {setting['depth']}"
        for budget, row in m["budgets"].items():
            masked = m["masked"].get(budget)
            rows.append([
                f"{case}, {setting['dtype']}", f"{setting['target']}, {routed}", budget,
                f"{row['full_ratio']:.2f}", with_error(row),
                f"{masked['ratio']:.3f}" if masked else "", f"{row['flops_routed_over_dense']:.3f}",
                *("" if row[name] is None else f"{row[name]:.2f}" for name in ("eta", "eta_free")),
                machine_of(result, setting["dtype"]),
            ])  # fmt: skip
    return rows


def by_shape(*names: str) -> list[str]:
    """A table of suites with several shapes."""
    results = [read(f"speed/{name}.json") for name in names]
    shapes = [
        m["setting"]["shape"]
        for result in results
        for m in timed_cases(result)
        for _ in m["budgets"]
    ]
    rows = [row for result in results for row in timed_rows(result)]
    head = [
        "shape",
        "case",
        "routed",
        "budget",
        "run full",
        "time / dense",
        "masked",
        "FLOPs / dense",
        "eta",
        "free",
    ]
    return markdown_table([*head, "machine"], [[shape, *row] for shape, row in zip(shapes, rows)])


def small_widths() -> list[str]:
    """Prefill at the widths of the embedded bases."""
    return [
        (
            "Small widths, where a router's own work is large beside what a token can skip: the "
            "shapes of the embedded bases, 256 and 512 wide. The second processor, with AMX, was "
            "measured before narrow FFNs ran more rows at once:"
        ),
        "",
        *by_shape("widths", "widths-amx"),
    ]


def with_defaults() -> list[str]:
    """Prompts and decoding at two widths, with default settings."""
    return [
        (
            "The widths of SmolLM2-135M and of Qwen2.5-0.5B, all FFNs of a few layers, with the "
            "settings that a routed model has by default: prompts of one sequence, and decoding of "
            "1 to 64, few rounds on a restless machine:"
        ),
        "",
        *by_shape("cpu-shapes"),
    ]


def batches() -> list[str]:
    """Decoding of several sequences at once."""
    result, rows = read("speed/decode-batches.json"), []
    for m in timed_cases(result):
        for budget, row in m["budgets"].items():
            tuned = m["tuned"][budget]
            rows.append([
                str(m["batch"]), budget, f"{row['full_ratio']:.2f}", f"{row['full_passes']:.2f}",
                with_error(row), with_error(tuned),
                f"{tuned['executors'].get('full', 0)} of {m['setting']['depth']}",
            ])  # fmt: skip
    head = [
        "sequences",
        "budget",
        "run full",
        "FFNs read",
        "time / dense",
        "tuned, time / dense",
        "not routed",
    ]
    return [
        (
            "Decoding of 1 to 64 sequences at once, all FFNs of a quarter of the depth. `FFNs "
            "read`: the share of FFN calls that at least one row entered. `tuned`: after "
            "`tune_execution`, which stops routing in the layers where it does not pay "
            f"({machine_of(result, 'bfloat16')}):"
        ),
        "",
        *markdown_table(head, rows),
    ]


def targets() -> list[str]:
    """FFNs, blocks and attention at one width, and on prompts of several lengths."""
    long, results = (
        read("speed/long-prompts.json"),
        [read(f"speed/{name}.json") for name in ("targets", "targets-decode")],
    )
    head = [
        "case",
        "routed",
        "budget",
        "run full",
        "time / dense",
        "masked",
        "FLOPs / dense",
        "eta",
        "free",
    ]
    shapes = [m["setting"]["shape"] for m in timed_cases(long)]
    memory = [
        [m["setting"]["target"], *(f"{m['variants'][one][kind] / 2**20:,.0f}" for kind in ("prefill_bytes", "kv_bytes")
                                   for one in ("base", "budget 0.5"))]
        for m in long["measurements"] if m["case"] == "memory"
    ]  # fmt: skip
    return [
        "What each target costs and saves at the width of Qwen2.5-0.5B, half of its depth "
        f"({machine_of(results[0], 'bfloat16')}):",
        "",
        *markdown_table(head, [row[:9] for result in results for row in timed_rows(result)]),
        "",
        "Prompts of 512 to 8,192 tokens, four layers, and one layer of larger shapes "
        f"({machine_of(long, 'bfloat16')}):",
        "",
        *markdown_table(
            ["shape", *head], [[shape, *row[:9]] for shape, row in zip(shapes, timed_rows(long))]
        ),
        "",
        (
            "Memory at 1 x 8,192 tokens, MiB above the weights: the peak of the prompt, and the KV "
            "cache."
        ),
        "",
        *markdown_table(
            ["routed", "peak, dense", "peak, routed", "KV, dense", "KV, routed"], memory
        ),
    ]


def compiled() -> list[str]:
    """Compiled against compiled."""
    result, rows = read("speed/compiled.json"), []
    for m in timed_cases(result):
        for budget, row in m["budgets"].items():
            case = f"{m['case']} {m['batch']} x {m['length']}"
            dense = [f"{m['dense_modes'][mode]:.1f}" for mode in ("eager", "compiled")]
            rows.append(
                [
                    case,
                    budget,
                    f"{row['full_ratio']:.2f}",
                    *dense,
                    f"{row['modes']['eager']:.3f}",
                    with_error(row),
                ]
            )
    head = ["case", "budget", "run full", "dense, ms", "compiled, ms", "eager", "compiled"]
    return [
        (
            "Eager and compiled by `torch.compile`, four layers at the width of Qwen2.5-0.5B; "
            "routed times over that of the compiled dense model "
            f"({machine_of(result, 'bfloat16')}):"
        ),
        "",
        *markdown_table(head, rows),
    ]


def gathered(result: Any) -> float:
    """The time over dense that `execution.costs` expects of the measured prompt,
    had its rows been gathered."""
    (prompt,) = (m for m in timed_cases(result) if m["case"] == "prefill")
    row, sizes = prompt["budgets"]["0.5"], SHAPES[prompt["setting"]["shape"]]
    rows = prompt["batch"] * prompt["length"] * row["full_ratio"]
    flops, costs = 6 * rows * sizes["hidden_size"] * sizes["intermediate_size"], GatherCosts()
    gained = prompt["setting"]["depth"] * (flops * costs.saved - costs.wait)
    return float(row["ratio"] - gained * 1e3 / prompt["dense_ms"])


def on_gpu() -> list[str]:
    """The row operators' kernels on a GPU, in a model and alone."""
    result, alone = read("speed/h100.json"), read("speed/row_ops.json")
    dense, taken, ratio = headlines.eager_decode(result)
    rows = []
    for m in timed_cases(result):
        for budget, row in m["budgets"].items():
            masked = m["masked"].get(budget)
            rows.append([
                f"{m['case']} {m['batch']} x {m['length']}, {m['setting']['depth']} layers", budget,
                f"{row['full_ratio']:.2f}", f"{m['dense_ms']:.2f} ({m['dense_mode']})",
                with_error(row), f"{masked['ratio']:.2f}" if masked else "",
                f"{row['flops_routed_over_dense']:.2f}",
            ])  # fmt: skip
    operations = [
        [
            one["operation"],
            f"{one['share']:g}",
            f"{one['dense_ms']:.2f}",
            with_error(one),
            f"{one['matmul']:.2f}",
        ]
        for one in alone["operations"]
        if one["share"] and one["dense_ms"] > 0.2  # of shorter ones only the launch would be seen
    ]
    return [
        "### On a GPU",
        "",
        (
            f"{machine_of(result, 'bfloat16')}; the width of Llama-3-8B, all FFNs routed, routers "
            "in bfloat16; over the fastest dense mode, of eager and, in decode, compiled with "
            f"CUDA graphs. **Eager decoding takes {ratio:.1f} times the dense eager time** "
            f"({taken:.1f} ms against {dense:.1f}): launches are its time. So eager steps run in "
            "full by default since; and prompts are gathered where the cost model of these "
            f"results expects a gain: it predicts {gathered(result):.2f} for the prompt below, "
            "which has not been measured. Random weights:"
        ),
        "",
        *markdown_table(
            ["case", "budget", "run full", "dense, ms", "time / dense", "masked", "FLOPs / dense"],
            rows,
        ),
        "",
        (
            "The row operators alone, over the dense operation; the shares are of rows that run, "
            f"and of a matmul rate of {alone['peaks']['gflop_per_s']:,.0f} GFLOP/s. Those whose "
            "dense time is below 0.2 ms are left out: launches decide there."
        ),
        "",
        *markdown_table(["operation", "share", "dense, ms", "time / dense", "matmul"], operations),
    ]


def drafted() -> list[str]:
    """Generation that stays exactly the full model's, drafted by the routed one."""
    result, rows = read("speed/lossless.json"), []
    for name, case in result["cases"].items():
        best = max(case["table"], key=lambda row: row["speedup"])
        rows.append([
            name, f"{case['plain_tokens_per_second']:.0f}", str(best["budget"]),
            ", ".join(map(str, best["drop"])) or "none", str(best["num_tokens"]),
            f"{best['acceptance_rate']:.2f}", f"{best['tokens_per_pass']:.2f}",
            f"{best['tokens_per_pass'] / best['speedup']:.2f}", f"{best['speedup']:.2f}",
        ])  # fmt: skip
    head = [
        "base", "tokens/s without", "draft's budget", "layers left out", "tokens ahead", "accepted",
        "tokens per pass", "a pass costs, steps", "speed-up",
    ]  # fmt: skip
    return [
        (
            "Lossless drafting, the best draft of each search, float32, greedy; every text is "
            f"that of plain generation ({result['machine']['device']}):"
        ),
        "",
        *markdown_table(head, rows),
    ]


def study() -> Study:
    """The speed recipe: time and eta at the shape of Qwen2.5-0.5B,
    training steps and their memory."""
    results = [read(f"speed/{name}.json") for name in ("cpu", "cpu-decode", "cpu-float32")]
    timed = [m for result in results for m in timed_cases(result)]
    rows = [row for result in results for row in timed_rows(result)]
    threads = results[0]["machine"]["threads"]
    disabled, full = (
        [m["overheads"][name]["ratio"] for m in timed if m["overheads"]]
        for name in ("disabled", "budget 1.0")
    )
    train = read("speed/train.json")["measurements"]
    head = [
        "case",
        "routed",
        "budget",
        "run full",
        "time / dense",
        "masked",
        "FLOPs / dense",
        "eta",
        "free",
        "machine",
    ]
    labels = [f"({m['loss']} loss, vocabulary {m['setting']['vocabulary']:,})" for m in train]
    steps = ", ".join(f"{m['ratio']:.2f} {label}" for m, label in zip(train, labels))
    peaks = ", ".join(f"{m['routed_peak_bytes'] / 1e6:,.0f}" for m in train)
    half = {
        m["case"]: m["budgets"]["0.5"]
        for m in results[0]["measurements"]
        if m["case"] in ("prefill", "decode") and len(m["setting"]["routed_layers"]) == 12
    }
    times, flops = (
        [f"{half[case][key]:.3f}" for case in ("prefill", "decode")]
        for key in ("ratio", "flops_routed_over_dense")
    )
    _, _, eager = headlines.eager_decode(read("speed/h100.json"))
    brief = (
        f"12 of 24 FFNs at budget 0.5, random weights, bfloat16, {threads} threads of "
        f"{results[0]['machine']['device']} (no instructions for bfloat16): prefill takes "
        f"{times[0]} of the dense time at {flops[0]} of the FLOPs, decode of 8 sequences "
        f"{times[1]} at {flops[1]}; on {read('speed/h100.json')['machine']['device']} eager decode "
        f"of 1 sequence takes {eager:.1f} times the dense eager time"
    )
    section = [
        (
            f"Random weights at the shape of Qwen2.5-0.5B with a vocabulary of 32,000, {threads} "
            "CPU threads; machines are named with what a large product reaches. `eta` is the part "
            "of the skipped arithmetic that shows on the clock; `free` is what it would be for a "
            "router that costs nothing, which is below 1 where an FFN takes a smaller share of "
            "the time than of the arithmetic. `masked` is a router of the same decisions that "
            "computes both paths. Medians of interleaved runs; with the adapter disabled, a case "
            f"takes {min(disabled):.3f} to {max(disabled):.3f} of the base's time, at budget 1 "
            f"{min(full):.3f} to {max(full):.3f}."
        ),
        "",
        *markdown_table(head, rows),
        "",
        *decode_step(),
        "",
        *with_defaults(),
        "",
        *small_widths(),
        "",
        *batches(),
        "",
        *targets(),
        "",
        *compiled(),
        "",
        *on_gpu(),
        "",
        *drafted(),
        "",
        (
            "A training step of routers in the last third of the layers takes, of a step of LoRA "
            f"(rank 8, on the same layers' FFNs): {steps}. Above the weights, it needs {peaks} MB."
        ),
    ]
    command = "python recipes/speed/bench.py recipes/speed/cpu.yaml --threads 2"
    return Study("Speed at the shape of Qwen2.5-0.5B", "speed", command, brief, section)
