"""Route the experts of the pretrained OLMoE: routers of either kind against dropped experts
and random routing.

    python recipes/moe/route.py --work DIR

`DIR/bases/BASE` comes from `pretrain.py`. Every run writes one JSON and its adapter under
`DIR/runs`; a run that has a JSON is left as it is. Then all adapters are loaded into one model and
timed, dense and routed runs in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import transformers
from balance import expert_load
from peft import PeftModel
from pretrain import BATCH, blocks
from study.blocks import Blocks, OrderedBlocks, draw_order, to_batches
from transformers import OlmoeForCausalLM

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    calibrate,
    get_depth_routed_model,
)
from hf_depthroute.bench import describe_machine
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.inference.importance import expert_importance, least_important
from hf_depthroute.routing.trace import count_routes

BASE = "switch_z-s0-3000"
BUDGETS = (0.75, 0.5)
SEEDS = (0, 1, 2)
STEPS, LEARNING_RATE, CAPACITY_WEIGHT = 40, 3e-3, 1.0
DROPPED = {  # experts: of each layer; of all layers
    "static": (1, 2, 3, 4, 5),
    "weight": (8, 12, 16, 20, 24, 28),
    "ablation": (4, 8, 12, 16, 20),
    "greedy": (4, 8, 12, 16, 20),
}
ROUNDS, PREFILL = 15, (8, 256)
CPU = torch.device("cpu")


def specs() -> list[dict[str, Any]]:
    """Every run: its method, its budget or number of dropped experts, and its seed."""
    routed = [
        {"method": method, "budget": budget, "seed": seed}
        for method in ("per_expert", "per_layer", "random")
        for budget in BUDGETS
        for seed in SEEDS
    ]
    static = [
        {"method": name, "dropped": count, "seed": 0}
        for name, counts in DROPPED.items()
        for count in counts
    ]
    return routed + static


def name_of(spec: dict[str, Any]) -> str:
    size = (
        f"drop{spec['dropped']}" if spec["method"] in DROPPED else f"b{round(100 * spec['budget'])}"
    )
    return f"{spec['method']}-{size}-s{spec['seed']}"


def by_weight(
    model: OlmoeForCausalLM, batches: list[dict[str, torch.Tensor]], count: int, in_all: bool
) -> list[list[int]]:
    """The `count` experts with the least summed routing weight, of each layer or in all."""
    weights = torch.stack(list(expert_importance(model, batches).values()))
    experts = weights.shape[1]
    if in_all:
        least = least_important(dict(enumerate(weights.flatten().tolist())), count)
        return [
            [place % experts for place in least if place // experts == layer]
            for layer in range(len(weights))
        ]
    return [least_important(dict(enumerate(row)), count) for row in weights.tolist()]


def by_ablation(
    model: OlmoeForCausalLM,
    batches: list[dict[str, torch.Tensor]],
    count: int,
    ranking: Path,
    greedy: bool,
) -> list[list[int]]:
    """The `count` experts of all layers whose loss on two batches rises least,
    each dropped alone or behind the others.

    The ranking, `[layer, expert]` from the least important on, is kept in the file `ranking`. A
    greedy one drops one expert after another and measures the rest anew each time.
    """
    layers, experts = range(model.config.num_hidden_layers), range(model.config.num_experts)

    def dropped(pairs: list[Any]) -> list[list[int]]:
        return [sorted(expert for index, expert in pairs if index == layer) for layer in layers]

    if not ranking.exists():
        config = DepthRouteConfig(
            layers="all",
            target="experts",
            branch="none",
            gate="none",
            dropped_experts=[[] for _ in layers],
        )
        routed = get_depth_routed_model(model, config)
        left, order = list(itertools.product(layers, experts)), []
        while left and len(order) < max(DROPPED["greedy"]):
            losses = {}
            for pair in left:
                routed.peft_config["default"].dropped_experts = dropped([*order, pair])
                losses[pair] = mean_loss(routed, batches[:2])
            ranked = sorted(left, key=lambda pair: losses[pair])
            order += ranked[:1] if greedy else ranked
            left = [pair for pair in left if pair not in order]
        routed.unload()
        ranking.write_text(json.dumps(order))
    return dropped(json.loads(ranking.read_text())[:count])


def configure(
    spec: dict[str, Any],
    model: OlmoeForCausalLM,
    batches: list[dict[str, torch.Tensor]],
    base: Path,
) -> DepthRouteConfig:
    """Pairs that are dropped add nothing: there is no branch."""
    shared: dict[str, Any] = {
        "layers": "all",
        "target": "experts",
        "branch": "none",
        "seed": spec["seed"],
    }
    if spec["method"] in ("static", "weight"):
        dropped = by_weight(model, batches, spec["dropped"], in_all=spec["method"] == "weight")
        return DepthRouteConfig(**shared, gate="none", dropped_experts=dropped)
    if spec["method"] in ("ablation", "greedy"):
        greedy = spec["method"] == "greedy"
        ranking = base / ("greedy.json" if greedy else "ranking.json")
        dropped = by_ablation(model, batches, spec["dropped"], ranking, greedy)
        return DepthRouteConfig(**shared, gate="none", dropped_experts=dropped)
    if spec["method"] == "random":
        return DepthRouteConfig(
            **shared, gate="random", expert_gates="per_expert", budget=spec["budget"]
        )
    # The capacity loss holds the mean over layers, so a calibrated threshold is one for all layers.
    linear = {"gate": "linear", "expert_gates": spec["method"], "budget_scope": "global"}
    return DepthRouteConfig(**shared, **linear, budget=spec["budget"])


def training_arguments(spec: dict[str, Any], folder: Path) -> DepthRouteTrainingArguments:
    return DepthRouteTrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE, weight_decay=0.0, warmup_steps=5, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=20, seed=spec["seed"],
        capacity_weight=CAPACITY_WEIGHT, budget_weight=0.0, alive_weight=0.0,
    )  # fmt: skip


def train(model: Any, spec: dict[str, Any], data: Blocks, folder: Path) -> None:
    """Router-Tuning: the routers alone, on the language-model loss and the capacity loss."""
    arguments = training_arguments(spec, folder)
    order = draw_order(len(data.train), STEPS * BATCH, seed=100 + spec["seed"])
    trainer = DepthRouteTrainer(
        model=model, args=arguments, train_dataset=OrderedBlocks(data.train, order),
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trainer.train()


def measured(model: Any, validation: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    with count_routes(model) as counter:
        loss = mean_loss(model, validation)
    return {"loss": loss, "share": statistics.mean(counter.full_ratio().values())}


def equal_layers(
    model: Any,
    calibration: list[dict[str, torch.Tensor]],
    validation: list[dict[str, torch.Tensor]],
) -> dict[str, float]:
    """The same routers with the budget in every layer, as random routing has it."""
    model.peft_config["default"].budget_scope = "layer"
    calibrate(model, calibration)
    return measured(model, validation)


def run(spec: dict[str, Any], base: Path, data: Blocks, folder: Path) -> None:
    """One adapter: trained where it has something to train, calibrated to its budget,
    measured and saved."""
    start = time.process_time()
    base_model = OlmoeForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    validation = to_batches(data.validation, BATCH, CPU)
    calibration = to_batches(data.train[-128:], BATCH, CPU)
    model = get_depth_routed_model(base_model, configure(spec, base_model, calibration, base))
    result: dict[str, Any] = dict(spec)
    if spec["method"] in ("per_expert", "per_layer"):
        train(model, spec, data, folder)
        result["as_trained"] = measured(model, validation)
        # From p >= 1/2 to the quantile of the budget.
        model.peft_config["default"].threshold = "budget"
    if spec["method"] not in DROPPED:
        calibrate(model, calibration)
    load = expert_load(model, validation)
    result |= {
        **measured(model, validation),
        "load_assigned": {str(index): one.assigned.tolist() for index, one in load.items()},
        "load_ran": {str(index): one.ran.tolist() for index, one in load.items()},
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    model.save_pretrained(folder)
    if "as_trained" in result:
        result["equal_layers"] = equal_layers(model, calibration, validation)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{name_of(spec)}: loss {result['loss']:.4f}, share {result['share']:.3f}, "
        f"{result['cpu_seconds']} s",
        flush=True,
    )


@torch.no_grad()
def bench(base: Path, runs: Path, data: Blocks) -> dict[str, Any]:
    """Prefill time of seed 0's adapters over dense time:
    medians over rounds of each round's own ratio.

    What is dropped of all layers differs from `static` only in which experts those are, and is not
    timed.
    """
    names = [
        name_of(spec)
        for spec in specs()
        if spec["seed"] == 0 and spec["method"] not in ("weight", "ablation", "greedy")
    ]
    untouched = OlmoeForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    variants: dict[str, Any] = {"dense": untouched}
    for name in names:
        model = OlmoeForCausalLM.from_pretrained(base, dtype=torch.float32)
        variants[name] = with_adapter(model, runs / name)
    count, length = PREFILL
    ids = data.validation.flatten()[: count * length].view(count, length).long()
    times: dict[str, list[float]] = {name: [] for name in variants}
    draw = random.Random(0)
    for model in variants.values():
        model(ids, use_cache=False)
    for _ in range(ROUNDS):
        for name in draw.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name](ids, use_cache=False)
            times[name].append(time.perf_counter() - start)
    ratios = {
        name: [mine / dense for mine, dense in zip(times[name], times["dense"])] for name in names
    }
    return {
        "batch": count,
        "length": length,
        "rounds": ROUNDS,
        "dense_ms": 1000 * statistics.median(times["dense"]),
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "machine": describe_machine(CPU),
    }


def with_adapter(model: Any, folder: Path) -> Any:
    routed = PeftModel.from_pretrained(model, folder).eval()
    config = routed.peft_config["default"]
    if config.gate == "linear":
        config.threshold = "budget"  # calibrated, whatever the file says
    return routed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bench-only", action="store_true", help="time the adapters again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, base, runs = blocks(), args.work / "bases" / BASE, args.work / "runs"
    for spec in [] if args.bench_only else specs():
        folder = runs / name_of(spec)
        if not (folder / "result.json").exists():
            run(spec, base, data, folder)
    if (args.work / "timing.json").exists() and not args.bench_only:
        return
    untouched = OlmoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    dense = mean_loss(untouched, to_batches(data.validation, BATCH, CPU))
    timing = {"dense_loss": dense, **bench(base, runs, data)}
    (args.work / "timing.json").write_text(json.dumps(timing, indent=1) + "\n")


if __name__ == "__main__":
    main()
