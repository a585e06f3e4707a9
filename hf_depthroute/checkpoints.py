"""Training checkpoints that say whether they are whole.

A Trainer resumes from the checkpoint with the highest step, also from one whose writing was killed half-way. Here a
marker is written last, after everything else has reached the disk; a checkpoint without it, or without one of the files
that it lists, is passed over.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .adapter_file import CONFIG_NAME, AdapterMismatchError, check_folder, read_config
from .objective import RoutingObjective
from .resources import disk_full, out_of_memory
from .shown import OneLine, reason, shown
from .staged_files import sync, write_json

MARKER = "depth_route_complete.json"
_ROUTING_STATE = "routing_state.json"


class CheckpointError(OneLine, ValueError):
    """A checkpoint that training is to resume from is not whole. The message is one line."""


def mark_complete(folder: Path) -> None:
    """Write the marker of a checkpoint that has been saved: its files and their sizes."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MARKER]
    for file in files:
        sync(file)
    write_json(folder / MARKER, {str(f.relative_to(folder)): f.stat().st_size for f in files}, indent=None)


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
        _read_routing_state(folder / _ROUTING_STATE)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, RecursionError):
        return f"its {_ROUTING_STATE} is corrupt"
    try:
        for config in folder.rglob(CONFIG_NAME):
            check_folder(config.parent, read_config(config))
    except AdapterMismatchError as error:
        return str(error)
    return None


def _read_routing_state(path: Path) -> dict[str, float]:
    """What `RoutingObjective.state` gave; ValueError or TypeError for anything else."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not set(found) <= {"temperature"}:
        raise ValueError(f"{path}: holds no state of the routing losses")
    state = {name: float(value) for name, value in found.items()}
    if not all(math.isfinite(value) for value in state.values()):
        raise ValueError(f"{path}: holds a value that is not finite")
    return state


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


def rotate(newest: Path, limit: int | None, best: Path | None = None) -> None:
    """Delete checkpoints beside `newest`, the lowest steps first, until `limit` are left.

    transformers goes by modification times, by which a restored backup, or what was written before a clock was set
    back, is newer than the checkpoint that was just written.

    Args:
        newest: Was just written; it stays, also where a run went back to a lower step than others here have.
        limit: As `save_total_limit`; None or 0 for all.
        best: Stays, too.
    """
    there = checkpoints_in(newest.parent)
    kept = {path.resolve() for path in (newest, best) if path is not None}
    surplus = len(there) - limit if limit else 0
    for checkpoint in [c for c in reversed(there) if c.resolve() not in kept][: max(surplus, 0)]:
        shutil.rmtree(checkpoint, ignore_errors=True)


class CheckpointsMixin:
    """A `transformers.Trainer` that marks whole checkpoints and resumes from no other.

    What ran out of memory or disk ends with a line that names what was being done and what is left.
    """

    args: TrainingArguments
    accelerator: Any
    state: TrainerState
    routing_objective: RoutingObjective
    doing = "setting up"
    _get_output_dir: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`.

        Raises:
            CheckpointError: The checkpoint to resume from is not whole; for True, none is. Later ones that are not
                whole are named in a warning and passed over.
            NonFiniteLossError: A loss term or a gradient was not finite; the optimizer did not step.
        """
        if resume_from_checkpoint is True:
            found, skipped = last_complete(Path(str(self.args.output_dir)))
            for line in skipped:
                warnings.warn(f"passed over {shown(line)}", stacklevel=2)
            resume_from_checkpoint = True if found is None else str(found)
        elif resume_from_checkpoint:
            check_complete(Path(resume_from_checkpoint))
        with self._named("training"):
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go when this one is whole
        doing, self.doing = self.doing, f"saving {folder}"
        try:
            super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]
            if self.args.should_save:
                write_json(folder / _ROUTING_STATE, self.routing_objective.state(), indent=None)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                mark_complete(folder)
                best = self.state.best_model_checkpoint
                rotate(folder, limit, None if best is None else Path(best))
        finally:
            self.args.save_total_limit = limit
        self.doing = doing

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        saved = Path(checkpoint or "") / _ROUTING_STATE
        if checkpoint is not None and saved.is_file():
            self.routing_objective.load_state(_read_routing_state(saved))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluate`."""
        doing, self.doing = self.doing, "evaluating"
        with nullcontext() if doing != "setting up" else self._named("evaluating"):
            metrics = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        self.doing = doing
        return metrics

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Say what was being done when memory or disk ran out, and what is left."""
        self.doing = doing
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            kind = MemoryError if out_of_memory(error) else OSError if disk_full(error) else None
            if kind is None:
                raise
            whole = next((c for c in checkpoints_in(Path(str(self.args.output_dir))) if fault_of(c) is None), None)
            left = f"the last whole checkpoint is {whole}" if whole else "there is no whole checkpoint"
            if kind is MemoryError:
                text = f"out of memory while {self.doing}: {reason(error)}; {left}"
                # The same type where it is PyTorch's own: callers catch it.
                raise (type(error) if isinstance(error, torch.OutOfMemoryError) else MemoryError)(text) from error
            text = f"disk full while {self.doing}: {reason(error)}; {left}"
            raise OSError(errno.ENOSPC, text, str(getattr(error, "filename", None) or self.args.output_dir)) from error
        finally:
            self.doing = "setting up"
