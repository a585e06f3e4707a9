"""Adapters of earlier releases load, compute what they did,
and are saved again to the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import build_base, logits
from peft import PeftModel
from places import TESTS
from safetensors.torch import load_file

from hf_depthroute.adapter.files import CONFIG_NAME, WEIGHTS_NAME

GOLDEN = sorted(p.parent for p in TESTS.joinpath("golden").rglob("logits.safetensors"))


def test_there_are_golden_adapters() -> None:
    assert len(GOLDEN) >= 10


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_golden_adapter_is_what_it_was(folder: Path, tmp_path: Path) -> None:
    model = PeftModel.from_pretrained(build_base(folder.name.split("-")[0]), folder).eval()
    expected = load_file(folder / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    before, after = load_file(folder / WEIGHTS_NAME), load_file(tmp_path / WEIGHTS_NAME)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(value, after[name]) and value.dtype == after[name].dtype
        for name, value in before.items()
    )
    old, new = (json.loads((place / CONFIG_NAME).read_text()) for place in (folder, tmp_path))
    assert new | {name: old[name] for name in ("library_version", "peft_version")} == old
