"""Training checkpoints that say whether they are whole.

A Trainer resumes from the checkpoint with the highest step, also from one whose writing was killed half-way. Here a
marker is written last, after everything else has reached the disk; a checkpoint without it, or without one of the files
that it lists, is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .adapter_file import CONFIG_NAME, AdapterMismatchError, check_folder, read_config

MARKER = "depth_route_complete.json"


class CheckpointError(ValueError):
    """A checkpoint that training is to resume from is not whole. The message is one line."""


def mark_complete(folder: Path) -> None:
    """Write the marker of a checkpoint that has been saved: its files and their sizes."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MARKER]
    for file in files:
        _to_disk(file)
    staged = folder / f".{MARKER}"
    staged.write_text(json.dumps({str(f.relative_to(folder)): f.stat().st_size for f in files}), encoding="utf-8")
    _to_disk(staged)
    os.replace(staged, folder / MARKER)


def fault_of(folder: Path) -> str | None:
    """Why `folder` is not a whole checkpoint; None where it is one."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        listed = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in listed.items()}
    except FileNotFoundError:
        return f"it was not saved to the end (no {MARKER})"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"its {MARKER} is corrupt"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    try:
        for config in folder.rglob(CONFIG_NAME):
            check_folder(config.parent, read_config(config))
    except AdapterMismatchError as error:
        return str(error)
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, whole or not, the latest first."""
    steps = []
    for entry in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = entry.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if entry.is_dir() and number.isdecimal():
            steps.append((int(number), entry))
    return [entry for _, entry in sorted(steps, reverse=True)]


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
        raise CheckpointError(
            f"{folder}: no checkpoint is whole ({'; '.join(skipped[:3])}); start again without resuming"
        )
    return None, skipped


def check_complete(folder: Path) -> None:
    """Raise `CheckpointError` unless `folder` is a whole checkpoint."""
    fault = fault_of(folder)
    if fault is None:
        return
    others: Sequence[Path] = [c for c in checkpoints_in(folder.parent) if c != folder and fault_of(c) is None]
    remedy = f"resume from {others[0].name}" if others else "start again without resuming"
    raise CheckpointError(f"{folder}: cannot be resumed from: {fault}; {remedy}")


def _to_disk(file: Path) -> None:
    number = os.open(file, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
