"""Prompts in half precision on a CPU: one read of the stream says what norm and gate say one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import build_base, decoder_layers, routed, tokens
from protocol import gap
from torch.nn.functional import silu

from hf_depthroute import record_routes, replay_routes, set_budget
from hf_depthroute.execution import layer as routed_layer
from hf_depthroute.execution.gathered import cpu_slice
from hf_depthroute.execution.prompts import PromptStep
from hf_depthroute.parts.branches import rms_of
from hf_depthroute.parts.joint import prompt_maps
from hf_depthroute.routing.trace import overridden, routings

IDS = tokens(3, 16, seed=2)


def build(family: str = "llama", kind: str = "mlp", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    return routed(build_base(family, dtype=dtype), kind, **fields)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits.float()


@contextmanager
def one_by_one() -> Iterator[None]:
    """The general forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_layer, "read_prompt", lambda *call: None)
        yield


@contextmanager
def counted() -> Iterator[list[Any]]:
    """What every prompt that was read as a whole is known by."""
    seen: list[Any] = []
    read = PromptStep.read

    def spy(step: PromptStep, *args: Any) -> Any:
        if (prompt := read(step, *args)) is not None:
            seen.append(prompt)
        return prompt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptStep, "read", spy)
        yield seen


@pytest.mark.parametrize("gate", ["mlp", "linear", "affine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_read_gives_scores_and_the_norm(dtype: torch.dtype, gate: str) -> None:
    holder = routings(build(dtype=dtype, gate=gate))[0]
    one: Any = holder.depth_route_gate["default"]
    norm: Any = holder.norm_in_front("ffn")
    with torch.no_grad():
        for part in (norm, one):
            for weight in part.parameters():
                weight.copy_(torch.rand(weight.shape) + 0.5 if weight.ndim == 1 else torch.randn(weight.shape) * 0.2)
        a = torch.randn(40, holder.width).to(dtype)
        maps = prompt_maps(rms_of(norm), one, dtype)
        assert maps is not None
        normed, scores = maps.read(a)
        x = a.double() / (a.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        true, read = copy.deepcopy(one).double(), x * norm.weight.double()
        for linear in list(true.children())[:-1]:
            read = silu(linear(read))
        true_scores = read @ true.score.weight[0] + (0 if true.score.bias is None else true.score.bias)
    assert scores.dtype == torch.float32 and normed.dtype == dtype
    exact = 1e-4 if gate != "mlp" else 0.05 if dtype == torch.bfloat16 else 0.01
    torch.testing.assert_close(scores.double(), true_scores, atol=exact, rtol=exact)
    torch.testing.assert_close(normed * norm.weight, norm(a), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("fields", [{}, {"gate": "linear"}, {"branch": "none"}, {"gate": "affine"}])
@pytest.mark.parametrize("family", ["llama", "qwen2", "olmoe"])
def test_equal_the_general_pass_but_for_rounding(family: str, fields: dict[str, Any]) -> None:
    model = build(family, **fields)
    with counted() as seen, record_routes(model) as trace:
        logits(model)
    assert len(seen) == len(trace) == 3
    with replay_routes(model, trace):  # the same tokens on both sides
        once = logits(model)
        with one_by_one(), record_routes(model) as general:
            apart = logits(model)
    assert gap(once, apart) < 1e-6
    for index, record in trace.items():
        assert gap(record.scores, general[index].scores) < 0.05 * general[index].scores.abs().max() + 0.05
    assert torch.equal(logits(model), once)  # nobody watches: the decisions are those that were recorded


def test_chosen_rows_run_the_ffn_and_padding_does_not() -> None:
    model = build()
    real = torch.ones_like(IDS)
    real[0, :5] = 0
    rows: list[int] = []
    for layer in list(decoder_layers(model))[1:]:
        layer.mlp.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[:-1].numel()))
    with record_routes(model) as trace, counted() as seen:
        logits(model, attention_mask=real)
    assert len(seen) == 3
    assert sum(rows) == sum(int(record.mask.sum()) for record in trace.values()) > 0
    assert not any(record.mask[0, :5].any() for record in trace.values())


@pytest.mark.parametrize("threshold", [-torch.inf, torch.inf])
def test_all_or_nothing(threshold: float) -> None:
    model = build(branch="none", layers="all")
    base = logits(build_base("llama", dtype=torch.bfloat16))
    for holder in routings(model):
        holder.config("default").threshold = threshold
    with counted() as seen:
        out = logits(model)
    assert seen
    if threshold < 0:
        assert torch.equal(out, base)
    else:
        for layer in decoder_layers(model):
            layer.mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        with model.disable_adapter():
            assert torch.equal(logits(model), out)


def test_follow_every_change() -> None:
    model = build()
    holder = routings(model)[0]
    gate: Any = holder.depth_route_gate["default"]
    outputs = [logits(model)]

    def changed() -> None:
        outputs.append(logits(model))
        for one in routings(model):
            one.derived.clear()
        assert torch.equal(logits(model), outputs[-1])

    with torch.no_grad():
        decoder_layers(model)[1].post_attention_layernorm.weight.mul_(1.5)
        changed()
        gate.score.bias.add_(0.7)
        changed()
        gate.hidden.weight.mul_(-1)
        changed()
        holder.depth_route_branch["default"].down.weight.mul_(2)
        changed()
    set_budget(model, 0.2)
    changed()
    holder.depth_route_gate["default"] = copy.deepcopy(gate)
    with torch.no_grad():
        holder.depth_route_gate["default"].score.weight.mul_(-1)
    changed()
    for i, one in enumerate(outputs):
        assert all(not torch.equal(one, other) for other in outputs[i + 1 :])


@pytest.mark.parametrize(
    "fields", [{"gate": "jepa"}, {"gate_input": "residual"}, {"granularity": "sequence"}, {"scale_by_gate": True}]
)
def test_other_adapters_run_the_general_pass(fields: dict[str, Any]) -> None:
    model = build(**fields)
    with counted() as seen:
        out = logits(model)
    with one_by_one():
        assert torch.equal(logits(model), out)
    assert not seen


@pytest.mark.parametrize("kind", ["attention", "block"])
def test_other_targets_run_the_general_pass(kind: str) -> None:
    with counted() as seen:
        logits(build(kind=kind))
    assert not seen


def test_float32_autocast_training_and_single_tokens_run_the_general_pass() -> None:
    model = build()
    with counted() as seen:
        logits(build(dtype=torch.float32))
        model(input_ids=IDS)  # a gradient may be asked for
        with torch.autocast("cpu", torch.bfloat16):
            logits(model)
        with overridden(model, "executor", "masked"):
            logits(model)
        logits(model, IDS[:, :1])
    assert not seen
    decoder_layers(model)[2].train()
    with counted() as seen:
        logits(model)
    assert len(seen) == 2


def test_hooks_are_called() -> None:
    model = build()
    calls: list[str] = []
    layer = decoder_layers(model)[1]
    gate: Any = routings(model)[1].depth_route_gate["default"]
    layer.post_attention_layernorm.register_forward_hook(lambda *args: calls.append("norm"))
    gate.hidden.register_forward_hook(lambda *args: calls.append("gate"))
    with counted() as seen:
        logits(model)
    assert calls == ["norm", "gate"] and len(seen) == 1


def test_narrow_ffns_run_more_rows_at_once() -> None:
    assert cpu_slice(4864) == cpu_slice(14_336) == 256
    assert cpu_slice(2048) == 608 and cpu_slice(768) == 1621
    assert [holder.ffn_width for holder in routings(build())] == [
        decoder_layers(build())[1].mlp.gate_proj.out_features
    ] * 3
