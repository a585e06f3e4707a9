"""The choices of `"auto"` on a GPU: gathering or row kernels for a prompt's FFNs,
and steps that run in full."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import build_routed, decoder_layers, tokens
from places import ROOT
from request_kinds import build
from transformers import DynamicCache, StaticCache

from hf_depthroute import record_routes, tune_execution, use_budget
from hf_depthroute.adapter import injection
from hf_depthroute.execution import costs, executors
from hf_depthroute.execution.costs import STEP_SECONDS, GatherCosts, gather_costs_of
from hf_depthroute.inference import autotune
from hf_depthroute.parts.targets import TARGETS
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth

SPEED = ROOT / "recipes" / "speed"


def test_the_defaults_are_what_the_committed_results_say() -> None:
    result = json.loads((SPEED / "row_ops.json").read_text())
    of_8192 = [row for row in result["operations"] if row["operation"] == "swiglu_rows, 8192 rows"]
    half = next(row for row in of_8192 if row["share"] == 0.5)
    flops = 6 * 4096 * 4096 * 14336
    # Both paths: gathered, and added to the stream.
    moved = 10 * 4096 * 4096 * 2 / (result["peaks"]["gb_per_s"] * 1e9)
    saved = (half["ms"] - half["dense_ms"] / 2) * 1e-3 - moved
    assert GatherCosts().saved == pytest.approx(saved / flops, rel=0.01)
    decode = json.loads((SPEED / "h100.json").read_text())["measurements"][1]
    eager = decode["dense_modes"]["eager"]
    routed = decode["budgets"]["0.5"]["modes"]["eager"] * decode["dense_ms"]
    added = (routed - eager) / len(decode["setting"]["routed_layers"])
    assert pytest.approx(added * 1e-3, rel=0.01) == STEP_SECONDS


def call_of(batch: int, length: int, sizes: tuple[int, int], **changes: Any) -> Any:
    """A call of a routed FFN of these sizes, width and FFN width, on a GPU that is not there."""
    stream = SimpleNamespace(is_cuda=True, shape=(batch, length, sizes[0]))
    plan: dict[str, Any] = {
        "executor": "auto",
        "target": TARGETS["ffn"],
        "budget": 0.5,
        "everything": False,
    }
    state = SimpleNamespace(gather_costs=changes.pop("measured", None))
    return SimpleNamespace(
        stream=stream,
        plan=SimpleNamespace(**plan | changes),
        routing=SimpleNamespace(width=sizes[0], ffn_width=sizes[1], state=state),
        target=SimpleNamespace(supports_rows=lambda call: True, hides=lambda call: False),
        needs_both_paths=False,
    )


LLAMA_8B, QWEN_HALF_B = (4096, 14336), (896, 4864)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (call_of(4, 2048, LLAMA_8B), "gathered"),
        (call_of(1, 2048, LLAMA_8B), "gathered"),
        (call_of(1, 512, LLAMA_8B), "rows"),
        (call_of(64, 1, LLAMA_8B), "rows"),
        (call_of(4, 2048, QWEN_HALF_B), "rows"),
        (call_of(8, 4096, QWEN_HALF_B), "gathered"),
        (call_of(1, 2048, LLAMA_8B, budget=0.1), "rows"),
        (call_of(4, 2048, LLAMA_8B, executor="rows"), "rows"),
        (call_of(4, 2048, LLAMA_8B, target=TARGETS["block"]), "rows"),
        (call_of(4, 2048, LLAMA_8B, measured=GatherCosts(wait=1.0)), "rows"),
    ],
)
def test_rows_and_width_choose_between_gathering_and_row_kernels(
    call: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "skips_sequences", lambda call: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert executors.executor_of(call) is executors.EXECUTORS[name]


def test_row_kernels_run_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "skips_sequences", lambda call: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert executors.executor_of(call_of(4, 2048, LLAMA_8B)) is executors.EXECUTORS["rows"]


def test_two_measurements_make_a_cost_model() -> None:
    measured = gather_costs_of((1e9, -3e-4), (9e9, 5e-4))
    assert measured is not None
    assert measured.saved == pytest.approx(1e-13)
    assert measured.wait == pytest.approx(4e-4)
    assert not measured.pays(3.9e9)
    assert measured.pays(4.1e9)
    assert gather_costs_of((1e9, 3e-4), (9e9, 2e-4)) is None
    assert gather_costs_of((1e9, 3e-4), (1e9, 4e-4)) is None


def test_tuning_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token costs 2 seconds a layer by row kernels and 1 gathered,
    which takes 12 seconds more: 12 tokens."""
    model = build_routed("llama", "mlp").eval()

    def timed(prompts: Any, steps: int) -> Any:
        count = prompts.input_ids.numel()
        seconds = {"full": 1e3, "rows": 2.0 * count, "gathered": 12.0 + count}
        each = seconds[routings_of(model)[0].state.settings.executor]
        yield from (("prefill", routing.layer_index, each) for routing in routings_of(model))

    monkeypatch.setattr(autotune, "_timed", timed)
    tune_execution(model, tokens(1, 32), steps=0, repeats=1, executors=["rows", "gathered"])
    routing = routings_of(model)[0]
    measured = routing.state.gather_costs
    assert not measured.pays(costs.chosen_flops(routing, (1, 11), 0.5))
    assert measured.pays(costs.chosen_flops(routing, (1, 13), 0.5))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken for those of a GPU, where the base's kernels are launched one by one."""
    monkeypatch.setattr(costs, "is_launched", lambda stream: True)
    monkeypatch.setattr(costs, "STEP_SECONDS", STEP_SECONDS)
    monkeypatch.setattr(injection, "decodes", lambda decoder, inputs: False)


def stepped(model: Any, cache: Any, batch: int = 1) -> torch.Tensor:
    """Logits of one new token after a prompt that is routed, `[batch, V]`."""
    ids = tokens(batch, 8)
    with torch.no_grad():
        model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True)
        return model(input_ids=ids[:, 7:], past_key_values=cache, use_cache=True).logits[:, -1]


def in_full(model: Any, batch: int = 1) -> torch.Tensor:
    ids, cache = tokens(batch, 8), DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :7], past_key_values=cache, use_cache=True)
        with full_depth(model):
            return model(input_ids=ids[:, 7:], past_key_values=cache, use_cache=True).logits[:, -1]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
def test_a_step_whose_routing_cannot_pay_runs_in_full_and_says_so_once(target: str) -> None:
    model: Any = build_routed("llama", "mlp", target=target).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = [stepped(model, DynamicCache(), batch) for batch in (1, 3)]
    assert ["decoding steps run in full" in str(one.message) for one in said].count(True) == 1
    assert torch.equal(steps[0], in_full(model))
    assert torch.equal(steps[1], in_full(model, 3))
    with record_routes(model) as trace:
        assert torch.equal(stepped(model, DynamicCache()), steps[0])
    assert set(trace.full_ratio().values()) == {1.0}
    with use_budget(model, 0.25):
        assert not torch.equal(stepped(model, DynamicCache()), steps[0])  # the prompt is routed


@pytest.mark.usefixtures("on_a_gpu")
def test_steps_that_may_pay_or_hold_decisions_stay_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_routed("llama", "mlp").eval()
    full = in_full(model)
    static = StaticCache(config=model.config, max_cache_len=8)  # what `generate` compiles
    assert not torch.allclose(stepped(model, static), full, atol=1e-4)
    tune_execution(
        model, tokens(1, 7), steps=1, repeats=1, keep_decisions=True, executors=["gathered"]
    )
    assert not torch.allclose(stepped(model, DynamicCache()), full, atol=1e-4)
    for routing in routings_of(model):
        routing.forget_tuned("default")
    assert torch.equal(stepped(model, DynamicCache()), full)
    monkeypatch.setattr(costs, "STEP_SECONDS", 0.0)
    assert not torch.allclose(stepped(model, DynamicCache()), full, atol=1e-4)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["sequence", "exit", "branch_memory"])
def test_decisions_that_a_generation_holds_are_not_dropped(name: str) -> None:
    model: Any = build(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, DynamicCache())


def test_packed_weights_in_buffers_are_read_by_a_step_too() -> None:
    model = build_routed("llama", "mlp", layers=[1])
    (routing,) = routings_of(model)
    layer: Any = decoder_layers(model)[1]
    plan = routing.plan(False)
    assert plan is not None
    whole = costs._skipped_bytes(layer, routing, plan)
    projection = layer.mlp.up_proj
    weight = projection.weight
    del projection.weight
    packed = torch.zeros(weight.numel() // 2, dtype=torch.uint8)
    projection.register_buffer("qweight", packed)
    assert costs._skipped_bytes(layer, routing, plan) == whole - 4 * weight.numel() + len(packed)
