"""LoRA and routing on the embedded base, fine-tuned on another text: each alone, in two steps,
and jointly.

    OMP_NUM_THREADS=1 python recipes/lora/run.py --out OUT
    python recipes/lora/report.py --out OUT

The text is the language reference that Python's `help()` shows (`pydoc_data.topics`), which the
base has not seen. Routers are of two kinds: FFNs with a low-rank branch (`routing`), and those of
Router-Tuning (arXiv:2410.13184), a linear gate for the attention of whole sequences, nothing in its
place (`router_tuning`). `OUT/results.json` holds the losses, `OUT/joint` and `OUT/two_step` the
adapters of both kinds; seeds that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from study.blocks import OrderedBlocks, draw_order, spread, to_batches
from study.run import load_base
from torch import nn

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    calibrate,
    get_depth_routed_model,
    set_budget,
)
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.routing.trace import count_routes

BASE = str(Path(__file__).parents[1] / "embedded_base" / "model")
LENGTH, BATCH, BUDGET = 128, 8, 0.5
# Router-Tuning's, as in `../router_tuning`
TUNED = {
    "target": "attention", "granularity": "sequence", "layers": "before_last:3", "gate": "linear",
    "branch": "none", "gate_input": "residual",
}  # fmt: skip
CAPACITY = {"capacity_weight": 4.0, "budget_weight": 0.0, "alive_weight": 0.0}
# Of everything else, and of the linear gate, as `../router_tuning` found.
RATE, TUNED_RATE = 2e-3, 3e-2
LORA = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
}


def read_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """Training blocks and up to 128 validation blocks, `[N, 128]`;
    every tenth topic is for validation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    split: dict[bool, list[int]] = {True: [], False: []}
    for place, (_, text) in enumerate(sorted(pydoc_data.topics.topics.items())):
        split[place % 10 == 0] += [
            *tokenizer(text, verbose=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    train, validation = (
        torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
        for ids in (split[False], split[True])
    )
    return train, spread(validation, 128)


def add_lora(base: nn.Module) -> Any:
    return get_peft_model(base, LoraConfig(**LORA, task_type="CAUSAL_LM"), adapter_name="tuned")


def add_router(base: nn.Module, fields: dict[str, Any] | None = None) -> Any:
    config = DepthRouteConfig(**{"layers": "last:3", "budget": BUDGET, **(fields or {})})
    return get_depth_routed_model(base, config, adapter_name="router")


def train(
    model: Any,
    blocks: torch.Tensor,
    steps: int,
    seed: int,
    out: Path,
    losses: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Train what is trainable; the trainable parameters and the processor time."""
    arguments = dict(
        output_dir=str(out / "trainer"), use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, max_steps=steps, per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential", learning_rate=RATE, warmup_steps=steps // 10,
        logging_strategy="no", seed=seed,
    )  # fmt: skip
    data = OrderedBlocks(blocks, draw_order(len(blocks), steps * BATCH, seed))
    collate = transformers.default_data_collator
    trainer: Any
    if "router" in model.peft_config:
        routing = DepthRouteTrainingArguments(**arguments, **(losses or {}))
        tuned = (
            optimizer(model, routing.weight_decay)
            if model.peft_config["router"].gate == "linear"
            else None
        )
        trainer = DepthRouteTrainer(model, routing, collate, data, optimizers=(tuned, None))
    else:
        plain = {"weight_decay": 0.01, "lr_scheduler_type": "cosine"}
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(**arguments, **plain), collate, data
        )
    trainer.remove_callback(transformers.PrinterCallback)
    started = time.process_time()
    trainer.train()
    trainable = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    return {
        "steps": steps,
        "trainable": trainable,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def optimizer(model: Any, weight_decay: float) -> torch.optim.Optimizer:
    """The Trainer's AdamW, but the linear gates have Router-Tuning's rate, and no decay."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    lora = [parameter for name, parameter in trained.items() if "lora_" in name]
    groups: list[dict[str, Any]] = (
        [{"params": lora, "lr": RATE, "weight_decay": weight_decay}] if lora else []
    )
    gates = [parameter for name, parameter in trained.items() if "lora_" not in name]
    return torch.optim.AdamW([*groups, {"params": gates, "lr": TUNED_RATE, "weight_decay": 0.0}])


def measure(model: Any, blocks: torch.Tensor, validation: torch.Tensor) -> dict[str, float]:
    """Validation loss by the inference rule at the budget, the share run full,
    and the loss with nothing skipped."""
    batches = to_batches(validation, 16, torch.device("cpu"))
    if "router" not in model.peft_config:
        return {"loss": round(mean_loss(model, batches), 4)}
    config = model.peft_config["router"]
    if config.gate == "linear":  # from p >= 1/2 in every layer, as it trained
        config.threshold, config.budget_scope = "budget", "global"
    calibrate(model, to_batches(spread(blocks, 256), 16, torch.device("cpu")))
    with count_routes(model) as counter:
        loss = mean_loss(model, batches)
    share = statistics.fmean(counter.full_ratio().values())
    set_budget(model, 1.0)
    dense = mean_loss(model, batches)
    set_budget(model, BUDGET)
    return {"loss": round(loss, 4), "share": round(share, 4), "loss_at_budget_1": round(dense, 4)}


def reload(folder: Path) -> Any:
    """The model of two saved adapters: LoRA first, then the router on the same base."""
    lora = PeftModel.from_pretrained(load_base(BASE), folder / "tuned", adapter_name="tuned")
    return PeftModel.from_pretrained(
        lora.get_base_model(), folder / "router", adapter_name="router"
    )


def run_seed(
    seed: int, steps: int, blocks: torch.Tensor, validation: torch.Tensor, out: Path
) -> dict[str, Any]:
    """Every way once: what it trained, and what came out."""
    found: dict[str, Any] = {}

    lora = add_lora(load_base(BASE))
    found["lora"] = {**train(lora, blocks, steps, seed, out), **measure(lora, blocks, validation)}

    for name, fields, losses in (("routing", {}, {}), ("router_tuning", TUNED, CAPACITY)):
        router = add_router(load_base(BASE), fields)
        found[name] = {
            **train(router, blocks, steps, seed, out, losses),
            **measure(router, blocks, validation),
        }

    lora = add_lora(load_base(BASE))
    first = train(lora, blocks, steps // 2, seed, out)
    model = add_router(lora.get_base_model())
    lora.set_requires_grad("tuned", False)  # injection lets all adapters of the model train
    second = train(model, blocks, steps - steps // 2, seed + 100, out)
    found["two_step"] = {name: first[name] + second[name] for name in first} | measure(
        model, blocks, validation
    )
    model.save_pretrained(out / "two_step")

    lora = add_lora(load_base(BASE))
    model = add_router(lora.get_base_model(), TUNED)
    trained = train(model, blocks, steps, seed, out, CAPACITY)
    found["joint_router_tuning"] = {**trained, **measure(model, blocks, validation)}

    lora = add_lora(load_base(BASE))
    model = add_router(lora.get_base_model())
    found["joint"] = {
        **train(model, blocks, steps, seed, out),
        **measure(model, blocks, validation),
    }
    model.save_pretrained(out / "joint")

    batches = to_batches(validation, 16, torch.device("cpu"))
    found["joint"]["loss_reloaded"] = round(mean_loss(reload(out / "joint"), batches), 4)
    lora.merge_adapter()
    found["joint"]["loss_merged"] = round(mean_loss(model, batches), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    blocks, validation = read_blocks()
    setting = {
        "length": LENGTH,
        "batch": BATCH,
        "budget": BUDGET,
        "steps": args.steps,
        "lora": LORA,
    }
    setting |= {"rate": RATE, "router_tuning": {**TUNED, **CAPACITY, "rate": TUNED_RATE}}
    path = args.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"setting": setting, "seeds": {}}
    if results["setting"] != setting:
        parser.error(f"{path} has other settings; give another --out")
    if "base" not in results:
        results["base"] = round(
            mean_loss(load_base(BASE), to_batches(validation, 16, torch.device("cpu"))), 4
        )
    for seed in args.seeds:
        if str(seed) not in results["seeds"]:
            transformers.set_seed(seed)
            results["seeds"][str(seed)] = run_seed(seed, args.steps, blocks, validation, args.out)
            print(json.dumps(results["seeds"][str(seed)]), flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
