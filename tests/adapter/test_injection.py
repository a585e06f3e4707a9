"""How the adapter enters a model and leaves it again, and PEFT's own surface."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import (
    ATTENTIONS,
    COVERING,
    DEPTH,
    FAMILY_NAMES,
    GATES,
    KINDS,
    adapter_parts,
    build_base,
    build_routed,
    decoder_layers,
    logits,
    routed,
    tokens,
)

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing import routing
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of

every_model = pytest.mark.parametrize(("family", "kind"), COVERING)
every_family = pytest.mark.parametrize("family", FAMILY_NAMES)


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Classes, attribute names, hooks, keys and trainability of every module."""
    modules = [
        (
            name,
            type(module),
            sorted(vars(module)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
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
    assert (new.__name__, new.__module__, new.__qualname__) == (
        old.__name__,
        old.__module__,
        old.__qualname__,
    )
    assert [hasattr(layer, "routing") for layer in layers] == [False, True, False, True]


@every_model
def test_base_keys_and_tensors_do_not_change(family: str, kind: str) -> None:
    base = build_base(family)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    routed(base, kind)
    after = {key: value for key, value in base.state_dict().items() if ".routing." not in key}
    assert list(after) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in after.items())


@every_model
def test_only_adapter_parameters_train(family: str, kind: str) -> None:
    model = build_routed(family, kind)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name for name, _ in model.named_parameters() if ".routing.depth_route_" in name}
    assert trains == {name for name in own if "depth_route_target" not in name}


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@every_family
def test_hidden_states_and_attentions_are_complete(family: str, attention: str, kind: str) -> None:
    model = build_routed(family, kind, attention, layers=[0, 2, 3])
    with torch.no_grad():
        out = model(tokens(2, 7), output_hidden_states=True, output_attentions=attention == "eager")
        plain = model(tokens(2, 7)).logits
    assert (out.logits - plain).abs().max() < (1e-12 if kind == "mlp" else 1e-5)
    assert len(out.hidden_states) == DEPTH + 1
    assert all(state.shape == (2, 7, 32) for state in out.hidden_states)
    assert not any(torch.equal(a, b) for a, b in zip(out.hidden_states, out.hidden_states[1:]))
    if attention == "eager":
        assert [weights.shape for weights in out.attentions] == [(2, 4, 7, 7)] * DEPTH


@every_model
def test_pickle_and_deepcopy_keep_outputs_and_are_independent(family: str, kind: str) -> None:
    model = build_routed(family, kind)
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
def test_unload_restores_everything(family: str, kind: str) -> None:
    base = build_base(family)
    trainable = [parameter.requires_grad for parameter in base.parameters()]
    before, expected = fingerprint(base), logits(base)
    model = routed(base, kind)
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
def test_delete_adapter_leaves_no_weights(family: str, kind: str) -> None:
    model = build_routed(family, kind)
    model.add_adapter("second", DepthRouteConfig(**KINDS[kind], layers=[0, 1]))
    model.delete_adapter("default")
    assert not [key for key in model.state_dict() if ".default." in key]
    assert not any("default" in adapter_parts(routing) for routing in routings_of(model))
    assert list(model.peft_config) == ["second"]
    model.delete_adapter("second")
    assert not [key for key in model.state_dict() if "depth_route_" in key]


def test_in_the_place_of_a_deleted_adapter_the_first_that_is_left_routes_all_its_layers() -> None:
    model: Any = routed(build_base("llama"), layers=[1, 2])
    own = model.peft_config["default"].to_dict()
    for name, layers in ("second", [2, 3]), ("third", [0, 1]):
        model.add_adapter(name, DepthRouteConfig(**own | {"layers": layers, "branch": "none"}))
    model.set_adapter("second")
    expected = logits(model)
    model.set_adapter("default")
    with pytest.warns(UserWarning, match="Setting active adapter to second") as told:
        model.delete_adapter("default")
    assert len([each for each in told if "Setting active" in str(each.message)]) == 1
    assert model.active_adapter == "second" and model.active_peft_config.layers == [2, 3]
    assert torch.equal(logits(model), expected)


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
def test_layers_outside_the_model_are_refused_and_the_base_is_untouched(
    layers: str | list[int],
) -> None:
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


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("part", ["LowRankBranch", "ScoreQuantiles"])
def test_an_injection_that_fails_half_way_is_undone(
    part: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build_base("llama")
    model: Any = routed(base, adapter_name="first", layers=[0, 2]) if beside else base
    trains = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    before, expected = fingerprint(model), logits(model)
    config, make, made = DepthRouteConfig(layers=[1, 2, 3]), getattr(routing, part), []

    def fail_in_the_second_layer(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise RuntimeError("out of memory")
        return make(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(routing, part, fail_in_the_second_layer)
        get_depth_routed_model(base, config, adapter_name="second")
    assert torch.equal(logits(model), expected)
    assert not any(".second." in name for name, _ in model.named_parameters())
    assert [
        (name, parameter.requires_grad) for name, parameter in model.named_parameters()
    ] == trains
    if beside:
        assert list(model.peft_config) == ["first"] and model.active_adapters == ["first"]
    else:
        assert fingerprint(model) == before
    get_depth_routed_model(base, config, adapter_name="second")


def test_copies_that_do_not_fit_into_memory_undo_an_injection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = build_base("llama")
    before = fingerprint(base)
    monkeypatch.setattr("hf_depthroute.adapter.tuner.copy_modules", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get_depth_routed_model(base, DepthRouteConfig(modules_to_save=["lm_head"]))
    assert fingerprint(base) == before
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_a_deleted_adapter_leaves_no_empty_routing_to_transformers(tmp_path: Path) -> None:
    base = build_base("llama")
    base.add_adapter(DepthRouteConfig(layers=[0, 1]), "first")
    base.delete_adapter("first")
    base.add_adapter(DepthRouteConfig(layers=[2, 3]), "second")
    assert base.active_adapters() == ["second"]
    base.save_pretrained(tmp_path)


@every_family
def test_merging_points_to_unload(family: str) -> None:
    model = build_routed(family)
    expected = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"unload\(\)"):
            merge()
    assert torch.equal(logits(model), expected)


@every_model
def test_status_reports_work(family: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_routed(family, kind)
    status = model.get_model_status()
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (
        True,
        ["default"],
        [],
    )
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


@every_model
def test_injection_on_the_meta_device_allocates_nothing(family: str, kind: str) -> None:
    original = build_base(family)
    with torch.device("meta"):
        base = type(original)(original.config)
        model = get_depth_routed_model(base, DepthRouteConfig(**KINDS[kind]))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert any(isinstance(module, Routing) for module in model.modules())
