"""Static layers beside gated ones: every token takes their cheap path, without a gate;
the budget is the others'."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from protocol import gap
from report_pages import byte_tokenizer
from row_counts import assert_only_decided_rows_ran, counted_rows
from safetensors.torch import load_file, save_file
from speed.draft_search import search_draft
from study.utility import exact_utility, utility_labels
from training import backward, make_trainer, rows, stacked, step_logs

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    calibrate_budgets,
    fit_router,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    route_cost,
    set_budget,
)
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.bench import bench
from hf_depthroute.card import make_card
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import evaluate_budgets, mean_loss
from hf_depthroute.execution.decode import DecodeStep
from hf_depthroute.fitting.narrowing import narrowed
from hf_depthroute.inference.autotune import tune_execution
from hf_depthroute.inference.calibration import (
    active_routings,
    gated_routings,
    is_calibrated,
    thresholds,
)
from hf_depthroute.inference.drafting import draft_view
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.report.collect import (
    RunReport,
    Sample,
    collect_scores,
    collect_tokens,
    count_costs,
)
from hf_depthroute.report.run_page import render_page
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace, count_routes
from hf_depthroute.training.log_lines import log_line
from hf_depthroute.training.record import remembered
from hf_depthroute.vllm.limits import check_adapter

MEMORY = {
    "branch": "memory",
    "memory_slots": 2048,
    "memory_width": 4,
    "memory_heads": 1,
    "ngram_order": 2,
}
STATIC = {"layers": [1, 2, 3], "static_layers": [2]}


def build(family: str = "llama", kind: str = "mlp", **fields: Any) -> PeftModel:
    return build_routed(family, kind, **(STATIC | fields))


def forced(model: PeftModel, family: str = "llama", kind: str = "mlp", **fields: Any) -> PeftModel:
    """The same adapter with gates in all layers, of which the static ones' let
    nothing run in full."""
    twin = build_routed(family, kind, **({"layers": STATIC["layers"]} | fields))
    twin.load_state_dict(model.state_dict(), strict=False)
    for routing in routings_of(twin):
        if routing.layer_index in STATIC["static_layers"]:
            routing.active_quantiles().set(torch.full_like(routing.active_quantiles().values, 1e30))
    return twin.eval()


def text(rows: int = 8, length: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in tokens(rows, length, seed=5).split(4)]


# The configuration --------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "static_layers=[4] must be routed layers, and layer 4 is none": {
        "layers": [1, 2],
        "static_layers": [4],
    },
    "static_layers=[1, 2] are all of the routed layers; use gate='none'": {
        "layers": [1, 2],
        "static_layers": [1, 2],
    },
    "static_layers is not supported with target='experts' per token": {
        "target": "experts",
        "static_layers": [3],
    },
    "static_layers is not supported with target='memory' per token": {
        "target": "memory",
        "static_layers": [3],
    },
    "static_layers is not supported with target='ffn' per sequence": {
        "granularity": "sequence",
        "static_layers": [3],
    },
    "static_layers is not supported with gate='none': all routed layers": {
        "gate": "none",
        "static_layers": [3],
    },
    "static_layers is not supported with gate='exit'": {
        "gate": "exit",
        "target": "block",
        "static_layers": [3],
    },
    "static_layers needs thresholds that follow the budget": {
        "gate": "linear",
        "static_layers": [3],
    },
    "static_layers needs thresholds": {"causal_rule": "predictor", "static_layers": [3]},
}


@pytest.mark.parametrize("start", REFUSED)
def test_what_cannot_be_static_is_refused_in_one_line(start: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DepthRouteConfig(**REFUSED[start])
    assert str(refused.value).startswith(start) and "\n" not in str(refused.value)


def test_static_layers_are_checked_with_the_depth_where_layers_are_a_rule() -> None:
    config = DepthRouteConfig(layers="last:2", static_layers=[1])
    assert config.routed_layers(3) == [1, 2]
    with pytest.raises(
        ConfigError, match=r"static_layers=\[1\] must be routed layers, and layer 1 is none"
    ):
        config.routed_layers(4)
    with pytest.raises(ConfigError, match=r"static_layers=\[0\] are all of the routed layers"):
        DepthRouteConfig(layers="every:1", static_layers=[0]).routed_layers(1)
    base = build_base("llama")
    before = [type(layer) for layer in decoder_layers(base)]
    with pytest.raises(ConfigError, match="layer 1 is none"):
        get_depth_routed_model(base, config)
    assert [type(layer) for layer in decoder_layers(base)] == before


def test_the_field_is_saved_sorted_and_only_where_it_is_set(tmp_path: Path) -> None:
    build(layers="all", static_layers=[3, 1]).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["static_layers"] == [1, 3]
    assert "static_layers" not in DepthRouteConfig().to_dict()


# What a static layer computes ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "olmoe"])
@pytest.mark.parametrize(
    "fields", [{}, {"branch": "none"}, {"gate_input": "residual"}, MEMORY], ids=str
)
def test_output_is_that_of_a_gate_that_lets_nothing_run(
    family: str, fields: dict[str, Any]
) -> None:
    model = build(family, **fields)
    twin, ids = forced(model, family, **fields), tokens(3, 12)
    with torch.no_grad(), record_routes(model) as trace, record_routes(twin) as of_twin:
        assert torch.equal(model(ids).logits, twin(ids).logits)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, twin(ids).logits)
    assert not trace[2].mask.any() and trace[2].static and trace[2].threshold is None
    assert trace[1].mask.any() and torch.equal(trace[3].mask, of_twin[3].mask)


@pytest.mark.parametrize("kind", ["attention", "block"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_attention_is_left_out_with_its_keys_and_values(family: str, kind: str) -> None:
    static = {"layers": [0, 1, 2], "static_layers": [0, 2]}
    model = build_routed(family, kind, **static)
    twin = build_routed(family, kind, layers=[0, 1, 2])
    twin.load_state_dict(model.state_dict(), strict=False)
    for index in (0, 2):
        table = routings_of(twin)[index].active_quantiles()
        table.set(torch.full_like(table.values, 1e30))
    ids = tokens(3, 12)
    with torch.no_grad():
        out = model(ids, use_cache=True)
        assert gap(out.logits, twin(ids).logits) < 1e-5
    held = [
        layer.keys is not None and layer.keys.numel() > 0 for layer in out.past_key_values.layers
    ]
    assert held[:3] == [False, True, False]


def test_a_static_layer_has_no_gate() -> None:
    model = build(kind="jepa", selection="controller")
    names = [name for name, _ in model.named_parameters() if ".2.routing." in name]
    assert names and all(".depth_route_branch." in name for name in names)
    gated, static = routings_of(model)[0], routings_of(model)[1]
    assert gated.active_controller() is not None and static.active_controller() is None
    assert not static.projections
    # The projection of all layers is in the first that has a gate.
    first = build(kind="jepa", static_layers=[1])
    assert [len(routing.depth_route_target) for routing in routings_of(first)] == [0, 1, 0]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
@torch.no_grad()
def test_decoding_with_a_cache_is_the_prefill(kind: str, batch: int) -> None:
    model, ids = build(kind=kind), tokens(batch, 12, seed=4)
    with record_routes(model) as whole:
        wanted = model(ids).logits
    for parts in ([ids[:, :4], *ids[:, 4:].split(1, 1)], ids.split(5, 1)):
        cache, found, traces = None, [], []
        for part in parts:
            with record_routes(model) as trace:
                out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
            traces.append(trace)
        assert gap(torch.cat(found, 1), wanted) < 1e-5
        joined = RouteTrace.cat(traces)
        assert all(torch.equal(joined[index].mask, whole[index].mask) for index in whole)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "fields", [{}, {"branch": "none"}, {"gate": "none", "static_layers": None}], ids=str
)
@torch.no_grad()
def test_the_direct_decode_step_is_the_general_one(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], batch: int
) -> None:
    model, ids, taken = build(**fields), tokens(batch, 10, seed=4), []
    step = DecodeStep.__call__
    monkeypatch.setattr(
        DecodeStep, "__call__", lambda *given: taken.append(given[0]) or step(*given)
    )
    found = []
    for general in (False, True):
        cache = model(ids[:, :4], use_cache=True).past_key_values
        for one in ids[:, 4:].split(1, 1):
            if general:  # a trace needs the masks
                with record_routes(model):
                    found.append(model(one, past_key_values=cache, use_cache=True).logits)
            else:
                found.append(model(one, past_key_values=cache, use_cache=True).logits)
    assert len(taken) == 6 * 3
    torch.testing.assert_close(found[:6], found[6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
@torch.no_grad()
def test_padding_changes_nothing(kind: str) -> None:
    model, ids = build(kind=kind), tokens(2, 10, seed=4)
    wanted = model(ids).logits
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.int64), torch.ones_like(ids)], dim=1)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert (
        gap(model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:], wanted) < 1e-5
    )


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_the_chosen_rows_run_and_no_others(kind: str) -> None:
    model, ids = build("llama", kind), tokens(3, 12)
    with torch.no_grad(), counted_rows(model) as counts:
        model(ids)
    assert_only_decided_rows_ran({part: {i: counts[part][i] for i in (1, 3)} for part in counts})
    assert counts["computed"][2] == counts["decided"][2] == 0


@torch.no_grad()
def test_last_tokens_run_in_full_where_prompts_only_are_routed() -> None:
    model, ids = build(phases="prefill"), tokens(2, 8)
    with record_routes(model) as trace:
        cache = model(ids, use_cache=True).past_key_values
    assert trace[2].mask[:, -1].all() and not trace[2].mask[:, :-1].any()
    with model.disable_adapter():
        wanted = model(ids[:, :1], past_key_values=copy.deepcopy(cache), use_cache=True).logits
    assert torch.equal(model(ids[:, :1], past_key_values=cache, use_cache=True).logits, wanted)


@torch.no_grad()
def test_a_compiled_model_gives_the_eager_logits() -> None:
    torch._dynamo.reset()
    model, ids = build(), tokens(2, 6)
    wanted = model(ids, use_cache=False).logits
    assert (
        gap(
            torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits,
            wanted,
        )
        < 1e-5
    )
    torch._dynamo.reset()


# The budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"budget_scope": "global"}, {"selection": "controller"}], ids=str
)
def test_the_budget_is_that_of_the_layers_with_gates(fields: dict[str, Any]) -> None:
    model = build(**fields)
    for budget in (0.3, 0.7):
        shares = calibrate(model, text(32), budget=budget)
        assert shares[2] == 0.0
        assert (shares[1] + shares[3]) / 2 == pytest.approx(budget, abs=0.02)
    calibrate_budgets(model, text(32), (0.2, 0.5))
    assert is_calibrated(model) and sorted(thresholds(model)) == [1, 3]
    set_budget(model, 0.2)
    with count_routes(model) as counter, torch.no_grad():
        for batch in text(32):
            model(**batch)
    shares = counter.full_ratio()
    assert shares[2] == 0.0 and (shares[1] + shares[3]) / 2 == pytest.approx(0.2, abs=0.03)
    set_budget(model, 1.0)
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(2, 8))
    assert trace.full_ratio() == {1: 1.0, 2: 0.0, 3: 1.0}


def test_a_table_that_was_never_fitted_matters_only_where_there_is_a_gate() -> None:
    model = build()
    table = routings_of(model)[1].active_quantiles()
    table.updates.zero_()
    assert is_calibrated(model)
    set_budget(model, 0.4)


def test_costs_count_a_static_layer_as_skipped() -> None:
    model = build()
    shares = {1: 0.5, 2: 0.0, 3: 0.5}
    assert (
        route_cost(model) == route_cost(model, full_ratio=shares) == route_cost(model, budget=0.5)
    )
    gated = build(static_layers=None)
    without_gate = (
        route_cost(gated, full_ratio=shares).flops_routed,
        route_cost(model).flops_routed,
    )
    assert without_gate[0] > without_gate[1]
    dense = route_cost(build(kind="block")).kv_bytes
    assert dense == route_cost(build(kind="block", static_layers=None)).kv_bytes * 3 / 4
    rows = evaluate_budgets(model, text(), None, [0.5])
    assert rows[-1].full_ratio == pytest.approx(2 / 3 * 0.5, abs=0.1)


@pytest.mark.parametrize("kind", ["mlp", "block"])
def test_bench_and_the_page_count_it_as_skipped(kind: str) -> None:
    model = build(kind=kind)
    result = bench(model, input_ids=tokens(1, 8), budgets=(0.5,), decode_steps=2, repeats=1)
    for part in ("prefill", "decode"):
        assert result[part]["budgets"]["0.5"]["full_ratio"] <= 2 / 3
    (layers,) = collect_scores(model, text(), [0.5])
    assert sorted(layers) == [1, 2, 3]
    assert (layers[2].full_ratio, layers[2].threshold) == (0.0, None)
    (cost,) = count_costs(model, [layers], 4, 16)
    assert cost.saved > 0


def test_executors_are_chosen_for_gates_only() -> None:
    model = build()
    assert {choice.layer for choice in tune_execution(model, tokens(2, 8), steps=2, repeats=1)} == {
        1,
        3,
    }
    assert not routings_of(model)[1].tuned


@pytest.mark.parametrize("again", [False, True])
def test_what_was_tuned_before_leaves_a_static_layer_static(again: bool) -> None:
    model = build(static_layers=None)
    for routing in routings_of(model):
        routing.tuned = dict.fromkeys(
            itertools.product(("default", "b"), (False, True), range(20)), "full"
        )
    model.add_adapter("b", DepthRouteConfig(**STATIC))
    model.set_adapter("b")
    if again:
        tune_execution(model, tokens(2, 8), steps=2, repeats=1, keep_decisions=True)
        assert {key[0] for key in routings_of(model)[1].tuned} == {"default"}
    with torch.no_grad(), record_routes(model) as trace:
        model(tokens(2, 8))
    assert not trace[2].mask.any()


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_replayed_decisions_run_in_a_static_layer_too(kind: str) -> None:
    model, twin, ids = (
        build(kind=kind),
        build_routed("llama", kind, layers=STATIC["layers"]),
        tokens(2, 12),
    )
    twin.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad(), record_routes(twin.eval()) as trace:
        wanted = twin(ids).logits
    with torch.no_grad(), replay_routes(model, trace):
        assert gap(model(ids).logits, wanted) < 1e-5
    assert trace[2].mask.any()


def test_a_page_counts_the_layers_with_gates() -> None:
    model = build(layers="all", static_layers=[1, 2])
    dense, row = (
        {"rule": "dense", "budget": 1.0, "loss": 2.0, "perplexity": 7.4, "full_ratio": 1.0},
        {"budget": 0.5},
    )
    row = dense | row | {"rule": "threshold", "full_ratio": 0.25}
    scores = collect_scores(model, text(), [0.5])
    report = RunReport(
        title="A title", facts=[], rows=[dense, row], budgets=[0.5], follows_budget=True,
        scores=scores, costs=count_costs(model, scores, 4, 16), cost_shape=(4, 16),
        tokens=collect_tokens(model, byte_tokenizer(), [Sample("A text", tokens(1, 8)[0])], [0.5]),
    )  # fmt: skip
    page = render_page(report)
    assert "Routers in 2 layers (0, 3) decide for every token" in page
    assert "Layers without a gate, which every token skips: 1-2." in page
    share = (report.scores[0][0].full_ratio + report.scores[0][3].full_ratio) / 2
    assert f"{share:.1%}" in page and "asked for 0.5; layers with a gate from" in page
    assert "layer 1</th>" not in page[page.index("Thresholds and quartiles") :]


def test_a_line_of_a_training_averages_over_the_layers_with_gates() -> None:
    logs = {"full_ratio/layer_1": 0.4, "full_ratio/layer_2": 0.0, "gate_prob/layer_1": 0.6}
    assert log_line(logs, 1, 2) == "step 1/2 | full 40.0% | gate p 0.600"


def test_a_hostile_list_is_refused_at_once() -> None:
    layers = list(range(90_000, 94_096))
    started = time.process_time()
    with pytest.raises(ConfigError, match="layer 5 is none"):
        DepthRouteConfig(layers=layers, static_layers=[*layers[1:], 5])
    assert time.process_time() - started < 0.1


# Saving, and what is said -------------------------------------------------------------------------


def test_a_saved_adapter_loads_as_it_was(tmp_path: Path) -> None:
    model, ids = build("qwen3", "jepa"), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build_base("qwen3"), str(tmp_path)).eval()
    assert loaded.peft_config["default"].static_layers == [2]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert all(finding.state == "ok" for finding in examine(tmp_path))
    assert any("static, without one: [2]" in finding.text for finding in examine(tmp_path))


def test_a_file_that_says_otherwise_than_its_weights_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())
    for static in ([1], None, [0], [1, 2, 3], [True], "2", {"2": 2}, [2, 2], [], [10**9]):
        path.write_text(json.dumps(saved | {"static_layers": static}))
        with pytest.raises((AdapterMismatchError, ConfigError)) as refused:
            PeftModel.from_pretrained(build_base("llama"), str(tmp_path))
        assert "\n" not in str(refused.value)
    path.write_text(json.dumps(saved))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in weights if ".3.routing.depth_route_gate." in name)
    save_file(
        weights | {name.replace(".3.", ".2."): weights[name].clone()},
        tmp_path / "adapter_model.safetensors",
    )
    path.write_text(json.dumps(saved | {"weights_hash": None}))
    with pytest.raises(AdapterMismatchError, match="unexpected tensor"):
        PeftModel.from_pretrained(build_base("llama"), str(tmp_path))


def test_a_card_and_the_lines_name_the_static_layers(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    calibrate(model, text())
    card = make_card(model).text
    assert (
        "| static, without a gate | 2 |" in card
        and "Where there is no router, every token skips the part" in card
    )
    shown = card[card.index("share full in calibration") :].splitlines()[2:4]
    assert [line.split("|")[1].strip() for line in shown] == ["1", "3"]
    assert "not calibrated" not in card
    model.print_trainable_parameters()
    assert "3 of 4 layers (1-3), static 2: ffn per token" in capsys.readouterr().out
    assert "gate none" in repr(routings_of(model)[1]) and "gate mlp" in repr(routings_of(model)[0])


def test_a_draft_that_leaves_blocks_out_keeps_what_is_static() -> None:
    model, ids = build(layers="all", static_layers=[1, 3]), tokens(1, 6, seed=3)
    config = routings_of(draft_view(model, drop=[0, 2]))[0].active_config()
    assert (config.layers, config.static_layers) == ([0, 1], [0, 1])
    config = routings_of(draft_view(model, drop=[1, 3]))[0].active_config()
    assert (config.layers, config.static_layers) == ([0, 1], None)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        with model.disable_adapter():
            wanted = model.generate(input_ids=ids, **settings)
        for drop in ([], [0], [0, 2]):
            assert torch.equal(
                model.generate(
                    input_ids=ids, assistant_model=draft_view(model, drop=drop), **settings
                ),
                wanted,
            )


def test_a_draft_without_any_gate_says_that_it_has_no_budget() -> None:
    view = draft_view(build(), drop=[1, 3])
    for call in (lambda: set_budget(view, 0.3), lambda: calibrate(view, text())):
        with pytest.raises(ValueError, match="no layer with a gate is left"):
            call()


def test_a_search_tries_the_draft_that_is_static_only() -> None:
    found = search_draft(
        build(), [tokens(1, 6)], budgets=[0.5, 1.0], drops=[[]], confidences=(0.0,), lengths=(2,),
        rounds=1, max_new_tokens=4, pad_token_id=0,
    )  # fmt: skip
    assert {row.budget for row in found.table} == {0.5, 1.0}


def test_vllm_serves_it() -> None:
    check_adapter(DepthRouteConfig(**STATIC))


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "jepa", "attention", "block"])
def test_a_step_trains_the_branch_of_a_static_layer_and_the_gates_of_the_others(kind: str) -> None:
    model = build(kind=kind).train()
    model.zero_grad()
    terms, trace = backward(model, stacked(rows(4, padding=(0, 3))))
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(".2.routing.depth_route_branch." in name for name in trained)
    for index in (1, 3):
        assert any(f".{index}.routing.depth_route_gate." in name for name in trained)
    assert ("jepa" in terms) == (kind == "jepa")
    p_bar = torch.stack([trace[i].probs[trace[i].real].mean() for i in (1, 3)]).detach()
    assert float(terms["budget"].detach()) == pytest.approx(
        float((p_bar - 0.5).square().mean()), abs=1e-6
    )


def test_a_trainer_knows_labels_and_figures_of_gates_only(tmp_path: Path) -> None:
    model = build(kind="jepa", selection="controller", budget_scope="global")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {
        "oracle": "on_policy",
        "oracle_warmup": 0,
        "oracle_interval": 1,
        "cgs_weight": 0.5,
        "cgs_warmup": 0,
    }
    weights |= {
        "cgs_interval": 1,
        "distill_weight": 0.5,
        "similarity_weight": 0.5,
        "exit_weight": 0.1,
    }
    trainer, _ = make_trainer(model, rows(8), tmp_path, max_steps=3, **weights)
    trainer.train()
    logs = step_logs(trainer)[-1]
    for term in ("jepa", "util", "rank", "cgs", "distill", "similarity", "budget", "exit"):
        assert f"loss_{term}" in logs
    assert logs["full_ratio/layer_2"] == 0.0
    assert "gate_prob/layer_1" in logs and "gate_prob/layer_2" not in logs
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(".2.routing.depth_route_branch." in name for name in moved)
    assert all(any(f".{i}.routing.depth_route_gate." in name for name in moved) for i in (1, 3))


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_labels_are_those_of_a_gate_that_lets_nothing_run(kind: str) -> None:
    model = build(kind=kind)
    twin, batch = forced(model, kind=kind), {"input_ids": tokens(2, 10, seed=7)}
    labels, expected = (utility_labels(m, batch, "on_policy", window=2) for m in (model, twin))
    assert sorted(labels) == [1, 3]
    assert all(gap(labels[index].utility, expected[index].utility) < 1e-4 for index in labels)


def test_a_layer_that_is_static_is_so_in_every_fork() -> None:
    """With all other layers full the static one is not:
    exact forks of the model at a budget of 1 say the same."""
    model, ids = build(), tokens(2, 10, seed=7)
    set_budget(model, 1.0)
    positions = torch.tensor([3, 6])
    found = exact_utility(model, {"input_ids": ids}, positions, window=1)
    assert sorted(found) == [1, 3]
    on_policy = exact_utility(model, {"input_ids": ids}, positions, "on_policy", window=1)
    assert all(gap(found[index], on_policy[index]) < 1e-5 for index in found)
    assert any(values.abs().max() > 1e-3 for values in found.values())


def test_a_branch_is_fitted_to_all_tokens() -> None:
    model = build()
    left = fit_branches(model, text(32))
    alone = build_routed("llama", gate="none", layers=[2])
    only = fit_branches(alone, text(32))
    assert sorted(left) == [1, 2, 3] and left[2] < 1 and only[2] < 1


# A fit --------------------------------------------------------------------------------------------


def with_useless_layer(index: int = 2) -> Any:
    base = build_base("qwen3")
    decoder_layers(base)[index].mlp.down_proj.weight.data.mul_(1e-4)
    return base


def fit_text(rows: int = 20, length: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in tokens(rows, length).split(4)]


def share_of_calls(model: Any) -> float:
    held_out = torch.cat([batch["input_ids"] for batch in fit_text()])[4::5]
    with count_routes(model) as counter, torch.no_grad():
        model(held_out)
    ratios, depth = counter.full_ratio(), len(decoder_layers(model))
    return (sum(ratios.values()) + depth - len(ratios)) / depth


def test_a_fit_makes_a_layer_static_that_nothing_needs(tmp_path: Path) -> None:
    config = DepthRouteConfig(layers="all", gate="affine")
    model = fit_router(with_useless_layer(), fit_text(), keep=0.5, config=config)
    found = model.peft_config["default"]
    assert found.static_layers == [2]
    assert 4 - len(found.layers) + found.budget * len(found.gated_layers()) == pytest.approx(
        0.5 * 4
    )
    assert share_of_calls(model) == pytest.approx(0.5, abs=0.02)
    assert not [
        name for name, _ in model.named_parameters() if ".2.routing.depth_route_gate." in name
    ]
    assert is_calibrated(model) and 2 not in thresholds(model)
    record = remembered(model, "default").training
    assert record is not None and record["fit"]["layers"]["2"]["share"] == 0.0
    held_out = torch.cat([batch["input_ids"] for batch in fit_text()])[4::5]
    with count_routes(model) as counter:
        assert mean_loss(model, [{"input_ids": held_out}]) == pytest.approx(
            record["fit"]["loss"], abs=1e-5
        )
    assert counter.full_ratio() == pytest.approx(
        {i: record["fit"]["layers"][str(i)]["share"] for i in found.layers}
    )
    set_budget(model, 0.3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(with_useless_layer(), str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


def test_a_fit_keeps_a_gate_whose_loss_is_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that run many tokens lose their gates to a bound far too high,
    and get them back as the loss rises."""
    config = DepthRouteConfig(layers="all", gate="affine")
    monkeypatch.setattr("hf_depthroute.fitting.router.STATIC", -1.0)
    plain = fit_router(build_base("qwen3"), fit_text(), keep=0.5, config=config)
    assert plain.peft_config["default"].static_layers is None
    monkeypatch.setattr("hf_depthroute.fitting.router.STATIC", 0.45)
    tried: list[list[int]] = []

    def spoiled(
        model: PeftModel, dense: Sequence[int] = (), static: Sequence[int] = ()
    ) -> PeftModel:
        made = narrowed(model, dense, static)
        if static:
            tried.append(list(static))
            for routing in active_routings(made):  # so that what is skipped matters
                routing.depth_route_branch["default"].down.weight.data.add_(1.0)
        return made

    monkeypatch.setattr("hf_depthroute.fitting.narrowing.narrowed", spoiled)
    model = fit_router(build_base("qwen3"), fit_text(), keep=0.5, config=config)
    assert tried and model.peft_config["default"].static_layers is None
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 9)).logits, plain(tokens(2, 9)).logits)
    assert all(routing.active_quantiles().measured is not None for routing in gated_routings(model))


def test_a_fit_keeps_the_gates_where_nothing_else_would_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_depthroute.fitting.router.STATIC", 1.0)
    config = DepthRouteConfig(layers="all", gate="affine")
    model = fit_router(build_base("llama"), fit_text(), keep=0.5, config=config, rounds=1)
    assert model.peft_config["default"].static_layers is None
    assert share_of_calls(model) == pytest.approx(0.5, abs=0.04)


def test_a_fit_finds_static_layers_itself() -> None:
    with pytest.raises(ConfigError, match="finds the static layers itself"):
        fit_router(
            build_base("llama"),
            fit_text(),
            config=DepthRouteConfig(layers="all", static_layers=[1]),
        )


def test_a_trained_fit_stays_static(tmp_path: Path) -> None:
    config = DepthRouteConfig(layers="all", gate="affine")
    model = fit_router(with_useless_layer(), fit_text(), keep=0.5, config=config, rounds=1)
    assert model.peft_config["default"].static_layers == [2]
    losses = {"train_gates": False, "distill_weight": 1.0, "lm_weight": 0.0}
    make_trainer(model, rows(8), tmp_path, max_steps=2, **losses)[0].train()
    assert calibrate(model.eval(), fit_text())[2] == 0.0


def test_adapters_without_the_field_stay_what_they_were() -> None:
    saved = DepthRouteConfig(layers=[1, 2]).to_dict()
    assert DepthRouteConfig(**saved).static_layers is None
    model = routed(build_base("llama"))
    assert [routing.layer_index for routing in gated_routings(model)] == [1, 2, 3]
