"""`hf-depthroute train`: train an adapter, calibrate it, and save it whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config.fields import RoutingFields
from ..training.arguments import RoutingArguments
from . import options as o
from .output import check_out


@dataclass(kw_only=True)
class TrainOptions(o.TextOptions, RoutingFields, RoutingArguments, o.BaseOptions):
    """All options of `train`: its own, and those of text, base, adapter and losses."""

    dataset: o.Dataset
    out: Annotated[Path, "Folder for the adapter; its files are made when training is done."]
    model: Annotated[str | None, "Hub id or folder of the base model; with ADAPTER, its own."] = (
        None
    )
    adapter: Annotated[
        str | None,
        typer.Argument(metavar="ADAPTER", callback=o.either),
        "An adapter to go on training, instead of a new one.",
    ] = None
    adapter_option: o.OldAdapter = None
    init: Annotated[
        str,
        "What a new adapter starts from: random, or fit, which fits it to --calibration-blocks "
        "of the text first.",
    ] = "random"
    preset: Annotated[
        str | None, "A published method, such as router-tuning; options given with it override it."
    ] = None
    split: Annotated[str, "Split to train on."] = "train"
    validation_split: Annotated[str | None, "Split to evaluate on at the end."] = None
    eval_dataset: Annotated[str | None, "Dataset to evaluate on at the end."] = None
    validation_blocks: Annotated[o.Count, "Blocks to evaluate on, at most."] = 64
    hold_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.9),
        "Share of the text to evaluate on where neither is given; 0 for none.",
    ] = 0.05
    steps: Annotated[o.Count, "Optimizer steps."] = 1000
    accumulate: Annotated[o.Count, "Batches per optimizer step."] = 1
    lr: Annotated[float, "Peak learning rate; cosine to 1 % of it."] = 2e-4
    warmup_steps: Annotated[
        int | None, typer.Option(min=0), "Warm-up steps. Default: 5 % of --steps."
    ] = None
    calibration_blocks: Annotated[
        o.Count, "Training blocks that set the thresholds, and that --init fit fits to."
    ] = 64
    dtype: Annotated[str, "float32, or bfloat16 (frozen base and autocast)."] = "float32"
    seed: Annotated[o.Seed, "Seed of the adapter and of the data order."] = 0
    logging_steps: Annotated[o.Count, "Steps between log lines."] = 50
    report_to: Annotated[
        str,
        "none, or integrations of the Trainer, comma-separated, such as tensorboard or trackio.",
    ] = "none"
    save_steps: Annotated[
        o.WholeNumber, "Steps between checkpoints in --out, for --resume; 0 for none."
    ] = 500
    resume: Annotated[
        bool, "Go on from the last whole checkpoint in --out, with the same options."
    ] = False
    overwrite: Annotated[bool, "Replace the adapter in --out; other files there stay."] = False


@o.command
def train(options: TrainOptions) -> None:
    """Train a routed adapter and calibrate it.

    Writes the adapter, the tokenizer and training.json to --out, all at once at the end. After an
    error or Ctrl-C there are whole checkpoints, for --resume; they are removed when the adapter has
    been saved.

    \b
    Example:
      hf-depthroute train --model Qwen/Qwen2.5-0.5B --dataset python-stdlib --layers last:12 --budget 0.5 \\
        --steps 500 --validation-split validation --out routed
    """  # noqa: E501
    options.out = check_out(options.out, options.overwrite, options.resume)
    from . import loading

    loading.quiet(options.debug)
    from .training import train_adapter

    train_adapter(options)
