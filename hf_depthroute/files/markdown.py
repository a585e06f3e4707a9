"""Markdown: text that stays text, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .shown import shown


def markdown_text(text: str) -> str:
    """`text` on one line, with nothing that starts markup, a link or a cell."""
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", shown(" ".join(text.split())))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; its cells are Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
