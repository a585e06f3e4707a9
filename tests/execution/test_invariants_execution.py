"""Invariants 9, 19, 22 and 24: skipped rows are not computed,
and odd numbers and shapes do no harm."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    COVERING,
    DEVICE,
    GATES,
    MODELS,
    WIDTH,
    build_base,
    build_routed,
    decoder_layers,
    routed,
    tokens,
)
from peft import PeftModel
from protocol import gap
from row_counts import assert_only_decided_rows_ran, counted_rows
from torch import nn

from hf_depthroute import record_routes, replay_routes
from hf_depthroute.execution.gathered import gathered_update
from hf_depthroute.execution.masked import masked_update
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace

every_model = pytest.mark.parametrize(("family", "kind"), MODELS)
some_models = pytest.mark.parametrize(("family", "kind"), COVERING)


@functools.cache
def shared(family: str, kind: str) -> PeftModel:
    """A routed model that no test of this file changes."""
    return build_routed(family, kind)


@every_model
def test_prefill_computes_the_chosen_rows_only(family: str, kind: str) -> None:
    model = shared(family, kind)
    with torch.no_grad(), counted_rows(model) as counts:
        model(tokens(3, 12))
    assert_only_decided_rows_ran(counts)


@every_model
def test_decode_computes_the_chosen_rows_only(family: str, kind: str) -> None:
    model, ids = shared(family, kind), tokens(3, 12)
    with torch.no_grad():
        cache = model(ids[:, :1], use_cache=True).past_key_values
        with counted_rows(model) as counts:
            for position in range(1, 12):
                model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
    assert_only_decided_rows_ran(counts)


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10},
    "beam": {"do_sample": False, "num_beams": 2},
    "greedy, static cache": {
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    },
    "beam, static cache": {
        "do_sample": False,
        "num_beams": 2,
        "cache_implementation": "static",
        "disable_compile": True,
    },
}


@some_models
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
def test_generate_computes_the_chosen_rows_only(
    family: str, kind: str, generation: str, padded: bool
) -> None:
    model, ids = shared(family, kind), tokens(2, 6)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0
    with torch.no_grad(), counted_rows(model) as counts:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=5,
            min_new_tokens=5,
            **GENERATIONS[generation],
        )
    assert out.shape == (2, 11)
    assert_only_decided_rows_ran(counts)


@some_models
def test_left_padding_changes_no_generated_token(family: str, kind: str) -> None:
    model, ids = shared(family, kind), tokens(2, 6)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(
        model.generate(input_ids=padded, attention_mask=mask, **options)[:, 3:], alone
    )


@some_models
def test_static_cache_generates_what_the_dynamic_cache_does(family: str, kind: str) -> None:
    model, ids = shared(family, kind), tokens(2, 6)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
    }
    static = model.generate(
        input_ids=ids, cache_implementation="static", disable_compile=True, **options
    )
    assert torch.equal(static, model.generate(input_ids=ids, **options))


@every_model
def test_gathered_forward_and_gradients_equal_masked(family: str, kind: str) -> None:
    """With the same decisions.

    The gates' own gradient exists in training only, so their weights are left out.
    """
    model, ids = build_routed(family, kind), tokens(3, 12)
    with record_routes(model) as trace:
        gathered = model(ids).logits
    # A gate without an input gradient: what is left is the gradient of the paths.
    for routing in routings_of(model):
        routing.depth_route_gate["default"].register_forward_pre_hook(
            lambda _, inputs: (inputs[0].detach(),)
        )
    weights = {
        name: p for name, p in model.named_parameters() if p.requires_grad and "_branch." in name
    }
    direction = (
        torch.randn(gathered.shape, generator=torch.Generator().manual_seed(3)) / gathered.numel()
    )

    def gradients(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(
            zip(weights, torch.autograd.grad((logits * direction).sum(), list(weights.values())))
        )

    with replay_routes(model, trace):
        expected = gradients(model(ids).logits)
        masked = model.train()(ids).logits
        found = gradients(masked)
    assert gap(gathered, masked) < 1e-5
    assert any(float(gradient.abs().max()) > 1e-5 for gradient in expected.values())
    for name in expected:
        assert gap(found[name], expected[name]) < 1e-5, name


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4),
    with_branch=st.booleans(),
    weighted=st.booleans(),
    slice_rows=st.one_of(st.none(), st.integers(1, 7)),
    seed=st.integers(0, 1000),
)
def test_gathered_update_equals_masked_update(
    rows: list[list[bool]], with_branch: bool, weighted: bool, slice_rows: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    mask = torch.tensor(rows)
    full, cheap = (
        nn.Linear(8, 8, device=DEVICE) if there else None for there in (True, with_branch)
    )
    assert full is not None
    a = torch.randn(*mask.shape, 8, requires_grad=True)
    weight = torch.rand(mask.shape) if weighted else None
    inputs = [a, *full.parameters(), *(cheap.parameters() if cheap else ())]
    gathered = gathered_update(a, a, mask, full, cheap, slice_rows, weight)
    update = full(a) if weight is None else full(a) * weight[..., None]
    masked = masked_update(
        a, a + update, a + cheap(a) if cheap else a, mask, torch.rand(mask.shape)
    )
    assert gap(gathered, masked) < 1e-6
    direction = torch.randn(*mask.shape, 8)
    for one, other in zip(
        torch.autograd.grad(
            (gathered * direction).sum(), inputs, allow_unused=True, materialize_grads=True
        ),
        torch.autograd.grad(
            (masked * direction).sum(), inputs, allow_unused=True, materialize_grads=True
        ),
    ):
        assert gap(one, other) < 1e-5
    with torch.no_grad():  # the stream may be overwritten
        assert (
            gap(
                gathered_update(a.clone(), a.clone(), mask, full, cheap, slice_rows, weight), masked
            )
            < 1e-6
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@some_models
def test_low_precision_is_finite_with_float32_scores(
    family: str, kind: str, dtype: torch.dtype
) -> None:
    model = routed(build_base(family, dtype=dtype), kind)
    for training in (False, True):
        model.train(training)
        with torch.no_grad(), record_routes(model) as trace:
            logits = model(tokens(3, 12)).logits
        assert logits.dtype == dtype
        assert bool(logits.isfinite().all())
        for record in trace.values():
            assert record.scores.dtype == record.probs.dtype == torch.float32
            assert bool(record.scores.isfinite().all())
            assert 0 < int(record.mask.sum()) < record.mask.numel()


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_norms_get_what_gpus_have_one_kernel_for(
    family: str, adapter_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input and weights of one dtype: CUDA has no layer norm of two,
    and several kernels for an RMS norm of two."""
    model, seen = routed(build_base(family, dtype=torch.bfloat16)), []
    for routing in routings_of(model):
        routing.depth_route_branch.to(adapter_dtype)
    for name in ("layer_norm", "rms_norm"):
        plain = getattr(nn.functional, name)

        def spied(
            x: Any, shape: Any, weight: Any = None, *rest: Any, plain: Any = plain, **named: Any
        ) -> torch.Tensor:
            seen.append((x.dtype, weight.dtype))
            return plain(x, shape, weight, *rest, **named)

        monkeypatch.setattr(nn.functional, name, spied)
    with torch.no_grad():
        model(tokens(3, 12))
    assert len(seen) >= 3
    assert all(one == other for one, other in seen)


@some_models
def test_autocast_is_finite_with_float32_scores(family: str, kind: str) -> None:
    model = shared(family, kind)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), record_routes(model) as trace:
        logits = model(tokens(3, 12)).logits
    assert bool(logits.isfinite().all())
    assert all(record.scores.dtype == torch.float32 for record in trace.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@some_models
def test_bad_row_stays_in_its_own_sequence_and_is_never_selected(
    family: str, kind: str, value: float
) -> None:
    model, ids = shared(family, kind), tokens(3, 8)

    @torch.no_grad()
    def run(embeddings: torch.Tensor) -> tuple[torch.Tensor, RouteTrace]:
        with record_routes(model) as trace:
            return model(inputs_embeds=embeddings).logits, trace

    embeddings = model.get_input_embeddings()(ids).detach()
    bad = embeddings.clone()
    bad[1, 4] = value
    (logits, trace), (bad_logits, bad_trace) = run(embeddings), run(bad)
    others = torch.tensor([0, 2])
    assert gap(bad_logits[others], logits[others]) < 1e-5
    for index, record in bad_trace.items():
        assert torch.equal(record.mask[others], trace[index].mask[others])
        assert not bool(record.mask[1, 4:].any())


@some_models
def test_one_token_and_all_padding_rows_run(family: str, kind: str) -> None:
    model = shared(family, kind)
    with torch.no_grad():
        assert model(tokens(1, 1)).logits.shape == (1, 1, 64)
        ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.long)
        mask[1] = 0
        with record_routes(model) as trace:
            logits = model(input_ids=ids, attention_mask=mask).logits
        assert bool(logits[0].isfinite().all())
        assert gap(logits[:1], model(ids[:1]).logits) < 1e-5
        for index, ratio in trace.full_ratio().items():
            assert not bool(trace[index].mask[1].any())
            assert 0 <= ratio <= 1


@pytest.mark.parametrize("gate", GATES)
def test_no_token_at_all_runs(gate: str) -> None:
    model = shared("llama", gate)
    layer = decoder_layers(model)[1]
    empty = torch.empty(2, 0, WIDTH)
    out = gathered_update(empty, empty, torch.empty(2, 0, dtype=torch.bool), layer.mlp, None)
    assert out.shape == (2, 0, WIDTH)
    scores = layer.routing.depth_route_gate["default"](empty)["scores"]
    assert scores.shape == (2, 0)
