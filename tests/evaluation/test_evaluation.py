"""Losses over budgets: every token counts once, and the model is left as it was found."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import build_base, build_routed, decoder_layers, tokens
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model

from hf_depthroute import record_routes, set_budget
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.data.batches import prompts_of
from hf_depthroute.evaluation import evaluate_budgets, mean_loss
from hf_depthroute.inference.calibration import active_routings, use_selection
from hf_depthroute.routing.trace import full_depth


@pytest.fixture
def model() -> PeftModel:
    return build_routed("llama", budget=0.4)


def batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length, seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def state(model: PeftModel) -> list[object]:
    found: list[object] = [model.training]
    for routing in active_routings(model):
        found += [routing.config(routing.adapter()).budget, routing.state.settings]
        found += [t.tolist() for t in routing.depth_route_quantiles.state_dict().values()]
    return found


def test_mean_loss_equals_the_models_own_loss() -> None:
    base = build_base("llama")
    block = batch(3, 12)
    with torch.no_grad():
        own = base(**block, labels=block["input_ids"]).loss
    assert mean_loss(base, [block]) == pytest.approx(float(own), abs=1e-5)


def test_every_token_weighs_the_same_whatever_the_batch_sizes() -> None:
    base = build_base("llama")
    block = batch(5, 12)
    split = [
        {name: value[part] for name, value in block.items()} for part in (slice(0, 4), slice(4, 5))
    ]
    assert mean_loss(base, split) == pytest.approx(mean_loss(base, [block]), abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side: str) -> None:
    base = build_base("llama")
    block = batch(2, 10)
    padding = (4, 0) if side == "left" else (0, 4)
    padded = {name: F.pad(value, padding) for name, value in block.items()}
    assert mean_loss(base, [padded]) == pytest.approx(mean_loss(base, [block]), abs=1e-4)


def test_masked_labels_do_not_count() -> None:
    base = build_base("llama")
    block = batch(2, 10)
    labels = block["input_ids"].clone()
    labels[:, 6:] = -100
    short = {name: value[:, :6] for name, value in block.items()}
    assert mean_loss(base, [block | {"labels": labels}]) == pytest.approx(
        mean_loss(base, [short]), abs=1e-5
    )


def test_mean_loss_of_packed_documents_is_that_of_each_alone() -> None:
    base, ids = build_base("llama"), tokens(1, 12)
    packed = {
        "input_ids": ids,
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]),
    }
    apart = [{"input_ids": ids[:, :5]}, {"input_ids": ids[:, 5:]}]
    assert mean_loss(base, [packed]) == pytest.approx(mean_loss(base, apart), abs=1e-5)


def test_no_text_is_an_error() -> None:
    base = build_base("llama")
    for blocks in ([], [batch(2, 1)]):
        with pytest.raises(ValueError, match="no text to evaluate"):
            mean_loss(base, blocks)


@pytest.mark.parametrize("training", [True, False])
def test_mean_loss_keeps_the_mode_also_after_an_error(training: bool) -> None:
    base = build_base("llama").train(training)
    mean_loss(base, [batch(1, 4)])
    assert base.training is training
    with pytest.raises(IndexError):
        mean_loss(base, [{"input_ids": torch.full((1, 4), 10_000)}])
    assert base.training is training


def test_mean_loss_makes_no_graph(model: PeftModel) -> None:
    mean_loss(model, [batch(1, 4)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_dense_row_is_the_base(model: PeftModel) -> None:
    blocks = [batch(4, 16)]
    dense = evaluate_budgets(model, blocks, None, [0.5])[0]
    assert (dense.budget, dense.rule, dense.full_ratio, dense.gap) == (1.0, "dense", 1.0, None)
    assert dense.loss == mean_loss(build_base("llama"), blocks)
    assert dense.perplexity == pytest.approx(math.exp(dense.loss))


def test_rows_are_what_each_rule_gives_at_each_budget(model: PeftModel) -> None:
    blocks = [batch(4, 16), batch(2, 16, seed=1)]
    rows = evaluate_budgets(model, blocks, None, [0.25, 0.75])
    assert [(row.budget, row.rule) for row in rows[1:]] == [
        (0.25, "topk"),
        (0.25, "threshold"),
        (0.75, "topk"),
        (0.75, "threshold"),
    ]
    for topk, threshold in (rows[1:3], rows[3:5]):
        set_budget(model, topk.budget)
        assert threshold.loss == mean_loss(model, blocks)
        assert threshold.gap == threshold.loss - topk.loss
        with use_selection(model, "topk"):
            assert topk.loss == mean_loss(model, blocks)
        assert topk.loss != threshold.loss
        assert topk.full_ratio == topk.budget  # 16 tokens times a quarter is exact


def test_full_ratio_is_the_mean_over_layers_and_real_tokens(model: PeftModel) -> None:
    block = batch(2, 12)
    block["attention_mask"][0, 7:] = 0
    row = evaluate_budgets(model, [block], None, [0.4])[2]
    with record_routes(model) as trace, torch.no_grad():
        model(**block)
    ratios = trace.full_ratio().values()
    assert row.full_ratio == pytest.approx(sum(ratios) / len(ratios), abs=1e-6)


def test_budget_one_has_the_dense_loss(model: PeftModel) -> None:
    dense, topk, threshold = evaluate_budgets(model, [batch(2, 8)], None, [1.0])
    assert dense.loss == topk.loss == threshold.loss
    assert topk.full_ratio == threshold.full_ratio == 1.0


@pytest.mark.parametrize("target,tail", [("ffn", None), ("block", 3), ("attention", 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_of_prompts_alone_the_loss_is_that_of_the_text_behind_them(
    target: str, tail: int | None, padded: bool
) -> None:
    model = build_routed("llama", target, budget=0.4, phases="prefill", prompt_tail=tail)
    block = batch(2, 18)
    if padded:
        block["attention_mask"][0, 12:] = 0
    expected: dict[str, list[torch.Tensor]] = {"dense": [], "threshold": []}
    shares = []
    for row, mask in zip(block["input_ids"], block["attention_mask"], strict=True):
        ids = row[mask.bool()][None]
        prompt = len(ids[0]) * 2 // 3
        for rule, in_full in (("dense", full_depth(model)), ("threshold", nullcontext())):
            with torch.no_grad(), in_full, record_routes(model) as trace:
                read = model(input_ids=ids[:, :prompt], use_cache=True)
            with torch.no_grad(), full_depth(model):
                rest = model(input_ids=ids[:, prompt:], past_key_values=read.past_key_values)
            logits = torch.cat([read.logits[:, -1:], rest.logits[:, :-1]], dim=1)[0]
            expected[rule].append(F.cross_entropy(logits, ids[0, prompt:], reduction="none"))
        shares.append(
            (torch.cat([record.mask for record in trace.values()]).sum(), prompt * len(trace))
        )
    rows = {row.rule: row for row in evaluate_budgets(model, [block], None, [0.4])}
    assert all(row.behind_prompts for row in rows.values())
    for rule, losses in expected.items():
        assert rows[rule].loss == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    assert rows["threshold"].loss != pytest.approx(rows["dense"].loss, abs=1e-5)
    assert rows["threshold"].full_ratio == pytest.approx(
        float(shares[0][0] + shares[1][0]) / (shares[0][1] + shares[1][1])
    )


def test_calibration_text_sets_the_share(model: PeftModel) -> None:
    with torch.no_grad():
        for routing in active_routings(model):
            routing.depth_route_quantiles["default"].values.add_(100)  # no score reaches these
    blocks = [batch(8, 16)]
    assert evaluate_budgets(model, blocks, None, [0.5])[2].full_ratio == 0.0
    assert evaluate_budgets(model, blocks, blocks, [0.5])[2].full_ratio == pytest.approx(
        0.5, abs=0.02
    )


@pytest.mark.parametrize("calibrated", [True, False])
def test_the_adapter_is_left_as_it_was(model: PeftModel, calibrated: bool) -> None:
    model.train()
    before = state(model)
    evaluate_budgets(model, [batch(2, 8)], [batch(4, 8)] if calibrated else None, [0.25, 0.75])
    assert state(model) == before


def test_the_adapter_is_left_as_it_was_after_an_error(model: PeftModel) -> None:
    before = state(model)
    passes = iter(range(2))

    def fail_at_the_third(*args: object) -> None:
        if next(passes, None) is None:
            raise IndexError

    decoder_layers(model)[-1].register_forward_pre_hook(fail_at_the_third)
    with pytest.raises(IndexError):
        evaluate_budgets(model, [batch(1, 4)], [batch(4, 8)] * 4, [0.25])
    assert state(model) == before


@pytest.mark.parametrize("budget", [0.0, 1.5, float("nan")])
def test_a_budget_out_of_range_is_refused_before_anything_runs(
    model: PeftModel, budget: float
) -> None:
    with pytest.raises(ConfigError, match="budget"):
        evaluate_budgets(model, [], None, [0.5, budget])


def test_batches_may_be_a_generator(model: PeftModel) -> None:
    rows = evaluate_budgets(model, (batch(2, 8, seed) for seed in range(3)), None, [0.5])
    assert rows == evaluate_budgets(model, [batch(2, 8, seed) for seed in range(3)], None, [0.5])


@pytest.mark.parametrize("phases", ["all", "prefill"])
def test_dense_is_the_model_that_the_router_was_put_on(phases: str) -> None:
    """A LoRA adapter beside it stays on: the base without it would make routing look better than
    nothing skipped."""
    router = build_routed("llama", phases=phases)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(router.get_base_model(), config, adapter_name="tuned")
    text = [{"input_ids": tokens(4, 24, seed=8)}]
    with full_depth(router):
        logits = router(text[0]["input_ids"], use_cache=False).logits
    counted = (
        prompts_of(text[0])[1][:, :-1]
        if phases == "prefill"
        else torch.ones(4, 23, dtype=torch.bool)
    )
    expected = F.cross_entropy(logits[:, :-1][counted], text[0]["input_ids"][:, 1:][counted])
    dense = evaluate_budgets(router, text, None, [0.5])[0]
    assert dense.rule == "dense" and dense.loss == pytest.approx(float(expected), abs=1e-5)


def test_dense_keeps_a_prefix_beside_a_router_with_copies_of_base_modules() -> None:
    """The router's copies are off with it; what another method adds stays on."""
    router = build_routed("llama", modules_to_save=["lm_head"])
    base = router.get_base_model()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        both = get_peft_model(base, config, adapter_name="prefix").eval()
    text = [{"input_ids": tokens(4, 24, seed=8)}]

    def loss() -> float:
        with torch.no_grad():
            logits = both(**text[0]).logits[:, :-1]
        return float(F.cross_entropy(logits.flatten(0, 1), text[0]["input_ids"][:, 1:].flatten()))

    with full_depth(both):
        expected = loss()  # the copy is still the base's
    with torch.no_grad():
        base.lm_head.modules_to_save["default"].weight.mul_(2)
    trained = [parameter.requires_grad for parameter in both.parameters()]
    with full_depth(both):
        assert loss() != pytest.approx(expected, abs=1e-2)
    dense = evaluate_budgets(both, text, None, [0.5])[0]
    assert dense.rule == "dense" and dense.loss == pytest.approx(expected, abs=1e-5)
    with both.disable_adapter():
        assert loss() != pytest.approx(expected, abs=1e-3)
    assert [parameter.requires_grad for parameter in both.parameters()] == trained


@pytest.mark.parametrize("trainable", [True, False])
def test_dense_is_the_base_without_copies_and_what_trains_stays(
    trainable: bool, tmp_path: Path
) -> None:
    model = build_routed("llama", modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path, is_trainable=trainable)
    trains = {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}
    dense, *_, routed = evaluate_budgets(loaded, [batch(2, 12)], None, [1.0])
    assert dense.loss == pytest.approx(mean_loss(build_base("llama"), [batch(2, 12)]), abs=1e-6)
    assert routed.loss != pytest.approx(dense.loss, abs=1e-3)
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == trains


def test_packed_documents_are_prompts_each() -> None:
    model = build_routed("llama", "block", phases="prefill")
    ids = tokens(8, 24, seed=9)
    packed = {
        "input_ids": ids.view(2, 96),
        "position_ids": torch.arange(24).repeat(4)[None].expand(2, -1),
    }
    rows, found = (
        evaluate_budgets(model, [batch], None, [0.5]) for batch in ({"input_ids": ids}, packed)
    )
    for one, other in zip(rows, found, strict=True):
        if one.rule == "topk":  # the highest of a row, whatever documents it holds
            continue
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.full_ratio == pytest.approx(one.full_ratio, abs=1e-6)
    prompts, behind = prompts_of({"input_ids": ids}, tail=3)
    assert all(
        torch.equal(a.view(8, 24), b) for a, b in zip(prompts_of(packed, tail=3), (prompts, behind))
    )
