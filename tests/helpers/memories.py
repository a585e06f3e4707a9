"""Conditional memory by hand: n-grams, ways to generate, and a changed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_depthroute.parts.memory import EARLIER, MISSING


def naive_suffixes(
    ids: list[int], order: int, real: list[bool], starts: list[bool]
) -> list[list[int]]:
    found = []
    for t in range(len(ids)):
        grams, inside = [ids[t] if real[t] else MISSING], real[t]
        for back in range(1, order):
            inside = inside and not starts[t - back + 1] and (t < back or real[t - back])
            grams.append(MISSING if not inside else EARLIER if t < back else ids[t - back])
            inside = inside and t >= back
            if not inside and grams[-1] == EARLIER:
                grams += [EARLIER] * (order - back - 1)
                break
        found.append(grams)
    return found


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "beams, static cache": {
        "num_beams": 3,
        "cache_implementation": "static",
        "disable_compile": True,
    },
    "chunked prompt": {"prefill_chunk_size": 2},
}


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
