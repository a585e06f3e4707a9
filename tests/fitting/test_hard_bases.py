"""Bases that are not as a fit would like them: layers that add nothing, text of few tokens,
numbers that overflow."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, decoder_layers, tokens

from hf_depthroute import DepthRouteConfig, fit_router, get_depth_routed_model
from hf_depthroute.data.batches import model_inputs
from hf_depthroute.fitting.narrowing import narrowed
from hf_depthroute.fitting.text import FitWarning
from hf_depthroute.inference.calibration import active_routings, calibrate, thresholds
from hf_depthroute.inference.non_finite import NonFiniteError
from hf_depthroute.parts.regression import sizes_of
from hf_depthroute.training.record import remembered

TEXT = [{"input_ids": part} for part in tokens(20, 60, seed=5).split(4)]
PROMPTS = {"phases": "prefill", "prompt_tail": 4}
KINDS = [{}, {"branch": "neurons"}, PROMPTS]


def fitted(
    base: Any, text: list[dict[str, torch.Tensor]] = TEXT, keep: float = 0.5, **fields: Any
) -> Any:
    if "phases" in fields:
        keep = 0.7
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tokens to fit on are few", category=FitWarning)
        return fit_router(base, text, keep, DepthRouteConfig(layers="all", **fields))


def record_of(model: Any) -> dict[str, Any]:
    training = remembered(model, "default").training
    assert training is not None
    fit: dict[str, Any] = training["fit"]
    return fit


@torch.no_grad()
def without_ffns(layers: list[int]) -> Any:
    base = build_base("llama")
    for index in layers:
        decoder_layers(base)[index].mlp.down_proj.weight.zero_()
    return base


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_base_that_computes_no_numbers_is_refused_with_its_layer_and_stays_as_it_is(
    dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    base = build_base("llama", dtype=dtype)
    with torch.no_grad():
        decoder_layers(base)[2].mlp.up_proj.weight.fill_(torch.finfo(dtype).max)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NonFiniteError, match=f"stream behind layer 2 is not finite in {name}"):
        fitted(base, **kind)
    after = base.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_branches_that_overflow_in_half_precision_are_not_saved_as_a_fit() -> None:
    base = build_base("llama", dtype=torch.float16)
    with torch.no_grad():
        decoder_layers(base)[2].mlp.down_proj.weight.mul_(6e4)
    assert base(TEXT[0]["input_ids"]).logits.isfinite().all()
    for rounds in (1, 2):
        with pytest.raises(NonFiniteError, match="not finite"), torch.no_grad():
            fit_router(base, TEXT, 0.5, DepthRouteConfig(layers="all"), rounds=rounds)


def test_a_base_that_overflows_in_its_head_is_refused() -> None:
    base = build_base("llama", dtype=torch.float16)
    with torch.no_grad():
        base.lm_head.weight.fill_(6e4)
        base.lm_head.weight[:32] *= -1
    with pytest.raises(NonFiniteError, match="logits are NaN"):
        fitted(base)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_text_of_one_token_has_one_direction_and_is_fitted(kind: dict[str, Any]) -> None:
    """Rounding leaves a little less than nothing along the others."""
    ids = torch.full((20, 60), 5)
    model = fitted(build_base("llama"), [{"input_ids": part} for part in ids.split(4)], **kind)
    fit = record_of(model)
    assert fit["loss"] == pytest.approx(fit["loss_dense"], abs=0.05)
    for name, value in model.named_parameters():
        assert value.isfinite().all(), name


def test_a_direction_that_the_text_does_not_have_is_not_blown_up() -> None:
    gram_dd = torch.diag(torch.tensor([4.0, 1.0, 0.0, -1e-9], dtype=torch.float64))
    found = sizes_of(torch.eye(4, dtype=torch.float64), gram_dd, torch.tensor(1.0))
    assert found.tolist() == pytest.approx([2.0, 1.0, 2e-6, 2e-6])


def test_layers_that_are_left_keep_their_threshold_where_others_are_given_up() -> None:
    """One table is of all layers: read at the budget of some of them, it gave another threshold,
    and the next table was of another stream."""
    base = build_base("gpt2")
    config = DepthRouteConfig(layers="all", gate="affine", budget=0.5, budget_scope="global")
    model = get_depth_routed_model(base, config)
    for number, routing in enumerate(active_routings(model)):
        routing.depth_route_gate["default"].score.bias.data.fill_(3.0 if number == 0 else 0.0)
    calibrate(model.eval(), TEXT)
    before = thresholds(model)
    fewer = narrowed(model, dense=[0])
    assert fewer.peft_config["default"].budget < 0.5
    assert thresholds(fewer) == pytest.approx({i: before[i] for i in (1, 2, 3)})


def test_a_layer_that_is_all_that_counts_runs_and_the_others_are_static(tmp_path: Path) -> None:
    with pytest.warns(FitWarning, match="25% of all calls run in full .* keep=0.4"):
        model = fitted(without_ffns([0, 1, 3]), keep=0.4)
    layers = record_of(model)["layers"]
    assert {index: fit["share"] for index, fit in layers.items()} == {
        "0": 0.0,
        "1": 0.0,
        "2": 1.0,
        "3": 0.0,
    }
    assert model.peft_config["default"].static_layers == [0, 1, 3]
    model.save_pretrained(str(tmp_path))
    card = (tmp_path / "README.md").read_text()
    assert "with 25.0% of all calls run in full" in card and "40.0% was asked for." in card
    fit = record_of(model)
    assert fit["loss"] == pytest.approx(fit["loss_dense"], abs=1e-5)


def test_a_base_whose_ffns_add_nothing_says_that_its_share_is_another() -> None:
    with pytest.warns(FitWarning, match="many tokens have the same score"):
        fitted(without_ffns([0, 1, 2, 3]))


@pytest.mark.parametrize("length", [1, 2])
def test_prompts_without_a_token_to_route_are_refused(length: int) -> None:
    text = [{"input_ids": part} for part in tokens(1200 // length, length).split(100)]
    base = build_base("llama")
    with pytest.raises(ValueError, match="prompt_tail=1: no prompt in the rows to fit on"):
        fitted(base, text, phases="prefill")
    assert not hasattr(base, "peft_config")


def test_prompts_whose_held_out_rows_are_shorter_than_the_tail_are_refused() -> None:
    """The longest row alone has tokens to route, and it is not held out."""
    rows = [tokens(1, 30, seed=i)[0].tolist() for i in range(39)]
    text = [{"input_ids": tokens(1, 64)}, {"input_ids": rows}]
    with pytest.raises(
        ValueError, match=r"prompt_tail=24: .* rows to hold out .*smaller prompt_tail"
    ):
        fitted(build_base("llama"), text, phases="prefill", prompt_tail=24)


def test_rows_of_one_token_have_no_loss_and_are_refused() -> None:
    with pytest.raises(ValueError, match="no row that is held out has two real tokens"):
        fitted(build_base("llama"), [{"input_ids": part} for part in tokens(1200, 1).split(100)])


@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
def test_ids_and_positions_that_the_model_has_no_row_for_are_named(kind: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"batch 0 holds the token id 67, .* 64 embeddings"):
        fitted(build_base("llama"), [{"input_ids": torch.full((20, 60), 67)}], **kind)
    with pytest.raises(ValueError, match="token id -100"):
        fitted(build_base("llama"), [{"input_ids": torch.full((20, 60), -100)}], **kind)
    with pytest.raises(ValueError, match="rows of 80 tokens, and the model has 64 positions"):
        fitted(build_base("gpt2"), [{"input_ids": tokens(20, 80)}], **kind)


def test_rotary_positions_have_no_table_that_ends() -> None:
    (batch,) = model_inputs(build_base("llama"), {"input_ids": tokens(2, 80)})
    assert batch["input_ids"].shape == (2, 80)
