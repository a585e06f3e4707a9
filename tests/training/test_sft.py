"""trl's SFTTrainer trains routers with the routing losses, told to or not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build_base, build_routed, tokens
from peft import PeftModel, PeftModelForCausalLM
from sft_runs import ROUTES, sft, sft_arguments, token_data
from text_models import word_tokenizer
from training import (
    KeepGradients,
    adapter_state,
    assert_same_tensors,
    step_logs,
    training_arguments,
)

from hf_depthroute import (
    DepthRouteCallback,
    DepthRouteConfig,
    DepthRouteTrainer,
    get_depth_routed_model,
)
from hf_depthroute.routing.trace import full_depth
from hf_depthroute.training.trainer import DepthRouteTrainerMixin, RoutingArguments

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


class MixedSFT(DepthRouteTrainerMixin, trl.SFTTrainer):
    """As a user writes it who wants whole checkpoints too."""


@pytest.mark.parametrize("how", ["plain", "callback", "mixin"])
def test_sft_trains_as_our_trainer_does(how: str, tmp_path: Path) -> None:
    """The same losses, gradients and adapter from the same batches;
    nobody has to ask for the routing losses."""
    callbacks = [DepthRouteCallback(arguments=RoutingArguments())] if how == "callback" else []
    kept = KeepGradients()
    fields = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    cls = MixedSFT if how == "mixin" else trl.SFTTrainer
    trainer = sft(tmp_path, token_data(), cls, [*callbacks, kept], **fields)
    start = adapter_state(trainer.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without the routing losses")
        trainer.train()
    assert start.keys() == adapter_state(trainer.model).keys()
    moved = {
        name
        for name, value in adapter_state(trainer.model).items()
        if not torch.equal(value, start[name])
    }
    assert {f"{layer}.depth_route_gate.default.score.weight" for layer in (1, 2, 3)} <= moved

    expected_kept = KeepGradients()
    expected = DepthRouteTrainer(
        get_depth_routed_model(build_base("llama"), ROUTES),
        training_arguments(tmp_path, **fields),
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
        callbacks=[expected_kept],
    )
    expected.train()
    assert len(step_logs(trainer)) == len(step_logs(expected)) == 4
    for entry, wanted in zip(step_logs(trainer), step_logs(expected)):
        for name in ("loss", "loss_lm", "loss_jepa", "loss_budget", "full_ratio/layer_2"):
            assert entry[name] == pytest.approx(wanted[name], abs=1e-5), name
        assert "mean_token_accuracy" in entry
    for one, two in zip(kept.steps, expected_kept.steps, strict=True):
        assert_same_tensors(one, two, tolerance=1e-5)


def test_weights_and_schedules_of_the_callback_count(tmp_path: Path) -> None:
    arguments = RoutingArguments(
        budget_weight=3.0, jepa_weight=0.0, budget_start=1.0, budget_schedule_steps=4
    )
    trainer = sft(tmp_path, token_data(), callbacks=[DepthRouteCallback(arguments=arguments)])
    trainer.train()
    first = step_logs(trainer)[0]
    assert (
        "loss_jepa" not in first
        and first["full_ratio/layer_1"] == 1.0 > step_logs(trainer)[-1]["full_ratio/layer_1"]
    )
    assert first["loss"] == pytest.approx(
        first["loss_lm"] + 3.0 * first["loss_budget"] + 0.5 * first["loss_alive"], abs=1e-5
    )
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize("how", ["callback", "mixin"])
def test_distillation_works_under_sft(how: str, tmp_path: Path) -> None:
    """SFTTrainer's loss makes no logits; the term, its gradients and the adapter are
    those of our trainer."""
    arguments, kept, expected_kept = (
        RoutingArguments(distill_weight=0.5),
        KeepGradients(),
        KeepGradients(),
    )
    if how == "callback":
        trainer = sft(
            tmp_path, token_data(), callbacks=[DepthRouteCallback(arguments=arguments), kept]
        )
    else:
        trainer = sft(tmp_path, token_data(), MixedSFT, [kept])
        trainer.routing_objective.arguments = arguments
    trainer.train()
    expected = DepthRouteTrainer(
        get_depth_routed_model(build_base("llama"), ROUTES),
        training_arguments(tmp_path, distill_weight=0.5),
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
        callbacks=[expected_kept],
    )
    expected.train()
    assert len(step_logs(trainer)) == len(step_logs(expected)) == 4
    for entry, wanted in zip(step_logs(trainer), step_logs(expected)):
        assert entry["loss_distill"] == pytest.approx(wanted["loss_distill"], abs=1e-5)
        assert entry["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert step_logs(trainer)[-1]["loss_distill"] > 0  # a fresh branch adds nothing to begin with
    for one, two in zip(kept.steps, expected_kept.steps, strict=True):
        assert_same_tensors(one, two, tolerance=1e-4)


@pytest.mark.parametrize("how", ["packing", "completion", "assistant"])
def test_packing_and_loss_masks_train_and_evaluate(how: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {}
    if how == "packing":
        data, fields = token_data(), {"packing": True, "max_length": 24}
    elif how == "completion":
        data = datasets.Dataset.from_dict(
            {"prompt": ["the cat sat"] * 8, "completion": [" on the big mat"] * 8}
        )
    else:
        turns = [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": "sat on the mat"},
        ]
        data, fields = (
            datasets.Dataset.from_dict({"messages": [turns] * 8}),
            {"assistant_only_loss": True},
        )
    trainer = sft(tmp_path, data, **fields)
    labels = next(iter(trainer.get_train_dataloader()))["labels"]
    assert how == "packing" or (labels == -100).any(dim=1).all()
    trainer.train()
    for entry in step_logs(trainer):
        assert entry["loss_jepa"] > 0 and 0.4 <= entry["full_ratio/layer_1"] <= 0.7
    metrics = trainer.evaluate(data)
    assert metrics["eval_loss"] > 0 and "eval_entropy" in metrics


def test_the_adapter_that_sft_saves_loads(tmp_path: Path) -> None:
    trainer = sft(tmp_path, token_data())
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert isinstance(trainer.model, PeftModelForCausalLM)
    model = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter").eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.eval()(ids).logits)


def test_a_forward_pass_without_a_graph_after_that_of_the_loss_is_passed_over(
    tmp_path: Path,
) -> None:
    """Label smoothing makes SFTTrainer run the model twice;
    the routing losses come from the first run."""
    logs = []
    for smoothing in (0.0, 0.1):
        callbacks = [
            DepthRouteCallback(arguments=RoutingArguments(distill_weight=0.5, exit_weight=0.1))
        ]
        trainer = sft(tmp_path, token_data(), callbacks=callbacks, label_smoothing_factor=smoothing)
        trainer.train()
        logs.append(step_logs(trainer)[0])
    for name in ("loss_budget", "loss_jepa", "loss_distill", "loss_exit"):
        assert logs[0][name] == pytest.approx(logs[1][name], abs=1e-5), name
    assert logs[0]["loss"] != pytest.approx(logs[1]["loss"], abs=1e-3)


class WithoutGraph(trl.SFTTrainer):
    """Its loss comes from no forward pass of the routed model."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model(**inputs)
        loss = next(parameter for parameter in model.parameters() if parameter.requires_grad).sum()
        return (loss, None) if kwargs.get("return_outputs") else loss


def test_a_loss_without_a_forward_pass_of_the_routers_is_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path, token_data(), WithoutGraph)
    with pytest.raises(
        ValueError, match=r"WithoutGraph\.compute_loss made its loss without a forward pass"
    ):
        trainer.train()


def test_packed_rows_are_not_decided_as_one_sequence(tmp_path: Path) -> None:
    config = DepthRouteConfig(layers=[1], granularity="sequence")
    trainer = sft(tmp_path, token_data(), config=config, packing=True, max_length=24)
    with pytest.raises(
        ValueError, match="granularity='sequence' and causal_rule='running' decide by a row"
    ):
        trainer.train()


def test_lora_training_over_frozen_routers_adds_nothing(tmp_path: Path) -> None:
    import peft

    model = build_routed("llama", adapter_name="router").base_model.model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        peft.get_peft_model(model, lora),
        args=sft_arguments(tmp_path),
        train_dataset=token_data(),
        processing_class=word_tokenizer(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without the routing losses")
        trainer.train()
    assert all("loss_budget" not in entry for entry in step_logs(trainer))


@pytest.mark.parametrize("gate", ["mlp", "none"])
def test_smoothed_labels_are_those_of_what_is_served(gate: str, tmp_path: Path) -> None:
    """SFTTrainer then reads the text without labels; a prompt alone is routed."""
    ids = tokens(1, 14)
    model = build_routed("llama", "block", gate=gate, phases="prefill", selection="threshold")
    with torch.no_grad():
        read = model(input_ids=ids[:, :8], use_cache=True)
        with full_depth(model):
            rest = model(input_ids=ids[:, 8:], past_key_values=read.past_key_values)
    logits = torch.cat([read.logits[:, -1:], rest.logits[:, :-1]], dim=1)[0]
    expected = float(F.cross_entropy(logits, ids[0, 8:], label_smoothing=0.2))
    row = {"input_ids": ids[0].tolist(), "completion_mask": [0] * 8 + [1] * 6}
    data = datasets.Dataset.from_list([row, row])
    arguments = sft_arguments(
        tmp_path,
        label_smoothing_factor=0.2,
        max_steps=1,
        learning_rate=0.0,
        loss_type="nll",
        completion_only_loss=True,
    )
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer()
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
    trainer.train()
    (step,) = step_logs(trainer)
    assert step.get("loss_lm", step["loss"]) == pytest.approx(expected, abs=2e-3)
