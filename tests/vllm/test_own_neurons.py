"""A branch of neurons on vLLM: rows of the base's files, whatever the form of its FFN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import build_base, build_routed, tokens
from protocol import gap

from hf_depthroute.routing.stack import routings_of
from hf_depthroute.vllm.neurons import OwnNeurons, own_neurons


@pytest.mark.parametrize("family", ["llama", "nemotron", "phi3", "gpt_neox", "starcoder2", "gpt2"])
def test_rows_of_the_files_give_what_the_bases_own_give(family: str, tmp_path: Path) -> None:
    build_base(family).save_pretrained(str(tmp_path))
    model = build_routed(family, layers=[1, 2], branch="neurons", branch_rank=16)
    (files, routings) = sorted(tmp_path.glob("*.safetensors")), list(routings_of(model))
    for number, routing in enumerate(routings):
        branch = routing.depth_route_branch["default"]
        branch.choose(torch.rand(64, generator=torch.Generator().manual_seed(number)))
    ids = tokens(2, 12, seed=3)
    with torch.no_grad():
        wanted = model(ids).logits
        own_neurons(model.get_base_model(), routings, files, torch.float32)
        assert all(type(r.depth_route_branch["default"]) is OwnNeurons for r in routings)
        assert gap(model(ids).logits, wanted) < 1e-5
