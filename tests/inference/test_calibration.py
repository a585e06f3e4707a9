"""Thresholds: quantile tables, their running average, `calibrate` and `set_budget`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GATES, build_base, build_routed, decoder_layers, logits, tokens
from peft import PeftModel
from shares import run_ratio, text_batches
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    set_budget,
)
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.data.batches import model_inputs
from hf_depthroute.inference.calibration import calibrate_budgets, is_calibrated
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.state import RunSettings
from hf_depthroute.routing.thresholds import (
    TABLE_SIZE,
    ScoreQuantiles,
    quantile_table,
    threshold_table,
)
from hf_depthroute.routing.trace import RouteTrace

BUDGETS = (0.1, 0.25, 0.5, 0.75, 0.9)
LEVELS = torch.linspace(0, 1, TABLE_SIZE)


def tables(model: PeftModel) -> list[torch.Tensor]:
    return [
        routing.depth_route_quantiles["default"].values.clone() for routing in routings_of(model)
    ]


# --- the quantile function ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 37, 200, 201, 1000])
def test_quantile_table_equals_torch_quantile(size: int) -> None:
    scores = torch.randn(size, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(
        quantile_table(scores), torch.quantile(scores, LEVELS), atol=1e-5, rtol=1e-5
    )


def test_quantile_table_looks_at_the_kept_entries_only() -> None:
    scores = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    keep = torch.rand(4, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    poisoned = torch.where(keep, scores, 1e9)
    torch.testing.assert_close(quantile_table(poisoned, keep), torch.quantile(scores[keep], LEVELS))


def test_quantile_table_leaves_nan_scores_out() -> None:
    scores = torch.tensor([3.0, math.nan, 1.0, 2.0, math.nan])
    torch.testing.assert_close(
        quantile_table(scores), torch.quantile(torch.tensor([1.0, 2.0, 3.0]), LEVELS)
    )


def test_quantile_table_of_nothing_is_nan() -> None:
    assert quantile_table(torch.randn(3), torch.zeros(3, dtype=torch.bool)).isnan().all()
    assert quantile_table(torch.full((3,), math.nan)).isnan().all()


def test_quantile_table_of_bfloat16_scores_is_float32_and_without_graph() -> None:
    table = quantile_table(torch.randn(50, dtype=torch.bfloat16, requires_grad=True))
    assert table.dtype == torch.float32 and table.shape == (TABLE_SIZE,) and not table.requires_grad


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_an_untrained_table_is_the_logistic_distribution(temperature: float) -> None:
    quantiles = ScoreQuantiles(temperature)
    for budget in (0.01, 0.1, 0.5, 0.77, 0.99):
        p = torch.sigmoid(quantiles(budget) / temperature)
        assert p.item() == pytest.approx(1 - budget, abs=1e-3)
    assert quantiles(0.5).item() == pytest.approx(0.0, abs=1e-6)


def test_the_threshold_falls_as_the_budget_grows() -> None:
    quantiles = ScoreQuantiles(2.0)
    quantiles.set(quantile_table(torch.randn(500, generator=torch.Generator().manual_seed(0))))
    thresholds = [quantiles(percent / 100).item() for percent in range(1, 101)]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[-1] == quantiles.values[0].item()


def test_a_threshold_between_two_entries_is_interpolated() -> None:
    quantiles = ScoreQuantiles(2.0)
    quantiles.set(torch.arange(TABLE_SIZE).float())
    assert quantiles(1 - 0.0025).item() == pytest.approx(0.5, abs=1e-4)
    assert quantiles(1 - 0.25).item() == pytest.approx(50.0, abs=1e-4)
    assert quantiles(1e-9).item() == pytest.approx(200.0, abs=1e-4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_threshold_selects_the_budgeted_fraction_of_its_own_scores(budget: float) -> None:
    scores = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    quantiles = ScoreQuantiles(2.0)
    quantiles.set(quantile_table(scores))
    assert (scores >= quantiles(budget)).float().mean().item() == pytest.approx(budget, abs=0.005)


@pytest.mark.parametrize("jitter", [0.0, 1e-7])
def test_no_threshold_to_decide_by_stands_in_a_group_of_like_scores(jitter: float) -> None:
    """As the scores of a few tokens, each of which is there often, are; up to rounding."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-3.0, -1.0, 0.0, 0.5, 2.0])
    scores = values[torch.randint(5, (4000,), generator=generator)]
    first, second = (scores + jitter * torch.randn(4000, generator=generator) for _ in range(2))
    table = threshold_table(first)
    assert (table[:, None] - values).abs().min() > 1e-4
    assert bool((table[1:] >= table[:-1]).all())
    quantiles = ScoreQuantiles(2.0)
    quantiles.set(table)
    for budget in (0.05, *BUDGETS, 0.95):
        chosen = first >= quantiles(budget)
        assert torch.equal(chosen, second >= quantiles(budget))
        assert chosen.float().mean().item() == pytest.approx(
            budget, abs=0.16 if budget == 0.05 else 0.11
        )


@pytest.mark.parametrize("count", [2, 3, 7, 48])
def test_thresholds_of_few_scores_never_fall(count: int) -> None:
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(count, generator=generator)
        alike = scores[torch.randint(count, (count,), generator=generator)] + 3e-6 * torch.randn(
            count, generator=generator
        )
        table = threshold_table(torch.cat([scores, alike]))
        assert bool((table[1:] >= table[:-1]).all()) and bool(table.isfinite().all())


def test_scores_of_their_own_have_the_thresholds_of_their_quantiles() -> None:
    scores = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 10
    torch.testing.assert_close(threshold_table(scores), quantile_table(scores), atol=2e-3, rtol=0)


def test_tracking_starts_at_the_first_batch() -> None:
    quantiles, table = ScoreQuantiles(2.0), torch.randn(TABLE_SIZE)
    assert quantiles.updates == 0
    quantiles.track(table)
    torch.testing.assert_close(quantiles.values, table)
    assert quantiles.updates == 1


def test_tracking_is_a_plain_mean_at_first_and_an_exponential_average_later() -> None:
    quantiles, batches = (
        ScoreQuantiles(2.0),
        torch.randn(40, TABLE_SIZE, generator=torch.Generator().manual_seed(0)),
    )
    expected = torch.zeros(TABLE_SIZE)
    for i, table in enumerate(batches):
        weight = max(1 / (i + 1), 0.1)
        expected = (1 - weight) * expected + weight * table
        quantiles.track(table, decay=0.9)
        if i < 10:
            torch.testing.assert_close(
                quantiles.values, batches[: i + 1].mean(0), atol=1e-6, rtol=1e-5
            )
    torch.testing.assert_close(quantiles.values, expected, atol=1e-6, rtol=1e-5)
    assert quantiles.updates == 40


def test_tracking_follows_scores_that_move_from_step_to_step() -> None:
    quantiles, generator = ScoreQuantiles(2.0), torch.Generator().manual_seed(0)
    for step in range(60):
        scores = torch.randn(512, generator=generator) + 0.03 * step  # a new gate
        quantiles.track(quantile_table(scores), 512)
    assert (scores >= quantiles(0.5)).float().mean() == pytest.approx(0.5, abs=0.1)


def test_tracking_averages_over_batches_that_say_little() -> None:
    def deviation(tokens: int) -> float:
        quantiles, generator = ScoreQuantiles(2.0), torch.Generator().manual_seed(0)
        thresholds = []
        for _ in range(200):
            quantiles.track(quantile_table(torch.randn(tokens, generator=generator)), tokens)
            thresholds.append(quantiles(0.5))
        return float(torch.stack(thresholds[40:]).std())

    assert deviation(16) < 0.1 and deviation(1_024) < 0.05


def test_a_batch_of_padding_moves_no_table() -> None:
    quantiles = ScoreQuantiles(2.0)
    initial = quantiles.values.clone()
    nothing = quantile_table(torch.randn(4), torch.zeros(4, dtype=torch.bool))
    quantiles.track(nothing)
    assert torch.equal(quantiles.values, initial) and quantiles.updates == 0
    table = torch.randn(TABLE_SIZE)
    quantiles.track(table)
    quantiles.track(nothing)
    assert torch.equal(quantiles.values, table) and quantiles.updates == 1


# --- calibrate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_calibrate_hits_the_budget_on_its_own_data(budget: float, gate: str) -> None:
    model, batches = build_routed("llama", gate), text_batches()
    returned = calibrate(model, batches, budget)
    measured = run_ratio(model, batches)
    assert list(measured) == list(returned) == [1, 2, 3]
    assert measured == pytest.approx(returned)
    assert measured[1] == pytest.approx(budget, abs=0.01)
    # The first routed layer's scores do not depend on decisions; the others' move with those of the
    # layers before.
    assert all(ratio == pytest.approx(budget, abs=0.02) for ratio in measured.values())
    assert model.peft_config["default"].budget == budget


@pytest.mark.parametrize("family", ["gpt2", "olmoe"])
def test_calibrate_works_on_other_families(family: str) -> None:
    model, batches = build_routed(family), text_batches()
    calibrate(model, batches, 0.3)
    assert all(
        ratio == pytest.approx(0.3, abs=0.02) for ratio in run_ratio(model, batches).values()
    )


def test_calibrate_fits_the_stream_of_inference_and_not_of_top_k() -> None:
    """The first routed layer's scores do not depend on the decisions; the last one's do."""
    model, batches = build_routed("llama"), text_batches()
    calibrate(model, batches, 0.5)
    seen: dict[int, list[torch.Tensor]] = {1: [], 3: []}
    for batch in batches:
        with torch.no_grad(), record_routes(model) as trace:
            model(**batch)
        for index, scores in seen.items():
            scores.append(trace[index].scores[trace[index].real])
    for index, table in ((1, tables(model)[0]), (3, tables(model)[2])):
        scores = torch.cat(seen[index])
        gap = (quantile_table(scores) - table).abs().mean() / scores.std()
        assert gap < 0.05, index
    all_full = RouteTrace()
    for batch in batches[:1]:
        with torch.no_grad(), record_routes(model) as trace:
            model(**batch)
        for index, record in trace.items():
            record.mask = torch.ones_like(record.mask)
            all_full[index] = record
        with torch.no_grad(), replay_routes(model, all_full), record_routes(model) as dense:
            model(**batch)
    assert torch.equal(dense[1].scores, trace[1].scores)
    assert not torch.allclose(dense[3].scores, trace[3].scores)


def test_calibrate_keeps_the_adapters_budget_when_none_is_given() -> None:
    model, batches = build_routed("llama", budget=0.3), text_batches()
    calibrate(model, batches)
    assert model.peft_config["default"].budget == 0.3
    assert all(
        ratio == pytest.approx(0.3, abs=0.02) for ratio in run_ratio(model, batches).values()
    )


def test_calibrate_at_budget_one_runs_everything_full() -> None:
    model, batches = build_routed("llama"), text_batches(1)
    assert set(calibrate(model, batches, 1.0).values()) == {1.0}
    assert set(run_ratio(model, batches).values()) == {1.0}


def test_calibrate_ignores_padding() -> None:
    short = {
        "input_ids": tokens(8, 10, seed=1),
        "attention_mask": torch.ones(8, 10, dtype=torch.long),
    }
    longer = {
        "input_ids": torch.cat([torch.zeros(8, 5, dtype=torch.long), short["input_ids"]], dim=1),
        "attention_mask": torch.cat(
            [torch.zeros(8, 5, dtype=torch.long), short["attention_mask"]], dim=1
        ),
    }
    one, two = build_routed("llama"), build_routed("llama")
    calibrate(one, [short], 0.4)
    calibrate(two, [longer], 0.4)
    for a, b in zip(tables(one), tables(two), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["generator", "lists", "without mask", "with labels"])
def test_calibrate_takes_any_iterable_of_dicts(kind: str) -> None:
    plain = [
        {"input_ids": tokens(4, 8, seed=i), "attention_mask": torch.ones(4, 8, dtype=torch.long)}
        for i in (0, 1)
    ]

    def batches() -> Iterator[dict[str, object]]:
        for batch in plain:
            if kind == "lists":
                yield {name: value.tolist() for name, value in batch.items()}
            elif kind == "without mask":
                yield {"input_ids": batch["input_ids"]}
            elif kind == "with labels":
                yield {**batch, "labels": batch["input_ids"], "text": ["not a tensor"]}
            else:
                yield batch

    expected, model = build_routed("llama"), build_routed("llama")
    assert calibrate(model, batches(), 0.4) == calibrate(expected, plain, 0.4)
    for a, b in zip(tables(model), tables(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [False, True])
def test_calibrate_leaves_mode_and_weights_alone(training: bool) -> None:
    model = build_routed("llama").train(training)
    before = {name: value.clone() for name, value in model.named_parameters()}
    calibrate(model, text_batches(1), 0.25)
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    for routing in routings_of(model):
        assert routing.state.settings == RunSettings()


def test_calibrate_marks_the_adapter_as_calibrated() -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    assert not is_calibrated(model)
    calibrate(model, text_batches(1))
    assert is_calibrated(model)


def test_calibrating_twice_gives_the_same_thresholds() -> None:
    model, batches = build_routed("llama"), text_batches()
    calibrate(model, batches, 0.4)
    first = tables(model)
    calibrate(model, batches, 0.4)
    for a, b in zip(first, tables(model), strict=True):
        assert torch.equal(a, b)


# --- set_budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
def test_set_budget_changes_the_fraction_without_a_new_calibration(budget: float) -> None:
    model, batches = build_routed("llama"), text_batches()
    calibrate(model, batches, 0.5)
    before = tables(model)
    set_budget(model, budget)
    ratios = run_ratio(model, batches)
    # Exact at the first routed layer; later layers see a stream that the budget has changed.
    assert ratios[1] == pytest.approx(budget, abs=0.01)
    assert all(ratio == pytest.approx(budget, abs=0.1) for ratio in ratios.values())
    for a, b in zip(before, tables(model), strict=True):
        assert torch.equal(a, b)


def test_set_budget_and_the_tables_persist_through_save_and_load(
    saved_adapter: Callable[[PeftModel], Path],
) -> None:
    model, batches = build_routed("llama"), text_batches(2)
    calibrate(model, batches, 0.5)
    set_budget(model, 0.2)
    folder = saved_adapter(model)
    loaded = PeftModel.from_pretrained(build_base("llama"), folder).eval()
    assert loaded.peft_config["default"].budget == 0.2
    assert is_calibrated(loaded)
    for a, b in zip(tables(model), tables(loaded), strict=True):
        assert torch.equal(a, b)
    for batch in batches:
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, loaded(**batch).logits)
    set_budget(loaded, 0.5)
    set_budget(model, 0.5)
    with torch.no_grad():
        assert torch.equal(model(**batches[0]).logits, loaded(**batches[0]).logits)


def test_set_budget_touches_the_active_adapter_only() -> None:
    model = build_routed("llama")
    model.add_adapter("other", DepthRouteConfig(layers=[1, 2, 3], budget=0.7))
    set_budget(model, 0.2)
    assert model.peft_config["default"].budget == 0.2
    assert model.peft_config["other"].budget == 0.7
    model.set_adapter("other")
    calibrate(model, text_batches(1))
    set_budget(model, 0.4)
    assert (model.peft_config["default"].budget, model.peft_config["other"].budget) == (0.2, 0.4)


# --- errors ---------------------------------------------------------------------------------------


LENGTHS = (8, 5, 8, 3)


def ragged() -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(tokens(4, 8), LENGTHS)]


@pytest.mark.parametrize(
    "kind", ["rows", "ragged", "one dict", "encoding", "rows of tensors", "dataset"]
)
def test_calibrate_takes_text_as_people_have_it(kind: str) -> None:
    mask = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).long()
    padded = {"input_ids": tokens(4, 8) * mask, "attention_mask": mask}
    given: Any
    if kind == "rows":
        given = [{"input_ids": row} for row in ragged()]
    elif kind == "rows of tensors":
        given = (
            {"input_ids": torch.tensor(row), "attention_mask": torch.ones(len(row))}
            for row in ragged()
        )
    elif kind == "ragged":
        given = [{"input_ids": ragged()}]
    elif kind == "dataset":
        given = pytest.importorskip("datasets").Dataset.from_dict(
            {"input_ids": ragged(), "text": ["x"] * 4}
        )
    else:
        given = padded if kind == "one dict" else BatchEncoding(padded)
    expected, model = build_routed("llama"), build_routed("llama")
    assert calibrate(model, given, 0.4) == pytest.approx(calibrate(expected, [padded], 0.4))
    for a, b in zip(tables(model), tables(expected), strict=True):
        torch.testing.assert_close(a, b)


def test_calibrate_reads_the_documents_of_a_packed_row_apart() -> None:
    documents = ragged()
    ids = torch.cat([torch.tensor(row) for row in documents])[None]
    positions = torch.cat([torch.arange(len(row)) for row in documents])[None]
    # No top-k, which is by row.
    packed, apart = (build_routed("llama", budget_scope="global") for _ in range(2))
    shares = calibrate(packed, [{"input_ids": ids, "position_ids": positions}], 0.4)
    assert shares == pytest.approx(
        calibrate(apart, [{"input_ids": [row]} for row in documents], 0.4)
    )
    for a, b in zip(tables(packed), tables(apart), strict=True):
        torch.testing.assert_close(a, b)


def test_one_row_of_positions_stands_for_all_rows() -> None:
    ids = tokens(3, 8)
    for positions in (torch.arange(8), torch.arange(8)[None], torch.arange(8).expand(3, -1)):
        (found,) = model_inputs(build_base("llama"), {"input_ids": ids, "position_ids": positions})
        assert torch.equal(found["position_ids"], torch.arange(8).expand(3, -1))


@pytest.mark.parametrize(
    "batches, message",
    [
        (
            DataLoader([{"input_ids": row.tolist()} for row in tokens(4, 8)], batch_size=2),
            "with_format",
        ),
        ([{"text": "the cat"}], "batch 0 holds no input_ids, but text"),
        (["the cat"], "batch 0 holds no input_ids, but str"),
        (tokens(2, 8), "batch 0 holds no input_ids, but Tensor"),
        (
            [{"input_ids": [[5, 6, 7, 8], [5, 6, 7]], "position_ids": [[0, 1, 0, 1], [0, 1, 2]]}],
            "batch 0 has packed rows of different lengths",
        ),
    ],
)
def test_calibrate_says_what_a_batch_has_to_be(batches: Any, message: str) -> None:
    model = build_routed("llama", budget=0.3)
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches, 0.5)
    assert model.peft_config["default"].budget == 0.3


def test_calibrate_refuses_empty_batches() -> None:
    model = build_routed("llama", budget=0.3)
    before = tables(model)
    with pytest.raises(ValueError, match="calibrate: batches is empty"):
        calibrate(model, iter(()), 0.5)
    assert model.peft_config["default"].budget == 0.3
    assert all(torch.equal(a, b) for a, b in zip(before, tables(model), strict=True))


def test_calibrate_refuses_batches_of_padding() -> None:
    model = build_routed("llama", budget=0.3)
    before = tables(model)
    batch = {"input_ids": tokens(2, 4), "attention_mask": torch.zeros(2, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="no real token"):
        calibrate(model, [batch], 0.5)
    assert model.peft_config["default"].budget == 0.3
    assert all(torch.equal(a, b) for a, b in zip(before, tables(model), strict=True))


def test_calibrate_goes_on_past_one_batch_of_padding() -> None:
    model, batches = build_routed("llama"), text_batches(2)
    padding = {"input_ids": tokens(2, 4), "attention_mask": torch.zeros(2, 4, dtype=torch.long)}
    assert calibrate(model, [padding, *batches], 0.4) == calibrate(model, batches, 0.4)


@pytest.mark.parametrize(
    "action", [lambda m: calibrate(m, text_batches(1)), lambda m: set_budget(m, 0.5)]
)
def test_a_model_without_an_active_routed_adapter_is_refused(
    action: Callable[[object], object],
) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routed layer"):
        action(build_base("llama"))
    model = build_routed("llama")
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="no depth-routed adapter is active"),
    ):
        action(model)


@pytest.mark.parametrize("budget", [None, 0.25])
def test_calibrate_refuses_an_adapter_with_a_fixed_threshold(budget: float | None) -> None:
    model = build_routed("llama", threshold=0.1)
    before = tables(model)
    with pytest.raises(ValueError, match="fixed threshold"):
        calibrate(model, text_batches(1), budget)
    assert all(torch.equal(a, b) for a, b in zip(before, tables(model), strict=True))


@pytest.mark.parametrize(
    "fields", [{"gate": "linear"}, {"gate": "halting", "target": "block", "branch": "none"}]
)
def test_gates_with_a_threshold_of_their_own_follow_the_budget_when_asked_to(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    batches = [{"input_ids": tokens(8, 16, seed)} for seed in range(4)]
    model = build_routed("llama", "plain", threshold="budget", **fields)
    for budget in (0.25, 0.75):
        shares = calibrate(model, batches, budget)
        assert shares == {index: pytest.approx(budget, abs=0.03) for index in (1, 2, 3)}
    set_budget(model, 0.5)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path).eval()
    assert loaded.peft_config["default"].threshold == "budget"
    assert torch.equal(logits(loaded), expected)
    set_budget(loaded, 0.05)
    assert not torch.equal(logits(loaded), expected)


def test_set_budget_refuses_an_adapter_with_a_fixed_threshold() -> None:
    model = build_routed("llama", threshold=0.1, budget=0.3)
    with pytest.raises(ValueError, match="fixed threshold"):
        set_budget(model, 0.5)
    assert model.peft_config["default"].budget == 0.3


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.01, math.nan, math.inf, True, "0.5"])
def test_a_budget_out_of_range_is_refused(budget: object) -> None:
    model = build_routed("llama", budget=0.3)
    before = tables(model)
    with pytest.raises(ConfigError, match=r"budget=.* must be a finite number in"):
        set_budget(model, budget)
    with pytest.raises(ConfigError, match=r"budget=.* must be a finite number in"):
        calibrate(model, text_batches(1), budget)
    assert model.peft_config["default"].budget == 0.3
    assert all(torch.equal(a, b) for a, b in zip(before, tables(model), strict=True))


def test_calibrate_restores_the_model_when_a_forward_pass_fails() -> None:
    model = build_routed("llama").train()

    def fail(*args: object) -> None:
        raise IndexError

    decoder_layers(model)[-1].register_forward_pre_hook(fail)
    with pytest.raises(IndexError):
        calibrate(model, text_batches(), 0.5)
    assert model.training
    for routing in routings_of(model):
        assert routing.state.settings == RunSettings()


def test_the_adapters_own_threshold_stays_where_its_budget_is_between_two_entries() -> None:
    model, own = build_routed("llama"), 0.4733
    calibrate(model, text_batches(), own)
    before = [float(routing.active_quantiles()(own)) for routing in routings_of(model)]
    calibrate_budgets(model, text_batches(), [0.2, 0.47, 0.8])
    assert [
        float(routing.active_quantiles()(own)) for routing in routings_of(model)
    ] == pytest.approx(before, abs=1e-5)
    assert all(bool((table[1:] >= table[:-1]).all()) for table in tables(model))


def test_a_controllers_other_budgets_are_measured_at_each_of_them() -> None:
    """Its threshold is that of the adapter's own budget:
    it decides nothing where another one is asked for."""
    model = build_routed("llama", selection="controller")
    calibrate(model, text_batches(), budget=0.5)
    without = copy.deepcopy(model)
    for routing in routings_of(without):
        del routing.depth_route_controller["default"]
    thresholds = [
        float(routing.depth_route_controller["default"].threshold) for routing in routings_of(model)
    ]
    for each in (model, without):
        calibrate_budgets(each, text_batches(), [0.2, 0.8])
    for routing, other in zip(routings_of(model), routings_of(without)):
        assert torch.equal(routing.active_quantiles().values, other.active_quantiles().values)
    assert [
        float(routing.depth_route_controller["default"].threshold) for routing in routings_of(model)
    ] == thresholds
