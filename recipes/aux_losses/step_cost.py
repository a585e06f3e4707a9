"""What the oracle and the JEPA gate cost in a training step:
interleaved steps of all variants in one process.

    OMP_NUM_THREADS=1 python recipes/aux_losses/step_cost.py --out recipes/aux_losses/step_cost.json

Two models: the study's base (d=256), and the shape of arXiv:2604.17228 (GPT-2, d=640, 12 layers;
random weights, a vocabulary of 8,192). A round is one refresh interval: five steps, one of them
with labels where there is an oracle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
from study.refresh import refresh_cost
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench import describe_machine
from hf_depthroute.training.arguments import RoutingArguments
from hf_depthroute.training.objective import RoutingObjective
from hf_depthroute.training.oracle import ORACLES

BASE = Path(__file__).parents[1] / "embedded_base" / "model"
INTERVAL = 5
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "G1": ("mlp", {}),
    "G3": ("jepa", {}),
    "G1 all_full": ("mlp", {"oracle": "all_full"}),
    "G3 all_full": ("jepa", {"oracle": "all_full"}),
    "G1 on_policy": ("mlp", {"oracle": "on_policy"}),
    "G3 on_policy": ("jepa", {"oracle": "on_policy"}),
    "G1 CGS": ("mlp", {"cgs_weight": 0.5, "cgs_warmup": 0}),
    "G1 distill": ("mlp", {"distill_weight": 1.0}),
}
RATIOS = [
    ("G3", "G1"), ("G1 all_full", "G1"), ("G3 all_full", "G3"), ("G1 on_policy", "G1"),
    ("G3 on_policy", "G3"), ("G1 CGS", "G1"), ("G1 distill", "G1"),
]  # fmt: skip


def study_base() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, trust_remote_code=False)


def paper_shape() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=8192, n_positions=768, n_embd=640, n_layer=12, n_head=10, n_inner=2560
    )
    return GPT2LMHeadModel(config)


def training_step(model: Any, arguments: RoutingArguments) -> Callable[[int, torch.Tensor], None]:
    """A function that makes training step `n` on the token ids `[B, T]`: bf16 autocast, clipping,
    fused AdamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    objective = RoutingObjective(arguments, model)

    def step(n: int, ids: torch.Tensor) -> None:
        objective.schedule(n)
        with objective.watching() as watched:
            with torch.autocast(ids.device.type, torch.bfloat16):
                output = model(input_ids=ids, labels=ids, use_cache=False)
            loss = objective(output.loss, watched, 1.0, ids, output.logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def variant_model(base: Callable[[], Any], layers: str, rank: int | None, gate: str) -> Any:
    torch.manual_seed(0)
    config = DepthRouteConfig(layers=layers, gate=gate, gate_input="residual", branch_rank=rank)
    return get_depth_routed_model(base(), config).train()


def measure(
    base: Callable[[], Any], layers: str, rank: int | None, shape: tuple[int, int], rounds: int
) -> dict:
    ids = torch.randint(0, 2048, shape, generator=torch.Generator().manual_seed(0))
    built = {name: variant_model(base, layers, rank, gate) for name, (gate, _) in VARIANTS.items()}
    steps = {
        name: training_step(
            built[name], RoutingArguments(oracle_warmup=0, oracle_interval=INTERVAL, **arguments)
        )
        for name, (_, arguments) in VARIANTS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for n in range(-2, rounds):  # two rounds to warm up
        for name, step in steps.items():
            start = time.perf_counter()
            for i in range(INTERVAL):
                step(INTERVAL * max(n, 0) + i, ids)
            if n >= 0:
                seconds[name].append((time.perf_counter() - start) / INTERVAL)
    ratios = {}
    for name, against in RATIOS:
        pairs = sorted(a / b for a, b in zip(seconds[name], seconds[against]))
        quartiles = statistics.quantiles(pairs, n=4)
        ratios[f"{name} / {against}"] = {
            "median": round(quartiles[1], 3),
            "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)]
        }  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        refresh = {
            kind: round(refresh_cost(built["G3"], {"input_ids": ids}, kind, rounds=9), 2)
            for kind in ORACLES
        }
    return {
        "batch": list(shape),
        "step_ms": {
            name: round(1e3 * statistics.median(values), 1) for name, values in seconds.items()
        },
        "ratios": ratios,
        "refresh_over_forward": refresh,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--paper-rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = {
        "machine": describe_machine(torch.device("cpu")),
        "rounds": args.rounds,
        "paper_rounds": args.paper_rounds,
        "study base, last 3 of 6 layers": measure(
            study_base, "last:3", None, (8, 128), args.rounds
        ),
        "paper shape, last 4 of 12 layers": measure(
            paper_shape, "last:4", 80, (2, 256), args.paper_rounds
        ),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
