"""Invariants 5 to 8: what a token gets does not depend on how the input is cut, padded,
batched or continued."""

from __future__ import annotations

import functools

import pytest
import torch
from continuations import (
    CONTINUATIONS,
    LENGTH,
    Run,
    base_gap,
    continued,
    run,
)
from models import ATTENTIONS, GATES, MEMORIES, MODELS, build_base, routed, tokens
from peft import PeftModel
from protocol import (
    assert_first_flips_are_close,
    assert_free,
    assert_pinned,
    bfloat16_rounding,
    gap,
    narrow,
    pinned_experts,
    spread,
    take,
)

from hf_depthroute.routing.trace import RouteTrace, record_routes

every_model = pytest.mark.parametrize(
    ("family", "kind", "attention"),
    [(f, k, a) for f, k in [*MODELS, *MEMORIES] for a in ATTENTIONS],
)


@functools.cache
def shared(
    family: str,
    kind: str,
    attention: str,
    dtype: torch.dtype = torch.float32,
    gate_input: str = "normed",
) -> PeftModel:
    """A routed model that no test of this file changes."""
    return routed(build_base(family, attention, dtype), kind, gate_input=gate_input)


@functools.cache
def whole(family: str, kind: str, attention: str, **inputs: bool) -> Run:
    """Logits and trace of the tokens that most tests start from, in one pass."""
    return run(shared(family, kind, attention), input_ids=tokens(3, LENGTH), **inputs)


@functools.cache
def whole_of_base(family: str, attention: str) -> torch.Tensor:
    """The base's logits of the same tokens; they do not depend on what is routed."""
    model = shared(family, "mlp", attention)
    with torch.no_grad(), model.disable_adapter():
        return model(tokens(3, LENGTH)).logits


# What differs between attention implementations: one query, several queries behind a cache, a
# static cache's mask.
BOTH_ATTENTIONS = ("dynamic cache, token by token", "dynamic cache, chunks", "static cache, chunks")


@functools.cache
def gap_of_base(family: str, attention: str, name: str) -> float:
    """`base_gap` of a family; it does not depend on what is routed."""
    return base_gap(shared(family, "mlp", attention), tokens(3, LENGTH), name)


@pytest.mark.parametrize(
    ("family", "kind", "attention", "continuation"),
    [
        (family, kind, attention, name)
        for family, kind in [*MODELS, *MEMORIES]
        for name in CONTINUATIONS
        for attention in (ATTENTIONS if name in BOTH_ATTENTIONS else ATTENTIONS[:1])
    ],
)
def test_cached_continuation_equals_prefill(
    family: str, kind: str, attention: str, continuation: str
) -> None:
    own_gap = gap_of_base(family, attention, continuation)
    prefill = whole(family, kind, attention, use_cache=False)
    model = shared(family, kind, attention)
    assert_continuation_equals_prefill(model, prefill, continuation, own_gap)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("gate", GATES)
def test_decode_equals_prefill_with_a_gate_on_the_residual_stream(family: str, gate: str) -> None:
    model, continuation = (
        shared(family, gate, "sdpa", gate_input="residual"),
        "dynamic cache, token by token",
    )
    prefill = run(model, input_ids=tokens(3, LENGTH), use_cache=False)
    own_gap = gap_of_base(family, "sdpa", continuation)
    assert_continuation_equals_prefill(model, prefill, continuation, own_gap)


def assert_continuation_equals_prefill(
    model: PeftModel, prefill: Run, continuation: str, own_gap: float
) -> None:
    ids = tokens(3, LENGTH)
    logits, trace = prefill
    pinned_logits, _ = continued(model, ids, continuation, pinned=trace)
    assert_pinned(gap(pinned_logits, logits), own_gap)
    _, free_trace = continued(model, ids, continuation)
    assert_free(model, trace, free_trace)


@pytest.mark.parametrize(("family", "kind"), [*MODELS, *MEMORIES])
def test_bfloat16_decode_flips_only_close_decisions(family: str, kind: str) -> None:
    model, ids = shared(family, kind, "sdpa", torch.bfloat16), tokens(3, LENGTH)
    name = "dynamic cache, token by token"
    with pinned_experts(model, len(ids)):
        logits, trace = run(model, input_ids=ids, use_cache=False)
        pinned_logits, _ = continued(model, ids, name, pinned=trace)
    with pinned_experts(model, len(ids)):
        own_gap = base_gap(model, ids, name)
    assert_pinned(gap(pinned_logits, logits), own_gap, bfloat16_rounding(logits))
    _, free_trace = continued(model, ids, name)
    assert_first_flips_are_close(model, trace, free_trace)


@every_model
def test_later_tokens_change_no_earlier_decision_and_no_earlier_logit(
    family: str, kind: str, attention: str
) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    split = 7
    changed = torch.cat([ids[:, :split], tokens(3, LENGTH - split, seed=5)], dim=1)
    logits, trace = whole(family, kind, attention)
    pinned_logits, _ = run(model, trace, input_ids=changed)
    with torch.no_grad(), model.disable_adapter():
        base_logits = model(changed).logits
    own_gap = gap(whole_of_base(family, attention)[:, :split], base_logits[:, :split])
    assert_pinned(gap(pinned_logits[:, :split], logits[:, :split]), own_gap)
    _, free_trace = run(model, input_ids=changed)
    assert not torch.equal(free_trace[2].scores[:, split:], trace[2].scores[:, split:])
    assert_free(model, trace.positions(0, split), free_trace.positions(0, split))


@every_model
@pytest.mark.parametrize(("side", "amount"), [("left", 1), ("left", 4), ("right", 1), ("right", 4)])
def test_padding_changes_no_decision_and_no_logit(
    family: str, kind: str, attention: str, side: str, amount: int
) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    zeros = torch.zeros(3, amount, dtype=torch.long)
    ones = torch.ones_like(ids)
    padded, mask = (
        (torch.cat([zeros, ids], 1), torch.cat([zeros, ones], 1))
        if side == "left"
        else (torch.cat([ids, zeros], 1), torch.cat([ones, zeros], 1))
    )
    first = amount if side == "left" else 0
    columns = torch.arange(first, first + LENGTH).expand(3, -1)
    inputs = {
        "input_ids": padded,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }

    def real(values: torch.Tensor) -> torch.Tensor:
        return values[:, first : first + LENGTH]

    logits, trace = whole(family, kind, attention)
    pinned_logits, _ = run(model, spread(trace, columns, LENGTH + amount), **inputs)
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(real(model(**inputs).logits), whole_of_base(family, attention))
    assert_pinned(gap(real(pinned_logits), logits), own_gap)
    _, free_trace = run(model, **inputs)
    assert_free(model, trace, narrow(free_trace, columns))
    for record in free_trace.values():
        assert not bool((record.mask & ~record.real).any())


@every_model
def test_row_order_changes_no_decision_and_no_logit(family: str, kind: str, attention: str) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    rows = torch.tensor([2, 0, 1])
    logits, trace = whole(family, kind, attention)
    pinned_logits, _ = run(model, take(trace, rows), input_ids=ids[rows])
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(model(ids[rows]).logits, whole_of_base(family, attention)[rows])
    assert_pinned(gap(pinned_logits, logits[rows]), own_gap)
    assert_free(model, take(trace, rows), run(model, input_ids=ids[rows])[1])


@every_model
def test_batch_composition_changes_no_decision_and_no_logit(
    family: str, kind: str, attention: str
) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    logits, trace = whole(family, kind, attention)
    for row in range(3):
        alone = torch.tensor([row])
        pinned_logits, _ = run(model, take(trace, alone), input_ids=ids[alone])
        with torch.no_grad(), model.disable_adapter():
            own_gap = gap(model(ids[alone]).logits, whole_of_base(family, attention)[alone])
        assert_pinned(gap(pinned_logits, logits[alone]), own_gap)
        assert_free(model, take(trace, alone), run(model, input_ids=ids[alone])[1])


@every_model
def test_packed_documents_get_the_decisions_of_separate_ones(
    family: str, kind: str, attention: str
) -> None:
    model = shared(family, kind, attention)
    documents = [tokens(1, 5, seed=1), tokens(1, 7, seed=2)]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    separate = [run(model, input_ids=document) for document in documents]
    logits = torch.cat([one[0] for one in separate], dim=1)
    trace = RouteTrace.cat([one[1] for one in separate])
    inputs = {"input_ids": packed, "position_ids": positions, "use_cache": False}
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(
            model(**inputs).logits,
            torch.cat([model(document).logits for document in documents], dim=1),
        )
    assert own_gap < 1e-4  # the base model itself keeps packed documents apart
    pinned_logits, _ = run(model, trace, **inputs)
    assert_pinned(gap(pinned_logits, logits), own_gap)
    assert_free(model, trace, run(model, **inputs)[1])


@pytest.mark.parametrize(("family", "kind"), MODELS)
def test_training_budget_counts_real_tokens_only(family: str, kind: str) -> None:
    model = routed(build_base(family), kind, budget=0.3).train()
    lengths = torch.tensor([12, 7, 1, 0])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    for attention_mask in (mask, mask.flip(-1)):
        # A step of training: without gradients the inference rule decides.
        with record_routes(model) as trace:
            model(input_ids=tokens(4, LENGTH), attention_mask=attention_mask)
        for record in trace.values():
            expected = [8, 5, 1, 0] if kind == "experts" else [4, 3, 1, 0]  # of two pairs per token
            assert record.mask.flatten(1).sum(dim=1).tolist() == expected
            assert not bool((record.mask & ~record.real).any())
