"""Writing files whole: a reader, a full disk and a killed process find the old file or the new one,
never half of one.

A file is written next to its place, put on the disk, and renamed. A killed process's leftover has a
name that starts with a dot and says "partial"; the next writer of the same file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: what a killed process left is not removed
    fcntl = None  # type: ignore[assignment]


def write_files(contents: Mapping[Path, bytes], follow: bool = True) -> None:
    """Replace several files: all are on the disk before the first takes its place.

    A device or a pipe, which cannot be replaced, is written to. With `follow` what a link leads to
    is replaced, not the link.

    Raises:
        OSError: Names the file. Without space for one of them, none is replaced.
    """
    with contextlib.ExitStack() as stack:
        staged: list[tuple[Path, Path, Path]] = []
        for path, content in contents.items():
            with _named(path):
                if follow and path.exists() and not path.is_file() and not path.is_dir():
                    path.write_bytes(content)
                else:
                    place = Path(os.path.realpath(path)) if follow else path
                    staged.append((path, stack.enter_context(_staged(place, content)), place))
        for path, partial, place in staged:
            with _named(path):
                if place.is_dir():  # what Windows says differs
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                os.replace(partial, place)
        for folder in {place.parent for _, _, place in staged}:
            with contextlib.suppress(OSError):  # some file systems do not sync folders
                sync(folder)


def write_bytes(path: Path, content: bytes, follow: bool = True) -> None:
    """As `write_files`, of one file."""
    write_files({path: content}, follow)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: object, **how: Any) -> None:
    """As `write_text`; `how` is passed to `json.dumps`."""
    write_text(path, json.dumps(content, **{"indent": 2, **how}) + "\n")


def sync(path: Path) -> None:
    """Put what was written to a file, or into a folder, on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def _staged(place: Path, content: bytes) -> Iterator[Path]:
    """A new file next to `place` that holds `content`; gone at the end, unless it was renamed."""
    start = f".{place.name[:50]}.partial-"  # names have at most 255 bytes
    _remove_leftovers(place.parent, start)
    partial, number = _created(place.parent, start)
    try:
        with os.fdopen(number, "wb") as file:
            if place.is_file() and os.name != "nt":
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(number, stat.S_IMODE(place.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(number)
            if os.name == "nt":
                file.close()  # an open file cannot be renamed there
            yield partial
    finally:
        partial.unlink(missing_ok=True)


def _created(folder: Path, start: str) -> tuple[Path, int]:
    """A new file and its number; its lock, which ends with the process, says that it is in use."""
    while True:
        partial = folder / f"{start}{secrets.token_hex(4)}"
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return partial, number
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        if partial.exists():  # not taken for a leftover before it was locked
            return partial, number
        os.close(number)


def _remove_leftovers(folder: Path, start: str) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for leftover in [path for path in folder.iterdir() if path.name.startswith(start)]:
            number = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while it is in use
                leftover.unlink(missing_ok=True)
            finally:
                os.close(number)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error about a file that the user has never heard of, as one about `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
