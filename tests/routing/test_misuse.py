"""What would be silently wrong is said: thresholds that nobody fitted,
training that trains nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_base, build_routed
from peft import PeftModel
from shares import run_ratio, text_batches
from training import make_trainer, rows, stacked, training_arguments
from transformers import Trainer

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    calibrate,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.inference.calibration import is_calibrated
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.thresholds import NOT_FITTED
from hf_depthroute.training.losses import routing_losses

NEVER_FITTED = "never fitted"


@pytest.fixture
def silent() -> Iterator[None]:
    """A warning of ours is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def fresh(**fields: Any) -> PeftModel:
    return get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 2, 3], **fields))


def loop(model: PeftModel, steps: int = 12, with_losses: bool = True) -> None:
    """The plain loop of docs/how-to/distributed-training.md,
    on the batches that `run_ratio` counts on."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batches = text_batches()
    for step in range(steps):
        batch = batches[step % len(batches)]
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with record_routes(model) as trace:
            output = model(**batch, labels=labels)
        loss = sum(routing_losses(trace, lm=output.loss).values()) if with_losses else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# --- thresholds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["mlp", "jepa"])
def test_the_plain_loop_tracks_the_thresholds(gate: str, silent: None) -> None:
    model = fresh(gate=gate, context_dim=16, summary_dim=8, action_dim=4).train()
    loop(model)
    model.eval()
    assert is_calibrated(model)
    for budget in (0.1, 0.5, 0.9):
        set_budget(model, budget)
        for ratio in run_ratio(model, text_batches()).values():
            assert ratio == pytest.approx(budget, abs=0.15)


def test_a_validation_of_the_losses_moves_no_threshold() -> None:
    model, batch = build_routed("llama").train(), stacked(rows(4))
    before = [routing.active_quantiles().values.clone() for routing in routings_of(model)]
    for mode, gradients in ((False, True), (False, False), (True, False)):
        with record_routes(model.train(mode)) as trace, torch.set_grad_enabled(gradients):
            routing_losses(trace, lm=model(**batch).loss)
    assert all(
        torch.equal(a, h.active_quantiles().values) for a, h in zip(before, routings_of(model))
    )


def test_set_budget_refuses_thresholds_that_were_never_fitted() -> None:
    model = fresh(budget=0.5).eval()
    with pytest.raises(ValueError, match=r"set_budget: .*never fitted.*call calibrate"):
        set_budget(model, 0.1)
    assert routings_of(model)[0].active_config().budget == 0.5
    set_budget(model, 1.0)  # everything, whatever the scores
    calibrate(model, text_batches(1))
    set_budget(model, 0.1)


def test_inference_with_such_thresholds_is_warned_once_and_calibration_is_not(silent: None) -> None:
    model, batch = fresh().eval(), text_batches(1)[0]
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            model(**batch)
        model.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=False)
    assert [str(w.message) for w in caught if NEVER_FITTED in str(w.message)] == [NOT_FITTED]
    calibrate(model, [batch])
    with torch.no_grad():
        model.eval()(**batch)


@pytest.mark.parametrize("fields", [{"budget": 1.0}, {"gate": "none"}, {"gate": "linear"}])
def test_where_no_threshold_of_a_budget_decides_nothing_is_said(
    fields: dict[str, Any], silent: None
) -> None:
    with torch.no_grad():
        fresh(**fields).eval()(**text_batches(1)[0])


def test_saving_and_doctor_name_thresholds_that_were_never_fitted(tmp_path: Path) -> None:
    model = fresh()
    with pytest.warns(UserWarning, match="adapter 'default' is saved as it is: .*never fitted"):
        model.save_pretrained(tmp_path)
    said = [finding for finding in examine(tmp_path) if "calibrated" in finding.text]
    assert [(finding.state, finding.text.split(":")[0]) for finding in said] == [
        ("note", "not calibrated")
    ]
    with pytest.warns(UserWarning, match=NEVER_FITTED), torch.no_grad():
        PeftModel.from_pretrained(build_base("llama"), tmp_path).eval()(**text_batches(1)[0])
    calibrate(model, text_batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained(tmp_path)
    assert [f.state for f in examine(tmp_path) if f.text.startswith("calibrated: ")] == ["ok"]


# --- training that trains nothing -----------------------------------------------------------------


@pytest.mark.parametrize("with_losses", [True, False])
def test_training_in_evaluation_mode_is_warned(with_losses: bool) -> None:
    model = build_routed("llama").eval()
    with pytest.warns(UserWarning, match=r"in evaluation mode.*call model\.train\(\)") as caught:
        loop(model, 1, with_losses)
    assert {str(w.message) for w in caught if "evaluation mode" in str(w.message)}


def test_evaluation_training_and_frozen_gates_are_not_taken_for_it(silent: None) -> None:
    model, batch = build_routed("llama").eval(), stacked(rows(2))
    model(**batch)  # with a graph that nobody uses
    with torch.no_grad():
        model(**batch)
    loop(model.train(), 1)
    for routing in routings_of(model.eval()):
        routing.depth_route_gate.requires_grad_(False)
    loop(model, 1, with_losses=False)  # a branch, say, on the decisions of inference


def test_a_loop_over_a_loaded_adapter_is_told_how_to_load_it(tmp_path: Path, silent: None) -> None:
    build_routed("llama").save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(build_base("llama"), tmp_path).train()
    batch = stacked(rows(2))
    with pytest.warns(UserWarning, match="is_trainable=True"):
        model(**batch)
    with torch.no_grad():
        model(**batch)
    trainable = PeftModel.from_pretrained(build_base("llama"), tmp_path, is_trainable=True).train()
    loop(trainable, 1)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    model(inputs_embeds=embedded.requires_grad_(True))  # what trains is a soft prompt


@pytest.mark.parametrize("cls", [Trainer, DepthRouteTrainer])
def test_a_trainer_over_a_loaded_adapter_is_told_how_to_load_it(cls: Any, tmp_path: Path) -> None:
    build_routed("llama").save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter")
    trainer, _ = make_trainer(model, rows(2), tmp_path, cls)
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer.train()


def test_a_frozen_model_that_is_not_routed_is_left_to_the_trainer(tmp_path: Path) -> None:
    base = build_base("llama")
    base.requires_grad_(False)
    trainer = Trainer(base, training_arguments(tmp_path), train_dataset=rows(2))
    with pytest.raises(Exception) as caught:
        trainer.train()
    assert "is_trainable" not in str(caught.value)
