"""Write the figures of the README and of the documentation from the committed result files.

python recipes/tables.py

The README has where routing pays, the papers and six results, `docs/results.md` a row a study and the tables,
`docs/how-to/pick-a-gate.md` the comparison of two gates, `fit_router` and `demo` a picture each. A
number after ± is a standard error everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headlines
import numpy as np
import when_it_pays
from aux_losses.paper.claims import judge
from aux_losses.paper.values import fixed, spread, values
from demo import report as demo_report
from engram import report as engram_report
from fit_router import branch_report
from fit_router import report as fit_report
from lora import report as lora_report
from peers import report as peers_report
from router_tuning import report as tuning_report
from study.claims import tell_states
from study.intervals import MIN_SEEDS, tell_mean
from study.results import StudyRuns, read_results
from token_selective import report as selective_report
from vllm_load import report as vllm_report

from hf_depthroute.files.markdown import markdown_table

RECIPES = Path(__file__).parent
README = RECIPES.parent / "README.md"
RESULTS_PAGE = RECIPES.parent / "docs" / "results.md"
GATE_PAGE = RECIPES.parent / "docs" / "how-to" / "pick-a-gate.md"
BRIEF = (
    "A number after ± is a standard error: of a mean over seeds, or of a median over rounds. Quality figures are of "
    'models of at most 18 million weights where no other size is named; speed figures "at the shape" or "of the '
    'width" of a larger one are of random weights. Times are of the processor that is named, and differ on others.'
)
LEARNED = {"recoverability", "similarity", "oracle", "jepa", "linear"}  # kinds of `fit_router`
RESULTS, GATES, PAPERS, PAYS = "results", "gates", "papers", "pays"  # the names of the generated parts' markers


@dataclasses.dataclass(frozen=True)
class Study:
    """What one study measured: a row and a section of the page of results."""

    title: str
    folder: str  # below recipes/
    command: str  # the folder's own page has the exact ones
    brief: str
    section: list[str]


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())


def quality() -> Study:
    """The stories260k recipe at budget 0.5: learned gates, a random one, and FFNs left out, with the same branches."""
    result = read("stories260k/results.json")
    at_budget = {
        (row["gate"], row["gate_input"], tuple(row["layers"]), row["rule"]): row
        for row in result["summary"]
        if row["budget"] == 0.5
    }
    flops = {(c["gate"], c["gate_input"], tuple(c["layers"])): c["flops"] for c in result["flops_over_dense"]}
    dense = next(row for row in result["summary"] if row["rule"] == "dense")["loss"]
    routed, random = (2, 3, 4), at_budget["random", "normed", (2, 3, 4), "threshold"]
    static = {key[2]: row for key, row in at_budget.items() if key[0] == "none"}
    points = [(1.0, dense), *((1 - len(layers) / 5, row["loss"]) for layers, row in static.items())]
    points.sort(reverse=True)

    def dropped(share: float) -> float:
        """The loss of leaving FFNs out at a share of FFN calls, on straight lines between numbers of FFNs."""
        (high, above), (low, below) = next(pair for pair in itertools.pairwise(points) if pair[1][0] <= share)
        return above + (below - above) * (high - share) / (high - low)

    rows = []
    titles = {"mlp": "MLP", "jepa": "JEPA", "random": "random projection"}
    for gate, gate_input in (
        ("mlp", "normed"), ("jepa", "normed"), ("mlp", "residual"), ("jepa", "residual"), ("random", "normed")
    ):  # fmt: skip
        topk, causal = (at_budget[gate, gate_input, routed, rule] for rule in ("topk", "threshold"))
        share = (2 + 3 * causal["full_ratio"]) / 5
        to_random = "" if gate == "random" else f"{causal['loss'] - random['loss']:+.3f}"
        rows.append([
            f"{titles[gate]}, {gate_input}", f"{share:.2f}", f"{flops[gate, gate_input, routed]:.2f}",
            *(f"{row['loss']:.3f} ({row['loss_min']:.3f} - {row['loss_max']:.3f})" for row in (topk, causal)),
            to_random, f"{causal['loss'] - dropped(share):+.3f}", str(causal["seeds"]),
        ])  # fmt: skip
    for layers, row in sorted(static.items(), key=lambda item: len(item[0])):
        title = f"FFN{'s' * (len(layers) > 1)} of {', '.join(map(str, layers))} left out"
        loss = f"{row['loss']:.3f} ({row['loss_min']:.3f} - {row['loss_max']:.3f})"
        share, counted = f"{1 - len(layers) / 5:.2f}", f"{flops['none', 'normed', layers]:.2f}"
        rows.append([title, share, counted, "", loss, "", "", str(row["seeds"])])
    mlp, *residual = (
        at_budget[gate, gate_input, routed, "threshold"]
        for gate, gate_input in (("mlp", "normed"), ("mlp", "residual"), ("jepa", "residual"))
    )
    to_drop = mlp["loss"] - dropped((2 + 3 * mlp["full_ratio"]) / 5)
    to_random = " and ".join(f"{row['loss'] - random['loss']:+.3f}" for row in residual)
    brief = (
        f"FFNs of 3 of 5 layers at budget 0.5: loss {dense:.3f} dense, {mlp['loss']:.3f} with the MLP gate "
        f"({to_drop:+.3f} to the least important FFNs left out at the same share), "
        f"{random['loss']:.3f} with a random gate. Gates that "
        f"read the residual stream end no lower than the random one ({to_random}); with the JEPA gate "
        f"{flops['jepa', 'normed', routed]:.2f} of the dense FLOPs at this width, as its study counts them"
    )
    section = [
        "A real pretrained Llama of 260,000 parameters and width 64, FFNs of "
        "layers 2-4 of 5 routed at budget 0.5. Learned gates stand beside a frozen random one and beside the least "
        "important FFNs left out for every token, all with branches of rank 8 trained for 800 steps of 16 x 256 "
        f"tokens. Validation loss in nats, mean over seeds (lowest - highest); dense: {dense:.3f}. The two differences "
        "are those of the causal threshold's loss: to random routing, and to leaving these FFNs out at the same share "
        "of FFN calls. FLOPs are counted with the routers: at this width the JEPA gate costs more than it saves. What "
        "the branches are worth: random routing without any ends at "
        f"{result['random_routing_without_branch']:.3f}.",
        "",
        *markdown_table(
            ["gate, input", "FFN calls", "FLOPs / dense", "top-k", "causal threshold", "to random", "to drop", "seeds"],
            rows,
        ),
    ]
    command = "python recipes/stories260k/run.py --seeds 0 1 2"
    return Study("Quality: a pretrained Llama of width 64", "stories260k", command, brief, section)


def decode_step() -> list[str]:
    """Where a decoding step's time goes."""
    result = read("speed/decode-step.json")
    lines = [
        "Where the time of a decoding step of one sequence goes, milliseconds, at budget 0.5: dense, routed, and with "
        f"the same decisions at no cost ({result['machine']['device']}). `gate, up` is what finds the scores, and the "
        "branch's first map with them.",
        "",
    ]
    ways = ("dense", "routed", "free")
    columns = [(row, way) for row in result["measured"] for way in ways]
    names = list(dict.fromkeys(part for row, way in columns for part in row["parts_ms"][way]))
    rows = [[name, *(f"{row['parts_ms'][way].get(name, 0):.2f}" for row, way in columns)] for name in names]
    rows.append(["whole step", *(f"{row['ms'][way]:.2f}" for row, way in columns)])
    head = ["part", *(f"{way}, {row['layers']}" for row, way in columns)]
    reached = " and ".join(f"{row['of_ideal']:.2f} ({row['layers']})" for row in result["measured"])
    return [*lines, *markdown_table(head, rows), "", f"Of what the free router saves, the routed step saves {reached}."]


def timed_cases(result: Any) -> list[Any]:
    return [m for m in result["measurements"] if m["case"] in ("prefill", "decode")]


def machine_of(result: Any, dtype: str) -> str:
    """The processor, and what a large product reaches on it."""
    return f"{result['machine']['device']}, {result['peaks'][dtype]['gflop_per_s']:,.0f} GFLOP/s"


def with_error(row: Any) -> str:
    return f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}" if row["ratio_error"] else f"{row['ratio']:.3f}"


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
                f"{case}, {setting['dtype']}", f"{setting['target']}, {routed}", budget, f"{row['full_ratio']:.2f}",
                with_error(row), f"{masked['ratio']:.3f}" if masked else "", f"{row['flops_routed_over_dense']:.3f}",
                *("" if row[name] is None else f"{row[name]:.2f}" for name in ("eta", "eta_free")),
                machine_of(result, setting["dtype"]),
            ])  # fmt: skip
    return rows


def small_widths() -> list[str]:
    """Prefill at the widths of the embedded bases."""
    results = [read(f"speed/{name}.json") for name in ("widths", "widths-amx")]
    shapes = [m["setting"]["shape"] for result in results for m in timed_cases(result) for _ in m["budgets"]]
    rows = [row for result in results for row in timed_rows(result)]
    head = ["shape", "case", "routed", "budget", "run full", "time / dense", "masked", "FLOPs / dense", "eta", "free"]
    return [
        "Small widths, where a router's own work is large beside what a token can skip: the shapes of the embedded "
        "bases, 256 and 512 wide. The second processor, with AMX, was measured before "
        "narrow FFNs ran more rows at once:",
        "",
        *markdown_table([*head, "machine"], [[shape, *row] for shape, row in zip(shapes, rows)]),
    ]


def batches() -> list[str]:
    """Decoding of several sequences at once."""
    result, rows = read("speed/decode-batches.json"), []
    for m in timed_cases(result):
        for budget, row in m["budgets"].items():
            tuned = m["tuned"][budget]
            rows.append([
                str(m["batch"]), budget, f"{row['full_ratio']:.2f}", f"{row['full_passes']:.2f}", with_error(row),
                with_error(tuned), f"{tuned['executors'].get('full', 0)} of {m['setting']['depth']}",
            ])  # fmt: skip
    head = ["sequences", "budget", "run full", "FFNs read", "time / dense", "tuned, time / dense", "not routed"]
    return [
        "Decoding of 1 to 64 sequences at once, all FFNs of a quarter of the depth. `FFNs read`: the share of FFN "
        "calls that at least one row entered. `tuned`: after `tune_execution`, which stops routing in the layers where "
        f"it does not pay ({machine_of(result, 'bfloat16')}):",
        "",
        *markdown_table(head, rows),
    ]


def targets() -> list[str]:
    """FFNs, blocks and attention at one width, and on prompts of several lengths."""
    long, results = (
        read("speed/long-prompts.json"),
        [read(f"speed/{name}.json") for name in ("targets", "targets-decode")],
    )
    head = ["case", "routed", "budget", "run full", "time / dense", "masked", "FLOPs / dense", "eta", "free"]
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
        *markdown_table(["shape", *head], [[shape, *row[:9]] for shape, row in zip(shapes, timed_rows(long))]),
        "",
        "Memory at 1 x 8,192 tokens, MiB above the weights: the peak of the prompt, and the KV cache.",
        "",
        *markdown_table(["routed", "peak, dense", "peak, routed", "KV, dense", "KV, routed"], memory),
    ]


def compiled() -> list[str]:
    """Compiled against compiled."""
    result, rows = read("speed/compiled.json"), []
    for m in timed_cases(result):
        for budget, row in m["budgets"].items():
            case = f"{m['case']} {m['batch']} x {m['length']}"
            dense = [f"{m['dense_modes'][mode]:.1f}" for mode in ("eager", "compiled")]
            rows.append(
                [case, budget, f"{row['full_ratio']:.2f}", *dense, f"{row['modes']['eager']:.3f}", with_error(row)]
            )
    head = ["case", "budget", "run full", "dense, ms", "compiled, ms", "eager", "compiled"]
    return [
        "Eager and compiled by `torch.compile`, four layers at the width of Qwen2.5-0.5B; routed times over that of "
        f"the compiled dense model ({machine_of(result, 'bfloat16')}):",
        "",
        *markdown_table(head, rows),
    ]


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
                f"{row['full_ratio']:.2f}", f"{m['dense_ms']:.2f} ({m['dense_mode']})", with_error(row),
                f"{masked['ratio']:.2f}" if masked else "", f"{row['flops_routed_over_dense']:.2f}",
            ])  # fmt: skip
    operations = [
        [one["operation"], f"{one['share']:g}", f"{one['dense_ms']:.2f}", with_error(one), f"{one['matmul']:.2f}"]
        for one in alone["operations"]
        if one["share"] and one["dense_ms"] > 0.2  # of shorter ones only the launch would be seen
    ]
    return [
        "### On a GPU",
        "",
        f"{machine_of(result, 'bfloat16')}; the width of Llama-3-8B, all FFNs routed, routers in bfloat16; over the "
        "fastest dense mode, of eager and, in decode, compiled with CUDA graphs. **Eager decoding takes "
        f"{ratio:.1f} times the dense eager time** ({taken:.1f} ms against {dense:.1f}): launches are its time. Random "
        "weights:",
        "",
        *markdown_table(["case", "budget", "run full", "dense, ms", "time / dense", "masked", "FLOPs / dense"], rows),
        "",
        "The row operators alone, over the dense operation; the shares are of rows that run, and of a matmul rate of "
        f"{alone['peaks']['gflop_per_s']:,.0f} GFLOP/s. Those whose dense time is below 0.2 ms are left out: launches "
        "decide there.",
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
            ", ".join(map(str, best["drop"])) or "none",
            str(best["num_tokens"]), f"{best['acceptance_rate']:.2f}", f"{best['tokens_per_pass']:.2f}",
            f"{best['tokens_per_pass'] / best['speedup']:.2f}", f"{best['speedup']:.2f}",
        ])  # fmt: skip
    head = [
        "base", "tokens/s without", "draft's budget", "layers left out", "tokens ahead", "accepted", "tokens per pass",
        "a pass costs, steps", "speed-up",
    ]  # fmt: skip
    return [
        "Lossless drafting, the best draft of each search, float32, greedy; every text is that of plain generation "
        f"({result['machine']['device']}):",
        "",
        *markdown_table(head, rows),
    ]


def speed() -> Study:
    """The speed recipe: time and eta at the shape of Qwen2.5-0.5B, training steps and their memory."""
    results = [read(f"speed/{name}.json") for name in ("cpu", "cpu-decode", "cpu-float32")]
    timed = [m for result in results for m in timed_cases(result)]
    rows = [row for result in results for row in timed_rows(result)]
    threads = results[0]["machine"]["threads"]
    disabled, full = (
        [m["overheads"][name]["ratio"] for m in timed if m["overheads"]] for name in ("disabled", "budget 1.0")
    )
    train = read("speed/train.json")["measurements"]
    head = ["case", "routed", "budget", "run full", "time / dense", "masked", "FLOPs / dense", "eta", "free", "machine"]
    labels = [f"({m['loss']} loss, vocabulary {m['setting']['vocabulary']:,})" for m in train]
    steps = ", ".join(f"{m['ratio']:.2f} {label}" for m, label in zip(train, labels))
    peaks = ", ".join(f"{m['routed_peak_bytes'] / 1e6:,.0f}" for m in train)
    half = {
        m["case"]: m["budgets"]["0.5"]
        for m in results[0]["measurements"]
        if m["case"] in ("prefill", "decode") and len(m["setting"]["routed_layers"]) == 12
    }
    times, flops = (
        [f"{half[case][key]:.3f}" for case in ("prefill", "decode")] for key in ("ratio", "flops_routed_over_dense")
    )
    _, _, eager = headlines.eager_decode(read("speed/h100.json"))
    brief = (
        f"12 of 24 FFNs at budget 0.5, random weights, bfloat16, {threads} threads of {results[0]['machine']['device']}"
        f" (no instructions for bfloat16): prefill takes {times[0]} of the dense time at {flops[0]} of the FLOPs, "
        f"decode of 8 sequences {times[1]} at {flops[1]}; on {read('speed/h100.json')['machine']['device']} eager "
        f"decode of 1 sequence takes {eager:.1f} times the dense eager time"
    )
    section = [
        "Random weights at the shape of Qwen2.5-0.5B with a vocabulary of 32,000, "
        f"{threads} CPU threads; machines are named with what a large product reaches. `eta` is the part of the "
        "skipped arithmetic that shows on the clock; `free` is what it would be for a router that costs nothing, which "
        "is below 1 where an FFN takes a smaller share of the time than of the arithmetic. `masked` is a "
        "router of the same decisions that computes both paths. Medians of interleaved runs; with the adapter "
        f"disabled, a case takes {min(disabled):.3f} to {max(disabled):.3f} of the base's time, at budget 1 "
        f"{min(full):.3f} to {max(full):.3f}.",
        "",
        *markdown_table(head, rows),
        "",
        *decode_step(),
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
        "A training step of routers in the last third of the layers takes, of a step of LoRA (rank 8, on the same "
        f"layers' FFNs): {steps}. Above the weights, it needs {peaks} MB.",
    ]
    command = "python recipes/speed/bench.py recipes/speed/cpu.yaml --threads 2"
    return Study("Speed at the shape of Qwen2.5-0.5B", "speed", command, brief, section)


def demo() -> Study:
    """The demo's own tables."""
    result = read("demo/results.json")
    costs, times = demo_report.cost_rows(result), {row[0]: row[1:] for row in demo_report.times(result)}
    half = next(row for row in costs if row[0] == "0.5")
    machine, prefill = result["bench"]["machine"], result["bench"]["prefill"]["budgets"]["0.5"]
    wide = result["bench_wide"]["prefill"]["budgets"]["0.5"]
    brief = (
        f"FFN budget {half[0]}, no training: loss over dense (share run) {half[2]}, {half[1]} with the best layers "
        f"left out; {half[3]} after {result['training']['arguments']['steps']} steps of the routers' branches; prefill "
        f"takes {with_error(prefill)} of the dense time ({machine['threads']} threads of {machine['device']} with AMX; "
        "other processors differ); 18 million weights, one run"
    )
    section = [
        "Loss over dense on the wider embedded base, with the share of FFN calls that ran; times over dense times, "
        "with the share that ran in them (in 48 steps of decode it can be far from the budget), of that base and of "
        "random weights: three layers of the width of Qwen2.5-0.5B, a vocabulary of 2,048. Chosen rows run in "
        "slices, which makes each row cheaper and would do so in a dense model, too, which runs all rows at once: at "
        f"budget 0.5 the second model takes {wide['ratio']:.3f} of the time at {wide['flops_routed_over_dense']:.3f} "
        "of the FLOPs. One "
        f"run, {machine['threads']} threads of {machine['device']}, {result['bench']['setting']['dtype']}.",
        "",
        *markdown_table(["budget", *demo_report.LINES], costs),
        "",
        "Loss over dense of prompts in the same time; the time of layers left out is modelled, not measured: they are "
        "taken to save their part of what leaving out "
        "all routed FFNs saves, and their branches to cost nothing:",
        "",
        *markdown_table(["budget", "time / dense", *demo_report.LINES], demo_report.equal_time_rows(result)),
        "",
        *markdown_table(
            ["budget", *(f"{part}, {title}" for title in demo_report.SIZES.values() for part in demo_report.PARTS)],
            [[budget, *row] for budget, row in times.items()],
        ),
    ]
    return Study("Demo: a small Llama", "demo", "make demo", brief, section)


def aux_losses() -> Study:
    """The auxiliary-loss studies, and what a training step costs."""
    names = ("long", "main", "budget_25", "variants", "results")
    study, short, quarter, variants, pilots = (read_results(RECIPES / "aux_losses" / name) for name in names)
    steps = read("aux_losses/step_cost.json")
    rows, first = [], {}
    for one in (short, quarter, variants):
        first |= {name: one for name in one.names if name not in first}
    for name, one in (*((name, study) for name in study.names), *first.items()):
        cells = [
            list(values(one, name, metric).values()) for metric in ("avg_first_half", "endpoint", "layers/gate_prob")
        ]
        config, seeds = one.config(name), str(len(one.seeds))
        rows.append(
            [str(config["label"]), str(config["about"]), f"{one.info['steps']:,}", seeds]
            + [spread(cell, fixed(places)) for cell, places in zip(cells, (4, 4, 3))]
        )

    def counted(one: StudyRuns) -> str:
        return tell_states(verdict.state for verdict in judge(one))

    def sized(one: StudyRuns) -> str:
        return f"{len(one.names)} configs x {len(one.seeds)} seeds"

    small, paper = (steps[key] for key in ("study base, last 3 of 6 layers", "paper shape, last 4 of 12 layers"))
    mlp, jepa, gate = (
        [f"{case['ratios'][key]['median']:.2f}" for case in (small, paper)]
        for key in ("G1 all_full / G1", "G3 all_full / G3", "G3 / G1")
    )
    info = study.info
    fewer, pilot_size = (f"{sized(one)} of {one.info['steps']} steps" for one in (short, pilots))
    brief = (
        f"{sized(study)} of {info['steps']:,} steps: of the papers' claims and open questions {counted(study)}; "
        f"{fewer}: {counted(short)}; at a budget of 25 %, {sized(quarter)}: {counted(quarter)}; variants, "
        f"{sized(variants)}: {counted(variants)}; pilots, {pilot_size}: {counted(pilots)}"
    )
    section = [
        f"{sized(study)} on the embedded base, last 3 of 6 FFNs routed at budget 0.5, {info['steps']:,} steps; dense "
        f"loss {info['base']['dense_loss']:.3f}. Of the papers' claims (arXiv:2604.17228 and CGS) and open questions: "
        f"{counted(study)}; each with its interval in [the report](../recipes/aux_losses/long/report.md) and on "
        f"[the page of claims](claims.md). [Fewer steps](../recipes/aux_losses/main/report.md), {fewer}: "
        f"{counted(short)}. [At a budget of 25 %](../recipes/aux_losses/budget_25/report.md), {sized(quarter)}: "
        f"{counted(quarter)}. [Variants](../recipes/aux_losses/variants/report.md), {sized(variants)}: "
        f"{counted(variants)}. [Pilots](../recipes/aux_losses/results/report.md), {pilot_size}: {counted(pilots)}. "
        "Top-k loss in nats, mean ± standard error over seeds. A training step with the oracle takes "
        f"{mlp[0]} of the time without it with the MLP gate, {jepa[0]} with the JEPA gate, and one with the JEPA gate "
        f"{gate[0]} of one with the MLP gate ({mlp[1]}, {jepa[1]} and {gate[1]} at that paper's shape).",
        "",
        *markdown_table(
            ["config", "what", "steps", "seeds", "loss, first half", "loss at the end", "gate probability"], rows
        ),
    ]
    command = "python recipes/study run recipes/aux_losses/long.yaml --out OUT --jobs 2"
    return Study("Auxiliary losses", "aux_losses", command, brief, section)


def token_selective() -> Study:
    """TSA beside the paper's figures."""
    result = selective_report.read("paper")
    runs, rows = selective_report.seeds_of(result, "tsa"), []
    settings = runs[0]["settings"]
    for name, label in selective_report.KINDS.items():
        paper = selective_report.PAPER["shakespeare" if name == "tsa" else name]
        over = f"{100 * paper['loss_over_dense']:+.1f} %"
        alpha, most = (f"{paper['alpha']:.3f}", over) if "alpha" in paper else ("", f"less than {over}")
        rows += [
            [f"paper, {label}", alpha, f"{100 * paper['saved']:.1f} %", most],
            [f"soft, {label}", *selective_report.costs(result, name)],
            [f"tokens below 1/2 really skip, {label}", *selective_report.costs(result, name, hard=True)],
        ]
    brief = (
        f"operations saved, and loss over dense: {rows[1][2]} at {rows[1][3]} counted on soft scaling, where nothing "
        f"is skipped; {rows[2][2]} at {rows[2][3]} where tokens really skip"
    )
    section = [
        "The model of the TSA paper (arXiv:2605.05222) on Tiny-Shakespeare from scratch, in as many steps: "
        f"{settings['steps']:,} of {settings['batch']} sequences. Mean ± standard error of {len(runs)} seeds, at the "
        "end of the training.",
        "",
        *markdown_table(["", "alpha", "operations saved", "validation loss over dense"], rows),
    ]
    command = "python recipes/token_selective/run.py recipes/token_selective/paper.yaml --out OUT"
    return Study("Token-selective routing", "token_selective", command, brief, section)


def moe() -> Study:
    """Routed experts against dropped ones: at half of the pairs in all, and at half in every layer."""
    result = read("moe/results.json")
    ratio = result["timing"]["ratio"]

    def mean(method: str, read_one: Callable[[Any], float]) -> float:
        return statistics.fmean(
            read_one(run) for run in result["runs"] if (run["method"], run.get("budget")) == (method, 0.5)
        )

    rows = [
        [title, f"{mean(method, lambda run: run['share']):.2f}", f"{mean(method, lambda run: run['loss']):.3f}",
         f"{mean(method, lambda run: run['equal_layers']['loss']):.3f}", f"{ratio[f'{method}-b50-s0']:.2f}"]
        for method, title in (("per_expert", "a router per expert"), ("per_layer", "a router per layer"))
    ]  # fmt: skip
    ablated, weighted, static = (
        next(run for run in result["runs"] if (run["method"], run.get("dropped")) == case)
        for case in (("greedy", 16), ("weight", 16), ("static", 4))
    )
    random_loss, random_share = (mean("random", lambda run, key=key: run[key]) for key in ("loss", "share"))
    rows += [
        ["16 of all 32 experts dropped, those that cost least behind those before", f"{ablated['share']:.2f}",
         f"{ablated['loss']:.3f}", "", ""],
        ["16 of all 32 experts dropped, by routing weight", f"{weighted['share']:.2f}",
         f"{weighted['loss']:.3f}", "", ""],
        ["random routing", f"{random_share:.2f}", "", f"{random_loss:.3f}", f"{ratio['random-b50-s0']:.2f}"],
        ["4 of 8 experts of each layer dropped, by routing weight", f"{static['share']:.2f}", "",
         f"{static['loss']:.3f}", f"{ratio['static-drop4-s0']:.2f}"],
    ]  # fmt: skip
    behind = {
        method: f"{mean(method, lambda run: run['loss']) - static_at_share(f'router per {kind}, 0.5'):+.3f}"
        for method, kind in (("per_expert", "expert"), ("per_layer", "layer"))
    }
    steps = result["setting"]["routing"]["base"]["steps"]
    brief = (
        f"half of the pairs of a base of {steps:,} steps, loss over the best static dropping at the same share: a "
        f"router per expert {behind['per_expert']}, a router per layer {behind['per_layer']}; prefill takes "
        f"{rows[0][4]} and {rows[1][4]} of the dense time ({result['timing']['machine']['device']}, 1 thread)"
    )
    section = [
        f"A tiny mixture of experts that the recipe pretrains for {steps:,} steps (dense loss "
        f"{result['timing']['dense_loss']:.3f}), no cheap branches, budget 0.5. Over the best static dropping at the "
        "same share of pairs, which may take experts from any layer, a router per expert ends "
        f"{behind['per_expert']} nats, and a router per layer {behind['per_layer']}. Random routing and dropping of "
        "each layer leave out half in every layer; beside them stands what the routers lose with the budget held in "
        "every layer.",
        "",
        *markdown_table(["", "share of pairs run", "loss", "loss, half of every layer", "prefill time / dense"], rows),
    ]
    return Study("Experts of a tiny mixture", "moe", "python recipes/moe/route.py --work /tmp/moe", brief, section)


def static_at_share(row: str) -> float:
    """The loss of dropped experts at the share of pairs of a row of moe/results.md, as it is interpolated there."""
    lines = (RECIPES / "moe/results.md").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"| {row} |")).split(" | ")[3])


def router_tuning() -> Study:
    """Trained routers beside the best sublayers dropped, and the bytes that skipped sequences leave out."""
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
        f"Three of 6 layers of the embedded base, losses in nats over dense, mean ± standard error of {seeds} seeds; "
        "the paper's column is the mean accuracy of eight tasks over dense, in points.",
        "",
        *tuning_report.loss_table(result).split("\n"),
        "",
        f"Attention of {len(cache['routed_layers'])} of 6 layers skipped per sequence by untrained routers leaves "
        f"{100 * (1 - cache['routed_bytes'] / cache['dense_bytes']):.0f} % of the KV cache out "
        f"({cache['routed_bytes']:,} of {cache['dense_bytes']:,} bytes, {cache['prompts']} prompts), and generation "
        f"{equal} a masked reference. At the shape of Llama-3-8B with 16 of 32 layers, 64 x 2,048 tokens, it counts "
        f"{gib[0] - gib[1]:.0f} of {gib[0]:.0f} GiB; the Router-Tuning paper (arXiv:2410.13184) reports 8 GB.",
    ]
    return Study("Router-Tuning", "router_tuning", "python recipes/router_tuning/run.py --out OUT", brief, section)


def lora() -> Study:
    """LoRA, routing, and both."""
    result = read("lora/results.json")
    seeds = result["seeds"].values()

    def over(way: str, other: str) -> str:
        return tell_mean([seed[way]["loss"] - seed[other]["loss"] for seed in seeds], sign="+")

    brief = (
        f"fine-tuned on another text, {len(seeds)} seeds: LoRA and routing of 3 of 6 layers at budget 0.5 jointly, "
        f"over LoRA alone: {over('joint', 'lora')} nats (FFNs), {over('joint_router_tuning', 'lora')} (Router-Tuning, "
        f"attention); over LoRA for half of the steps, then routing: {over('joint', 'two_step')} (FFNs)"
    )
    return Study("LoRA and routing", "lora", "python recipes/lora/run.py --out OUT", brief, lora_report.lines(result))


@dataclasses.dataclass(frozen=True)
class Duel:
    """The MLP gate beside the JEPA gate: loss by seed at one budget of one study."""

    study: str
    budget: float
    mlp: dict[int, float]
    jepa: dict[int, float]

    def difference(self) -> float:
        return statistics.fmean(self.jepa.values()) - statistics.fmean(self.mlp.values())

    def lower(self) -> tuple[str, int]:
        """The gate with the lower mean loss, and in how many seeds it is the lower one."""
        sign = 1 if self.difference() > 0 else -1
        return ("MLP" if sign > 0 else "JEPA"), sum(sign * (self.jepa[s] - self.mlp[s]) > 0 for s in self.mlp)

    def row(self) -> list[str]:
        winner, seeds = self.lower()
        means = [f"{statistics.fmean(losses.values()):.3f}" for losses in (self.mlp, self.jepa)]
        lower = f"{winner}, {seeds} of {len(self.mlp)}"
        return [self.study, f"{self.budget:g}", *means, f"{self.difference():+.3f}", lower]


def duels() -> list[Duel]:
    """Every committed comparison of the two gates that differ in nothing else."""
    found = []
    stories = read("stories260k/results.json")["runs"]
    for gate_input in ("normed", "residual"):
        for budget in (0.75, 0.5, 0.25):
            losses: list[dict[int, float]] = [
                {
                    run["seed"]: next(
                        row["loss"] for row in run["rows"] if (row["rule"], row["budget"]) == ("topk", budget)
                    )
                    for run in stories
                    if (run["gate"], run["gate_input"]) == (gate, gate_input)
                }
                for gate in ("mlp", "jepa")
            ]
            found.append(Duel(f"stories260k, input {gate_input}", budget, *losses))
    runs = fit_report.runs_of(read("fit_router/results.json")["stories260k"], trained=True)
    for count in (1, 2):
        both = sorted(runs["oracle", count].keys() & runs["jepa", count].keys())
        losses = [{seed: runs[kind, count][seed]["more"] for seed in both} for kind in ("oracle", "jepa")]
        found.append(Duel("fit_router, stories260k, loss over dense, oracle's labels", 1 - count / 5, *losses))
    study = read_results(RECIPES / "aux_losses/results")
    configs = [(0.75, "{}_b75"), (0.5, "{}"), (0.25, "{}_b25"), (0.1, "{}_b10")]
    pairs = [("aux_losses, pilots, oracle's labels", *case) for case in configs]
    pairs.append(("aux_losses, pilots, no labels", 0.5, "a3_{}"))
    found += [gates_of(study, *pair) for pair in pairs]
    tuned_pairs = (
        ("main", 0.5, "rate 8e-3", ""),
        ("budget_25", 0.25, "rate 8e-3", "_b25"),
        ("long", 0.5, "rate 2e-3", ""),
        ("long", 0.5, "rate 8e-3", "_8e3"),
    )
    for folder, budget, rate, behind in tuned_pairs:
        tuned = read_results(RECIPES / "aux_losses" / folder)
        title = f"aux_losses, {rate}, {tuned.info['steps']:,} steps, "
        found.append(gates_of(tuned, title + "oracle's labels", budget, "{}" + behind))
        found.append(gates_of(tuned, title + "no labels", budget, "a3_{}" + behind))
    return found


def gates_of(study: StudyRuns, title: str, budget: float, name: str) -> Duel:
    """The two gates of an auxiliary-loss study; `name` is that of both configs but for the gate."""
    return Duel(title, budget, *(dict(values(study, name.format(gate), "endpoint")) for gate in ("g1", "g3")))


def gate_comparison() -> list[str]:
    """Which gate ended lower, in every committed comparison: a part of the page about gates."""
    rows = duels()
    plain, labelled = ([duel for duel in rows if ("oracle's" in duel.study) == taught] for taught in (False, True))
    counts = [Counter(duel.lower()[0] for duel in group)["MLP"] for group in (plain, labelled)]
    return [
        "Neither is ahead of the other everywhere. Trained without the oracle's labels the MLP gate ended lower in "
        f"{counts[0]} of {len(plain)} comparisons and the JEPA gate in {len(plain) - counts[0]}; with the oracle's "
        f"labels the MLP gate in {counts[1]} of {len(labelled)}. Mean loss in nats over seeds; the last column "
        "says in how many seeds the lower one is lower:",
        "",
        *markdown_table(
            ["study", "budget", "MLP", "JEPA", "JEPA - MLP", "lower, in seeds"], [duel.row() for duel in rows]
        ),
    ]


def part(lines: list[str], name: str) -> str:
    """A page's generated part, between its two markers."""
    return "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- /{name} -->"])


def fitted() -> Study:
    """Routers without training beside the best static subset."""
    results = read("fit_router/results.json")

    def less(found: dict[str, Any], trained: bool, gates: str = "mlp") -> str:
        """The parts spared, by the number of layers' worth of calls skipped."""
        points = fit_report.summary(found, trained)
        routed = [points[gates, count] for count in sorted(count for kind, count in points if kind == gates)]
        return " / ".join(f"{fit_report.spared(points, point):.0%}" for point in routed)

    said, trained = [], [base for base, found in results.items() if fit_report.summary(found, trained=True)]
    for base, found in results.items():
        skipped = [
            f"{1 - row['share']:.0%}"
            for (kind, _), row in sorted(fit_report.summary(found).items())
            if kind == "static"
        ]
        after = f", {less(found, True)} with both sides trained" if base in trained else ""
        learned = {kind for kind, _ in fit_report.summary(found, True)} & LEARNED
        best = max((less(found, True, kind) for kind in learned), default="")
        after += f" (at best {best} with gates learned from random weights)" if learned else ""
        points = fit_report.summary(found)
        tables = [
            f"{fit_report.spared(points, row):.0%}"
            for (kind, _), row in sorted(points.items())
            if kind == "static_memory" and row["seeds"] > 2
        ]
        after += (
            f"; layers left out lose {' / '.join(tables)} less with a table of n-grams in their place" if tables else ""
        )
        said.append(f"{fit_report.TITLES[base]} {less(found, False)} less at {' / '.join(skipped)} skipped{after}")
    said.append(branch_report.in_brief(results))
    intro = (
        "`fit_router` beside the best of all subsets of FFNs to leave out, with the same branches fitted on the same "
        "16,384 tokens. Loss over the dense base in nats, on text that neither side saw: mean ± standard error over "
        'seeds (their number); "skipped" is the share of FFN calls really skipped, "less" how much is spared of what '
        "leaving layers out loses at that share, linear between its points, as where one layer more is left out in a "
        'part of the texts; "p" how likely that is by '
        "chance, by a t-test of the differences within each seed, times the number of comparisons on that base."
    )
    section = [intro, "", "Without training:", "", *fit_report.table(results)]
    if trained:
        section += ["", fit_report.TRAINED, "", *fit_report.table(results, trained=True)]
    section += ["", fit_report.TUNED, "", *fit_report.tuning_table(results)]
    section += ["", *branch_report.section(results, read("fit_router/branch_time.json"))]
    phases = read("fit_router/phases.json")
    behind = (
        f"Loss of the 64 tokens behind a prompt of {phases['prompt']}, {fit_report.TITLES[phases['base']]}, without "
        "training, and time to the first token of 4 prompts of 1,020 tokens over the dense base's "
        f"({phases['machine']['device']}, {phases['machine']['threads']} threads):"
    )
    section += ["", behind, "", *fit_report.phases_table(phases)]
    return Study(
        "Routing against leaving layers out", "fit_router", "python recipes/fit_router/run.py",
        "what leaving out the best layers adds to the loss, against MLP gates: " + "; ".join(said), section,
    )  # fmt: skip


def served() -> Study:
    """vLLM under load, dense and routed, and half an hour of clients that leave."""
    load, soak = vllm_report.read_load(), read("vllm_load/soak.json")
    other = read("vllm_load/load_transformers.json")
    setting, machine = load["setting"], load["machine"]

    cells = {
        cell: statistics.median(found)
        for cell, found in vllm_report.ratios(load, "all", "total_token_throughput").items()
    }
    by_prompt: dict[int, list[float]] = {}
    for (prompt, _), ratio in cells.items():
        by_prompt.setdefault(prompt, []).append(ratio)
    more = ", ".join(f"{min(ratios):.2f} to {max(ratios):.2f} at {prompt:,}" for prompt, ratios in by_prompt.items())
    brief = (
        f"FFNs of all {setting['layers']} layers at budget {setting['budget']}, random weights in {setting['dtype']}, "
        "1 to 16 clients: tokens/s over dense, by prompt tokens: "
        f"{more}; of {soak['routed']['read']:,} answers among clients that leave, {soak['routed']['wrong']} were "
        "wrong"
    )
    section = [
        "One vLLM engine, a dense server and routed ones side by side, under `vllm bench serve`: random weights at the "
        f"width of Qwen2.5-0.5B, {setting['layers']} layers, every FFN routed at budget {setting['budget']}, "
        f"{setting['dtype']}, {setting['output']} tokens to write, {machine['threads']} threads of "
        f"{machine['device']}, which the load generator shares. Over the dense server's, medians of rounds "
        "(lowest - highest); `prompts only` is `--phases prefill`.",
        "",
        *vllm_report.load_lines(load),
        "",
        f"The same client on `transformers serve`, whose requests wait for one another ({other['machine']['device']}):",
        "",
        *vllm_report.load_lines(other),
        "",
        "Among clients that stop reading or vanish:",
        "",
        *vllm_report.soak_lines(soak),
    ]
    return Study("Served by vLLM", "vllm_load", "python recipes/vllm_load/load.py", brief, section)


def peers() -> Study:
    """Time and rows of other packages' skipping beside ours."""
    result = read("peers/results.json")
    systems, machine = result["systems"], result["machine"]
    prompt = {name: f"{next(iter(row['times'].values()))['ratio']:.2f}" for name, row in systems.items()}
    brief = (
        "time of a prompt of 1,024 tokens over dense, half of them skipping in 6 of 12 layers: blocks, "
        f"{prompt['block']} (the MoD package {prompt['mod']}); attention, {prompt['attention']} (Router-Tuning's code "
        f"{prompt['router-tuning, attention']}); every token leaving after 6 layers by transformers' early exit, "
        f"{prompt['early exit']} ({machine['device']}, {machine['threads']} threads, random weights)"
        "; of the routers, only ours both compute no skipped row and decode what they prefill"
    )
    section = [
        "A Llama with random weights, 12 layers at the width of Qwen2.5-0.5B, bfloat16; six layers are routed, half of "
        "the tokens skip. Times are over the dense model of the same version of transformers, medians of "
        f"{result['rounds']} rounds in turn; rows computed are those of the routed layers' queries and FFNs "
        f"({machine['device']}, {machine['threads']} threads).",
        "",
        *peers_report.table(systems),
    ]
    return Study("Beside the peers", "peers", "python recipes/peers/run.py", brief, section)


def over_memory(runs: engram_report.Runs) -> str:
    """What kinds of training have of the memory alone, as means over the seeds that both have."""
    memory = runs["memory"]

    def over(kind: str, measure: engram_report.Measure) -> str:
        seeds = sorted(set(memory) & set(runs[kind]))
        return tell_mean([measure(runs[kind][seed]) - measure(memory[seed]) for seed in seeds], sign="+")

    def of_seeds(kind: str) -> str:
        return "" if len(runs[kind]) == len(memory) else f", {len(runs[kind])} seeds"

    return "; ".join(
        f"{engram_report.KINDS[kind].removeprefix('memory, ')}{of_seeds(kind)} {over(kind, engram_report.loss)} (AUC "
        f"{over(kind, engram_report.area)})"
        for kind in runs
        if kind != "memory"
    )


def engram() -> Study:
    """Counterfactual gate supervision on a memory that is trained from scratch."""
    told = []
    for name, text in engram_report.TEXTS.items():
        steps, runs = next(iter(engram_report.by_steps(read(f"engram/{name}")).items()))
        states = tell_states(row.state for row in engram_report.claims(runs))
        found = over_memory(runs) if len(runs["memory"]) >= MIN_SEEDS else "too few to decide anything"
        told.append(f"{steps:,} steps on {text}, {len(runs['memory'])} seeds: {found} (claims: {states})")
    brief = (
        "a Llama of width 128 and its memory from scratch; loss, and how well the gate tells where the memory helps "
        f"(AUC), over the memory alone, ± standard errors. {'. '.join(told)}"
    )
    command = "python recipes/engram/run.py --size packages --kinds memory cgs"
    section = [
        '"Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory" '
        "again, at the width of 128, in steps of 16 x 256 tokens of Python. Mean ± standard error (seeds); AUC is how "
        "well `alpha` tells where the memory helps, by layer and their mean; hot tokens are the half whose slots are "
        "looked up most often.",
        "",
        *engram_report.by_text(engram_report.table),
        "",
        engram_report.DIFFERENCES,
        "",
        *engram_report.by_text(engram_report.differences),
    ]
    return Study("Counterfactual gate supervision", "engram", command, brief, section)


def studies() -> list[Study]:
    own = [fitted(), quality(), speed(), peers(), demo(), served(), token_selective(), moe()]
    return [*own, router_tuning(), lora(), aux_losses(), engram()]


def results() -> list[tuple[Path, str, list[str]]]:
    """Page, marker and lines of every generated part but the gates': the README's, and the page of results."""
    found = studies()
    rows = [[f"[{s.title}](#{anchor(s.title)})", f"`{s.command}`", s.brief] for s in found]
    sections = [BRIEF, "", *markdown_table(["study", "command", "what came out"], rows)]
    for s in found:
        made = f"From [`recipes/{s.folder}`](../recipes/{s.folder}/README.md), which has the exact commands."
        sections += ["", f"## {s.title}", "", made, "", *s.section]
    return [
        (README, PAYS, when_it_pays.lines()),
        (README, PAPERS, headlines.papers()),
        (README, RESULTS, headlines.results()),
        (RESULTS_PAGE, RESULTS, sections),
    ]


def anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def draw() -> None:
    """The demo's picture, and the README's: fits for each share, with the times that the demo measured on that base."""
    demo = read("demo/results.json")
    prefill = demo["bench"]["prefill"]
    shares, ratios = zip(*sorted((row["full_ratio"], row["ratio"]) for row in prefill["budgets"].values()), (1.0, 1.0))

    def time(kind: str, share: float) -> float:
        return demo_report.static_time(prefill, share) if kind == "static" else float(np.interp(share, shares, ratios))

    fit_report.draw_time(read("fit_router/results.json")["wide"], time, RECIPES / "fit_router" / "time.png")
    demo_report.plot_quality(RECIPES / "demo" / "quality.png", demo)


def parts() -> list[tuple[Path, str]]:
    """Every page with a part as it must stand there, markers included."""
    found = [*results(), (GATE_PAGE, GATES, gate_comparison())]
    return [(page, part(lines, name)) for page, name, lines in found]


def main() -> None:
    for page, written in parts():
        first, *_, last = written.splitlines()
        head, rest = page.read_text().split(first)
        page.write_text(head + written + rest.split(last)[-1])
    draw()


if __name__ == "__main__":
    main()
