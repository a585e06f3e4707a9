"""Reading a file of a folder that a stranger made: a regular file, of a bounded size,
that is really in the folder.

A link may point to anything that its reader may read: a README that links to a secret would be
shown in a card and sent to the Hub. Links that stay in the folder are followed, and so are those of
the Hub's cache, whose snapshots consist of links to its blobs.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from .shown import OneLine

# A string is one find, also without an end.
_BRACKET = re.compile(r'[\[\]{}]|"(?:[^"\\]+|\\.?)*(?:"|\Z)', re.DOTALL)


class RefusedFileError(OneLine, ValueError):
    """A file is not read. The message is one line and names the file."""


def read_file(path: Path, limit: int, folder: Path | None = None) -> bytes:
    """The content of `path`, at most `limit` bytes; links may lead to `folder`, or everywhere.

    Raises:
        FileNotFoundError: There is no such file.
        RefusedFileError: It cannot be read, is no regular file, is larger than `limit`, or links
            out of `folder`.
    """
    place = path if folder is None else place_of(path, folder)
    try:
        # Do not wait for a writer to a pipe. What was looked at is not exchanged for a link
        # meanwhile.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        if folder:
            flags |= getattr(os, "O_NOFOLLOW", 0)
        number = os.open(place, flags)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise RefusedFileError(f"{path}: is not a regular file")
        with os.fdopen(number, "rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RefusedFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise RefusedFileError(f"{path}: larger than {limit:,} bytes")
    return content


def nests_deeper(text: str, limit: int) -> bool:
    """Whether JSON nests more than `limit` deep; to be asked before the parser, which recurses."""
    depth = 0
    for found in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > limit:
            return True
    return False


def place_of(path: Path, folder: Path) -> Path:
    """Where the links of `path`, a file of `folder`, lead.

    Raises:
        FileNotFoundError: There is no such file.
        RefusedFileError: Out of the folder.
    """
    try:
        place = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except FileNotFoundError:
        if path.is_symlink():
            raise RefusedFileError(f"{path}: is a link that leads nowhere") from None
        raise
    except (OSError, RuntimeError) as error:
        # A circle of links is one or the other, by the version of Python.
        raise RefusedFileError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    folders = (root, *root.parents)
    blobs = [folder.parent / "blobs" for folder in folders if folder.name == "snapshots"]
    if not place.is_relative_to(root) and place.parent not in blobs:
        raise RefusedFileError(f"{path}: is a link out of its folder; put a copy of the file there")
    return place
