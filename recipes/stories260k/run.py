"""Route a real pretrained Llama that this project did not train, and compare gates, gate inputs and random routing.

    python recipes/stories260k/run.py --seeds 0 1 2 --out recipes/stories260k/results.json

Base and text are the folder `../shared/data` beside the project (`--data` to point elsewhere). Every run is the command
line's own `train` and `eval`, in a process of its own; three to four minutes each on one shared CPU core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CASES = [("mlp", "normed"), ("jepa", "normed"), ("mlp", "residual"), ("jepa", "residual")]


def command(*arguments: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "hf_depthroute", *map(str, arguments)], check=True, env=environment)


def train_and_eval(data: Path, folder: Path, gate: str, gate_input: str, seed: int) -> dict:
    """One run; the rows of `hf-depthroute eval --json`."""
    adapter, result = folder / f"{gate}_{gate_input}_{seed}", folder / f"{gate}_{gate_input}_{seed}.json"
    base, text = data / "stories260k", data / "stories.txt"
    command(
        "train", "--config", HERE / "train.yaml", "--model", base, "--dataset", text, "--gate", gate,
        "--gate-input", gate_input, "--seed", seed, "--out", adapter,
    )  # fmt: skip
    command(
        "eval", "--model", base, "--adapter", adapter, "--dataset", text, "--split", "train[90%:]", "--length", 256,
        "--batch-size", 32, "--blocks", 1000, "--budgets", "0.25,0.5,0.75", "--json", result,
    )  # fmt: skip
    return {"gate": gate, "gate_input": gate_input, "seed": seed, "rows": json.loads(result.read_text())["rows"]}


def random_routing_loss(data: Path) -> float:
    """Loss when a random half of the tokens skips the FFN of the routed layers and nothing takes its place."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes, replay_routes
    from hf_depthroute.data import load_text, pack
    from hf_depthroute.selection import topk_mask

    tokenizer = AutoTokenizer.from_pretrained(data / "stories260k")
    text = load_text(str(data / "stories.txt"), split="train[90%:]")
    blocks = torch.tensor(pack(text, tokenizer, 256)["input_ids"])
    base = AutoModelForCausalLM.from_pretrained(data / "stories260k")
    model = get_depth_routed_model(base, DepthRouteConfig(layers=[2, 3, 4], branch="none")).eval()
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


def summary(runs: list[dict]) -> list[dict]:
    """Mean and spread over seeds of every (gate, gate input, rule, budget)."""
    rows = []
    for gate, gate_input in CASES:
        mine = [run["rows"] for run in runs if (run["gate"], run["gate_input"]) == (gate, gate_input)]
        for position, row in enumerate(mine[0]):
            losses = [run[position]["loss"] for run in mine]
            rows.append({
                "gate": gate, "gate_input": gate_input, "rule": row["rule"], "budget": row["budget"],
                "loss": round(statistics.mean(losses), 4),
                "loss_min": round(min(losses), 4), "loss_max": round(max(losses), 4), "seeds": len(losses),
                "full_ratio": round(statistics.mean(run[position]["full_ratio"] for run in mine), 4),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1].parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    if not args.data.is_dir():
        sys.exit(f"{args.data} does not exist; this recipe needs stories260k/ and stories.txt from there")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.parallel) as pool:
        jobs = [
            pool.submit(train_and_eval, args.data, Path(folder), gate, gate_input, seed)
            for seed in args.seeds
            for gate, gate_input in CASES
        ]
        runs = [job.result() for job in jobs]
    result = {"random_routing_without_branch": round(random_routing_loss(args.data), 4), "summary": summary(runs)}
    args.out.write_text(json.dumps({**result, "runs": runs}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
