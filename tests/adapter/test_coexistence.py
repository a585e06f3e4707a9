"""How a routed model lives with LoRA, with a second routed adapter and with accelerate's hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import compare_versions
from models import (
    DEPTH,
    FAMILY_NAMES,
    GATES,
    build_base,
    build_routed,
    decoder_layers,
    logits,
    make_consequential,
    routed,
    tokens,
)
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes
from hf_depthroute.base.families import find_decoder, find_family
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.stack import routings_of

every_model = pytest.mark.parametrize(
    ("family", "gate"), [(f, g) for f in FAMILY_NAMES for g in GATES]
)
every_family = pytest.mark.parametrize("family", FAMILY_NAMES)
LORA_TARGETS = {"gpt2": ["c_attn"]}


def lora_config(family: str) -> LoraConfig:
    targets = LORA_TARGETS.get(family, ["q_proj"])
    return LoraConfig(
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )


@every_family
def test_name_taken_by_lora_is_refused_with_advice(family: str) -> None:
    model = peft.get_peft_model(build_base(family), lora_config(family))
    expected = logits(model.eval())
    with pytest.raises(
        ConfigError, match=r"'default' is taken by a lora adapter.*adapter_name='router'"
    ):
        get_depth_routed_model(model.base_model.model, DepthRouteConfig())
    assert torch.equal(logits(model), expected)


def attach(model: Any, how: str) -> None:
    """Put a LoRA adapter named "default" on a routed model."""
    config, base = lora_config("llama"), model.get_base_model()
    if how == "get_peft_model":
        peft.get_peft_model(base, config)
    elif how == "around the PeftModel":
        peft.get_peft_model(model, config)
    elif how == "add_adapter":
        base.add_adapter(config, adapter_name="default")
    else:
        peft.inject_adapter_in_model(config, base, adapter_name="default")


@pytest.mark.parametrize(
    "how", ["get_peft_model", "around the PeftModel", "add_adapter", "inject_adapter_in_model"]
)
def test_name_taken_by_the_routed_adapter_is_refused_with_advice(how: str, tmp_path: Path) -> None:
    model = build_routed("llama")
    expected = logits(model)
    with pytest.raises(ValueError, match="default"):
        attach(model, how)
    assert isinstance(model.peft_config["default"], DepthRouteConfig)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits(PeftModel.from_pretrained(build_base("llama"), tmp_path).eval()), expected
    )


def test_refused_name_says_which_to_take() -> None:
    model = build_routed("llama")
    with pytest.raises(
        ConfigError, match=r"'default' is taken by the depth-routed adapter.*adapter_name='tuned'"
    ):
        attach(model, "get_peft_model")
    assert set(
        peft.get_peft_model(model.get_base_model(), lora_config("llama"), "tuned").peft_config
    ) >= {"tuned"}


def test_config_of_another_method_is_a_type_error() -> None:
    base = build_base("llama")
    with pytest.raises(
        TypeError, match=r"takes a DepthRouteConfig, not LoraConfig; peft\.get_peft_model is for"
    ):
        get_depth_routed_model(base, lora_config("llama"))
    assert not hasattr(base, "peft_config")


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
    reached = {
        name.split(".routing")[0]
        for name, _ in lora.named_modules()
        if name.endswith(f"{target}.lora_A")
    }
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
    lora = peft.get_peft_model(
        model.base_model.model, lora_config(family), adapter_name="lora"
    ).eval()
    lora.add_adapter("other", lora_config(family))
    lora.set_adapter("lora")
    with record_routes(lora) as trace:
        first = logits(lora)
    assert list(trace) == [1, 2, 3]
    lora.set_adapter("other")
    with record_routes(lora) as trace:
        assert not torch.equal(logits(lora), first)
    assert list(trace) == [1, 2, 3]
    assert {routing.adapter() for routing in routings_of(lora)} == {"depth_route"}


def training_names(model: nn.Module) -> set[str]:
    """Names of the routers' parameters that train."""
    return {
        f"{routing.layer_index}.{name}"
        for routing in routings_of(model)
        for name, parameter in routing.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_turning_adapters_off_and_on_unfreezes_no_router(family: str, tmp_path: Path) -> None:
    """As a preference trainer does for its reference, with LoRA beside a fitted router."""
    routed(build_base(family)).save_pretrained(tmp_path)
    base = build_base(family)
    loaded = PeftModel.from_pretrained(base, tmp_path, adapter_name="router")
    lora = peft.get_peft_model(base, lora_config(family), adapter_name="tuned")
    for model in (loaded, lora):
        with model.disable_adapter():
            pass
        assert not training_names(base)
    lora.base_model.enable_adapter_layers()
    assert not training_names(base)


def test_turning_an_adapter_off_and_on_leaves_its_frozen_copies_frozen(tmp_path: Path) -> None:
    routed(build_base("llama"), modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(build_base("llama"), tmp_path)
    with model.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())
    trained = PeftModel.from_pretrained(build_base("llama"), tmp_path, is_trainable=True)
    before = [name for name, p in trained.named_parameters() if p.requires_grad]
    with trained.disable_adapter():
        pass
    assert [name for name, p in trained.named_parameters() if p.requires_grad] == before
    assert any("lm_head" in name for name in before)


def test_an_adapter_that_is_added_while_routing_is_off_leaves_a_frozen_one_frozen() -> None:
    model = routed(build_base("llama"))
    for routing in routings_of(model):
        routing.requires_grad_(False)
    with model.disable_adapter():
        model.add_adapter("other", DepthRouteConfig(layers=[1, 2, 3]))
    assert not training_names(model)


def test_turning_an_adapter_off_and_on_leaves_frozen_what_its_user_froze() -> None:
    model = routed(build_base("llama"))
    for routing in routings_of(model):
        routing.depth_route_gate.requires_grad_(False)
    before = training_names(model)
    assert before
    with model.disable_adapter():
        assert not training_names(model)
    assert training_names(model) == before
    with model.disable_adapter():
        model.add_adapter("other", DepthRouteConfig(layers=[1]))
    assert training_names(model) >= before
    with model.disable_adapter():
        model.set_adapter("other")
    assert {name.split(".")[2] for name in training_names(model)} == {"other"}


def lora_with_head() -> tuple[PeftModel, torch.Tensor]:
    """LoRA that has changed its copy of the head, and its logits."""
    config = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    lora = peft.get_peft_model(build_base("llama"), config, adapter_name="tuned").eval()
    with torch.no_grad():
        lora.base_model.model.lm_head.modules_to_save["tuned"].weight.mul_(1.5)
    return lora, logits(lora)


def test_loras_copies_of_base_modules_go_on_below_a_router() -> None:
    lora, expected = lora_with_head()
    head = lora.base_model.model.lm_head.modules_to_save["tuned"].weight
    model = get_depth_routed_model(
        lora.get_base_model(), DepthRouteConfig(budget=1.0), adapter_name="router"
    ).eval()
    assert head.requires_grad and torch.equal(logits(model), expected)
    model.add_adapter("second", DepthRouteConfig(budget=1.0, layers=[0]))
    for name in ("second", "router"):
        model.set_adapter(name)
        assert head.requires_grad and torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)
    assert torch.allclose(logits(lora.merge_and_unload()), expected, atol=1e-5)


def test_loras_copies_of_base_modules_go_on_above_a_router() -> None:
    expected = lora_with_head()[1]
    model = get_depth_routed_model(
        build_base("llama"), DepthRouteConfig(budget=1.0), adapter_name="router"
    ).eval()
    config = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    lora = peft.get_peft_model(model.get_base_model(), config, adapter_name="tuned").eval()
    with torch.no_grad():
        lora.base_model.model.lm_head.modules_to_save["tuned"].weight.mul_(1.5)
    model.set_adapter("router")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ["norm", "score"])
def test_lora_takes_no_copy_of_a_routers_part(name: str, tmp_path: Path) -> None:
    """PEFT matches the ends of names: `norm` is that of a branch, too."""
    model = routed(build_base("llama"), adapter_name="router")
    expected = logits(model)
    config = LoraConfig(
        target_modules=["q_proj"], modules_to_save=[name, "lm_head"], task_type="CAUSAL_LM"
    )
    with pytest.raises(ConfigError, match=rf"modules_to_save: '{name}' also means .*a part of the"):
        peft.get_peft_model(model.get_base_model(), config, adapter_name="tuned")
    config.modules_to_save = ["model.norm"]
    lora = peft.get_peft_model(model.get_base_model(), config, adapter_name="tuned").eval()
    config.modules_to_save = [name]
    with pytest.raises(ConfigError, match=f"modules_to_save: '{name}' also means"):
        lora.add_adapter("second", config)
    assert torch.equal(logits(lora), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits(PeftModel.from_pretrained(build_base("llama"), tmp_path / "router")), expected
    )


def test_a_routers_copies_of_base_modules_are_refused_beside_lora(tmp_path: Path) -> None:
    config = DepthRouteConfig(modules_to_save=["lm_head"])
    lora, expected = lora_with_head()
    with pytest.raises(
        ConfigError, match=r"modules_to_save=\['lm_head'\].* next to a lora adapter"
    ):
        get_depth_routed_model(lora.get_base_model(), config, adapter_name="router")
    assert torch.equal(logits(lora), expected)
    model = routed(build_base("llama"), adapter_name="router", modules_to_save=["lm_head"])
    expected = logits(model)
    with pytest.raises(ConfigError, match=r"modules_to_save=\['lm_head'\].* another method"):
        peft.get_peft_model(model.get_base_model(), lora_config("llama"), adapter_name="tuned")
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path)
    merged = lora.merge_and_unload()
    assert torch.equal(
        logits(get_depth_routed_model(merged, config, adapter_name="router")), logits(merged)
    )


@pytest.mark.parametrize(
    "config", [peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig]
)
@pytest.mark.parametrize("is_routed", [False, True])
def test_prompt_learning_works_as_without_the_package(is_routed: bool, config: Any) -> None:
    """PEFT adds its first adapter while the model is being made, and has no active one yet."""
    base = build_routed("llama").get_base_model() if is_routed else build_base("llama")
    learned = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(base, learned, "learned").eval()
    ids = tokens(2, 6)
    with torch.no_grad(), model.disable_adapter():
        without = model(input_ids=ids).logits
    with torch.no_grad():
        found = model(input_ids=ids).logits[:, -6:]
    assert not torch.equal(found, without)
    model.add_adapter("another", config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="a PeftModel holds adapters of one method"):
        model.add_adapter("routes", DepthRouteConfig())


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


@pytest.mark.parametrize(
    "place",
    [
        "auto",
        pytest.param(
            "disk",
            marks=pytest.mark.skipif(
                compare_versions("accelerate", "<", "1.15"),
                reason="accelerate before 1.15 wants a part in memory",
            ),
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe"])
def test_an_adapter_goes_onto_a_base_that_does_not_fit(
    family: str, place: str, tmp_path: Path
) -> None:
    """`device_map` with too little memory, so layers are on disk;
    by PEFT's path and by transformers'."""
    build_base(family).save_pretrained(tmp_path / "base")
    model = routed(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    expected, ids = logits(model), tokens(2, 5)
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    size = sum(parameter.numel() * 4 for parameter in model.get_base_model().parameters())
    how: dict[str, Any] = {"device_map": {"": "disk"}}
    if place == "auto":
        how = {"device_map": "auto", "max_memory": {"cpu": int(0.6 * size)}}
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", offload_folder=tmp_path / "one", **how
    )
    spread = base.hf_device_map
    assert "disk" in spread.values()
    base_logits = logits(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), text)
    loaded.load_adapter(tmp_path / "adapter", "default")
    assert torch.equal(logits(loaded), expected)
    assert base.hf_device_map is spread
    assert torch.equal(logits(loaded.unload()), base_logits)
    auto = AutoModelForCausalLM.from_pretrained(
        tmp_path / "adapter", offload_folder=tmp_path / "two", **how
    )
    assert torch.equal(logits(auto), expected)


def test_a_base_that_deepspeed_has_split_is_refused() -> None:
    base = build_base("llama")
    # What `deepspeed.zero.Init` leaves.
    decoder_layers(base)[0].post_attention_layernorm.weight.ds_id = 0
    with pytest.raises(ConfigError, match="zero3_init_flag: false"):
        get_depth_routed_model(base, DepthRouteConfig())
