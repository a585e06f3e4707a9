"""The steps of `train` before and after the training itself: text, the adapter to train, what it may cost."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints import CheckpointError, checkpoints_in, last_complete
from ..config import DepthRouteConfig
from ..cost import route_cost
from ..data import load_text, pack
from ..presets import find_preset
from ..shown import reason, say
from . import loading
from .adapter_options import OTHER_NAMES, AdapterOptions, config_fields
from .errors import OTHER, CliError

if TYPE_CHECKING:
    from ..evaluation import BudgetRow

# Not part of what an adapter computes: where it comes from, and what a save writes.
_NOT_COMPARED = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "base_architecture")


def preset_values(name: str | None, given: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A published method's fields of the adapter and of the training arguments that no option in `given` sets.

    Raises:
        ConfigError: There is no such preset.
    """
    if name is None:
        return {}, {}
    row = find_preset(name)
    adapter, training = (
        {field: copy.deepcopy(value) for field, value in values.items() if OTHER_NAMES.get(field, field) not in given}
        for values in (row.adapter, row.training)
    )
    return adapter, training


def new_or_saved_config(options: dict[str, Any], given: set[str], preset: dict[str, Any]) -> DepthRouteConfig:
    """The configuration that the options and the preset describe, or that of the adapter that `--adapter` names.

    Raises:
        CliError: Options of a new adapter beside `--adapter`, or an adapter that cannot be read.
        ConfigError: An option is out of range.
    """
    adapter = options["adapter"]
    if adapter is None:
        if options["model"] is None:
            raise CliError("Missing option '--model' (see hf-depthroute train --help)")
        return DepthRouteConfig(**{**config_fields(options), **preset}, seed=options["seed"])
    fixed = sorted(given & {"preset", *AdapterOptions.__dataclass_fields__})
    if fixed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise CliError(f"{names}: defines a new adapter; with --adapter it is what {adapter} says")
    return loading.load_adapter_config(adapter)


def read_text(options: dict[str, Any], validation: bool) -> Any:
    """The text to train on; or the text to evaluate on, None where no option names one."""
    split, other = options["validation_split"], options["eval_dataset"]
    if validation and not (split or other):
        return None
    return load_text(
        (validation and other) or options["dataset"],
        split=(split or "train") if validation else options["split"],
        name=None if validation and other else options["dataset_name"],
        column=options["column"],
        streaming=options["streaming"],
        verbose=options["debug"],
    )


def hold_out(packed: Any, share: float, most: int) -> tuple[Any, Any]:
    """`(blocks to train on, blocks to evaluate on)`: the last `share` of a dataset, the first ones of a stream.

    Args:
        packed: From `pack`.
        share: In [0, 1). At least one block is held out if there are two; with 0 none is, and the second is None.
        most: No more blocks than that.
    """
    whole = hasattr(packed, "__len__")
    length = len(packed) if whole else sum(1 for _ in itertools.islice(packed, round(most / share) if share else 0))
    if share == 0 or length < 2:
        return packed, None
    count = min(most, max(1, round(share * length)), length - 1)
    if not whole:
        return packed.skip(count), packed.take(count)
    return packed.select(range(length - count)), packed.select(range(length - count, length))


def packed_blocks(options: dict[str, Any], tokenizer: Any) -> tuple[Any, list[Any] | None, int]:
    """Blocks to train on, batches to evaluate on, and how many blocks of the training text these are."""
    length, verbose, most = options["length"], options["debug"], options["validation_blocks"]
    packed = pack(read_text(options, validation=False), tokenizer, length, verbose=verbose)
    other = read_text(options, validation=True)
    if other is not None:
        blocks, held_out = pack(other, tokenizer, length, verbose=verbose), 0
    else:
        packed, blocks = hold_out(packed, options["hold_out"], most)
        held_out = 0 if blocks is None else sum(1 for _ in blocks)
    if blocks is None:
        say("nothing to evaluate on: pass --validation-split, --eval-dataset or --hold-out to compare with the base")
        return packed, None, 0
    batches = loading.to_batches(blocks, options["batch_size"], most)
    if held_out:
        say(f"held out {held_out} blocks of the text to evaluate on (--hold-out, or name a --validation-split)")
    return packed, batches, held_out


def checkpoint_to_resume(out: Path, config: DepthRouteConfig) -> Path | None:
    """The last whole checkpoint in `out`; None where there is none at all.

    Raises:
        CliError: There are some, and none is whole; or the last one is of an adapter with another configuration than
            `config`, that of the model that is to train.
    """
    try:
        found, skipped = last_complete(out) if out.is_dir() else (None, [])
    except CheckpointError as error:
        raise CliError(f"--resume: {error}") from error
    for line in skipped:
        say(f"passed over {line}")
    if found is None:
        say(f"no checkpoint in {out}: training begins at the first step")
        return None
    saved, wanted = loading.load_adapter_config(str(found)).to_dict(), config.to_dict()
    for name, value in saved.items():
        if name not in _NOT_COMPARED and value != wanted.get(name):
            raise CliError(f"--resume: {found} was trained with {name}={value}, not {wanted.get(name)}; give it again")
    say(f"going on from {found}")
    return found


@contextlib.contextmanager
def at_best(folder: Path, what: str) -> Iterator[None]:
    """Say that `what` was not written into `folder`, where it could not be; an adapter is not lost for it."""
    before = set(folder.iterdir())
    try:
        yield
    except Exception as error:
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # half of what was to be written
        say(f"note: {what} was not written: {reason(error)}", file=sys.stderr)


@contextlib.contextmanager
def save_warnings_said() -> Iterator[None]:
    """Say what goes with an adapter and was not saved; other warnings are kept off the terminal."""
    from ..saving import SaveWarning

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SaveWarning)
        yield
    for warning in found:
        say(f"note: {warning.message}", file=sys.stderr)


def run(trainer: Any, checkpoint: Path | None) -> None:
    """Train, from `checkpoint` on if there is one; where that is of the last step, it is only loaded."""
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step >= trainer.args.max_steps:  # the Trainer would take another step
            trainer.model.load_adapter(str(checkpoint), trainer.model.active_adapter, is_trainable=True)
            trainer.state = state
            return
    trainer.train(None if checkpoint is None else str(checkpoint))


def remove_checkpoints(out: Path) -> None:
    """Remove the checkpoints of the run whose adapter has been saved."""
    for checkpoint in checkpoints_in(out):
        shutil.rmtree(checkpoint, ignore_errors=True)


def bytes_needed(model: Any, tokenizer: Any, checkpoints: bool) -> int:
    """About what a run writes: the adapter and the tokenizer, and up to three checkpoints with two Adam moments."""
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return trained * (10 if checkpoints else 1) + 64 * len(tokenizer) + 2**20


def say_what_it_costs(model: Any, length: int) -> None:
    """A line where routers and branches cost more than what is skipped."""
    remark = route_cost(model, length=length).remark
    if remark is not None:
        say(f"note: {remark}")


def say_results(rows: Sequence[BudgetRow]) -> None:
    """The dense base beside the adapter, on the text to evaluate on."""
    if rows:
        dense, routed = rows[0], rows[-1]
        gap = "" if routed.gap is None else f", threshold - top-k {routed.gap:+.4f}"
        say(
            f"validation loss: dense {dense.loss:.4f}, routed {routed.loss:.4f} "
            f"({routed.full_ratio:.1%} of the tokens run full){gap}"
        )


def check_finite(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise CliError(f"training diverged: {name} is not finite, nothing was saved; lower --lr", OTHER)
