"""Invariants 3, 4 and 20: an adapter is the same after every way of saving and loading it,
or it is refused."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import COVERING, FAMILY_NAMES, GATES, MEMORIES, build_base, routed, tokens
from peft import PeftModel, get_peft_model_state_dict
from places import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_depthroute import (
    DepthRouteConfig,
    get_depth_routed_model,
    record_routes,
    replay_routes,
)
from hf_depthroute.adapter.files import AdapterMismatchError, tensors_hash
from hf_depthroute.parts.baseline_gates import SinkGate
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of

# "gate", "routing" and "depth_route" also occur in the keys themselves.
NAMES = ("default", "x", "gate", "routing", "depth_route", "A-b_9")
Loader = Callable[[Path, Path, str], Any]


def base_from(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def by_peft(base: Path, adapter: Path, name: str) -> Any:
    return PeftModel.from_pretrained(base_from(base), adapter, adapter_name=name)


def by_peft_without_memory(base: Path, adapter: Path, name: str) -> Any:
    return PeftModel.from_pretrained(
        base_from(base), adapter, adapter_name=name, low_cpu_mem_usage=True
    )


def by_peft_onto_another_adapter(base: Path, adapter: Path, name: str) -> Any:
    model = routed(base_from(base), "mlp", adapter_name="first", seed=4, layers=[0, 2])
    model.load_adapter(adapter, name)
    model.set_adapter(name)
    return model


def by_peft_onto_another_adapter_without_memory(base: Path, adapter: Path, name: str) -> Any:
    model = routed(base_from(base), "mlp", adapter_name="first", seed=4, layers=[0, 2])
    model.load_adapter(adapter, name, low_cpu_mem_usage=True)
    model.set_adapter(name)
    return model


def by_transformers(base: Path, adapter: Path, name: str) -> Any:
    model = base_from(base)
    model.load_adapter(adapter, adapter_name=name)
    return model


def by_transformers_auto_class(base: Path, adapter: Path, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(adapter)


def by_peft_auto_class(base: Path, adapter: Path, name: str) -> Any:
    return peft.AutoPeftModelForCausalLM.from_pretrained(adapter, adapter_name=name)


LOADERS: dict[str, Loader] = {
    "PeftModel.from_pretrained": by_peft,
    "PeftModel.from_pretrained, low_cpu_mem_usage": by_peft_without_memory,
    "PeftModel.load_adapter": by_peft_onto_another_adapter,
    "PeftModel.load_adapter, low_cpu_mem_usage": by_peft_onto_another_adapter_without_memory,
    "model.load_adapter": by_transformers,
    "AutoModelForCausalLM": by_transformers_auto_class,
    "AutoPeftModelForCausalLM": by_peft_auto_class,
}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(tokens(3, 12)).logits


def own_tensors(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Every adapter tensor by a key without the adapter's name and without a wrapper's prefix."""
    found = {}
    for key, value in model.state_dict().items():
        head, mark, tail = key.partition(".routing.")
        group, _, rest = tail.partition(".")
        if mark and rest.startswith(f"{name}."):
            found[
                f"{head.removeprefix('base_model.model.')}.{group}.{rest.removeprefix(f'{name}.')}"
            ] = value
    return found


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[PeftModel, Path, Path]]:
    """A saved base and an adapter of it:
    `make(family, gate) -> model, base folder, adapter folder`.

    They are made once and shared: no test changes them.
    """

    @functools.cache
    def build(
        family: str, gate: str, dtype: torch.dtype = torch.float32
    ) -> tuple[PeftModel, Path, Path]:
        folder = tmp_path_factory.mktemp("saved")
        base, adapter = folder / "base", folder / "adapter"
        build_base(family, dtype=dtype).save_pretrained(base)
        model = routed(base_from(base), gate, seed=7)
        model.save_pretrained(adapter)
        return model, base, adapter

    return build


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("family", "kind"), [*COVERING, *MEMORIES])
def test_every_loader_gives_the_same_model(
    make: Callable[..., Any], family: str, kind: str, loader: str
) -> None:
    model, base, adapter = make(family, kind)
    loaded = LOADERS[loader](base, adapter, "default")
    assert torch.equal(logits(loaded), logits(model))
    expected, found = own_tensors(model, "default"), own_tensors(loaded, "default")
    assert len(expected) > 20
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "loader", [loader for loader in LOADERS if loader != "AutoModelForCausalLM"]
)
@pytest.mark.parametrize("gate", GATES)
def test_any_adapter_name_gives_the_same_model(
    make: Callable[..., Any], gate: str, loader: str, name: str
) -> None:
    model, base, adapter = make("llama", gate)
    loaded = LOADERS[loader](base, adapter, name)
    assert torch.equal(logits(loaded), logits(model))
    assert own_tensors(loaded, name).keys() == own_tensors(model, "default").keys()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("gate", GATES)
def test_every_loader_serves_a_bfloat16_base(
    make: Callable[..., Any], gate: str, loader: str
) -> None:
    model, base, adapter = make("llama", gate, torch.bfloat16)
    loaded = LOADERS[loader](base, adapter, "default")
    assert next(loaded.parameters()).dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))
    expected = {key: value.dtype for key, value in own_tensors(model, "default").items()}
    assert {key: value.dtype for key, value in own_tensors(loaded, "default").items()} == expected


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "jepa", "block", "memory"])
def test_an_adapter_that_is_not_kept_in_float32_has_the_dtype_of_its_base(
    tmp_path: Path, kind: str, low_cpu_mem_usage: bool
) -> None:
    """As docs/how-to/serving.md says; weights in float32 are cast in every step."""
    model = routed(build_base("llama", dtype=torch.bfloat16), kind)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        build_base("llama", dtype=torch.bfloat16),
        tmp_path,
        autocast_adapter_dtype=False,
        low_cpu_mem_usage=low_cpu_mem_usage,
    )
    dtypes = {
        key: value.dtype
        for key, value in own_tensors(loaded, "default").items()
        if value.is_floating_point() and "_target." not in key
    }
    thresholds = {key for key in dtypes if "_quantiles." in key}
    assert {dtypes.pop(key) for key in thresholds} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}
    ids = tokens(3, 12)
    with record_routes(model) as trace, torch.no_grad():
        expected = model(ids).logits
    with replay_routes(loaded, trace), torch.no_grad():
        assert (loaded(ids).logits - expected).abs().max() < 0.1 * expected.std()


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": "mlp", "selection": "controller"},
        {"gate": "jepa"},
        {"gate": "sinks", "target": "block", "branch": "lowrank"},
    ],
    ids=lambda fields: fields["gate"],
)
def test_a_model_that_is_converted_decides_as_one_that_was_loaded_so(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """What scores are compared with stays in float32, as it was."""
    model = routed(build_base("llama"), **fields)
    for routing in routings_of(model):
        if isinstance(gate := routing.gate("default"), SinkGate):
            gate.log_bound.fill_(-0.123456789)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        build_base("llama", dtype=torch.bfloat16), tmp_path, autocast_adapter_dtype=False
    ).eval()
    before = own_tensors(model, "default")
    kinds = ("_quantiles.", "_controller.", "log_bound")
    compared = {key: value.clone() for key, value in before.items() if any(k in key for k in kinds)}
    model.to(torch.bfloat16)
    assert next(model.parameters()).dtype is torch.bfloat16
    after = own_tensors(model, "default")
    for key, value in compared.items():
        assert torch.equal(after[key], value) and after[key].dtype is value.dtype, key
    ids = tokens(64, 60)
    masks = []
    for one in (model, loaded):
        with record_routes(one) as trace, torch.no_grad():
            one(ids)
        masks.append(torch.stack([record.mask for record in trace.values()]))
    assert torch.equal(*masks) and masks[0].any() and not masks[0].all()


def test_an_adapter_has_its_bases_dtype_from_the_start_and_float32_stays() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = get_depth_routed_model(
            build_base("llama", dtype=dtype), autocast_adapter_dtype=False
        )
        model.add_adapter("other", DepthRouteConfig(layers=[1]))
        kept = {own_tensors(model, "other")[key].dtype for key in own_tensors(model, "other")}
        assert kept == {torch.float32, torch.int64}
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {dtype}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saving_what_was_loaded_gives_the_same_bytes(
    make: Callable[..., Any], tmp_path: Path, family: str, gate: str, name: str
) -> None:
    _, base, adapter = make(family, gate)
    again = tmp_path / "again"
    by_peft(base, adapter, name).save_pretrained(again)
    saved = again if name == "default" else again / name
    first, second = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(saved / "adapter_model.safetensors"),
    )
    assert first.keys() == second.keys()
    assert all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key])
        for key in first
    )
    assert not any(
        f".{name}." in key for key in second if name not in ("gate", "routing", "depth_route")
    )
    first_config, second_config = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (adapter, saved)
    )
    assert first_config == second_config


def test_only_adapter_tensors_are_saved(make: Callable[..., Any]) -> None:
    model, _, adapter = make("llama", "jepa")
    saved = load_file(adapter / "adapter_model.safetensors")
    assert all(".routing.depth_route_" in key for key in saved)
    assert saved.keys() == get_peft_model_state_dict(model).keys()
    assert sum("depth_route_target" in key for key in saved) == 1


FRESH_PROCESS = """
import sys
import torch
torch.manual_seed(987)
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
import hf_depthroute
for folder in sys.argv[1:]:
    base = AutoModelForCausalLM.from_pretrained(folder + "/base")
    model = PeftModel.from_pretrained(base, folder + "/adapter")
    torch.set_num_threads(1)
    ids = torch.load(folder + "/ids.pt")
    with torch.no_grad():
        out = {"logits": model(ids).logits.contiguous()}
    out |= {k: v.contiguous() for k, v in model.state_dict().items() if ".routing." in k}
    save_file(out, folder + "/out.safetensors")
"""


def test_another_process_with_another_seed_loads_the_same_model(tmp_path: Path) -> None:
    models = {}
    for family in FAMILY_NAMES:
        for gate in GATES:
            folder = tmp_path / f"{family}-{gate}"
            build_base(family).save_pretrained(folder / "base")
            models[folder] = routed(base_from(folder / "base"), gate, seed=7)
            models[folder].save_pretrained(folder / "adapter")
            torch.save(tokens(3, 12), folder / "ids.pt")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, *map(str, models)], check=True, env=environment
    )
    for folder, model in models.items():
        found = load_file(folder / "out.safetensors")
        assert torch.equal(found.pop("logits"), logits(model))
        expected = {key: value for key, value in model.state_dict().items() if ".routing." in key}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


# Faults: see test_adapter_file.py -----------------------------------------------------------------

LOADERS_ONTO_A_BASE = {
    "PeftModel.from_pretrained": lambda base, adapter: PeftModel.from_pretrained(base, adapter),
    "PeftModel.from_pretrained, low_cpu_mem_usage": lambda base, adapter: PeftModel.from_pretrained(
        base, adapter, low_cpu_mem_usage=True
    ),
    "model.load_adapter": lambda base, adapter: base.load_adapter(adapter),
}


def assert_untouched(base: Any, keys: list[str], expected: torch.Tensor) -> None:
    """`base` computes, is made of and is named as before."""
    assert list(base.state_dict()) == keys
    assert not any(isinstance(module, Routing) for module in base.modules())
    assert not any(hasattr(module, "_depth_route_base") for module in base.modules())
    assert torch.equal(logits(base), expected)


def test_faulty_second_adapter_leaves_the_first_as_it_was(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    _, base, adapter = make("llama", "mlp")
    model = by_peft(base, adapter, "default")
    expected = logits(model)
    bad = shutil.copytree(adapter, tmp_path / "bad")
    path = bad / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.model.layers.2.routing.depth_route_gate.hidden.weight"]
    save_file(tensors, path)
    config = json.loads((bad / "adapter_config.json").read_text()) | {
        "weights_hash": tensors_hash(tensors)
    }
    (bad / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterMismatchError, match=r"tensor .* is missing"):
        model.load_adapter(bad, "second")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)
    model.load_adapter(adapter, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("loader", LOADERS_ONTO_A_BASE)
@pytest.mark.parametrize("other", ["qwen2", "gpt2"])
def test_adapter_of_another_base_is_refused(
    make: Callable[..., Any], other: str, loader: str
) -> None:
    _, _, adapter = make("llama", "mlp")
    base = build_base(other)
    keys, expected = list(base.state_dict()), logits(base)
    with pytest.raises(AdapterMismatchError, match="model_type is 'llama', this model has"):
        LOADERS_ONTO_A_BASE[loader](base, adapter)
    assert_untouched(base, keys, expected)


def test_lora_still_loads_through_transformers_onto_a_routed_model(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    _, base, adapter = make("llama", "mlp")
    lora = peft.get_peft_model(
        base_from(base), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    lora.save_pretrained(tmp_path / "lora")
    model = by_transformers(base, adapter, "depth_route")
    before = logits(model)
    model.load_adapter(tmp_path / "lora", adapter_name="lora")
    assert not torch.equal(logits(model), before)
