"""How the adapter enters a model and leaves it again, and how it lives with PEFT, accelerate and other adapters."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from models import (
    ATTENTIONS,
    DEPTH,
    FAMILY_NAMES,
    GATES,
    adapter_parts,
    build_base,
    build_routed,
    decoder_layers,
    make_consequential,
    routed,
    tokens,
)
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes
from hf_depthroute.config import ConfigError
from hf_depthroute.families import find_decoder, find_family
from hf_depthroute.layer import Routing
from hf_depthroute.trace import routings

every_model = pytest.mark.parametrize(("family", "gate"), [(f, g) for f in FAMILY_NAMES for g in GATES])
every_family = pytest.mark.parametrize("family", FAMILY_NAMES)
LORA_TARGETS = {"gpt2": ["c_attn"]}


@torch.no_grad()
def logits(model: Any, seed: int = 0) -> torch.Tensor:
    return model(tokens(3, 12, seed)).logits


def lora_config(family: str) -> LoraConfig:
    targets = LORA_TARGETS.get(family, ["q_proj"])
    return LoraConfig(
        target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
    )


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Classes, attribute names, hooks, keys and trainability of every module."""
    modules = [
        (name, type(module), sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    return modules, list(model.state_dict()), [name for name, _ in model.named_parameters()]


@every_family
def test_every_layer_has_the_same_class_under_the_old_name(family: str) -> None:
    base = build_base(family)
    old = type(decoder_layers(base)[0])
    model = get_depth_routed_model(base, DepthRouteConfig(layers=[1, 3]))
    layers = decoder_layers(model)
    assert len({type(layer) for layer in layers}) == 1
    new = type(layers[0])
    assert new is not old and issubclass(new, old)
    assert (new.__name__, new.__module__, new.__qualname__) == (old.__name__, old.__module__, old.__qualname__)
    assert [hasattr(layer, "routing") for layer in layers] == [False, True, False, True]


@every_model
def test_base_keys_and_tensors_do_not_change(family: str, gate: str) -> None:
    base = build_base(family)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    routed(base, gate)
    after = {key: value for key, value in base.state_dict().items() if ".routing." not in key}
    assert list(after) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in after.items())


@every_model
def test_only_adapter_parameters_train(family: str, gate: str) -> None:
    model = build_routed(family, gate)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name for name, _ in model.named_parameters() if ".routing.depth_route_" in name}
    assert trains == {name for name in own if "depth_route_target" not in name}


@pytest.mark.parametrize("attention", ATTENTIONS)
@every_family
def test_hidden_states_and_attentions_are_complete(family: str, attention: str) -> None:
    model = build_routed(family, attention=attention, layers=[0, 2, 3])
    with torch.no_grad():
        out = model(tokens(2, 7), output_hidden_states=True, output_attentions=attention == "eager")
        plain = model(tokens(2, 7)).logits
    assert torch.equal(out.logits, plain)
    assert len(out.hidden_states) == DEPTH + 1
    assert all(state.shape == (2, 7, 32) for state in out.hidden_states)
    assert not any(torch.equal(a, b) for a, b in zip(out.hidden_states, out.hidden_states[1:]))
    if attention == "eager":
        assert [weights.shape for weights in out.attentions] == [(2, 4, 7, 7)] * DEPTH


@every_model
def test_pickle_and_deepcopy_keep_outputs_and_are_independent(family: str, gate: str) -> None:
    model = build_routed(family, gate)
    expected = logits(model)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits(twin), expected)
        assert len({type(layer) for layer in decoder_layers(twin)}) == 1
        with twin.disable_adapter():
            assert not torch.equal(logits(twin), expected)
            assert torch.equal(logits(model), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(logits(model), expected)


@every_model
def test_unload_restores_everything(family: str, gate: str) -> None:
    base = build_base(family)
    trainable = [parameter.requires_grad for parameter in base.parameters()]
    before, expected = fingerprint(base), logits(base)
    model = routed(base, gate)
    assert fingerprint(base) != before
    unloaded = model.unload()
    assert unloaded is base
    assert fingerprint(base) == before
    assert torch.equal(logits(base), expected)
    assert len(trainable) == len(list(base.parameters()))


@every_family
def test_unloaded_model_can_be_routed_again(family: str) -> None:
    model = build_routed(family)
    expected = logits(model)
    assert torch.equal(logits(routed(model.unload())), expected)


@every_model
def test_delete_adapter_leaves_no_weights(family: str, gate: str) -> None:
    model = build_routed(family, gate)
    model.add_adapter("second", DepthRouteConfig(gate=gate, layers=[0, 1]))
    model.delete_adapter("default")
    assert not [key for key in model.state_dict() if ".default." in key]
    assert not any("default" in adapter_parts(holder) for holder in routings(model))
    assert list(model.peft_config) == ["second"]
    model.delete_adapter("second")
    assert not [key for key in model.state_dict() if "depth_route_" in key]


@pytest.mark.parametrize("name", ["gate", "routing", "depth_route", "target", "x"])
@pytest.mark.parametrize("gate", GATES)
def test_awkward_adapter_names_save_and_delete_their_own_weights(gate: str, name: str) -> None:
    model = build_routed("llama", gate)
    own = set(model.state_dict())
    model.add_adapter(name, DepthRouteConfig(gate=gate, layers=[0, 1]))
    model.delete_adapter(name)
    assert set(model.state_dict()) == own


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b", "x" * 65, "ä", "../x"])
def test_bad_adapter_name_is_refused(name: str) -> None:
    base = build_base("llama")
    before = fingerprint(base)
    with pytest.raises(ConfigError, match="adapter name"):
        get_depth_routed_model(base, DepthRouteConfig(), adapter_name=name)
    assert fingerprint(base) == before


@pytest.mark.parametrize("layers", ["last:9", [4], [0, 7]])
def test_layers_outside_the_model_are_refused_and_the_base_is_untouched(layers: str | list[int]) -> None:
    base = build_base("llama")
    before = fingerprint(base)
    with pytest.raises(ConfigError, match="layers="):
        get_depth_routed_model(base, DepthRouteConfig(layers=layers))
    assert fingerprint(base) == before


def test_refused_second_adapter_leaves_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    model = build_routed("llama")
    expected = logits(model)
    with pytest.raises(ConfigError):
        model.add_adapter("second", DepthRouteConfig(layers=[9]))
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)


# Other adapters -----------------------------------------------------------------------------------------------------


@every_family
def test_name_taken_by_lora_is_refused_with_advice(family: str) -> None:
    model = peft.get_peft_model(build_base(family), lora_config(family))
    expected = logits(model.eval())
    with pytest.raises(ConfigError, match=r"'default' is taken by a lora adapter.*adapter_name='depth_route'"):
        get_depth_routed_model(model.base_model.model, DepthRouteConfig())
    assert torch.equal(logits(model), expected)


@every_family
def test_lora_below_is_kept(family: str) -> None:
    lora = peft.get_peft_model(build_base(family), lora_config(family)).eval()
    expected = logits(lora)
    model = routed(lora.base_model.model, adapter_name="depth_route")
    assert not torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)


@every_family
def test_lora_on_top_reaches_routed_layers_and_can_be_merged(family: str) -> None:
    model = routed(build_base(family), adapter_name="depth_route")
    plain = logits(model)
    target = LORA_TARGETS.get(family, ["q_proj"])[0]
    lora = peft.get_peft_model(model.base_model.model, lora_config(family)).eval()
    reached = {name.split(".routing")[0] for name, _ in lora.named_modules() if name.endswith(f"{target}.lora_A")}
    assert len(reached) == DEPTH
    both = logits(lora)
    assert not torch.equal(both, plain)
    merged = lora.merge_and_unload()
    assert (logits(merged) - both).abs().max() < 1e-4
    with record_routes(merged) as trace:
        logits(merged)
    assert list(trace) == [1, 2, 3]


@every_family
def test_switching_lora_does_not_switch_routing_off(family: str) -> None:
    model = routed(build_base(family), adapter_name="depth_route")
    lora = peft.get_peft_model(model.base_model.model, lora_config(family), adapter_name="lora").eval()
    lora.add_adapter("other", lora_config(family))
    lora.set_adapter("lora")
    with record_routes(lora) as trace:
        first = logits(lora)
    assert list(trace) == [1, 2, 3]
    lora.set_adapter("other")
    with record_routes(lora) as trace:
        assert not torch.equal(logits(lora), first)
    assert list(trace) == [1, 2, 3]
    assert {holder.adapter() for holder in routings(lora)} == {"depth_route"}


@every_model
def test_two_adapters_with_different_layers_switch(family: str, gate: str) -> None:
    model = build_routed(family, gate, layers=[1, 2])
    model.add_adapter("second", DepthRouteConfig(gate=gate, layers=[0, 2, 3], seed=3))
    seen = {}
    for name, layers in (("default", [1, 2]), ("second", [0, 2, 3]), ("default", [1, 2])):
        model.set_adapter(name)
        if name == "second":
            make_consequential(model, "second", seed=3)
        with record_routes(model) as trace:
            out = logits(model)
        assert list(trace) == layers
        assert torch.equal(out, seen.setdefault(name, out))
    assert not torch.equal(seen["default"], seen["second"])


def test_one_more_adapter_of_the_same_name_is_refused() -> None:
    model = build_routed("llama")
    with pytest.raises(ValueError, match="default"):
        get_depth_routed_model(model.base_model.model, DepthRouteConfig())


# PEFT's own surface ---------------------------------------------------------------------------------------------------


@every_family
def test_merging_points_to_unload(family: str) -> None:
    model = build_routed(family)
    expected = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"unload\(\)"):
            merge()
    assert torch.equal(logits(model), expected)


@every_model
def test_status_reports_work(family: str, gate: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_routed(family, gate)
    status = model.get_model_status()
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, ["default"], [])
    assert status.available_adapters == ["default"]
    assert [layer.name.rsplit(".", 2)[-2] for layer in model.get_layer_status()] == ["1", "2", "3"]
    with model.disable_adapter():
        assert model.get_model_status().enabled is False
    model.print_trainable_parameters()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"trainable params: {trainable:,}" in capsys.readouterr().out


@every_family
def test_get_peft_model_is_the_same_as_ours(family: str) -> None:
    config = DepthRouteConfig(layers=[1, 2], seed=3, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(build_base(family), copy.deepcopy(config))
    ours = get_depth_routed_model(build_base(family), config)
    assert type(theirs) is type(ours)
    first, second = theirs.state_dict(), ours.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)


# accelerate -----------------------------------------------------------------------------------------------------------


def hooked(base: PreTrainedModel, how: str, folder: Path) -> Any:
    if how == "cpu_offload":
        return cpu_offload(base, execution_device=torch.device("cpu"))
    family = find_family(base)
    names = {id(module): name for name, module in base.named_modules()}
    decoder = find_decoder(base, family)
    first_layer = names[id(getattr(decoder, family.layers)[0])]
    stack = first_layer.rsplit(".", 1)[0]
    device_map: dict[str, str] = {f"{stack}.{i}": "disk" if i == 2 else "cpu" for i in range(DEPTH)}
    for name, module in decoder.named_children():
        if name != family.layers:
            device_map[f"{names[id(module)]}"] = "cpu"
    device_map["lm_head"] = "cpu"
    return dispatch_model(base, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("how", ["cpu_offload", "dispatch_model"])
@every_family
def test_routing_works_over_offloaded_weights(family: str, how: str, tmp_path: Path) -> None:
    expected, base_logits = logits(build_routed(family)), logits(build_base(family))
    saved = tmp_path / "adapter"
    build_routed(family).save_pretrained(saved)
    base = hooked(build_base(family), how, tmp_path / "offload")
    old = type(decoder_layers(base)[1])
    assert torch.equal(logits(base), base_logits)
    model = PeftModel.from_pretrained(base, saved)
    assert torch.equal(logits(model), expected)
    with record_routes(model) as trace:
        logits(model)
    assert list(trace) == [1, 2, 3]
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
    unloaded = model.unload()
    for layer in decoder_layers(unloaded):
        assert type(layer) is old
        if "_old_forward" in vars(layer):
            assert layer._old_forward.__func__ is old.forward
    assert torch.equal(logits(unloaded), base_logits)


@every_family
def test_hooks_added_after_injection_and_removed_after_unload(family: str) -> None:
    base = build_base(family)
    base_logits = logits(base)
    model = routed(base)
    expected = logits(model)
    cpu_offload(base, execution_device=torch.device("cpu"))
    assert torch.equal(logits(model), expected)
    model.unload()
    remove_hook_from_submodules(base)
    assert torch.equal(logits(base), base_logits)


@every_family
def test_hooks_removed_before_injection_or_before_unload(family: str) -> None:
    """accelerate leaves a bound forward on the instance when it removes a hook."""
    expected, base = logits(build_routed(family)), build_base(family)
    base_logits = logits(base)
    cpu_offload(base, execution_device=torch.device("cpu"), state_dict=dict(base.state_dict()))
    remove_hook_from_submodules(base)
    base.load_state_dict(build_base(family).state_dict(), assign=True)
    base.tie_weights()
    model = routed(base)
    assert torch.equal(logits(model), expected)
    for layer in decoder_layers(model):
        add_hook_to_module(layer, ModelHook())
        remove_hook_from_module(layer)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), base_logits)


@every_family
def test_device_map_while_loading(family: str, tmp_path: Path) -> None:
    build_base(family).save_pretrained(tmp_path / "base")
    model = routed(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map={"": "cpu"})
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), logits(model))


@every_model
def test_injection_on_the_meta_device_allocates_nothing(family: str, gate: str) -> None:
    original = build_base(family)
    with torch.device("meta"):
        base = type(original)(original.config)
        model = get_depth_routed_model(base, DepthRouteConfig(gate=gate))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert any(isinstance(module, Routing) for module in model.modules())
