"""A routed model refuses to generate by other decisions than plainly, whoever calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, tokens
from peft import LoraConfig, PeftModel, get_peft_model

from hf_depthroute import draft_view, lossless_generate
from hf_depthroute.config.adapter import ConfigError

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"granularity": "sequence"}, {"prefill_chunk_size": 2}, "decides once"),
    ({"granularity": "sequence"}, {"prompt_lookup_num_tokens": 2}, "decides once"),
    ({"phases": "prefill"}, {"use_cache": False}, "by the KV cache"),
]


def from_folder(folder: Path) -> Any:
    base = build_base("llama")
    PeftModel.from_pretrained(base, folder)
    return base


def natively(folder: Path) -> Any:
    base = build_base("llama")
    base.load_adapter(str(folder))
    return base


def under_lora(folder: Path) -> Any:
    return get_peft_model(natively(folder), LoraConfig(target_modules=["q_proj"]), "tuned")


@pytest.mark.parametrize("config, settings, why", REFUSED)
@pytest.mark.parametrize("load", [from_folder, natively, under_lora])
def test_every_way_to_generate_is_checked(
    load: Callable[[Path], Any],
    config: dict[str, Any],
    settings: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    model, ids = build_routed("llama", **config), tokens(1, 6)
    model.save_pretrained(tmp_path)
    for one in (model, model.get_base_model(), load(tmp_path)):
        with pytest.raises(ConfigError, match=why):
            one.generate(input_ids=ids, **GREEDY, **settings)
        one.generate(input_ids=ids, **GREEDY)
    with model.disable_adapter():
        model.get_base_model().generate(input_ids=ids, **GREEDY, **settings)


def test_a_model_without_routing_generates_as_ever() -> None:
    ids = tokens(1, 6)
    base = build_base("llama")
    text = base.generate(input_ids=ids, **GREEDY)
    assert torch.equal(base.generate(input_ids=ids, **GREEDY, use_cache=False), text)
    unloaded = build_routed("llama", phases="prefill").unload()
    unloaded.generate(input_ids=ids, **GREEDY, use_cache=False)


def test_a_draft_is_not_checked() -> None:
    """What it proposes is verified, however it decided."""
    model, ids = build_routed("llama", granularity="sequence"), tokens(1, 6)
    with model.disable_adapter():
        wanted = model.generate(input_ids=ids, **GREEDY)
    base = model.get_base_model()
    base.generation_config.prefill_chunk_size = 2
    draft = draft_view(model)
    assert torch.equal(lossless_generate(base, input_ids=ids, draft=draft, **GREEDY), wanted)
    with pytest.raises(ConfigError, match="decides once"):
        base.generate(input_ids=ids, assistant_model=draft, **GREEDY)


@pytest.mark.parametrize(("chunk", "warned"), [(4, True), (5, False), (None, False)])
def test_chunks_that_leave_nothing_to_route_are_told(chunk: int | None, warned: bool) -> None:
    model, ids = build_routed("llama", phases="prefill", prompt_tail=4), tokens(1, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(input_ids=ids, **GREEDY, prefill_chunk_size=chunk)
    told = [str(each.message) for each in caught if "take longer chunks" in str(each.message)]
    assert len(told) == warned
