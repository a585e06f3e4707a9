"""Where the decoder of a model is, and which of its layers are routed: found once, at injection."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build_base, build_routed, logits, routed, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.base import stack as stack_module
from hf_depthroute.base.stack import kept_stack, stack_of
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.drafting import draft_view
from hf_depthroute.routing.stack import RoutedStack, routings_of
from hf_depthroute.routing.trace import full_depth


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that a decoder was looked for in."""
    searched: list[nn.Module] = []
    search = stack_module.find_decoder

    def looked(model: nn.Module, family: Any) -> nn.Module:
        searched.append(model)
        return search(model, family)

    monkeypatch.setattr(stack_module, "find_decoder", looked)
    return searched


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "falcon"])
def test_an_injection_looks_for_the_decoder_once_and_nothing_after_it_does(
    family: str, found: list[nn.Module]
) -> None:
    model: Any = get_depth_routed_model(build_base(family), DepthRouteConfig(layers=[0, 2])).eval()
    assert len(found) == 1
    calibrate(model, [{"input_ids": tokens(2, 16)}])
    set_budget(model, 0.75)
    with record_routes(model), full_depth(model):
        model(tokens(2, 8))
    model.generate(tokens(1, 4), max_new_tokens=2)
    assert [routing.layer_index for routing in routings_of(model)] == [0, 2]
    assert len(found) == 1


def test_the_wrapper_the_base_and_the_decoder_give_one_answer() -> None:
    model: Any = build_routed("llama")
    answers = {
        id(stack_of(module))
        for module in (model, model.base_model, model.get_base_model(), model.model.model)
    }
    assert len(answers) == 1
    assert stack_of(model).layers is model.model.model.layers


def test_a_second_adapter_adds_its_layers_and_shares_the_settings() -> None:
    model: Any = build_routed("llama", layers=[1])
    state = routings_of(model)[0].state
    model.add_adapter("other", DepthRouteConfig(layers=[3]))
    assert [routing.layer_index for routing in routings_of(model)] == [1, 3]
    assert all(routing.state is state for routing in routings_of(model))


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_of_a_model_has_its_own(copied: Callable[[Any], Any]) -> None:
    model = build_routed("llama")
    other = copied(model)
    assert set(routings_of(other)).isdisjoint(routings_of(model))
    assert set(routings_of(other)) <= set(other.modules())
    assert stack_of(other).decoder in set(other.modules())
    assert routings_of(other)[0].state is not routings_of(model)[0].state
    assert torch.equal(logits(other), logits(model))


def test_an_injection_that_is_refused_leaves_nothing_behind() -> None:
    base: Any = build_base("llama")
    with pytest.raises(ConfigError, match="layers"):
        get_depth_routed_model(base, DepthRouteConfig(layers=[99]))
    assert kept_stack(base) is None


def test_unloading_leaves_nothing_behind() -> None:
    base: Any = build_base("llama")
    before = set(base.model.__dict__)
    routed(base).unload()
    assert kept_stack(base) is None
    assert set(base.model.__dict__) == before
    with pytest.raises(ValueError, match="no routed layer"):
        routings_of(base)


def test_a_draft_without_some_layers_knows_which_are_left() -> None:
    model = build_routed("llama")
    draft = draft_view(model, drop=[1])
    kept = kept_stack(draft)
    assert isinstance(kept, RoutedStack)
    assert [routing.layer_index for routing in kept.routed] == [1, 2]  # numbered anew
    assert len(kept.layers) == 3
    assert [routing.layer_index for routing in routings_of(model)] == [1, 2, 3]


def test_layers_that_another_library_wraps_are_still_known_to_be_routed() -> None:
    """As FSDP and activation checkpointing wrap them:
    what the stack hands down depends on the adapter's settings."""
    model: Any = build_routed("llama", phases="prefill")
    alone = logits(model)
    layers = stack_of(model).layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    assert torch.equal(logits(model), alone)
    assert len(routings_of(model)) == 3
