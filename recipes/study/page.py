"""What a study says on the page of results: each recipe with results has one, in its `page.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Study:
    """What one study measured: a row and a section of the page of results."""

    title: str
    folder: str  # below recipes/
    command: str  # the folder's own page has the exact ones
    brief: str
    section: list[str]


def read(name: str) -> Any:
    return json.loads((RECIPES / name).read_text())
