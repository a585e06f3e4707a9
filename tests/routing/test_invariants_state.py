"""Invariants 1, 2 and 17: the base model comes back bit for bit,
and adapters do not disturb each other."""

from __future__ import annotations

import functools

import pytest
import torch
from models import MODELS, build_base, build_routed, logits, make_consequential
from peft import PeftModel

from hf_depthroute import DepthRouteConfig, record_routes, replay_routes, set_budget
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.state import RunSettings

pytestmark = pytest.mark.parametrize(("family", "kind"), MODELS)


@functools.cache
def logits_of_base(family: str) -> torch.Tensor:
    return logits(build_base(family))


def pair(family: str, kind: str, **fields: object) -> tuple[PeftModel, torch.Tensor, torch.Tensor]:
    """A routed model, the base's logits and the routed logits; they differ."""
    expected = logits_of_base(family)
    model = build_routed(family, kind, **fields)
    changed = logits(model)
    assert (changed - expected).abs().max() > 0.1
    return model, expected, changed


def test_disabled_adapter_equals_base(family: str, kind: str) -> None:
    model, base_logits, routed_logits = pair(family, kind)
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
    assert torch.equal(logits(model), routed_logits)


def test_state_is_restored_after_an_exception(family: str, kind: str) -> None:
    model, _, routed_logits = pair(family, kind)
    with record_routes(model) as trace:
        logits(model, seed=1)
    with pytest.raises(KeyboardInterrupt), model.disable_adapter():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), replay_routes(model, trace):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), record_routes(model):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), use_selection(model, "topk"):
        raise KeyboardInterrupt
    assert torch.equal(logits(model), routed_logits)
    for routing in routings_of(model):
        assert routing.state.settings == RunSettings()


def test_unloaded_model_equals_base(family: str, kind: str) -> None:
    model, base_logits, _ = pair(family, kind)
    assert torch.equal(logits(model.unload()), base_logits)


def test_deleted_adapter_equals_base(family: str, kind: str) -> None:
    model, base_logits, _ = pair(family, kind)
    model.delete_adapter("default")
    assert torch.equal(logits(model.base_model.model), base_logits)


def test_full_budget_equals_base(family: str, kind: str) -> None:
    model, base_logits, _ = pair(family, kind)
    set_budget(model, 1.0)
    assert torch.equal(logits(model), base_logits)


def test_full_budget_equals_base_in_training_mode(family: str, kind: str) -> None:
    model, base_logits, _ = pair(family, kind)
    set_budget(model, 1.0)
    assert torch.equal(logits(model.train()), base_logits)


def test_full_budget_without_a_branch_equals_base(family: str, kind: str) -> None:
    model, base_logits, _ = pair(family, kind, branch="none")
    set_budget(model, 1.0)
    assert torch.equal(logits(model), base_logits)


def test_recording_changes_no_output(family: str, kind: str) -> None:
    model, _, routed_logits = pair(family, kind)
    with record_routes(model):
        assert torch.equal(logits(model), routed_logits)


def test_switching_adapters_back_restores_the_first(family: str, kind: str) -> None:
    model, base_logits, first_logits = pair(family, kind)
    other = DepthRouteConfig(gate="mlp" if kind == "jepa" else "jepa", layers=[0, 3], seed=5)
    model.add_adapter("other", other)
    assert torch.equal(logits(model), first_logits)
    model.set_adapter("other")
    make_consequential(model, "other", seed=5)
    other_logits = logits(model)
    assert not torch.equal(other_logits, first_logits)
    assert not torch.equal(other_logits, base_logits)
    model.set_adapter("default")
    assert torch.equal(logits(model), first_logits)
    model.set_adapter("other")
    assert torch.equal(logits(model), other_logits)
    model.delete_adapter("default")
    assert torch.equal(logits(model), other_logits)
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
