"""`gate="sinks"`: tokens with a stream far larger than the others' run in full,
and all others skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, tokens
from peft import PeftModel
from protocol import gap

from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model, record_routes
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.parts.baseline_gates import SinkGate
from hf_depthroute.routing.stack import routings_of, state_of


def build(target: str = "ffn", **fields: Any) -> Any:
    """A model in which about half of the tokens count as sinks."""
    model = build_routed("llama", gate="sinks", target=target, layers=[1, 2], **fields)
    for routing in routings_of(model):
        with torch.no_grad(), record_routes(model) as trace:
            model(tokens(2, 12, seed=3))
        gate: Any = routing.depth_route_gate["default"]
        gate.log_bound += trace[routing.layer_index].scores.median()
    return model


@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
@pytest.mark.parametrize("executor", ["gathered", "rows", "auto"])
def test_every_way_to_run_gives_the_same(target: str, executor: str) -> None:
    model, ids = build(target), tokens(2, 12, seed=3)
    with torch.no_grad(), state_of(model).override(executor="masked"):
        with record_routes(model) as trace:
            wanted = model(ids).logits
        assert all(0 < ratio < 1 for ratio in trace.full_ratio().values())
        with state_of(model).override(executor=executor):
            assert gap(model(ids).logits, wanted) < 1e-4
            past, steps = None, []
            for position in range(ids.shape[1]):
                out = model(ids[:, position : position + 1], past_key_values=past, use_cache=True)
                past = out.past_key_values
                steps.append(out.logits)
            assert gap(torch.cat(steps, 1), wanted) < 1e-4


def test_the_bound_lies_between_the_sinks_and_the_others() -> None:
    stream = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    gate = SinkGate(8, None)
    gate.set_bound(stream)
    assert (gate(stream)["scores"] < 0).all() and float(gate.log_bound) > 60  # there is no sink
    stream[[3, 20]] *= 100
    gate.set_bound(stream)
    found = gate(stream)["scores"] >= 0
    assert found.nonzero().squeeze(1).tolist() == [3, 20]
    sizes = stream.square().mean(1).sqrt()
    bound = gate.log_bound.exp()
    assert sizes[~found].max() < bound / 3 and sizes[found].min() > 3 * bound


def test_the_bound_is_saved_and_nothing_of_the_gate_trains(tmp_path: Path) -> None:
    model = build("block")
    assert not [
        n for n, p in model.named_parameters() if p.requires_grad and "depth_route_gate" in n
    ]
    model.save_pretrained(str(tmp_path))
    loaded: Any = PeftModel.from_pretrained(build_base("llama"), str(tmp_path)).eval()
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_no_budget_says_how_many_run_in_full() -> None:
    with pytest.raises(ValueError, match="follows no budget"):
        calibrate(build(), {"input_ids": tokens(2, 12)})


@pytest.mark.parametrize(
    "fields", [{"target": "experts"}, {"granularity": "sequence"}, {"selection": "topk"}]
)
def test_what_it_cannot_decide_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DepthRouteConfig(gate="sinks", **fields)


def test_a_model_without_sinks_skips_every_token() -> None:
    model = get_depth_routed_model(
        build_base("llama"), DepthRouteConfig(gate="sinks", layers=[1])
    ).eval()
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(2, 12))
    assert not trace[1].mask.any()
