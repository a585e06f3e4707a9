"""Write the golden adapters of a release:
`PYTHONPATH=tests/helpers python tests/golden/make.py tests/golden/0.1.0`.

They are never made again for a release that is out: later versions have to load them to the same
logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from models import build_base, logits, routed
from safetensors.torch import save_file

SMALL = {"gate_hidden": 8, "branch_rank": 4, "context_dim": 8, "summary_dim": 8, "action_dim": 4}
MADE = [
    ("llama", "mlp", {}),
    ("llama", "jepa", {}),
    ("qwen2", "attention", {}),
    ("gpt2", "block", {}),
    ("olmoe", "experts", {}),
    ("mistral", "linear", {"gate": "linear"}),
    ("qwen3", "halting", {"gate": "halting", "target": "block"}),
    ("llama", "controller", {"selection": "controller"}),
    ("llama", "predictor", {"causal_rule": "predictor"}),
    ("llama", "sequence", {"granularity": "sequence", "target": "block"}),
]


def make(folder: Path) -> None:
    torch.set_num_threads(1)
    for family, kind, fields in MADE:
        model = routed(build_base(family), kind, seed=11, **SMALL, **fields)
        place = folder / f"{family}-{kind}"
        model.save_pretrained(place)
        (place / "README.md").unlink()
        save_file({"logits": logits(model).contiguous()}, place / "logits.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
