"""Route a real pretrained Llama that this project did not train,
and compare gates with routing that learns nothing.

    python recipes/stories260k/run.py --seeds 0 1 2

Base and text are the folder `../shared/data` beside the project (`--data` to point elsewhere).
Every run is the command line's own `train` and `eval`, in a process of its own; three to four
minutes each on one shared CPU core. A run that `--out` holds already is not repeated, so the recipe
continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROUTED = [2, 3, 4]
LEARNED = [("mlp", "normed"), ("jepa", "normed"), ("mlp", "residual"), ("jepa", "residual")]
DROPPED = (1, 2)  # FFNs of the static baseline, least important first
BRANCH_RANK = 8  # as in train.yaml
CASE = ("gate", "gate_input", "layers")  # what tells cases apart


def cases(importance: dict[int, float]) -> list[dict[str, Any]]:
    """Learned gates, random projections, and FFNs left out for every token:
    all with the same branches and steps."""
    from hf_depthroute.inference.importance import least_important

    routed = [
        {"gate": gate, "gate_input": source, "layers": ROUTED}
        for gate, source in [*LEARNED, ("random", "normed")]
    ]
    static = [
        {"gate": "none", "gate_input": "normed", "layers": least_important(importance, n)}
        for n in DROPPED
    ]
    return routed + static


def key(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(run[name]) for name in CASE)


def command(*arguments: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "hf_depthroute", *map(str, arguments)], check=True, env=environment
    )


def train_and_eval(data: Path, folder: Path, case: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run; the rows of `hf-depthroute eval --json`."""
    layers = ",".join(map(str, case["layers"]))
    adapter = folder / f"{case['gate']}_{case['gate_input']}_{layers}_{seed}"
    result = adapter.with_suffix(".json")
    base, text = data / "stories260k", data / "stories.txt"
    command(
        "train", "--config", HERE / "train.yaml", "--model", base, "--dataset", text, "--gate",
        case["gate"], "--gate-input", case["gate_input"], "--layers", layers, "--seed", seed,
        "--out", adapter,
    )  # fmt: skip
    command(
        "eval", "--model", base, "--adapter", adapter, "--dataset", text, "--split", "train[90%:]",
        "--length", 256, "--batch-size", 32, "--blocks", 1000, "--budgets", "0.25,0.5,0.75",
        "--json", result,
    )  # fmt: skip
    return {**case, "seed": seed, "rows": json.loads(result.read_text())["rows"]}


def load(data: Path, split: str) -> tuple[Any, Any]:
    """The base, and the blocks `[N, 256]` of a part of the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_depthroute.data.text import load_text, pack

    tokenizer = AutoTokenizer.from_pretrained(data / "stories260k", trust_remote_code=False)
    text = load_text(str(data / "stories.txt"), split=split)
    base = AutoModelForCausalLM.from_pretrained(
        data / "stories260k", trust_remote_code=False
    ).eval()
    return base, torch.tensor(pack(text, tokenizer, 256)["input_ids"])


def ffn_importance(data: Path) -> dict[int, float]:
    """One minus the cosine of the stream before and after each layer's FFN,
    on 64 blocks of training text."""
    from hf_depthroute.inference.importance import layer_importance

    base, blocks = load(data, "train[:90%]")
    return layer_importance(
        base, [{"input_ids": block} for block in blocks[:: len(blocks) // 64][:64].split(16)], "ffn"
    )


def flops_over_dense(data: Path, case: dict[str, Any]) -> float:
    """Counted FLOPs of a text of 256 tokens over the dense base's, routers included."""
    from hf_depthroute import DepthRouteConfig, get_depth_routed_model, route_cost

    config = DepthRouteConfig(**{name: case[name] for name in CASE}, branch_rank=BRANCH_RANK)
    cost = route_cost(
        get_depth_routed_model(load(data, "train[:1%]")[0], config), batch_size=1, length=256
    )
    return cost.flops_routed / cost.flops_dense


def random_routing_loss(data: Path) -> float:
    """Loss when a random half of the tokens skips the FFN of the routed layers and nothing
    takes its place."""
    import torch

    from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes, replay_routes
    from hf_depthroute.parts.rules import topk_mask

    base, blocks = load(data, "train[90%:]")
    model = get_depth_routed_model(base, DepthRouteConfig(layers=ROUTED, branch="none")).eval()
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    with torch.no_grad():
        for block in blocks.split(32):
            with record_routes(model) as trace:
                model(input_ids=block)
            for record in trace.values():
                record.mask = topk_mask(torch.rand(block.shape, generator=generator), 0.5)
            with replay_routes(model, trace):
                total += float(model(input_ids=block, labels=block).loss) * len(block)
    return total / len(blocks)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every case, rule and budget."""
    rows = []
    for case in dict.fromkeys(map(key, runs)):
        mine = [run for run in runs if key(run) == case]
        for position, row in enumerate(mine[0]["rows"]):
            losses = [run["rows"][position]["loss"] for run in mine]
            rows.append({
                **{name: mine[0][name] for name in CASE}, "rule": row["rule"],
                "budget": row["budget"], "loss": round(statistics.mean(losses), 4),
                "loss_min": round(min(losses), 4), "loss_max": round(max(losses), 4),
                "seeds": len(losses),
                "full_ratio": round(statistics.mean(run["rows"][position]["full_ratio"] for run in mine), 4),
            })  # fmt: skip
    return rows


def write(path: Path, result: dict[str, Any]) -> None:
    result["summary"] = summary(result["runs"])
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[1].parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(
            f"{args.data} does not exist; this recipe needs stories260k/ and stories.txt from there"
        )

    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    result.setdefault("random_routing_without_branch", round(random_routing_loss(args.data), 4))
    importance = ffn_importance(args.data)
    result["ffn_importance"] = {layer: round(value, 4) for layer, value in importance.items()}
    result["flops_over_dense"] = [
        {**case, "flops": round(flops_over_dense(args.data, case), 4)} for case in cases(importance)
    ]
    order = [(case, seed) for seed in args.seeds for case in cases(importance)]
    done = {(key(run), run["seed"]) for run in result["runs"]}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.parallel) as pool:
        jobs = [
            pool.submit(train_and_eval, args.data, Path(folder), case, seed)
            for case, seed in order
            if (key(case), seed) not in done
        ]
        for job in as_completed(jobs):
            result["runs"].append(job.result())
            result["runs"].sort(key=lambda run: (key(run), run["seed"]))
            write(args.out, result)
    write(args.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))


if __name__ == "__main__":
    main()
