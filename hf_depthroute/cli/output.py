"""The output of a command, a file or a folder: checked before the work, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import CliError


def check_out(out: Path, overwrite: bool) -> Path:
    """The absolute output folder, if it may be written.

    Raises:
        CliError: It is a file; it is not empty and `overwrite` is not given; or it holds something else than an
            adapter, which is never replaced.
    """
    resolved = out.expanduser().resolve()
    if resolved.is_file():
        raise CliError(f"--out {out}: is a file; name a folder")
    if resolved.is_dir() and any(resolved.iterdir()):
        if not overwrite:
            raise CliError(f"--out {out}: already exists and is not empty; pass --overwrite or name another folder")
        if not (resolved / "adapter_config.json").is_file():
            raise CliError(f"--out {out}: holds files but no adapter; --overwrite replaces adapters only")
    parent = next(folder for folder in resolved.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CliError(f"--out {out}: no permission to write in {parent}")
    return resolved


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder next to `out` to write into; it becomes `out` when the block ends, and vanishes when the block fails.

    A `kill -9` leaves the staging folder behind (its name starts with a dot and says "partial"), never half an `out`.
    """
    made = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    previous = out.with_name(f".{out.name}.previous-{os.getpid()}")
    try:
        staging.mkdir()
        yield staging
        if out.exists():
            out.rename(previous)
        try:
            staging.rename(out)
        except OSError:
            if previous.exists():
                previous.rename(out)
            raise
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def write_json(path: Path, content: Any) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
