"""What inference keeps between its steps (cast weights, plans) never outlives what it was made from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import GATES, build_routed, tokens
from peft import PeftModel

from hf_depthroute import calibrate, record_routes, set_budget
from hf_depthroute.execution import step_weights
from hf_depthroute.parts.branches import MixedLinear
from hf_depthroute.parts.gates import JEPAGate
from hf_depthroute.routing.trace import routings


@pytest.fixture(params=GATES)
def model(request: pytest.FixtureRequest) -> PeftModel:
    """A bfloat16 base with float32 adapter weights, as PEFT makes them."""
    model = build_routed("llama", request.param)
    adapter = {name for name, p in model.named_parameters() if "depth_route" in name}
    for name, parameter in model.named_parameters():
        if name not in adapter:
            parameter.data = parameter.data.bfloat16()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a prompt, and of decoding steps of one and two sequences."""
    return torch.cat([model(input_ids=tokens(*shape)).logits.flatten() for shape in ((2, 8), (1, 1), (2, 1))])


def fresh(model: PeftModel) -> torch.Tensor:
    """The logits of a copy, which starts with nothing kept."""
    return logits(copy.deepcopy(model))


def kept(model: PeftModel) -> int:
    return sum(len(m._derived) for m in model.modules() if isinstance(m, MixedLinear | JEPAGate))


def test_steps_with_kept_weights_equal_steps_that_cast(model: PeftModel) -> None:
    first = logits(model)
    assert kept(model) > 0
    assert torch.equal(logits(model), first)
    with torch.enable_grad():  # keeps nothing
        prompt = model(input_ids=tokens(2, 8)).logits.flatten()
    assert torch.equal(prompt, first[: len(prompt)])


def test_changed_weights_are_cast_again(model: PeftModel) -> None:
    before = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "depth_route" in name:
                parameter.mul_(-1.5)
    after = logits(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(model))


def test_weights_written_behind_the_back_count_after_eval(model: PeftModel) -> None:
    before = logits(model)
    for name, parameter in model.named_parameters():
        if "depth_route" in name:
            parameter.data.copy_(-1.5 * parameter.data)
    model.eval()
    assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), fresh(model))


def test_copies_and_pickles_carry_nothing_kept(model: PeftModel) -> None:
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kept(other) == 0
        assert torch.equal(logits(other), expected)


def test_weights_made_in_inference_mode_are_never_kept() -> None:
    with torch.inference_mode():
        linear = MixedLinear(4, 4).eval()
        x = torch.randn(2, 4).bfloat16()
        linear(x)
        linear.weight.zero_()
        linear.bias.zero_()
        assert linear(x).abs().sum() == 0
    assert not linear._derived


def test_a_kept_plan_follows_budget_threshold_and_table(model: PeftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Joint maps round in another way than the recorded pass.
    monkeypatch.setattr(step_weights, "joint_maps", lambda *parts: None)

    def share() -> float:
        with record_routes(model) as trace:
            recorded = logits(model)
        assert torch.equal(recorded, logits(model))  # with a recorder no plan is kept: both have to agree
        return sum(trace.full_ratio().values())

    calibrate(model, [{"input_ids": tokens(8, 16)}], budget=0.5)
    half = share()
    set_budget(model, 0.2)
    fifth = share()
    assert fifth < half
    config = routings(model)[0].config("default")
    config.threshold = -torch.inf
    assert share() == len(routings(model))
    config.threshold = None
    assert share() == fifth
    for holder in routings(model):
        holder.active_quantiles().set(torch.full_like(holder.active_quantiles().values, torch.inf))
    assert share() == 0
