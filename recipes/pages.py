"""What recipes' pages are made of: Markdown that stays text, its tables, and pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hf_depthroute.files.shown import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown_text(text: str) -> str:
    """`text` on one line, with nothing that starts markup, a link or a cell."""
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", shown(" ".join(text.split())))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; its cells are Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]


def png_of(figure: Figure, dpi: int) -> bytes:
    """A figure of matplotlib as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
