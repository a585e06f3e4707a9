"""Strings of strangers, as a terminal, a log or a message may show them.

A name in a file may hold what a terminal acts on: escape sequences that clear or colour, a carriage
return, another line, characters that turn the direction of text. Shown here, each of them is its
Python escape, and nothing else. Whatever this library prints goes through `say` or `say_block`; the
messages of its exceptions are `OneLine`.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# Controls (C0, delete, C1), surrogates, line and paragraph separators, and what turns the direction
# of text.
_ACTS = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_ACTS_IN_BLOCK = re.compile(_ACTS.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def shown(text: object) -> str:
    """`text` on one line; every character that a terminal would act on is its escape,
    such as `\\x1b` or `\\u202e`."""
    return _ACTS.sub(_escape, str(text))


def shown_block(text: str) -> str:
    """As `shown`, and the ends of lines and the tabs stay."""
    return _ACTS_IN_BLOCK.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


def counted(number: object, noun: str) -> str:
    """`1 layer`, `2 layers`: of a noun whose plural has an s."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def reason(error: BaseException) -> str:
    """An exception's whole message on one line; the name of its class if the message is empty."""
    return shown(" ".join(str(error).split()) or type(error).__name__)


class DepthRouteWarning(UserWarning):
    """A warning of this library: the commands, which hide those of others, say it as a note."""


class OneLine(Exception):
    """An exception whose message is one line that can be printed, whatever a file put into it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(" ".join(str(message).split())))


def say(line: object = "", file: TextIO | None = None) -> None:
    """Print one line, on stdout unless `file` is given."""
    print(shown(line), file=file, flush=True)


def say_block(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text of several lines."""
    print(shown_block(text), file=file, end=end, flush=True)


def say_content(text: str, end: str = "\n") -> None:
    """Print what a model or a user wrote, on stdout: to a file or a pipe as it is,
    to a terminal as `shown_block`."""
    print(shown_block(text) if sys.stdout.isatty() else text, end=end, flush=True)
