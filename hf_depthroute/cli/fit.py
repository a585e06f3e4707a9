"""`hf-depthroute fit`: a routed adapter without training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config.fields import MEMORY_FIELDS, RoutingFields
from ..files.shown import say
from . import options as o
from .errors import refused
from .output import check_out

# Options of the configuration's names.
_FIELDS = ("target", "gate", "branch", "branch_rank", "phases", "prompt_tail", "seed")


@dataclass(kw_only=True)
class FitOptions(o.TextOptions, o.BaseOptions):
    """All options of `fit`."""

    model: Annotated[str, "Hub id or folder of the base model."]
    dataset: o.Dataset
    out: Annotated[Path, "Folder for the adapter."]
    keep: Annotated[
        float,
        "Share, in (0, 1), of all calls of the target that run in full; of prompts, see --keep-of.",
    ] = 0.5
    keep_of: Annotated[
        str, "With --phases prefill, what --keep is a share of: flops, or time, as measured here."
    ] = "flops"
    phases: Annotated[
        str,
        "What is routed: all, or prefill: prompts only, by static layers; what is skipped "
        "there is found, too.",
    ] = "all"
    prompt_length: Annotated[
        o.OptionalCount, "With --phases prefill: tokens of the prompt that --keep is a share of."
    ] = None
    prompt_tail: Annotated[
        o.OptionalCount,
        "With --phases prefill: last tokens of a prompt that run in full. Default: 64, or "
        "a sixth of --length, if less.",
    ] = None
    target: Annotated[str, "What an easy token skips: ffn, attention or block."] = "ffn"
    gate: Annotated[str, "What scores a token: mlp or affine."] = "mlp"
    layers: Annotated[str, "Which layers may be routed, such as all or last:12."] = "all"
    branch_rank: Annotated[
        int | None,
        "Rank of the low-rank branch, by default an eighth of the model's width; or neurons of "
        "another, by default a quarter of the FFN's, or a sixteenth of branch swiglu.",
    ] = None
    branch: Annotated[
        str,
        "What easy tokens get: lowrank, neurons (of the FFN's own), swiglu (copies of them, to "
        "train) or memory (n-grams).",
    ] = "lowrank"
    memory_slots: Annotated[int, "Branch memory: slots of a layer's table."] = (
        RoutingFields.memory_slots
    )
    memory_width: Annotated[int, "Branch memory: width of a slot."] = RoutingFields.memory_width
    memory_heads: Annotated[int, "Branch memory: hashes of every order."] = (
        RoutingFields.memory_heads
    )
    ngram_order: Annotated[int, "Branch memory: tokens of the longest n-gram."] = (
        RoutingFields.ngram_order
    )
    rounds: Annotated[
        o.OptionalCount,
        "How often everything is fitted, by default 2; the last is kept unless it loses more.",
    ] = None
    blocks: Annotated[int, typer.Option(min=2), "Blocks of text to fit on."] = 64
    split: Annotated[str, "Split to fit on."] = "train"
    seed: Annotated[o.Seed, "Seed of the adapter."] = 0
    overwrite: Annotated[bool, "Replace the adapter in --out; other files there stay."] = False


@o.command
def fit(options: FitOptions) -> None:
    """Make an adapter without training: about a minute for a small model.

    It takes as long as ten to twenty forward passes of the text.

    Branches are fitted by least squares, gates by regression on the error that their branch leaves,
    and one threshold over all layers runs the share --keep in full. Writes the adapter, the
    tokenizer and training.json to --out. With accelerate launch -m hf_depthroute fit ..., every
    process takes its share of the text.

    \b
    Example:
      hf-depthroute fit --model Qwen/Qwen2.5-0.5B --dataset python-stdlib --keep 0.5 --out fitted
    """
    if options.phases == "all":
        options.refuse_unused(("keep_of", "prompt_length"), "without --phases prefill")
    if options.branch != "memory":
        options.refuse_unused(MEMORY_FIELDS, "without --branch memory")
    options.out = check_out(options.out, options.overwrite, resume=False)
    from . import loading

    loading.quiet(options.debug)
    import torch
    from accelerate import PartialState

    from ..base.stack import stack_of
    from ..config.adapter import DepthRouteConfig
    from ..fitting.router import fit_router
    from ..fitting.text import FitWarning
    from ..routing.description import budget_words
    from ..training.record import remembered
    from .output import made, noted
    from .saving import save_adapter

    routing = o.values_of(options, (*_FIELDS, *MEMORY_FIELDS))
    config = DepthRouteConfig(layers=o.parse_layers(options.layers), **routing)
    loading.check_dtype(options.dtype, loading.DTYPES)
    # One of several under accelerate launch: each with a GPU of its own, or all on processors.
    process = PartialState(cpu=not torch.cuda.is_available())
    source = loading.source_of(options, config)
    loading.check_length(options.length, source.base_config)
    tokenizer = source.tokenizer()
    batches = source.batches(tokenizer, options.split, options.blocks)
    base = source.base_model()
    with refused("fit: "), noted(FitWarning):
        model: Any = fit_router(
            base,
            batches,
            options.keep,
            config,
            rounds=options.rounds,
            keep_of=options.keep_of,
            length=options.prompt_length,
            progress=process.is_main_process and sys.stderr.isatty(),
        )
    process.destroy_process_group()
    if not process.is_main_process:
        return
    record = dict(remembered(model, "default").training or {})
    record["command"] = o.command_words(options.context, leave_out=("out", "overwrite"))
    record["arguments"] = o.values_of(options, ("dataset", "dataset_name", "split"))
    record["examples"] = sum(len(batch["input_ids"]) for batch in batches)
    with made(options.out):
        save_adapter(options.out, model, tokenizer, record)
    _say_found(options, record["fit"], len(stack_of(model).layers))
    fitted = model.peft_config["default"]
    if fitted.takes_budget():
        say(f"budget of the adapter: {budget_words(fitted, source.base_config.num_hidden_layers)}")
    say(f"saved {options.out} in {record['seconds']} s")


def _say_found(options: FitOptions, found: dict[str, Any], depth: int) -> None:
    """Say each layer's share or option in a model of `depth` layers, losses, and what runs."""
    from ..fitting.prompts import KEEP_OF

    prompts = options.phases == "prefill"
    layers = found["layers"].values()
    if prompts:
        runs = 1 - sum(layer["saved"] for layer in layers)
    else:
        runs = 1 - sum(1 - layer["share"] for layer in layers) / depth
    for index, layer in found["layers"].items():
        if prompts:
            say(
                f"layer {index}: prompts skip the {layer['target']}, for {layer['rank']} of "
                f"{layer['branch']}"
            )
        else:
            say(f"layer {index}: {layer['share']:.1%} of the tokens run full")
    spread = found["loss_over_dense_error"]
    between = ""
    if spread is not None:
        between = f" (difference ± {spread:.4f}, the standard error over rows)"
    say(
        f"loss {'behind prompts of' if prompts else 'on'} {found['held_out_tokens']} held-out "
        f"tokens: dense {found['loss_dense']:.4f}, routed {found['loss']:.4f}{between} with "
        f"{runs:.1%} of the {KEEP_OF[options.keep_of] if prompts else 'calls'} "
        f"(--keep {options.keep:g})"
    )
    if not prompts:
        fewest, most = found["share_of_rows"]
        say(
            f"thresholds are of this text: in nine rows of ten, {fewest:.0%} to {most:.0%} of all "
            "calls run in full"
        )
