"""Adapters that route prompts alone train on the text behind them,
in one pass that is what serving does in several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build_routed, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from text_models import save_base, write_text
from training import assert_same_tensors, gradients, make_trainer, training_arguments
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer

from hf_depthroute import DepthRouteConfig, DepthRouteTrainer, get_depth_routed_model, record_routes
from hf_depthroute.adapter.labels import in_full
from hf_depthroute.cli import main
from hf_depthroute.routing.stack import state_of
from hf_depthroute.routing.trace import full_depth, run_in_full
from hf_depthroute.training.objective import RoutingObjective
from hf_depthroute.training.prompts import collate_behind_prompts
from hf_depthroute.training.trace_statistics import has_budget

PROMPT, LENGTH = 8, 14


def row(seed: int = 0) -> dict[str, torch.Tensor]:
    """A prompt of 8 tokens without labels, and an answer of 6."""
    (ids,) = tokens(1, LENGTH, seed)
    labels = ids.clone()
    labels[:PROMPT] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def as_it_serves(model: PeftModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits that predict the answer: the prompt is read alone,
    and the answer in full behind it."""
    read = model(input_ids=ids[:, :PROMPT], use_cache=True)
    with full_depth(model):
        rest = model(input_ids=ids[:, PROMPT:], past_key_values=read.past_key_values)
    return torch.cat([read.logits[:, -1:], rest.logits[:, :-1]], dim=1)


@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_pass_is_what_serving_does_in_two(family: str, target: str) -> None:
    model = build_routed(family, target, phases="prefill", prompt_tail=3)
    ids = torch.stack([row(0)["input_ids"], row(1)["input_ids"]])
    forced = torch.zeros(2, LENGTH, dtype=torch.bool)
    forced[:, PROMPT - 3 :] = True
    with torch.no_grad():
        expected = as_it_serves(model, ids)
        with run_in_full(model, forced), record_routes(model) as trace:
            found = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(record.mask[:, PROMPT - 3 :].all() for record in trace.values())
    assert not all(record.mask[:, : PROMPT - 3].all() for record in trace.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_has_the_gradients_of_what_is_served(checkpointing: bool, tmp_path: Path) -> None:
    model = build_routed("llama", "ffn", gate="none", phases="prefill", prompt_tail=2)
    fields = {
        "per_device_train_batch_size": 1,
        "max_steps": 1,
        "gradient_checkpointing": checkpointing,
    }
    with torch.enable_grad():
        logits = as_it_serves(model, row()["input_ids"][None])
        F.cross_entropy(logits[0], row()["input_ids"][PROMPT:]).backward()
    expected = gradients(model)
    model.zero_grad()
    trainer, kept = make_trainer(model, [row()], tmp_path, **fields)
    trainer.train()
    assert_same_tensors(kept.steps[0], expected, tolerance=1e-5)
    assert any(gradient.abs().max() > 1e-6 for gradient in expected.values())


def test_the_loss_of_an_evaluation_is_that_of_the_answer_behind_its_prompt(tmp_path: Path) -> None:
    model = build_routed("llama", "block", phases="prefill", prompt_tail=2)
    with torch.no_grad():
        expected = F.cross_entropy(
            as_it_serves(model, row()["input_ids"][None])[0], row()["input_ids"][PROMPT:]
        )
    trainer = DepthRouteTrainer(
        model=model, args=training_arguments(tmp_path), eval_dataset=[row()]
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), abs=1e-5)
    with model.disable_adapter():
        ids = row()["input_ids"]
        dense = F.cross_entropy(model(input_ids=ids[None]).logits[0, PROMPT - 1 : -1], ids[PROMPT:])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(dense), abs=1e-5)


def test_what_no_gate_decided_is_in_no_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The share that a budget is held to is that of the prompt's tokens which were routed."""
    model = build_routed("llama", "ffn", phases="prefill", prompt_tail=2)
    trainer = DepthRouteTrainer(
        model=model,
        args=training_arguments(tmp_path, max_steps=1, per_device_train_batch_size=1),
        train_dataset=[row()],
    )
    seen: list[dict[int, Any]] = []
    call = RoutingObjective.__call__

    def watched(objective: Any, lm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(dict(inputs.trace))
        return call(objective, lm, inputs, *args, **kwargs)

    monkeypatch.setattr(RoutingObjective, "__call__", watched)
    trainer.train()
    shares = [record.mask[0, : PROMPT - 2].float().mean() for record in seen[0].values()]
    (logged,) = [entry for entry in trainer.state.log_history if "loss_budget" in entry]
    found = [value for name, value in logged.items() if name.startswith("full_ratio")]
    assert found and sum(found) / len(found) == pytest.approx(
        float(sum(shares) / len(shares)), abs=1e-5
    )


def test_which_tokens_have_to_run_in_full() -> None:
    no = -100
    labels = torch.tensor(
        [
            [no, no, no, no, 5, 6, 7, no],  # a prompt of four, an answer, padding
            [no, no, 5, 6, no, no, 7, 8],  # two turns
            [4, 5, 6, 7, 8, 9, 8, 7],  # plain text: all tokens are routed
            # Plain text, too, without the label that nothing predicts, and padding.
            [no, 5, 6, 7, 8, 9, 8, no],
        ]
    )
    mask = torch.ones_like(labels)
    mask[[0, 3], -1] = 0
    found = in_full({"input_ids": labels, "labels": labels, "attention_mask": mask}, tail=2)
    assert found.long().tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_documents_that_are_packed_are_no_prompts() -> None:
    """A collator without padding leaves out the first label of every document,
    which no token predicts."""
    labels = torch.tensor([[-100, 5, 6, 7, -100, 9, 8, 7]])
    batch = {
        "input_ids": labels.clamp(min=0),
        "labels": labels,
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
    }
    assert not in_full(batch, tail=1).any()


def test_a_mask_of_another_shape_is_refused() -> None:
    model = build_routed("llama", phases="prefill")
    forced = torch.ones(1, 3, dtype=torch.bool)
    with (
        run_in_full(model, forced),
        pytest.raises(ValueError, match=r"has shape \(1, 3\), the input \(1, 8\)"),
    ):
        model(tokens(1, 8))


def test_plain_text_is_labelled_behind_two_thirds() -> None:
    (ids,) = tokens(1, 9)
    batch = collate_behind_prompts(
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]
    )
    assert batch["labels"].tolist() == [[-100] * 6 + ids[6:].tolist()]


def test_the_command_trains_prompts_on_the_text_behind_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, text = save_base(tmp_path / "base"), write_text(tmp_path / "text.txt")
    common = ("--model", base, "--dataset", text, "--length", 18, "--batch-size", 2, "--steps", 3)
    given = (
        *common,
        "--phases",
        "prefill",
        "--prompt-tail",
        2,
        "--logging-steps",
        1,
        "--out",
        tmp_path / "out",
    )
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, given)])
    assert not ended.value.code, capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (
        all(evaluated["behind_prompts"] for evaluated in record["evaluation"])
        and record["evaluation"]
    )


def served_loss(model: PeftModel) -> float:
    with torch.no_grad():
        logits = as_it_serves(model.eval(), row()["input_ids"][None])[0]
    return float(F.cross_entropy(logits, row()["input_ids"][PROMPT:]))


@pytest.mark.parametrize("gate", ["mlp", "sinks", "none"])
def test_any_trainer_trains_and_evaluates_what_is_served(gate: str, tmp_path: Path) -> None:
    """A router that was fitted has no gate to train, and then a plain Trainer has no
    callback of ours."""
    model = build_routed(
        "llama", "block", gate=gate, phases="prefill", prompt_tail=2, selection="threshold"
    )
    expected = served_loss(model)
    fields = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.0,
        "eval_strategy": "steps",
    }
    fields |= {"budget_weight": 0.0, "eval_steps": 1}
    trainer, _ = make_trainer(
        model.train(), [row()], tmp_path, cls=Trainer, eval_dataset=[row()], **fields
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step.get("loss_lm", step["loss"]) == pytest.approx(expected, abs=2e-3)  # the log rounds
    expected = served_loss(model)  # thresholds may have moved
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)


class PopsLabels(Trainer):
    """As many people write a loss of their own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if kwargs.get("return_outputs") else loss


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("cls", [Trainer, DepthRouteTrainer])
@pytest.mark.parametrize("gate", ["mlp", "sinks"])
def test_smoothed_labels_are_those_of_what_is_served(
    gate: str, cls: type[Trainer], tmp_path: Path
) -> None:
    """The Trainer takes the labels away before the pass."""
    model = build_routed(
        "llama", "block", gate=gate, phases="prefill", prompt_tail=2, selection="threshold"
    )
    with torch.no_grad():
        logits = as_it_serves(model, row()["input_ids"][None])[0]
    expected = float(F.cross_entropy(logits, row()["input_ids"][PROMPT:], label_smoothing=0.2))
    assert expected != pytest.approx(served_loss(model), abs=1e-3)
    fields = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.0,
        "budget_weight": 0.0,
        "label_smoothing_factor": 0.2,
    }
    trainer, _ = make_trainer(
        model.train(), [row()], tmp_path, cls=cls, eval_dataset=[row()], **fields
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step.get("loss_lm", step["loss"]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("gate", ["sinks", "none"])
def test_a_gate_that_follows_no_budget_adds_nothing_to_the_loss(gate: str, tmp_path: Path) -> None:
    model = build_routed("llama", "block", gate=gate, phases="prefill", prompt_tail=2, budget=0.001)
    expected = served_loss(model)
    arguments = training_arguments(tmp_path, max_steps=1, per_device_train_batch_size=1)
    trainer = DepthRouteTrainer(model=model.train(), args=arguments, train_dataset=[row()])
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step["loss"] == pytest.approx(expected, abs=2e-3)


def test_a_static_layer_leaves_the_budget_to_those_with_gates() -> None:
    held = {}
    for fields in ({"static_layers": [2]}, {"gate": "none"}):
        model = build_routed("llama", selection="threshold", **fields).train()
        with record_routes(model) as trace:
            model(tokens(2, 9))
        held[next(iter(fields))] = has_budget(trace)
    assert held == {"static_layers": True, "gate": False}


@pytest.mark.parametrize("how", ["compute_loss", "compute_loss_func"])
def test_a_loss_of_ones_own_is_that_of_what_is_served(how: str, tmp_path: Path) -> None:
    model = build_routed("llama", "block", gate="sinks", phases="prefill", prompt_tail=2)
    expected = served_loss(model)
    cls = PopsLabels if how == "compute_loss" else Trainer
    own = {} if how == "compute_loss" else {"compute_loss_func": mean_loss}
    trainer = cls(
        model=model.train(),
        args=training_arguments(
            tmp_path, max_steps=1, per_device_train_batch_size=1, learning_rate=0.0
        ),
        train_dataset=[row()],
        eval_dataset=[row()],
        **own,
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step["loss"] == pytest.approx(expected, abs=2e-3)


def test_lora_beside_a_router_of_prompts_trains_on_what_is_served(tmp_path: Path) -> None:
    model = build_routed(
        "llama", "block", gate="sinks", phases="prefill", prompt_tail=2, selection="threshold"
    )
    config = LoraConfig(r=2, target_modules=["q_proj"])
    both = get_peft_model(model.get_base_model(), config, adapter_name="tuned")
    expected = served_loss(both)
    with torch.no_grad():
        ids, labels = row()["input_ids"][None], row()["labels"][None]
        embedded = both.get_input_embeddings()(ids)
        losses = [
            both(input_ids=ids, labels=labels).loss,
            both(ids, labels=labels).loss,
            both.get_base_model()(ids, None, None, None, None, labels).loss,
            both(inputs_embeds=embedded, labels=labels).loss,
        ]
    assert [float(loss) for loss in losses] == pytest.approx([expected] * 4, abs=1e-5)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model = build_routed("llama", "block", phases="prefill", prompt_tail=2)
    state, batch = state_of(model), {name: value[None] for name, value in row().items()}
    seen = []
    layer = model.get_base_model().model.layers[-1]
    hook = layer.register_forward_hook(lambda *given: seen.append(state.settings.in_full) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    hook.remove()
    assert seen[0] is not None and state.settings.in_full is None
    with (
        pytest.raises(ValueError, match="the input"),
        run_in_full(model, torch.ones(1, 3, dtype=torch.bool)),
    ):
        model(**batch)  # what a caller says counts
    assert state.settings.in_full is None
    base = model.unload()
    assert not base._forward_pre_hooks and not base._forward_hooks


def test_a_classifier_reads_the_end_of_a_text_in_full_in_training_too() -> None:
    base = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, num_labels=3, pad_token_id=0,
        )
    )  # fmt: skip
    fields: dict[str, Any] = {
        "phases": "prefill",
        "prompt_tail": 2,
        "selection": "threshold",
        "task_type": "SEQ_CLS",
    }
    model = get_depth_routed_model(base, DepthRouteConfig(layers="all", gate="none", **fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    ids, labels = tokens(4, 12) % 63 + 1, torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(input_ids=ids).logits, labels)
    assert float(model.train()(input_ids=ids, labels=labels).loss) == pytest.approx(
        float(expected), abs=1e-5
    )


@pytest.mark.parametrize("gate", ["mlp", "none"])
def test_a_compiled_model_has_the_loss_of_what_is_served(gate: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"phases": "prefill", "prompt_tail": 2, "selection": "threshold"}
    model = build_routed("llama", "block", gate=gate, **fields)
    expected = served_loss(model)
    compiled = torch.compile(model, backend="eager")
    batch = {name: value[None] for name, value in row().items()}
    with torch.no_grad():
        assert float(compiled(**batch).loss) == pytest.approx(expected, abs=1e-5)
    for whole in (build_routed("llama"), build_routed("llama", phases="prefill")):
        inputs = (
            batch
            if whole.peft_config["default"].phases == "all"
            else {"input_ids": batch["input_ids"]}
        )
        with torch.no_grad():
            torch.compile(whole, backend="eager", fullgraph=True)(**inputs, use_cache=False)
    arguments = {"torch_compile": True, "torch_compile_backend": "eager", "learning_rate": 0.0}
    arguments |= {"max_steps": 1, "per_device_train_batch_size": 1, "budget_weight": 0.0}
    trainer, _ = make_trainer(model.train(), [row()], tmp_path, cls=Trainer, **arguments)
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert step.get("loss_lm", step["loss"]) == pytest.approx(expected, abs=2e-3)
