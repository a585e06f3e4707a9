"""Words and values of strangers, as Markdown that shows them and does nothing else.

A base model's name, a dataset's, a task's come from files that may come from strangers, and a card
is shown as HTML. Every such string goes through `clean` and stands in a code span, where neither
Markdown nor HTML means anything; what a template prints without a filter is escaped.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath, PureWindowsPath

from ..files.hub import without_tokens

_LONGEST = 300
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$!:@])")
_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class Safe(str):
    """Markdown that is meant as such."""


def clean(value: object) -> str:
    """One line: no control, invisible or direction-changing character, no Hub token,
    no end of an HTML comment."""
    start = str(value)[: 4 * _LONGEST]
    text = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in start)
    text = without_tokens(" ".join(text.split())).replace("<!--", "<! --").replace("-->", "-- >")
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."


def clean_or_none(value: object) -> str | None:
    """`clean`, of what may be missing."""
    if value is None:
        return None
    return clean(value)


def code(value: object) -> Safe:
    """An inline code span that holds `value`, backticks included."""
    text = clean(value) or " "
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * next(n for n in range(1, len(runs) + 2) if n not in runs)
    space = " " if text[0] == "`" or text[-1] == "`" else ""
    return Safe(f"{fence}{space}{text}{space}{fence}")


def escape(value: object) -> object:
    """Output filter for Jinja: text that is not `Safe` is escaped for Markdown and HTML."""
    if isinstance(value, Safe) or not isinstance(value, str):
        return value
    return Safe(_SPECIAL.sub(r"\\\1", clean(value)))


def cell(value: object) -> Safe:
    """A code span in a table, where a bar would end the cell."""
    return Safe(code(value).replace("|", "\\|"))


def literal(value: str) -> Safe:
    """A Python string literal, in ASCII and on one line."""
    return Safe(json.dumps(clean(value)))


def command_line(words: Iterable[object]) -> Safe:
    """Words as a shell reads them, on one line."""
    return Safe(shlex.join(clean(shown_path(str(word))) for word in words))


def shown_path(name: str) -> str:
    """A name as it may be published: of a path outside the working directory only the last part."""
    if not name.startswith(("/", "~", "..")) and not PureWindowsPath(name).is_absolute():
        return name
    kind = PureWindowsPath if "\\" in name else PurePosixPath
    return kind(name).name


def hub_id(name: object) -> str | None:
    """`name` if the Hub would take it for a repository's id."""
    if not isinstance(name, str) or not _ID.fullmatch(name) or "--" in name or ".." in name:
        return None
    if name.endswith((".", "-", ".git")):
        return None
    return name
