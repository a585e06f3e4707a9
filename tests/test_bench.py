"""The benchmark's bookkeeping. Times themselves are not tested."""

import json

import pytest
import torch
from models import build_base

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench import SHAPES, _decoder, _prefilled, bench, dense_view, random_model
from hf_depthroute.calibration import active_routings
from hf_depthroute.trace import count_routes, record_routes


@pytest.fixture(scope="module")
def measured():
    base = build_base("llama")
    view = dense_view(base)
    model = get_depth_routed_model(base, DepthRouteConfig(layers="last:2", budget=0.7))
    table = active_routings(model)[0].active_quantiles().values.clone()
    result = bench(model, base=view, budgets=[0.5, 0.25], batch=2, length=16, decode_steps=2, repeats=2)
    return model, table, result


def test_a_dense_view_shares_every_tensor_and_is_not_routed():
    base = build_base("gpt2")
    view = dense_view(base)
    get_depth_routed_model(base, DepthRouteConfig())
    ours, theirs = dict(base.named_parameters()), dict(view.named_parameters())
    assert all(theirs[name] is ours[name] for name in theirs)
    assert not any("routing" in name for name, _ in view.named_modules())


def test_results_are_json_with_both_parts(measured):
    _, _, result = measured
    assert json.loads(json.dumps(result)) == result
    assert set(result["prefill"]["budgets"]) == set(result["decode"]["budgets"]) == {"0.5", "0.25"}
    assert result["machine"]["torch"] == torch.__version__


def test_prefill_runs_the_share_that_was_asked_for(measured):
    _, _, result = measured
    for budget, row in result["prefill"]["budgets"].items():
        assert row["full_ratio"] == pytest.approx(float(budget), abs=0.1)


def test_decode_shares_are_counted_over_all_steps(measured):
    model, _, _ = measured
    prompt = torch.randint(0, 64, (1, 12))
    state = _prefilled(prompt)(model)
    steps = []
    hook = model.get_base_model().register_forward_hook(lambda *_: steps.append(trace.full_ratio()))
    with torch.no_grad(), record_routes(model) as trace, count_routes(model) as counter:
        _decoder(6)(state)
    hook.remove()
    assert len(steps) == 6
    for layer, share in counter.full_ratio().items():
        assert share == pytest.approx(sum(step[layer] for step in steps) / 6)


def test_eta_follows_from_the_reported_ratio_and_flops(measured):
    _, _, result = measured
    for row in result["prefill"]["budgets"].values():
        saved, ideally = 1 - row["ratio"], 1 - row["flops_routed_over_dense"]
        assert row["eta"] == pytest.approx(saved / ideally, rel=2e-3, abs=0.01)  # the report is rounded
        assert row["speedup"] == pytest.approx(1 / row["ratio"], abs=0.001)


def test_budget_and_thresholds_are_restored(measured):
    model, table, _ = measured
    holder = active_routings(model)[0]
    assert holder.active_config().budget == 0.7
    assert torch.equal(holder.active_quantiles().values, table)


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(SHAPES)):
        random_model("gpt-5")
