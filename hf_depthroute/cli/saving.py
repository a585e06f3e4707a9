"""The files that `train` and `fit` write."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..adapter.saving import SaveWarning, staged_save
from ..files import staged
from ..files.out_of_resources import disk_full
from ..files.shown import reason, say
from ..training.checkpoints import checkpoints_in
from ..training.record import remember_training
from . import loading
from .errors import RESOURCES, CliError
from .output import noted


def save_adapter(
    out: Path, model: Any, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]
) -> None:
    """The adapter with its card, the tokenizer and training.json, into `out`;
    a run's checkpoints there are removed.

    What goes with an adapter and was not saved is said.
    """
    remember_training(model, record)
    try:
        with noted(SaveWarning), staged_save(out) as stage:
            model.save_pretrained(str(stage))
            with _at_best(stage, "the tokenizer"):
                tokenizer.save_pretrained(stage)
            with _at_best(stage, "training.json"):
                record["weights_hash"] = loading.load_adapter_config(str(stage)).weights_hash
                staged.write_json(stage / "training.json", record)
    except Exception as error:
        if not disk_full(error):
            raise
        size = bytes_needed(model, tokenizer, checkpoints=False)
        raise CliError(
            f"{out}: disk full; the adapter needs about {size:,} bytes", RESOURCES
        ) from error
    for checkpoint in checkpoints_in(out):
        shutil.rmtree(checkpoint, ignore_errors=True)


@contextlib.contextmanager
def _at_best(folder: Path, what: str) -> Iterator[None]:
    """Say that `what` could not be written into `folder`; an adapter is not lost for it."""
    before = set(folder.iterdir())
    try:
        yield
    except Exception as error:
        for path in set(folder.iterdir()) - before:
            if path.is_dir():  # half of what was to be written
                shutil.rmtree(path)
            else:
                path.unlink()
        say(f"note: {what} was not written: {reason(error)}", file=sys.stderr)


def bytes_needed(model: nn.Module, tokenizer: PreTrainedTokenizerBase, checkpoints: bool) -> int:
    """About what a run writes: adapter, tokenizer, three checkpoints with two Adam moments."""
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return trained * (10 if checkpoints else 1) + 64 * len(tokenizer) + 2**20
