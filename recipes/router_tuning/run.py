"""Router-Tuning on the embedded base: train linear routers only, measure their loss and their time.

    OMP_NUM_THREADS=1 python recipes/router_tuning/run.py --out OUT

The text is of two kinds, so that whole sequences differ: Python's standard library, which the base
was pretrained on, and the prose behind Python's `help()` (`pydoc_data.topics`), as many sequences
of each. Every run leaves an adapter `OUT/NAME` and `OUT/NAME.json`; one whose record exists is
skipped, so a stopped study goes on where it was, and `--part 1/2` does every second of them, beside
`--part 2/2`. `OUT/dense.json` and `OUT/time.json` are the other measurements; `report.py` makes the
rest of them.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pydoc_data.topics
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import transformers
from peft import PeftModel
from study.blocks import Blocks, OrderedBlocks, draw_order, prepare_blocks, spread, to_batches
from study.run import load_base
from torch import nn

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    calibrate,
    get_depth_routed_model,
)
from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.bench import dense_view, describe_machine
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.files.strict_yaml import read_mapping
from hf_depthroute.inference.importance import layer_importance, least_important
from hf_depthroute.routing.trace import count_routes

HERE = Path(__file__).parent
CPU = torch.device("cpu")
DEPTH = 6
KINDS = ("code", "prose")
Batches = list[dict[str, torch.Tensor]]


def read_runs(study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every run of the tables, by name."""
    seeds = {
        "table": study["seeds"],
        "layers": study["ablation_seeds"],
        "samples": study["ablation_seeds"],
    }
    named = [
        (row, seed) for table, chosen in seeds.items() for row in study[table] for seed in chosen
    ]
    return {name_of(row, seed): {**row, "seed": seed} for row, seed in named}


def name_of(row: dict[str, Any], seed: int) -> str:
    return f"{row['target']}-{row['granularity']}-layers{row['layers']}-samples{row['samples']}-seed{seed}"


def deepest_but_last(count: int) -> list[int]:
    return list(range(DEPTH - 1 - count, DEPTH - 1))


def adapter_config(study: dict[str, Any], run: dict[str, Any], **fields: Any) -> DepthRouteConfig:
    chosen = {
        "gate": "linear",
        "branch": "none",
        "target": run["target"],
        "granularity": run["granularity"],
        "layers": deepest_but_last(run["layers"]),
        "budget": study["budget"],
        "gate_input": study["gate_input"],
    }
    return DepthRouteConfig(**chosen | fields)


def training_arguments(
    study: dict[str, Any], run: dict[str, Any], out: Path
) -> DepthRouteTrainingArguments:
    return DepthRouteTrainingArguments(
        output_dir=str(out / "trainer"), use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=study["batch"],
        train_sampling_strategy="sequential", learning_rate=study["lr"],
        warmup_steps=study["warmup"], weight_decay=0.0, logging_steps=1, seed=run["seed"],
        bf16=True, capacity_weight=study["capacity_weight"], budget_weight=0.0, alive_weight=0.0,
    )  # fmt: skip


def train(
    study: dict[str, Any], run: dict[str, Any], blocks: Blocks, base: str, out: Path
) -> tuple[Any, list[Any]]:
    """A model whose routers were trained on `run["samples"]` sequences, one epoch;
    and what was logged."""
    model = get_depth_routed_model(load_base(base), adapter_config(study, run))
    arguments = training_arguments(study, run, out)
    order = draw_order(len(blocks.train), run["samples"], run["seed"])
    trainer = DepthRouteTrainer(
        model=model,
        args=arguments,
        train_dataset=OrderedBlocks(blocks.train, order),
        data_collator=transformers.default_data_collator,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    shares = [f"full_ratio/layer_{layer}" for layer in deepest_but_last(run["layers"])]
    curve = [
        {
            "step": row["step"],
            "lm": round(row["loss_lm"], 4),
            "share": round(statistics.fmean(map(row.get, shares)), 4),
        }
        for row in trainer.state.log_history
        if "loss_lm" in row
    ]
    return model, curve


def measure(model: Any, validation: Batches) -> dict[str, Any]:
    """Loss by the inference rule, and the share of tokens run full,
    of each layer and of all of them; by kind, too."""
    by_kind: dict[str, dict[str, float]] = {}
    shares: list[dict[int, float]] = []
    for kind, batches in zip(KINDS, halves(validation)):
        with count_routes(model) as counter:
            loss = mean_loss(model, batches)
        shares.append(counter.full_ratio())
        by_kind[kind] = {
            "loss": round(loss, 5),
            "share": round(statistics.fmean(shares[-1].values()), 4),
        }
    layers = {
        str(layer): round(statistics.fmean(part[layer] for part in shares), 4)
        for layer in shares[0]
    }
    means = {
        key: statistics.fmean(row[key] for row in by_kind.values()) for key in ("loss", "share")
    }
    return {
        "loss": round(means["loss"], 5),
        "share": round(means["share"], 4),
        "shares": layers,
        "by_kind": by_kind,
    }


def halves(batches: Batches) -> tuple[Batches, Batches]:
    """Code and prose, of which there is as much."""
    return batches[: len(batches) // 2], batches[len(batches) // 2 :]


def meet_budget(model: Any, batches: Batches) -> None:
    """Move the one threshold of all layers, 0 in training,
    to where they run the budget's share in all."""
    config = next(iter(model.peft_config.values()))
    config.threshold, config.budget_scope = None, "global"
    calibrate(model, batches)


def train_and_measure(
    study: dict[str, Any], name: str, run: dict[str, Any], blocks: Blocks, base: str, out: Path
) -> dict[str, Any]:
    validation, calibration = evaluation_batches(study, blocks)
    started = time.process_time()
    model, curve = train(study, run, blocks, base, out)
    seconds = time.process_time() - started
    model.save_pretrained(out / name)
    trainable = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    record = {
        **run,
        "trainable": trainable,
        "cpu_seconds": round(seconds, 1),
        "trained": measure(model, validation),
    }
    meet_budget(model, calibration)
    return {**record, "at_budget": measure(model, validation), "curve": curve}


def measure_baselines(study: dict[str, Any], blocks: Blocks, base: str) -> dict[str, Any]:
    """Losses without training: dense, sublayers dropped for every token,
    and frozen random routers at the budget."""
    validation, calibration = evaluation_batches(study, blocks)
    dense = [mean_loss(load_base(base), batches) for batches in halves(validation)]
    found: dict[str, Any] = {
        "dense": round(statistics.fmean(dense), 5),
        "by_kind": dict(zip(KINDS, (round(loss, 5) for loss in dense))),
        "dropped": [],
        "random": [],
    }
    candidates = deepest_but_last(study["table"][0]["layers"])
    for target in ("block", "ffn", "attention"):
        importance = layer_importance(load_base(base), calibration, target)
        own = {layer: importance[layer] for layer in candidates}
        for among, ranked in (("candidates", own), ("all", importance)):
            for count in study["dropped"]:
                layers = least_important(ranked, count)
                config = DepthRouteConfig(gate="none", branch="none", target=target, layers=layers)
                loss = mean_loss(get_depth_routed_model(load_base(base), config), validation)
                found["dropped"].append(
                    {"target": target, "among": among, "layers": layers, "loss": round(loss, 5)}
                )
    for row, seed in itertools.product(study["table"], study["seeds"]):
        config = adapter_config(study, row, gate="random", selection="threshold", seed=seed)
        model = get_depth_routed_model(load_base(base), config)
        meet_budget(model, calibration)
        found["random"].append({**row, "seed": seed, **measure(model, validation)})
    return found


def mixed_blocks(study: dict[str, Any], base: str) -> Blocks:
    """Sequences of both kinds: training `[N, T]`, in any order,
    and validation `[M, T]`, code first."""
    code = prepare_blocks(
        {"length": study["length"], "validation_blocks": study["validation_blocks"]},
        "python-stdlib",
        base,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    split: dict[bool, list[int]] = {True: [], False: []}
    # Every fifth topic validates.
    for place, (_, text) in enumerate(sorted(pydoc_data.topics.topics.items())):
        split[place % 5 == 0] += [
            *tokenizer(text, verbose=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    train, validation = (
        torch.tensor(ids[: len(ids) // study["length"] * study["length"]], dtype=torch.int32).view(
            -1, study["length"]
        )
        for ids in (split[False], split[True])
    )
    prose = spread(validation, study["validation_blocks"])
    return Blocks(
        torch.cat([spread(code.train, len(train)), train]),
        torch.cat([spread(code.validation, len(prose)), prose]),
    )


def evaluation_batches(study: dict[str, Any], blocks: Blocks) -> tuple[Batches, Batches]:
    return to_batches(blocks.validation, 16, CPU), to_batches(
        spread(blocks.train, study["calibration_blocks"]), 16, CPU
    )


@torch.no_grad()
def measure_time(study: dict[str, Any], blocks: Blocks, base: str, out: Path) -> dict[str, Any]:
    """Prefill time over the dense base's, for the adapters of the table;
    medians over interleaved rounds.

    Thresholds are set on the timed sequences, so that every adapter runs the budget's share of
    them.
    """
    model = load_base(base)
    dense = dense_view(model)
    for row in study["table"]:
        name = name_of(row, study["seeds"][0])
        if isinstance(model, PeftModel):
            model.load_adapter(out / name, label(row))
        else:
            model = PeftModel.from_pretrained(model, out / name, adapter_name=label(row))
    names = [label(row) for row in study["table"]]
    result: dict[str, Any] = {
        "machine": describe_machine(CPU),
        "rounds": study["time"]["rounds"],
        "shapes": [],
    }
    for rows, length in study["time"]["shapes"]:
        ids = blocks.train[: rows * length // blocks.train.shape[1]].reshape(rows, length).long()
        for name in names:
            model.set_adapter(name)
            model.peft_config[name].threshold, model.peft_config[name].budget_scope = None, "global"
            calibrate(model, [{"input_ids": ids}])
        times: dict[str, list[float]] = {}
        for round_, variant in rounds(["dense", *names], study["time"]["rounds"]):
            if variant != "dense":
                model.set_adapter(variant)
            spent = seconds(dense if variant == "dense" else model, ids)
            if round_:
                times.setdefault(variant, []).append(spent)
        measured = []
        for name in names:
            model.set_adapter(name)
            with count_routes(model) as counter:
                cache = model(input_ids=ids, use_cache=True).past_key_values
            ratios = [mine / base_time for mine, base_time in zip(times[name], times["dense"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            measured.append({
                "adapter": name, "ratio": round(middle, 4),
                "quartiles": [round(low, 4), round(high, 4)],
                "share": round(statistics.fmean(counter.full_ratio().values()), 4),
                "kv_bytes": kv_cache_bytes(cache),
            })  # fmt: skip
        cache = dense(input_ids=ids, use_cache=True).past_key_values
        result["shapes"].append({
            "sequences": rows, "length": length,
            "dense_ms": round(1e3 * statistics.median(times["dense"]), 2),
            "dense_kv_bytes": kv_cache_bytes(cache), "adapters": measured,
        })  # fmt: skip
    return result


def rounds(variants: list[str], count: int) -> Iterator[tuple[int, str]]:
    """All variants in random order, in round 0 to warm up and in `count` rounds that count."""
    for round_ in range(count + 1):
        for variant in random.Random(round_).sample(variants, len(variants)):
            yield round_, variant


def seconds(model: nn.Module, ids: torch.Tensor) -> float:
    """Processor time of one prefill that fills a KV cache.

    On one thread this is the time that the prefill takes alone; other work on the machine does not
    count.
    """
    start = time.process_time()
    model(input_ids=ids, use_cache=True)
    return time.process_time() - start


def label(row: dict[str, Any]) -> str:
    return f"{row['target']}-{row['granularity']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, default=HERE / "study.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--part", default="1/1", help="1/2 and 2/2: half of the runs each, and no times"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    study = read_mapping(args.study)
    base = str(args.study.parent / study["base"])
    blocks = mixed_blocks(study, base)
    jobs = {"dense": lambda: measure_baselines(study, blocks, base)}
    for name, run in read_runs(study).items():
        jobs[name] = lambda name=name, run=run: train_and_measure(
            study, name, run, blocks, base, args.out
        )
    part, parts = map(int, args.part.split("/"))
    if parts == 1:
        jobs["time"] = lambda: measure_time(study, blocks, base, args.out)
    for name, job in list(jobs.items())[part - 1 :: parts]:
        record = args.out / f"{name}.json"
        if not record.exists():
            made = job()
            record.write_text(json.dumps(made, indent=1) + "\n")
            print(name, made.get("trained", ""), made.get("at_budget", ""), flush=True)


if __name__ == "__main__":
    main()
