"""`tune_execution`: the fastest executor per layer and shape, and never slower than the base."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build_base, build_routed, make_consequential, tokens
from peft import PeftModel

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes, tune_execution
from hf_depthroute.inference import autotune
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth


def slow(seconds_per_row: float) -> Callable[..., None]:
    def hook(module: Any, args: Any) -> None:
        time.sleep(seconds_per_row * args[0].numel() / args[0].shape[-1])

    return hook


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def model() -> PeftModel:
    return build_routed("llama", "mlp").eval()


def test_where_the_gate_costs_more_than_it_saves_the_base_runs(model: PeftModel) -> None:
    ids = tokens(4, 8)
    before, other = logits(model, ids), logits(model, ids[:, :1])
    with full_depth(model):
        dense = logits(model, ids)
    assert not torch.equal(before, dense)
    for routing in routings_of(model):
        routing.depth_route_gate["default"].register_forward_pre_hook(slow(0.001))
    choices = tune_execution(model, ids, steps=0, repeats=2)
    assert {choice.executor for choice in choices} == {"full"}
    assert all(choice.milliseconds["gathered"] > choice.milliseconds["full"] for choice in choices)
    assert torch.equal(logits(model, ids), dense)
    # A shape that was not measured runs as before, but for the hook, under which no maps join.
    torch.testing.assert_close(logits(model, ids[:, :1]), other, atol=1e-5, rtol=1e-5)
    with record_routes(model) as trace:
        assert torch.equal(logits(model, ids), dense)
    assert set(trace.full_ratio().values()) == {1.0}


def test_steps_that_skip_count_beside_those_that_do_not(
    model: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that skips one token of four: its median step is a full one with a gate in front."""

    def timed(*_: Any) -> Any:
        full = routings_of(model)[0].state.settings.executor == "full"
        for seconds in [1.0] * 4 if full else [1.1, 1.1, 1.1, 0.2]:
            yield from (("decode", routing.layer_index, seconds) for routing in routings_of(model))
        yield from (
            ("prefill", routing.layer_index, 1.0 if full else 2.0) for routing in routings_of(model)
        )

    monkeypatch.setattr(autotune, "_timed", timed)
    choices = tune_execution(model, tokens(1, 8), repeats=2)
    assert {(choice.step, choice.executor) for choice in choices} == {
        ("decode", "gathered"),
        ("prefill", "full"),
    }
    assert {round(choice.milliseconds["gathered"]) for choice in choices} == {875, 2000}


def test_decisions_can_be_kept(model: PeftModel) -> None:
    ids = tokens(4, 8)
    before = logits(model, ids)
    for routing in routings_of(model):
        routing.depth_route_gate["default"].register_forward_pre_hook(slow(0.001))
    choices = tune_execution(model, ids, steps=1, repeats=1, keep_decisions=True)
    assert "full" not in {choice.executor for choice in choices}
    torch.testing.assert_close(logits(model, ids), before, atol=1e-5, rtol=1e-5)


def test_where_skipping_pays_it_is_done(model: PeftModel) -> None:
    """An FFN that takes its time per row: gathering beats computing everything,
    in prefill and in decode."""
    ids = tokens(4, 8)
    before = logits(model, ids)
    for layer in model.base_model.model.model.layers:
        layer.mlp.register_forward_pre_hook(slow(0.002))
    choices = tune_execution(model, ids, steps=3, repeats=2)
    prefill = [choice for choice in choices if choice.step == "prefill"]
    assert {choice.executor for choice in prefill} == {"gathered"}
    assert {choice.shape for choice in choices} == {(4, 8), (4, 1)}
    assert torch.equal(logits(model, ids), before)


def test_another_adapter_runs_as_before(model: PeftModel) -> None:
    ids = tokens(4, 8)
    model.add_adapter("b", DepthRouteConfig(layers=[1, 2, 3], seed=5))
    model.set_adapter("b")
    make_consequential(model, "b", seed=5)
    model.eval()
    before = logits(model, ids)
    model.set_adapter("default")
    own = logits(model, ids)
    for routing in routings_of(model):
        routing.depth_route_gate["default"].register_forward_pre_hook(slow(0.001))
    assert {choice.executor for choice in tune_execution(model, ids, steps=0, repeats=1)} == {
        "full"
    }
    model.set_adapter("b")
    assert torch.equal(logits(model, ids), before)
    tune_execution(model, ids, steps=0, repeats=1, keep_decisions=True)
    model.set_adapter("default")
    assert not torch.equal(logits(model, ids), own)  # its own choice is still there
    model.delete_adapter("default")
    assert all({key[0] for key in routing.tuned} == {"b"} for routing in routings_of(model))


def test_padded_prompts_are_timed(model: PeftModel) -> None:
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, :3] = 0
    choices = tune_execution(model, tokens(4, 8), mask, steps=2, repeats=1)
    assert len(choices) == 2 * len(routings_of(model))


@pytest.mark.parametrize("fields", [{"granularity": "sequence"}, {"gate": "exit"}])
def test_decisions_that_last_for_a_generation_are_refused(fields: dict[str, Any]) -> None:
    base = build_base("llama")
    model = get_depth_routed_model(base, DepthRouteConfig(layers="all", target="block", **fields))
    with pytest.raises(ValueError, match="hold through a generation"):
        tune_execution(model, tokens(2, 4))


def test_the_floor_is_a_share(model: PeftModel) -> None:
    with pytest.raises(ValueError, match="floor"):
        tune_execution(model, tokens(2, 4), floor=1.5)
