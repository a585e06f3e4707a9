"""The data of a routed model's page: pieces of text, token views that equal the trace,
measurements."""

from __future__ import annotations

import base64
import itertools
import json

import pytest
import torch
from models import build_base, build_routed, routed, tokens
from report_pages import HOSTILE, byte_tokenizer, fallback_tokenizer, planted_trace
from text_models import word_tokenizer

from hf_depthroute import record_routes, set_budget
from hf_depthroute.evaluation.cost import route_cost
from hf_depthroute.inference.calibration import active_routings, use_selection
from hf_depthroute.report.collect import Sample, collect_scores, collect_tokens, count_costs
from hf_depthroute.report.tokens import text_pieces
from hf_depthroute.routing.trace import RouteTrace


def decoded(layer: dict, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and mask `[T, K]` as the page reads them."""
    values = torch.frombuffer(bytearray(base64.b64decode(layer["scores"])), dtype=torch.float32)
    mask = torch.tensor([letter == "1" for letter in layer["mask"]])
    return values.view(tokens, layer["decisions"]), mask.view(tokens, layer["decisions"])


# Text


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize(
    "text", ["abc", "a \U0001f999\U0001f999 b", "שלום abc", "a\n\nb", "", HOSTILE, "é"]
)
def test_pieces_are_the_decoded_text_and_hold_every_token(make, text):
    tokenizer = make()
    ids = tokenizer(text)["input_ids"]
    pieces, counts = text_pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert sum(counts) == len(ids) and min(counts, default=1) >= 1
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_of_one_character_are_one_piece():
    tokenizer = byte_tokenizer()
    assert text_pieces(tokenizer, tokenizer("a\U0001f999ש")["input_ids"]) == (
        ["a", "\U0001f999", "ש"],
        [1, 4, 2],
    )


def test_bytes_that_are_no_text_are_single_pieces():
    tokenizer = byte_tokenizer()
    ids = tokenizer("\U0001f999")["input_ids"][:2]
    assert text_pieces(tokenizer, ids) == (["\ufffd", "\ufffd"], [1, 1])


def test_no_piece_reaches_from_the_prompt_into_what_follows():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a\U0001f999b")["input_ids"]
    _, counts = text_pieces(tokenizer, ids, boundary=3)
    assert 3 in list(itertools.accumulate(counts))


# The token view


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target": "block"},
        {"gate": "linear", "target": "attention", "granularity": "sequence", "branch": "none"},
    ],
    ids=["ffn", "block", "sequence"],
)
def test_the_view_holds_the_trace(fields):
    model = routed(build_base("llama"), **fields)
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with record_routes(model) as trace, torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    view = trace.show(word_tokenizer(), ids, logits=logits)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert view.data["layers"] == [1, 2, 3]
    for row, real in enumerate(mask.bool()):
        run = view.data["texts"][row]["runs"][0]
        assert sum(run["counts"]) == real.sum()
        for layer in run["layers"]:
            scores, full = decoded(layer, int(real.sum()))
            record = trace[layer["layer"]]
            assert torch.equal(scores[:, 0], record.scores[row][real])
            assert torch.equal(full[:, 0], record.mask[row][real])
            assert torch.equal(full[:, 0], scores[:, 0] >= layer["threshold"])
    assert view.data["texts"][0]["runs"][0]["loss"] == [
        None,
        *(round(v, 4) for v in expected.tolist()),
    ]
    padded = view.data["texts"][1]["runs"][0]["loss"]
    assert padded[0] is None and None not in padded[1:]  # padding predicts nothing


def test_the_view_shows_what_decoding_ran_in_full_where_only_prompts_are_routed():
    model, ids = routed(build_base("llama"), phases="prefill"), tokens(1, 8)[0]
    data = collect_tokens(model, word_tokenizer(), [Sample("p", ids, 6)], [0.5])
    for layer in data["texts"][0]["runs"][0]["layers"]:
        # The prompt's last token, and every one that was read after it.
        assert layer["mask"][7:13] == "1" * 6
    assert any("0" in layer["mask"][:7] for layer in data["texts"][0]["runs"][0]["layers"])


def test_pairs_of_tokens_and_experts_are_shown_as_several_decisions():
    model = routed(build_base("olmoe"), "experts")
    with record_routes(model) as trace, torch.no_grad():
        model(tokens(1, 6))
    (layer, *_) = trace.show().data["texts"][0]["runs"][0]["layers"]
    scores, full = decoded(layer, 6)
    assert layer["decisions"] == 2
    assert torch.equal(scores, trace[1].scores[0]) and torch.equal(full, trace[1].mask[0])


def test_without_a_threshold_rule_the_view_claims_none():
    model = routed(build_base("llama"))
    with use_selection(model, "topk"), record_routes(model) as trace, torch.no_grad():
        model(tokens(1, 6))
    assert all(record.threshold is None for record in trace.values())
    assert {layer["threshold"] for layer in trace.show().data["texts"][0]["runs"][0]["layers"]} == {
        None
    }


def test_a_budget_of_one_has_no_finite_threshold_and_its_page_is_valid():
    model = routed(build_base("llama"))
    set_budget(model, 1.0)
    with record_routes(model) as trace, torch.no_grad():
        model(tokens(1, 6))
    view = trace.show()
    assert view.data["texts"][0]["runs"][0]["layers"][0]["threshold"] == "-Infinity"
    json.dumps(view.data, allow_nan=False)
    assert "token-data" in view.html


def test_a_memory_has_no_budget_and_its_page_is_valid():
    model = build_routed("llama", "memory")
    with record_routes(model) as trace, torch.no_grad():
        model(tokens(1, 6))
    view = trace.show()
    assert view.data["texts"][0]["runs"][0]["budget"] is None
    assert "token-data" in view.html


def test_a_view_without_text_shows_positions():
    view = planted_trace(5, 0.5).show()
    assert [piece.strip() for piece in view.data["texts"][0]["runs"][0]["pieces"]] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]
    assert "tokens=5" in repr(view) and "layers=[2, 5, 6]" in repr(view)


def test_what_does_not_fit_the_trace_is_refused():
    with pytest.raises(ValueError, match="the trace is empty"):
        RouteTrace().show()
    with pytest.raises(ValueError, match=r"input_ids has shape \(1, 9\).*1 x 5 tokens"):
        planted_trace(5, 0.5).show(input_ids=torch.zeros(1, 9, dtype=torch.long))


def test_a_notebook_gets_a_frame_that_cannot_reach_it(tmp_path):
    view = planted_trace(5, 0.5).show()
    shown = view._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="') and "<script" not in shown
    assert view.save(tmp_path / "view.html").read_text() == view.html


# Measuring


@pytest.fixture(scope="module")
def small():
    return routed(build_base("llama"))


def test_scores_are_those_of_the_evaluated_text(small):
    batches = [{"input_ids": tokens(3, 16, seed)} for seed in (1, 2)]
    before = [routing.active_config().budget for routing in active_routings(small)]
    found = collect_scores(small, batches, [0.25, 0.5])
    assert [routing.active_config().budget for routing in active_routings(small)] == before
    set_budget(small, 0.25)
    with torch.no_grad():
        traces = []
        for batch in batches:
            with record_routes(small) as trace:
                small(**batch)
            traces.append(trace)
    set_budget(small, before[0])
    for index, layer in found[0].items():
        mask = torch.cat([trace[index].mask for trace in traces])
        assert layer.full_ratio == pytest.approx(float(mask.float().mean()))
        assert (sum(layer.full), sum(layer.skipped)) == (int(mask.sum()), int((~mask).sum()))
        assert layer.threshold == pytest.approx(float(traces[0][index].threshold))
        # No bin on the far side of the threshold's holds a decision of the other kind.
        for low, high, full, skipped in zip(
            layer.edges, layer.edges[1:], layer.full, layer.skipped
        ):
            assert not (full and high < layer.threshold) and not (skipped and low > layer.threshold)
    assert found[0][1].edges == found[1][1].edges


def test_cost_is_route_cost_in_parts(small):
    scores = collect_scores(small, [{"input_ids": tokens(2, 16)}], [0.5])
    (cost,) = count_costs(small, scores, 2, 16)
    shares = {index: layer.full_ratio for index, layer in scores[0].items()}
    counted = route_cost(small, batch_size=2, length=16, full_ratio=shares, logits_to_keep=16)
    assert cost.rest + cost.full + cost.overhead + cost.saved == pytest.approx(counted.flops_dense)
    assert cost.rest + cost.full + cost.overhead == pytest.approx(counted.flops_routed)
    assert min(cost.rest, cost.full, cost.overhead) > 0


def test_generated_tokens_are_shown_with_what_decoding_decided(small):
    prompt = tokens(1, 6)
    data = collect_tokens(small, word_tokenizer(), [Sample("a", prompt[0], 5)], [0.25, 0.5])
    for budget, run in zip((0.25, 0.5), data["texts"][0]["runs"]):
        set_budget(small, budget)
        cache, steps, ids = None, [], prompt
        with torch.no_grad():
            for _ in range(6):
                with record_routes(small) as trace:
                    out = small(
                        ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True
                    )
                cache = out.past_key_values
                steps.append(trace)
                ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
        trace = RouteTrace.cat(steps)
        assert (run["budget"], run["prompt"], sum(run["counts"])) == (budget, 6, 11)
        for layer in run["layers"]:
            scores, full = decoded(layer, 11)
            torch.testing.assert_close(
                scores[:, 0], trace[layer["layer"]].scores[0], rtol=1e-4, atol=1e-5
            )
            assert torch.equal(full[:, 0], trace[layer["layer"]].mask[0])
    set_budget(small, 0.5)
