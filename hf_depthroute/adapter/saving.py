"""Saving an adapter so that its folder holds the old one or the new one, whole,
whenever the process is killed.

PEFT writes the weights over the old ones and then the config. Here both are staged in a folder
inside the adapter's, written to disk, and renamed: weights first, config last. The config carries
the weights' hash, so the one moment in which new weights stand next to the old config shows, and
`settle` finishes that save.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError

from ..files.out_of_resources import disk_full
from ..files.shown import reason
from ..files.staged import sync, write_json
from ..routing.stack import routings_of
from ..routing.thresholds import NOT_FITTED, ScoreQuantiles
from .base_check import remember_base
from .files import (
    CARD_NAME,
    CONFIG_NAME,
    PEFT_TYPE,
    STAGE_PREFIX,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_readme,
    read_tensors,
    tensors_hash,
)
from .source import alone_in, finish
from .tensor_rules import layers_without

if TYPE_CHECKING:
    from torch import nn

# What else goes into a folder: each is called with the model, the folder in which its adapters are
# staged, and theirs. Nothing here knows what that may be; the model card adds itself.
after_saving: list[Callable[[Any, Path, Path], None]] = []


class SaveWarning(UserWarning):
    """An adapter was saved, and something that goes with it was not."""


def warn_without_card(path: Path, error: BaseException) -> None:
    """Weights and configuration are saved whatever happens to the other files."""
    warnings.warn(
        f"{path}: the model card was not written: {reason(error)}", SaveWarning, stacklevel=4
    )


def save_whole(
    save: Callable[..., None],
    model: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    *args: object,
    **kwargs: object,
) -> None:
    """`PeftModel.save_pretrained`, here `save`; files of a routed adapter are staged.

    Raises:
        OSError: The disk is full, with the path and what is needed; or another process holds the
            folder's lock.
        ValueError: `safe_serialization=False`.
    """
    configs = model.peft_config.values()
    routed = [c for c in configs if str(getattr(c.peft_type, "value", c.peft_type)) == PEFT_TYPE]
    folder = Path(save_directory)
    if not routed or not kwargs.get("is_main_process", True) or folder.is_file():
        save(model, save_directory, safe_serialization, *args, **kwargs)
        return
    if not safe_serialization:
        raise ValueError(
            "depth-routed adapters are saved in safetensors format only; leave "
            "safe_serialization=True"
        )
    for config in routed:
        remember_base(model.get_base_model(), config)
    _warn_of_thresholds(model)
    with staged_save(folder) as stage:
        save(model, str(stage), True, *args, **kwargs)
        for add in after_saving:
            add(model, stage, folder)


def _warn_of_thresholds(model: nn.Module) -> None:
    """Warn if gates of the adapter train and its thresholds were never fitted."""
    for routing in routings_of(model):
        for name, table in routing.depth_route_quantiles.items():
            gate = routing.depth_route_gate[name]
            trained = any(parameter.requires_grad for parameter in gate.parameters())
            fitted = cast(ScoreQuantiles, table).fitted()
            if trained and routing.config(name).takes_budget() and not fitted:
                warnings.warn(f"adapter {name!r} is saved as it is: {NOT_FITTED}", stacklevel=5)
                return


@contextlib.contextmanager
def staged_save(folder: Path) -> Iterator[Path]:
    """A folder whose files take their places in `folder` at the end of the block, or not at all."""
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        finish(folder)  # of processes that were killed: the holder of the lock is alone
        for leftover in folder.glob(f"{STAGE_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=folder))
        try:
            readme_kept = _bring_readme(folder, stage)
            yield stage
            if not readme_kept:
                (stage / CARD_NAME).unlink(missing_ok=True)
            for config in stage.rglob(CONFIG_NAME):
                _seal(config, config.with_name(WEIGHTS_NAME))
            for path in [stage, *stage.rglob("*")]:
                sync(path)
            _commit(stage, folder)
        except (OSError, SafetensorError) as error:
            if not disk_full(error):
                raise
            needed = sum(file.stat().st_size for file in stage.rglob("*") if file.is_file())
            said = f"disk full while saving the adapter: more than {needed:,} bytes are needed"
            said += "; free some space and save again"
            if not created:
                said += "; what was there before is intact"
            raise OSError(errno.ENOSPC, said, str(folder)) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if created:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only if nothing was saved


def _bring_readme(folder: Path, stage: Path) -> bool:
    """Copy the README, for a card that keeps the user's text; False if it cannot be read."""
    try:
        (stage / CARD_NAME).write_bytes(read_readme(folder))
    except FileNotFoundError:
        return True
    except (OSError, AdapterMismatchError) as error:
        warn_without_card(folder / CARD_NAME, error)
        return False
    return True


def _seal(path: Path, weights: Path) -> None:
    """Write the hash of the staged weights into a routed adapter's staged config.

    Raises:
        AdapterMismatchError: Loading would refuse the weights; they do not take the place of
            others.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("peft_type") == PEFT_TYPE and weights.is_file():
        tensors = read_tensors(weights, content)
        without = layers_without(tensors, content)
        if without:
            raise AdapterMismatchError(
                f"the state dict to save has no tensor of layer {without[0]}'s router under the "
                "model's own names; give the whole one of the unwrapped model, as "
                "accelerator.get_state_dict(model) does, or leave state_dict out"
            )
        content["weights_hash"] = tensors_hash(tensors)
        write_json(path, content, sort_keys=True)


def _commit(stage: Path, folder: Path) -> None:
    files = [file for file in sorted(stage.rglob("*")) if file.is_file()]
    first = {WEIGHTS_NAME: 0, CONFIG_NAME: 1}  # a config vouches for what is there already
    files.sort(key=lambda file: (file.name not in first, str(file.parent), first.get(file.name)))
    for file in files:
        target = folder / file.relative_to(stage)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(file, target)
        except OSError as error:
            if file.name in first:
                raise
            warn_without_card(target, error)
    for path in {folder, *(folder / file.relative_to(stage).parent for file in files)}:
        sync(path)
