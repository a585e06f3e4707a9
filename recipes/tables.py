"""Write the README's results from the committed result files: `python recipes/tables.py`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hf_depthroute.report.study.claims import judge
from hf_depthroute.report.study.results import read_study
from hf_depthroute.report.study.values import fixed, spread, values

RECIPES = Path(__file__).parent
README = RECIPES.parent / "README.md"
START, END = "<!-- results -->", "<!-- /results -->"


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def quality() -> list[str]:
    """The stories260k recipe: loss at budget 0.5."""
    result = read("stories260k/results.json")
    rows = []
    for gate in ("mlp", "jepa"):
        for gate_input in ("normed", "residual"):
            mine = [r for r in result["summary"] if (r["gate"], r["gate_input"]) == (gate, gate_input)]
            cells = [next(r for r in mine if (r["rule"], r["budget"]) == (x, 0.5)) for x in ("topk", "threshold")]
            spread = [f"{c['loss']:.3f} ({c['loss_min']:.3f} - {c['loss_max']:.3f})" for c in cells]
            rows.append([gate, gate_input, *spread, str(cells[0]["seeds"])])
    dense = next(r for r in result["summary"] if r["rule"] == "dense")["loss"]
    return [
        "**Quality** (`recipes/stories260k`): a real pretrained Llama of 260,000 parameters, FFNs of layers 2-4 of 5 "
        "routed at budget 0.5, branch rank 8, 800 steps of 16 x 256 tokens. Validation loss in nats, mean over seeds "
        f"(lowest - highest); dense: {dense:.3f}; random routing without a branch: "
        f"{result['random_routing_without_branch']:.3f}.",
        "",
        *table(["gate", "gate input", "top-k", "causal threshold", "seeds"], rows),
    ]


def speed() -> list[str]:
    """The speed recipe: time and eta at the shape of Qwen2.5-0.5B."""
    result = read("speed/qwen2.5-0.5b-cpu.json")
    setting, machine = result["setting"], result["machine"]
    rows = []
    for part in ("prefill", "decode"):
        for budget, row in result[part]["budgets"].items():
            rows.append([
                part, budget, f"{row['full_ratio']:.3f}", f"{row['ratio']:.3f}",
                f"{row['flops_routed_over_dense']:.3f}", f"{row['eta']:.2f}",
            ])  # fmt: skip
    disabled = result["prefill"]["disabled_over_base"]
    return [
        "**Speed** (`recipes/speed`): random weights at the shape of Qwen2.5-0.5B with a vocabulary of 32,000, the "
        f"last {len(setting['routed_layers'])} of 24 FFNs routed, {setting['dtype']}, {machine['threads']} CPU threads "
        f"({machine['device']}); prefill {setting['batch']} x {setting['length']} tokens, decode batch "
        f"{setting['decode_batch']}. `eta` is the part of the skipped arithmetic that shows on the clock. With the "
        f"adapter disabled, prefill takes {disabled:.3f} of the untouched base's time. One run on a shared machine; "
        "its README gives the spread over runs, and the slower case of `generate`'s prefill.",
        "",
        *table(["part", "budget", "share run full", "time / dense", "FLOPs / dense", "eta"], rows),
    ]


def demo() -> list[str]:
    """The demo's own table."""
    result = read("demo/results.json")
    rows = result["eval"]["rows"]
    dense = next(row for row in rows if row["rule"] == "dense")["loss"]
    cells = []
    for row in (row for row in rows if row["rule"] == "threshold"):
        times = [result["bench"][part]["budgets"][str(row["budget"])]["ratio"] for part in ("prefill", "decode")]
        cells.append([
            f"{row['budget']:g}", f"{row['full_ratio']:.3f}", f"{row['loss'] - dense:+.3f}", f"{row['gap']:+.3f}",
            *(f"{time:.3f}" for time in times),
        ])  # fmt: skip
    return [
        f"**Demo** (`make demo`): the embedded base, last 4 of 6 FFNs routed; dense loss {dense:.3f}. A model this "
        "small shows the trade in loss, not the speed: its FFNs are a few matrix products of 256 x 768, and in decode "
        "the overhead of routing outweighs them. The last two columns are time over dense time.",
        "",
        *table(["budget", "share run full", "loss - dense", "threshold - top-k", "prefill time", "decode time"], cells),
    ]


def aux_losses() -> list[str]:
    """The auxiliary-loss study: the main configs, and what a training step costs."""
    study = read_study(RECIPES / "aux_losses/results")
    steps = read("aux_losses/step_cost.json")
    rows = []
    for name in ("g1", "g3", "a3_g1", "a3_g3", "a1", "a2", "on_policy_g1", "cgs"):
        cells = [
            list(values(study, name, metric).values()) for metric in ("avg_first_half", "endpoint", "grad_norm_mean")
        ]
        config = study.config(name)
        rows.append(
            [str(config["label"]), str(config["about"]), *(spread(c, fixed(n)) for c, n in zip(cells, (3, 3, 2)))]
        )
    verdicts = Counter(verdict.word for verdict in judge(study))
    counted = ", ".join(f"{count} {word}" for word, count in verdicts.most_common())
    small, paper = (steps[key] for key in ("study base, last 3 of 6 layers", "paper shape, last 4 of 12 layers"))
    oracle, gate = (
        [f"{case['ratios'][key]['median']:.2f}" for case in (small, paper)] for key in ("G3 all_full / G3", "G3 / G1")
    )
    return [
        "**Auxiliary losses** (`recipes/aux_losses`): 30 configs x 3 seeds on the embedded base, last 3 of 6 FFNs "
        f"routed at budget 0.5, 400 steps; dense loss {study.info['base']['dense_loss']:.3f}. Of the papers' claims "
        f"and open questions: {counted}; each with its numbers in "
        "[the report](recipes/aux_losses/results/report.md). Top-k loss in nats, mean ± standard deviation over "
        f"seeds. A training step with the oracle takes {oracle[0]} of the time without it, and one with the JEPA gate "
        f"{gate[0]} of one with the MLP gate ({oracle[1]} and {gate[1]} at the paper's shape).",
        "",
        *table(["config", "what", "loss, first half", "loss at the end", "gradient norm"], rows),
    ]


def block() -> str:
    """The README's results, between its two markers."""
    return "\n".join([START, "", *quality(), "", *speed(), "", *demo(), "", *aux_losses(), "", END])


def main() -> None:
    text = README.read_text()
    head, rest = text.split(START)
    README.write_text(head + block() + rest.split(END)[-1])


if __name__ == "__main__":
    main()
