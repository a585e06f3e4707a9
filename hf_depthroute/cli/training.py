"""The steps of `train`: check the options, make the adapter, estimate its cost,
train and save it."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME

from ..adapter.tuner import get_depth_routed_model
from ..card.facts import read_training
from ..evaluation import BudgetRow, evaluate_budgets
from ..evaluation.cost import route_cost
from ..files.shown import counted, say
from ..files.versions import versions
from ..fitting.router import config_to_fit, fit_router
from ..fitting.text import FitWarning
from ..inference import calibration
from ..training.presets import find_preset
from ..training.prompts import collate_behind_prompts
from ..training.record import record_of, remember_training, trainable_parameters
from ..training.trainer import DepthRouteTrainer, DepthRouteTrainingArguments
from . import loading
from . import options as o
from .errors import OTHER, CliError, refused
from .output import check_space, made, noted
from .resuming import ARGUMENTS, check_same_run, checkpoint_to_resume
from .saving import bytes_needed, save_adapter
from .train_settings import (
    ARGUMENT_ERRORS,
    left_to_preset,
    new_or_saved_config,
    refuse_unused,
    training_arguments,
)

if TYPE_CHECKING:
    from .train import TrainOptions

_BUDGET_BLOCKS = 16  # that the thresholds of budgets other than the adapter's are found on
_FOUND_BY_FIT = ("layers", "static_layers", "budget")  # what a fit finds of a configuration


@dataclass
class Run:
    """The checked options of `train`.

    `preset` are the values that its preset sets; `blocks` are to train on, and `validation` are the
    batches to evaluate on, for which `held_out` blocks were taken out of the same text.
    """

    options: TrainOptions
    preset: dict[str, object]
    source: loading.Source
    arguments: DepthRouteTrainingArguments
    tokenizer: Any
    blocks: Any
    validation: list[Any] | None
    held_out: int
    started: float

    def calibration_batches(self) -> list[dict[str, torch.Tensor]]:
        """Some blocks of the text to train on, for a fit and for thresholds."""
        options = self.options
        return loading.to_batches(self.blocks, options.batch_size, options.calibration_blocks)


def train_adapter(options: TrainOptions) -> None:
    """Everything that `train` does once the libraries are loaded; what can be refused is,
    before the weights load."""
    run = _prepared(options)
    out = options.out
    transformers.set_seed(options.seed)
    base = run.source.base_model()
    checkpoint = None
    if options.resume:
        checkpoint = checkpoint_to_resume(out)
    model = _model_to_train(run, base, checkpoint)
    if checkpoint is not None:
        check_same_run(checkpoint, model.active_peft_config, _arguments_of(run))
        say(f"going on from {checkpoint}")
    remark = route_cost(model, length=options.length).remark
    if remark is not None:  # routers and branches cost more than what is skipped
        say(f"note: {remark}")
    with made(out):
        saves = run.arguments.save_strategy != "no"
        check_space(out, bytes_needed(model, run.tokenizer, checkpoints=saves))
        log_history, resumed_at = _trained(run, model, checkpoint)
        say("thresholds and losses ...")
        full_ratio, rows = _measured(run, model)
        record = _record_of(run, model, log_history, full_ratio, rows)
        record["resumed_at"] = resumed_at
        save_adapter(out, model, run.tokenizer, record)
    if rows:
        dense = rows[0]
        routed = rows[-1]
        gap = ""
        if routed.gap is not None:
            gap = f", threshold - top-k {routed.gap:+.4f}"
        share = f"{routed.full_ratio:.1%} of the tokens run full"
        say(f"validation loss: dense {dense.loss:.4f}, routed {routed.loss:.4f} ({share}){gap}")
    say(f"saved {out} in {record['seconds']} s")


def _prepared(options: TrainOptions) -> Run:
    given = o.given(options.context)
    adapter_values: dict[str, Any] = {}
    training_values: dict[str, Any] = {}
    if options.preset is not None:
        row = find_preset(options.preset)
        adapter_values = left_to_preset(row.adapter, given)
        training_values = left_to_preset(row.training, given)
    if options.init not in ("random", "fit"):
        raise CliError(f"--init {options.init}: use random or fit")
    config = new_or_saved_config(options, given, adapter_values)
    loading.check_dtype(options.dtype, ("float32", "bfloat16"))
    if not 0 < options.lr < float("inf"):
        raise CliError(f"--lr {options.lr}: must be a finite number above 0")
    arguments = training_arguments(options, training_values)
    refuse_unused(options, config, arguments)
    source = loading.source_of(options, config)
    depth = source.base_config.num_hidden_layers
    if options.init == "fit":
        scoped = "budget_scope" in given and options.budget_scope != "global"
        if config.selection != "threshold" or scoped:
            raise CliError(
                "--init fit: all layers share one threshold; leave --selection and --budget-scope "
                "out"
            )
        config_to_fit(depth, config.share_of_all(depth, config.budget), config)
    config.routed_layers(depth)
    loading.check_length(options.length, source.base_config)
    tokenizer = source.tokenizer()
    text = _packed_text(options, tokenizer)
    preset = adapter_values | training_values
    return Run(options, preset, source, arguments, tokenizer, *text, started=time.monotonic())


def hold_out(packed: Any, share: float, most: int) -> tuple[Any, Any]:
    """`(blocks to train on, blocks to evaluate on)`, the second None with a `share` of 0.

    They are the last `share` of a dataset or the first ones of a stream, at most `most`, and at
    least one of two blocks.
    """
    whole = hasattr(packed, "__len__")
    if whole:
        length = len(packed)
    else:
        length = sum(1 for _ in itertools.islice(packed, round(most / share) if share else 0))
    if share == 0 or length < 2:
        return packed, None
    count = min(most, max(1, round(share * length)), length - 1)
    if not whole:
        return packed.skip(count), packed.take(count)
    return packed.select(range(length - count)), packed.select(range(length - count, length))


def _packed_text(
    options: TrainOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, list[Any] | None, int]:
    """`Run.blocks`, `Run.validation` (from another text, or a part of the same that is held out),
    `Run.held_out`."""
    most = options.validation_blocks
    packed = loading.read_blocks(options, tokenizer, options.split)
    held_out = 0
    if options.validation_split or options.eval_dataset:
        split = options.validation_split or "train"
        blocks = loading.read_blocks(options, tokenizer, split, options.eval_dataset)
    else:
        packed, blocks = hold_out(packed, options.hold_out, most)
        held_out = sum(1 for _ in blocks or ())
    if blocks is None:
        say(
            "nothing to evaluate on: pass --validation-split, --eval-dataset or --hold-out to "
            "compare with the base"
        )
        return packed, None, 0
    if held_out:
        say(
            f"held out {counted(held_out, 'block')} of the text to evaluate on (--hold-out, "
            "or name a --validation-split)"
        )
    return packed, loading.to_batches(blocks, options.batch_size, most), held_out


def _model_to_train(run: Run, base: torch.nn.Module, checkpoint: Path | None) -> Any:
    """`base` with the adapter that is trained on: a saved one, a fitted one or a new one."""
    if run.options.adapter is not None:
        return run.source.routed(base, is_trainable=True)
    if run.options.init == "fit":
        return _fitted(run, base, checkpoint)
    return get_depth_routed_model(base, run.source.config)


def _fitted(run: Run, base: torch.nn.Module, checkpoint: Path | None) -> PeftModel:
    """The model that `fit_router` makes of `base`; where there is a checkpoint of it,
    with the layers of that."""
    config = run.source.config
    depth = run.source.base_config.num_hidden_layers
    keep = config.share_of_all(depth, config.budget)
    layers = config.routed_layers(depth)
    if checkpoint is None:
        batches = run.calibration_batches()
        with refused("--init fit: "), noted(FitWarning):
            model = fit_router(base, batches, keep, config, progress=sys.stderr.isatty())
        found = record_of(model)["fit"]
        routed = counted(len(model.active_peft_config.layers or ()), "routed layer")
        say(
            f"fitted to {found['tokens']} tokens: {routed}, loss on "
            f"text held out of them {found['loss']:.4f} (dense {found['loss_dense']:.4f})"
        )
        return model
    saved = loading.load_adapter_config(str(checkpoint))
    record = read_training(checkpoint)
    fit: Any = record.get("fit")
    try:
        same = fit["keep"] == keep and sorted(map(int, fit["layers"])) == layers
    except (KeyError, TypeError, ValueError):  # no record of a fit
        same = False
    if not same:
        raise CliError(
            f"--resume: {checkpoint} was not trained from a fit of this --budget and --layers"
        )
    model = get_depth_routed_model(
        base, replace(config, **{n: getattr(saved, n) for n in _FOUND_BY_FIT})
    )
    remember_training(model, record)
    return model


def _trained(run: Run, model: Any, checkpoint: Path | None) -> tuple[list[dict[str, Any]], int]:
    """Train, from `checkpoint` on if there is one (of the last step, it is only loaded);
    what the Trainer logged, and the step that it went on from."""
    # Checkpoints are saved with it.
    remember_training(model, record_of(model) | {ARGUMENTS: _arguments_of(run)})
    with refused("training arguments: ", ARGUMENT_ERRORS):
        collator: Callable[[list[Any]], dict[str, Any]] = transformers.default_data_collator
        if model.active_peft_config.phases == "prefill":
            collator = collate_behind_prompts
        trainer = DepthRouteTrainer(
            model=model, args=run.arguments, train_dataset=run.blocks, data_collator=collator
        )
    resumed_at = 0
    if checkpoint is None:
        trainer.train()
    else:
        state = trainer.state.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        resumed_at = state.global_step
        # The Trainer would take another step.
        if state.global_step >= run.arguments.max_steps:
            model.load_adapter(str(checkpoint), model.active_adapter, is_trainable=True)
            trainer.state = state
        else:
            trainer.train(str(checkpoint))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise CliError(
                f"training diverged: {name} is not finite, nothing was saved; lower --lr", OTHER
            )
    return list(trainer.state.log_history), resumed_at


def _measured(run: Run, model: Any) -> tuple[dict[int, float], list[BudgetRow]]:
    """Calibrate; the share that each layer then ran in full,
    and the losses on the text to evaluate on."""
    config = model.active_peft_config
    full_ratio = {}
    if config.takes_budget():
        batches = run.calibration_batches()
        full_ratio = calibration.calibrate(model, batches)
        few = -(-_BUDGET_BLOCKS // run.options.batch_size)
        calibration.calibrate_budgets(model, batches[:few])
    if run.validation is None:
        return full_ratio, []
    return full_ratio, evaluate_budgets(model, run.validation, None, [config.budget])


def _arguments_of(run: Run) -> dict[str, Any]:
    """The options of the run, with what its preset says, by the names of the command line."""
    given = {
        o.key_of(name): str(value) if isinstance(value, Path) else value
        for name, value in run.options.context.params.items()
        if name != "adapter_option"
    }
    preset = {o.key_of(name): value for name, value in run.preset.items()}
    return given | preset | {"model": run.source.base}


def _record_of(
    run: Run,
    model: torch.nn.Module,
    log_history: list[dict[str, object]],
    full_ratio: dict[int, float],
    rows: Sequence[BudgetRow],
) -> dict[str, object]:
    """The content of training.json."""
    return {
        "command": o.command_words(run.options.context, leave_out=("out", "overwrite", "resume")),
        ARGUMENTS: _arguments_of(run),
        "seconds": round(time.monotonic() - run.started, 1),
        "trainable_parameters": trainable_parameters(model),
        "calibrated_full_ratio": {str(index): ratio for index, ratio in full_ratio.items()},
        "thresholds": {str(index): value for index, value in calibration.thresholds(model).items()},
        "held_out_blocks": run.held_out,
        "evaluation": [asdict(row) for row in rows],
        "log_history": log_history,
        "versions": versions(),
        **({"fit": fit} if (fit := record_of(model).get("fit")) else {}),
    }
