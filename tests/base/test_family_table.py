"""Every row of the family table, in every layout: what the full tables ask of the first nine
families, in short."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import IDS, LAYOUTS, TARGETS, every_family, run, shared
from models import EXTENDED, FAMILY_NAMES, build_base, build_routed, decoder_layers, routed
from peft import PeftModel
from protocol import PINNED_BAR, assert_free, assert_pinned, gap
from row_counts import assert_only_decided_rows_ran, counted_rows
from training import assert_same_tensors, backward, gradients

from hf_depthroute import record_routes, replay_routes, set_budget
from hf_depthroute.base.families import FAMILIES, find_family
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.training.losses import routing_losses

CASES = [(family, target) for family in EXTENDED for target in TARGETS]
# Attention that is skipped per token has to be known by its family; without, it is computed and
# masked.
COUNTED = [
    (family, target)
    for family, target in CASES
    if target == "ffn" or FAMILIES[EXTENDED[family][0]].queries is not None
]
every_case = pytest.mark.parametrize(("family", "target"), CASES)


@functools.cache
def base_logits(family: str) -> torch.Tensor:
    with torch.no_grad():
        return build_base(family)(IDS).logits


@contextmanager
def without_branches(model: PeftModel) -> Iterator[None]:
    branches: list[Any] = [
        routing.depth_route_branch["default"].down for routing in routings_of(model)
    ]
    kept = [branch.state_dict() for branch in branches]
    kept = [{name: value.clone() for name, value in values.items()} for values in kept]
    for branch in branches:
        for parameter in branch.parameters():
            parameter.data.zero_()
    try:
        yield
    finally:
        for branch, values in zip(branches, kept):
            branch.load_state_dict(values)


def test_every_row_is_in_a_table_of_tests() -> None:
    assert {*FAMILY_NAMES, *(model_type for model_type, _ in EXTENDED.values())} == set(FAMILIES)


@every_case
def test_disabled_and_at_budget_one_it_is_the_base(family: str, target: str) -> None:
    model = shared(family, target)
    routed_logits, trace = run(model)
    assert gap(routed_logits, base_logits(family)) > 0.1
    assert 0 < sum(trace.full_ratio().values()) < len(trace)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(IDS).logits, base_logits(family))
    set_budget(model, 1.0)
    try:
        assert torch.equal(run(model)[0], base_logits(family))
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, base_logits(family))
    finally:
        set_budget(model, 0.5)
    assert torch.equal(run(model)[0], routed_logits)


@every_case
def test_a_skipped_part_adds_nothing_to_the_stream(family: str, target: str) -> None:
    """Against the base itself, whose attention and FFN modules are made to return zeros at
    the skipped tokens."""
    model = shared(family, target)
    row = find_family(model.get_base_model())
    with without_branches(model):
        skipped, trace = run(model)

    def silence(index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            parts = output if isinstance(output, tuple) else (output,)
            first = parts[0] * trace[index].mask[..., None]
            return (first, *parts[1:]) if isinstance(output, tuple) else first

        return hook

    with model.disable_adapter(), torch.no_grad(), ExitStack() as hooks:
        for index in trace:
            layer = decoder_layers(model)[index]
            names = {
                "ffn": [row.ffn],
                "attention": [row.attention],
                "block": [row.ffn, row.attention],
            }[target]
            for name in names:
                hooks.callback(getattr(layer, name).register_forward_hook(silence(index)).remove)
        reference = model(IDS).logits
    assert gap(reference, base_logits(family)) > 0.1
    assert_pinned(gap(skipped, reference), base_gap=0.0)


@every_case
def test_gathered_and_masked_execution_agree(family: str, target: str) -> None:
    model = shared(family, target)
    sparse, trace = run(model)
    with state_of(model).override(executor="masked"):
        dense, same = run(model)
    assert_pinned(gap(sparse, dense), base_gap=0.0)
    assert_free(model, trace, same)
    with replay_routes(model, trace):
        assert gap(run(model)[0], sparse) < PINNED_BAR


@pytest.mark.parametrize(("family", "target"), COUNTED)
def test_skipped_rows_are_not_computed(family: str, target: str) -> None:
    model = shared(family, target)
    with counted_rows(model) as counts:
        run(model)
    assert_only_decided_rows_ran(counts)


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_gate_may_read_the_stream(family: str) -> None:
    """`gate_input="residual"`: then a gathered FFN norms no row but those that it runs on."""
    model = build_routed(family, "mlp", gate_input="residual", layers=[1, 2])
    logits, _ = run(model)
    with state_of(model).override(executor="masked"):
        assert_pinned(gap(run(model)[0], logits), base_gap=0.0)
    with state_of(model).override(executor="rows"):
        assert_pinned(gap(run(model)[0], logits), base_gap=0.0)


@every_case
def test_decoding_equals_prefill(family: str, target: str) -> None:
    model = shared(family, target)
    whole, trace = run(model)
    with model.disable_adapter():
        base_gap = gap(decode(model, None)[0], base_logits(family))
    assert_pinned(gap(decode(model, trace)[0], whole), base_gap)
    assert_free(model, trace, decode(model, None)[1])


@torch.no_grad()
def decode(model: PeftModel, pinned: RouteTrace | None) -> tuple[torch.Tensor, RouteTrace]:
    """Logits of `IDS`, a prompt of 4 tokens and then one token at a time."""
    cache, pieces = None, []
    for start, stop in [(0, 4)] + [(t, t + 1) for t in range(4, IDS.shape[1])]:
        with record_routes(model) as step, ExitStack() as replay:
            if pinned is not None:
                replay.enter_context(replay_routes(model, pinned.positions(start, stop)))
            out = model(IDS[:, start:stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append((out.logits, step))
    return torch.cat([piece[0] for piece in pieces], dim=1), RouteTrace.cat(
        [piece[1] for piece in pieces]
    )


@every_case
def test_padding_changes_nothing(family: str, target: str) -> None:
    model = shared(family, target)
    padded = torch.nn.functional.pad(IDS, (5, 0))
    real = torch.nn.functional.pad(torch.ones_like(IDS), (5, 0))
    inputs = {
        "input_ids": padded,
        "attention_mask": real,
        "position_ids": (real.cumsum(-1) - 1).clamp(min=0),
    }
    whole, trace = run(model)
    with model.disable_adapter(), torch.no_grad():
        base_gap = gap(model(**inputs).logits[:, 5:], base_logits(family))
    logits, found = run(model, **inputs)
    assert all(not record.mask[:, :5].any() for record in found.values())
    assert_free(model, trace, found.positions(5, 17))
    assert_pinned(gap(logits[:, 5:], whole), base_gap)


@every_family
def test_whole_sequences_skip_their_attention(family: str) -> None:
    model = build_routed(family, "attention", granularity="sequence", layers=[1, 2])
    logits, trace = run(model)
    kept = torch.stack([record.mask.all(dim=1) for record in trace.values()])
    assert kept.any()
    assert not kept.all()
    with state_of(model).override(executor="masked"):
        assert_pinned(gap(run(model)[0], logits), base_gap=0.0)
    rows: dict[int, int] = {}
    with torch.no_grad(), ExitStack() as hooks:
        for index in trace:
            attention = getattr(decoder_layers(model)[index], find_family(model).attention)

            def count(_: Any, args: Any, kwargs: Any, i: int = index) -> None:
                rows[i] = len(args[0] if args else kwargs["hidden_states"])

            hooks.callback(attention.register_forward_pre_hook(count, with_kwargs=True).remove)
        first = model(IDS[:, :8], use_cache=True)
        cache, steps = first.past_key_values, []
        for t in range(8, 12):
            steps.append(model(IDS[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
    with torch.no_grad(), record_routes(model) as prompt:
        model(IDS[:, :8])
    full = {i: int(record.mask[:, 0].sum()) for i, record in prompt.items()}
    windows = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    # A sliding cache holds every sequence: there the queries of the kept ones run, without a call
    # of the module.
    assert all(rows.get(i, 0) == count for i, count in full.items() if "sliding" not in windows[i])
    wide = RouteTrace({i: whole_record(record, 12) for i, record in prompt.items()})
    with state_of(model).override(executor="masked"), replay_routes(model, wide):
        expected = run(model)[0]
    assert_pinned(gap(torch.cat([first.logits, *steps], dim=1), expected), base_gap=0.0)


def whole_record(record: Any, length: int) -> Any:
    """A decision about sequences, for more positions."""
    wide = {
        name: getattr(record, name)[:, :1].expand(-1, length)
        for name in ("mask", "scores", "probs")
    }
    return replace(record, **wide, extras={})


@every_case
def test_gradients_reach_the_gate_and_the_branch(family: str, target: str) -> None:
    model = shared(family, target).train()
    try:
        with record_routes(model) as trace:
            loss = model(IDS, labels=IDS).loss
        terms = routing_losses(trace, lm=loss)
        assert all(bool(torch.isfinite(term)) for term in terms.values())
        sum(terms.values()).backward()
        for routing in routings_of(model):
            for group in (routing.depth_route_gate, routing.depth_route_branch):
                gradients = [p.grad for p in group.parameters()]
                assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)
                assert any(bool(g.any()) for g in gradients if g is not None)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    finally:
        model.zero_grad()
        model.eval()


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_reentrant_checkpoints_lose_no_gradient_in_a_layer_that_is_not_routed(
    family: str, layers: list[int]
) -> None:
    """Behind the routed layers, where a lost one shows in nothing but what routers learn,
    and below them."""
    found = []
    for checkpointing in (False, True):
        model = build_routed(family, layers=layers).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        terms, _ = backward(model, {"input_ids": IDS, "labels": IDS})
        assert terms["lm"].requires_grad
        found.append(gradients(model))
    assert_same_tensors(*found, tolerance=1e-6)


# What is saved does not depend on family and target together.
@pytest.mark.parametrize(
    ("family", "target"), [(f, TARGETS[i % 3]) for i, f in enumerate(EXTENDED)]
)
def test_saved_loaded_and_unloaded(family: str, target: str, tmp_path: Path) -> None:
    model = routed(build_base(family), target=target, layers=[1, 2])
    base = model.get_base_model()
    expected = run(model)[0]
    model.save_pretrained(tmp_path)
    base = model.unload()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in base.modules())
    with torch.no_grad():
        assert torch.equal(base(IDS).logits, base_logits(family))
    assert list(base.state_dict()) == list(build_base(family).state_dict())
    assert torch.equal(run(PeftModel.from_pretrained(base, tmp_path))[0], expected)


EXPERTS = [name for name in EXTENDED if "deepseek" in name]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_routed_pair_by_pair(family: str) -> None:
    model = build_routed(family, "experts", layers=[1, 2])
    with counted_rows(model) as counts:
        logits, _ = run(model)
    assert_only_decided_rows_ran(counts)
    with state_of(model).override(executor="masked"):
        assert_pinned(gap(run(model)[0], logits), base_gap=0.0)
    set_budget(model, 1.0)
    assert torch.equal(run(model)[0], base_logits(family))
    with pytest.raises(ConfigError, match="layer 0 has no experts"):
        build_routed(family, "experts", layers=[0])
