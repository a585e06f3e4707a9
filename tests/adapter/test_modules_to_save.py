"""Base modules inside routed layers of which an adapter has copies of its own."""

from __future__ import annotations

import pytest
import torch
from models import build_base, logits, routed, tokens
from peft import LoraConfig, get_peft_model
from peft.utils.other import ModulesToSaveWrapper

from hf_depthroute.config.adapter import ConfigError, DepthRouteConfig


@pytest.mark.parametrize(
    ("family", "target", "name"),
    [
        ("llama", "attention", "self_attn"),
        ("llama", "ffn", "mlp"),
        ("gpt2", "block", "h.1.attn"),
        ("glm", "attention", "self_attn"),  # rotates by the model's own function
    ],
)
def test_a_routed_sublayer_may_be_a_copy(family: str, target: str, name: str) -> None:
    """Prompts and generated tokens are those of a base that has the copy's weights."""
    fields = {"target": target, "layers": [1, 2]}
    copied = routed(build_base(family), modules_to_save=[name], **fields)
    other = routed(build_base(family), **fields)
    with torch.no_grad():
        for path, wrapper in copied.get_base_model().named_modules():
            if isinstance(wrapper, ModulesToSaveWrapper):
                own = other.get_base_model().get_submodule(path)
                for module in (wrapper.modules_to_save["default"], own):
                    for parameter in module.parameters():
                        parameter.mul_(1.5)
        assert torch.equal(logits(copied), logits(other))
        steps = []
        for model in (copied, other):
            cache = model(tokens(1, 6), use_cache=True).past_key_values
            steps.append(model(tokens(1, 1), past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(*steps)
    with copied.disable_adapter():
        assert torch.equal(logits(copied), logits(build_base(family)))


@pytest.mark.parametrize("name", ["mlp", "layers.2.post_attention_layernorm"])
def test_what_a_branch_of_neurons_reads_is_not_copied(name: str) -> None:
    base = build_base("llama")
    before = logits(base)
    with pytest.raises(ConfigError, match=f"modules_to_save: '{name}' means .*branch='neurons'"):
        routed(base, branch="neurons", modules_to_save=[name])
    assert torch.equal(logits(base), before)
    routed(base, branch="neurons", modules_to_save=["up_proj", "input_layernorm"])
    with pytest.raises(ConfigError, match=f"modules_to_save: '{name}' means .*branch='neurons'"):
        get_peft_model(
            routed(build_base("llama"), branch="neurons").get_base_model(),
            LoraConfig(target_modules=["q_proj"], modules_to_save=[name]),
            adapter_name="lora",
        )


def test_a_copy_inside_of_another_is_refused() -> None:
    base = build_base("gpt2")
    with pytest.raises(ConfigError, match=r"c_attn is a part of .*attn, which is copied too"):
        routed(base, modules_to_save=["attn"])
    routed(base, modules_to_save=["h.0.attn"])


@pytest.mark.parametrize("names", [("self_attn", "q_proj"), ("q_proj", "self_attn")])
def test_a_copy_inside_of_another_adapters_is_refused(names: tuple[str, str]) -> None:
    first, second = names
    model = routed(build_base("llama"), modules_to_save=[first])
    own = model.peft_config["default"].to_dict() | {"modules_to_save": [second]}
    with pytest.raises(ConfigError, match=r"q_proj is a part of .*self_attn, which is copied too"):
        model.add_adapter("other", DepthRouteConfig(**own))
    model.add_adapter("other", DepthRouteConfig(**(own | {"modules_to_save": [first]})))


def test_transformers_switches_to_an_adapter_without_copies() -> None:
    """There the base's own module runs, and then the copy again."""
    model = build_base("llama")
    with torch.no_grad():
        model.add_adapter(DepthRouteConfig(layers=[1], modules_to_save=["lm_head"]), "copies")
        model.lm_head.modules_to_save["copies"].weight.mul_(2)
        doubled = logits(model)
        model.add_adapter(DepthRouteConfig(layers=[1]), "plain")
        assert torch.equal(2 * logits(model), doubled)
        model.set_adapter("copies")
        assert torch.equal(logits(model), doubled)
    assert model.lm_head.modules_to_save["copies"].weight.requires_grad
