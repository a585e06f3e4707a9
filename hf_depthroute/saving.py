"""Saving an adapter so that its folder holds the old one or the new one, whole, whenever the process is killed.

PEFT writes the weights over the old ones and then the config. Here both are staged in a folder inside the adapter's,
written to disk, and renamed: weights first, config last. The config carries the weights' hash, so the one moment in
which new weights stand beside the old config shows, and `settle` finishes that save.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from .adapter_file import (
    CONFIG_NAME,
    PEFT_TYPE,
    STAGE_PREFIX,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_config,
    tensors_hash,
)
from .base_fingerprint import remember_base
from .misuse import warn_of_saving
from .resources import disk_full
from .shown import reason
from .staged_files import sync, write_json

try:
    import fcntl
except ImportError:  # Windows: no lock; each file is still replaced whole
    fcntl = None  # type: ignore[assignment]

CARD_NAME = "README.md"
LOCK_SECONDS = 30.0


class SaveWarning(UserWarning):
    """An adapter was saved, and something that goes with it was not."""


def warn_without_card(path: Path, error: BaseException) -> None:
    """Weights and configuration are saved whatever happens to the files beside them."""
    warnings.warn(f"{path}: the model card was not written: {reason(error)}", SaveWarning, stacklevel=4)


def atomically(save: Callable[..., None]) -> Callable[..., None]:
    """`PeftModel.save_pretrained` that stages the files of a model with a depth-routed adapter.

    Raises:
        OSError: The disk is full, with the path and what is needed; or another process holds the folder's lock.
        ValueError: `safe_serialization=False`.
    """

    @functools.wraps(save)
    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], safe_serialization: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        routed = [c for c in self.peft_config.values() if str(getattr(c.peft_type, "value", c.peft_type)) == PEFT_TYPE]
        folder = Path(save_directory)
        if not routed or not kwargs.get("is_main_process", True) or folder.is_file():
            save(self, save_directory, safe_serialization, *args, **kwargs)
            return
        if not safe_serialization:
            raise ValueError(
                "depth-routed adapters are saved in safetensors format only; leave safe_serialization=True"
            )
        for config in routed:
            remember_base(self.get_base_model(), config)
        from .card.saved import save_card

        warn_of_saving(self)
        with staged_save(folder) as stage:
            save(self, str(stage), True, *args, **kwargs)
            save_card(self, stage, folder)

    return save_pretrained


@contextlib.contextmanager
def staged_save(folder: Path) -> Iterator[Path]:
    """An empty folder whose files take their places in `folder` at the end of the block, or not at all."""
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _finish(folder)  # of processes that were killed: whoever holds the lock is alone
        for leftover in folder.glob(f"{STAGE_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=folder))
        try:
            readme_kept = _bring_readme(folder, stage)
            yield stage
            if not readme_kept:
                (stage / CARD_NAME).unlink(missing_ok=True)
            for config in stage.rglob(CONFIG_NAME):
                _seal(config.parent)
            _write_through(stage)
            _commit(stage, folder)
        except (OSError, SafetensorError) as error:
            if not disk_full(error):
                raise
            needed = sum(file.stat().st_size for file in stage.rglob("*") if file.is_file())
            raise OSError(
                errno.ENOSPC,
                f"disk full while saving the adapter: more than {needed:,} bytes are needed; free some space and save "
                "again" + ("" if created else "; what was there before is intact"),
                str(folder),
            ) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if created:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only if nothing was saved


def _bring_readme(folder: Path, stage: Path) -> bool:
    """Copy the README for a card that keeps what somebody wrote; False where there is one that cannot be read."""
    from .card.readme import read_readme_file

    try:
        (stage / CARD_NAME).write_bytes(read_readme_file(folder))
    except FileNotFoundError:
        return True
    except (OSError, AdapterMismatchError) as error:
        warn_without_card(folder / CARD_NAME, error)
        return False
    return True


def settle(folder: Path) -> None:
    """Finish a save of `folder` that was killed between its two renames; any other leftover is left alone.

    A named adapter is saved from the folder above its own.
    """
    for root in (folder, folder.parent):
        if any(root.glob(f"{STAGE_PREFIX}*")) and os.access(root, os.W_OK):
            with _locked(root):  # a save that is going on is waited for
                _finish(root)


def _finish(root: Path) -> None:
    """Put a staged config beside the weights that it was staged with, where those have taken their place already."""
    for staged in sorted(root.glob(f"{STAGE_PREFIX}*/**/{CONFIG_NAME}")):
        place = root.joinpath(*staged.relative_to(root).parts[1:])
        weights = place.with_name(WEIGHTS_NAME)
        with contextlib.suppress(ValueError, OSError, SafetensorError):
            wanted = read_config(staged).get("weights_hash")
            if wanted is not None and weights.is_file() and tensors_hash(load_file(weights)) == wanted:
                os.replace(staged, place)


def _seal(folder: Path) -> None:
    """Write the hash of the staged weights into the staged config, if it is of a depth-routed adapter."""
    path, weights = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("peft_type") == PEFT_TYPE and weights.is_file():
        found = tensors_hash(load_file(weights))
        if content.get("weights_hash") != found:
            write_json(path, content | {"weights_hash": found}, sort_keys=True)


def _commit(stage: Path, folder: Path) -> None:
    files = [file for file in sorted(stage.rglob("*")) if file.is_file()]
    first = {WEIGHTS_NAME: 0, CONFIG_NAME: 1}  # a config vouches for what is there already
    for file in sorted(files, key=lambda file: (file.name not in first, str(file.parent), first.get(file.name))):
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


def _write_through(stage: Path) -> None:
    for path in [stage, *stage.rglob("*")]:
        sync(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The only writer of `folder`; the lock is on the folder itself and ends with the process."""
    if fcntl is None:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
                if time.monotonic() > end:
                    raise OSError(
                        errno.EAGAIN, f"another process has been saving there for {LOCK_SECONDS:.0f} s", str(folder)
                    ) from error
            time.sleep(0.05)
        yield
    finally:
        os.close(number)
