"""`record_routes` and `replay_routes`: they watch, they repeat, and they leave nothing behind."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from models import (
    CONFIGS,
    FAMILY_NAMES,
    GATES,
    build_base,
    build_routed,
    randomised,
    routed,
    tokens,
)
from torch import nn
from transformers import StaticCache
from transformers.masking_utils import create_masks_for_generate

from hf_depthroute import record_routes, replay_routes
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.state import RunSettings
from hf_depthroute.routing.trace import RouteRecord, RouteTrace

ROUTED = [1, 2, 3]


def padded(batch: int = 2, length: int = 8, padding: int = 3) -> dict[str, torch.Tensor]:
    """Random tokens, the first row with `padding` pad tokens on the left."""
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def made_trace(
    mask: torch.Tensor, token_mask: torch.Tensor | None = None, index: int = 1
) -> RouteTrace:
    scores = torch.zeros(mask.shape)
    return RouteTrace({index: RouteRecord(mask, scores, torch.sigmoid(scores), token_mask, 0.5)})


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_recording_changes_no_output_in_inference(family: str, gate: str) -> None:
    model, batch = build_routed(family, gate), padded()
    with torch.no_grad():
        plain = model(**batch).logits
        with record_routes(model) as trace:
            recorded = model(**batch).logits
    assert torch.equal(plain, recorded)
    assert list(trace) == ROUTED


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_recording_changes_no_loss_and_no_gradient_in_training(family: str, gate: str) -> None:
    def run(record: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model, batch = build_routed(family, gate).train(), padded()
        if record:
            with record_routes(model):
                loss = model(**batch, labels=batch["input_ids"]).loss
        else:
            loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    (plain, plain_gradients), (recorded, gradients) = run(False), run(True)
    assert torch.equal(plain, recorded)
    for name, gradient in gradients.items():
        assert gradient is not None and torch.equal(gradient, plain_gradients[name]), name


def test_recording_changes_no_generated_token() -> None:
    model, ids = build_routed("llama"), tokens(2, 5)
    plain = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    with record_routes(model) as trace:
        recorded = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, recorded)
    assert trace[1].mask.shape == (2, 1)  # the last step


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("training", [False, True])
def test_a_record_holds_masks_scores_and_probabilities(gate: str, training: bool) -> None:
    model, batch = build_routed("llama", gate).train(training), padded()
    with record_routes(model) as trace:
        model(**batch)
    for record in trace.values():
        assert record.mask.dtype == torch.bool and record.mask.shape == (2, 8)
        assert record.scores.dtype == record.probs.dtype == torch.float32
        torch.testing.assert_close(record.probs, torch.sigmoid(record.scores / 2.0))
        assert torch.equal(record.real, batch["attention_mask"].bool())
        assert not (record.mask & ~record.real).any()
        assert record.budget == 0.5
        expected = (
            {"q_full", "q_cheap"} | ({"z_full", "z_cheap"} if training else set())
            if gate == "jepa"
            else set()
        )
        assert set(record.extras) == expected
        for name in expected:
            assert getattr(record, name).shape == (2, 8, 8)


def test_a_record_names_what_it_has_when_asked_for_more() -> None:
    record = made_trace(torch.ones(1, 2, dtype=torch.bool))[1]
    with pytest.raises(AttributeError, match="no 'q_full'; it has mask, scores, probs"):
        record.q_full  # noqa: B018


def test_recording_works_on_the_peft_model_its_base_and_a_module_around_them() -> None:
    model, ids = build_routed("llama"), tokens(2, 6)
    around = nn.ModuleDict({"inner": model})
    traces = []
    for handle in (model, model.get_base_model(), around):
        with torch.no_grad(), record_routes(handle) as trace:
            model(ids)
        traces.append(trace)
    for trace in traces[1:]:
        assert all(torch.equal(trace[i].mask, traces[0][i].mask) for i in ROUTED)


def test_a_trace_holds_the_last_forward_pass_only() -> None:
    model = build_routed("llama")
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(2, 6, seed=1))
        model(tokens(3, 4, seed=2))
        with record_routes(model) as last:
            model(tokens(3, 4, seed=2))
    assert trace[1].scores.shape == (3, 4)
    assert torch.equal(trace[1].scores, last[1].scores)


def test_nested_recorders_see_their_own_passes() -> None:
    model, first, second, third = build_routed("llama"), tokens(1, 4), tokens(1, 5), tokens(1, 6)
    with torch.no_grad(), record_routes(model) as outer:
        model(first)
        assert len(outer) == 3
        with record_routes(model) as inner:
            assert len(inner) == 0
            model(second)
        assert outer[1].mask.shape == inner[1].mask.shape == (1, 5)
        model(third)
    assert outer[1].mask.shape == (1, 6)
    assert inner[1].mask.shape == (1, 5)


def test_two_recorders_that_close_out_of_order_do_not_disturb_each_other() -> None:
    model, ids = build_routed("llama"), tokens(1, 4)
    first, second = record_routes(model), record_routes(model)
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(ids)
    second.__exit__(None, None, None)
    assert (len(one), len(two)) == (0, 3)
    assert all(not routing.state.settings.recorders for routing in routings_of(model))


def test_after_the_block_nothing_is_recorded() -> None:
    model = build_routed("llama")
    with torch.no_grad():
        with record_routes(model) as trace:
            model(tokens(1, 4))
        model(tokens(1, 7))
    assert trace[1].mask.shape == (1, 4)


def test_an_exception_restores_the_state() -> None:
    model, ids = build_routed("llama"), tokens(2, 6)
    with torch.no_grad():
        plain = model(ids).logits
        with pytest.raises(RuntimeError, match="inside"), record_routes(model) as trace:
            model(ids)
            with replay_routes(model, trace):
                raise RuntimeError("inside")
        for routing in routings_of(model):
            assert routing.state.settings == RunSettings()
        assert torch.equal(model(ids).logits, plain)


def test_an_exception_inside_a_forward_pass_leaves_the_layers_before_it_recorded() -> None:
    model = build_routed("llama")

    def fail(*_: object) -> None:
        raise RuntimeError("broken layer")

    hook = model.get_base_model().model.layers[2].mlp.register_forward_hook(fail)
    with (
        pytest.raises(RuntimeError, match="broken layer"),
        torch.no_grad(),
        record_routes(model) as trace,
    ):
        model(tokens(4, 8))
    hook.remove()
    assert list(trace) == [1]
    with torch.no_grad():
        model(tokens(4, 8))
    assert list(trace) == [1]


@pytest.mark.parametrize("context", ["record", "replay"])
def test_a_model_without_routed_layers_is_refused(context: str) -> None:
    model = build_base("llama")
    opened = record_routes(model) if context == "record" else replay_routes(model, RouteTrace())
    with pytest.raises(
        ValueError,
        match="LlamaForCausalLM has no routed layer; wrap it with get_depth_routed_model",
    ):
        opened.__enter__()


def test_a_disabled_adapter_records_nothing() -> None:
    model = build_routed("llama")
    with torch.no_grad(), model.disable_adapter(), record_routes(model) as trace:
        model(tokens(1, 4))
    assert len(trace) == 0 and trace.full_ratio() == {}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_replaying_repeats_the_output(family: str, training: bool) -> None:
    model, ids = build_routed(family).train(training), tokens(2, 8)
    with torch.no_grad():
        with record_routes(model) as trace:
            plain = model(ids).logits
        with replay_routes(model, trace), record_routes(model) as again:
            replayed = model(ids).logits
    assert torch.equal(plain, replayed)
    for index, record in trace.items():
        assert torch.equal(record.mask, again[index].mask)
        assert torch.equal(record.scores, again[index].scores)


def test_replaying_overrides_the_models_own_decisions() -> None:
    model, ids = build_routed("llama"), tokens(2, 8)
    with torch.no_grad():
        with record_routes(model) as trace:
            plain = model(ids).logits
        flipped = RouteTrace(copy.deepcopy(dict(trace)))
        for record in flipped.values():
            record.mask = ~record.mask
        with replay_routes(model, flipped), record_routes(model) as again:
            replayed = model(ids).logits
    assert not torch.allclose(plain, replayed)
    assert all(torch.equal(again[i].mask, ~trace[i].mask) for i in ROUTED)


def test_nested_replays_restore_the_outer_one() -> None:
    model, ids = build_routed("llama"), tokens(1, 4)
    all_full = RouteTrace({i: made_trace(torch.ones(1, 4, dtype=torch.bool))[1] for i in ROUTED})
    none_full = RouteTrace({i: made_trace(torch.zeros(1, 4, dtype=torch.bool))[1] for i in ROUTED})
    with torch.no_grad(), record_routes(model) as seen:
        with replay_routes(model, all_full):
            with replay_routes(model, none_full):
                model(ids)
                assert set(seen.full_ratio().values()) == {0.0}
            model(ids)
            assert set(seen.full_ratio().values()) == {1.0}
        model(ids)
        assert 0 < sum(seen.full_ratio().values()) < 3


@pytest.mark.parametrize("shape", [(2, 7), (1, 8), (3, 8)])
def test_replaying_masks_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    model = build_routed("llama")
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(2, 8))
    message = f"layer 1: the replayed mask has shape (2, 8), the input {shape}"
    with replay_routes(model, trace), pytest.raises(ValueError, match=re.escape(message)):
        model(tokens(*shape))


def test_a_trace_replays_piece_by_piece_and_joins_again() -> None:
    model, ids = build_routed("llama", "jepa"), tokens(2, 8)
    with torch.no_grad(), record_routes(model) as whole:
        plain = model(ids).logits
    pieces, logits, cache = [], [], None
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        with (
            torch.no_grad(),
            replay_routes(model, whole.positions(start, stop)),
            record_routes(model) as piece,
        ):
            output = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pieces.append(piece)
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), plain, atol=1e-5, rtol=1e-5)
    joined = RouteTrace.cat(pieces)
    assert list(joined) == list(whole)
    for index in joined:
        assert torch.equal(joined[index].mask, whole[index].mask)
        torch.testing.assert_close(joined[index].q_full, whole[index].q_full, atol=1e-5, rtol=1e-5)


def test_joined_traces_keep_padding_where_a_step_has_no_mask() -> None:
    """A static cache's masks are 4D, and do not say of a single new token whether it is real."""
    first, real = (
        torch.ones(2, 3, dtype=torch.bool),
        torch.tensor([[False, False, True], [True, True, True]]),
    )
    joined = RouteTrace.cat(
        [made_trace(first & real, real), made_trace(torch.zeros(2, 1, dtype=torch.bool))]
    )
    assert torch.equal(joined[1].real, torch.cat([real, torch.ones(2, 1, dtype=torch.bool)], dim=1))
    assert joined.full_ratio() == {1: pytest.approx(4 / 6)}
    assert RouteTrace.cat([made_trace(first)] * 2)[1].token_mask is None


@pytest.mark.parametrize("window", [4, 6, None])
def test_padding_is_known_where_the_window_of_a_static_cache_has_moved_on(
    window: int | None,
) -> None:
    """By the 4D masks that `generate` makes for prompts in chunks."""
    kind, make = CONFIGS["mistral"]
    config = make()
    config.sliding_window = window
    model = routed(randomised(kind(config), "sdpa", torch.float32, seed=0))
    batch = padded(length=12, padding=7)
    cache = StaticCache(config=config, max_cache_len=16)
    pieces = []
    for start, stop in ((0, 4), (4, 8), (8, 12)):
        ids = batch["input_ids"][:, start:stop]
        mask = create_masks_for_generate(
            config=config,
            inputs_embeds=torch.empty(*ids.shape, 0),
            attention_mask=batch["attention_mask"][:, :stop],
            past_key_values=cache,
        )
        assert mask.ndim == 4
        with torch.no_grad(), record_routes(model) as trace:
            model(ids, attention_mask=mask, past_key_values=cache)
        pieces.append(trace[2].real)
    assert torch.equal(torch.cat(pieces, dim=1), batch["attention_mask"].bool())


def test_layers_without_scores_join_those_with_them() -> None:
    model, ids = build_routed("llama", "jepa"), tokens(2, 6)
    with torch.no_grad():
        with record_routes(model) as first:
            model(ids)
        with state_of(model).override(executor="full"), record_routes(model) as second:
            model(ids)
    joined = RouteTrace.cat([first, second])[1]
    assert joined.q_full.shape == joined.q_cheap.shape == (2, 12, 8)
    assert joined.q_full[:, 6:].isnan().all() and joined.scores[:, 6:].isnan().all()


def test_who_leaves_in_a_replayed_layer_stays_out_of_those_that_decide() -> None:
    model, ids = build_routed("llama", gate="exit", target="block"), tokens(2, 8)
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    assert trace[2].mask.any()
    nobody = RouteTrace({1: replace(trace[1], mask=torch.zeros_like(trace[1].mask))})
    for start, stop in ((0, 8), (0, 5)):
        with (
            torch.no_grad(),
            replay_routes(model, nobody.positions(start, stop)),
            record_routes(model) as again,
        ):
            model(ids[:, start:stop])
        assert not any(record.mask.any() for record in again.values())


def test_a_trace_is_a_mapping_in_layer_order() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    trace = RouteTrace()
    for index in (11, 2, 7):
        trace[index] = made_trace(mask)[1]
    assert isinstance(trace, Mapping)
    assert list(trace) == list(trace.keys()) == [2, 7, 11]
    assert [record.budget for record in trace.values()] == [0.5] * 3
    assert len(trace) == 3 and 7 in trace and 3 not in trace and trace.get(3) is None
    assert repr(trace) == "RouteTrace(layers=[2, 7, 11])"
    with pytest.raises(KeyError):
        trace[3]


def test_assigning_a_layer_twice_keeps_the_second_record() -> None:
    trace = made_trace(torch.ones(1, 2, dtype=torch.bool))
    trace[1] = made_trace(torch.zeros(1, 2, dtype=torch.bool))[1]
    assert len(trace) == 1 and trace.full_ratio() == {1: 0.0}


def test_a_trace_survives_pickle_and_deepcopy() -> None:
    model = build_routed("llama", "jepa")
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(1, 4))
    for other in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert list(other) == list(trace)
        assert torch.equal(other[2].q_full, trace[2].q_full)


def test_full_ratio_counts_real_tokens_only() -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    real = torch.tensor([[True, False, True, True], [False, False, True, True]])
    assert made_trace(mask, real).full_ratio() == {1: pytest.approx(2 / 5)}
    assert made_trace(mask).full_ratio() == {1: pytest.approx(5 / 8)}


def test_full_ratio_without_real_tokens_is_zero() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert made_trace(mask, torch.zeros_like(mask)).full_ratio() == {1: 0.0}


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.75])
def test_full_ratio_of_training_is_the_budget_of_the_real_tokens(budget: float) -> None:
    model, batch = build_routed("llama", budget=budget).train(), padded(2, 16, padding=8)
    with record_routes(model) as trace:
        model(**batch)
    chosen = sum(-(-int(1000 * budget) * count // 1000) for count in (8, 16))
    assert trace.full_ratio() == {index: pytest.approx(chosen / 24) for index in ROUTED}
