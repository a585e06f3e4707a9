"""Training checkpoints that say whether they are whole.

A Trainer resumes from the checkpoint with the highest step, also from one whose writing was killed
half-way. Here a marker is written last, after everything else has reached the disk; a checkpoint
without it, or without one of the files that it lists, is passed over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..adapter.files import (
    CONFIG_NAME,
    PEFT_TYPE,
    WEIGHTS_NAME,
    AdapterMismatchError,
    check_folder,
    read_config,
)
from ..files.shown import OneLine
from ..files.staged import sync, write_json
from ..files.untrusted import read_file

if TYPE_CHECKING:
    from transformers import Trainer

MARKER = "depth_route_complete.json"
ROUTING_STATE = "routing_state.json"
RECORD = "training.json"
_MAX_BYTES = 1 << 24  # of the marker, which has a line for each file
_HOTTEST = 1e30


class CheckpointError(OneLine, ValueError):
    """A checkpoint that training is to resume from is not whole. The message is one line."""


def mark_complete(folder: Path) -> None:
    """Write the marker of a checkpoint that has been saved: its files and their sizes."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MARKER]
    for file in files:
        sync(file)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    write_json(folder / MARKER, sizes, indent=None)


def fault_of(folder: Path) -> str | None:
    """Why `folder` is not a whole checkpoint; None if it is one."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        listed = json.loads(read_file(folder / MARKER, _MAX_BYTES))
        sizes = {str(name): int(size) for name, size in listed.items()}
    except FileNotFoundError:
        return f"it was not saved to the end (no {MARKER})"
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return f"its {MARKER} is corrupt"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    try:
        read_routing_state(folder / ROUTING_STATE)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError):
        return f"its {ROUTING_STATE} is corrupt"
    try:
        for path in folder.rglob(CONFIG_NAME):
            config = read_config(path)
            if config.get("peft_type") == PEFT_TYPE:  # adapters of other methods may lie next to it
                check_folder(path.parent, config)
    except AdapterMismatchError as error:
        return str(error)
    return None


def read_routing_state(path: Path) -> dict[str, float]:
    """The state that `RoutingObjective.state` returned, checked; `ValueError` for any other."""
    found = json.loads(read_file(path, _MAX_BYTES))
    temperature: Any = None
    if isinstance(found, dict):
        temperature = found.get("temperature", 1.0)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not set(found) <= {"temperature"} or not 0 < temperature <= _HOTTEST:
        raise ValueError(f"{path}: holds no state of the routing losses")
    return {name: float(value) for name, value in found.items()}


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, whole or not, the latest first."""
    start = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [
        c for c in folder.glob(f"{start}*") if c.is_dir() and c.name.removeprefix(start).isdecimal()
    ]
    return sorted(found, key=lambda c: (int(c.name.removeprefix(start)), c), reverse=True)


def last_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The latest whole checkpoint of a run, and a line for each later one that was passed over.

    Raises:
        CheckpointError: There are checkpoints, and none is whole.
    """
    skipped: list[str] = []
    for checkpoint in checkpoints_in(folder):
        fault = fault_of(checkpoint)
        if fault is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name}: {fault}")
    if skipped:
        faults = "; ".join(skipped[:3])
        raise CheckpointError(
            f"{folder}: no checkpoint is whole ({faults}); start again without resuming"
        )
    return None, skipped


def last_whole(folder: Path) -> Path | None:
    """The latest whole checkpoint of a run; None if there is none."""
    whole = (checkpoint for checkpoint in checkpoints_in(folder) if fault_of(checkpoint) is None)
    return next(whole, None)


def check_complete(folder: Path) -> None:
    """Raise `CheckpointError` unless `folder` is a whole checkpoint."""
    fault = fault_of(folder)
    if fault is not None:
        other = last_whole(folder.parent)
        remedy = "start again without resuming"
        if other:
            remedy = f"resume from {other.name}"
        raise CheckpointError(f"{folder}: cannot be resumed from: {fault}; {remedy}")


def load_best(trainer: Trainer, load: Callable[[], None]) -> None:
    """Load the adapters that train from the best checkpoint, each from its own folder.

    PEFT saves an adapter of another name than `"default"` in a folder of that name. A Trainer looks
    for the one that is active where the default one is: it finds none, or that one's weights. Its
    own way, `load`, is taken for what is no `PeftModel`, or split over processes.
    """
    model: Any = trainer.model
    split = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    best = Path(str(trainer.state.best_model_checkpoint))
    folders = {}
    if isinstance(model, PeftModel) and not split:
        folders = {name: best if name == "default" else best / name for name in trained(model)}
    if not folders or not all((folder / WEIGHTS_NAME).is_file() for folder in folders.values()):
        load()
        return
    for name, folder in folders.items():
        model.load_adapter(str(folder), name)


def trained(model: PeftModel) -> list[str]:
    """The names of the adapters that train, of all methods."""
    names: set[str] = set()
    for group in model.modules():
        if isinstance(group, nn.ModuleDict):
            names |= {name for name, part in group.items() if _trains(part.parameters())}
        elif isinstance(group, nn.ParameterDict):
            names |= {name for name, parameter in group.items() if _trains([parameter])}
    return [name for name in model.peft_config if name in names]


def _trains(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def rotate(newest: Path, limit: int | None, best: Path | None = None) -> None:
    """Delete checkpoints other than `newest`, the lowest steps first, until `limit` are left.

    transformers goes by modification times, by which a restored backup is newer than what was just
    written. `newest` stays, also where a run went back to a lower step than others here have, and
    so does `best`; `limit` is that of `save_total_limit`, None or 0 for all.
    """
    there = checkpoints_in(newest.parent)
    kept = {path.resolve() for path in (newest, best) if path is not None}
    surplus = max(len(there) - limit, 0) if limit else 0
    for checkpoint in [c for c in reversed(there) if c.resolve() not in kept][:surplus]:
        shutil.rmtree(checkpoint, ignore_errors=True)
