"""`causal_rule="running"`: a score's rank in its own sequence,
so that the share holds on text of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed, tokens
from peft import PeftModel
from training import make_trainer, rows
from transformers import DynamicCache

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    draft_view,
    fit_router,
    record_routes,
    set_budget,
    set_causal_rule,
)
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import evaluate_budgets
from hf_depthroute.inference.calibration import thresholds
from hf_depthroute.parts.rules import ranks_among_earlier
from hf_depthroute.routing.stack import routings_of


def running_model(**fields: Any) -> Any:
    given = {"layers": "all", "causal_rule": "running", "budget": 0.4, **fields}
    model = build_routed("llama", **given).eval()
    calibrate(model, {"input_ids": tokens(8, 60, seed=2)})
    return model


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


def shares(model: Any, **inputs: torch.Tensor) -> list[float]:
    with torch.no_grad(), record_routes(model) as trace:
        model(**inputs, use_cache=False)
    return [float(record.mask.float().mean()) for record in trace.gated().values()]


def test_ranks_are_those_counted_one_by_one() -> None:
    scores = torch.randn(2, 2600)
    scores[0, ::7], scores[1, 100:200] = 0.25, torch.nan
    earlier, later = scores[:, :300], scores[:, 300:]
    higher, count = ranks_among_earlier(later, earlier)
    for row, place in ((0, 0), (0, 700), (0, 2299), (1, 3), (1, 2000)):
        before = scores[row, max(0, 300 + place - 2048) : 300 + place]
        own = scores[row, 300 + place]
        alike = (before - own).abs() <= 1e-5 * (1 + own.abs())
        assert count[row, place] == (~before.isnan()).sum()
        assert higher[row, place] == ((before > own) & ~alike).sum() + alike.sum() / 2


def test_the_share_holds_on_text_of_another_kind_where_a_threshold_misses_it() -> None:
    model = running_model()
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(1, 6000, 32, generator=generator) + torch.randn(32, generator=generator)
    set_causal_rule(model, "quantile")
    missed = [abs(share - 0.4) for share in shares(model, inputs_embeds=other)]
    set_causal_rule(model, "running")
    found = shares(model, inputs_embeds=other)
    held = [abs(share - 0.4) for share in found]
    assert max(missed) > 0.25
    assert sum(held) < sum(missed) / 3

    set_budget(model, 0.7)
    rises = [more > share for more, share in zip(shares(model, inputs_embeds=other), found)]
    assert all(rises)


@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
def test_a_token_is_decided_alike_however_its_sequence_is_read(target: str) -> None:
    model, ids = running_model(target=target), tokens(3, 60, seed=1)
    whole = read(model, ids)
    assert 0 < sum(shares(model, input_ids=ids)) < 4
    torch.testing.assert_close(read(model, ids[1:2]), whole[1:2])

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [
            model(input_ids=part, past_key_values=cache).logits
            for part in ids.split([20, 1, 1, 30, 8], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)

    cache.crop(-30)  # as after drafted tokens that were refused
    with torch.no_grad():
        again = model(input_ids=ids[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 30:], atol=1e-5, rtol=1e-5)

    cache.crop(-20)
    cache.batch_select_indices(torch.tensor([2, 0]))
    with torch.no_grad():
        chosen = model(input_ids=ids[[2, 0], 40:], past_key_values=cache).logits
    torch.testing.assert_close(chosen, whole[[2, 0], 40:], atol=1e-5, rtol=1e-5)

    mask = torch.ones(3, 64, dtype=torch.long)
    mask[:, :4] = 0
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), ids], dim=1)
    torch.testing.assert_close(
        read(model, padded, attention_mask=mask)[:, 4:], whole, atol=1e-5, rtol=1e-5
    )


def test_generation_follows_the_rule_with_and_without_a_cache() -> None:
    model, ids = running_model(), tokens(2, 30, seed=4)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    written = model.generate(input_ids=ids, **settings)
    assert torch.equal(written, model.generate(input_ids=ids, use_cache=False, **settings))
    assert torch.equal(written[:1], model.generate(input_ids=ids[:1], **settings))
    beams = model.generate(input_ids=ids, num_beams=3, **settings)
    assert torch.equal(
        beams, model.generate(input_ids=ids, num_beams=3, use_cache=False, **settings)
    )


def test_of_prompts_alone_it_ranks_the_tokens_that_are_decided() -> None:
    model, ids = running_model(phases="prefill", prompt_tail=8), tokens(2, 60, seed=5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record_routes(model) as trace:
        model(input_ids=ids[:, :40], past_key_values=cache)
        model(input_ids=ids[:, 40:41], past_key_values=cache)
    scores = cache.layers[1].scores
    assert scores.shape == (2, 40)  # a token that was generated has none
    assert scores[:, 32:].isnan().all() and not scores[:, :32].isnan().any()
    assert trace[1].mask.all()
    with torch.no_grad():
        model(input_ids=ids[:, 41:], past_key_values=cache)  # the next turn's prompt
    assert cache.layers[1].scores.shape == (2, 60)
    assert cache.layers[1].scores[:, 40].isnan().all()


def test_it_is_saved_with_what_it_needs_and_not_without(tmp_path: Path) -> None:
    text = [{"input_ids": part} for part in tokens(24, 60, seed=6).split(4)]
    config = DepthRouteConfig(layers="all", causal_rule="running")
    model = fit_router(build_base("llama"), text, 0.6, config, rounds=1)
    fitted = model.peft_config["default"]
    assert fitted.causal_rule == "running"
    assert set(fitted.share_shifts) == set(fitted.gated_layers())
    ids = tokens(2, 60, seed=7)
    model.save_pretrained(str(tmp_path / "running"))
    loaded = PeftModel.from_pretrained(build_base("llama"), str(tmp_path / "running")).eval()
    torch.testing.assert_close(read(loaded, ids), read(model, ids))
    assert loaded.peft_config["default"].share_shifts == pytest.approx(fitted.share_shifts)

    card = (tmp_path / "running" / "README.md").read_text()
    assert "| rule at inference | the score's rank among those of its own sequence" in card
    assert thresholds(model) == {} and "running ranks" in str(model)

    set_causal_rule(loaded, "quantile")
    assert len(thresholds(loaded)) == len(fitted.gated_layers())
    loaded.save_pretrained(str(tmp_path / "quantile"))
    assert "share_shifts" not in json.loads(
        (tmp_path / "quantile" / "adapter_config.json").read_text()
    )
    plain = PeftModel.from_pretrained(build_base("llama"), str(tmp_path / "quantile")).eval()
    with pytest.raises(ConfigError, match=r"call calibrate\(model, batches\)"):
        set_causal_rule(plain, "running")
    calibrate(plain, text)
    set_causal_rule(plain, "running")
    assert plain.peft_config["default"].causal_rule == "running"


def test_what_it_cannot_do_is_refused() -> None:
    model = running_model()
    with pytest.raises(ValueError, match="keeps scores with the keys of a KV cache that grows"):
        model.generate(input_ids=tokens(1, 20), max_new_tokens=4, cache_implementation="static")
    positions = torch.cat([torch.arange(10), torch.arange(10)])[None]
    with pytest.raises(ConfigError, match="turn packing"):
        read(model, tokens(1, 20), position_ids=positions)
    with pytest.raises(ConfigError, match="for good"):
        set_causal_rule(model, "predictor")
    with pytest.raises(ConfigError, match=r"causal_rule='often'"):
        set_causal_rule(model, "often")
    for fields in (
        {"granularity": "sequence", "target": "attention"},
        {"gate": "none"},
        {"threshold": 0.0},
    ):
        with pytest.raises(ConfigError, match="causal_rule='running'"):
            DepthRouteConfig(causal_rule="running", **fields)


def test_shares_of_layers_go_with_the_weights(tmp_path: Path) -> None:
    text = {"input_ids": tokens(12, 60, seed=8)}
    fields = {"budget_scope": "global", "selection": "threshold"}
    one, other = (build_routed("llama", seed=seed, layers="all", **fields) for seed in (0, 1))
    for model in (one, other):
        calibrate(model, text)
        set_causal_rule(model, "running")
    assert one.peft_config["default"].share_shifts != other.peft_config["default"].share_shifts
    other.save_pretrained(str(tmp_path))
    one.load_adapter(str(tmp_path), "default")
    ids = tokens(2, 60, seed=9)
    torch.testing.assert_close(read(one, ids), read(other, ids))

    before = other.peft_config["default"].share_shifts
    draft = draft_view(other, drop=[1])
    left = next(routings_of(draft).__iter__()).active_config()
    assert [left.share_shift(place) for place in range(3)] == [before[0], before[2], before[3]]


def test_an_evaluation_leaves_the_shares_of_layers_as_they_were() -> None:
    model = running_model(budget_scope="global", causal_rule="quantile")
    set_causal_rule(model, "running")
    config = model.peft_config["default"]
    inputs = {"input_ids": tokens(4, 48, seed=3)}
    before = dict(config.share_shifts)
    expected = shares(model, **inputs)
    evaluate_budgets(model, [inputs], [{"input_ids": tokens(8, 32, seed=8)}], [0.2])
    assert config.share_shifts == before
    assert shares(model, **inputs) == expected


def test_training_with_a_budget_of_all_layers_is_refused_and_leaves_no_old_shares(
    tmp_path: Path,
) -> None:
    model = build_routed("llama", layers="all", budget_scope="global", selection="threshold")
    calibrate(model, {"input_ids": tokens(12, 60, seed=8)})
    set_causal_rule(model, "running")
    with pytest.raises(ConfigError, match="train with 'quantile'"):
        make_trainer(model, rows(4), tmp_path)
    set_causal_rule(model, "quantile")
    make_trainer(model.train(), rows(4), tmp_path, max_steps=1)[0].train()
    with pytest.raises(ConfigError, match=r"call calibrate\(model, batches\)"):
        set_causal_rule(model, "running")
    with pytest.raises(ConfigError, match="selection='controller'"):
        DepthRouteConfig(causal_rule="running", selection="controller")
