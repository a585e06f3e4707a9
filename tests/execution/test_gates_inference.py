"""Every gate and rule at inference: what was decided does not depend on how the input was cut,
padded or batched."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from continuations import LENGTH, continued, run
from models import build_base, build_routed, make_consequential, routed, tokens
from peft import PeftModel
from protocol import assert_free, assert_pinned, gap
from row_counts import assert_only_decided_rows_ran, counted_rows
from transformers import GPT2Config, GPT2LMHeadModel

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    set_budget,
)
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.routing.stack import routings_of

# Fields of an adapter, by what the literature calls it.
METHODS: dict[str, dict[str, Any]] = {
    "Router-Tuning": {"gate": "linear", "target": "attention", "branch": "none"},
    "linear, quantile": {"gate": "linear", "selection": "topk"},
    "TSA": {"gate": "halting", "target": "block", "branch": "none"},
    "TSA with a branch": {"gate": "halting", "target": "block"},
    "FlexiDepth": {"gate": "bottleneck", "target": "block", "branch": "swiglu"},
    "early exit": {"gate": "exit", "target": "block"},
    "random": {"gate": "random", "target": "block"},
    "MoD": {"gate": "mlp", "target": "block", "scale_by_gate": True, "branch": "none"},
    "MoD, attention": {"gate": "mlp", "target": "attention", "scale_by_gate": True},
    "MoD, predictor": {
        "gate": "mlp",
        "target": "ffn",
        "scale_by_gate": True,
        "causal_rule": "predictor",
    },
    "controller": {"gate": "mlp", "selection": "controller"},
    "global budget": {"gate": "mlp", "budget_scope": "global"},
    "gumbel": {"gate": "mlp", "selection": "gumbel", "target": "attention"},
    "random experts": {"gate": "random", "target": "experts"},
    "one gate for all experts": {
        "gate": "linear",
        "target": "experts",
        "expert_gates": "per_layer",
        "selection": "topk",
    },
}
every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def shared(method: str) -> PeftModel:
    """A routed model that no test of this file changes."""
    fields = METHODS[method]
    model = build_routed(
        "olmoe" if fields.get("target") == "experts" else "llama", "plain", **fields
    )
    if fields.get("causal_rule") == "predictor":
        center_predictors(model)
    return model


def center_predictors(model: PeftModel) -> None:
    """Let each predictor choose about half of the tokens."""
    for routing in routings_of(model):
        with torch.no_grad(), record_routes(model) as trace:
            model(tokens(8, 16, seed=99))
        head = routing.depth_route_predictor["default"].score
        head.bias.data -= trace[routing.layer_index].predicted.median()


@every_method
def test_half_of_the_tokens_run_and_only_those_are_computed(method: str) -> None:
    model = shared(method)
    with torch.no_grad(), counted_rows(model) as counts:
        model(tokens(3, LENGTH))
    assert_only_decided_rows_ran(counts)


@every_method
@pytest.mark.parametrize(
    "continuation",
    ["dynamic cache, token by token", "dynamic cache, chunks", "beam reorder", "crop"],
)
def test_cached_continuation_equals_prefill(method: str, continuation: str) -> None:
    model, ids = shared(method), tokens(3, LENGTH)
    whole, trace = run(model, input_ids=ids, use_cache=False)
    assert_pinned(gap(continued(model, ids, continuation, pinned=trace)[0], whole), base_gap=0.0)
    if METHODS[method].get("causal_rule") != "predictor":
        assert_free(model, trace, continued(model, ids, continuation)[1])


@every_method
def test_gathered_equals_masked(method: str) -> None:
    """`torch.compiler.is_compiling` is the switch to masked execution in eval mode."""
    model, ids = shared(method), tokens(3, LENGTH)
    gathered, trace = run(model, input_ids=ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        masked, _ = run(model, trace, input_ids=ids)
    assert gap(gathered, masked) < 1e-5


@every_method
def test_later_tokens_change_no_earlier_decision(method: str) -> None:
    model, ids = shared(method), tokens(3, LENGTH)
    changed = torch.cat([ids[:, :7], tokens(3, LENGTH - 7, seed=5)], dim=1)
    logits, trace = run(model, input_ids=ids)
    assert gap(run(model, trace, input_ids=changed)[0][:, :7], logits[:, :7]) < 1e-5
    if METHODS[method].get("causal_rule") != "predictor":
        assert_free(model, trace.positions(0, 7), run(model, input_ids=changed)[1].positions(0, 7))


@every_method
def test_saved_and_loaded_adapter_gives_the_same_logits(method: str, saved_adapter: Any) -> None:
    model, ids = shared(method), tokens(3, LENGTH)
    folder = saved_adapter(model)
    base = build_base("olmoe" if METHODS[method].get("target") == "experts" else "llama")
    loaded = PeftModel.from_pretrained(base, folder).eval()
    assert torch.equal(run(loaded, input_ids=ids)[0], run(model, input_ids=ids)[0])


@every_method
def test_training_step_reaches_every_trainable_parameter(method: str) -> None:
    fields = METHODS[method]
    model = build_routed(
        "olmoe" if fields.get("target") == "experts" else "llama", "plain", **fields
    ).train()
    with record_routes(model) as trace:
        loss = model(input_ids=tokens(4, LENGTH), labels=tokens(4, LENGTH)).loss
    for record in trace.values():
        if "predicted" in record.extras:
            loss = loss + record.predicted.square().mean()
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    silent = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert not silent
    assert not {
        name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None
    }
    assert bool(trained) == (
        fields["gate"] not in ("exit", "random") or fields.get("branch") != "none"
    )


BUDGETED = [
    name
    for name, fields in METHODS.items()
    if fields["gate"] not in ("halting", "bottleneck")
    and not fields.get("scale_by_gate")
    and name != "Router-Tuning"
]


@pytest.mark.parametrize("method", BUDGETED)
def test_full_budget_is_the_base_where_updates_are_not_scaled(method: str) -> None:
    fields = METHODS[method]
    base, ids = (
        build_base("olmoe" if fields.get("target") == "experts" else "llama"),
        tokens(3, LENGTH),
    )
    with torch.no_grad():
        expected = base(ids).logits
    model = routed(base, "plain", **fields)
    assert gap(run(model, input_ids=ids)[0], expected) > 0.1
    set_budget(model, 1.0)
    assert torch.equal(run(model, input_ids=ids)[0], expected)


def test_linear_gate_starts_dense() -> None:
    base, ids = build_base("llama"), tokens(3, LENGTH)
    with torch.no_grad():
        expected = base(ids).logits
    for target in ("ffn", "attention", "block"):
        model = get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(gate="linear", target=target)
        ).eval()
        assert torch.equal(run(model, input_ids=ids)[0], expected)


def test_halting_gate_has_the_papers_size() -> None:
    config = GPT2Config(
        vocab_size=65, n_embd=256, n_layer=6, n_head=8, n_inner=1024, n_positions=128
    )
    with torch.device("meta"):
        base = GPT2LMHeadModel(config)
        assert sum(p.numel() for p in base.parameters()) == 4_788_480
        model = get_depth_routed_model(
            base, DepthRouteConfig(gate="halting", target="block", branch="none")
        )
    assert model.get_nb_trainable_parameters()[0] == 82_565
    assert [routing.layer_index for routing in routings_of(model)] == [1, 2, 3, 4, 5]


def test_halting_is_soft_in_training_as_in_the_paper() -> None:
    """`a = h + (1 - p) attention(LN1(h))`, `out = a + (1 - p) FFN(LN2(a))`,
    by hand on one layer."""
    base, ids = build_base("llama"), tokens(2, 6)
    model = build_routed(
        "llama", "plain", gate="halting", target="block", branch="none", layers=[3]
    )
    with torch.no_grad():
        model.train()
        found = model(ids).logits
        states = base(ids, output_hidden_states=True).hidden_states[3]
        layer, gate = base.model.layers[3], routings_of(model)[0].depth_route_gate["default"]
        active = torch.sigmoid(gate(states)["scores"])[..., None]
        handle = layer.self_attn.register_forward_hook(lambda _, __, out: (active * out[0], out[1]))
        other = layer.mlp.register_forward_hook(lambda _, __, out: active * out)
        expected = base(ids).logits
        handle.remove()
        other.remove()
    assert gap(found, expected) < 1e-5
    model.eval()
    with torch.no_grad(), use_selection(model, "soft"):
        assert gap(model(ids).logits, expected) < 1e-5


def test_exited_token_stays_out() -> None:
    with torch.no_grad(), record_routes(shared("early exit")) as trace:
        shared("early exit")(tokens(8, LENGTH))
    for earlier, later in zip(list(trace)[:-1], list(trace)[1:]):
        assert not bool((trace[later].mask & ~trace[earlier].mask).any())
        assert 0 < int(trace[later].mask.sum()) < trace[later].mask.numel()


def test_gumbel_noise_is_in_training_only() -> None:
    model, ids = build_routed("llama", "plain", **METHODS["gumbel"]), tokens(8, LENGTH)
    assert torch.equal(run(model, input_ids=ids)[0], run(model, input_ids=ids)[0])
    model.train()
    with record_routes(model) as first:
        model(input_ids=ids)
    with record_routes(model) as second:
        model(input_ids=ids)
    assert not torch.equal(first[1].mask, second[1].mask)


def test_global_budget_holds_the_mean_and_not_every_layer() -> None:
    model = build_routed("llama", "plain", **METHODS["global budget"])
    for place, routing in enumerate(routings_of(model)):  # layers that differ in what they score
        routing.depth_route_gate["default"].score.bias.data += 1.5 * place
    shares = calibrate(model, [{"input_ids": tokens(8, 16, seed)} for seed in range(8)], budget=0.5)
    assert abs(sum(shares.values()) / len(shares) - 0.5) < 0.02
    assert max(shares.values()) - min(shares.values()) > 0.3


def test_set_budget_moves_a_controllers_threshold() -> None:
    model = build_routed("llama", "plain", **METHODS["controller"])
    calibrate(model, [{"input_ids": tokens(8, 16, seed)} for seed in range(8)], budget=0.5)
    half = run(model, input_ids=tokens(8, 16, 99))[1].full_ratio()
    set_budget(model, 0.2)
    less = run(model, input_ids=tokens(8, 16, 99))[1].full_ratio()
    assert all(less[i] < half[i] for i in half)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"gate": "none"}, "no gate"),
        ({"gate": "linear"}, "fixed threshold"),
        ({"causal_rule": "predictor"}, "predictor"),
    ],
)
def test_budgets_without_effect_are_refused(fields: dict[str, Any], word: str) -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(**fields))
    with pytest.raises(ValueError, match=word):
        set_budget(model, 0.3)
    with pytest.raises(ValueError, match=word):
        calibrate(model, [{"input_ids": tokens(2, 8)}])


def test_experts_need_experts() -> None:
    with pytest.raises(ConfigError, match="layer 2 has no experts"):
        get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(target="experts", gate="linear", layers=[2])
        )
    with pytest.raises(ConfigError, match="layer 1 has experts 0 to 3, not 4"):
        get_depth_routed_model(
            build_base("olmoe"),
            DepthRouteConfig(target="experts", gate="none", layers=[1], dropped_experts=[[4]]),
        )


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_dropped_pairs_are_not_computed_by_any_implementation(
    family: str, implementation: str
) -> None:
    base = build_base(family)
    base.set_experts_implementation(implementation)
    model = build_routed_on(base)
    ids = tokens(3, LENGTH)
    with torch.no_grad(), counted_rows(model) as counts:
        gathered, trace = run(model, input_ids=ids)
    assert_only_decided_rows_ran(counts)
    with torch.no_grad(), replay_routes(model, trace):
        assert gap(model.train()(ids).logits, gathered) < 1e-5


def build_routed_on(base: Any) -> PeftModel:
    model = get_depth_routed_model(
        base, DepthRouteConfig(target="experts", gate="mlp", layers=[1, 2, 3])
    ).eval()
    make_consequential(model)
    return model


def test_static_expert_drop_equals_zeroed_experts() -> None:
    reference, ids = build_base("olmoe"), tokens(3, LENGTH)
    for expert in (0, 2):
        reference.model.layers[1].mlp.experts.down_proj.data[expert].zero_()
    with torch.no_grad():
        expected = reference(ids).logits
    config = DepthRouteConfig(
        target="experts", gate="none", layers=[1], dropped_experts=[[0, 2]], branch="none"
    )
    model = get_depth_routed_model(build_base("olmoe"), config).eval()
    with counted_rows(model) as counts:
        assert gap(run(model, input_ids=ids)[0], expected) < 1e-5
    assert_only_decided_rows_ran(counts)
