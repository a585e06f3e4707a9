"""The language model of a model of images and text is routed: with images, padding,
saved and loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_consequential, randomised
from peft import PeftModel
from places import HELPERS, ROOT
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    route_cost,
    set_budget,
)

IMAGE = 60
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VISION |= {"image_size": 14, "patch_size": 7}


def vlm(name: str, seed: int = 0) -> Any:
    if name == "gemma3":
        tokens = {
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        }
        config = Gemma3Config(
            text_config={**TEXT, "sliding_window": 8}, vision_config=VISION, **tokens
        )
        return randomised(Gemma3ForConditionalGeneration(config), "sdpa", torch.float32, seed)
    vision = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
    text = {"model_type": "llama", **TEXT}
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, image_seq_length=4
    )
    return randomised(LlavaForConditionalGeneration(config), "sdpa", torch.float32, seed)


def inputs(padding: int = 0) -> dict[str, torch.Tensor]:
    """Two rows of text with an image in each; `padding` tokens in front."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (2, 12), generator=generator)
    ids[:, 3:7] = IMAGE
    pixels = torch.randn(2, 3, 14, 14, generator=generator)
    ids = torch.cat([ids.new_zeros(2, padding), ids], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels,
        "token_type_ids": (ids == IMAGE).long(),
    }


def given(name: str, padding: int = 0) -> dict[str, torch.Tensor]:
    found = inputs(padding)
    return (
        found
        if name == "gemma3"
        else {key: value for key, value in found.items() if key != "token_type_ids"}
    )


def text_alone() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 50, (8, 16), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_the_language_model_of_a_vlm_is_routed_saved_and_loaded(name: str, tmp_path: Path) -> None:
    base = vlm(name)
    with torch.no_grad():
        dense = base(**given(name)).logits
    model = get_depth_routed_model(base, DepthRouteConfig(layers=[1, 2, 3])).eval()
    make_consequential(model)
    assert not any(
        "vision" in key for key, parameter in model.named_parameters() if parameter.requires_grad
    )
    calibrate(model, text_alone())
    with torch.no_grad(), record_routes(model) as trace:
        expected = model(**given(name)).logits
    assert not torch.equal(expected, dense)
    assert any(not record.mask.all() for record in trace.values())
    with torch.no_grad():
        padded = model(**given(name, padding=3)).logits[:, 3:]
        assert torch.allclose(padded, expected, atol=1e-4)
        with model.disable_adapter():
            assert torch.equal(model(**given(name)).logits, dense)
    text = model.generate(**given(name), max_new_tokens=6, do_sample=False, eos_token_id=None)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(vlm(name), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**given(name)).logits, expected)
    assert torch.equal(
        loaded.generate(**given(name), max_new_tokens=6, do_sample=False, eos_token_id=None), text
    )
    set_budget(loaded, 1.0)
    with torch.no_grad():
        assert torch.equal(loaded(**given(name)).logits, dense)
    with pytest.raises(ValueError, match="made for another base"):
        PeftModel.from_pretrained(vlm(name, seed=5), tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_a_vlm_is_calibrated_on_text_and_its_language_model_is_counted(name: str) -> None:
    model = get_depth_routed_model(vlm(name), DepthRouteConfig(layers=[1, 2, 3])).eval()
    make_consequential(model)
    with pytest.raises(ValueError, match="batch 0 holds pixel_values, which are not read here"):
        calibrate(model, given(name))
    shares = calibrate(model, text_alone(), budget=0.25)
    assert all(0.15 <= share <= 0.35 for share in shares.values())
    few, everything = (route_cost(model, budget=budget, length=16) for budget in (0.25, 1.0))
    assert few.flops_dense == everything.flops_dense > few.flops_routed
    assert few.flops_routed < everything.flops_routed
    keys_and_values = 4 * 2 * 2 * 8 * 4  # layers, both, heads, width, bytes, of each token
    held = 16 * keys_and_values if name == "llava" else few.kv_bytes  # Gemma's windows hold fewer
    assert few.kv_bytes == held and 0 < held <= 16 * keys_and_values


def test_a_fresh_process_loads_vlms(tmp_path: Path) -> None:
    for name in ("gemma3", "llava"):
        model = get_depth_routed_model(vlm(name), DepthRouteConfig(layers=[1, 2, 3])).eval()
        make_consequential(model)
        calibrate(model, text_alone())
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            torch.save(model(**given(name)).logits, tmp_path / name / "logits.pt")
    code = (
        "import torch; from test_vlm import PeftModel, given, sys, vlm\n"
        "for name in ('gemma3', 'llava'):\n"
        "    folder = f'{sys.argv[1]}/{name}'\n"
        "    with torch.no_grad(): found = PeftModel.from_pretrained(vlm(name), "
        "folder).eval()(**given(name)).logits\n"
        "    print(name, torch.equal(found, torch.load(folder + '/logits.pt')))"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HELPERS, ROOT)))}
    run_in = {"cwd": Path(__file__).parent, "env": environment}
    ended = subprocess.run(words, **run_in, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "gemma3 True\nllava True\n", ended.stderr
