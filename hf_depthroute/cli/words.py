"""Text that comes into a command and goes out of it: UTF-8 in, and whatever the terminal can show out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .errors import CliError


def check_words(words: Sequence[str]) -> None:
    """Refuse a word of the command line that is no text; a path of such bytes can be given by a link to it.

    Raises:
        CliError: As it says.
    """
    for word in words:
        if word.isascii() or not any("\ud800" <= character <= "\udfff" for character in word):
            continue
        try:
            os.fsencode(word).decode("utf-8")
            problem = f"cannot be read in this locale ({sys.getfilesystemencoding()}); set PYTHONUTF8=1"
        except UnicodeError:
            problem = "not UTF-8; write it in UTF-8, or link to the file by another name"
        raise CliError(f"{word[:100]!r} on the command line: {problem}")


def read_stdin() -> str:
    """Everything on stdin, in UTF-8 whatever the locale says.

    Raises:
        CliError: It is not UTF-8.
    """
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:  # a stream of text
        return sys.stdin.read()
    try:
        text: str = raw.read().decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise CliError(f"the prompt on stdin is not UTF-8: byte {byte:#x} at position {error.start}") from error
    return text


def show_what_fits() -> None:
    """What stdout and stderr cannot show is written as its escape from here on: no command ends for the lack of é."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
