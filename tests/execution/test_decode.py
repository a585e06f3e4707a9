"""Decoding steps on a CPU compute what the general forward pass computes,
and stand back where they may not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from models import DEVICE, FAMILY_NAMES, build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from transformers import DynamicCache, StaticCache

from hf_depthroute import calibrate, record_routes, set_budget
from hf_depthroute.execution import step_weights
from hf_depthroute.execution.decode import DECODE_ROWS, AttentionStep, DecodeStep, SequenceStep
from hf_depthroute.parts.branches import rms_of
from hf_depthroute.parts.fused import fuse
from hf_depthroute.parts.gates import MLPGate
from hf_depthroute.routing.stack import routings_of, state_of

STEPS = 5
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="decoding steps are taken on CPUs")


@contextmanager
def counted_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The layers that took a decoding step."""
    taken: list[Any] = []

    def spied(call: Any) -> Any:
        def spy(step: DecodeStep, layer: Any, *args: Any) -> Any:
            taken.append(layer)
            return call(step, layer, *args)

        return spy

    with monkeypatch.context() as patch:
        for kind in (DecodeStep, AttentionStep, SequenceStep):
            patch.setattr(kind, "__call__", spied(kind.__call__))
        yield taken


@torch.no_grad()
def decoded(model: Any, batch: int = 1, general: bool = False, steps: int = STEPS) -> torch.Tensor:
    """Logits of decoding steps after a prompt of four tokens; `general`: with a trace,
    which needs the masks."""
    ids = tokens(batch, 4 + steps, seed=4)
    cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    logits = []
    for position in range(4, 4 + steps):
        one = ids[:, position : position + 1]
        if general:
            with record_routes(model):
                out = model(input_ids=one, past_key_values=cache, use_cache=True)
        else:
            out = model(input_ids=one, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def assert_steps_equal_the_general_pass(
    monkeypatch: pytest.MonkeyPatch, model: PeftModel, batch: int = 1
) -> None:
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model, batch)
    assert len(taken) == STEPS * 3
    general = decoded(model, batch, general=True)
    torch.testing.assert_close(fast, general, atol=1e-5, rtol=1e-5)
    with monkeypatch.context() as patch:  # one map after the other, it is the same to the bit
        patch.setattr(step_weights, "fuse", lambda *parts: None)
        for routing in routings_of(model):
            routing.derived.clear()
        assert torch.equal(decoded(model, batch), general)
    for routing in routings_of(model):
        routing.derived.clear()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("gate", ["mlp", "jepa", "linear", "random"])
def test_equal_the_general_pass(
    monkeypatch: pytest.MonkeyPatch, family: str, gate: str, batch: int
) -> None:
    model = build_routed(family, "mlp", gate=gate)
    assert_steps_equal_the_general_pass(monkeypatch, model, batch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "fields", [{"branch": "none"}, {"gate_input": "residual"}, {"gate_hidden": 5}]
)
def test_equal_the_general_pass_whatever_the_adapter_holds(
    fields: dict[str, Any], batch: int
) -> None:
    model = build_routed("qwen2", "mlp", **fields)
    general = decoded(model, batch, general=True)
    torch.testing.assert_close(decoded(model, batch), general, atol=1e-5, rtol=1e-5)


MEMORY: dict[str, Any] = {"branch": "memory", "memory_slots": 8192, "memory_width": 4}


@pytest.mark.parametrize(
    ("kind", "gate", "batch"),
    [("mlp", "mlp", 1), ("mlp", "mlp", 3), ("mlp", "none", 1), ("mlp", "none", 3), ("attention", "mlp", 1),
     ("block", "mlp", 1)],
)  # fmt: skip
def test_skipped_tokens_look_their_n_grams_up(
    monkeypatch: pytest.MonkeyPatch, kind: str, gate: str, batch: int
) -> None:
    model = build_routed("llama", kind, gate=gate, **MEMORY)
    assert_steps_equal_the_general_pass(monkeypatch, model, batch)
    before = decoded(model, batch)
    for routing in routings_of(model):
        with torch.no_grad():
            routing.depth_route_memory["default"].table.zero_()
    assert not torch.equal(decoded(model, batch), before)


@pytest.mark.parametrize(("gate", "batch"), [("none", 1), ("mlp", 3)])
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_where_no_step_knows_tokens_the_general_pass_runs(
    monkeypatch: pytest.MonkeyPatch, kind: str, gate: str, batch: int
) -> None:
    model = build_routed("llama", kind, gate=gate, **MEMORY)
    with counted_steps(monkeypatch) as taken:
        decoded(model, batch)
    assert not taken


def test_take_the_stream_in_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_weights, "fuse", lambda *parts: None)
    model = routed(build_base("llama", dtype=torch.bfloat16), "mlp")
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model)
    assert taken and fast.dtype == torch.bfloat16
    assert torch.equal(fast, decoded(model, general=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gate", ["mlp", "linear", "affine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_in_one_product_are_those_of_gate_and_branch(
    dtype: torch.dtype, gate: str, batch: int
) -> None:
    model = routed(build_base("llama", dtype=dtype), "mlp", gate=gate)
    routing = routings_of(model)[0]
    one, branch = routing.depth_route_gate["default"], routing.depth_route_branch["default"]
    norm: Any = routing.norm_in_front("ffn")
    with torch.no_grad():
        norm.weight.copy_(torch.rand(norm.weight.shape) + 0.5)
        branch.norm.weight.copy_(torch.rand(norm.weight.shape) + 0.5)
        for weight in (*one.parameters(), *branch.parameters()):
            weight.copy_(
                weight.to(dtype) if weight.ndim == 1 else torch.randn(weight.shape).to(dtype) * 0.3
            )
        a = torch.randn(batch, 1, routing.width).to(dtype)
        joint = fuse(rms_of(norm), one, branch, dtype)
        assert joint is not None
        scores, maps = joint.scores(a)
        x = a.double() / (a.double().square().mean(-1, keepdim=True) + branch.norm.eps).sqrt()
        exact = copy.deepcopy(one).double(), copy.deepcopy(branch).double()
        hidden = x * norm.weight.double()
        for linear in list(exact[0].children())[:-1]:
            hidden = torch.nn.functional.silu(linear(hidden))
        last = exact[0].score
        true_scores = (hidden @ last.weight.T + (0 if last.bias is None else last.bias)).flatten()
        wanted = exact[1].down(
            torch.nn.functional.silu(exact[1].up(x * branch.norm.weight.double()))
        )
        cheap = joint.cheap(maps, a)
    assert cheap is not None
    torch.testing.assert_close(torch.tensor(scores).double(), true_scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cheap.double(), wanted, atol=1e-4, rtol=1e-4)


def replaced(layer: Any) -> None:
    layer.post_attention_layernorm = torch.nn.Sequential(
        layer.post_attention_layernorm, torch.nn.Softsign()
    )


def patched(layer: Any) -> None:
    norm = layer.post_attention_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x).tanh()


def hooked(layer: Any) -> None:
    layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: out.tanh())


@pytest.mark.parametrize("change", [replaced, patched, hooked])
def test_a_norm_that_is_no_longer_that_of_the_base_is_called(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    model = build_routed("llama", "mlp")
    before = decoded(model)
    for layer in decoder_layers(model):
        change(layer)
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model)
    assert taken and not torch.equal(fast, before)
    assert torch.equal(fast, decoded(model, general=True))


def test_another_weight_of_the_norm_is_folded_anew() -> None:
    model = build_routed("llama", "mlp")
    before = decoded(model)
    for layer in decoder_layers(model):
        norm = layer.post_attention_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * 1.5)
    after = decoded(model)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, decoded(model, general=True), atol=1e-5, rtol=1e-5)


def test_a_gate_that_inherits_its_maps_scores_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(MLPGate):
        def forward(self, a: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": -super().forward(a)["scores"]}

    model = build_routed("llama", "mlp")
    for routing in routings_of(model):
        routing.depth_route_gate["default"].__class__ = Turned
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model)
    assert taken and torch.equal(fast, decoded(model, general=True))


def test_follow_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_routed("llama", "mlp")
    gate: Any = routings_of(model)[0].depth_route_gate["default"]
    every = functools.partial(decoded, steps=8)  # in fewer, some change alters no decision
    outputs = [every(model)]
    with torch.no_grad():
        # Its weight is folded into the gate's.
        norm = decoder_layers(model)[1].post_attention_layernorm
        before = norm.weight.clone()
        norm.weight.mul_(1.5)
        outputs.append(every(model))
        norm.weight.copy_(before)
        gate.score.bias.add_(0.7)
        outputs.append(every(model))
        gate.score.weight.data = -gate.score.weight.data  # another tensor, the same version
        outputs.append(every(model))
    set_budget(model, 0.2)
    outputs.append(every(model))
    calibrate(model, [{"input_ids": tokens(2, 16)}], budget=0.6)
    outputs.append(every(model))
    with state_of(model).override(executor="full"):
        outputs.append(every(model))
    for i, one in enumerate(outputs):
        assert all(not torch.equal(one, other) for other in outputs[i + 1 :])
    torch.testing.assert_close(outputs[-2], every(model, general=True), atol=1e-5, rtol=1e-5)
    with counted_steps(monkeypatch) as taken, model.disable_adapter():
        off = every(model)
    assert not taken
    assert torch.equal(off, every(build_base("llama")))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("fields", [{}, {"gate": "jepa"}, {"gate": "linear", "branch": "none"}])
@pytest.mark.parametrize("target", ["attention", "block"])
def test_a_sequence_skips_attention_and_blocks_as_the_general_pass_does(
    monkeypatch: pytest.MonkeyPatch, target: str, fields: dict[str, Any], family: str
) -> None:
    model = build_routed(family, target, **fields)
    assert_steps_equal_the_general_pass(monkeypatch, model)


@pytest.mark.parametrize("target", ["attention", "block"])
def test_several_sequences_that_skip_attention_run_the_general_pass(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    with counted_steps(monkeypatch) as taken:
        decoded(build_routed("llama", target), 2)
    assert not taken


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("target", ["mlp", "attention", "block"])
def test_the_predictor_decides_the_steps_that_the_gate_does_not(
    monkeypatch: pytest.MonkeyPatch, target: str, family: str
) -> None:
    model = build_routed(family, target, causal_rule="predictor")
    ids = tokens(4, 12, seed=4)
    for routing in routings_of(model):  # a token in two, where gate and predictor differ
        with torch.no_grad(), record_routes(model) as trace:
            model(input_ids=ids)
        head = routing.depth_route_predictor["default"].score
        with torch.no_grad():
            head.bias -= trace[routing.layer_index].extras["predicted"].flatten().quantile(0.5)
    assert_steps_equal_the_general_pass(monkeypatch, model)
    decided = decoded(model)
    for routing in routings_of(model):
        routing.depth_route_predictor["default"].score.bias.data -= 100  # nothing runs in full
        routing.derived.clear()
    assert not torch.equal(decoded(model), decided)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("threshold", [torch.inf, -torch.inf])
@pytest.mark.parametrize("target", ["mlp", "attention", "block"])
def test_sequences_that_are_decided_alike_take_steps(
    monkeypatch: pytest.MonkeyPatch, target: str, threshold: float, batch: int, family: str
) -> None:
    model = build_routed(family, target, granularity="sequence")
    for routing in routings_of(model):
        routing.config("default").threshold = threshold
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model, batch)
    assert len(taken) == STEPS * 3
    assert torch.equal(fast, decoded(model, batch, general=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("target", ["attention", "block"])
def test_static_layers_without_attention_take_steps(
    monkeypatch: pytest.MonkeyPatch, target: str, batch: int
) -> None:
    model = build_routed("llama", target, gate="none")
    with counted_steps(monkeypatch) as taken:
        fast = decoded(model, batch)
    assert len(taken) == STEPS * 3
    assert torch.equal(fast, decoded(model, batch, general=True))


@pytest.mark.parametrize("target", ["attention", "block"])
def test_sequences_that_differ_and_caches_that_hold_all_keys_run_the_general_pass(
    target: str,
) -> None:
    """What a step hands back is computed: logits and caches are those of a trace,
    which takes no steps."""
    model = build_routed("llama", target, granularity="sequence")
    ids = tokens(4, 9, seed=4)
    with torch.no_grad(), record_routes(model) as trace:
        model(input_ids=ids[:, :8])
    chosen = torch.stack([record.mask[:, 0] for record in trace.values()])
    assert chosen.any() and not chosen.all()
    found = []
    for general in (False, True):
        for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=16)):
            with torch.no_grad():
                model(input_ids=ids[:, :8], past_key_values=cache, use_cache=True)
                with record_routes(model) if general else nullcontext():
                    found.append(
                        model(input_ids=ids[:, 8:], past_key_values=cache, use_cache=True).logits
                    )
            assert cache.get_seq_length() == 9
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["attention", "block"])
def test_a_skipped_token_is_seen_by_later_ones_and_costs_no_query(target: str) -> None:
    model = build_routed("llama", target, branch="none")
    for routing in routings_of(model):
        routing.config("default").threshold = torch.inf
    ids, layer, calls = tokens(1, 9, seed=4), decoder_layers(model)[2], []
    for name in ("q_proj", "k_proj", "o_proj"):
        layer.self_attn._modules[name].register_forward_hook(
            lambda *args, name=name: calls.append(name)
        )
    layer.mlp.register_forward_hook(lambda *args: calls.append("mlp"))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        calls.clear()
        for position in range(4, 9):
            out = model(
                input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True
            )
        whole = model(input_ids=ids, use_cache=True)
    steps = ["k_proj"] if target == "block" else ["k_proj", "mlp"]
    assert calls[: 5 * len(steps)] == 5 * steps
    torch.testing.assert_close(out.logits[:, -1], whole.logits[:, -1], atol=1e-5, rtol=1e-5)
    for one, other in zip(cache.layers, whole.past_key_values.layers):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-5)


def test_padding_and_wide_batches_run_the_general_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_routed("llama", "mlp")
    with counted_steps(monkeypatch) as taken, torch.no_grad():
        model(input_ids=tokens(2, 1), attention_mask=torch.tensor([[1], [0]]))
        model(input_ids=tokens(DECODE_ROWS + 1, 1))
        model(input_ids=tokens(2, 2))
    assert not taken
    with counted_steps(monkeypatch) as taken, torch.no_grad():
        model(input_ids=tokens(2, 1), attention_mask=torch.ones(2, 1))
    assert len(taken) == 3


def test_a_layer_in_training_mode_decodes_as_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_routed("llama", "mlp")
    expected = decoded(model)
    decoder_layers(model)[2].train()
    with counted_steps(monkeypatch) as taken:
        assert torch.equal(decoded(model), expected)
    assert len(taken) == STEPS * 3


def test_hooks_on_the_adapter_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model: PeftModel = build_routed("llama", "mlp")
    decoded(model)
    seen: list[torch.Size] = []
    gate: Any = routings_of(model)[0].depth_route_gate["default"]
    handle = gate.hidden.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with counted_steps(monkeypatch) as taken:
        decoded(model)
    assert len(seen) == 1 + STEPS  # the prompt and every step
    assert len(taken) == STEPS * 2  # the other layers
    handle.remove()
    with counted_steps(monkeypatch) as taken:
        decoded(model)
    assert len(taken) == STEPS * 3


def test_skip_the_ffn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FFN is called on the tokens that run full, and on no others."""
    model = build_routed("llama", "mlp")
    rows: list[int] = []
    for layer in list(decoder_layers(model))[1:]:
        layer.mlp.register_forward_hook(
            lambda module, args, out: rows.append(args[0].shape[:-1].numel())
        )
    ids = tokens(1, 8, seed=7)
    full = 0
    with torch.no_grad():
        for position in range(8):
            one = ids[:, position : position + 1]
            model(input_ids=one)
            with record_routes(model) as trace:
                model(input_ids=one)
            full += sum(int(record.mask.sum()) for record in trace.values())
    assert 0 < full < 8 * 3
    assert sum(rows) == 2 * full  # counted in both runs


@pytest.mark.parametrize(
    ("family", "drops"), [("phi3", "resid_mlp_dropout"), ("stablelm", "dropout")]
)
def test_a_step_in_training_mode_drops_what_the_general_pass_drops(family: str, drops: str) -> None:
    """A model that generates in training mode; a dropout of everything has no chance in it."""
    model = build_routed(family, "mlp", layers=[1, 2])
    for layer in decoder_layers(model):
        getattr(layer, drops).p = 1.0
    model.train()
    ids = tokens(1, 8)
    found = []
    for executor in ("auto", "rows", "masked"):
        with torch.no_grad(), state_of(model).override(executor=executor):
            cache = model(ids[:, :4], use_cache=True).past_key_values
            steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(4, 8)]
        found.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], found[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family, drops", [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_a_routed_attention_in_training_mode_has_its_own_dropout(family: str, drops: str) -> None:
    model = build_routed(family, "attention", attention="eager")
    setattr(model.get_base_model().config, drops, 1.0)
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 1.0
        if isinstance(getattr(module, "attn_dropout", None), torch.nn.Dropout):
            module.attn_dropout.p = 1.0
    found = {}
    for training in (False, True):
        model.train(training)
        for executor in ("gathered", "rows", "masked"):
            with torch.no_grad(), state_of(model).override(executor=executor):
                found[training, executor] = model(tokens(2, 12)).logits
    assert (found[True, "masked"] - found[False, "masked"]).abs().max() > 0.1
    for executor in ("gathered", "rows"):
        torch.testing.assert_close(found[True, executor], found[True, "masked"], atol=1e-5, rtol=0)
