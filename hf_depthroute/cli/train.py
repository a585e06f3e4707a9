"""`hf-depthroute train`: train an adapter, calibrate it, and save it whole or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import RoutingArguments
from ..shown import reason, say
from . import options as o
from .adapter import AdapterToTrain, OldAdapter
from .adapter_options import OTHER_NAMES, AdapterOptions
from .errors import RESOURCES, CliError
from .output import check_out, check_space, made, write_json


@o.options_of(AdapterOptions, RoutingArguments)
def train(
    context: typer.Context,
    dataset: o.Dataset,
    out: Annotated[Path, typer.Option(help="Folder for the adapter; its files are made when training is done.")],
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder of the base model; with ADAPTER, its own.")
    ] = None,
    adapter: AdapterToTrain = None,
    adapter_option: OldAdapter = None,
    preset: Annotated[
        str | None, typer.Option(help="A published method, such as router-tuning; options given beside it override it.")
    ] = None,
    config: o.ConfigFile = None,
    dataset_name: o.DatasetName = None,
    split: Annotated[str, typer.Option(help="Split to train on.")] = "train",
    column: o.Column = "text",
    streaming: o.Streaming = False,
    validation_split: Annotated[str | None, typer.Option(help="Split to evaluate on at the end.")] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Dataset to evaluate on at the end.")] = None,
    validation_blocks: Annotated[int, typer.Option(min=1, help="Blocks to evaluate on, at most.")] = 64,
    hold_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Share of the text to evaluate on where neither is given; 0 for none."),
    ] = 0.05,
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
    report_to: Annotated[
        str, typer.Option(help="none, or integrations of the Trainer, comma-separated, such as tensorboard or trackio.")
    ] = "none",
    save_steps: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints in --out, for --resume; 0 for none.")
    ] = 500,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last whole checkpoint in --out, with the same options.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the adapter in --out; other files there stay.")
    ] = False,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
    **options: Any,
) -> None:
    """Train a routed adapter and calibrate it.

    Writes the adapter, the tokenizer and training.json to --out, all at once at the end. What an error or Ctrl-C leaves
    behind are whole checkpoints, for --resume; they are removed when the adapter has been saved.

    \b
    Example:
      hf-depthroute train --model Qwen/Qwen2.5-0.5B --dataset python-stdlib --layers last:12 --budget 0.5 \\
        --steps 500 --validation-split validation --out routed
    """
    out = check_out(out, overwrite, resume)
    from . import loading

    loading.quiet(debug)
    import torch
    import transformers

    from ..calibration import active_routings, calibrate, thresholds
    from ..card.record import remember_training
    from ..evaluation import evaluate_budgets
    from ..resources import disk_full
    from ..saving import staged_save
    from ..trainer import DepthRouteTrainer, DepthRouteTrainingArguments
    from ..tuner import get_depth_routed_model
    from ..versions import versions
    from . import training as t

    # Everything that can be refused is refused before the weights are loaded.
    given = o.given(context)
    adapter_values, training_values = t.preset_values(preset, given)
    adapter_config = t.new_or_saved_config(context.params, given, adapter_values)
    loading.check_dtype(dtype, ("float32", "bfloat16"))
    if not 0 < lr < float("inf"):
        raise CliError(f"--lr {lr}: must be a finite number above 0")
    checkpoints = 0 < save_steps < steps
    values: dict[str, Any] = {
        "output_dir": str(out),
        "learning_rate": lr,
        "max_steps": steps,
        "warmup_steps": steps // 20 if warmup_steps is None else warmup_steps,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulate,
        "seed": seed,
        "bf16": dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": logging_steps,
        "report_to": [name.strip() for name in report_to.split(",")],
        "save_strategy": "steps" if checkpoints else "no",
        "save_steps": max(1, save_steps),
        "save_total_limit": 2,
    } | {field.name: options[field.name] for field in fields(RoutingArguments)}
    with _reported("training arguments"):
        arguments = DepthRouteTrainingArguments(**values | training_values)
        for integration in transformers.integrations.get_reporting_integration_callbacks(arguments.report_to):
            integration()  # says whether its package is installed
    base_name, base_config = loading.find_base(adapter or "", adapter_config, model)
    adapter_config.routed_layers(base_config.num_hidden_layers)
    loading.check_length(length, base_config)
    tokenizer = loading.load_tokenizer(base_name, base_config)
    packed, validation, held_out = t.packed_blocks(context.params, tokenizer)

    started = time.time()
    transformers.set_seed(seed)
    base = loading.load_model(base_name, dtype)
    if adapter is None:
        routed = get_depth_routed_model(base, adapter_config)
    else:
        routed = loading.load_adapter(base, adapter, is_trainable=True)
    adapter_config = active_routings(routed)[0].active_config()
    checkpoint = t.checkpoint_to_resume(out, adapter_config) if resume else None
    t.say_what_it_costs(routed, length)
    with made(out):
        check_space(out, t.bytes_needed(routed, tokenizer, checkpoints))
        with _reported("training arguments"):
            trainer = DepthRouteTrainer(
                model=routed,
                args=arguments,
                train_dataset=packed,
                data_collator=transformers.default_data_collator,
            )
        t.run(trainer, checkpoint)
        t.check_finite(routed)
        full_ratio = {}
        if adapter_config.takes_budget():
            full_ratio = calibrate(routed, loading.to_batches(packed, batch_size, calibration_blocks))
        rows = [] if validation is None else evaluate_budgets(routed, validation, None, [adapter_config.budget])
        record = {
            "command": o.command_words(context, leave_out=("out", "overwrite", "resume")),
            "arguments": {
                **{name: _plain(value) for name, value in context.params.items() if name != "adapter_option"},
                **{OTHER_NAMES.get(name, name): v for name, v in (adapter_values | training_values).items()},
                "model": base_name,
            },
            "seconds": round(time.time() - started, 1),
            "trainable_parameters": sum(p.numel() for p in routed.parameters() if p.requires_grad),
            "calibrated_full_ratio": {str(index): ratio for index, ratio in full_ratio.items()},
            "thresholds": {str(index): value for index, value in thresholds(routed).items()},
            "held_out_blocks": held_out,
            "evaluation": [asdict(row) for row in rows],
            "log_history": trainer.state.log_history,
            "versions": versions(),
        }
        remember_training(routed, record)
        try:
            with t.save_warnings_said(), staged_save(out) as stage:
                routed.save_pretrained(str(stage))
                with t.at_best(stage, "the tokenizer"):
                    tokenizer.save_pretrained(stage)
                with t.at_best(stage, "training.json"):
                    record["weights_hash"] = loading.load_adapter_config(str(stage)).weights_hash
                    write_json(stage / "training.json", record)
        except Exception as error:
            if not disk_full(error):
                raise
            size = t.bytes_needed(routed, tokenizer, checkpoints=False)
            raise CliError(f"{out}: disk full; the adapter needs about {size:,} bytes", RESOURCES) from error
        t.remove_checkpoints(out)
    t.say_results(rows)
    say(f"saved {out} in {record['seconds']} s")


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """The Trainer's complaints about its arguments, such as an integration that is not installed, in one line."""
    try:
        yield
    except (ValueError, ImportError, RuntimeError) as error:
        raise CliError(f"{what}: {reason(error)}") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
