"""Finishing a save that was killed, by the next process that looks into the folder; and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError

from ..files.locks import locked
from .files import CONFIG_NAME, STAGE_PREFIX, WEIGHTS_NAME, read_config, read_tensors, tensors_hash

LOCK_SECONDS = 30.0


def settle(folder: Path) -> None:
    """Finish a save of `folder` that was killed between its two renames; any other leftover is left alone.

    A named adapter is saved from the folder above its own.
    """
    for root in (folder, folder.parent):
        if any(root.glob(f"{STAGE_PREFIX}*")) and os.access(root, os.W_OK):
            with alone_in(root):  # a save that is going on is waited for
                finish(root)


def finish(root: Path) -> None:
    """Put a staged config next to the weights that it was staged with, where those have taken their place already."""
    for staged in sorted(root.glob(f"{STAGE_PREFIX}*/**/{CONFIG_NAME}")):
        place = root.joinpath(*staged.relative_to(root).parts[1:])
        if _goes_through_link(staged, root) or _goes_through_link(place.parent, root):
            continue  # no save leaves one
        weights = place.with_name(WEIGHTS_NAME)
        with contextlib.suppress(ValueError, OSError, SafetensorError):
            config = read_config(staged)
            wanted = config.get("weights_hash")
            if wanted is not None and weights.is_file() and tensors_hash(read_tensors(weights, config)) == wanted:
                os.replace(staged, place)


def _goes_through_link(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)) != Path(os.path.realpath(root), path.relative_to(root))


def alone_in(folder: Path) -> AbstractContextManager[None]:
    """Inside the block this process is the only writer of `folder`."""
    busy = OSError(errno.EAGAIN, f"another process has been saving there for {LOCK_SECONDS:.0f} s", str(folder))
    return locked(folder, busy, LOCK_SECONDS)
