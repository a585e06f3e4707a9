"""The output of a command: a file or a folder, checked before the work,
written whole or not at all; a table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import staged
from ..files.shown import say, say_block, shown
from .errors import RESOURCES, CliError, refused

_CHECKPOINT = re.compile(r"checkpoint-\d+")
STDOUT = Path("-")
_LOGS = "runs"  # TensorBoard's; every run adds a file of its own


def check_out(out: Path, overwrite: bool, resume: bool = False) -> Path:
    """The absolute output folder, if it may be written.

    Overwriting replaces the files of the adapter that is there; everything else in the folder
    stays.
    """
    resolved = out.expanduser().resolve()
    if resolved.is_file():
        raise CliError(f"--out {out}: is a file; name a folder")
    held = []
    if resolved.is_dir():
        held = sorted(entry.name for entry in resolved.iterdir())
    checkpoints = [name for name in held if _CHECKPOINT.fullmatch(name)]
    if checkpoints and not resume:
        what = "pass --resume to go on with it, or remove its checkpoints"
        raise CliError(f"--out {out}: holds {checkpoints[0]} of a run that did not end; {what}")
    if not checkpoints and any(name != _LOGS for name in held):
        if not overwrite:
            raise CliError(
                f"--out {out}: already exists and is not empty; pass --overwrite or name another "
                "folder"
            )
        if "adapter_config.json" not in held:
            raise CliError(
                f"--out {out}: holds files but no adapter; --overwrite replaces adapters only"
            )
    parent = next(folder for folder in (resolved, *resolved.parents) if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CliError(f"--out {out}: no permission to write in {parent}")
    return resolved


def check_space(folder: Path, needed: int) -> None:
    """Refuse a folder in which `needed` bytes cannot be written, before hours are spent on them."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CliError(
            f"--out {folder}: needs about {needed:,} bytes and only {free:,} are free there",
            RESOURCES,
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CliError(
            f"--out {folder}: no file can be made there: {error.strerror}", RESOURCES
        ) from error


def short_name(source: str) -> str:
    """A Hub id as it is; of a path its last part: the rest means nothing on other machines."""
    path = Path(source)
    if path.exists() or path.is_absolute():
        return path.resolve().name
    return source


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and those above it; if the block fails, those that are empty go again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def check_file(path: Path | None) -> Path | None:
    """Callback of `--out FILE`: what cannot be written is refused before the work."""
    if path is None or path == STDOUT:
        return path
    with refused(f"--out {path}: ", (OSError, ValueError)):
        if path.is_dir():
            raise CliError(f"--out {path}: is a folder; name a file")
        parent = next(folder for folder in path.expanduser().resolve().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CliError(f"--out {path}: no file can be made in {parent}")
    return path


ResultFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--json",
        metavar="FILE",
        callback=check_file,
        help=(
            "Write the result here as JSON; - for stdout, without the table. --json is the older "
            "spelling."
        ),
    ),
]


def write_result(path: Path | None, content: object) -> bool:
    """Write a result as JSON to `--out`, if given; True if that is stdout, for nothing else."""
    if path is None:
        return False
    text = json.dumps(content, indent=2)
    if path == STDOUT:
        say_block(text)
        return True
    write_text(path, f"{text}\n")
    return False


def write_text(path: Path, text: str) -> None:
    """As `staged.write_text`; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged.write_text(path, text)


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """A wide table of rows with the same keys, which are its header."""
    print_table(list(rows[0]), [list(row.values()) for row in rows], wide=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], wide: bool = False) -> None:
    """A table on stdout, numbers to the right; a `wide` one has no frame, and is wrapped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe or a file has no width to cut numbers for
    table = Table(
        *header,
        box=box.SIMPLE_HEAD if wide else box.HEAVY_HEAD,
        collapse_padding=wide,
        pad_edge=not wide,
    )
    for number, column in enumerate(table.columns):
        text = wide and (number == 0 or not any(row[number][:1].isdigit() for row in rows))
        column.justify = "left" if text else "right"
        column.no_wrap = not wide
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    console.print(table)


@contextlib.contextmanager
def noted(kind: type[Warning]) -> Iterator[None]:
    """Inside the block, `say_as_notes`."""
    with warnings.catch_warnings():
        say_as_notes(kind)
        yield


def say_as_notes(kind: type[Warning]) -> None:
    """Say warnings of `kind` as notes when they come, each text once; others stay as they are."""
    texts: set[str] = set()
    warnings.simplefilter("always", kind)
    otherwise = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
        if not issubclass(category, kind):
            otherwise(message, category, *where, **how)
        elif str(message) not in texts:
            texts.add(str(message))
            say(f"note: {message}", sys.stderr)

    warnings.showwarning = show
