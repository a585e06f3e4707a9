"""`hf-depthroute train`: train an adapter, calibrate it, and save it whole or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shown import say
from . import options as o
from .errors import OTHER, RESOURCES, CliError
from .output import check_out, staged, write_json


def train(
    context: typer.Context,
    model: o.Model,
    dataset: o.Dataset,
    out: Annotated[Path, typer.Option(help="Folder for the adapter; made when training is done.")],
    config: o.ConfigFile = None,
    dataset_name: o.DatasetName = None,
    split: Annotated[str, typer.Option(help="Split to train on.")] = "train",
    column: o.Column = "text",
    streaming: o.Streaming = False,
    validation_split: Annotated[str | None, typer.Option(help="Split to evaluate on at the end.")] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Dataset to evaluate on at the end.")] = None,
    validation_blocks: Annotated[int, typer.Option(min=1, help="Blocks to evaluate on.")] = 64,
    layers: Annotated[str | None, typer.Option(help="last:N, every:N, all or 2,3,5. Default: the last third.")] = None,
    target: Annotated[str, typer.Option(help="ffn, attention, block or experts.")] = "ffn",
    granularity: Annotated[str, typer.Option(help="token or sequence.")] = "token",
    gate: Annotated[str, typer.Option(help="mlp, jepa, linear, halting, random, exit or none.")] = "mlp",
    gate_input: Annotated[str, typer.Option(help="normed or residual.")] = "normed",
    gate_hidden: Annotated[int | None, typer.Option(help="Hidden width of the MLP gate. Default: d/4.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Gate temperature tau. Default: 2, or 1.")] = None,
    branch: Annotated[str, typer.Option(help="lowrank or none.")] = "lowrank",
    branch_rank: Annotated[int | None, typer.Option(help="Rank of the cheap branch. Default: d/8.")] = None,
    budget: Annotated[float, typer.Option(help="Fraction of tokens that run in full, in (0, 1].")] = 0.5,
    budget_scope: Annotated[str, typer.Option(help="layer, or global (the mean over layers holds it).")] = "layer",
    selection: Annotated[
        str | None, typer.Option(help="Training rule: topk, threshold, soft, gumbel or controller.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="A fixed score threshold instead of a budget's.")] = None,
    scale_by_gate: Annotated[bool, typer.Option("--scale-by-gate", help="Multiply the full update by p.")] = False,
    causal_rule: Annotated[str, typer.Option(help="Inference rule: quantile or predictor.")] = "quantile",
    expert_gates: Annotated[str, typer.Option(help="Target experts: per_expert or per_layer.")] = "per_expert",
    jepa_weight: Annotated[float, typer.Option(help="Weight of the JEPA loss (JEPA gate only).")] = 1.0,
    budget_weight: Annotated[float, typer.Option(help="Weight of the budget loss.")] = 1.0,
    alive_weight: Annotated[float, typer.Option(help="Weight of the alive loss.")] = 0.5,
    oracle: Annotated[str, typer.Option(help="Labels of util and rank: none, all_full or on_policy.")] = "none",
    util_weight: Annotated[float, typer.Option(help="Weight of the regression on the oracle's labels.")] = 1.0,
    rank_weight: Annotated[float, typer.Option(help="Weight of the ranking by the oracle's labels.")] = 0.2,
    oracle_warmup: Annotated[int, typer.Option(help="First step with labels.")] = 100,
    oracle_interval: Annotated[int, typer.Option(help="Steps between refreshes of the labels.")] = 5,
    cgs_weight: Annotated[float, typer.Option(help="Weight of counterfactual gate supervision.")] = 0.0,
    cgs_warmup: Annotated[int, typer.Option(help="First step with counterfactual gate supervision.")] = 500,
    z_weight: Annotated[float, typer.Option(help="Weight of the z-loss on the scores' scale.")] = 0.0,
    distill_weight: Annotated[float, typer.Option(help="Weight of KL(dense || routed).")] = 0.0,
    capacity_weight: Annotated[float, typer.Option(help="Weight of Router-Tuning's ReLU(share - budget).")] = 0.0,
    depth_weight: Annotated[float, typer.Option(help="Weight of the mean active probability (TSA).")] = 0.0,
    similarity_weight: Annotated[float, typer.Option(help="Weight of the labels by similarity (DLO).")] = 0.0,
    predictor_weight: Annotated[float, typer.Option(help="Weight of the causal predictor's loss.")] = 1.0,
    controller_step: Annotated[float, typer.Option(help="Step of the threshold controller.")] = 0.01,
    balance_weight: Annotated[float, typer.Option(help="Weight of the base's expert balance (Switch).")] = 0.0,
    router_z_weight: Annotated[float, typer.Option(help="Weight of the base's router z-loss.")] = 0.0,
    jepa_targets: Annotated[str, typer.Option(help="paired, or deranged (an ablation).")] = "paired",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1000,
    batch_size: o.BatchSize = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per optimizer step.")] = 1,
    length: o.Length = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate; cosine to 1 % of it.")] = 2e-4,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Warm-up steps. Default: 5 % of --steps.")] = None,
    calibration_blocks: Annotated[int, typer.Option(min=1, help="Training blocks that set the thresholds.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 (frozen base and autocast).")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the adapter and of the data order.")] = 0,
    logging_steps: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 50,
    report_to: Annotated[str, typer.Option(help="none, or integrations of the Trainer such as tensorboard.")] = "none",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the adapter in --out.")] = False,
    debug: o.Debug = False,
) -> None:
    """Train a routed adapter and calibrate it.

    Writes the adapter, the tokenizer and training.json to --out, all at once at the end: an error or Ctrl-C leaves
    nothing behind.

    \b
    Example:
      hf-depthroute train --model Qwen/Qwen2.5-0.5B --dataset python-stdlib --layers last:12 --budget 0.5 \\
        --steps 500 --validation-split validation --out routed
    """
    out = check_out(out, overwrite)
    from . import loading

    loading.quiet(debug)
    import torch
    import transformers

    from ..calibration import calibrate, thresholds
    from ..card.record import remember_training
    from ..config import DepthRouteConfig
    from ..data import load_text, pack
    from ..evaluation import evaluate_budgets
    from ..resources import disk_full
    from ..trainer import DepthRouteTrainer, DepthRouteTrainingArguments
    from ..tuner import get_depth_routed_model
    from ..versions import versions

    # Everything that can be refused is refused before the weights are loaded.
    adapter_config = DepthRouteConfig(
        layers=o.parse_layers(layers),
        target=target,
        granularity=granularity,
        gate=gate,
        gate_input=gate_input,
        gate_hidden=gate_hidden,
        gate_temperature=temperature,
        branch=branch,
        branch_rank=branch_rank,
        budget=budget,
        budget_scope=budget_scope,
        selection=selection,
        threshold=threshold,
        scale_by_gate=scale_by_gate,
        causal_rule=causal_rule,
        expert_gates=expert_gates,
        seed=seed,
    )
    loading.check_dtype(dtype, ("float32", "bfloat16"))
    if not 0 < lr < float("inf"):
        raise CliError(f"--lr {lr}: must be a finite number above 0")
    training: dict[str, Any] = {
        "learning_rate": lr,
        "jepa_weight": jepa_weight,
        "budget_weight": budget_weight,
        "alive_weight": alive_weight,
        "oracle": oracle,
        "util_weight": util_weight,
        "rank_weight": rank_weight,
        "oracle_warmup": oracle_warmup,
        "oracle_interval": oracle_interval,
        "cgs_weight": cgs_weight,
        "cgs_warmup": cgs_warmup,
        "z_weight": z_weight,
        "distill_weight": distill_weight,
        "capacity_weight": capacity_weight,
        "depth_weight": depth_weight,
        "similarity_weight": similarity_weight,
        "predictor_weight": predictor_weight,
        "controller_step": controller_step,
        "balance_weight": balance_weight,
        "router_z_weight": router_z_weight,
        "jepa_targets": jepa_targets,
        "max_steps": steps,
        "warmup_steps": steps // 20 if warmup_steps is None else warmup_steps,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulate,
        "seed": seed,
        "bf16": dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": logging_steps,
        "report_to": [name.strip() for name in report_to.split(",")],
        "save_strategy": "no",
    }
    with _reported("training arguments"):
        checked = DepthRouteTrainingArguments(output_dir=str(out), **training)
        for integration in transformers.integrations.get_reporting_integration_callbacks(checked.report_to):
            integration()  # says whether its package is installed
    base_config = loading.load_config(model)
    adapter_config.routed_layers(base_config.num_hidden_layers)
    loading.check_length(length, base_config)
    text = load_text(dataset, split=split, name=dataset_name, column=column, streaming=streaming, verbose=debug)
    validation_text = None
    if validation_split or eval_dataset:
        validation_text = load_text(
            eval_dataset or dataset,
            split=validation_split or "train",
            name=None if eval_dataset else dataset_name,
            column=column,
            streaming=streaming,
            verbose=debug,
        )
    tokenizer = loading.load_tokenizer(model, base_config)
    packed = pack(text, tokenizer, length, verbose=debug)
    validation = None
    if validation_text is not None:
        packed_validation = pack(validation_text, tokenizer, length, verbose=debug)
        validation = loading.to_batches(packed_validation, batch_size, validation_blocks)

    started = time.time()
    transformers.set_seed(seed)
    routed = get_depth_routed_model(loading.load_model(model, dtype), adapter_config)
    with staged(out) as staging:
        with _reported("training arguments"):
            trainer = DepthRouteTrainer(
                model=routed,
                args=DepthRouteTrainingArguments(output_dir=str(staging), **training),
                train_dataset=packed,
                data_collator=transformers.default_data_collator,
            )
        trainer.train()
        _check_finite(routed)
        full_ratio = {}
        if adapter_config.takes_budget():
            full_ratio = calibrate(routed, loading.to_batches(packed, batch_size, calibration_blocks))
        rows = [] if validation is None else evaluate_budgets(routed, validation, None, [budget])
        record = {
            "command": o.command_words(context, leave_out=("out", "overwrite")),
            "arguments": {name: _plain(value) for name, value in context.params.items()},
            "seconds": round(time.time() - started, 1),
            "trainable_parameters": sum(p.numel() for p in routed.parameters() if p.requires_grad),
            "calibrated_full_ratio": {str(index): ratio for index, ratio in full_ratio.items()},
            "thresholds": {str(index): value for index, value in thresholds(routed).items()},
            "evaluation": [asdict(row) for row in rows],
            "log_history": trainer.state.log_history,
            "versions": versions(),
        }
        remember_training(routed, record)
        try:
            routed.save_pretrained(str(staging))
            tokenizer.save_pretrained(staging)
            record["weights_hash"] = loading.load_adapter_config(str(staging)).weights_hash
            write_json(staging / "training.json", record)
        except Exception as error:
            if not disk_full(error):
                raise
            size = sum(p.numel() * p.element_size() for p in routed.parameters() if p.requires_grad)
            raise CliError(f"{out}: disk full; the adapter needs about {size + 2**20:,} bytes", RESOURCES) from error

    if rows:
        dense, routed_row = rows[0], rows[-1]
        gap = "" if routed_row.gap is None else f", threshold - top-k {routed_row.gap:+.4f}"
        say(
            f"validation loss: dense {dense.loss:.4f}, routed {routed_row.loss:.4f} "
            f"({routed_row.full_ratio:.1%} of the tokens run full){gap}"
        )
    say(f"saved {out} in {record['seconds']} s")


def _check_finite(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise CliError(f"training diverged: {name} is not finite, nothing was saved; lower --lr", OTHER)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """The Trainer's complaints about its arguments, such as an integration that is not installed, in one line."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise CliError(f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0]}") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
