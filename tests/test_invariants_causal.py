"""Invariants 5 to 8: what a token gets does not depend on how the input is cut, padded, batched or continued."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
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
from transformers import DynamicCache, StaticCache

from hf_depthroute.routing.trace import RouteTrace, record_routes, replay_routes

LENGTH = 12
Run = tuple[torch.Tensor, RouteTrace]
every_model = pytest.mark.parametrize(
    ("family", "kind", "attention"), [(f, k, a) for f, k in [*MODELS, *MEMORIES] for a in ATTENTIONS]
)


@functools.cache
def shared(
    family: str, kind: str, attention: str, dtype: torch.dtype = torch.float32, gate_input: str = "normed"
) -> PeftModel:
    """A routed model that no test of this file changes."""
    return routed(build_base(family, attention, dtype), kind, gate_input=gate_input)


@torch.no_grad()
def run(model: PeftModel, pinned: RouteTrace | None = None, **inputs: object) -> Run:
    """One forward pass, free or with the decisions of `pinned`. Inside `disable_adapter`, the trace is empty."""
    with record_routes(model) as trace:
        if pinned is None:
            logits = model(**inputs).logits
        else:
            with replay_routes(model, pinned):
                logits = model(**inputs).logits
    return logits, trace


class Session:
    """A generation in progress: pieces of one input, run with a cache that lives on between them."""

    def __init__(
        self, model: PeftModel, ids: torch.Tensor, cache: DynamicCache | StaticCache, pinned: RouteTrace | None
    ):
        self.model, self.ids, self.cache, self.pinned = model, ids, cache, pinned
        self.logits: list[torch.Tensor] = []
        self.traces: list[RouteTrace] = []

    def step(self, start: int, stop: int, rows: torch.Tensor | None = None, keep: bool = True) -> None:
        """Run positions `start:stop`; row `i` of the cache holds sequence `rows[i]`."""
        batch = len(self.ids)
        rows = torch.arange(batch) if rows is None else rows
        pinned = None if self.pinned is None else take(self.pinned.positions(start, stop), rows)
        ids = self.ids[rows, start:stop]
        logits, trace = run(self.model, pinned, input_ids=ids, past_key_values=self.cache, use_cache=True)
        if keep:
            back = torch.stack([(rows == row).nonzero()[0, 0] for row in range(batch)])
            self.logits.append(logits[back])
            self.traces.append(take(trace, back))


def in_one_piece(session: Session) -> None:
    session.step(0, LENGTH)


def token_by_token(session: Session) -> None:
    for position in range(LENGTH):
        session.step(position, position + 1)


def in_chunks(session: Session) -> None:
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, LENGTH)):
        session.step(start, stop)


def after_crop(session: Session) -> None:
    session.step(0, 6)
    session.step(6, 10, keep=False)
    session.cache.crop(-4)
    session.step(6, LENGTH)


def after_beam_reorder(session: Session) -> None:
    session.step(0, 6)
    rows = torch.tensor([2, 0, 1])
    session.cache.reorder_cache(rows)
    session.step(6, 8, rows)
    session.cache.reorder_cache(rows)
    session.step(8, LENGTH, rows[rows])


def after_batch_repeat_and_select(session: Session) -> None:
    session.step(0, 7)
    session.cache.batch_repeat_interleave(2)
    session.cache.batch_select_indices(torch.tensor([1, 3, 4]))
    session.step(7, LENGTH)


CONTINUATIONS: dict[str, tuple[Callable[[Session], None], str]] = {
    "dynamic cache, one piece": (in_one_piece, "dynamic"),
    "dynamic cache, token by token": (token_by_token, "dynamic"),
    "dynamic cache, chunks": (in_chunks, "dynamic"),
    "static cache, token by token": (token_by_token, "static"),
    "static cache, chunks": (in_chunks, "static"),
    "crop": (after_crop, "dynamic"),
    "beam reorder": (after_beam_reorder, "dynamic"),
    "batch repeat and select": (after_batch_repeat_and_select, "dynamic"),
}
# What differs between attention implementations: one query, several queries behind a cache, a static cache's mask.
BOTH_ATTENTIONS = ("dynamic cache, token by token", "dynamic cache, chunks", "static cache, chunks")


def new_cache(model: PeftModel, kind: str) -> DynamicCache | StaticCache:
    return StaticCache(config=model.config, max_cache_len=16) if kind == "static" else DynamicCache(config=model.config)


def continued(model: PeftModel, ids: torch.Tensor, name: str, pinned: RouteTrace | None = None) -> Run:
    walk, kind = CONTINUATIONS[name]
    session = Session(model, ids, new_cache(model, kind), pinned)
    walk(session)
    return torch.cat(session.logits, dim=1), RouteTrace.cat(session.traces)


@functools.cache
def gap_of_base(family: str, attention: str, name: str) -> float:
    """`base_gap` of a family; it does not depend on what is routed."""
    return base_gap(shared(family, "mlp", attention), tokens(3, LENGTH), name)


def base_gap(model: PeftModel, ids: torch.Tensor, name: str) -> float:
    """The gap that the base model has in the same comparison."""
    walk, kind = CONTINUATIONS[name]
    with torch.no_grad(), model.disable_adapter():
        whole = model(ids).logits
        session = Session(model, ids, new_cache(model, kind), None)
        walk(session)
        return gap(torch.cat(session.logits, dim=1), whole)


@pytest.mark.parametrize(
    ("family", "kind", "attention", "continuation"),
    [
        (family, kind, attention, name)
        for family, kind in [*MODELS, *MEMORIES]
        for name in CONTINUATIONS
        for attention in (ATTENTIONS if name in BOTH_ATTENTIONS else ATTENTIONS[:1])
    ],
)
def test_cached_continuation_equals_prefill(family: str, kind: str, attention: str, continuation: str) -> None:
    own_gap = gap_of_base(family, attention, continuation)
    assert_continuation_equals_prefill(shared(family, kind, attention), continuation, own_gap)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("gate", GATES)
def test_decode_equals_prefill_with_a_gate_on_the_residual_stream(family: str, gate: str) -> None:
    model, continuation = shared(family, gate, "sdpa", gate_input="residual"), "dynamic cache, token by token"
    assert_continuation_equals_prefill(model, continuation, gap_of_base(family, "sdpa", continuation))


def assert_continuation_equals_prefill(model: PeftModel, continuation: str, own_gap: float) -> None:
    ids = tokens(3, LENGTH)
    whole, trace = run(model, input_ids=ids, use_cache=False)
    pinned_logits, _ = continued(model, ids, continuation, pinned=trace)
    assert_pinned(gap(pinned_logits, whole), own_gap)
    _, free_trace = continued(model, ids, continuation)
    assert_free(model, trace, free_trace)


@pytest.mark.parametrize(("family", "kind"), [*MODELS, *MEMORIES])
def test_bfloat16_decode_flips_only_close_decisions(family: str, kind: str) -> None:
    model, ids = shared(family, kind, "sdpa", torch.bfloat16), tokens(3, LENGTH)
    name = "dynamic cache, token by token"
    with pinned_experts(model, len(ids)):
        whole, trace = run(model, input_ids=ids, use_cache=False)
        pinned_logits, _ = continued(model, ids, name, pinned=trace)
    with pinned_experts(model, len(ids)):
        own_gap = base_gap(model, ids, name)
    assert_pinned(gap(pinned_logits, whole), own_gap, bfloat16_rounding(whole))
    _, free_trace = continued(model, ids, name)
    assert_first_flips_are_close(model, trace, free_trace)


@every_model
def test_later_tokens_change_no_earlier_decision_and_no_earlier_logit(family: str, kind: str, attention: str) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    split = 7
    changed = torch.cat([ids[:, :split], tokens(3, LENGTH - split, seed=5)], dim=1)
    logits, trace = run(model, input_ids=ids)
    pinned_logits, _ = run(model, trace, input_ids=changed)
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(model(ids).logits[:, :split], model(changed).logits[:, :split])
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
    inputs = {"input_ids": padded, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def real(values: torch.Tensor) -> torch.Tensor:
        return values[:, first : first + LENGTH]

    logits, trace = run(model, input_ids=ids)
    pinned_logits, _ = run(model, spread(trace, columns, LENGTH + amount), **inputs)
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(real(model(**inputs).logits), model(ids).logits)
    assert_pinned(gap(real(pinned_logits), logits), own_gap)
    _, free_trace = run(model, **inputs)
    assert_free(model, trace, narrow(free_trace, columns))
    for record in free_trace.values():
        assert not bool((record.mask & ~record.real).any())


@every_model
def test_row_order_changes_no_decision_and_no_logit(family: str, kind: str, attention: str) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    rows = torch.tensor([2, 0, 1])
    logits, trace = run(model, input_ids=ids)
    pinned_logits, _ = run(model, take(trace, rows), input_ids=ids[rows])
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(model(ids[rows]).logits, model(ids).logits[rows])
    assert_pinned(gap(pinned_logits, logits[rows]), own_gap)
    assert_free(model, take(trace, rows), run(model, input_ids=ids[rows])[1])


@every_model
def test_batch_composition_changes_no_decision_and_no_logit(family: str, kind: str, attention: str) -> None:
    model, ids = shared(family, kind, attention), tokens(3, LENGTH)
    logits, trace = run(model, input_ids=ids)
    for row in range(3):
        alone = torch.tensor([row])
        pinned_logits, _ = run(model, take(trace, alone), input_ids=ids[alone])
        with torch.no_grad(), model.disable_adapter():
            own_gap = gap(model(ids[alone]).logits, model(ids).logits[alone])
        assert_pinned(gap(pinned_logits, logits[alone]), own_gap)
        assert_free(model, take(trace, alone), run(model, input_ids=ids[alone])[1])


@every_model
def test_packed_documents_get_the_decisions_of_separate_ones(family: str, kind: str, attention: str) -> None:
    model = shared(family, kind, attention)
    documents = [tokens(1, 5, seed=1), tokens(1, 7, seed=2)]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    separate = [run(model, input_ids=document) for document in documents]
    logits = torch.cat([one[0] for one in separate], dim=1)
    trace = RouteTrace.cat([one[1] for one in separate])
    inputs = {"input_ids": packed, "position_ids": positions, "use_cache": False}
    with torch.no_grad(), model.disable_adapter():
        own_gap = gap(model(**inputs).logits, torch.cat([model(document).logits for document in documents], dim=1))
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
        with record_routes(model) as trace:  # a step of training: without gradients the inference rule decides
            model(input_ids=tokens(4, LENGTH), attention_mask=attention_mask)
        for record in trace.values():
            expected = [8, 5, 1, 0] if kind == "experts" else [4, 3, 1, 0]  # of two pairs per token
            assert record.mask.flatten(1).sum(dim=1).tolist() == expected
            assert not bool((record.mask & ~record.real).any())
